"""The ranks that an argument ``rank`` names: a number, several, one from the end, or a local rank of each node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .blocks import Blocks
from .liveness import members


def make_chooser(caller: str, rank: Any, local: bool = False) -> Callable[[Blocks], tuple[int, ...]]:
    """Return a function that gives the ranks of a world that ``rank`` names: of each node, if it is ``local``.

    Raises:
        TypeError, ValueError: ``rank`` can name no rank in any world.
    """
    wanted = _checked_ranks(caller, rank)
    if local:
        return lambda blocks: _local_ranks_in_world(caller, wanted[0], blocks)
    return lambda blocks: _ranks_in_world(caller, wanted, blocks.world_size)


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


def _local_ranks_in_world(caller: str, local_rank: int, blocks: Blocks) -> tuple[int, ...]:
    ranks = tuple(
        rank
        for rank, member in enumerate(members(blocks.context))
        if member.local_rank == (local_rank + member.local_world_size if local_rank < 0 else local_rank)
    )
    if not ranks:
        count = blocks.context.world.local_world_size
        raise ValueError(
            f"{caller}({local_rank}) cannot run: {count} ranks run on this node, so a local rank is 0..{count - 1} (or "
            f"-{count}..-1 from the end)."
        )
    return ranks


def listed(ranks: Sequence[int]) -> str:
    """``"0, 2"``."""
    return ", ".join(map(str, ranks))
