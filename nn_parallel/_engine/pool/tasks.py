"""What a pool is asked to do: a call on one worker, a call on all of them, or to have another number of workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

import torch

from ...errors import ExecutorClosedError, ParallelError, RankError, TransferError
from ..by_value.packer import PackedCall, Packer
from ..failures import lost_connection, rank_error
from ..interrupts import Condition
from .channel import Unpack
from .messages import Ranks
from .worker import CANCELLED, FAILED, SUCCEEDED

logger = logging.getLogger("concurrent.futures")  # where the standard library tells of callbacks that raise
Callback = Callable[[concurrent.futures.Future[Any]], object]


class Callbacks:
    """Calls the done-callbacks of one pool's futures, one after another, in a thread of its own.

    So a callback may wait for its own pool, whose answers other threads read. And what it raises is logged, whatever it
    is: no signal is handled in this thread, so that SystemExit and KeyboardInterrupt are the callback's own.
    """

    def __init__(self) -> None:
        self._due = SimpleQueue[tuple[Callback, concurrent.futures.Future[Any]] | None]()
        self.thread = threading.Thread(target=self._loop, name="nn_parallel callbacks", daemon=True)

    def call(self, fn: Callback, future: concurrent.futures.Future[Any]) -> None:
        """Have ``fn(future)`` called after those that came before."""
        self._due.put((fn, future))

    def end(self) -> None:
        """Wait for the last call, and end the thread."""
        self._due.put(None)
        self.thread.join()

    def _loop(self) -> None:
        while (due := self._due.get()) is not None:
            fn, future = due
            try:
                fn(future)
            except BaseException:
                logger.exception("exception calling callback for %r", future)
            del due, fn, future  # nothing of it lives on while this waits for the next


class Answer:
    """How a worker has ended a task. Its result or exception is rebuilt by who asks for it, in that thread.

    So what user code does as it is unpickled, or what takes long, holds up nobody else, and Ctrl-C is raised in it.
    """

    __slots__ = ("_call", "outcome", "unpack")

    def __init__(self, call: PackedCall, outcome: int, unpack: Unpack) -> None:
        self._call, self.outcome, self.unpack = call, outcome, unpack

    @classmethod
    def of(cls, call: PackedCall, error: Exception, outcome: int = FAILED) -> Answer:
        """That of a worker which did not answer, because of ``error``."""
        return cls(call, outcome, lambda: (error, None))

    def rebuild(self) -> tuple[Any, Exception | None]:
        """The result, or None and the exception. Called until it returns once: then the memory is the result's."""
        if self.outcome == CANCELLED:
            return None, ExecutorClosedError(f"The executor was shut down while {self._call.name} ran.")
        try:
            value = self.unpack()
        except (Exception, SystemExit) as error:  # a KeyboardInterrupt may be the user's
            return None, self._unusable(error)
        raised: Exception | None = None
        if self.outcome != SUCCEEDED:
            raised, failure = value
            value = None
            if raised is not None and failure is not None:
                raised.__cause__ = failure.as_cause()
        del self.unpack  # last, as Ctrl-C may come before: it keeps the memory of the answer
        return value, raised

    def _unusable(self, cause: BaseException) -> TransferError:  # no lines of `rebuild`: `cause` would refer to `error`
        error = TransferError(f"The result of {self._call.name} cannot be rebuilt in the parent process: {cause!r}")
        error.__cause__ = cause
        return error


