"""How those who wait for a pool hear of its tasks: users by a future, calls of the pool itself by a reply."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, NoReturn

from ...errors import ParallelError

logger = logging.getLogger("concurrent.futures")  # where the standard library tells of callbacks that raise
TAKEN_OVER_AFTER_S = 1.0


class _Lock:
    """The lock of a future, which is taken over if its owner does not release it within a second.

    Ctrl-C is raised in the main thread between any two instructions of Python code. Between taking a lock and entering
    the block of ``with``, or in `concurrent.futures.wait` before it, it leaves the lock taken for ever, and the pool's
    thread would wait for it when it completes the future. Python code cannot close that gap. But the standard library
    holds the lock for a few lines, in which it waits for nothing. Should the owner be in them after all, as in the
    handler of a signal that takes long, its release is that of the lock which it had.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[int, threading.Lock, float] | None = None  # by whom, which of the locks, since when

    def acquire(self) -> bool:
        """Wait until the lock is free."""
        began = time.monotonic()
        while True:
            lock = self._lock
            if lock.acquire(timeout=max(0.0, self._patience_s(began))):
                break
            if self._lock is lock and self._patience_s(began) <= 0:
                self._lock = threading.Lock()
        self._held = threading.get_ident(), lock, time.monotonic()
        return True

    def _patience_s(self, began: float) -> float:
        """Return how much longer its owner may have the lock, for which this thread has waited since ``began``.

        Ctrl-C in `concurrent.futures.wait` leaves the locks of many futures taken, all since the same time.
        """
        held = self._held
        return (began if held is None else held[2]) + TAKEN_OVER_AFTER_S - time.monotonic()

    def release(self) -> None:
        """Let others have the lock, if it is still this thread's."""
        held = self._held
        if held is not None and held[0] == threading.get_ident():
            self._held = None
            held[1].release()

    def _is_owned(self) -> bool:
        """Return whether this thread holds the lock. For `threading.Condition`."""
        return self._held is not None and self._held[0] == threading.get_ident()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Reply:
    """The result of a task for the one call that waits for it, which takes a tenth of the time of a future."""

    def __init__(self, thread: threading.Thread) -> None:
        """``thread`` completes the reply."""
        self._thread = thread
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_complete = False
        self._incomplete = threading.Lock()
        self._incomplete.acquire()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the result, and return it or raise the exception. It is given once.

        Raises:
            TimeoutError: there is none after so many seconds.
            ParallelError: called in the thread that completes it.
        """
        refuse_to_wait_in(self._thread)
        if not self._incomplete.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # it would live in a cycle with the traceback

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result or the exception, unless there is one."""
        if not self._is_complete:
            self._value = value
            self._error = error
            self._is_complete = True
            self._incomplete.release()


class Future(concurrent.futures.Future[Any]):
    """The standard library's future, which Ctrl-C cannot leave locked. A pool's thread completes it."""

    def __init__(self, thread: threading.Thread | None) -> None:
        """``thread`` completes the future; None: any."""
        super().__init__()
        self._condition = threading.Condition(_Lock())  # type: ignore[arg-type]
        self._thread = thread

    def result(self, timeout: float | None = None) -> Any:
        """As `concurrent.futures.Future.result`."""
        if not self.done():
            refuse_to_wait_in(self._thread)
        try:
            return super().result(timeout)
        finally:
            del self  # it would live in a cycle with the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `concurrent.futures.Future.exception`."""
        if not self.done():
            refuse_to_wait_in(self._thread)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """As `concurrent.futures.Future.add_done_callback`; in the pool's thread all that ``fn`` raises is logged."""

        def call(future: concurrent.futures.Future[Any]) -> None:
            try:
                fn(future)
            except Exception:
                raise  # the standard library logs it
            except BaseException:
                if threading.current_thread() is not self._thread:
                    raise
                logger.exception("exception calling callback for %r", future)

        super().add_done_callback(call)

    def begin(self) -> bool:
        """Say that the call begins; return whether it is wanted: not cancelled, nor completed by the user."""
        if self.done() and not self.cancelled():
            return False
        try:
            return self.set_running_or_notify_cancel()
        except RuntimeError:  # the user has just completed it
            return False

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result or the exception, unless there is one."""
        if not self.running() and (self.cancelled() or not self.done()):
            self.begin()  # tells those who wait for a cancelled one
        with contextlib.suppress(InvalidStateError):  # it has run out of time, or the user has completed it
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a future belongs to the process that made it: send its result() instead")


def refuse_to_wait_in(thread: threading.Thread | None) -> None:
    """Raise if this is ``thread``, which has to complete what is waited for, and calls callbacks."""
    if threading.current_thread() is thread:
        raise ParallelError(
            "A done-callback cannot wait for another call of its executor, whose answers arrive in the thread that "
            "runs the callback. Let the callback submit the call, and add a callback to that."
        )
