"""The ranks that the argument ``rank`` of a public function names.

The argument can be a rank, a sequence of ranks, or a local rank, which names one rank on each node. A negative number
counts from the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .blocks import Blocks
from .liveness import members


def make_chooser(caller: str, rank: Any, local: bool = False) -> Callable[[Blocks], tuple[int, ...]]:
    """Return a function that takes a world's `Blocks` and returns the ranks that ``rank`` names in this world.

    A decorator such as `on_rank` calls `make_chooser` before the world size is known. Therefore `make_chooser` checks
    only the type of ``rank``. The returned function checks whether the world has such ranks.

    Args:
        caller: the name of the public function, for error messages.
        rank: the argument that the public function got.
        local: if true, ``rank`` is a sequence that holds one local rank.

    Raises:
        TypeError, ValueError: ``rank`` cannot name a rank in any world.
    """
    wanted = _checked_ranks(caller, rank)
    if local:
        return lambda blocks: _local_ranks_in_world(caller, wanted[0], blocks)
    return lambda blocks: _ranks_in_world(caller, wanted, blocks.world_size)


def _checked_ranks(caller: str, rank: Any) -> tuple[int, ...]:
    """Return ``rank`` as a tuple of ranks.

    Raises:
        TypeError: ``rank`` is neither an integer nor a sequence of integers.
        ValueError: ``rank`` is an empty sequence.
    """
    ranks = tuple(rank) if isinstance(rank, Sequence) and not isinstance(rank, str) else (rank,)
    if not ranks:
        raise ValueError(f"{caller}({rank!r}) names no rank: give one, 0 to world_size - 1, or a list of them.")
    for number in ranks:
        if not isinstance(number, int) or isinstance(number, bool):
            hint = f"; write @{caller}(0) above the function" if callable(number) else ""
            raise TypeError(
                f"{caller}({number!r}): a rank is an int, 0 to world_size - 1 or -world_size to -1 from the end{hint}."
            )
    return ranks


@functools.cache
def _ranks_in_world(caller: str, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return ``ranks`` without repetitions. Negative numbers are replaced by the ranks that they mean.

    Raises:
        ValueError: a rank is out of range.
    """
    for rank in ranks:
        if not -world_size <= rank < world_size:
            raise ValueError(
                f"{caller}({rank}) cannot run: world_size is {world_size}, so a rank is 0..{world_size - 1} (or "
                f"-{world_size}..-1 from the end)."
            )
    return tuple(dict.fromkeys(rank % world_size for rank in ranks))


def _local_ranks_in_world(caller: str, local_rank: int, blocks: Blocks) -> tuple[int, ...]:
    """Return the ranks whose local rank is ``local_rank``: one on each node that has enough ranks.

    Raises:
        ValueError: no rank has this local rank.
    """
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
    """Return the ranks as text, such as ``"0, 2"``."""
    return ", ".join(map(str, ranks))
