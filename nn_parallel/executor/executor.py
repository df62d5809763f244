"""`ParallelExecutor`: run functions on every device, in worker processes or on the ranks that a launcher started."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from datetime import timedelta
from types import TracebackType
from typing import Any, Never, NoReturn, Self, TypeVar

import torch

from ..calls.blocks import block
from ..calls.records import call_name, call_site
from ..ddp import as_seconds, join_launched_world
from ..devices import call_on_device, choose_devices, count, cpu_count, parse_devices
from ..errors import ExecutorClosedError, ParallelError, RankError, TransferError, rank_error, user_frames
from ..exchange import all_gather_packed
from ..launch.context import RankContext
from ..pickling import dumps
from .crew import Settings
from .jobs import Mapped, Resize, Run, Single
from .packing import CallOptions
from .supervisor import Supervisor
from .worker import call_each, in_this_process

UNINTERRUPTED = True  # see signals
R = TypeVar("R")
logger = logging.getLogger("nn_parallel")


class ParallelExecutor(Executor):
    """Run functions on every device: a `concurrent.futures.Executor` whose workers are ranks.

    In a script, a notebook or a shell it starts one process per device. Under a launcher (torchrun, ``env://``) its
    workers are the ranks already there: every rank makes the same executor and the same calls, `run` and `map` return
    the same results on all of them, and arguments that choose workers must say what is there.

    Functions, also lambdas and closures, and the classes of ``__main__`` travel by value: no ``__main__`` guard, no
    second run of the script. What a worker prints appears in this process's ``sys.stdout``. Linux only, but for the
    launched form.

    Args:
        num_gpus: the first so many accelerators; on a machine without any, so many CPU workers.
        pass_device: bind the worker's device to a function's parameter called ``device``, wherever it stands; the
            caller's positional arguments fill the others. A function without one is called without it.
        devices: ``"cpu"``, ``"all"``, ``"0,2-3"`` or a list of devices. If neither this nor ``num_gpus`` is given: all
            accelerators, or one CPU worker per core where there is none.
        num_workers: how many workers, over these devices in turn. If None: one per device, one per core on the CPU.
        timeout: seconds (or a timedelta) that a call, the initializer's too, may take on a worker, from when it begins
            there; under a launcher also how long the ranks wait for each other at the end of the ``with`` block. No
            limit if None.
        initializer: called once in each worker, also in one that replaces a dead one.
        initargs: its arguments.
        prefix_output: begin each line that a worker prints with ``[rank 1]``.

    Raises:
        TypeError: ``num_gpus`` together with ``devices``; ``num_gpus`` or ``num_workers`` is no integer.
        ValueError: there are fewer devices, or none of that name; under a launcher, other workers than its ranks.
        TransferError: the initializer cannot be sent.

    Example::

        with ParallelExecutor(num_workers=2, devices="cpu") as ex:
            ex.run(lambda device, x: x + 1, 1)  # [2, 2]
            list(ex.map(abs, [-1, -2, -3]))     # [1, 2, 3]
    """

    _idle_limit_s: float | None = None

    def __init__(
        self,
        num_gpus: int | None = None,
        pass_device: bool = True,
        *,
        devices: str | torch.device | Sequence[str | torch.device | int] | None = None,
        num_workers: int | None = None,
        timeout: timedelta | float | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        prefix_output: bool = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            hint = ": the number of workers is num_workers" if "max_workers" in unknown else ""
            raise TypeError(f"ParallelExecutor() has no parameter {', '.join(map(repr, unknown))}{hint}.")
        self._make_calls(pass_device, timeout)
        self._closed = False
        self._supervisor: Supervisor | None = None
        self._block: contextlib.AbstractContextManager[None] | None = None
        context = join_launched_world()
        if context is not None:
            _check_choice_is_what_runs(context, num_gpus, devices, num_workers)
            self._context: RankContext | None = context
            if initializer is not None:
                initializer(*initargs)
            return
        self._context = None
        if sys.platform != "linux":
            raise ParallelError("ParallelExecutor starts worker processes on Linux only: use WSL, Linux or torchrun.")
        self._devices_for = functools.partial(choose_devices, num_gpus, devices)
        chosen = self._devices_for(num_workers)
        if devices is None and chosen[0].type == "cpu":
            n = len(chosen)
            logger.info("No accelerator: %d CPU workers, %d threads each.", n, max(1, cpu_count() // n))
        settings = Settings(
            devices=chosen,
            initializer=initializer,
            initargs=initargs,
            timeout_s=self._options.timeout_s,
            idle_limit_s=self._idle_limit_s,
            prefix_output=prefix_output,
        )
        self._supervisor = Supervisor(settings)
        weakref.finalize(self, Supervisor.orphan, self._supervisor).atexit = False

    def run(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> list[R]:
        """Call ``fn`` once on every device, all at the same time, as the ranks of one world.

        Inside, `on_rank` works at once, and `initialize_ddp` connects the ranks by a process group, which is kept for
        the next call.

        Returns:
            The results, in rank order.

        Raises:
            RankError: ``fn`` raised on a rank, its result could not be sent, or a process died. The others are freed
                from collectives and interrupted, killed after half a second if that does not help; the pool is whole
                again afterwards.
            RankTimeoutError: a rank took longer than ``timeout``; the message holds the Python stack of each that did.
            TransferError: ``fn`` or an argument cannot be sent; nothing was started.
            ExecutorClosedError: after `shutdown`.

        Example::

            ex.run(lambda device, x: str(device), 1)  # ['cpu', 'cpu']
        """
        try:
            if self._supervisor is None:
                return self._run_on_ranks(fn, args, kwargs, call_name(fn), call_site(sys._getframe(1)))
            return self._run_on_workers(self._supervisor, fn, args, kwargs)
        except RankError as error:
            raise error.with_traceback(None) from error.__cause__  # without our own frames

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Call ``fn`` on the next free device, as the only rank of its world.

        Returns:
            A future of the result. An exception in ``fn`` is raised as itself, with the remote traceback as its cause;
            a process that dies as `WorkerDiedError`, for this task only; one that takes longer than ``timeout`` as
            `RankTimeoutError`; what cannot be sent, either way, as `TransferError`.

        Raises:
            ExecutorClosedError: after `shutdown`.
            ParallelError: under a launcher, where all ranks would have to submit the same.

        Example::

            ex.submit(pow, 2, 10).result()  # 1024
        """
        if self._supervisor is None:
            raise ParallelError(
                "submit() hands a task to one free worker, but here every rank makes every call: use run() or map()."
            )
        try:
            job = Single(self._supervisor.packer.pack(fn, args, kwargs, self._options), self._supervisor.callbacks)
        except TransferError as error:
            unsent: Future[R] = Future()
            unsent.set_exception(error)
            return unsent
        self._supervisor.submit(job)
        return job.future

    def map(
        self, fn: Callable[..., R], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[R]:
        """Call ``fn`` on every item, the items spread over the devices as these become free.

        Args:
            timeout: seconds from this call until a result must be there; `TimeoutError` from the iterator otherwise.
            chunksize: how many items go to a device at a time.

        Returns:
            An iterator over the results, in the order of the items; an exception of ``fn`` comes out at its place.
            Under a launcher each rank computes its share and every rank gets all results.

        Raises:
            ValueError: ``chunksize`` is below one.
            ExecutorClosedError: after `shutdown`. RankError: under a launcher, as `run`.

        Example::

            list(ex.map(lambda x, device: x * 2, range(4)))  # [0, 2, 4, 6]
        """
        chunksize = count("chunksize", chunksize)
        items = zip(*iterables, strict=False)
        if self._supervisor is None:
            return iter(self._map_over_ranks(fn, list(items)))
        name = call_name(fn)
        if chunksize == 1:
            return self._map_over_workers(self._supervisor, fn, items, timeout, name)
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        each = functools.partial(call_each, fn)  # no more than that, so that the workers can keep it
        return _joined(self._map_over_workers(self._supervisor, each, zip(chunks, strict=True), timeout, name))

    def put(self, obj: Any) -> Any:
        """Send ``obj`` once to each worker that needs it, and hand out a handle to pass to any number of calls.

        A call receives the object itself in the place of the handle, however deep that lies in its arguments; what it
        changes in it, later calls on the same worker see. The workers let go of it with the last reference to the
        handle. Under a launcher the handle is the object.

        Raises:
            TransferError: ``obj`` cannot be sent.
            ExecutorClosedError: after `shutdown`.

        Example::

            data = ex.put(torch.ones(1000, 1000))
            ex.run(lambda x: x.sum().item(), data)  # [1000000.0, 1000000.0]
        """
        if self._supervisor is None:
            return obj
        return self._supervisor.packer.put(obj)

    def resize(self, num_workers: int) -> None:
        """Grow or shrink to ``num_workers``, over the same devices in turn, once the calls made so far are over.

        Raises:
            ValueError: it is below one; under a launcher, where the ranks are what they are.
            ExecutorClosedError: after `shutdown`.

        Example::

            ex.resize(4)
            len(ex.run(str))  # 4
        """
        if self._supervisor is None:
            assert self._context is not None
            raise ValueError(f"resize() does not apply here: the workers are the {self._context.world_size} ranks.")
        job = Resize(self._devices_for(num_workers), self._supervisor.callbacks)
        self._supervisor.submit(job)
        job.over.result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, finish those that were made, end the workers. May be called again.

        Args:
            wait: return only when all is done and the processes are gone.
            cancel_futures: cancel what has not begun.
        """
        self._closed = True
        if self._supervisor is not None:
            self._supervisor.close(wait=wait, cancel_pending=cancel_futures)

    def __enter__(self) -> Self:
        if self._supervisor is None:
            self._raise_if_closed()
            site, timeout_s = call_site(sys._getframe(1)), self._options.timeout_s
            self._block = block("with ParallelExecutor()", site, timeout_s, from_end=True)
            self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        if self._supervisor is not None:  # after an exception nobody waits for what still runs
            self._supervisor.close(kill=error is not None)
        elif self._block is not None:
            self._block.__exit__(kind, error, traceback)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an executor belongs to the process that made it: make its calls there with what the function returns, or "
            "make another executor in the function"
        )

    def _make_calls(self, pass_device: bool, timeout: timedelta | float | None) -> None:
        self._options = CallOptions(pass_device, as_seconds(timeout))

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ExecutorClosedError

    def _run_on_workers(self, supervisor: Supervisor, fn: Callable[..., R], args: Any, kwargs: Any) -> list[R]:
        run = Run(supervisor.packer.pack(fn, args, kwargs, self._options))
        try:
            supervisor.lead(run.is_over, job=run)
            return run.result()
        except ParallelError:
            raise
        except BaseException:  # Ctrl-C: nobody will take the results
            supervisor.abandon(run)
            raise

    def _map_over_workers(
        self,
        supervisor: Supervisor,
        fn: Callable[..., Any],
        items: Iterable[tuple[Any, ...]],
        timeout: float | None,
        name: str,
    ) -> Generator[Any, None, None]:
        mapped = Mapped(timeout)
        try:
            for args in items:
                try:
                    call = supervisor.packer.pack(fn, args, {}, self._options, name)
                except TransferError as error:
                    mapped.add_unsent(error)
                else:
                    # it reads, as the supervisor's thread may have to wait long for its turn
                    supervisor.submit(mapped.add(call), reads=True)
        except BaseException:  # of the iterables, or Ctrl-C: nobody will take the results
            mapped.is_wanted = False
            raise
        return mapped.results(supervisor.lead)

    def _run_on_ranks(self, fn: Callable[..., R], args: Any, kwargs: Any, name: str, site: str) -> list[R]:
        """`run` where the workers are the ranks that all make this call."""
        self._raise_if_closed()
        assert self._context is not None
        device = self._context.world.device if self._options.pass_device else None
        if self._context.world_size == 1:
            try:
                return [in_this_process(call_on_device, fn, args, kwargs, device)]
            except Exception as error:
                raise rank_error(name, 1, {0: error.with_traceback(user_frames(error))}) from None
        with block(name, site, self._options.timeout_s):
            result = in_this_process(call_on_device, fn, args, kwargs, device)
            packed = dumps(result, lambda: {"the result": result})
        with block(name, site, self._options.timeout_s):  # only now are all outcomes known to be good
            return all_gather_packed(packed)

    def _map_over_ranks(self, fn: Callable[..., R], items: list[tuple[Any, ...]]) -> list[R]:
        assert self._context is not None
        rank, count = self._context.rank, self._context.world_size
        share = functools.partial(_call_each, fn, items[rank::count])
        shares = self._run_on_ranks(share, (), {}, call_name(fn), "map()")
        return [shares[index % count][index // count] for index in range(len(items))]


def _check_choice_is_what_runs(
    context: RankContext, num_gpus: int | None, devices: Any, num_workers: int | None
) -> None:
    """Under a launcher nothing is chosen: what is asked for must be what is there, so that one file runs both ways."""
    wrong = [
        f"{name}={value!r}"
        for name, value, is_there in (
            ("num_gpus", num_gpus, num_gpus and count("num_gpus", num_gpus) == context.world_size),
            ("num_workers", num_workers, num_workers and count("num_workers", num_workers) == context.world_size),
            ("devices", devices, devices is not None and context.world.device in parse_devices(devices)),
        )
        if value is not None and not is_there
    ]
    if wrong:
        raise ValueError(
            f"{wrong[0]} does not apply here: the workers are the {context.world_size} ranks that run already, this "
            f"one on {context.world.device}."
        )


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


def _call_each(fn: Callable[..., R], items: Iterable[tuple[Any, ...]], device: torch.device | None = None) -> list[R]:
    return [call_on_device(fn, item, {}, device) for item in items]
