"""What can never end is told, and what is merely late never: by what the ranks have entered, not by time."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import ParallelExecutor, RankError, RankTimeoutError, initialize_ddp, on_rank, save_checkpoint
from nn_parallel._engine.ranks import times
from tests.support import random_programs, ranks
from tests.support.ranks import Ranks, launched

LATE_S = 1.6  # more than any interval at which a rank looks


@pytest.fixture(scope="module", params=["launch", "pool"])
def ranks4(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "launch":
        with launched(4) as ranks:
            yield ranks
    else:
        with ParallelExecutor(num_workers=4, devices="cpu") as pool:
            yield pool


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """What this process logs meanwhile."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nn_parallel")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


LAST_CALLS: dict[str, Callable[[], Any]] = {
    "broadcast": lambda: dist.broadcast(torch.ones(4), 0),
    "gather": lambda: dist.gather_object("a", [None] * 4 if dist.get_rank() == 0 else None, 0),
    "scatter": lambda: dist.scatter(torch.empty(1), [torch.ones(1)] * 4 if dist.get_rank() == 0 else None, 0),
    "on_rank": lambda: on_rank(0, broadcast=True)(lambda: "x")(),
}


@pytest.mark.slow
@pytest.mark.parametrize("last", LAST_CALLS)
def test_a_late_rank_is_waited_for(ranks4: Any, last: str) -> None:
    """A collective with a root lets early ranks go before a late one comes: that is no deadlock."""

    def scenario() -> int:
        rank = initialize_ddp().rank
        for late_s in (0.0, LATE_S):  # in the second the connections are made
            with ParallelExecutor():
                time.sleep(late_s if rank == 3 else 0)
                LAST_CALLS[last]()
        return rank

    assert ranks4.run(scenario) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [7, 16], ids=["launch", "pool"])  # of four ranks
