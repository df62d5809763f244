"""The ranks that an argument names, and those that it cannot name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nn_parallel import (
    current_world,
    on_local_rank,
    on_rank,
    rank_first,
)
from tests.support.ranks import AnyRanks


def test_once_per_node(any_ranks: AnyRanks) -> None:
    """on_local_rank runs once on this one node, and on the rank that the number says."""

    def scenario() -> Any:
        @on_local_rank(-1)
        def last() -> int:
            return current_world().local_rank

        with pytest.raises(ValueError, match="a local rank is 0"):
            on_local_rank(9)(last)()
        return last()

    results = any_ranks.run(scenario)
    assert results == [None] * (len(results) - 1) + [len(results) - 1]


def test_ranks_out_of_range(any_ranks: AnyRanks) -> None:
    """A rank beyond the world is a ValueError on every rank, which names the world size and the valid range."""

    def scenario() -> str:
        with pytest.raises(ValueError, match="cannot run") as caught:
            on_rank(7)(print)()
        return str(caught.value)

    results = any_ranks.run(scenario)
    n = len(results)
    expected = f"on_rank(7) cannot run: world_size is {n}, so a rank is 0..{n - 1} (or -{n}..-1 from the end)."
    assert set(results) == {expected}


@pytest.mark.parametrize(
    ("rank", "error", "text"),
    [
        ("0", TypeError, "a rank is an int"),
        ([], ValueError, "names no rank"),
        (1.5, TypeError, "a rank is an int"),
        (True, TypeError, "a rank is an int"),
        ([0, "1"], TypeError, "a rank is an int"),
        (print, TypeError, r"write @on_rank\(0\) above"),
    ],
)
def test_what_is_no_rank_is_said_at_once(rank: Any, error: type[Exception], text: str) -> None:
    """A wrong argument is an error where the decorator stands, in any world."""
    with pytest.raises(error, match=text):
        on_rank(rank)


@pytest.mark.parametrize("several", [[0, 1], [0], []])
def test_one_rank_of_a_node_is_meant(several: Any) -> None:
    """Where several make no sense, the error says what is asked for."""
    with pytest.raises(TypeError, match=rf"on_local_rank\({re.escape(str(several))}\): a rank is an int"):
        on_local_rank(several)
    with pytest.raises(TypeError, match=r"rank_first\(.*\): a rank is an int"), rank_first(several):
        pass
