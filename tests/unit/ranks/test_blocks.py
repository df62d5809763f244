"""A failure ends the same block on all ranks, in whatever order they take their steps."""

from __future__ import annotations

import math

import pytest

from nn_parallel._engine.ranks.records import GenerationEnd
from tests.support.block_model import outcome_of_trial


@pytest.mark.parametrize(
    ("barriers", "begin", "end", "is_outermost", "fails"),
    [
        (1, 1, math.inf, False, True),  # it has begun
        (1, 1, 2, False, True),  # not all ranks have come to its end
        (2, 1, 2, True, False),  # it has passed
        (1, 2, math.inf, False, False),  # it has not begun: the block around it fails
        (1, 2, math.inf, True, True),  # there is none
        (1, math.inf, 2, True, True),  # a barrier
        (2, math.inf, 2, False, False),
    ],
)
def test_a_generation_that_ends(barriers: int, begin: float, end: float, is_outermost: bool, fails: bool) -> None:
    """The block fails that was open on all ranks."""
    assert GenerationEnd(barriers, {}).fails(begin, end, is_outermost) == fails


def test_all_ranks_agree_on_every_block() -> None:
    """In a model of ranks that fail, die, give up and take their steps in every order."""
    failed = 0
    for seed in range(5_000):
        told, logs = outcome_of_trial(seed)
        assert not told, f"seed {seed}: {logs}"
        failed += any(outcome == "has failed" for log in logs for _, outcome in log)
    assert failed > 1_000
