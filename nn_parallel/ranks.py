"""Code for one rank, or some: `on_rank`, `on_local_rank`, `rank_first`; and `barrier`, `broadcast`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar, overload

from ._engine.pickling import Packed, dumps
from ._engine.ranks.blocks import Blocks, block, blocks_of
from ._engine.ranks.exchange import broadcast_packed
from ._engine.ranks.liveness import local_places
from ._engine.ranks.membership import as_seconds, join_launched_world
from ._engine.ranks.records import Call, call_name, call_site
from .errors import ParallelError

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
    broadcast: Literal[False] = False,
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

    One rank that fails leaves the process group as it is. What *several* ranks run is a block: all ranks leave it
    together, and when one fails the group is closed, because another may sit in a collective; `initialize_ddp()` makes
    it again. With ``wait=False`` nobody waits, and the group stays.

    Args:
        rank: the rank, or several; a negative one counts from the end.
        barrier: nobody goes on before all ranks have arrived.
        broadcast: return the result everywhere (that of the first named rank) instead of None. It must be picklable.
        wait: False, for logging: the others do not wait, and raise an error of this call at their next one.
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
    return _decorator(_choice("on_rank", rank), barrier, broadcast, wait, as_seconds(timeout))


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
    broadcast: Literal[False] = False,
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
    return _decorator(_choice("on_local_rank", (rank,), local=True), barrier, broadcast, wait, as_seconds(timeout))


@contextlib.contextmanager
def rank_first(rank: int = 0, *, local: bool = False, timeout: timedelta | float | None = None) -> Iterator[None]:
    """A block that ``rank`` runs first, for instance to fill a cache that the others then read.

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
    choose, timeout_s = _choice("rank_first", (rank,), local), as_seconds(timeout)
    here = blocks_of(join_launched_world())
    if here is None or here.nested_in:
        yield
        return
    call = Call("rank_first()", choose(here), call_site())
    with _together(here, call, False, timeout_s) as goes_first:
        if goes_first:
            yield
    here.raise_late_failure()
    if not goes_first:
        with here.nested(range(here.world_size)):
            yield


def barrier(*, timeout: timedelta | float | None = None) -> None:
    """Return once every rank has called this.

    Through the store: a rank that fails or dies before it comes is an error on those that wait, as in `on_rank`.

    Args:
        timeout: how long a rank waits for the others before it raises `RankTimeoutError`; no limit if None.

    Raises:
        RankError, RankTimeoutError, ParallelError: as `on_rank`. It is inside the body of a function of some ranks.

    Example::

        barrier()  # every rank has written its file
        if current_world().is_main:
            merge_files()
    """
    if here := blocks_of(join_launched_world()):
        here.raise_if_nested("barrier()")
    on_rank(0, barrier=True, timeout=timeout)(_nothing)()


def broadcast(obj: T, src: int = 0) -> T:
    """The ``obj`` of rank ``src``, on every rank.

    Args:
        obj: anything that can be pickled; what the other ranks give is not looked at.
        src: the rank; a negative one counts from the end.

    Raises:
        TypeError, ValueError: there is no such rank.
        RankError: the object cannot be pickled, or rank ``src`` has died; RankError and ParallelError as `on_rank`.

    Example::

        name = broadcast(time.strftime("run-%H%M%S"))  # one name for all
    """
    received: T = _decorator(_choice("broadcast", src), False, True, True, None)(_same)(obj)  # type: ignore[assignment]
    return received


def _nothing() -> None:
    pass


def _same(obj: T) -> T:
    return obj


_nothing.__qualname__, _same.__qualname__ = "barrier", "broadcast"  # how errors call them