def test_random_programs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks that are late or stopped no program fails."""
    monkeypatch.setattr(ranks, "ANSWER_WITHIN_S", 90.0)
    for what, told in random_programs.outcomes_in_world(number, 0.2, programs=2):
        assert not any(told), (what, told)


def told_of_a_block(body: Callable[[int], object]) -> str:
    """As a rank: the error of a block that runs ``body(rank)``."""
    rank = initialize_ddp().rank
    with pytest.raises(RankError) as caught, ParallelExecutor():
        body(rank)
    return str(caught.value)


def _skip(wait: Callable[[], None]) -> None:
    if initialize_ddp().rank == 0:
        wait()


def wait_asynchronously() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()


def in_a_subgroup(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize("wait", [all_reduce, wait_asynchronously], ids=["collective", "asynchronous"])
def test_a_rank_of_a_pool_that_waits_for_one_that_has_returned(wait: Callable[[], None]) -> None:
    """The run ends with an error that says who is where, and the pool goes on."""
    with ParallelExecutor(num_workers=3, devices="cpu") as pool:
        pool.run(initialize_ddp)
        with pytest.raises(RankError) as caught:
            pool.run(_skip, wait)
        told = str(caught.value.failures[0])
        assert "Rank 0 is " in told
        assert f"{__file__}:" in told
        assert re.search(r"which can never end: rank [12] has returned from _skip\(\) without it", told)
        assert pool.run(lambda: initialize_ddp().rank) == [0, 1, 2]


@pytest.mark.slow
def test_a_rank_whose_gradients_another_one_never_sends() -> None:
    """The same inside `backward`, where torch waits in C++; and in a subgroup."""

    def backward() -> None:
        rank = initialize_ddp().rank
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        for step in range(3):
            if rank != 1 or step < 2:
                model(torch.ones(1, 2)).sum().backward()

    def subgroup() -> None:
        rank = initialize_ddp().rank
        group = dist.new_group([0, 2])
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)

    with ParallelExecutor(num_workers=3, devices="cpu") as pool:
        for fn, missing in ((backward, 1), (subgroup, 2)):
            with pytest.raises(RankError, match=f"rank {missing} has returned from .* without it"):
                pool.run(fn)


def test_a_collective_inside_a_call_for_one_rank(ranks2: Ranks) -> None:
    """The others wait for the end of the call, and never enter the collective."""

    for told in ranks2.run(told_of_a_block, lambda rank: on_rank(0)(all_reduce)()):
        assert "Rank 0 is in all_reduce()" in told
        assert "rank 1 waits in all_reduce() on rank 0 at " in told


@pytest.mark.slow
def test_a_collective_inside_a_call_for_one_rank_outside_all_blocks() -> None:
    """The call fails on all ranks, with what stood in its way; what comes later is not blamed on that."""

    def lose_connection() -> None:
        raise RuntimeError("Connection closed by peer")

    def scenario() -> list[str]:
        told = []
        for body in (all_reduce, lose_connection):
            initialize_ddp()
            with pytest.raises(RankError) as caught:
                on_rank(0)(body)()
            told.append(str(caught.value))
            with pytest.raises(RankError), ParallelExecutor():
                raise ValueError
        return told

    with launched(2) as ranks:
        for told, later in ranks.run(scenario):
            assert "RuntimeError: Connection closed by peer" in later
            assert "failed on rank 0 of 2: ParallelError: Rank 0 is in all_reduce() at " in told
            assert "which can never end: rank 1 waits in all_reduce() on rank 0 at " in told


@pytest.mark.slow
def test_whoever_looks_for_mistakes_is_told_at_once() -> None:
    """With NN_PARALLEL_DEBUG=1 the ranks look often."""

    def scenario() -> tuple[float, str]:
        initialize_ddp()
        return times.STAND_EVERY_S, told_of_a_block(lambda rank: on_rank(0)(all_reduce)())

    with launched(2, NN_PARALLEL_DEBUG="1") as ranks:
        for every_s, told in ranks.run(scenario):
            assert every_s < times.STAND_EVERY_S / 10
            assert "Rank 0 is in all_reduce()" in told


@pytest.mark.slow
def test_without_the_flight_recorder_nothing_is_said() -> None:
    """What cannot be known is not guessed: the collective ends by its own timeout."""

    def scenario() -> str:
        rank = initialize_ddp(timeout=4).rank
        start = time.monotonic()
        with pytest.raises(RankError) as caught, ParallelExecutor():
            if rank == 0:
                all_reduce()
        assert time.monotonic() - start > 3
        return str(caught.value)

    with launched(2, TORCH_FR_BUFFER_SIZE="0") as ranks:
        assert all("can never end" not in told for told in ranks.run(scenario))


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_alone_saves(tmp_path: Path) -> None:
    """`if rank == 0: save_checkpoint(...)`: soon a warning says who has not come and where it is, then an error."""

    def scenario(path: str) -> tuple[str, list[str]]:
        rank, before = initialize_ddp(timeout=6).rank, times.WARN_AFTER_S
        all_reduce()
        times.WARN_AFTER_S = 2 * LATE_S
        with warnings_of_ours() as told, pytest.raises((RankTimeoutError, RuntimeError)) as caught:
            if rank == 0:
                save_checkpoint(path, epoch=1)
            else:
                all_reduce()
        times.WARN_AFTER_S = before
        return str(caught.value), told

    with launched(2) as ranks:
        (saving, warned), (_, told) = ranks.run(scenario, str(tmp_path / "last.pt"))
    assert "Every rank must call save_checkpoint()" in saving
    assert any("Rank 0 has waited " in text and "in save_checkpoint()" in text for text in warned)
    assert any("which can never end: rank 0 waits in save_checkpoint()" in text for text in told)


@pytest.mark.slow
def test_a_long_wait_is_told_once(ranks2: Ranks) -> None:
    """Who waits for long logs, once for each place of the script, for whom, and where that rank stands."""

    def scenario() -> list[str]:
        rank, before = initialize_ddp().rank, times.WARN_AFTER_S
        times.WARN_AFTER_S = 2 * LATE_S
        try:
            with warnings_of_ours() as told:
                for _ in range(2):
                    on_rank(1)(time.sleep)(4 * LATE_S)
            return told if rank == 0 else []
        finally:
            times.WARN_AFTER_S = before

    told, _ = ranks2.run(scenario)
    assert len(told) == 1
    assert "in sleep() on rank 1 at " in told[0]
    assert "for rank 1. Rank 1 is in scenario() at " in told[0]
    assert "test_deadlock.py:" in told[0]


@pytest.mark.slow
def test_who_waits_for_a_limited_time_may_go_on(ranks2: Ranks) -> None:
    """A rank that gives up by `timeout` and then enters the collective was no reason for an alarm."""

    def scenario() -> float:
        rank, total = initialize_ddp().rank, torch.ones(1)
        with ParallelExecutor():
            if rank == 0:
                dist.all_reduce(total)
                on_rank(0)(int)()
            else:
                with pytest.raises(RankTimeoutError):
                    on_rank(0, timeout=2.5)(int)()
                dist.all_reduce(total)
        return total.item()

    assert ranks2.run(scenario) == [2.0, 2.0]


def test_a_forgotten_initialize_ddp_is_named() -> None:
    """A collective of torch without a process group: the error says which call makes one."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool, pytest.raises(RankError) as caught:
        pool.run(all_reduce)
    (note,) = caught.value.exceptions[0].__notes__  # of the rank that came first
    assert "initialize_ddp()" in note
