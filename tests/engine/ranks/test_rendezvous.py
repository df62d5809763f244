"""The ranks of a launcher find each other, or an error says who is missing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    LaunchError,
    ParallelExecutor,
    RankError,
    initialize_ddp,
    on_rank,
)
from tests.support.ranks import AT_ONCE_S, free_port, launched


@pytest.mark.slow
def test_a_rank_without_a_device_is_told_to_all() -> None:
    """On one node there are too few GPUs: the ranks on the others do not wait for that rank until their timeout."""

    def body() -> str:
        found = [torch.device("cuda", 0), torch.device("cuda", 1)] if os.environ["RANK"] == "1" else []
        with (
            mock.patch("nn_parallel._engine.devices.accelerators", return_value=found),
            pytest.raises(LaunchError) as caught,
        ):
            initialize_ddp()
        return str(caught.value)

    with launched(3) as ranks:
        told = ranks.run(body)
        assert told == [told[0]] * 3
        assert told[0].startswith(
            "Rank 1 has no device: 3 ranks run on this node and the accelerators are cuda:0 to cuda:1: start at most 2 "
            "ranks per node, or pass device= to share one on purpose."
        )


@pytest.mark.slow
def test_a_port_in_use_is_named() -> None:
    """Rank 0 cannot listen where somebody else does: the error names the address, at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: Address already in use. Set MASTER_PORT"):
            initialize_ddp(timeout=5, rank=0, world_size=2, master_addr="localhost", master_port=port)


@pytest.mark.slow
def test_rank_0_never_comes() -> None:
    """A rank that finds nobody at the master address says so within its timeout."""
    port, start = free_port(), time.monotonic()
    with pytest.raises(LaunchError, match=f"Rank 1 of 2 found no store at 127.0.0.1:{port} within 1 s. Rank 0"):
        initialize_ddp(timeout=1, rank=1, world_size=2, master_addr="localhost", master_port=port)
    assert time.monotonic() - start < 10


def test_a_program_that_is_no_store_is_not_waited_for() -> None:
    """It has the port, accepts every connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(LaunchError, match=f"found no store at 127.0.0.1:{port} within 1 s"):
            initialize_ddp(1, rank=1, world_size=2, master_addr="127.0.0.1", master_port=port)
        assert time.monotonic() - began < 1 + AT_ONCE_S


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "not answered"])
def test_ctrl_c_ends_the_wait_for_rank_0(refuses: bool) -> None:
    """A rank that waits until rank 0 listens soon raises KeyboardInterrupt, and leaves no socket to the collector."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        port = free_port() if refuses else full.getsockname()[1]  # whose queue is full: no other one is answered
        timer, start = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)), time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            initialize_ddp(timeout=20, rank=1, world_size=2, master_addr="localhost", master_port=port)
        timer.join()
        assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    """The ranks that did come name those that did not."""
    with pytest.raises(LaunchError, match="Ranks 1-2 of 3 did not come to 127.0.0.1:"):
        initialize_ddp(timeout=0.5, rank=0, world_size=3, master_addr="localhost", master_port=free_port())


@pytest.mark.slow
def test_a_rank_of_a_job_of_another_size_is_nobody_of_this_one() -> None:
    """It waits in vain, and the ranks that are there go on."""
    port = free_port()
    with launched(2, MASTER_PORT=str(port)) as ranks:
        assert ranks.run(lambda: initialize_ddp().rank) == [0, 1]
        with pytest.raises(LaunchError, match="Ranks 0, 2 of 3 did not come"):
            initialize_ddp(timeout=0.5, rank=1, world_size=3, master_addr="localhost", master_port=port)
        assert ranks.run(lambda: on_rank(1, broadcast=True)(lambda: initialize_ddp().rank)()) == [1, 1]


@pytest.mark.slow
def test_a_second_job_at_the_same_address_is_refused() -> None:
    """The ranks that come to one that is complete are refused, and who is there goes on."""
    port = str(free_port())
    with launched(2, MASTER_PORT=port) as first, launched(2, MASTER_PORT=port) as second:
        assert first.run(lambda: initialize_ddp(timeout=20).rank) == [0, 1]

        def join() -> str:
            with pytest.raises(LaunchError) as raised:
                initialize_ddp(timeout=20)
            return str(raised.value)

        assert "Rank 0 cannot listen" in second.run(join, only=[0])[0]
        told = second.run(join, only=[1])[0]
        assert told.startswith(f"There are two ranks 1: the other one is process {first.pids[1]} on ")
        assert first.run(lambda: on_rank(1, broadcast=True)(lambda: initialize_ddp().rank)()) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_gave_up_meets_the_late_one_when_both_try_again(tmp_path: Path, joined: bool) -> None:
    """The late one is told at once; both when it joins the others and when it makes a group with them."""

    def scenario() -> int:
        has_given_up = tmp_path / "has given up"
        if joined:
            initialize_ddp()
            with pytest.raises(RankError), ParallelExecutor():
                raise ValueError
        while os.environ["RANK"] == "1" and not has_given_up.exists():
            time.sleep(0.001)
        with pytest.raises(LaunchError, match="Rank 1 of 2 did not come to .* within 1 s"):
            initialize_ddp(timeout=1)
        has_given_up.touch()
        initialize_ddp(timeout=20)
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total)

    with launched(2) as ranks:
        assert ranks.run(scenario) == [2, 2]