class Future(concurrent.futures.Future[Any]):
    """What a pool will have done."""

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._condition = Condition()  # left locked by Ctrl-C in who waits, it would stop whoever completes this

    def add_done_callback(self, fn: Callback) -> None:
        """Call ``fn(self)`` once this is over: in this thread if it is over now, else in the pool's for callbacks."""
        super().add_done_callback(fn if self.done() else functools.partial(self._callbacks.call, fn))

    def begin(self, world_size: int = 0) -> bool:
        """Whether it is still wanted; from here on it cannot be cancelled.

        It begins again if its worker has exited and had not read it.
        """
        is_open = self.cancelled() or not self.done()  # else the user has completed it
        return self.running() or (is_open and self.set_running_or_notify_cancel())

    def fail(self, error: Exception) -> None:
        """End it with ``error``, wherever it is, if it has not ended."""
        if self.begin():
            with contextlib.suppress(InvalidStateError):
                self.set_exception(error)

    def discard(self) -> None:
        """It has not begun, and will not."""
        if self.cancel():
            self.begin()  # tells those who wait for it
        else:  # it was about to begin again
            self.fail(ExecutorClosedError("The executor was shut down before the call began."))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a future belongs to the process that made it: send its result() instead")


class CallFuture(Future):
    """A call on whichever worker is free first."""

    _result: Any  # the standard library's: an `Answer` until somebody asks for it
    _exception: Any

    def __init__(self, call: PackedCall, callbacks: Callbacks) -> None:
        super().__init__(callbacks)
        self.call = call
        self._rebuilding = threading.Lock()

    def complete(self, rank: int, answer: Answer) -> None:
        """Its worker has answered, or has exited."""
        self.call.release()  # the result may be taken much later
        with contextlib.suppress(InvalidStateError):  # it has run out of time, or the user has set it
            self.set_result(answer) if answer.outcome == SUCCEEDED else self.set_exception(answer)  # type: ignore[arg-type]

    def result(self, timeout: float | None = None) -> Any:
        """As `concurrent.futures.Future.result`."""
        self.exception(timeout)
        try:
            return super().result()
        finally:
            del self  # it would live in a cycle with the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `concurrent.futures.Future.exception`."""
        super().exception(timeout)
        with self._rebuilding:
            for answer in (self._result, self._exception):
                if isinstance(answer, Answer):
                    self._result, self._exception = answer.rebuild()
        return super().exception()

    def _get_snapshot(self) -> Any:
        """What asyncio reads of a future, from Python 3.14 on."""
        if self.done() and not self.cancelled():
            self.exception()
        return super()._get_snapshot()  # type: ignore[misc]


class Mapped:
    """What the items of one map share."""

    def __init__(self) -> None:
        self.is_wanted = True
        self._awaited: Item | None = None
        self._ended = threading.Lock()  # released when that is over: a semaphore which an interrupt leaves whole
        self._ended.acquire()

    def ended(self, item: Item) -> None:
        """An item is over."""
        if self._awaited is item:
            with contextlib.suppress(RuntimeError):  # it is released already, for one that nobody had to wait for
                self._ended.release()

    def wait(self, item: Item, deadline: float) -> None:
        """Wait until ``item`` is over, or raise `TimeoutError` at ``deadline``."""
        self._awaited = item
        while not item.is_over():
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._ended.acquire(timeout=min(left, threading.TIMEOUT_MAX))


class Item:
    """One call of a map: as `CallFuture`, without what a future costs, a third of the time of a small task."""

    __slots__ = ("_mapped", "answer", "call")

    def __init__(self, call: PackedCall, mapped: Mapped) -> None:
        self.call, self._mapped = call, mapped
        self.answer: Answer | None = None

    def is_over(self) -> bool:
        """Whether `result` would not wait."""
        return self.answer is not None

    def begin(self, world_size: int = 0) -> bool:
        """Whether it is still wanted."""
        return self._mapped.is_wanted

    def complete(self, rank: int, answer: Answer) -> None:
        """Its worker has answered, or has exited."""
        if self.answer is None:
            self.answer = answer
            self.call.release()  # the results may be taken much later
            self._mapped.ended(self)

    def fail(self, error: Exception) -> None:
        """End it with ``error``, wherever it is."""
        self.complete(0, Answer.of(self.call, error))

    def discard(self) -> None:
        """It has not begun, and will not."""
        self.fail(CancelledError())

    def result(self, deadline: float) -> Any:
        """Its result, to be taken once, or its exception; `TimeoutError` if neither is there at ``deadline``."""
        self._mapped.wait(self, deadline)
        assert self.answer is not None
        value, error = self.answer.rebuild()
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it would live in a cycle with its traceback


