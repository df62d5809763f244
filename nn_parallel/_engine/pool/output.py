"""What workers print, copied to the streams of this process."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from typing import Any

from .bars import Bars, Screen, is_drawn

CHUNKS_AT_A_TIME = 16
LINE_BYTES = 1 << 16  # a longer line is copied in parts


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time.

    On a terminal and in a notebook it is text, with the bars of all workers below. Any other stream gets the bytes as
    they are.
    """

    def __init__(self, fd: int, name: str, rank: int, *, has_prefix: bool) -> None:
        self.fd = fd
        self._name = name
        self._rank = rank
        prefix = f"[rank {rank}] "
        self._prefix = prefix.encode() if has_prefix else b""
        self._screen = Screen(prefix if has_prefix else "", bar_prefix=prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = b""  # that has not ended
        self._begins_line = True
        self.holds_some = False  # it has read what it has not copied
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        more = self._copy(flush)
        self.holds_some = bool(self._line) or not self._screen.is_empty
        return more

    def close(self) -> None:
        """Copy the rest; a bar stays as it is."""
        self.copy(flush=True)
        with contextlib.suppress(Exception):
            self._draw(self._stream, self._screen.end())
        os.close(self.fd)

    def _copy(self, flush: bool) -> bool:
        more = True
        read = bytearray()
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS_AT_A_TIME):  # the rest next time: others must not wait for an endless writer
                if not (chunk := os.read(self.fd, 1 << 16)):
                    more = False
                    break
                read += chunk
        flush = flush or not more
        stream = self._stream
        with contextlib.suppress(Exception):  # closed by the user: nobody to tell
            if is_drawn(stream):
                self._draw(stream, self._screen.print(self._decoder.decode(self._line + read, final=flush), flush))
                self._line = b""
            else:
                self._write(stream, bytes(read), flush)
        return more

    @property
    def _stream(self) -> Any:
        return getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream

    def _draw(self, stream: Any, text: str) -> None:
        _bars.print(stream, text, self._rank, self, self._screen.bars)

    def _write(self, stream: Any, read: bytes, flush: bool) -> None:
        """Write what has been read, but for a line that has not ended."""
        whole = self._line + read
        end = len(whole) if flush or len(whole) > LINE_BYTES else max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        done = whole[:end]
        self._line = whole[end:]
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
