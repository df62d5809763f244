"""`ParallelExecutor`, `parallelize_on_gpus`: functions on every device, in worker processes or on launched ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Executor, Future
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Never, NoReturn, Self, TypeVar

import torch

from ._engine.by_value.packer import CallOptions
from ._engine.devices import count
from ._engine.pool.backend import PoolOptions, make_backend, shared_backend
from ._engine.pool.progress import Progress
from ._engine.ranks.membership import as_seconds
from ._engine.ranks.records import call_name
from .errors import ExecutorClosedError, RankError

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
R = TypeVar("R")
# Parameters that other libraries call so.
MEANT = {"max_workers": "num_workers", "n_jobs": "num_workers", "device": "devices", "gpus": "devices"}


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
            caller's positional arguments fill the others. A function without one is called without it, and so is one
            of an installed library, such as `numpy.zeros`.
        devices: ``"cpu"``, ``"all"``, ``"0,2-3"`` or a list of devices. If neither this nor ``num_gpus`` is given: all
            accelerators, or one CPU worker per core where there is none.
        num_workers: how many workers, over these devices in turn. If None: one per device, one per core on the CPU.
        timeout: seconds (or a timedelta) that a call, the initializer's too, may take on a worker, from when it begins
            there; under a launcher also how long the ranks wait for each other at the end of the ``with`` block. No
            limit if None.
        initializer: called once in each worker, also in one that replaces a dead one.
        initargs: its arguments.
        prefix_output: begin each line that a worker prints with ``[rank 1]``.
        engine: ``"local"``; or ``"ray"``, for workers on the nodes of a Ray cluster: the one at ``RAY_ADDRESS``, one
            that runs on this machine, or one that is started here. It needs ``nn_parallel[ray]``.
        resources_per_worker: with ``engine="ray"``, what Ray sets aside for each worker, beside one ``CPU`` and, with
            accelerators, one ``GPU``, or instead of these: ``{"CPU": 4}``.
        placement: with ``engine="ray"``, ``"pack"`` for as few nodes as possible, or ``"spread"`` over as many.
        wait_for_resources: with ``engine="ray"``, seconds (or a timedelta) to wait for that.

    Raises:
        TypeError: ``num_gpus`` together with ``devices``; a count is no integer, ``initializer`` no callable.
        ValueError: there are fewer devices, or none of that name; under a launcher, other workers than its ranks.
        TransferError: the initializer cannot be sent.
        LaunchError: with ``engine="ray"``, there is no cluster, no room in it in time, or a node is not fit.
        ImportError: with ``engine="ray"``, Ray is not installed.
        ParallelError: a worker imports a module that makes an executor at its top.

    Example::

        with ParallelExecutor(num_workers=2, devices="cpu") as ex:
            ex.run(lambda device, x: x + 1, 1)  # [2, 2]
            list(ex.map(abs, [-1, -2, -3]))     # [1, 2, 3]
    """

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
        engine: Literal["local", "ray"] = "local",
        resources_per_worker: Mapping[str, float] | None = None,
        placement: Literal["pack", "spread"] = "pack",
        wait_for_resources: timedelta | float = 300.0,
        **unknown: Never,
    ) -> None:
        if unknown:
            meant = [MEANT[name] for name in unknown if name in MEANT]
            hint = f": perhaps {', '.join(meant)}" if meant else ""
            raise TypeError(f"ParallelExecutor() has no parameter {', '.join(map(repr, unknown))}{hint}.")
        workers = PoolOptions(
            num_gpus=num_gpus,
            devices=devices,
            num_workers=num_workers,
            initializer=initializer,
            initargs=initargs,
            prefix_output=prefix_output,
            engine=engine,
            resources_per_worker=resources_per_worker,
            placement=placement,
            wait_for_resources=wait_for_resources,
        )
        self._options = CallOptions(pass_device, as_seconds(timeout))
        self._backend = make_backend(workers, self._options)

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
            RankTimeoutError: a rank took longer than ``timeout``; the message holds the Python stack of each that did,
                but for one that is stopped or in C code that holds the GIL.
            TransferError: ``fn`` or an argument cannot be sent; nothing was started.
            ExecutorClosedError: after `shutdown`.

        Example::

            ex.run(lambda device, x: str(device), 1)  # ['cpu', 'cpu']
        """
        __tracebackhide__ = True
        try:
            return self._backend.run(fn, args, kwargs, self._options)
        except RankError as error:
            raise error.with_traceback(None) from error.__cause__  # without our own frames

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Call ``fn`` on the next free device, as the only rank of its world.

        Returns:
            A future of the result. An exception in ``fn`` is raised as itself, with the remote traceback as its cause;
            a process that dies as `WorkerDiedError`, for this task only; one that takes longer than ``timeout`` as
            `RankTimeoutError`; what cannot be sent, either way, as `TransferError`. A done-callback is called in a
            thread of the executor, where waiting for another of its calls is a `ParallelError`.

        Raises:
            ExecutorClosedError: after `shutdown`.
            ParallelError: under a launcher, where all ranks would have to submit the same.

        Example::

            ex.submit(pow, 2, 10).result()  # 1024
        """
        return self._backend.submit(fn, args, kwargs, self._options)

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        progress: Any = False,
    ) -> Iterator[R]:
        """Call ``fn`` on every item, the items spread over the devices as these become free.

        Args:
            timeout: seconds from this call until a result must be there; `TimeoutError` from the iterator otherwise.
            chunksize: how many items go to a device at a time. If None: as many small items as it does in about 10
                milliseconds, and long ones each by itself.
            progress: True, or a bar of tqdm: it counts the results as they are taken; under a launcher, on rank 0, its
                share of the items. With True there is a bar in a notebook or on a terminal, and none elsewhere.

        Returns:
            An iterator over the results, in the order of the items; an exception of ``fn`` comes out at its place. A
            process that dies is a `WorkerDiedError` of each item that it was sent and has not answered.
            Under a launcher each rank computes its share and every rank gets all results.

        Raises:
            ValueError: ``chunksize`` is below one.
            TypeError: ``progress`` is no bar. ImportError: it is True, and tqdm is not installed.
            ExecutorClosedError: after `shutdown`. RankError: under a launcher, as `run`.

        Example::

            list(ex.map(lambda x, device: x * 2, range(4)))  # [0, 2, 4, 6]
        """
        total = min((len(each) for each in iterables if isinstance(each, Sized)), default=None)
        shown = Progress(progress, total, call_name(fn))
        size = None if chunksize is None else count("chunksize", chunksize)
        return self._backend.map(fn, iterables, self._options, timeout, size, shown)

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
        return self._backend.put(obj)

    def resize(self, num_workers: int) -> None:
        """Grow or shrink to ``num_workers``, over the same devices in turn, once the calls made so far are over.

        Raises:
            ValueError: it is below one; under a launcher, where the ranks are what they are.
            ExecutorClosedError: after `shutdown`.

        Example::

            ex.resize(4)
            len(ex.run(str))  # 4
        """
        self._backend.resize(num_workers)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, finish those that were made, end the workers. May be called again.

        Args:
            wait: return only when all is done and the processes are gone.
            cancel_futures: cancel what has not begun.
        """
        self._backend.shutdown(wait, cancel_futures)

    def __enter__(self) -> Self:
        self._backend.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._backend.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._backend}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an executor belongs to the process that made it: make its calls there with what the function returns, or "
            "make another executor in the function"
        )


def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: bool = True,
    *,
    devices: str | torch.device | Sequence[str | torch.device | int] | None = None,
    timeout: timedelta | float | None = None,
    engine: Literal["local", "ray"] = "local",
) -> Callable[[Callable[..., R]], Callable[..., list[R]]]:
    """Make a function run on every device at once and return the list of its results, one per device.

    The processes are started at the first call, shared by all functions with the same devices, and let go after an idle
    minute. Under a launcher it is a collective call on the ranks already there, and the devices are theirs. See
    `ParallelExecutor.run` for how the function is called and what it raises.

    Args:
        num_gpus: the first so many accelerators; on a machine without any, so many CPU workers. If None: all.
        pass_device: bind each worker's device to the parameter called ``device``.
        devices: instead of ``num_gpus``; see `ParallelExecutor`.
        timeout: seconds (or a timedelta) that a call may take.
        engine: ``"ray"`` for the devices of a Ray cluster; see `ParallelExecutor`.

    Raises:
        TypeError, ValueError, LaunchError: at the call, as `ParallelExecutor`.
        RankError, RankTimeoutError, TransferError: at the call, as `ParallelExecutor.run`.

    Example::

        @parallelize_on_gpus(num_gpus=2)
        def double(device, data):
            return data.to(device) * 2

        double(torch.tensor([1, 2]))  # [tensor([2, 4]), tensor([2, 4])]
    """
    if callable(num_gpus):
        raise TypeError("write @parallelize_on_gpus(), with parentheses.")

    def decorate(fn: Callable[..., R]) -> Callable[..., list[R]]:
        @functools.wraps(fn)
        def call_on_all(*args: Any, **kwargs: Any) -> list[R]:
            __tracebackhide__ = True
            workers = PoolOptions(num_gpus=num_gpus, devices=devices, engine=engine)
            options = CallOptions(pass_device, as_seconds(timeout))
            while True:
                try:
                    return shared_backend(workers, options).run(fn, args, kwargs, options)
                except ExecutorClosedError:  # its idle minute ended just now
                    continue
                except RankError as error:
                    raise error.with_traceback(None) from error.__cause__  # without our own frames

        return call_on_all

    return decorate
