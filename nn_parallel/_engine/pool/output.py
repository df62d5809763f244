"""The output of workers, copied to the standard streams of this process."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from typing import Any

from .bars import Bars, Screen, is_drawn

CHUNKS_AT_A_TIME = 16  # how many chunks `Output.copy` reads at most in one call
LINE_BYTES = 1 << 16  # a longer line is copied in parts


class Output:
    """Copies one of the output streams of a worker to the stream of the same name of this process.

    Whole lines are copied, so that lines of several workers are not mixed. On a terminal and in a notebook, progress
    bars are drawn below the lines. To any other stream, such as a file, bars are written with their carriage returns.
    """

    def __init__(self, fd: int, name: str, rank: int, *, has_prefix: bool) -> None:
        """Prepare to copy the text that arrives on a pipe.

        Args:
            fd: the reading end of the pipe, which `close` closes.
            name: ``"stdout"`` or ``"stderr"``.
            rank: the rank of the worker.
            has_prefix: if True, each copied line begins with the rank.
        """
        self.fd = fd
        self._name = name
        self._rank = rank
        prefix = f"[rank {rank}] "
        self._prefix = prefix.encode() if has_prefix else b""
        self._screen = Screen(prefix if has_prefix else "", bar_prefix=prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = b""  # the line that has been read but has not ended
        self._begins_line = True  # True if the next byte begins a line, so that the prefix goes before it
        self.holds_some = False  # True while text that was read is not copied yet, such as a line that has not ended
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy the lines that have arrived. Return False at the end of the stream.

        With ``flush``, also copy a line that has not ended.
        """
        has_more = self._copy(flush)
        self.holds_some = bool(self._line) or not self._screen.is_empty
        return has_more

    def close(self) -> None:
        """Copy the rest of the stream, and close the pipe. Bars remain visible as they were last drawn."""
        self.copy(flush=True)
        with contextlib.suppress(Exception):
            self._draw(self._stream, self._screen.end())
        os.close(self.fd)

    def _copy(self, flush: bool) -> bool:
        """Copy the lines that have arrived. Return False at the end of the stream.

        One call reads at most `CHUNKS_AT_A_TIME` chunks. If ``flush`` is true, it copies an unfinished last line too.
        """
        has_more = True
        read = bytearray()
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS_AT_A_TIME):  # otherwise a worker that prints without end would block the others
                if not (chunk := os.read(self.fd, 1 << 16)):
                    has_more = False
                    break
                read += chunk
        flush = flush or not has_more
        stream = self._stream
        with contextlib.suppress(Exception):  # the user may have closed the stream, and then no error can be shown
            if is_drawn(stream):
                self._draw(stream, self._screen.print(self._decoder.decode(self._line + read, final=flush), flush))
                self._line = b""
            else:
                self._write(stream, bytes(read), flush)
        return has_more

    @property
    def _stream(self) -> Any:
        """The stream of this process. It is looked up each time, because notebooks and users replace it."""
        return getattr(sys, self._name)

    def _draw(self, stream: Any, text: str) -> None:
        """Print text on a terminal or in a notebook, with the bars of all workers below it."""
        _bars.print(stream, text, self._rank, self, self._screen.bars)

    def _write(self, stream: Any, read: bytes, flush: bool) -> None:
        """Write the bytes ``read`` to a stream on which no bars are drawn, such as a file.

        The last line is kept until its end arrives, unless ``flush`` is true or more than `LINE_BYTES` are unwritten.
        A carriage return begins a line, so that it stays with the bar that follows it.
        """
        unwritten = self._line + read
        line_end = max(unwritten.rfind(b"\n") + 1, unwritten.rfind(b"\r"))
        end = len(unwritten) if flush or len(unwritten) > LINE_BYTES else line_end
        done = unwritten[:end]
        self._line = unwritten[end:]
        if not done:
            return
        if self._prefix:
            text = re.sub(rb"\n(?!\Z)", b"\n" + self._prefix, done)
            if self._begins_line:
                text = self._prefix + text
            self._begins_line = done.endswith(b"\n")
            done = text
        if hasattr(stream, "buffer"):
            stream.flush()
            stream.buffer.write(done)
        else:
            stream.write(self._decoder.decode(done, final=flush))
        stream.flush()


_bars = Bars()
