"""Waiting for many descriptors at once, for a deadline, and for whoever wants to be heard."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable


class Poller:
    """Calls a reader for each descriptor that has something to read; `wake` ends the wait from any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], bool]] = {}
        self._guard = threading.RLock()  # the collector may call `wake` in a thread that is just in it
        self._wakeup: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch(self._wakeup, self._woken)

    def watch(self, fd: int, read: Callable[[], bool]) -> None:
        """Call ``read`` whenever ``fd`` is readable, until it returns False."""
        self._readers[fd] = read
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wait(self, deadline: float | None) -> None:
        """Wait until something was read, or `wake` was called, or until ``deadline`` of `time.monotonic`."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) + 0.001
        for fd, _ in self._epoll.poll(timeout):
            if (read := self._readers.get(fd)) and not read():
                self.unwatch(fd)

    def wake(self) -> None:
        with self._guard:  # nobody may write to a number that is another file's by then
            if self._wakeup is not None:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        with self._guard:
            if self._wakeup is not None:
                os.close(self._wakeup)
                self._epoll.close()
            self._wakeup = None

    def _woken(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup or 0)
        return True
