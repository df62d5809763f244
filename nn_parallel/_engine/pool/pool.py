"""A pool as its callers see it: they pack calls, post tasks to the thread of the pool, and wait on futures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future as AnyFuture
from types import TracebackType
from typing import Any

import torch

from ...errors import ExecutorClosedError, ParallelError, TransferError
from ..by_value.packer import CallOptions, PackedCall, Packer
from ..failures import set_cause
from .forkserver_client import close_at_exit
from .futures import Future, Reply, refuse_to_wait_in
from .progress import Progress
from .protocols import Site
from .supervisor import Supervisor
from .tasks import MapItem, Mapping, ResizeTask, RunTask, SingleTask, Task
from .worker import call_each

BLOCK_ITEMS = 256  # of a map, that are packed before they are handed over


class Pool:
    """Workers that this program has started; implements `Backend`. They end when nobody refers to this any more."""

    def __init__(
        self,
        site: Site,
        devices_for: Callable[[int | None], list[torch.device]],
        num_workers: int | None,
        pack_initializer: Callable[[Packer], PackedCall] | None = None,
        idle_limit_s: float | None = None,
    ) -> None:
        """Start workers.

        Args:
            site: where they run.
            devices_for: gives the devices of so many workers.
            num_workers: how many; None: as many as `devices_for` gives.
            pack_initializer: packs the initializer, if there is one.
            idle_limit_s: after how many seconds without a task the pool ends; None: never.
        """
        self._pid = os.getpid()
        self._devices_for = devices_for
        self._supervisor = Supervisor(site, devices_for(num_workers), pack_initializer, idle_limit_s)
        self._supervisor.start()
        close_at_exit.add(self._supervisor)
        weakref.finalize(self, self._supervisor.orphan).atexit = False

    def __str__(self) -> str:
        return "shut down" if self.has_ended else f"workers: {self._supervisor}"

    @property
    def has_ended(self) -> bool:
        """As `Backend.has_ended`; true also in a fork of the process, which has no thread and no right to workers."""
        return self._supervisor.is_closing or self._pid != os.getpid()

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """As `Backend.run`."""
        call = self._open_packer().pack(fn, args, kwargs, options)
        results: list[Any] = self._wait(RunTask(call, self._make_reply()))
        return results

    def submit(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> AnyFuture[Any]:
        """As `Backend.submit`."""
        future = Future(self._supervisor)
        try:
            call = self._open_packer().pack(fn, args, kwargs, options)
        except TransferError as error:
            future.complete(None, error)
            return future
        task = SingleTask(call, future)
        try:
            self._add(task)
        except BaseException:  # Ctrl-C: nobody gets the future
            self._abandon(task)
            raise
        return future

    def map(
        self,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        options: CallOptions,
        timeout_s: float | None,
        chunksize: int | None,
        progress: Progress,
    ) -> Iterator[Any]:
        """As `Backend.map`."""
        items = zip(*iterables, strict=False)
        if chunksize is None:
            # To draw an item of these runs no code of the user's, which could bind anew what the function refers to.
            is_plain = all(type(each) in (list, tuple, range) for each in iterables)
            blocks = _growing_blocks(items) if is_plain else ([args] for args in items)
            return progress.counted(self._map(fn, blocks, options, timeout_s, progress.name))
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        call_chunk = functools.partial(call_each, fn)  # no more than that, so that the workers can keep it
        results = self._map(call_chunk, ([(chunk,)] for chunk in chunks), options, timeout_s, progress.name)
        return progress.counted(_joined(results))

    def put(self, obj: Any) -> Any:
        """As `Backend.put`."""
        return self._open_packer().put(obj)

    def resize(self, num_workers: int) -> None:
        """As `Backend.resize`."""
        self._wait(ResizeTask(self._devices_for(num_workers), self._make_reply()))

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """As `Backend.shutdown`."""
        if self._pid == os.getpid():
            self._supervisor.close(wait=wait, cancel_waiting=cancel_futures)

    def __enter__(self) -> None:
        """Nothing has to begin: the workers are there."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an exception nobody waits for what still runs."""
        if self._pid == os.getpid():
            self._supervisor.close(kill=error is not None)

    def _make_reply(self) -> Reply:
        return Reply(self._supervisor)

    def _open_packer(self) -> Packer:
        """Return the packer, if the pool takes tasks."""
        self._raise_if_inherited()
        if self._supervisor.broken is not None:
            raise self._supervisor.broken
        if self._supervisor.is_closing:
            raise ExecutorClosedError
        return self._supervisor.packer

    def _raise_if_inherited(self) -> None:
        if self._pid != os.getpid():
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")

    def _wait(self, task: RunTask | ResizeTask) -> Any:
        """Have a task done, and return its result."""
        self._open_packer()
        refuse_to_wait_in(self._supervisor)  # before it begins
        try:
            self._add(task)
            return task.reply.result()
        except ParallelError:
            raise
        except BaseException:  # Ctrl-C: nobody will take the result
            self._abandon(task)
            raise
        finally:
            del task  # it would live in a cycle with the traceback

    def _add(self, *tasks: Task | ResizeTask) -> None:
        self._supervisor.post(self._supervisor.add, tasks)
        self._supervisor.do_if_over()

    def _abandon(self, task: Task | ResizeTask) -> None:
        self._supervisor.post(self._supervisor.abandon, task)

    def _map(
        self,
        fn: Callable[..., Any],
        blocks: Iterable[Iterable[tuple[Any, ...]]],
        options: CallOptions,
        timeout_s: float | None,
        name: str,
    ) -> Generator[Any, None, None]:
        """Map the items of ``blocks``. Between two items of a block no code of the user's runs."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        mapping = Mapping()
        count = 0
        try:
            for block in blocks:
                packer = self._open_packer().look_at(fn, options, name)
                waiting: list[MapItem] = []
                for args in block:
                    try:
                        waiting.append(MapItem(*packer.pack_item(args), mapping, count))
                    except TransferError as error:
                        mapping.end_item(count, None, error)
                    count += 1
                self._add(*waiting)
        except BaseException:  # of the iterables, or Ctrl-C: nobody will take the results
            mapping.is_wanted = False
            raise
        return self._results(mapping, count, deadline)

    def _results(self, mapping: Mapping, count: int, deadline: float | None) -> Generator[Any, None, None]:
        try:
            for index in range(count):
                if index not in mapping.outcomes:
                    self._wait_for_item(mapping, index, deadline)
                yield _taken(mapping, index)  # not from a variable, in which the result would live on
        finally:
            mapping.is_wanted = False  # what has not begun then never does

    def _wait_for_item(self, mapping: Mapping, index: int, deadline: float | None) -> None:
        self._raise_if_inherited()
        reply = self._make_reply()
        self._supervisor.post(mapping.await_item, index, reply)
        self._supervisor.do_if_over()
        if deadline is None:
            reply.result()
        else:
            reply.result(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))


def _taken(mapping: Mapping, index: int) -> Any:
    """Take the result of an item, or raise its exception."""
    value, error = mapping.outcomes.pop(index)
    if error is None:
        return value
    try:
        raise error
    finally:
        del error  # it would live in a cycle with its traceback


def _growing_blocks(items: Iterator[tuple[Any, ...]]) -> Iterator[Iterable[tuple[Any, ...]]]:
    """Yield the items in blocks, small ones first, so that the workers have something to do at once."""
    size = 1
    for first in items:
        yield itertools.chain([first], itertools.islice(items, size - 1))
        size = min(2 * size, BLOCK_ITEMS)


def _joined(chunks: Generator[Any, None, None]) -> Iterator[Any]:
    """Yield the results that `call_each` gives for these chunks, or raise the first exception."""
    with contextlib.closing(chunks):  # what has not begun then never does
        for results, failed in chunks:
            yield from results
            if failed is not None:
                error, failure = failed
                set_cause(error, failure.as_cause())
                try:
                    raise error
                finally:
                    del results, failed, error  # they would live in a cycle with the traceback
