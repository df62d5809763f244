"""Code that only some ranks run while the others wait: the decorator of `on_rank`, and the block of `rank_first`."""

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
from .rank_choice import listed
from .records import Call, call_name, call_site

P = ParamSpec("P")
R = TypeVar("R")


def make_decorator(
    choose: Callable[[Blocks], tuple[int, ...]],
    barrier: bool,
    broadcast: bool,
    wait: bool,
    timeout_s: float | None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return the decorator of `nn_parallel.on_rank` for the ranks that ``choose`` gives in a world."""
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
            __tracebackhide__ = True
            blocks = blocks_of(join_launched_world())
            if blocks is None:
                return fn(*args, **kwargs)
            ranks = choose(blocks)
            if blocks.nested_in:
                if not set(ranks) & set(blocks.nested_in):
                    raise ValueError(
                        f"{name} of rank {listed(ranks)} is called inside the body of a function of rank "
                        f"{listed(blocks.nested_in)}: it would run nowhere."
                    )
                return fn(*args, **kwargs) if blocks.rank in ranks else None
            if not wait:
                if blocks.rank not in ranks:
                    return None
                with blocks.nested(ranks):
                    return fn(*args, **kwargs)
            call = Call(name, ranks, call_site())
            result: R | None = None
            packed: Packed | None = None
            try:
                with _together(blocks, call, timeout_s, barrier) as runs:
                    if runs:
                        result = fn(*args, **kwargs)
                        if broadcast and blocks.rank == ranks[0]:
                            packed = dumps(result, lambda: {"the result": result})
                if broadcast:
                    with block(name):  # a failure here frees all
                        received: R = broadcast_packed(packed, ranks[0])
                    result = received if packed is None else result
            except ParallelError as error:
                raise error.with_traceback(None) from error.__cause__  # without our own frames
            return result

        return call_on_rank

    return decorate


@contextlib.contextmanager
def rank_first(choose: Callable[[Blocks], tuple[int, ...]], timeout_s: float | None) -> Iterator[None]:
    """Run the block of `nn_parallel.rank_first`, for the ranks that ``choose`` gives in a world."""
    blocks = blocks_of(join_launched_world())
    if blocks is None or blocks.nested_in:
        yield
        return
    call = Call("rank_first()", choose(blocks), call_site())
    with _together(blocks, call, timeout_s) as goes_first:
        if goes_first:
            yield
    if not goes_first:
        with blocks.nested(range(blocks.world_size)):
            yield


def barrier(timeout_s: float | None) -> None:
    """Return once every rank has called this, as `nn_parallel.barrier` does."""
    blocks = blocks_of(join_launched_world())
    if blocks is not None:
        blocks.raise_if_nested("barrier()")
        blocks.barrier(blocks.call_of_all("barrier()"), timeout_s)


def _together(
    blocks: Blocks, call: Call, timeout_s: float | None, barrier: bool = False
) -> contextlib.AbstractContextManager[bool]:
    """Make a call, or a block if several ranks run it: one may wait for another in a collective."""
    if len(call.ranks) == 1:
        return blocks.call(call, timeout_s, barrier=barrier)
    return _block_of_some(blocks, call, timeout_s)


@contextlib.contextmanager
def _block_of_some(blocks: Blocks, call: Call, timeout_s: float | None) -> Iterator[bool]:
    """Make a block that only some ranks run. Yields whether this one does."""
    with blocks.block(call, timeout_s, from_end=True), blocks.nested(call.ranks):
        yield blocks.rank in call.ranks
