"""Calls that one rank runs: their outcomes in the store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nn_parallel import (
    ParallelError,
    RankError,
    initialize_ddp,
    on_rank,
)
from nn_parallel._engine.ranks.blocks import blocks_of
from nn_parallel._engine.ranks.context import rank_context
from nn_parallel._engine.ranks.status_board import FAILURES_KEPT
from tests.support.ranks import AnyRanks


def test_a_rank_that_lags_behind_learns_which_calls_failed(any_ranks: AnyRanks) -> None:
    """One rank is many calls ahead: the other still learns, call by call, which failed and how."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank(0)
        def work(turn: int) -> None:
            if turn % 3 == 1:
                raise ValueError(f"turn {turn}")

        dist.barrier()
        if me == 0:
            failed = _failed_turns(work)
            dist.barrier()
        else:
            dist.barrier()  # rank 0 has made all its calls before this rank makes its first
            failed = _failed_turns(work)
        return failed

    def _failed_turns(work: Any) -> list[int]:
        failed = []
        for turn in range(100):
            try:
                work(turn)
            except RankError as error:
                assert str(error.failures[0]) == f"turn {turn}"
                failed.append(turn)
        return failed

    expected = [turn for turn in range(100) if turn % 3 == 1]
    assert len(expected) < FAILURES_KEPT
    assert all(failed == expected for failed in any_ranks.run(scenario))


def test_a_rank_too_far_behind_is_told_that_it_cannot_know(any_ranks: AnyRanks) -> None:
    """Beyond the failures that are kept, a lagging rank gets an error that says so, never a false success."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank(0)
        def fail() -> None:
            raise ValueError

        outcomes = []
        if me != 0:
            dist.barrier()
        for _ in range(FAILURES_KEPT + 10):
            try:
                fail()
            except RankError:
                outcomes.append("failed")
            except ParallelError:
                outcomes.append("unknown")
        if me == 0:
            dist.barrier()
        return outcomes

    results = any_ranks.run(scenario)
    assert results[0] == ["failed"] * (FAILURES_KEPT + 10)
    for outcomes in results[1:]:
        assert outcomes == ["unknown"] * 10 + ["failed"] * FAILURES_KEPT


@pytest.mark.slow
def test_the_store_stays_bounded(any_ranks: AnyRanks) -> None:
    """20 000 calls, one rank far ahead, failures and lists of ranks: the number of keys does not grow."""

    def scenario() -> Any:
        initialize_ddp()
        here = blocks_of(rank_context())
        assert here is not None

        def keys() -> int:
            store = here.context.connection.store
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            return len(store.list_keys())

        @on_rank(0)
        def cheap() -> None: ...

        @on_rank([0, 1])
        def both(fail: bool) -> None:
            if fail:
                raise ValueError

        @on_rank(0)
        def failing() -> None:
            raise ValueError

        def round_of_calls(count: int) -> None:
            for _ in range(count):
                cheap()
            for fail in (False, True):
                try:
                    both(fail)
                except RankError:
                    initialize_ddp()
            for _ in range(3):
                with pytest.raises(RankError):
                    failing()

        round_of_calls(10)
        dist.barrier()
        before = keys()
        dist.barrier()
        round_of_calls(20_000)
        round_of_calls(10)
        dist.barrier()
        return before, keys()

    counts = any_ranks.run(scenario)
    for before, after in counts:
        assert after <= before + len(counts)  # each rank may have come to say what it waits for


def test_a_hostile_value_in_the_store_is_an_error_and_never_runs(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """What stands under our keys is read as data: a pickle there is reported, not executed."""

    def scenario(trap: str) -> Any:
        import pickle

        class Trap:
            def __reduce__(self) -> Any:
                return os.mkdir, (trap,)

        here = blocks_of(rank_context())
        assert here is not None
        me = here.rank
        initialize_ddp()
        dist.barrier()
        if me == 0:
            here.context.connection.store.set("status/0", pickle.dumps(Trap()))
        dist.barrier()
        text = ""
        if me != 0:

            @on_rank(0)
            def never() -> None: ...

            with pytest.raises(ParallelError) as caught:
                never()
            text = str(caught.value)
            here.board.number -= 1
        dist.barrier()
        if me == 0:
            here.board.post(here.board.phase)
        dist.barrier()
        return text

    for text in any_ranks.run(scenario, str(tmp_path / "trap"))[1:]:
        assert "'status/0'" in text
    assert not (tmp_path / "trap").exists()
