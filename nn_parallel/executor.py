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

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
R = TypeVar("R")
# Maps the name of a parameter in other libraries to its name in this class, for a hint in an error message.
NAME_HERE = {"max_workers": "num_workers", "n_jobs": "num_workers", "device": "devices", "gpus": "devices"}


class ParallelExecutor(Executor):
    """Run functions on every device: a `concurrent.futures.Executor` whose workers are ranks.

    In a script, a notebook or a shell, the executor starts one process per device. Under a launcher (torchrun,
    ``env://``), its workers are the ranks that the launcher has started: every rank makes the same executor and the
    same calls, and `run` and `map` return the same results on all ranks. Arguments that choose workers must then
    describe the ranks that exist.

    Functions, including lambdas and closures, and the classes of ``__main__`` are sent to the workers by value. The
    script therefore needs no ``__main__`` guard, and workers do not run it again. The output of a worker appears in
    ``sys.stdout`` of this process. Without a launcher, the executor works on Linux only.

    Args:
        num_gpus: use the first ``num_gpus`` accelerators, or on a machine without accelerators, ``num_gpus`` CPU
            workers.
        pass_device: if True, bind the worker's device to the function's parameter ``device``, at any position. The
            caller's positional arguments fill the other parameters. A function without such a parameter is called
            without the device, and so is a function of an installed library, such as `numpy.zeros`.
        devices: ``"cpu"``, ``"all"``, ``"0,2-3"`` or a list of devices. If neither ``devices`` nor ``num_gpus`` is
            given, all accelerators are used, or one CPU worker per core on a machine without accelerators.
        num_workers: the number of workers. They get the devices in turn: with two devices and three workers, the first
            and the third worker share a device. If None, there is one worker per device, or on the CPU one per core.
        timeout: how long a call may take, counted from the moment at which a worker begins it, in seconds or as a
            timedelta; no limit if None. The limit applies to the initializer too. Under a launcher, it is also how long
            the ranks wait for each other at the end of the ``with`` block.
        initializer: a function that each worker calls once at its start. A worker that replaces a dead one calls it
            too.
        initargs: the arguments of ``initializer``.
        prefix_output: if True, begin each line that a worker prints with the worker's rank, as in ``[rank 1]``.
        engine: ``"local"``, or ``"ray"`` for workers on the nodes of a Ray cluster. Ray uses the cluster at
            ``RAY_ADDRESS``, else a cluster that runs on this machine, else a new cluster on this machine. ``"ray"``
            needs ``nn_parallel[ray]``.
        resources_per_worker: with ``engine="ray"``, resources that Ray reserves for each worker. The default is one
            ``CPU`` and, with accelerators, one ``GPU``. The given resources, such as ``{"CPU": 4}``, are added to the
            default or replace a part of it.
        placement: with ``engine="ray"``, ``"pack"`` to use as few nodes as possible, ``"spread"`` to use as many as
            possible.
        wait_for_resources: with ``engine="ray"``, how long to wait for these resources, in seconds or as a timedelta.

    Raises:
        TypeError: ``num_gpus`` is given together with ``devices``, a count is not an integer, ``initializer`` is not
            callable, or an argument has an unknown name.
        ValueError: there are fewer devices than were requested, or ``devices`` names a device that does not exist; or,
            under a launcher, the arguments do not describe the launcher's ranks.
        TransferError: the initializer cannot be sent.
        LaunchError: with ``engine="ray"``, if there is no cluster, if the cluster does not have the resources in time,
            or if a node has another version of this package or lacks the accelerator.
        ImportError: with ``engine="ray"``, if Ray is not installed.
        ParallelError: a worker imports a module that makes an executor at module level; or the platform is not Linux,
            and there is no launcher.

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
            similar = [NAME_HERE[name] for name in unknown if name in NAME_HERE]
            hint = f": perhaps {', '.join(similar)}" if similar else ""
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

        Inside ``fn``, `on_rank` works without any preparation. `initialize_ddp` connects the ranks through a process
        group, which is kept for the next call.

        Returns:
            The results, in rank order.

        Raises:
            RankError: ``fn`` raised on a rank, its result could not be sent, or a process died. The other ranks are
                freed from collectives and interrupted. A rank that does not end within half a second is killed. Killed
                and dead workers are replaced.
            RankTimeoutError: a rank took longer than ``timeout``. The message holds the Python stack of each such rank,
                except a rank that is stopped or is in C code that holds the GIL.
            TransferError: ``fn`` or an argument cannot be sent. The call has then begun on no rank.
            ExecutorClosedError: the executor has been shut down.

        Example::

            ex.run(lambda device, x: str(device), 1)  # ['cpu', 'cpu']
        """
        __tracebackhide__ = True
        try:
            return self._backend.run(fn, args, kwargs, self._options)
        except RankError as error:
            raise error.with_traceback(None) from error.__cause__  # drop the frames of this package

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Call ``fn`` on the next free device, as the only rank of its world.

        Returns:
            A future of the result. If ``fn`` raises an exception, the future raises the same exception, with the remote
            traceback as its cause. If the process dies, the future raises `WorkerDiedError`; other tasks are not
            affected. If the call takes longer than ``timeout``, the future raises `RankTimeoutError`. If ``fn``, an
            argument or the result cannot be sent, the future raises `TransferError`. A done-callback is called in a
            thread of the executor. If the callback waits in this thread for another call of the executor,
            `ParallelError` is raised.

        Raises:
            ExecutorClosedError: the executor has been shut down.
            ParallelError: there is a launcher. Its ranks make all calls together, but this call is for one rank only.

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
        """Call ``fn`` on every item. Each device gets further items as it becomes free.

        Args:
            timeout: the limit for all results, in seconds from the call of this method. If a result is not available by
                then, the iterator raises `TimeoutError`.
            chunksize: the number of items that are sent to a device at a time. If None, short items are sent in chunks
                that a device computes in about 10 milliseconds, and long items one by one.
            progress: True to show a progress bar, or a bar of tqdm. The bar counts the results as they are taken from
                the iterator. Under a launcher, the bar is on rank 0 and counts the items of this rank. With True, a bar
                is shown only in a notebook or on a terminal.

        Returns:
            An iterator over the results, in the order of the items. If ``fn`` raises an exception for an item, the
            iterator raises this exception in the place of the result. If a process dies, the iterator raises
            `WorkerDiedError` for each item that was sent to the process and has no result. Under a launcher, each rank
            computes its share of the items, and every rank gets all results.

        Raises:
            ValueError: ``chunksize`` is below one.
            TypeError: ``progress`` is not a bar, or ``chunksize`` is not an integer.
            ImportError: ``progress`` is True, and tqdm is not installed.
            ExecutorClosedError: the executor has been shut down.
            RankError: under a launcher, for the reasons that `run` gives.

        Example::

            list(ex.map(lambda x, device: x * 2, range(4)))  # [0, 2, 4, 6]
        """
        total = min((len(iterable) for iterable in iterables if isinstance(iterable, Sized)), default=None)
        bar = Progress(progress, total, call_name(fn))
        size = None if chunksize is None else count("chunksize", chunksize)
        return self._backend.map(fn, iterables, self._options, timeout, size, bar)

    def put(self, obj: Any) -> Any:
        """Return a handle of ``obj``, to pass to any number of calls. Each worker receives the object only once.

        The handle may be at any depth in the arguments of a call. The function receives the object itself in place of
        the handle. If a call changes the object, later calls on the same worker see the change. When the last reference
        to the handle is gone, the workers delete the object. Under a launcher, the handle is the object itself.

        Raises:
            TransferError: ``obj`` cannot be sent.
            ExecutorClosedError: the executor has been shut down.

        Example::

            data = ex.put(torch.ones(1000, 1000))
            ex.run(lambda x: x.sum().item(), data)  # [1000000.0, 1000000.0]
        """
        return self._backend.put(obj)

    def resize(self, num_workers: int) -> None:
        """Change the number of workers, once all calls made so far have ended.

        Args:
            num_workers: the new number of workers. They get the devices of this executor in turn, as in the
                constructor.

        Raises:
            ValueError: ``num_workers`` is below one; or there is a launcher, which determines the number of ranks.
            ExecutorClosedError: the executor has been shut down.

        Example::

            ex.resize(4)
            len(ex.run(str))  # 4
        """
        self._backend.resize(num_workers)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further calls, finish the calls made so far, and end the workers. May be called more than once.

        Args:
            wait: if True, return only after the calls have ended and the worker processes are gone.
            cancel_futures: if True, cancel the calls that have not begun.
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
            "an executor belongs to the process that made it: make its calls there, with the results that the function "
            "returns, or make another executor in the function"
        )


