"""Lines that workers draw again and again, as tqdm does its bars: one below the other, under what has been printed."""

from __future__ import annotations

import re
import shutil
import threading
from dataclasses import dataclass
from typing import IO, Any

MOVES = re.compile(r"(\n|\r|\x1b\[A)")  # down, to the begin of the line, up: all that tqdm uses
CLEAR_BELOW = "\x1b[J"


@dataclass
class Line:
    """A line of a screen."""

    text: str = ""
    is_rewritten: bool = False  # the next text replaces this one
    is_bar: bool = False  # some text has replaced what was there


class Screen:
    """The lines that a worker has printed and may still change: bars, and a line that has not ended."""

    def __init__(self, prefix: str, bar_prefix: str) -> None:
        """Begin each line with ``prefix``, and each bar with ``bar_prefix``."""
        self._prefix = prefix
        self._bar_prefix = bar_prefix
        self._lines = [Line()]
        self._at = 0
        self._before = ""  # the part that was printed last

    @property
    def bars(self) -> list[str]:
        return [self._bar_prefix + line.text for line in self._lines if line.is_bar and line.text.strip()]

    @property
    def is_empty(self) -> bool:
        return not any(line.text for line in self._lines)

    def print(self, text: str, flush: bool) -> str:
        """Take what has been printed; return the lines that go above the bars, and will not change any more.

        These are all lines above one that is no bar. Bars alone may be drawn again, but with ``flush`` those that have
        ended are returned; a line that has not ended is returned then, too.
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
            elif part == "\r" and before and not before.strip(" "):  # a bar has been cleared, and is gone
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
        done = "".join(map(self._ended, self._lines[:end]))
        self._lines = self._lines[end:]
        self._at = self._at - end
        last = self._lines[0]
        if flush and last.text and not last.is_bar:
            done += self._prefix + last.text
            self._lines[0] = Line()
        return done

    def end(self) -> str:
        """All that is left."""
        lines = self._lines
        self._lines = [Line()]
        self._at = 0
        return "".join(self._ended(line) for line in lines if line.text)

    def _ended(self, line: Line) -> str:
        if not line.is_bar:
            return f"{self._prefix}{line.text}\n"
        return f"{self._bar_prefix}{line.text.rstrip()}\n" if line.text.strip() else ""  # it has been cleared


def is_drawn(stream: Any) -> bool:
    """Return whether lines can be drawn again on a stream: on a terminal, or under the cell of a notebook."""
    return _is_in_notebook(stream) or (hasattr(stream, "isatty") and stream.isatty())


def _is_in_notebook(stream: Any) -> bool:
    return type(stream).__module__.startswith("ipykernel")


class Bars:
    """Shows the bars of all workers: on a terminal, or under the cell of a notebook."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of_ranks: dict[tuple[int, object], list[str]] = {}
        self._under_cell: Any = None

    def print(self, stream: IO[str], text: str, rank: int, owner: object, bars: list[str]) -> None:
        """Print ``text``, and under it all bars, with those of ``owner`` as they are now. See `is_drawn`."""
        if not (bars or self._of_ranks):
            if text:
                stream.write(text)
                stream.flush()
            return
        with self._lock:
            in_notebook = _is_in_notebook(stream)
            had_some = bool(self._of_ranks)
            if bars:
                self._of_ranks[rank, owner] = bars
            else:
                self._of_ranks.pop((rank, owner), None)
            shown = [bar for key in sorted(self._of_ranks, key=lambda key: key[0]) for bar in self._of_ranks[key]]
            if in_notebook and (shown or had_some):
                self._show_under_cell("\n".join(shown))
            elif shown or had_some:
                text = CLEAR_BELOW + text + _drawn(shown, is_at_begin=text[-1:] in ("", "\n"))
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


def _drawn(bars: list[str], is_at_begin: bool) -> str:
    """Return the bars below what has been printed; the cursor ends where they begin, for whoever prints next."""
    width = shutil.get_terminal_size().columns - 1  # a longer line would take two
    lines = "\n".join(bar[:width] for bar in bars)
    up = f"\r\x1b[{len(bars) - 1}A" if len(bars) > 1 else "\r"
    return ("" if is_at_begin else "\n") + lines + up if bars else ""
