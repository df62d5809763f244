"""The calls of `ParallelExecutor` where no launcher has started ranks: its workers are those of a pool."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ParallelError, TransferError
from ..by_value.packer import CallOptions, PackedCall
from .pool import Pool
from .progress import Progress
from .tasks import CallFuture, Item, Mapped, Resize, Run
from .worker import call_each

if TYPE_CHECKING:
    from ..ray.pool import RayPool


class StartedWorkers:
    """Worker processes that this program has started; they end when nobody refers to this any more."""

    def __init__(self, devices_for: Callable[[int], list[torch.device]], pool: Pool | RayPool) -> None:
        """``devices_for`` gives the devices of so many workers."""
        self._devices_for, self.pool = devices_for, pool
        weakref.finalize(self, pool.orphan).atexit = False

    def __str__(self) -> str:
        return str(self.pool)

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more calls, at least of this process."""
        return self.pool.has_ended

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """As `ParallelExecutor.run`."""
        run = Run(self.pool.packer.pack(fn, args, kwargs, options))
        try:
            self.pool.lead(run.is_over, task=run)
            return run.result()
        except ParallelError:
            raise
        except BaseException:  # Ctrl-C: nobody will take the results
            self.pool.abandon(run)
            raise

    def submit(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> Future[Any]:
        """As `ParallelExecutor.submit`."""
        try:
            call = self.pool.packer.pack(fn, args, kwargs, options)
        except TransferError as error:
            unsent = Future[Any]()
            unsent.set_exception(error)
            return unsent
        single = CallFuture(call, self.pool.callbacks)
        self.pool.submit(single)
        return single

    def map(
        self,
        fn: Callable[..., Any],
        items: Iterator[tuple[Any, ...]],
        options: CallOptions,
        timeout_s: float | None,
        chunksize: int,
        progress: Progress,
    ) -> Iterator[Any]:
        """As `ParallelExecutor.map`; each item is the arguments of a call."""
        if chunksize == 1:
            return progress.counted(self._map(fn, items, options, timeout_s, progress.name))
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        each = functools.partial(call_each, fn)  # no more than that, so that the workers can keep it
        return progress.counted(_joined(self._map(each, zip(chunks, strict=True), options, timeout_s, progress.name)))

    def put(self, obj: Any) -> Any:
        """As `ParallelExecutor.put`."""
        return self.pool.packer.put(obj)

    def resize(self, num_workers: int) -> None:
        """As `ParallelExecutor.resize`."""
        resize = Resize(self._devices_for(num_workers), self.pool.callbacks)
        self.pool.submit(resize)
        resize.result()

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        """As `ParallelExecutor.shutdown`."""
        self.pool.close(wait=wait, cancel_pending=cancel_futures)

    def __enter__(self) -> None:
        """Nothing has to begin: the workers are there."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an exception nobody waits for what still runs."""
        self.pool.close(kill=error is not None)

    def _map(
        self, fn: Callable[..., Any], items: Iterable[Any], options: CallOptions, timeout_s: float | None, name: str
    ) -> Generator[Any, None, None]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        mapped, made = Mapped(), deque[Item]()
        try:
            for args in items:
                try:
                    item = Item(self.pool.packer.pack(fn, args, {}, options, name), mapped)
                except TransferError as error:
                    item = Item(PackedCall.unsent(name, options), mapped)
                    item.fail(error)
                else:
                    self.pool.submit(item, reads=True)  # the supervisor's thread may have to wait long for its turn
                made.append(item)
        except BaseException:  # of the iterables, or Ctrl-C: nobody will take the results
            mapped.is_wanted = False
            raise
        return self._results(mapped, made, deadline)

    def _results(self, mapped: Mapped, made: deque[Item], deadline: float) -> Generator[Any, None, None]:
        try:
            while made:
                item = made.popleft()
                if not item.is_over():
                    self.pool.lead(item.is_over, deadline)
                yield item.result(deadline)
        finally:
            mapped.is_wanted = False  # what has not begun then never does


def _joined(chunks: Generator[Any, None, None]) -> Iterator[Any]:
    """The results that `call_each` gives for these chunks, or the first exception."""
    with contextlib.closing(chunks):  # what has not begun then never does
        for results, failed in chunks:
            yield from results
            if failed is not None:
                error, failure = failed
                error.__cause__ = failure.as_cause()
                try:
                    raise error
                finally:
                    del results, failed, error  # they would live in a cycle with the traceback
