"""Code that only some ranks run (`on_rank`, `on_local_rank`, `rank_first`), and `barrier` and `broadcast`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar, overload

from ._engine.ranks import run_on_ranks
from ._engine.ranks.membership import as_seconds
from ._engine.ranks.rank_choice import make_chooser

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def on_rank(
    rank: int | Sequence[int],
    barrier: bool = False,
    *,
    broadcast: Literal[True],
    wait: bool = True,
    timeout: timedelta | float | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def on_rank(
    rank: int | Sequence[int],
    barrier: bool = False,
    *,
    broadcast: bool = False,
    wait: bool = True,
    timeout: timedelta | float | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def on_rank(
    rank: int | Sequence[int],
    barrier: bool = False,
    *,
    broadcast: bool = False,
    wait: bool = True,
    timeout: timedelta | float | None = None,
) -> Any:
    """Decorate a function so that only one rank, or some ranks, run it while the other ranks wait.

    Every rank calls the decorated function. The function runs on the named ranks. On any other rank, the call returns
    None once the named ranks have finished. If the function raises on a named rank, every rank raises `RankError` with
    the original exception and traceback. After ``except RankError``, the job can go on. The death of a process is an
    error too, but a slow process is not. In a process without other ranks, the function is simply called. A
    decorated function may be called inside the body of another one. It then runs if this rank is named, and no rank
    waits for it.

    If a function for *one* rank fails, the process group stays open. A function for *several* ranks is a block, which
    all ranks begin and end together. If the block fails on one rank, the process group is closed, because another rank
    may be waiting in a collective; `initialize_ddp()` makes the group again.

    Args:
        rank: the rank, or a sequence of ranks; a negative number counts from the end.
        barrier: if True, no rank returns from the call before all ranks have made the call.
        broadcast: if True, all ranks return the result of the first named rank. The result must be picklable.
        wait: if False, for instance for logging, the named ranks simply call the function. The other ranks go on
            immediately, and learn nothing about the call. An exception of the function is then an ordinary exception of
            its rank: it fails the block around the call, or ends the rank.
        timeout: how long a rank waits for the named ranks before it raises `RankTimeoutError`, in seconds or as a
            timedelta; no limit if None. If several ranks are named, all ranks raise the error.

    Raises:
        TypeError, ValueError: ``rank`` is not a rank, or is beyond the world size.
        RankError: the function raised on a named rank, or a process died.
        RankTimeoutError: a rank waited for longer than ``timeout``.
        ParallelError: the ranks call different functions. The message names both functions.

    Example::

        @on_rank(0)
        def save(model, path):
            torch.save(model.state_dict(), path)

        save(model, "model.pt")  # on every rank; when it returns, the file is there
    """
    return run_on_ranks.make_decorator(make_chooser("on_rank", rank), barrier, broadcast, wait, as_seconds(timeout))


@overload
def on_local_rank(
    rank: int,
    barrier: bool = False,
    *,
    broadcast: Literal[True],
    wait: bool = True,
    timeout: timedelta | float | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def on_local_rank(
    rank: int,
    barrier: bool = False,
    *,
    broadcast: bool = False,
    wait: bool = True,
    timeout: timedelta | float | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def on_local_rank(
    rank: int,
    barrier: bool = False,
    *,
    broadcast: bool = False,
    wait: bool = True,
    timeout: timedelta | float | None = None,
) -> Any:
    """Decorate a function so that on each node, the rank with the local rank ``rank`` runs it. See `on_rank`.

    The other ranks wait for the named ranks of all nodes, so that every rank learns of a failure on any node.

    Example::

        @on_local_rank(0)
        def download():
            ...  # to a disk that only this node can read
    """
    return run_on_ranks.make_decorator(
        make_chooser("on_local_rank", (rank,), local=True), barrier, broadcast, wait, as_seconds(timeout)
    )


def rank_first(
    rank: int = 0, *, local: bool = False, timeout: timedelta | float | None = None
) -> contextlib._GeneratorContextManager[None]:  # the result is also a decorator
    """Make a block that ``rank`` runs first, for instance to fill a cache that the others then read.

    If ``rank`` raises in the block, the other ranks do not run the block, and every rank raises `RankError`. If another
    rank raises in the block, only that rank raises the exception. A function with the decorator `on_rank` may be called
    inside the block; it then runs on its named ranks, and no rank waits for it. The block may also be used as a
    decorator.

    Args:
        rank: the rank that goes first; a negative number counts from the end.
        local: if True, ``rank`` is a local rank, so that one rank per node goes first.
        timeout: how long a rank waits before it raises `RankTimeoutError`, in seconds or as a timedelta; no limit if
            None.

    Raises:
        TypeError, ValueError, RankError, RankTimeoutError, ParallelError: for the reasons that `on_rank` gives.

    Example::

        with rank_first():
            dataset = load_dataset("data")  # rank 0 downloads it; then the other ranks read the downloaded files
    """
    return run_on_ranks.rank_first(make_chooser("rank_first", (rank,), local), as_seconds(timeout))


def barrier(*, timeout: timedelta | float | None = None) -> None:
    """Return once every rank has called this function.

    The ranks wait through the store, without a collective. If a rank fails or dies before it arrives, the waiting ranks
    raise an error, as in `on_rank`. If one rank gives up waiting, all ranks raise an error. If the barrier is inside a
    block of all ranks, such as ``with ParallelExecutor()``, a failure of the barrier is also a failure of this block.

    Args:
        timeout: how long a rank waits for the others before all ranks raise `RankTimeoutError`, in seconds or as a
            timedelta; no limit if None.

    Raises:
        RankError, RankTimeoutError: for the reasons that `on_rank` gives.
        ParallelError: the ranks call different functions; or this call is inside the body of a function that only some
            ranks run.

    Example::

        barrier()  # every rank has written its file
        if current_world().is_main:
            merge_files()
    """
    run_on_ranks.barrier(as_seconds(timeout))


def broadcast(obj: T, src: int = 0) -> T:
    """Return on every rank the ``obj`` that rank ``src`` passes. Every rank calls this function.

    Args:
        obj: on rank ``src``, any object that can be pickled. On the other ranks, the argument is ignored.
        src: the rank whose object is returned; a negative number counts from the end.

    Raises:
        TypeError, ValueError: there is no such rank.
        RankError: the object cannot be pickled, or rank ``src`` has died.
        ParallelError: the ranks call different functions. The message names both functions.

    Example::

        name = broadcast(time.strftime("run-%H%M%S"))  # one name for all
    """
    decorate = run_on_ranks.make_decorator(make_chooser("broadcast", src), False, True, True, None, "broadcast()")
    received: T = decorate(lambda: obj)()  # type: ignore[assignment]
    return received
