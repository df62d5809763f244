"""The event loop of the supervisor: it waits for descriptors, for functions that other threads post, and for timers."""

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
from .memory_files import Descriptor

MAX_WAIT_S = 1e6  # the longest single wait; `epoll` takes at most about 24 days


class EventLoop:
    """Calls functions in one thread: functions that other threads post, and handlers of descriptors and timers."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._poll_at_once = functools.partial(self._epoll.poll, 0)
        self._spin = Spin()
        # These map each watched descriptor to the function to call when the descriptor is readable or writable.
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        # A `Queue` would deadlock if a signal handler or a finalizer calls `put` in the middle of another `put`.
        self._posted = SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]]()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []  # a heap of (time, number, function)
        self._timer_numbers = itertools.count()  # the numbers of the timers, which order timers with the same time
        # `post` makes this eventfd readable, to end a wait; None if the loop is closed. The eventfd is closed when no
        # thread refers to it any more. If it were closed earlier, a thread that is about to write to it could write to
        # another file, which has got the same number.
        wakeup = Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._wakeup: Descriptor | None = wakeup
        self.watch(wakeup.fd, functools.partial(self._wake_up, wakeup))

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Let the thread of the loop call ``call(*args)``. Signal handlers and finalizers may use this method, too."""
        try:
            self._posted.put((call, args))
        finally:  # if Ctrl-C comes just after `put`, the loop must still wake up
            wakeup = self._wakeup
            try:
                if wakeup is not None:
                    os.eventfd_write(wakeup.fd, 1)
            finally:
                del wakeup  # if Ctrl-C comes now, its traceback must not keep the eventfd open

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call ``call()`` after this time. Only the thread of the loop may use this method."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_numbers), call))

    def watch(self, fd: int, on_readable: Callable[[], object]) -> None:
        """Call ``on_readable`` whenever ``fd`` is readable, or its other end is closed."""
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def watch_for_room(self, fd: int, on_writable: Callable[[], object] | None) -> None:
        """Call ``on_writable`` whenever the watched descriptor ``fd`` is writable.

        The pool uses this while the buffer of a socket has no room for further messages. If ``on_writable`` is None,
        stop these calls.
        """
        had_writer = self._writers.pop(fd, None) is not None
        if on_writable is not None:
            self._writers[fd] = on_writable
        if fd in self._readers and had_writer != (on_writable is not None):
            self._epoll.modify(fd, select.EPOLLIN | (0 if had_writer else select.EPOLLOUT))

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor. This must happen before the descriptor is closed."""
        self._writers.pop(fd, None)
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run_once(self, deadline: float) -> float:
        """Wait for events, at most until ``deadline`` on the clock of `time.monotonic`, and handle them.

        Returns:
            The time at which this call began. All events before this time have been handled, even if this thread got no
            core for a while.
        """
        now = time.monotonic()
        if self._timers:
            deadline = min(deadline, self._timers[0][0])
        timeout_s = min(max(0.0, deadline - now), MAX_WAIT_S)
        for fd, events in self._spin.until(self._poll_at_once) or self._epoll.poll(timeout_s):
            # The handlers are looked up only now, because the handler before may have called `unwatch` for this `fd`.
            if events & ~select.EPOLLOUT and (read := self._readers.get(fd)):
                read()
            if events & select.EPOLLOUT and (write := self._writers.get(fd)):
                write()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        return now

    def run_posted(self) -> None:
        """Call the functions that have been posted by now."""
        for _ in range(self._posted.qsize()):
            try:
                call, args = self._posted.get_nowait()
            except Empty:  # after the end of the loop, other threads also call this method and empty the queue
                return
            call(*args)

    def close(self) -> None:
        """Stop watching descriptors. A function that is posted from now on is called only if `run_posted` is called."""
        self._epoll.close()
        self._readers.clear()  # breaks the reference cycle with the handlers, which would keep this object alive
        self._wakeup = None

    def _wake_up(self, wakeup: Descriptor) -> None:
        """Call the posted functions. What is posted from now on makes ``wakeup`` readable again."""
        with contextlib.suppress(BlockingIOError):  # it was not readable
            os.eventfd_read(wakeup.fd)
        self.run_posted()
