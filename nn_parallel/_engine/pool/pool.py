"""The part of a pool that runs in the user's threads.

It packs calls, posts them as tasks to the supervisor, which is the pool's own thread, and waits for the results.
"""

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

BLOCK_ITEMS = 256  # the maximum number of items of a `map` that are packed before they are posted to the supervisor


class Pool:
    """Workers that this script has started; implements `Backend`. The workers end when this object is deleted."""

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
            site: starts the workers on this machine or on a Ray cluster.
            devices_for: returns the devices for a number of workers. If the number is None, the function chooses it.
            num_workers: the number of workers, or None to let ``devices_for`` choose it.
            pack_initializer: packs the call of the initializer; None if the pool has no initializer.
            idle_limit_s: the time without a task after which the pool ends. If None, it never ends by itself.
        """
        # The process that has started the pool. A fork of this process must not use the pool, because the fork has
        # neither the thread of the supervisor nor the workers.
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
        """True if the pool takes no more calls, or if this process is a fork of the process that started the pool."""
        return self._supervisor.is_closing or self._pid != os.getpid()

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """Implement `Backend.run`."""
        call = self._open_packer().pack(fn, args, kwargs, options)
        results: list[Any] = self._wait(RunTask(call, Reply()))
        return results

    def submit(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> AnyFuture[Any]:
        """Implement `Backend.submit`."""
        future = Future(self._supervisor)
        try:
            call = self._open_packer().pack(fn, args, kwargs, options)
        except TransferError as error:
            future.complete(None, error)
            return future
        task = SingleTask(call, future)
        try:
            self._add(task)
        except BaseException:  # for example Ctrl-C: the caller gets no future, so the result is not needed
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
        """Implement `Backend.map`. All items are packed and posted now; the results are awaited one by one later."""
        items = zip(*iterables, strict=False)
        if chunksize is None:
            # Several items are packed as one group only if taking them from the iterables runs no user code. User code
            # could bind a global of `fn` to another object, and then `fn` must be packed again.
            is_plain = all(type(each) in (list, tuple, range) for each in iterables)
            blocks = _growing_blocks(items) if is_plain else ([args] for args in items)
            return progress.counted(self._map(fn, blocks, options, timeout_s, progress.name))
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        # The partial contains no items, so the workers can keep it.
        call_chunk = functools.partial(call_each, fn, options.pass_device)
        results = self._map(call_chunk, ([(chunk,)] for chunk in chunks), options, timeout_s, progress.name)
        return progress.counted(_results_of_chunks(results))

    def put(self, obj: Any) -> Any:
        """Implement `Backend.put`."""
        return self._open_packer().put(obj)

    def resize(self, num_workers: int) -> None:
        """Implement `Backend.resize`."""
        self._wait(ResizeTask(self._devices_for(num_workers), Reply()))

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Implement `Backend.shutdown`. In a fork of the process that started the pool, do nothing."""
        if self._pid == os.getpid():
            self._supervisor.close(wait=wait, cancel_waiting=cancel_futures)

    def __enter__(self) -> None:
        """Do nothing, because the constructor has started the workers."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool. After an exception, kill the workers, because their results are not needed any more."""
        if self._pid == os.getpid():
            self._supervisor.close(kill=error is not None)

    def _open_packer(self) -> Packer:
        """Return the packer. Raise an error if the pool takes no more tasks."""
        self._raise_if_inherited()
        if self._supervisor.broken is not None:
            raise self._supervisor.broken
        if self._supervisor.is_closing:
            raise ExecutorClosedError
        return self._supervisor.packer

    def _raise_if_inherited(self) -> None:
        """Raise `ExecutorClosedError` if this process is a fork of the process that started the pool."""
        if self._pid != os.getpid():
            raise ExecutorClosedError(
                f"This executor belongs to process {self._pid}, and process {os.getpid()} is a fork of it. Make a new "
                "executor in the fork."
            )

    def _wait(self, task: RunTask | ResizeTask) -> Any:
        """Post a task, wait until it has ended, and return its result."""
        self._open_packer()
        # Checked before the task is posted, because the task must not begin if this thread cannot wait for its result.
        refuse_to_wait_in(self._supervisor)
        try:
            self._add(task)
            return task.reply.result()
        except ParallelError:
            raise
        except BaseException:  # for example Ctrl-C: the result is not needed any more
            self._abandon(task)
            raise
        finally:
            del task  # breaks the reference cycle error -> traceback -> this frame -> `task` -> error

    def _add(self, *tasks: Task | ResizeTask) -> None:
        """Post tasks to the supervisor. If the thread of the supervisor has ended, fail the tasks in this thread."""
        self._supervisor.post(self._supervisor.add, tasks)
        self._supervisor.do_if_over()

    def _abandon(self, task: Task | ResizeTask) -> None:
        """Let the supervisor end a task whose result is not needed any more."""
        self._supervisor.post(self._supervisor.abandon, task)

    def _map(
        self,
        fn: Callable[..., Any],
        blocks: Iterable[Iterable[tuple[Any, ...]]],
        options: CallOptions,
        timeout_s: float | None,
        name: str,
    ) -> Generator[Any, None, None]:
        """Pack and post all items of a `map`, and return an iterator over the results.

        Args:
            fn: the function.
            blocks: the arguments of the items, in groups. The packer checks only at the beginning of a group whether
                ``fn`` or one of its globals has changed. So taking an item from a group must run no user code, because
                user code could change ``fn`` or a global. User code may run before a group begins.
            options: the options of the calls.
            timeout_s: how long the iterator waits for results, counted from this call. If None, there is no limit.
            name: the name of the call in errors.
        """
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
        except BaseException:  # an iterable has failed, or Ctrl-C has come, so that the caller gets no iterator
            mapping.is_wanted = False
            raise
        return self._results(mapping, count, deadline)

    def _results(self, mapping: Mapping, count: int, deadline: float | None) -> Generator[Any, None, None]:
        """Yield the results of a `map` in the order of its items. When the generator ends, no further item begins."""
        try:
            for index in range(count):
                if index not in mapping.outcomes:
                    self._wait_for_item(mapping, index, deadline)
                # No variable holds the result, because it would keep the result alive until the next one is taken.
                yield _take_result(mapping, index)
        finally:
            mapping.is_wanted = False

    def _wait_for_item(self, mapping: Mapping, index: int, deadline: float | None) -> None:
        """Wait until an item of a `map` has ended. Raise TimeoutError at the deadline."""
        self._raise_if_inherited()
        refuse_to_wait_in(self._supervisor)
        reply = Reply()
        self._supervisor.post(mapping.await_item, index, reply)
        self._supervisor.do_if_over()
        if deadline is None:
            reply.result()
        else:
            reply.result(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))


