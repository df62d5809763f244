"""`profile_ranks`: one trace of all ranks, and how much of it was communication."""

from __future__ import annotations

import gzip
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import RankError, initialize_ddp, prepare_model, profile_ranks
from tests.support.ranks import AnyRanks


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_one_trace_holds_all_ranks(any_ranks: AnyRanks, tmp_path: Path, name: str) -> None:
    """Each under its name, with numbers of its own, on one axis of time."""

    def scenario() -> Any:
        initialize_ddp()
        model = prepare_model(nn.Linear(64, 64))
        with profile_ranks(tmp_path / name) as profile:
            for _ in range(3):
                model(torch.ones(8, 64)).sum().backward()
        return profile.seconds, profile.communication, str(profile)

    results = any_ranks.run(scenario)
    assert all(result == results[0] for result in results)
    seconds, shares, told = results[0]
    assert len(seconds) == len(shares) == len(results)
    assert all(0 < share < 1 for share in shares)
    assert told.startswith("Communication took rank 0 ")
    raw = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert {name.split(":")[0] for name in names} == {f"rank {rank}" for rank in range(len(results))}
    reductions = [event for event in events if event.get("name") == "gloo:all_reduce"]
    assert len({event["pid"] for event in reductions}) == len(results)
    assert len(reductions) >= 3 * len(results)
    starts = [min(e["ts"] for e in reductions if e["pid"] == pid) for pid in {e["pid"] for e in reductions}]
    assert max(starts) - min(starts) < max(seconds) * 1e6


@pytest.mark.slow
def test_waiting_in_a_collective_is_communication(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """A rank that waits for the others all the time says so; one that keeps them waiting does not."""

    def scenario() -> list[float]:
        _, rank, _, world_size, _ = initialize_ddp()
        x, waiting = torch.randn(400, 400), [tmp_path / f"{other} waits" for other in range(1, world_size)]
        dist.barrier()
        with profile_ranks(tmp_path / "trace.json") as profile:
            if rank == 0:
                begun, until = time.monotonic(), math.inf
                while time.monotonic() < until:
                    x = torch.nn.functional.normalize(x @ x)
                    if until == math.inf and all(path.exists() for path in waiting):
                        until = time.monotonic() + 1 + 3 * (time.monotonic() - begun)  # most of their time
            else:
                waiting[rank - 1].touch()
            dist.all_reduce(torch.ones(1))
        return profile.communication

    shares = any_ranks.run(scenario)[0]
    assert shares[0] < 0.5 < min(shares[1:])


def test_a_file_that_cannot_be_written_is_an_error_before_the_block(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """On every rank; nothing has been profiled in vain."""

    def scenario() -> str:
        initialize_ddp()
        try:
            with profile_ranks(tmp_path / "missing" / "trace.json"):
                return "the block ran"
        except RankError as error:
            return str(error.failures[0])

    assert all("No such file or directory" in told for told in any_ranks.run(scenario))


def test_alone_it_is_the_trace_of_one(tmp_path: Path) -> None:
    """No communication, and no line of ranks that are not there."""
    with profile_ranks(tmp_path / "trace.json") as profile:
        torch.ones(10).sum()
    assert profile.communication == [0.0]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_one_rank_fails_in_the_block(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """The others, which may be at its end already, raise too."""

    def scenario() -> dict[int, str]:
        rank = initialize_ddp().rank
        with pytest.raises(RankError, match="bad batch") as caught, profile_ranks(tmp_path / "trace.json"):
            if rank == 1:
                raise ValueError("bad batch")
        return {rank: repr(failure) for rank, failure in caught.value.failures.items()}

    for failures in any_ranks.run(scenario):
        assert list(failures) == [1], failures


def test_a_trace_that_cannot_be_written(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """The error comes before the block, on all ranks, and names the function that the user has called."""

    def scenario() -> str:
        initialize_ddp()
        with pytest.raises(RankError) as caught, profile_ranks(tmp_path / "no such folder" / "trace.json"):
            raise AssertionError("the block must not begin")
        return str(caught.value)

    for message in any_ranks.run(scenario):
        assert re.match(r"profile_ranks\(\) failed on rank 0 of \d: FileNotFoundError", message), message
