"""The tasks of a pool: a call on one worker, on all of them, or on each item; another number of workers.

A task belongs to the pool's thread, which begins and ends it. Whoever has asked for it waits on its future or reply.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch

from ...errors import ExecutorClosedError, ParallelError, RankError, TransferError
from ..by_value.packer import PackedCall
from ..failures import lost_connection, rank_error, set_cause, summary
from .channel import Received
from .futures import Future, Reply
from .messages import ALONE, Answer, Outcome, Ranks


class Task:
    """Something that is done by workers. It is over when each has answered it, or has exited."""

    ranks = ALONE  # of which the workers are

    def __init__(self, call: PackedCall) -> None:
        self.call = call

    @property
    def calls(self) -> Sequence[bytes]:
        """The arguments of the calls, where the workers keep the function."""
        return () if self.call.arguments is None else (self.call.arguments,)

    def begin(self) -> bool:
        """Return whether the task is still wanted."""
        return True

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """Take the answer of the worker of ``rank``."""
        raise NotImplementedError

    def lose(self, rank: int, error: Exception) -> None:
        """Note that the worker of ``rank`` will not answer."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """End with ``error``, whatever the workers still answer."""
        raise NotImplementedError

    def discard(self) -> None:
        """End a task that has not begun, as the pool is shut down."""
        self.fail(ExecutorClosedError("The executor was shut down before the call began."))


class SingleTask(Task):
    """A call on whichever worker is free first."""

    def __init__(self, call: PackedCall, future: Future) -> None:
        super().__init__(call)
        self.future = future

    def begin(self) -> bool:
        """As `Task.begin`."""
        return self.future.begin()

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """As `Task.complete`."""
        self.future.complete(*rebuild(self.call, answer, payload))

    def lose(self, rank: int, error: Exception) -> None:
        """As `Task.lose`."""
        self.future.complete(None, error)

    def fail(self, error: Exception) -> None:
        """As `Task.fail`."""
        self.future.complete(None, error)

    def discard(self) -> None:
        """As `Task.discard`: the future is cancelled."""
        if self.future.cancel():
            self.future.begin()  # tells those who wait for it


class InitializerTask(Task):
    """The initializer: the first task of each worker. Its failure is that of the pool."""

    def __init__(self, call: PackedCall, fail_pool: Callable[[ParallelError], None]) -> None:
        super().__init__(call)
        self._fail_pool = fail_pool

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """As `Task.complete`."""
        _, error = rebuild(self.call, answer, payload)
        if error is not None and answer.outcome is not Outcome.CANCELLED:
            broken = ParallelError(f"The initializer failed in worker {rank}: {error!r}")
            broken.__cause__ = error
            self._fail_pool(broken)

    def lose(self, rank: int, error: Exception) -> None:
        """As `Task.lose`: the worker that takes the place of this one runs the initializer again."""

    def fail(self, error: Exception) -> None:
        """As `Task.fail`."""
        self._fail_pool(error if isinstance(error, ParallelError) else ParallelError(str(error)))


class RunTask(Task):
    """A call on every worker at once."""

    def __init__(self, call: PackedCall, reply: Reply) -> None:
        super().__init__(call)
        self.reply = reply
        self._results: dict[int, Any] = {}  # by rank
        self._failures: dict[int, Exception] = {}  # by rank, the first one first
        self._cut_off: Exception | None = None  # the error of a rank that was cancelled

    def begin_on(self, ranks: Ranks) -> None:
        """Begin on the workers that are these ranks."""
        self.ranks = ranks

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """As `Task.complete`."""
        self._results[rank], error = rebuild(self.call, answer, payload)
        if answer.outcome is Outcome.CANCELLED:
            self._cut_off = error
        elif isinstance(error, RankError):  # what a rank knows of the failures of others is theirs
            for other, failure in error.failures.items():
                self._failures.setdefault(other, failure)
        elif error is not None and (rank not in self._failures or lost_connection(self._failures[rank])):
            self._failures[rank] = error
        self._end_if_all_answered()

    def lose(self, rank: int, error: Exception) -> None:
        """As `Task.lose`."""
        self._results[rank] = None
        if isinstance(error, ExecutorClosedError):
            self._cut_off = error
        else:
            self._failures[rank] = error
        self._end_if_all_answered()

    def fail(self, error: Exception) -> None:
        """As `Task.fail`."""
        self.reply.complete(None, error)

    def _end_if_all_answered(self) -> None:
        if len(self._results) < self.ranks.world_size:
            return
        results = [self._results[rank] for rank in range(len(self._results))]
        self._results.clear()
        if self._failures:
            self.reply.complete(None, rank_error(self.call.name, len(results), self._failures))
        else:
            self.reply.complete(results, self._cut_off)


class Mapping:
    """The items of one `map`, and what has come of them. Its iterator takes results in another thread."""

    def __init__(self) -> None:
        self.batch_size = 1  # of the next batch
        self.is_wanted = True
        self.waiting = 0  # items in the queue
        self.outcomes: dict[int, tuple[Any, Exception | None]] = {}  # by item: its result, or its exception
        self._awaited: tuple[int, Reply] | None = None

    def await_item(self, index: int, reply: Reply) -> None:
        """Complete the reply once the item is over. Called in the pool's thread."""
        if index in self.outcomes:
            reply.complete(None)
        else:
            self._awaited = index, reply

    def end_item(self, index: int, value: Any, error: Exception | None) -> None:
        """Set the result or the exception of an item, which is over."""
        self.outcomes[index] = value, error
        if self._awaited is not None and self._awaited[0] == index:
            self._awaited[1].complete(None)
            self._awaited = None


