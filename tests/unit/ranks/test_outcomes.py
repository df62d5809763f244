"""The end of a block is decided once, by the first rank that writes it."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ParallelExecutor,
    RankError,
    initialize_ddp,
    on_rank,
)
from nn_parallel._engine.failures import Failure
from nn_parallel._engine.ranks.context import RankContext
from nn_parallel._engine.ranks.outcomes import BlockOutcomes
from nn_parallel._engine.ranks.records import BlockOutcome
from nn_parallel._engine.ranks.store import StoreClient
from nn_parallel.world import World
from tests.support.ranks import Ranks


def test_how_a_block_ends_is_decided_by_the_first_that_writes() -> None:
    """Passed or failed, of whichever block, and however far the ranks are apart."""
    store, failure = dist.HashStore(), Failure("ValueError", [], "", "", "")

    def rank(number: int) -> tuple[RankContext, BlockOutcomes]:
        context = RankContext(World(False, number, number, 2, torch.device("cpu")), lambda: store)
        return context, BlockOutcomes(context, StoreClient(store, number, 2, None))

    def failed(number: int, *ranks: int) -> BlockOutcome:
        return BlockOutcome(number, 1, "f()", dict.fromkeys(ranks, failure))

    (_, first), (context, second) = rank(0), rank(1)
    assert not first.leave(-2).failures  # inside -1
    assert second.failure_of(-1) is None
    assert second.fail(failed(-2, 1)) == (0, first.leave(-2))  # it has passed
    assert second.fail(failed(-1, 1)) == (0, failed(-1, 1))
    assert first.leave(-1) == failed(-1, 1)
    assert first.fail(failed(-1, 0)) == (0, failed(-1, 1, 0))
    assert list(first.fail(failed(-1, 0))[1].failures) == [1, 0]  # in the order of their arrival
    assert first.failure_of(-3) == failed(-1, 1, 0)
    context.generation = 1
    assert second.fail(failed(-5, 1)) == (1, failed(-5, 1))
    assert second.fail(failed(-4, 1)) == (2, failed(-4, 1))  # around or before -5, whose failure comes first
    assert second.failure_of(-4) == failed(-4, 1)


def test_a_failure_stays_as_its_own_rank_has_told_it(ranks3: Ranks, tmp_path: Path) -> None:
    """A rank that passes on the failure of another one does not sign it."""

    def scenario(folder: Path) -> tuple[int, str]:
        rank, raised = initialize_ddp().rank, folder / "raised"
        with pytest.raises(RankError) as caught, ParallelExecutor():
            try:
                on_rank(1)(lambda: 1 // 0)()
            finally:  # the others are the first to tell, and free rank 1 from here
                if rank == 1:
                    raised.touch()
                    time.sleep(3600)
                while not raised.exists():
                    time.sleep(0.001)
        return os.getpid(), "".join(traceback.format_exception(caught.value)) if rank != 1 else ""

    (_, told), (pid, _), (_, told_too) = ranks3.run(scenario, tmp_path)
    for text in (told, told_too):
        assert f"raised by rank 1 of 3 (pid {pid} on" in text
        assert text.count("raised by") == 1
