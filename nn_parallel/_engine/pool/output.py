"""What workers print, copied to the streams of this process."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import threading

from .bars import Bars, Screen

CHUNKS_AT_A_TIME = 16


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time."""

    def __init__(self, fd: int, name: str, rank: int, *, has_prefix: bool) -> None:
        self.fd, self._name, self._rank = fd, name, rank
        prefix = f"[rank {rank}] "
        self._screen = Screen(prefix if has_prefix else "", bar_prefix=prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._copying = threading.Lock()
        self.holds_some = False  # it may have read what it has not copied
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        with self._copying:
            self.holds_some = True
            more = self._copy(flush)
            self.holds_some = not self._screen.is_empty
            return more

    def close(self) -> None:
        """Copy the rest; a bar stays as it is."""
        self.copy(flush=True)
        with self._copying:
            self._show(self._screen.end())
        os.close(self.fd)

    def _copy(self, flush: bool) -> bool:
        more, read = True, bytearray()
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS_AT_A_TIME):  # the rest next time: others must not wait for an endless writer
                if not (chunk := os.read(self.fd, 1 << 16)):
                    more = False
                    break
                read += chunk
        flush = flush or not more
        self._show(self._screen.print(self._decoder.decode(read, final=flush), flush))
        return more

    def _show(self, text: str) -> None:
        stream = getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream
        with contextlib.suppress(Exception):  # closed by the user: nobody to tell
            _bars.print(stream, text, self._rank, self, self._screen.bars)


_bars = Bars()
