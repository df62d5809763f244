"""Objects through which threads wait for results: a `Future` for users, and a faster `Reply` for the pool itself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, NamedTuple, NoReturn

from ...errors import ParallelError
from ..interrupts import RLock

logger = logging.getLogger("concurrent.futures")  # the standard library logs exceptions of callbacks with this logger
TAKEN_OVER_AFTER_S = 1.0  # how long a thread may hold a `_Lock` before another thread takes it over


class _Owner(NamedTuple):
    """The thread that has taken a `_Lock`."""

    thread_id: int
    lock: threading.Lock  # the inner lock that the thread acquired
    since: float  # when the thread took the `_Lock`
    depth: int  # how often the thread has taken the `_Lock` without releasing it


class _Lock:
    """The lock of a future. If its owner does not release the lock within a second, a waiting thread takes it over.

    The class wraps a `threading.Lock`, the *inner lock*. To take over means to replace the inner lock by a new one.

    Python raises Ctrl-C in the main thread between any two instructions. If Ctrl-C comes between the taking of a lock
    and the ``try`` or ``with`` that releases it, as it can in `concurrent.futures.wait`, the lock stays taken for ever.
    The supervisor would wait for the lock when it completes the future, and the whole pool would hang. Python code
    cannot close this gap.

    But the standard library holds the lock of a future only for a few lines that do not wait. So if the lock is taken
    for a second, the owner has almost certainly been interrupted, and a waiting thread takes the lock over. The owner
    may be in these lines nevertheless, if a signal handler that takes long runs there. When this owner later releases
    the lock, the new inner lock stays taken.

    The lock is reentrant, because `concurrent.futures.wait` holds the locks of all futures while it calls ``exception``
    of the finished futures, and ``exception`` takes the lock of its future again. But a thread that first took the
    lock more than a second ago has probably been interrupted, and has left the lock taken. If such a thread takes the
    lock again, it replaces the inner lock, as any other thread would.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replacing = RLock()  # held to replace the inner lock, so that only one waiting thread does so
        self._owner: _Owner | None = None  # None while the lock is free

    def acquire(self) -> bool:
        """Take the lock. If its owner has not released it in time, take it over from the owner."""
        lock = self._lock
        began = time.monotonic()
        own = self._own()
        if own is not None and own.lock is lock and self._time_left_s(lock, began) > 0:
            self._owner = own._replace(depth=own.depth + 1)
            return True
        while True:
            if lock.acquire(timeout=max(0.0, self._time_left_s(lock, began))):
                if lock is self._lock:
                    break
                lock.release()  # another thread has replaced this inner lock while the present thread waited
            with self._replacing:
                if lock is self._lock and self._time_left_s(lock, began) <= 0:
                    self._lock = threading.Lock()
            if lock is not self._lock:
                lock = self._lock
                began = time.monotonic()
        self._owner = _Owner(threading.get_ident(), lock, since=time.monotonic(), depth=1)
        return True

    def _time_left_s(self, lock: threading.Lock, began: float) -> float:
        """Return how many more seconds the owner may hold the inner lock ``lock``, before a waiting thread replaces it.

        An owner may hold the lock for `TAKEN_OVER_AFTER_S`, which is one second. This time begins when the owner gets
        the lock, not when the present thread begins to wait. For example, Ctrl-C in `concurrent.futures.wait` can leave
        the locks of a hundred futures taken. A thread that needs these locks one after another waits up to a second for
        the first lock, and hardly at all for the others, because their time is over by then.

        ``began`` is the time at which the present thread began to wait. If the owner has not set `_owner` yet, or was
        interrupted before it could do so, the time of the owner is counted from ``began``.
        """
        owner = self._owner
        since = owner.since if owner is not None and owner.lock is lock else began
        return since + TAKEN_OVER_AFTER_S - time.monotonic()

    def release(self) -> None:
        """Release the lock, if the present thread still has it."""
        own = self._own()
        if own is None:
            return
        if own.depth > 1:
            self._owner = own._replace(depth=own.depth - 1)
        else:
            self._owner = None
            own.lock.release()

    def locked(self) -> bool:
        """Return whether a thread has the lock. Since Python 3.14, `threading.Condition` needs this method."""
        return self._lock.locked()

    def _is_owned(self) -> bool:
        """Return whether the present thread has the lock. `threading.Condition` calls this."""
        return self._own() is not None

    def _own(self) -> _Owner | None:
        """Return the record of the owner if the owner is the present thread, otherwise None."""
        owner = self._owner
        return owner if owner is not None and owner.thread_id == threading.get_ident() else None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Reply:
    """The result of a task, for one thread that waits for it once. This is ten times as fast as a future."""

    def __init__(self) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_complete = False
        self._incomplete = threading.Lock()  # taken until the reply is complete; `result` waits for this lock
        self._incomplete.acquire()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the reply, and return its value or raise its exception. This may be done only once.

        Raises:
            TimeoutError: the reply is not complete after ``timeout_s`` seconds.
        """
        if not self._incomplete.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # breaks the reference cycle error -> traceback -> this frame -> `self` -> error

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        """Set the value or the exception, unless the reply is complete already."""
        if not self._is_complete:
            self._value = value
            self._error = error
            self._is_complete = True
            self._incomplete.release()


class Future(concurrent.futures.Future[Any]):
    """A future of the standard library that stays usable if Ctrl-C interrupts a thread that has taken its lock.

    The lock is a `_Lock`, which another thread takes over in this case.
    """

    def __init__(self, thread: threading.Thread | None) -> None:
        """Make a future.

        ``thread`` is the supervisor of the pool, the thread that completes the future. If ``thread`` is None, any
        thread may complete the future.
        """
        super().__init__()
        self._condition = threading.Condition(_Lock())  # type: ignore[arg-type]
        self._thread = thread

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, as `concurrent.futures.Future.result`.

        Raises:
            ParallelError: a done-callback would have to wait for the result; see `refuse_to_wait_in`.
        """
        if not self.done():
            refuse_to_wait_in(self._thread)
        try:
            return super().result(timeout)
        finally:
            del self  # breaks the reference cycle error -> traceback -> this frame -> `self` -> error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception, as `concurrent.futures.Future.exception`.

        Raises:
            ParallelError: a done-callback would have to wait for the exception; see `refuse_to_wait_in`.
        """
        if not self.done():
            refuse_to_wait_in(self._thread)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Add a callback, as `concurrent.futures.Future.add_done_callback`.

        If the callback raises any exception in the supervisor, even `SystemExit`, the exception is only logged, because
        it must not end the pool.
        """

        def call(future: concurrent.futures.Future[Any]) -> None:
            try:
                fn(future)
            except Exception:
                raise  # the standard library logs an `Exception` itself
            except BaseException:
                if threading.current_thread() is not self._thread:
                    raise
                logger.exception("exception calling callback for %r", future)

        super().add_done_callback(call)

    def begin(self) -> bool:
        """Record that the call begins.

        Return False if the call must not begin, because the future was cancelled or completed.
        """
        if self.done() and not self.cancelled():
            return False
        try:
            return self.set_running_or_notify_cancel()
        except RuntimeError:  # the user has completed the future since the check above
            return False

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result or the exception, unless the future is complete already."""
        if not self.running() and (self.cancelled() or not self.done()):
            self.begin()  # wakes threads in `concurrent.futures.wait` if the future was cancelled
        with contextlib.suppress(InvalidStateError):  # the call has timed out already, or the user has set a result
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a future works only in the process that made it: send its result() instead")


def refuse_to_wait_in(thread: threading.Thread | None) -> None:
    """Raise `ParallelError` if the present thread is ``thread``, the only thread that can set the awaited result.

    Otherwise ``thread`` would wait for itself. Such a wait happens in a done-callback of a future, because ``thread``
    calls the done-callbacks.
    """
    if threading.current_thread() is thread:
        raise ParallelError(
            "A done-callback cannot wait for another call of its executor, because the thread that runs the callback "
            "also receives the results of all calls. Let the callback submit the call, and add a callback to its "
            "future."
        )
