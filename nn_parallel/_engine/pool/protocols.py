"""The interfaces between a `ParallelExecutor`, a pool, its workers, and the place where they run."""

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
    """The calls of a `ParallelExecutor` on workers or ranks. The methods do what those of the executor do."""

    @property
    def has_ended(self) -> bool:
        """Return whether the backend takes no more calls, at least from this process."""

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """As `ParallelExecutor.run`."""

    def submit(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> Future[Any]:
        """As `ParallelExecutor.submit`."""

    def map(
        self,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        options: CallOptions,
        timeout_s: float | None,
        chunksize: int | None,
        progress: Progress,
    ) -> Iterator[Any]:
        """As `ParallelExecutor.map`."""

    def put(self, obj: Any) -> Any:
        """As `ParallelExecutor.put`."""

    def resize(self, num_workers: int) -> None:
        """As `ParallelExecutor.resize`."""

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """As `ParallelExecutor.shutdown`."""

    def __enter__(self) -> None:
        """As `ParallelExecutor.__enter__`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `ParallelExecutor.__exit__`."""


class Worker(Protocol):
    """A worker as its pool sees it. The pool's thread calls it. No method waits; a worker answers by `WorkerEvents`."""

    rank: int
    device: torch.device
    pid: int
    exit_told_within_s: float  # how long it can take the pool to hear that the process is gone

    @property
    def description(self) -> str:
        """As errors name the worker."""

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""

    def send(self, task: TaskHeader, call: PackedCall) -> None:
        """Send a task, and before it the objects that it needs and this worker has not got.

        Raises:
            TransferError: it cannot be sent; the worker knows nothing of the task.
        """

    def forget(self, numbers: Iterable[int]) -> None:
        """Tell the worker that the handles of these numbers are gone: it need not keep their objects."""

    def cancel(self, number: int) -> None:
        """Interrupt the task of this number."""

    def ask_for_stack(self) -> None:
        """Have the worker tell where its main thread stands."""

    def hand_back(self) -> None:
        """Have the worker answer the calls of its batch that are over, and begin no more of them."""

    def leave(self) -> None:
        """Have the worker exit once it has done what it was sent."""

    def kill(self) -> None:
        """Kill the worker and what it has started."""


class WorkerEvents(Protocol):
    """The events of workers. They are told to a pool in its thread."""

    def forked(self, worker: Worker) -> None:
        """Note that the process is there."""

    def answered(self, worker: Worker, answer: Answer, payload: Received) -> None:
        """Take an answer: the worker has done a task, or takes tasks from now on."""

    def told_stack(self, worker: Worker, text: str) -> None:
        """Take a part of the stack of the worker."""

    def unread(self, worker: Worker) -> None:
        """Note that the worker has exited without reading its task."""

    def unsent(self, worker: Worker, error: TransferError) -> None:
        """Fail the task that could not be sent."""

    def exited(
        self, worker: Worker, exitcode: int | None, evidence: str, last: Sequence[tuple[Answer, Received]] = ()
    ) -> None:
        """Note that the process is gone.

        Args:
            worker: whose process it was.
            exitcode: None if it is unknown.
            evidence: what is known beside the exit code.
            last: what it had answered before.
        """

    def no_room(self, workers: Sequence[Worker], error: ParallelError) -> None:
        """There has been no room for these workers in time, and they will never start."""

    def fail(self, error: ParallelError) -> None:
        """End everything: the pool cannot go on."""


class Site(Protocol):
    """The place of the workers of one pool: this machine, or a Ray cluster."""

    def make_packer(self, on_forgotten: Callable[[int], None]) -> Packer:
        """Return the packer of calls for these workers."""

    def open(self, loop: EventLoop, events: WorkerEvents) -> None:
        """Have workers tell their events, in the thread of ``loop``."""

    def start(self, rank: int, device: torch.device) -> Worker:
        """Start a worker; it need not be there yet."""

    def resize(self, workers: int) -> bool:
        """Prepare for another number of workers; return whether those that there are can stay."""

    def cores_for(self, workers: int) -> int:
        """Return how many cores each of so many workers may use; 0: they share one."""

    def ranks(self, world_size: int, group: int) -> Ranks:
        """Return what all ranks of a run are told, their store among it."""

    def close(self) -> None:
        """End the workers that are left, and let go of everything."""
