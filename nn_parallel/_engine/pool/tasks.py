"""The tasks of a pool: `submit`, `run`, the items of a `map`, the initializer, and a change of the number of workers.

A task belongs to the supervisor, the thread of the pool. The supervisor begins the task, passes the answers of the
workers to `Task.complete`, and calls `Task.lose` if a worker will not answer. The task then completes the future or
reply for which the caller waits.
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
    """Something that workers do. A task is over when each of its workers has answered it or has exited."""

    ranks = ALONE  # `RunTask` replaces this with the ranks of the `run`

    def __init__(self, call: PackedCall) -> None:
        self.call = call

    @property
    def calls(self) -> Sequence[bytes]:
        """The pickled arguments of each call; empty if the payload contains the arguments."""
        return () if self.call.arguments is None else (self.call.arguments,)

    def begin(self) -> bool:
        """Record that the task begins. Return False if it must not begin, because its result is not needed any more."""
        return True

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """Process the answer of the worker with this rank."""
        raise NotImplementedError

    def lose(self, rank: int, error: Exception) -> None:
        """Record that the worker with this rank will not answer, because of ``error``."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Give ``error`` to the caller now. Answers of workers that still arrive are ignored."""
        raise NotImplementedError

    def discard(self) -> None:
        """End a task that has not begun, because the pool is shut down."""
        self.fail(ExecutorClosedError("The executor was shut down before the call began."))


class SingleTask(Task):
    """A call on one worker, the first one that is free (`submit`)."""

    def __init__(self, call: PackedCall, future: Future) -> None:
        super().__init__(call)
        self.future = future

    def begin(self) -> bool:
        """Implement `Task.begin`: the task does not begin if the future was cancelled."""
        return self.future.begin()

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """Implement `Task.complete`: the future gets the result or the exception."""
        self.future.complete(*rebuild(self.call, answer, payload))

    def lose(self, rank: int, error: Exception) -> None:
        """Implement `Task.lose`: the future gets the error, such as a `WorkerDiedError`."""
        self.future.complete(None, error)

    def fail(self, error: Exception) -> None:
        """Implement `Task.fail`."""
        self.future.complete(None, error)

    def discard(self) -> None:
        """Implement `Task.discard`: the future is cancelled."""
        if self.future.cancel():
            self.future.begin()  # wakes threads in `concurrent.futures.wait`; `cancel` alone does not wake them


class InitializerTask(Task):
    """The initializer, the first task of each worker. If it raises an exception, the whole pool fails."""

    def __init__(self, call: PackedCall, fail_pool: Callable[[ParallelError], None]) -> None:
        super().__init__(call)
        self._fail_pool = fail_pool

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """Implement `Task.complete`: an exception of the initializer ends the pool."""
        _, error = rebuild(self.call, answer, payload)
        if error is not None and answer.outcome is not Outcome.CANCELLED:
            broken = ParallelError(f"The initializer failed in worker {rank}: {error!r}")
            broken.__cause__ = error
            self._fail_pool(broken)

    def lose(self, rank: int, error: Exception) -> None:
        """Implement `Task.lose`: there is nothing to do, because the worker's replacement runs the initializer."""

    def fail(self, error: Exception) -> None:
        """Implement `Task.fail`: make the whole pool fail."""
        self._fail_pool(error if isinstance(error, ParallelError) else ParallelError(str(error)))


class RunTask(Task):
    """A call on all workers at the same time, as the ranks of one world (`run`)."""

    def __init__(self, call: PackedCall, reply: Reply) -> None:
        super().__init__(call)
        self.reply = reply
        self._results: dict[int, Any] = {}  # the results by rank, with None for a failed rank
        # The error of each failed rank, in the order of arrival. For `rank_error`, the first error that is not about a
        # lost connection is the cause.
        self._failures: dict[int, Exception] = {}
        # The error of a rank that the pool has cancelled or killed. The caller gets this error only if no rank failed.
        self._cut_off: Exception | None = None

    def begin_on(self, ranks: Ranks) -> None:
        """Set the description of the ranks, which the workers receive with this task."""
        self.ranks = ranks

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """Implement `Task.complete`: record the result or the failure of a rank. The last rank ends the task."""
        self._results[rank], error = rebuild(self.call, answer, payload)
        if answer.outcome is Outcome.CANCELLED:
            self._cut_off = error
        elif isinstance(error, RankError):  # a failure of other ranks, of which this rank has learned
            for other, failure in error.failures.items():
                self._failures.setdefault(other, failure)
        elif error is not None and (rank not in self._failures or lost_connection(self._failures[rank])):
            # An earlier error about a lost connection is replaced, because it is only a consequence of another failure.
            self._failures[rank] = error
        self._end_if_all_answered()

    def lose(self, rank: int, error: Exception) -> None:
        """Implement `Task.lose`: record that the rank has failed, or that the pool has killed its worker."""
        self._results[rank] = None
        if isinstance(error, ExecutorClosedError):
            self._cut_off = error
        else:
            self._failures[rank] = error
        self._end_if_all_answered()

    def fail(self, error: Exception) -> None:
        """Implement `Task.fail`."""
        self.reply.complete(None, error)

    def _end_if_all_answered(self) -> None:
        """Complete the reply once each rank has answered or was lost.

        If a rank has failed, the reply raises a `RankError`.
        """
        if len(self._results) < self.ranks.world_size:
            return
        results = [self._results[rank] for rank in range(len(self._results))]
        self._results.clear()
        if self._failures:
            self.reply.complete(None, rank_error(self.call.name, len(results), self._failures))
        else:
            self.reply.complete(results, self._cut_off)