def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: bool = True,
    *,
    devices: str | torch.device | Sequence[str | torch.device | int] | None = None,
    timeout: timedelta | float | None = None,
    engine: Literal["local", "ray"] = "local",
) -> Callable[[Callable[..., R]], Callable[..., list[R]]]:
    """Decorate a function so that it runs on all devices at the same time and returns a list, one result per device.

    The first call starts the worker processes. All decorated functions with the same devices share these workers, which
    end after they have been idle for a minute. Under a launcher, every rank must call the function. It then runs on the
    ranks that the launcher has started, each on its own device. `ParallelExecutor.run` describes how the function is
    called.

    Args:
        num_gpus: use the first ``num_gpus`` accelerators, or on a machine without accelerators, ``num_gpus`` CPU
            workers. If None, use all accelerators, or one CPU worker per core.
        pass_device: if True, bind each worker's device to the function's parameter ``device``.
        devices: the devices, instead of ``num_gpus``; see `ParallelExecutor`.
        timeout: how long a call may take, in seconds or as a timedelta; no limit if None.
        engine: ``"ray"`` for the devices of a Ray cluster; see `ParallelExecutor`.

    Raises:
        TypeError, ValueError, LaunchError: when the function is called, for the reasons that `ParallelExecutor` gives.
        RankError, RankTimeoutError, TransferError: when the function is called, for the reasons that
            `ParallelExecutor.run` gives.

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
                except ExecutorClosedError:  # the workers were idle for a minute, and have just ended
                    continue
                except RankError as error:
                    raise error.with_traceback(None) from error.__cause__  # drop the frames of this package

        return call_on_all

    return decorate
