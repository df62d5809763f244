"""What a pool is asked to do: one task for one worker, or one for all of them, or to have another size."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, InvalidStateError
from typing import Any, NamedTuple

import torch

from ..errors import ExecutorClosedError, RankError, TransferError, lost_connection, rank_error
from .futures import Callbacks, Future
from .packing import PackedCall
from .worker import CANCELLED, FAILED, SUCCEEDED


class Single:
    """One task for whichever worker is free first."""

    def __init__(self, call: PackedCall, callbacks: Callbacks) -> None:
        self.call, self.future = call, Future(callbacks)

    def begins(self) -> bool:
        """Whether it is still wanted; from here on it cannot be cancelled."""
        return self.future.set_running_or_notify_cancel()

    def end(self, rank: int, outcome: int, value: Any) -> None:
        """Its worker has answered, or is gone."""
        if outcome == CANCELLED:
            value = _closed_while_running(self.call)
        with contextlib.suppress(InvalidStateError):  # it has run out of time, or the user has set it
            self.future.set_result(value) if outcome == SUCCEEDED else self.future.set_exception(value)

    def give_up(self, error: Exception) -> None:
        """End it with ``error``, wherever it is, if it has not ended."""
        if self.future.running() or ((self.future.cancelled() or not self.future.done()) and self.begins()):
            self.end(0, FAILED, error)

    def drop(self) -> None:
        """It has not begun, and will not."""
        if self.future.cancel():
            self.begins()  # tells those who wait for it


class Mapped:
    """The calls of one map: each for whichever worker is free first, the results in their order."""

    def __init__(self, timeout_s: float | None) -> None:
        self.is_wanted = True
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._items = deque[Item | TransferError]()
        self._awaited: Item | None = None
        self._ended = threading.Lock()  # released when that is over: a semaphore which an interrupt leaves whole
        self._ended.acquire()

    def add(self, call: PackedCall) -> Item:
        """The next item."""
        item = Item(self, call)
        self._items.append(item)
        return item

    def add_unsent(self, error: TransferError) -> None:
        """The next item, which cannot be sent."""
        self._items.append(error)

    def results(self, lead: Callable[[Callable[[], bool], float | None], None]) -> Generator[Any, None, None]:
        """The results, or the first exception; what has not begun when nobody takes them any more, never does.

        ``lead`` reads answers until one has arrived, or a deadline has, if nobody else does.
        """
        try:
            while self._items:
                item = self._items.popleft()
                if isinstance(item, TransferError):
                    raise item
                if not item.is_over():
                    lead(item.is_over, self._deadline)
                yield self._result(item)
        finally:
            self.is_wanted = False

    def ended(self, item: Item) -> None:
        if self._awaited is item:
            with contextlib.suppress(RuntimeError):  # it is released already, for one that nobody had to wait for
                self._ended.release()

    def _result(self, item: Item) -> Any:
        self._awaited = item
        while item.outcome is None:
            left = threading.TIMEOUT_MAX if self._deadline is None else self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._ended.acquire(timeout=min(left, threading.TIMEOUT_MAX))
        value, item.value = item.value, None  # from here on the caller's alone
        if item.outcome == SUCCEEDED:
            return value
        try:
            raise value
        finally:
            del value  # it would live in a cycle with its traceback


class Item:
    """One call of a map: like `Single`, and without all that a future costs."""

    __slots__ = ("_mapped", "call", "outcome", "value")

    def __init__(self, mapped: Mapped, call: PackedCall) -> None:
        self._mapped, self.call = mapped, call
        self.outcome: int | None = None
        self.value: Any = None

    def is_over(self) -> bool:
        return self.outcome is not None

    def begins(self) -> bool:
        """Whether it is still wanted."""
        return self._mapped.is_wanted

    def end(self, rank: int, outcome: int, value: Any) -> None:
        """Its worker has answered, or is gone."""
        if self.outcome is None:
            self.value = _closed_while_running(self.call) if outcome == CANCELLED else value
            self.outcome = outcome
            self.call.let_go()  # the results may be taken much later
            self._mapped.ended(self)

    def give_up(self, error: Exception) -> None:
        """End it with ``error``, wherever it is."""
        self.end(0, FAILED, error)

    def drop(self) -> None:
        """It has not begun, and will not."""
        self.end(0, FAILED, CancelledError())


class Run:
    """One task for every worker; over when each has answered or is gone."""

    def __init__(self, call: PackedCall) -> None:
        self.call = call
        self.failures: dict[int, Exception] = {}
        self._results: list[Any] = []  # by rank
        self._missing: set[int] | None = None  # until it begins
        self._is_cut_off = False  # on some rank, with no failure that would tell why
        self._error: Exception | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def is_over(self) -> bool:
        """Whether `result` would not wait."""
        return not self._over.locked()

    def begin(self, world_size: int) -> None:
        self._results, self._missing = [None] * world_size, set(range(world_size))

    def end(self, rank: int, outcome: int, value: Any) -> None:
        """The worker of ``rank`` has answered, or is gone."""
        if outcome == SUCCEEDED:
            self._results[rank] = value
        elif isinstance(value, RankError):  # what a rank knows of others' failures is theirs
            for other, failure in value.failures.items():
                self.failures.setdefault(other, failure)
        elif outcome == CANCELLED:
            self._is_cut_off = True
        elif rank not in self.failures or lost_connection(self.failures[rank]):
            self.failures[rank] = value
        if self._missing:
            self._missing.discard(rank)
            if not self._missing:
                self._has_ended()

    def give_up(self, error: Exception) -> None:
        """End it with ``error``, whatever the workers still say."""
        self._error = self._error or error
        if self._missing is None or self._missing:
            self._missing = set()
            self._has_ended()

    def drop(self) -> None:
        """It has not begun, and will not."""
        self.give_up(ExecutorClosedError("The executor was shut down before the call began."))

    def _has_ended(self) -> None:
        with contextlib.suppress(RuntimeError):  # two threads have ended it: the last answer came as its time was over
            self._over.release()

    def result(self) -> list[Any]:
        """Wait for the end; the results in rank order, or what went wrong."""
        self._over.acquire()
        if self._error is not None:
            raise self._error
        if self.failures:
            raise rank_error(self.call.name, len(self._results), self.failures)
        if self._is_cut_off:
            raise _closed_while_running(self.call)
        return self._results


class SetUp(NamedTuple):
    """The initializer: the first task of each worker."""

    call: PackedCall


class Resize:
    """Another number of workers, from when all jobs before it are over."""

    def __init__(self, devices: list[torch.device], callbacks: Callbacks) -> None:
        self.devices, self.over = devices, Future(callbacks)

    def give_up(self, error: Exception) -> None:
        self.over.set_exception(error)

    def drop(self) -> None:
        self.give_up(ExecutorClosedError("The executor was shut down before it was resized."))


def _closed_while_running(call: PackedCall) -> ExecutorClosedError:
    return ExecutorClosedError(f"The executor was shut down while {call.name} ran.")


Waiting = Single | Item | Run  # what may wait for workers
Job = Waiting | SetUp  # what a worker does