class MapItem(Task):
    """One call of a `map`, as it waits in the queue."""

    __slots__ = ("arguments", "call", "index", "mapping")

    def __init__(self, call: PackedCall, arguments: bytes | None, mapping: Mapping, index: int) -> None:
        """``arguments``: the pickled ones, if ``call`` is without any, as one for many items."""
        self.call = call
        self.arguments = arguments
        self.mapping = mapping
        self.index = index

    def begin(self) -> bool:
        """As `Task.begin`."""
        return self.mapping.is_wanted

    def can_be_joined_by(self, other: MapItem) -> bool:
        """Return whether a worker can do this item and another one of the same `map` in one batch."""
        has_small_arguments = self.arguments is not None and other.arguments is not None
        return has_small_arguments and other.call.function == self.call.function

    def fail(self, error: Exception) -> None:
        """As `Task.fail`."""
        self.mapping.end_item(self.index, None, error)

    def discard(self) -> None:
        """As `Task.discard`."""
        self.fail(CancelledError())


class Batch(Task):
    """Items of a `map` that a worker does one after another. Some may be left, which go back to the queue."""

    def __init__(self, items: Sequence[MapItem]) -> None:
        super().__init__(items[0].call)
        self.mapping = items[0].mapping
        self.left = list(items)
        self.time_out: Any = None  # the deadline of the call that has not ended when the batch is handed back
        self._error: Exception | None = None

    @property
    def calls(self) -> Sequence[bytes]:
        """As `Task.calls`."""
        return [item.arguments for item in self.left if item.arguments is not None]

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """As `Task.complete`; `left` are then the items that the worker has not begun."""
        for item, result in zip(self.left, answer.results, strict=False):
            self.mapping.end_item(item.index, pickle.loads(result), None)
        del self.left[: len(answer.results)]
        if answer.outcome is not None:
            last = self.left.pop(0)
            value, error = rebuild(last.call, answer, payload)
            if answer.outcome is Outcome.CANCELLED:
                error = self._error or error
            self.mapping.end_item(last.index, value, error)

    def split(self, begun: int) -> list[MapItem]:
        """Take the items out that the worker has not begun, all but so many; return them."""
        items = self.left[begun:]
        del self.left[begun:]
        return items

    def lose(self, rank: int, error: Exception) -> None:
        """As `Task.lose`."""
        for item in self.left:
            item.fail(self._error or error)
        self.left.clear()

    def fail(self, error: Exception) -> None:
        """Have ``error`` be that of the item which is cancelled now, or of all if the worker exits."""
        self._error = error


class ResizeTask(Task):
    """Another number of workers, from when all tasks before it are over."""

    def __init__(self, devices: list[torch.device], reply: Reply) -> None:
        self.devices = devices
        self.reply = reply
        self.has_begun = False

    def fail(self, error: Exception) -> None:
        """As `Task.fail`."""
        self.reply.complete(None, error)

    def discard(self) -> None:
        """As `Task.discard`."""
        self.fail(ExecutorClosedError("The executor was shut down before it was resized."))


def rebuild(call: PackedCall, answer: Answer, payload: Received) -> tuple[Any, Exception | None]:
    """Return the result of the last call of a task, or None and its exception."""
    if answer.outcome is Outcome.CANCELLED:
        return None, ExecutorClosedError(f"The executor was shut down while {call.name} ran.")
    try:
        value = pickle.loads(answer.results[-1]) if answer.outcome is None else payload.load()
    except BaseException as cause:  # of user code that rebuilds an object
        error = TransferError(f"The result of {call.name} cannot be rebuilt in the parent process: {summary(cause)}")
        error.__cause__ = cause
        return None, error
    if answer.outcome is not Outcome.FAILED:
        return value, None
    raised, failure = value
    set_cause(raised, failure.as_cause())
    return None, raised
