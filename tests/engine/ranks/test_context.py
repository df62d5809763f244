"""The place of a process in a world that other code has made."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ParallelExecutor,
    RankError,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    on_rank,
)
from tests.support.ranks import free_port, launched

CPU = torch.device("cpu")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables, and forget the world afterwards."""

    def set_all(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.mark.slow
def test_a_failed_block_on_a_group_of_other_code() -> None:
    """The block closes the group that other code has made: the ranks still know each other, and make a new one."""

    def scenario(port: int) -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        with pytest.raises(RankError, match="ValueError: closes"), ParallelExecutor():
            if rank == 1:
                raise ValueError("closes")
            dist.barrier()
        known = current_world()
        ran = on_rank(0)(os.getpid)()
        world, total = initialize_ddp(), torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return known, known.launcher, ran is not None, world.distributed, total.item(), current_world().launcher

    with launched(2) as ranks:
        answers = ranks.run(scenario, free_port())
    for rank, answer in enumerate(answers):
        assert answer == ((False, rank, rank, 2, CPU), "external", rank == 0, True, 2.0, "env")


@pytest.mark.slow
def test_another_code_s_process_group_is_a_world_too() -> None:
    """Where other code has called init_process_group, decorators work over it, failures included."""
    port = free_port()

    def scenario() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        assert initialize_ddp() == current_world()

        @on_rank(0, broadcast=True)
        def number() -> int:
            return 7

        @on_rank(1)
        def fail() -> None:
            raise ValueError("over there")

        with pytest.raises(RankError, match="rank 1 of 2: ValueError: over there"):
            fail()
        cleanup_ddp()  # not ours: left alone
        total = torch.ones(1)
        dist.all_reduce(total)
        return tuple(current_world())[:4], current_world().launcher, number(), total.item()

    with launched(2) as ranks:
        assert ranks.run(scenario) == [((True, rank, rank, 2), "external", 7, 2.0) for rank in range(2)]