def _take_result(mapping: Mapping, index: int) -> Any:
    """Remove the outcome of an item from the `map`. Return its result, or raise its exception."""
    value, error = mapping.outcomes.pop(index)
    if error is None:
        return value
    try:
        raise error
    finally:
        del error  # breaks the reference cycle error -> traceback -> this frame -> `error`


def _growing_blocks(items: Iterator[tuple[Any, ...]]) -> Iterator[Iterable[tuple[Any, ...]]]:
    """Divide the items into the groups in which they are packed and posted to the supervisor.

    The first groups are small, so that the workers have something to do at once.
    """
    size = 1
    for first in items:
        yield itertools.chain([first], itertools.islice(items, size - 1))
        size = min(2 * size, BLOCK_ITEMS)


def _results_of_chunks(chunks: Generator[Any, None, None]) -> Iterator[Any]:
    """Yield the results of the single items of a `map`. Raise the first exception among them.

    Each element of ``chunks`` is a result of `call_each`, with the results of several items.
    """
    with contextlib.closing(chunks):  # so that no further chunk begins if this generator is closed early
        for results, failed in chunks:
            yield from results
            if failed is not None:
                error, failure = failed
                set_cause(error, failure.as_cause())
                try:
                    raise error
                finally:
                    del results, failed, error  # breaks the reference cycle error -> traceback -> this frame -> error
