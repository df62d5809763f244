"""Code for one rank, or some: `on_rank`, `on_local_rank`, `rank_first`; and `barrier`, `broadcast`."""

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
    """Run a function on one rank, or on some; the others wait for it.

    Every rank calls the function; where a rank is not named, the call returns None once the named ones have finished.
    If it raises on one, every rank raises `RankError` with the original exception and traceback; after `except
    RankError` the job can go on. A process that dies is an error too; a slow one is not. Alone, it is a plain call.
    Inside the body of another such function it runs if this rank is named, and nobody waits.

    One rank that fails leaves the process group as it is. What *several* ranks run is a block: all ranks begin and end
    it together, and when one fails the group is closed, because another may sit in a collective; `initialize_ddp()`
    makes it again.

    Args:
        rank: the rank, or several; a negative one counts from the end.
        barrier: nobody goes on before all ranks have arrived.
        broadcast: return the result everywhere (that of the first named rank) instead of None. It must be picklable.
        wait: False, for logging: a plain call on the named ranks. The others go on at once and are told nothing; if it
            raises, it fails the block around it, or ends its rank, like any line of the program.
        timeout: how long a rank waits for the others before it raises `RankTimeoutError`; no limit if None. Where
            several ranks run, all raise it.

    Raises:
        TypeError, ValueError: ``rank`` is not a rank, or beyond the world size.
        RankError, RankTimeoutError: as said above.
        ParallelError: the ranks call different functions; the message names both.

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
    """Run a function once per node: on the rank that is number ``rank`` there. Everything else is as in `on_rank`.

    The others wait for the ranks of all nodes, so that a failure on one node is known on all.

    Example::

        @on_local_rank(0)
        def download():
            ...  # to a disk that each node has for itself
    """
    return run_on_ranks.make_decorator(
        make_chooser("on_local_rank", (rank,), local=True), barrier, broadcast, wait, as_seconds(timeout)
    )


def rank_first(
    rank: int = 0, *, local: bool = False, timeout: timedelta | float | None = None
) -> contextlib._GeneratorContextManager[None]:  # also a decorator
    """Make a block that ``rank`` runs first, for instance to fill a cache that the others then read.

    If it raises there, the others do not run it: every rank raises `RankError`. What another rank raises in it stays
    on that rank. Functions of `on_rank` inside the block run where they are named, and nobody waits for them.

    Args:
        rank: the rank that goes first; a negative one counts from the end.
        local: ``rank`` is a local rank: one rank per node goes first.
        timeout: how long a rank waits before it raises `RankTimeoutError`.

    Raises:
        TypeError, ValueError, RankError, RankTimeoutError, ParallelError: as `on_rank`.

    Example::

        with rank_first():
            dataset = load_dataset("data")  # rank 0 downloads it, the others find it there
    """
    return run_on_ranks.rank_first(make_chooser("rank_first", (rank,), local), as_seconds(timeout))


def barrier(*, timeout: timedelta | float | None = None) -> None:
    """Return once every rank has called this.

    Through the store: a rank that fails or dies before it comes is an error on those that wait, as in `on_rank`. When
    one rank gives up, all do; inside a block of all ranks, as ``with ParallelExecutor()``, the block has then failed.

    Args:
        timeout: how long a rank waits for the others before all raise `RankTimeoutError`; no limit if None.

    Raises:
        RankError, RankTimeoutError, ParallelError: as `on_rank`. It is inside the body of a function of some ranks.

    Example::

        barrier()  # every rank has written its file
        if current_world().is_main:
            merge_files()
    """
    run_on_ranks.barrier(as_seconds(timeout))


def broadcast(obj: T, src: int = 0) -> T:
    """Return the ``obj`` of rank ``src``, on every rank.

    Args:
        obj: anything that can be pickled; what the other ranks give is not looked at.
        src: the rank; a negative one counts from the end.

    Raises:
        TypeError, ValueError: there is no such rank.
        RankError: the object cannot be pickled, or rank ``src`` has died; RankError and ParallelError as `on_rank`.

    Example::

        name = broadcast(time.strftime("run-%H%M%S"))  # one name for all
    """
    received: T = run_on_ranks.make_decorator(make_chooser("broadcast", src), False, True, True, None)(_same)(obj)  # type: ignore[assignment]
    return received


def _same(obj: T) -> T:
    return obj


_same.__qualname__ = "broadcast"  # how errors call it
