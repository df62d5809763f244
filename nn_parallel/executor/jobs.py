"""What a pool is asked to do: one task for one worker, or one for all of them, and the objects that tasks share."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any

import torch

from ..errors import ExecutorClosedError, RankError, TransferError, lost_connection, rank_error
from ..pickling import Packed, dumps, loads
from ..reports import call_name
from .transport import Message
from .worker import CANCELLED, FAILED, SUCCEEDED, stored_object


class Handle:
    """Stands for an object that `ParallelExecutor.put` keeps in the workers; a task receives the object itself.

    The workers let go of the object when the last reference to its handle is gone.
    """

    def __init__(self, packed: Packed, what: str, owner: object) -> None:
        self.number, self.packed, self._what, self._owner = next(_numbers), packed, what, owner

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(_packing, "owner", None) is not self._owner:
            raise TypeError("a handle is good for the calls of the executor that made it, and for nothing else")
        _packing.handles.append(self)
        return stored_object, (self.number,)

    def __repr__(self) -> str:
        return f"<Handle of a {self._what}>"


class PackedCall:
    """A function and its arguments, packed, and the handles among these; they live until the call is over."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: object = None
    ) -> None:
        self.name = call_name(fn)
        parts = {"the function": fn}
        parts |= {f"argument {index}": value for index, value in enumerate(args)}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        with _collecting_handles(owner) as self.handles:
            self.packed = dumps((fn, args, kwargs), parts)


def opened(message: Message, name: str) -> tuple[int, Any]:
    """How task ``name`` ended, and its result or its exception."""
    outcome: int = message.header.outcome
    if outcome == CANCELLED:
        return outcome, None
    try:
        value = loads(message.pickle, message.buffers)
        if outcome == FAILED:
            value, failure = value
            value.__cause__ = failure.as_cause()
    except BaseException as error:  # a SystemExit in user code must not end our thread either
        value = TransferError(f"The result of {name} cannot be rebuilt in the parent process: {error!r}")
        value.__cause__ = error
        outcome = FAILED
    return outcome, value


class Single:
    """One task for whichever worker is free first."""

    def __init__(self, call: PackedCall) -> None:
        self.call = call
        self.future: Future[Any] = Future()

    def begins(self) -> bool:
        """Whether it is still wanted; from here on it cannot be cancelled."""
        return self.future.set_running_or_notify_cancel()

    def end(self, rank: int, outcome: int, value: Any) -> None:
        """Its worker has answered, or is gone."""
        if outcome == CANCELLED:
            value = ExecutorClosedError(f"The executor was shut down while {self.call.name} ran.")
        with contextlib.suppress(InvalidStateError):  # it has run out of time, or the user has set it
            self.future.set_result(value) if outcome == SUCCEEDED else self.future.set_exception(value)

    def give_up(self, error: Exception) -> None:
        """End it with ``error``, wherever it is."""
        if self.future.running() or self.begins():
            self.end(0, FAILED, error)

    def drop(self) -> None:
        """It has not begun, and will not."""
        if self.future.cancel():
            self.begins()  # tells those who wait for it


class Run:
    """One task for every worker; over when each has answered or is gone."""

    def __init__(self, call: PackedCall) -> None:
        self.call = call
        self.failures: dict[int, Exception] = {}
        self._results: dict[int, Any] = {}
        self._world_size = 0
        self._missing: set[int] | None = None  # until it begins
        self._error: Exception | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def begin(self, world_size: int) -> None:
        self._world_size, self._missing = world_size, set(range(world_size))

    def end(self, rank: int, outcome: int, value: Any) -> None:
        """The worker of ``rank`` has answered, or is gone."""
        if outcome == SUCCEEDED:
            self._results[rank] = value
        elif isinstance(value, RankError):  # what a rank knows of others' failures is theirs
            for other, failure in value.failures.items():
                self.failures.setdefault(other, failure)
        elif outcome == FAILED and (rank not in self.failures or lost_connection(self.failures[rank])):
            self.failures[rank] = value
        if self._missing and rank in self._missing:
            self._missing.remove(rank)
            if not self._missing:
                self._over.release()

    def give_up(self, error: Exception) -> None:
        """End it with ``error``, whatever the workers still say."""
        self._error = self._error or error
        if self._missing is None or self._missing:
            self._missing = set()
            self._over.release()

    def drop(self) -> None:
        """It has not begun, and will not."""
        self.give_up(ExecutorClosedError("The executor was shut down before the call began."))

    def result(self) -> list[Any]:
        """Wait for the end; the results in rank order, or what went wrong."""
        self._over.acquire()
        if self._error is not None:
            raise self._error
        if not self.failures:
            return [self._results[rank] for rank in range(self._world_size)]
        raise rank_error(self.call.name, self._world_size, self.failures)


@contextlib.contextmanager
def _collecting_handles(owner: object) -> Iterator[list[Handle]]:
    """While a call of ``owner`` is packed in this thread: the handles that are met."""
    _packing.owner, _packing.handles = owner, list[Handle]()
    try:
        yield _packing.handles
    finally:
        _packing.owner = None


class Resize:
    """Another number of workers, from when all jobs before it are over."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices = devices
        self.over: Future[None] = Future()

    def give_up(self, error: Exception) -> None:
        self.over.set_exception(error)

    def drop(self) -> None:
        self.give_up(ExecutorClosedError("The executor was shut down before it was resized."))


_packing = threading.local()
_numbers = itertools.count(1)
