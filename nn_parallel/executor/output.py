"""What workers print, copied to the streams of this process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import IO

CHUNKS_AT_A_TIME = 16


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time."""

    def __init__(self, fd: int, name: str, prefix: str) -> None:
        self.fd, self._name, self._prefix = fd, name, prefix
        self._unfinished = b""  # part of a line
        self._copying = threading.Lock()
        self.holds_some = False  # it may have read what it has not copied
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        with self._copying:
            self.holds_some = True
            more = self._copy(flush)
            self.holds_some = bool(self._unfinished)
            return more

    def _copy(self, flush: bool) -> bool:
        more = True
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS_AT_A_TIME):  # the rest next time: others must not wait for an endless writer
                if not (chunk := os.read(self.fd, 1 << 16)):
                    more = False
                    break
                self._unfinished += chunk
        end = len(self._unfinished)
        if more and not flush:
            end = max(self._unfinished.rfind(b"\n"), self._unfinished.rfind(b"\r")) + 1
        text, self._unfinished = self._unfinished[:end].decode(errors="replace"), self._unfinished[end:]
        if text:
            if self._prefix:
                text = "".join(f"{self._prefix}{line}" for line in text.splitlines(keepends=True))
            stream: IO[str] = getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream
            with contextlib.suppress(Exception):  # closed by the user: nobody to tell
                stream.write(text)
                stream.flush()
        return more
