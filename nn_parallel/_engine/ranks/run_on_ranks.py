"""Code that only some ranks run while the others wait: the implementation of `on_rank`, `rank_first` and `barrier`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from ...errors import ParallelError
from ..pickling import Packed, dumps
from .blocks import Blocks, block, blocks_of
from .exchange import broadcast_packed
from .membership import join_launched_world
from .rank_choice import listed, make_chooser
from .records import Call, call_name, call_site

P = ParamSpec("P")
R = TypeVar("R")


def make_decorator(
    choose: Callable[[Blocks], tuple[int, ...]],
    barrier: bool,
    broadcast: bool,
    wait: bool,
    timeout_s: float | None,
    name: str = "",
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return the decorator of `nn_parallel.on_rank`.

    Args:
        choose: a function that returns the ranks that run the decorated function, see `make_chooser`.
        barrier: the argument of `nn_parallel.on_rank`.
        broadcast: the argument of `nn_parallel.on_rank`. If true, all ranks get the result of the first rank
            that ``choose`` returns.
        wait: the argument of `nn_parallel.on_rank`.
        timeout_s: the argument ``timeout`` of `nn_parallel.on_rank`, in seconds.
        name: the name of the call in errors; by default the name of the decorated function.

    Raises:
        ValueError: ``wait`` is False, but another argument makes all ranks wait.
    """
    if not wait and (barrier or broadcast):
        raise ValueError("wait=False cannot go with barrier=True or broadcast=True: both make every rank wait.")

    def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
        if not callable(fn):
            raise TypeError(f"The decorator takes a function, not {fn!r}: pass save, not save().")
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{call_name(fn)} is async or a generator: its body would run after the end of the call, for which the "
                "other ranks wait. Decorate a plain function."
            )

        call_in_errors = name or call_name(fn)

        @functools.wraps(fn)
        def call_on_rank(*args: P.args, **kwargs: P.kwargs) -> R | None:
            __tracebackhide__ = True
            blocks = blocks_of(join_launched_world())
            if blocks is None:
                return fn(*args, **kwargs)
            ranks = choose(blocks)
            if blocks.nested_in:
                if not set(ranks) & set(blocks.nested_in):
                    raise ValueError(
                        f"{call_in_errors} of rank {listed(ranks)} is called inside the body of a function of rank "
                        f"{listed(blocks.nested_in)}: it would run nowhere."
                    )
                if broadcast and not set(blocks.nested_in) <= set(ranks):
                    raise ValueError(
                        f"{call_in_errors} of rank {listed(ranks)} with broadcast=True is called inside the body of a "
                        f"function of rank {listed(blocks.nested_in)}: not all of these ranks would get the result. "
                        "Call it outside."
                    )
                return fn(*args, **kwargs) if blocks.rank in ranks else None
            if not wait:
                if blocks.rank not in ranks:
                    return None
                with blocks.nested(ranks):
                    return fn(*args, **kwargs)
            call = Call(call_in_errors, ranks, call_site())
            result: R | None = None
            packed: Packed | None = None
            try:
                with _call_or_block(blocks, call, timeout_s, barrier) as is_runner:
                    if is_runner:
                        result = fn(*args, **kwargs)
                        if broadcast and blocks.rank == ranks[0]:
                            packed = dumps(result, lambda: {"the result": result})
                if broadcast:
                    with block(call_in_errors):  # so that the other ranks are freed if one fails in the broadcast
                        received: R = broadcast_packed(packed, ranks[0])
                    result = received if packed is None else result
            except ParallelError as error:
                raise error.with_traceback(None) from error.__cause__  # drop the frames of this package
            return result

        return call_on_rank

    return decorate


def on_rank_0(name: str, fn: Callable[[], R], *, broadcast: bool = False) -> R | None:
    """Call ``fn`` on rank 0 while the other ranks wait, as one step of the public function ``name``.

    This works like a call of a function that is decorated with ``@on_rank(0)``, but errors name the public function,
    because the user does not know ``fn``.

    Returns:
        On rank 0, the result of ``fn``. On the other ranks the same result if ``broadcast`` is true, otherwise None.
    """
    return make_decorator(make_chooser(name, 0), False, broadcast, True, None, name)(fn)()


@contextlib.contextmanager
def rank_first(choose: Callable[[Blocks], tuple[int, ...]], timeout_s: float | None) -> Iterator[None]:
    """Make the ``with`` block of `nn_parallel.rank_first`. The ranks that ``choose`` returns run the block first."""
    blocks = blocks_of(join_launched_world())
    if blocks is None or blocks.nested_in:
        yield
        return
    call = Call("rank_first()", choose(blocks), call_site())
    with _call_or_block(blocks, call, timeout_s) as goes_first:
        if goes_first:
            yield
    if not goes_first:
        with blocks.nested(range(blocks.world_size)):
            yield


def barrier(timeout_s: float | None) -> None:
    """Wait until every rank has called this function. This is the body of `nn_parallel.barrier`."""
    blocks = blocks_of(join_launched_world())
    if blocks is not None:
        blocks.raise_if_nested("barrier()")
        blocks.barrier(blocks.call_of_all("barrier()"), timeout_s)


def _call_or_block(
    blocks: Blocks, call: Call, timeout_s: float | None, barrier: bool = False
) -> contextlib.AbstractContextManager[bool]:
    """Make ``call`` as a call of one rank, or as a block if several ranks run the call.

    Several ranks may wait for each other in a collective. If one of them fails, the others must be freed from the
    collective, and only a block does this.

    Returns:
        A context manager that yields True on the ranks that run the call, and False on the others.
    """
    if len(call.ranks) == 1:
        return blocks.call(call, timeout_s, barrier=barrier)
    return _block_of_some(blocks, call, timeout_s)


@contextlib.contextmanager
def _block_of_some(blocks: Blocks, call: Call, timeout_s: float | None) -> Iterator[bool]:
    """Make a block of all ranks. Only ``call.ranks`` run its body: yield True on these ranks, False on the others."""
    with blocks.block(call, timeout_s, from_end=True), blocks.nested(call.ranks):
        yield blocks.rank in call.ranks