def _decorator(
    choose: Callable[[Blocks], tuple[int, ...]],
    barrier: bool,
    broadcast: bool,
    wait: bool,
    timeout_s: float | None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    if not wait and (barrier or broadcast):
        raise ValueError("wait=False cannot go with barrier=True or broadcast=True: both make every rank wait.")

    def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
        if not callable(fn):
            raise TypeError(f"it decorates a function, not {fn!r}: give it save, and not save().")
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{call_name(fn)} is async or a generator: its body runs after the call that ranks wait for."
            )

        name = call_name(fn)

        @functools.wraps(fn)
        def call_on_rank(*args: P.args, **kwargs: P.kwargs) -> R | None:
            here = blocks_of(join_launched_world())
            if here is None:
                return fn(*args, **kwargs)
            ranks = choose(here)
            if here.nested_in:
                if not set(ranks) & set(here.nested_in):
                    raise ValueError(
                        f"{name} of rank {_listed(ranks)} is called inside the body of a function of rank "
                        f"{_listed(here.nested_in)}: it would run nowhere."
                    )
                return fn(*args, **kwargs) if here.rank in ranks else None
            call = Call(name, ranks, call_site(), wait)
            result: R | None = None
            packed: Packed | None = None
            try:
                with _together(here, call, barrier, timeout_s) as runs:
                    if runs:
                        result = fn(*args, **kwargs)
                        if broadcast and here.rank == ranks[0]:
                            packed = dumps(result, lambda: {"the result": result})
                if broadcast:
                    with block(name):  # a failure here frees all
                        received: R = broadcast_packed(packed, ranks[0])
                    result = received if packed is None else result
                here.raise_late_failure()
            except ParallelError as error:
                raise error.with_traceback(None) from error.__cause__  # without our own frames
            return result

        return call_on_rank

    return decorate


def _together(
    here: Blocks, call: Call, barrier: bool, timeout_s: float | None
) -> contextlib.AbstractContextManager[bool]:
    """A call, or a block if several ranks run it: one may wait for another in a collective."""
    if len(call.ranks) == 1 or not call.wait:
        return here.call(call, barrier=barrier, timeout_s=timeout_s)
    return _block_of_some(here, call, timeout_s)


@contextlib.contextmanager
def _block_of_some(here: Blocks, call: Call, timeout_s: float | None) -> Iterator[bool]:
    """A block that only some ranks run. Yields whether this one does."""
    with here.block(call, timeout_s, from_end=True), here.nested(call.ranks):
        yield here.rank in call.ranks


def _choice(caller: str, rank: Any, local: bool = False) -> Callable[[Blocks], tuple[int, ...]]:
    """Which ranks of a world ``rank`` names, or which local rank of each node. Raises here if it can name none."""
    wanted = _checked_ranks(caller, rank)
    if local:
        return lambda here: _local_ranks_in_world(caller, wanted[0], here)
    return lambda here: _ranks_in_world(caller, wanted, here.world_size)


def _checked_ranks(caller: str, rank: Any) -> tuple[int, ...]:
    ranks = tuple(rank) if isinstance(rank, Sequence) and not isinstance(rank, str) else (rank,)
    if not ranks:
        raise ValueError(f"{caller}({rank!r}) names no rank: give one, 0 to world_size - 1, or a list of them.")
    for each in ranks:
        if not isinstance(each, int) or isinstance(each, bool):
            hint = f"; write @{caller}(0) above the function" if callable(each) else ""
            raise TypeError(
                f"{caller}({each!r}): a rank is an int, 0 to world_size - 1 or -world_size to -1 from the end{hint}."
            )
    return ranks


@functools.cache
def _ranks_in_world(caller: str, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    for rank in ranks:
        if not -world_size <= rank < world_size:
            raise ValueError(
                f"{caller}({rank}) cannot run: world_size is {world_size}, so a rank is 0..{world_size - 1} (or "
                f"-{world_size}..-1 from the end)."
            )
    return tuple(dict.fromkeys(rank % world_size for rank in ranks))


def _local_ranks_in_world(caller: str, local_rank: int, here: Blocks) -> tuple[int, ...]:
    ranks = tuple(
        rank
        for rank, (local, count) in enumerate(local_places(here.context))
        if local == (local_rank + count if local_rank < 0 else local_rank)
    )
    if not ranks:
        count = here.context.world.local_world_size
        raise ValueError(
            f"{caller}({local_rank}) cannot run: {count} ranks run on this node, so a local rank is 0..{count - 1} (or "
            f"-{count}..-1 from the end)."
        )
    return ranks


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
