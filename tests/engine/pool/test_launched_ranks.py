"""The calls of an executor on the ranks of a launcher."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ExecutorClosedError,
    ParallelError,
    ParallelExecutor,
    RankError,
    current_world,
    initialize_ddp,
    on_rank,
)
from tests.support.ranks import launched


def _fork(body: Any) -> int:
    """The exit status of a child that has come out of the task with ``body()``."""
    if (pid := os.fork()) == 0:
        return body()  # type: ignore[no-any-return]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_a_child_that_a_launched_rank_forks_ends_by_itself() -> None:
    """In `run` it takes no part in what the ranks do together, and does not go on with the script."""

    def scenario() -> Any:
        with ParallelExecutor() as pool:
            return pool.run(_fork, int), pool.run(_fork, lambda: 1 / 0), pool.run(int)

    with launched(2, "torchrun") as ranks:
        assert ranks.run(scenario) == [([0, 0], [1, 1], [0, 0])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "env"])
def test_under_a_launcher_the_ranks_are_the_workers(launcher: str) -> None:
    """run and map are collective calls, the same results on every rank; another choice of workers is an error."""

    def scenario() -> Any:
        with ParallelExecutor() as pool:
            world = initialize_ddp()

            def work(device: torch.device, x: int) -> Any:
                @on_rank(0, broadcast=True)
                def number() -> int:
                    return 7

                total = torch.ones(1, device=device)
                dist.all_reduce(total)
                return world.rank, x, number(), total.item(), lambda: x

            results = [(*r[:4], r[4]()) for r in pool.run(work, 5)]
            mapped = list(pool.map(lambda x, device, /: (x, str(device)), range(5)))
            with pytest.raises(ParallelError, match="every rank makes every call"):
                pool.submit(int)
        with pytest.raises(ExecutorClosedError):
            pool.run(int)
        for arguments in ({"num_gpus": 2}, {"num_workers": 2, "devices": "cpu"}):
            assert ParallelExecutor(**arguments).run(lambda: world.rank) == [0, 1]  # type: ignore[arg-type]
        for arguments in ({"num_gpus": 3}, {"num_workers": 1}):
            (name,) = arguments
            with pytest.raises(ValueError, match=f"{name}=. does not apply here: the workers are the 2 ranks"):
                ParallelExecutor(**arguments)  # type: ignore[arg-type]
        return results, mapped

    with launched(2, launcher) as ranks:
        for results, mapped in ranks.run(scenario):
            assert results == [(0, 5, 7, 2.0, 5), (1, 5, 7, 2.0, 5)]
            assert mapped == [(x, "cpu") for x in range(5)]


@pytest.mark.slow
def test_a_launched_run_fails_on_all_ranks_with_the_cause() -> None:
    """Rank 1 raises while rank 0 is in all_reduce, in on_rank or done: RankError everywhere, and the ranks go on."""

    def scenario(kind: str) -> Any:
        pool = ParallelExecutor()

        def work() -> None:
            rank = initialize_ddp().rank
            if rank == 1:
                raise ValueError("bad batch")
            if kind == "collective":
                dist.all_reduce(torch.ones(1))
            elif kind == "waiting":
                on_rank(1)(int)()

        with pytest.raises(RankError) as caught:
            pool.run(work)
        closed = not dist.is_initialized()
        return caught.value.rank, str(caught.value.failures[1]), closed, pool.run(lambda: initialize_ddp().rank)

    with launched(2, "torchrun") as ranks:
        for kind in ("collective", "waiting", "done", "collective"):
            assert ranks.run(scenario, kind) == [(1, "bad batch", True, [0, 1])] * 2


@pytest.mark.slow
def test_a_launched_world_of_one_rank_is_the_worker() -> None:
    """torchrun with one rank: no process is started, and errors are RankErrors as with more."""

    def scenario() -> Any:
        pool = ParallelExecutor()
        with pytest.raises(RankError, match="rank 0 of 1"):
            pool.run(int, "x")
        return pool.run(os.getpid) == [os.getpid()], list(pool.map(abs, [-1, -2]))

    with launched(1, "torchrun") as ranks:
        assert ranks.run(scenario) == [(True, [1, 2])]


@pytest.mark.slow
def test_a_launched_rank_that_waits_to_make_the_group_is_freed() -> None:
    """Rank 1 raises before initialize_ddp(), rank 0 waits there for it: told at once, the cause first, every time."""

    def scenario() -> Any:
        pool = ParallelExecutor()

        def work(fail: bool) -> float:
            if fail and current_world().rank == 1:
                raise ValueError("before the group")
            initialize_ddp()
            total = torch.ones(1)
            dist.all_reduce(total)
            return total.item()

        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(RankError) as caught:
                pool.run(work, True)
            assert (caught.value.rank, str(caught.value.failures[1])) == (1, "before the group")
            assert time.monotonic() - start < 5
        return pool.run(work, False)

    with launched(2) as ranks:
        assert ranks.run(scenario) == [[2.0, 2.0]] * 2