class Resize(Future):
    """Another number of workers, from when all tasks before it are over."""

    def __init__(self, devices: list[torch.device], callbacks: Callbacks) -> None:
        super().__init__(callbacks)
        self.devices = devices

    def discard(self) -> None:
        """As `Future.discard`."""
        self.fail(ExecutorClosedError("The executor was shut down before it was resized."))


class Run:
    """A call on every worker at once; over when each has answered or has exited."""

    def __init__(self, call: PackedCall, ranks: Ranks | None = None) -> None:
        """``ranks``: those of which the workers are some; None: they are all."""
        self.call, self.ranks = call, ranks
        self.answers: dict[int, Answer] = {}  # by rank, in the order of their arrival
        self._missing: set[int] | None = None  # until it begins
        self.error: Exception | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def is_over(self) -> bool:
        """Whether `result` would not wait."""
        return self._missing == set()

    def begin(self, world_size: int) -> bool:
        """It begins on so many workers."""
        self._missing = set(range(world_size))
        return True

    def complete(self, rank: int, answer: Answer) -> None:
        """The worker of ``rank`` has answered, or has exited."""
        if self._missing and rank in self._missing:
            self.answers[rank] = answer
            self._missing.discard(rank)
            if not self._missing:
                self._release()

    def fail(self, error: Exception) -> None:
        """End it with ``error``, whatever the workers still say."""
        self.error = self.error or error
        if self._missing is None or self._missing:
            self._missing = set()
            self._release()

    def discard(self) -> None:
        """It has not begun, and will not."""
        self.fail(ExecutorClosedError("The executor was shut down before the call began."))

    def wait(self) -> None:
        """Wait for the end, once."""
        self._over.acquire()

    def result(self) -> list[Any]:
        """Wait for the end; the results in rank order, or what went wrong."""
        self.wait()
        if self.error is not None:
            raise self.error
        results, failures, cut_off = dict[int, Any](), dict[int, Exception](), None
        for rank, answer in self.answers.items():
            results[rank], error = answer.rebuild()
            if answer.outcome == CANCELLED:
                cut_off = error
            elif isinstance(error, RankError):  # what a rank knows of others' failures is theirs
                for other, failure in error.failures.items():
                    failures.setdefault(other, failure)
            elif error is not None and (rank not in failures or lost_connection(failures[rank])):
                failures[rank] = error
        if failures:
            raise rank_error(self.call.name, len(results), failures)
        if cut_off is not None:  # on some rank, with no failure that would tell why
            raise cut_off
        return [results[rank] for rank in range(len(results))]

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # two threads have ended it: the last answer came as its time was over
            self._over.release()


class InitializerTask(NamedTuple):
    """The initializer: the first task of each worker."""

    call: PackedCall

    @staticmethod
    def failed(where: str, answer: Answer) -> ParallelError:
        """The error of the pool after that of its initializer in the worker ``where``."""
        _, error = answer.rebuild()
        broken = ParallelError(f"The initializer failed in {where}: {error!r}")
        broken.__cause__ = error
        return broken


Task = CallFuture | Item | Run


class TakesTasks:
    """Whether a pool takes tasks: not when it is closing or cannot go on, nor in a fork of its process."""

    def __init__(self, packer: Packer) -> None:
        self._pid, self._packer, self.callbacks = os.getpid(), packer, Callbacks()
        self._closing = False
        self._broken: ParallelError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more tasks, at least of this process."""
        return self._closing or self._is_inherited

    @property
    def packer(self) -> Packer:
        """Packs what can be submitted now: not in a fork, which would pack into memory that it shares with us."""
        self._raise_if_forked()
        self._raise_if_closed()
        return self._packer

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a fork: it has the object, but neither its threads nor the right to its workers."""
        return self._pid != os.getpid()

    def _raise_if_forked(self) -> None:
        if self._is_inherited:
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")

    def _raise_if_closed(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise ExecutorClosedError
