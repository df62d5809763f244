"""The watchdog frees its rank from a wait that cannot end."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    cleanup_ddp,
    initialize_ddp,
    on_rank,
)
from tests.support.fault_table import loop_endlessly as spin
from tests.support.fault_table import sleep_long as sleep
from tests.support.ranks import AT_ONCE_S, Ranks, launched


@pytest.fixture(scope="module", params=[pytest.param("torchrun", marks=pytest.mark.slow), "env"])
def ranks2(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with launched(2, request.param) as ranks:
        yield ranks


def wait_in_collective() -> None:
    dist.all_reduce(torch.ones(1))


def test_the_others_are_freed_within_100_ms(ranks2: Ranks) -> None:
    """From the exception on rank 1 to the `RankError` on rank 0, which sits in all_reduce: the clock of the machine.

    Once in five at least: what else runs on the machine adds to the others.
    """

    def scenario() -> float:
        rank, raised = initialize_ddp().rank, 0.0
        dist.barrier()
        with pytest.raises(RankError), ParallelExecutor():
            if rank == 1:
                on_rank(1, wait=False)(int)()
                time.sleep(0.2)  # the other is in all_reduce by now; if not, the figure is only smaller
                raised = time.monotonic()
                raise ValueError
            dist.all_reduce(torch.ones(1))
        return raised or time.monotonic()

    times = [ranks2.run(scenario) for _ in range(5)]
    assert min(freed - raised for freed, raised in times) < 0.1


@pytest.mark.slow
def test_a_rank_with_many_open_files(ranks2: Ranks) -> None:
    """Descriptors above 1024, which `select` cannot wait for, do not blind the watchdog."""

    def scenario() -> dict[int, str]:
        rank = initialize_ddp().rank
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        try:
            with pytest.raises(RankError) as caught, ParallelExecutor():
                if rank == 1:
                    raise ValueError("many")
                sleep()
            return {rank: str(error) for rank, error in caught.value.failures.items()}
        finally:
            for file in files:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    with launched(2) as ranks:  # of their own: others have looked up their peers already
        assert ranks.run(scenario) == [{1: "many"}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("wait", [sleep, spin])
def test_a_timeout_tells_where_the_silent_rank_stands(ranks2: Ranks, wait: Callable[[], None]) -> None:
    """`timeout` of the executor ends a hang of `run` on every rank, with the stack of the rank that hangs."""

    def scenario() -> Any:
        executor = ParallelExecutor(timeout=1.5)  # a rank tells twice a second where it stands

        def work() -> None:
            if initialize_ddp().rank == 1:
                wait()

        start = time.monotonic()
        with pytest.raises(RankTimeoutError) as caught:
            executor.run(work)
        seconds = time.monotonic() - start
        return str(caught.value), caught.value.ranks, list(caught.value.stacks), seconds, executor.run(int)

    for text, silent, stacks, seconds, after in ranks2.run(scenario):
        assert "did not end within timeout=1.5 s" in text or "Rank 0 waited 1.5 s for rank 1" in text
        assert f"in {wait.__name__}" in text
        assert (silent, stacks, after) == ([1], [1], [0, 0])
        assert seconds < 1.5 + AT_ONCE_S


@pytest.mark.slow
def test_a_timeout_tells_where_everybody_stands() -> None:
    """A line for each place, whichever rank's time is over first."""

    def scenario() -> list[str]:
        def work() -> None:
            if initialize_ddp().rank == 1:
                sleep()
            dist.all_reduce(torch.ones(1))

        with pytest.raises(RankTimeoutError) as caught:
            ParallelExecutor(timeout=1.5).run(work)
        return str(caught.value).splitlines()

    with launched(4) as ranks:
        for told in ranks.run(scenario):
            assert told[0].endswith("Where the ranks stand:")
            assert re.fullmatch(r"ranks 0, 2-3: in all_reduce\(\) at .*test_watchdog\.py:\d+", told[1])
            assert re.fullmatch(r"rank 1: in sleep_long\(\) at .*fault_table\.py:\d+", told[2])
            assert told[3:4] == [""]


def fail_beside_a_collective() -> None:
    """Rank 1 raises as the others enter a collective."""
    rank = initialize_ddp().rank
    with pytest.raises(RankError), ParallelExecutor():
        dist.barrier()
        if rank == 1:
            raise ValueError
        wait_in_collective()


@pytest.mark.slow
def test_whoever_enters_a_collective_late_is_freed_too() -> None:
    """Many ranks on few cores: some write to a peer that has been freed, and has closed the group, already."""

    def scenario() -> None:
        for _ in range(40):
            fail_beside_a_collective()

    with ParallelExecutor(num_workers=8, devices="cpu", timeout=60) as pool:
        pool.run(scenario)


@pytest.mark.slow
def test_a_rank_is_freed_by_its_backend_s_own_abort() -> None:
    """As NCCL has one. A stand-in for it, whose collectives are deaf to signals until somebody aborts their group."""

    def scenario() -> tuple[dict[int, str], list[int]]:
        class Collective(dist.Work):
            def __init__(self, aborted: dist.Store) -> None:
                super().__init__()
                self._aborted = aborted

            def wait(self, timeout: object = None) -> bool:
                self._aborted.wait(["aborted"])
                raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")

        class StandIn(dist.ProcessGroup):
            def __init__(self, rank: int, size: int) -> None:
                super().__init__(rank, size)
                self._aborted = dist.HashStore()
                self._aborted.set_timeout(timedelta(hours=1))

            def allreduce(self, tensors: object, options: object = None) -> dist.Work:
                return Collective(self._aborted)

            def abort(self) -> None:
                aborts.append(self.rank())
                self._aborted.set("aborted", "")

        aborts: list[int] = []
        make: Any = lambda store, rank, size, timeout: StandIn(rank, size)  # noqa: E731
        dist.Backend.register_backend("stand_in", make, devices="cpu")
        rank = initialize_ddp(backend="stand_in").rank
        with pytest.raises(RankError) as caught, ParallelExecutor():
            if rank == 1:
                raise ValueError("bad batch")
            dist.all_reduce(torch.ones(1))
        initialize_ddp(backend="stand_in")
        cleanup_ddp()  # which is no failure
        return {failed: repr(error) for failed, error in caught.value.failures.items()}, aborts

    with launched(2) as ranks:
        assert ranks.run(scenario) == [({1: "ValueError('bad batch')"}, [rank]) for rank in range(2)]