class Mapping:
    """The state of one `map`: the outcomes of its items, and the size of its batches.

    The supervisor adds outcomes. The iterator of the `map` takes them out, in the thread of the user.
    """

    def __init__(self) -> None:
        self.batch_size = 1  # the maximum number of items in the next batch
        self.is_wanted = True  # False once the iterator is closed, so that no further item begins
        self.waiting = 0  # the number of items in the queue of the supervisor
        self.outcomes: dict[int, tuple[Any, Exception | None]] = {}  # results or exceptions by index of the item
        # The index of the item for which the iterator waits, and the reply to complete when this item has ended.
        self._awaited: tuple[int, Reply] | None = None

    def await_item(self, index: int, reply: Reply) -> None:
        """Complete the reply when the item has ended. This must be called in the thread of the supervisor."""
        if index in self.outcomes:
            reply.complete(None)
        else:
            self._awaited = index, reply

    def end_item(self, index: int, value: Any, error: Exception | None) -> None:
        """Set the result or the exception of an item that has ended."""
        self.outcomes[index] = value, error
        if self._awaited is not None and self._awaited[0] == index:
            self._awaited[1].complete(None)
            self._awaited = None


class MapItem(Task):
    """One call of a `map` in the queue. The supervisor joins items into a `Batch` before it gives them to a worker."""

    __slots__ = ("arguments", "call", "index", "mapping")

    def __init__(self, call: PackedCall, arguments: bytes | None, mapping: Mapping, index: int) -> None:
        """Make an item.

        Args:
            call: the packed call. If the workers keep the function, many items can share one call without arguments.
            arguments: the pickled arguments of this item, if ``call`` does not contain them; otherwise None.
            mapping: the `map`.
            index: the number of the item in its `map`.
        """
        self.call = call
        self.arguments = arguments
        self.mapping = mapping
        self.index = index

    def begin(self) -> bool:
        """Implement `Task.begin`: the item does not begin if the iterator of the `map` was closed."""
        return self.mapping.is_wanted

    def can_be_joined_by(self, other: MapItem) -> bool:
        """Return whether a worker can do this item and another one of the same `map` in one batch."""
        has_small_arguments = self.arguments is not None and other.arguments is not None
        return has_small_arguments and other.call.function == self.call.function

    def fail(self, error: Exception) -> None:
        """Implement `Task.fail`."""
        self.mapping.end_item(self.index, None, error)

    def discard(self) -> None:
        """Implement `Task.discard`."""
        self.fail(CancelledError())


class Batch(Task):
    """Items of a `map` that one worker does one after another.

    The worker begins no further item after `BATCH_S`. If one item takes long, the supervisor asks the worker to hand
    back the items that follow. Items that the worker has not begun go back to the queue.
    """

    def __init__(self, items: Sequence[MapItem]) -> None:
        super().__init__(items[0].call)
        self.mapping = items[0].mapping
        self.left = list(items)  # the items for which the worker has not answered yet
        # The `Deadline` at which the batch times out, or None. The supervisor stores it here until an earlier deadline
        # has passed, at which it asks the worker to hand back the items that the worker has not begun.
        self.time_out: Any = None
        self._error: Exception | None = None  # set by `fail`; items that have not ended get this error

    @property
    def calls(self) -> Sequence[bytes]:
        """Implement `Task.calls`. Empty for a single item whose arguments are in a payload."""
        return [item.arguments for item in self.left if item.arguments is not None]

    def complete(self, rank: int, answer: Answer, payload: Received) -> None:
        """Implement `Task.complete`: end the answered items, and leave the others in `left`."""
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
        """Remove from `left` the items that the worker has not begun, and return these items.

        ``begun`` is the number of items that stay in `left`. It is 1 while the worker runs an item of this batch, and 0
        when the batch has ended. Items that have ended are no longer in `left`.
        """
        items = self.left[begun:]
        del self.left[begun:]
        return items

    def lose(self, rank: int, error: Exception) -> None:
        """Implement `Task.lose`: fail all items for which no answer of the worker has arrived."""
        for item in self.left:
            item.fail(self._error or error)
        self.left.clear()

    def fail(self, error: Exception) -> None:
        """Implement `Task.fail`: only store the error, which the unfinished items get later.

        The supervisor next cancels the batch on its worker. If the worker answers, the item that was cancelled gets the
        error (`complete`). If the worker exits instead, all items that are left get the error (`lose`).
        """
        self._error = error


class ResizeTask(Task):
    """A change of the number of workers, which begins when all earlier tasks have ended."""

    def __init__(self, devices: list[torch.device], reply: Reply) -> None:
        """Record the device of each worker after the change, and the reply to complete when it is done."""
        self.devices = devices
        self.reply = reply
        # True once the pool has the new number of places for workers. The resize is over when each place has an idle
        # worker.
        self.has_begun = False

    def fail(self, error: Exception) -> None:
        """Implement `Task.fail`."""
        self.reply.complete(None, error)

    def discard(self) -> None:
        """Implement `Task.discard`."""
        self.fail(ExecutorClosedError("The executor was shut down before it was resized."))


def rebuild(call: PackedCall, answer: Answer, payload: Received) -> tuple[Any, Exception | None]:
    """Return the outcome of the last call of a task: its result and None, or None and its exception."""
    if answer.outcome is Outcome.CANCELLED:
        return None, ExecutorClosedError(f"The executor was shut down while {call.name} ran.")
    try:
        value = pickle.loads(answer.results[-1]) if answer.outcome is None else payload.load()
    except BaseException as cause:  # raised by user code that rebuilds an object
        error = TransferError(f"The result of {call.name} cannot be rebuilt in the parent process: {summary(cause)}")
        error.__cause__ = cause
        return None, error
    if answer.outcome is not Outcome.FAILED:
        return value, None
    raised, failure = value
    set_cause(raised, failure.as_cause())
    return None, raised
