"""The progress bars that workers draw, such as those of tqdm.

A bar is a line that a program overwrites again and again, by means of carriage returns. Several workers cannot do that
on one terminal, because each would overwrite the bars of the others. So each stream of a worker has a `Screen`, which
interprets the printed text as a terminal does, and separates bars from finished lines. `Bars` then prints the finished
lines, and draws the bars of all workers below them, one bar a line.
"""

from __future__ import annotations

import re
import shutil
import threading
from dataclasses import dataclass
from typing import IO, Any

MOVES = re.compile(r"(\n|\r|\x1b\[A)")  # the cursor movements that tqdm uses: down, to the start of the line, up
CLEAR_BELOW = "\x1b[J"  # makes a terminal delete everything after the cursor


@dataclass
class Line:
    """A line of a `Screen`."""

    text: str = ""
    is_rewritten: bool = False  # True after a carriage return: the next printed text then replaces `text`
    is_bar: bool = False  # True once text was printed after a carriage return; the line is drawn as a bar


class Screen:
    """The lines that a worker has printed and may still change: bars, and the line that has not ended."""

    def __init__(self, prefix: str, bar_prefix: str) -> None:
        """Begin each line with ``prefix``, and each bar with ``bar_prefix``."""
        self._prefix = prefix
        self._bar_prefix = bar_prefix
        self._lines = [Line()]
        self._at = 0  # the index of the line with the cursor
        self._before = ""  # the text or cursor movement that was printed last

    @property
    def bars(self) -> list[str]:
        return [self._bar_prefix + line.text for line in self._lines if line.is_bar and line.text.strip()]

    @property
    def is_empty(self) -> bool:
        return not any(line.text for line in self._lines)

    def print(self, text: str, flush: bool) -> str:
        """Interpret printed text. Return the text of all lines that cannot change any more, and forget these lines.

        A plain line (a line that is not a bar) cannot change once it has ended. The lines above such a line cannot
        change either, not even bars. This object keeps the bars below the last such line, because the worker may redraw
        them. With ``flush``, this method returns all lines above the cursor, and also the line with the cursor if that
        line is plain.
        """
        for part in filter(None, MOVES.split(text)):
            line = self._lines[self._at]
            before = self._before
            self._before = part
            if part == "\n":
                self._at += 1
                self._lines += [Line()] if self._at == len(self._lines) else []
            elif part == "\x1b[A":
                self._at = max(0, self._at - 1)
            elif part == "\r" and before and not before.strip(" "):  # tqdm has cleared a bar with spaces
                self._lines[self._at] = Line()
            elif part == "\r":
                line.is_rewritten = True
            elif line.is_rewritten:
                line.text = part
                line.is_rewritten = False
                line.is_bar = True
            else:
                line.text += part
        end = self._at if flush else 0
        for index, line in enumerate(self._lines[: self._at + 1]):
            if line.text and not line.is_bar:
                end = max(end, min(index + 1, self._at))
        done = "".join(map(self._final_text, self._lines[:end]))
        self._lines = self._lines[end:]
        self._at = self._at - end
        last = self._lines[0]
        if flush and last.text and not last.is_bar:
            done += self._prefix + last.text
            self._lines[0] = Line()
        return done

    def end(self) -> str:
        """Return the text of the remaining lines, and forget them."""
        lines = self._lines
        self._lines = [Line()]
        self._at = 0
        return "".join(self._final_text(line) for line in lines if line.text)

    def _final_text(self, line: Line) -> str:
        if not line.is_bar:
            return f"{self._prefix}{line.text}\n"
        return f"{self._bar_prefix}{line.text.rstrip()}\n" if line.text.strip() else ""  # a cleared bar leaves no line


def is_drawn(stream: Any) -> bool:
    """Return whether bars can be redrawn on a stream: it is a terminal, or the output of a notebook cell."""
    return _is_in_notebook(stream) or (hasattr(stream, "isatty") and stream.isatty())


def _is_in_notebook(stream: Any) -> bool:
    return type(stream).__module__.startswith("ipykernel")


class Bars:
    """The bars of all workers, on a terminal or under the cell of a notebook."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shown: dict[tuple[int, object], list[str]] = {}  # the bars that are visible now, by rank and `Output`
        self._under_cell: Any = None  # IPython's handle to redraw the bars under a cell; None if there are no bars

    def print(self, stream: IO[str], text: str, rank: int, owner: object, bars: list[str]) -> None:
        """Print ``text``, and draw the bars of all workers below it.

        Args:
            stream: a terminal or a notebook, see `is_drawn`.
            text: whole lines, or the beginning of a line.
            rank: the rank of the worker that has printed the text.
            owner: the `Output` of the worker.
            bars: the present bars of ``owner``.
        """
        if not (bars or self._shown):
            if text:
                stream.write(text)
                stream.flush()
            return
        with self._lock:
            in_notebook = _is_in_notebook(stream)
            had_some = bool(self._shown)
            if bars:
                self._shown[rank, owner] = bars
            else:
                self._shown.pop((rank, owner), None)
            shown = [bar for key in sorted(self._shown, key=lambda key: key[0]) for bar in self._shown[key]]
            if in_notebook and (shown or had_some):
                self._show_under_cell("\n".join(shown))
            elif shown or had_some:
                text = CLEAR_BELOW + text + _text_of_bars(shown, is_at_line_start=text[-1:] in ("", "\n"))
            if text:
                stream.write(text)
                stream.flush()

    def _show_under_cell(self, text: str) -> None:
        from IPython.display import display

        if self._under_cell is None:
            self._under_cell = display({"text/plain": text}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._under_cell.update({"text/plain": text}, raw=True)
        if not text:
            self._under_cell = None


def _text_of_bars(bars: list[str], is_at_line_start: bool) -> str:
    """Return the text that draws the bars, and then moves the cursor back, so that the next text replaces the bars."""
    # A longer bar would wrap and take two rows of the terminal, and the cursor would move up by too few rows.
    width = shutil.get_terminal_size().columns - 1
    lines = "\n".join(bar[:width] for bar in bars)
    up = f"\r\x1b[{len(bars) - 1}A" if len(bars) > 1 else "\r"
    return ("" if is_at_line_start else "\n") + lines + up if bars else ""
