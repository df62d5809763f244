"""The event loop of a pool's thread: descriptors, functions that other threads post, and a deadline."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import select
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ..polling import Spin

MAX_WAIT_S = 1e6  # of one wait: `epoll` takes no more than some 24 days


class EventLoop:
    """Calls functions in one thread: those that other threads post, and those that watch descriptors."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._poll_at_once = functools.partial(self._epoll.poll, 0)
        self._spin = Spin()
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        self._posted = SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]]()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._timer_numbers = itertools.count()  # of two with the same time the first goes first
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch(self._wakeup, self._read_wakeup)

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have ``call(*args)`` called in the thread of the loop. Signal handlers and finalizers may do so, too."""
        try:
            self._posted.put((call, args))
        finally:  # also after Ctrl-C in between
            with contextlib.suppress(ValueError):  # the loop is closed
                os.eventfd_write(self._wakeup, 1)

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Have ``call()`` called after so many seconds. Only for the thread of the loop."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_numbers), call))

    def watch(self, fd: int, on_readable: Callable[[], object]) -> None:
        """Call ``on_readable`` whenever ``fd`` is readable, the end of its stream included."""
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def watch_for_room(self, fd: int, on_writable: Callable[[], object] | None) -> None:
        """Also call ``on_writable`` whenever a watched descriptor is writable; None: no longer."""
        had_one = self._writers.pop(fd, None) is not None
        if on_writable is not None:
            self._writers[fd] = on_writable
        if fd in self._readers and had_one != (on_writable is not None):
            self._epoll.modify(fd, select.EPOLLIN | (0 if had_one else select.EPOLLOUT))

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        self._writers.pop(fd, None)
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run_once(self, deadline: float) -> float:
        """Wait for something to do, at most until ``deadline`` of `time.monotonic`, and do it.

        Returns:
            A time at which all that had happened by then has been heard of, however late this thread was.
        """
        now = time.monotonic()
        if self._timers:
            deadline = min(deadline, self._timers[0][0])
        timeout_s = min(max(0.0, deadline - now), MAX_WAIT_S)
        for fd, events in self._spin.until(self._poll_at_once) or self._epoll.poll(timeout_s):
            # A call before this one may have forgotten the descriptor.
            if events & ~select.EPOLLOUT and (read := self._readers.get(fd)):
                read()
            if events & select.EPOLLOUT and (write := self._writers.get(fd)):
                write()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        return now

    def run_posted(self) -> None:
        """Call what has been posted by now."""
        for _ in range(self._posted.qsize()):
            try:
                call, args = self._posted.get_nowait()
            except Empty:  # once the loop is closed, more than one thread may do this
                return
            call(*args)

    def close(self) -> None:
        """Watch nothing any more. What is posted from now on is not called, but by `run_posted`."""
        self._epoll.close()
        self._readers.clear()  # they hold this object
        wakeup = self._wakeup
        self._wakeup = -1  # before: the number may soon be that of another file
        os.close(wakeup)

    def _read_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        self.run_posted()
