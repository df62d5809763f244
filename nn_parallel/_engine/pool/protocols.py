"""The interfaces inside a `ParallelExecutor`, for workers on this machine and on a Ray cluster alike.

An executor makes its calls on a `Backend`: a pool of workers, or the ranks that a launcher has started. A pool starts
its `Worker`s through a `Site`, which stands for this machine or a Ray cluster. When a worker has answered a task, has
exited or the like, the pool is informed through a method of `WorkerEvents`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol

import torch

from ...errors import ParallelError, TransferError
from ..by_value.packer import CallOptions, PackedCall, Packer
from .channel import Received
from .event_loop import EventLoop
from .messages import Answer, Ranks, TaskHeader
from .progress import Progress


class Backend(Protocol):
    """The workers or ranks on which a `ParallelExecutor` makes its calls. Its methods implement the executor's."""

    @property
    def has_ended(self) -> bool:
        """Return whether the backend takes no more calls: it was shut down or has failed, or this process is a fork."""

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """Call ``fn`` on all workers or ranks, as `ParallelExecutor.run`."""

    def submit(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> Future[Any]:
        """Call ``fn`` on one worker, as `ParallelExecutor.submit`."""

    def map(
        self,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        options: CallOptions,
        timeout_s: float | None,
        chunksize: int | None,
        progress: Progress,
    ) -> Iterator[Any]:
        """Call ``fn`` on every item, as `ParallelExecutor.map`."""

    def put(self, obj: Any) -> Any:
        """Return a handle with which calls refer to ``obj`` without sending it again; see `ParallelExecutor.put`."""

    def resize(self, num_workers: int) -> None:
        """Change the number of workers, as `ParallelExecutor.resize`."""

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Accept no further calls and end the workers, as `ParallelExecutor.shutdown`."""

    def __enter__(self) -> None:
        """Begin the ``with`` block of the executor."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the ``with`` block of the executor, and shut it down."""


class Worker(Protocol):
    """The object through which a pool controls one worker process.

    Only the supervisor, the thread of the pool, calls the methods. No method waits for the process: its answers and the
    news of its exit arrive later, through `WorkerEvents`.
    """

    rank: int
    device: torch.device
    pid: int  # 0 before the process has started
    exit_told_within_s: float  # the longest time from the death of the process until the pool learns of it

    @property
    def description(self) -> str:
        """The name of the worker in error messages."""

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is suspended by a signal such as SIGSTOP."""

    def send(self, task: TaskHeader, call: PackedCall) -> None:
        """Send a task. Before it, send the kept objects that the task needs and the worker does not have.

        Raises:
            TransferError: the task cannot be sent. The worker gets no part of it.
        """

    def forget(self, numbers: Iterable[int]) -> None:
        """Tell the worker to delete the kept objects with these numbers, which no later task needs."""

    def cancel(self, number: int) -> None:
        """Tell the worker to interrupt the task with this number."""

    def ask_for_stack(self) -> None:
        """Ask the worker for the stack of its main thread, which arrives through `WorkerEvents.told_stack`."""

    def hand_back(self) -> None:
        """Tell the worker to send the results of its batch so far, and to begin no further call of the batch.

        A batch is several calls of a `map` in one task. Other workers then do the calls that have not begun.
        """

    def leave(self) -> None:
        """Tell the worker to exit after the tasks that it was sent."""

    def kill(self) -> None:
        """Kill the worker and all processes that it has started."""


class WorkerEvents(Protocol):
    """The methods through which a pool is informed of events of its workers.

    The supervisor of the pool implements the methods. They are called in the supervisor's thread.
    """

    def forked(self, worker: Worker) -> None:
        """Record that the process of the worker has been started."""

    def answered(self, worker: Worker, answer: Answer, payload: Received) -> None:
        """Receive an answer of the worker to a task, or its first answer, which says that it is ready for tasks."""

    def told_stack(self, worker: Worker, text: str) -> None:
        """Receive a part of the stack of the worker's main thread, as text. A long stack arrives in several parts."""

    def unread(self, worker: Worker) -> None:
        """Record that the worker has closed its connection without reading its task.

        The worker will exit, or has exited already. The error of the task then says that the worker died while idle.
        """

    def unsent(self, worker: Worker, error: TransferError) -> None:
        """Fail the task of the worker, because a message to the worker cannot be sent."""

    def exited(
        self, worker: Worker, exitcode: int | None, evidence: str, last: Sequence[tuple[Answer, Received]] = ()
    ) -> None:
        """Record that the process of the worker has ended.

        Args:
            worker: the worker.
            exitcode: its exit code, or None if it is unknown.
            evidence: further facts about the end of the process, as sentences.
            last: answers that the worker sent before its end and that were not passed to `answered`.
        """

    def no_room(self, workers: Sequence[Worker], error: ParallelError) -> None:
        """Record that these workers will never start, because Ray has found no free resources for them in time."""

    def fail(self, error: ParallelError) -> None:
        """End the pool, because it cannot go on."""


class Site(Protocol):
    """Starts the workers of one pool, either on this machine or on a Ray cluster."""

    def make_packer(self, on_forgotten: Callable[[int], None]) -> Packer:
        """Return the packer of calls for these workers.

        When the script deletes a handle, which is its reference to an object that workers keep, the packer calls
        ``on_forgotten`` with the number of the handle.
        """

    def open(self, loop: EventLoop, events: WorkerEvents) -> None:
        """Prepare to start workers, whose events are reported to ``events`` in the thread of ``loop``."""

    def start(self, rank: int, device: torch.device) -> Worker:
        """Ask for a worker, and return the object that represents it. The process may start later."""

    def resize(self, workers: int) -> bool:
        """Prepare for another number of workers. Return whether the present workers can stay."""

    def cores_for(self, workers: int) -> int:
        """Return the number of cores for each worker, if there are ``workers`` of them; 0 if several share a core."""

    def ranks(self, world_size: int, group: int) -> Ranks:
        """Return the description of the ranks of a `run`, which each rank receives with the task.

        ``group`` is the number of the ranks' process group, see `Ranks`.
        """

    def close(self) -> None:
        """End the workers that are left, and close all connections."""
