"""Waiting for many descriptors at once, for a deadline, and for whoever wants to be heard.

One thread does so all the time. Another one that waits for an answer may *lead* meanwhile: it reads the answers itself,
which spares it the way through the other thread (the leader/followers pattern of Schmidt and others, 2000).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

from ..polling import Spin

STAND_BACK_S = 5e-4
MAX_WAIT_S = 1e6  # that one wait may last: `epoll` takes no more than some 24 days
AT_ONCE = 64  # answers, or outputs; `epoll` makes room for 1 023 if it is told nothing, which takes longer than to look


class Poller:
    """Calls a reader for each descriptor that has something to read; `wake` ends the waits from any thread."""

    def __init__(self) -> None:
        self._all, self._answers = select.epoll(), select.epoll()
        self._readers: dict[int, Callable[[], bool]] = {}
        self._guard = threading.RLock()  # the collector may call `wake` in a thread that is just in it
        self._wakeups = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        self.watch(self._wakeups[0], lambda: self._woken(0))
        self.watch(self._wakeups[1], lambda: self._woken(1), is_answer=True)
        self._reading = threading.Lock()  # held by the thread that reads answers,
        self._reader = 0  # whose identifier this is
        self._is_reclaimed = False
        self._is_masked = False  # answers do not wake the thread that always waits
        self._spin, self._arrived = Spin(), functools.partial(self._answers.poll, 0, AT_ONCE)
        self._looked_at = 0.0  # when a thread has called `read_answers`
        self.watch(self._answers.fileno(), self._stand_in)

    def watch(self, fd: int, read: Callable[[], bool], *, is_answer: bool = False) -> None:
        """Call ``read`` whenever ``fd`` is readable, until it returns False."""
        self._readers[fd] = read
        (self._answers if is_answer else self._all).register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            for epoll in (self._all, self._answers):
                with contextlib.suppress(FileNotFoundError):  # it is in the other one
                    epoll.unregister(fd)

    def wait(self, deadline: float) -> None:
        """Wait until there is something to read, or `wake` was called, or until ``deadline`` of `time.monotonic`."""
        self._call_readers(self._all.poll(_seconds_to(deadline)))

    def lead(self, is_over: Callable[[], bool], deadline: float, begin: Callable[[], None] | None) -> None:
        """Read answers in this thread, until ``is_over()`` or ``deadline``, or until the other one needs to.

        Before that it calls ``begin``: what that asks for is answered here, and wakes nobody else. Reads nothing if
        another thread does. `wake` has ``is_over`` looked at again.
        """
        if self._reading.acquire(blocking=False):
            try:
                self._reader = threading.get_ident()
                if self._wakeups:
                    self._read_until(is_over, deadline, begin)
                    return
            finally:
                self._release()
        if begin is not None:
            begin()

    def _read_until(self, is_over: Callable[[], bool], deadline: float, begin: Callable[[], None] | None) -> None:
        self._mask()
        if begin is not None:
            begin()
        while not (is_over() or self._is_reclaimed or time.monotonic() >= deadline):
            self._call_readers(self._spin.until(self._arrived) or self._answers.poll(_seconds_to(deadline)))

    def _release(self) -> None:
        """Another thread may read answers."""
        self._reader = 0
        self._reading.release()
        if self._is_masked:
            self._unmask()

    def _mask(self) -> None:
        self._all.modify(self._answers, 0)  # cheaper than to unregister one `epoll` from another
        self._is_masked = True

    def _unmask(self) -> None:
        self._is_masked = False
        with self._guard:
            if self._wakeups:  # else it is closed
                self._all.modify(self._answers, select.EPOLLIN)

    @contextlib.contextmanager
    def reclaimed(self) -> Iterator[None]:
        """No other thread reads answers meanwhile."""
        self._is_reclaimed = True
        self.wake()
        with self._reading:
            self._is_reclaimed = False
            yield

    def wake(self) -> None:
        with self._guard:  # nobody may write to a number that is another file's by then
            for wakeup in self._wakeups:
                os.eventfd_write(wakeup, 1)

    def close(self) -> None:
        with self.reclaimed(), self._guard:
            for wakeup in self._wakeups:
                os.close(wakeup)
            self._wakeups.clear()
            self._all.close()
            self._answers.close()

    def read_answers(self) -> None:
        """Read the answers that are there, if no other thread is about to: for one that submits, time and again."""
        self._looked_at = time.monotonic()
        self._read_at_once()

    def is_reading(self) -> bool:
        """Whether it is this thread that reads answers: the collector, or a user's stream, may run code in it."""
        return self._reader == threading.get_ident()

    def _stand_in(self) -> bool:
        """Read them in the thread that always waits, unless one that submits reads them time and again.

        That one computes meanwhile: it would let go of the interpreter after 5 ms only, and this one needs it after
        each system call, of which an answer takes several. While another thread reads, answers do not wake this one.
        """
        left = self._looked_at + STAND_BACK_S - time.monotonic()
        if left > 0:
            time.sleep(left)
        elif not self._read_at_once():
            self._mask()  # until the thread that reads has read them
            if not self._reading.locked():  # and does not see that any more
                self._unmask()
        return True

    def _read_at_once(self) -> bool:
        """Whether no other thread reads just now."""
        if self._reading.acquire(blocking=False):
            try:
                self._reader = threading.get_ident()
                if self._wakeups:
                    self._call_readers(self._arrived())
            finally:
                self._release()
            return True
        return False

    def _call_readers(self, ready: list[tuple[int, int]]) -> None:
        for fd, _ in ready:
            if (read := self._readers.get(fd)) and not read():
                self.unwatch(fd)

    def _woken(self, index: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeups[index])
        return True


def _seconds_to(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()) + 0.001, MAX_WAIT_S)
