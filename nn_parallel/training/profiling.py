"""`profile_ranks`: a profile of a block on all ranks, as one trace."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._engine.ranks.blocks import block
from .._engine.ranks.run_on_ranks import on_rank_0
from ..ddp import initialize_ddp
from .collectives import all_gather_object

BLOCK = "profile_ranks()"  # the name of the block in the trace
# Matches the names of collectives in a trace: torch's own names, or the names of NCCL's kernels.
COMMUNICATION = re.compile(r"(gloo|nccl|mpi|ucc|xccl):|nccl(Dev)?Kernel")
logger = logging.getLogger("nn_parallel")


class RankProfile:
    """The result of `profile_ranks`. Its attributes are set when the block ends.

    Attributes:
        seconds: the duration of the block on each rank.
        communication: for each rank, the fraction of this time, from 0 to 1, during which a collective was under way.
            Computation may have gone on at the same time.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.communication: list[float] = []

    def __str__(self) -> str:
        shares = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(self.communication))
        return f"Communication took {shares} of {max(self.seconds, default=0.0):.2f} s"


@contextlib.contextmanager
def profile_ranks(path: str | os.PathLike[str]) -> Iterator[RankProfile]:
    """Profile a block on every rank, and write one trace of all ranks. Every rank runs the block.

    Args:
        path: the file that rank 0 writes, for ui.perfetto.dev or chrome://tracing. The file is compressed if its name
            ends in ``.gz``.

    Yields:
        A `RankProfile`, which holds the results after the block has ended. Rank 0 also logs them.

    Raises:
        OSError: the file cannot be written. If there are several ranks, every rank raises a `RankError` instead, which
            contains the OSError.
        RankError: one of several ranks failed in the block. Every rank raises this error.

    Example::

        with profile_ranks("trace.json.gz") as profile:
            for _ in range(10):
                train_step()
        print(profile)  # Communication took rank 0 12%, rank 1 14% of 0.31 s
    """
    world = initialize_ddp()
    target = Path(path)
    on_rank_0(BLOCK, lambda: check_writable(target))
    profile = RankProfile()
    with block(BLOCK):
        # Without `acc_events`, torch 2.11 warns about a second profiling cycle. The annotation `BLOCK` marks the time
        # of the user's block alone, because the profiler takes long to start and to stop.
        with torch.profiler.profile(acc_events=True) as profiler, torch.profiler.record_function(BLOCK):
            yield profile
            if world.device.type != "cpu":
                torch.accelerator.synchronize()
        trace = _exported(profiler)
        result = *_measured(trace["traceEvents"]), gzip.compress(_encoded(trace), 1)
        profile.seconds, profile.communication, traces = map(list, zip(*all_gather_object(result), strict=True))
    on_rank_0(BLOCK, lambda: write_trace(traces, target))
    if world.is_main:
        logger.info("%s; the trace is %s.", profile, target)


def check_writable(path: Path) -> None:
    """Raise OSError if a file cannot be written at ``path``.

    `profile_ranks` calls this function before the block runs, because otherwise a wrong path would be reported only
    after a long run, and the trace would be lost.
    """
    path.open("ab").close()


def _exported(profiler: torch.profiler.profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(errors="replace"))
    return trace


def _measured(events: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the seconds that the block took, and the fraction of this time during which a collective was under way."""
    spans = [event for event in events if event.get("ph") == "X"]
    whole = next(event for event in spans if event["name"] == BLOCK and event["cat"] == "user_annotation")
    begin = whole["ts"]
    end = whole["ts"] + whole["dur"]
    collectives = [event for event in spans if COMMUNICATION.match(event["name"])]
    total = 0.0
    until = begin
    for start, stop in sorted((event["ts"], min(event["ts"] + event.get("dur", 0.0), end)) for event in collectives):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return (end - begin) / 1e6, total / (end - begin)


def write_trace(traces: list[bytes], path: Path) -> None:
    """Merge the traces of all ranks, and write them to ``path``.

    The ids of processes and of events are changed, because different ranks may have used the same ids. Times are
    shifted, because each trace counts them from its own beginning.
    """
    ranks = [json.loads(gzip.decompress(trace)) for trace in traces]
    base = min(trace.get("baseTimeNanoseconds", 0) for trace in ranks)
    numbers: dict[tuple[int, Any], int] = {}
    merged = []
    for rank, trace in enumerate(ranks):
        shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1e3
        for event in trace["traceEvents"]:
            if "pid" in event:
                event["pid"] = numbers.setdefault((rank, event["pid"]), len(numbers))
            if "id" in event:
                event["id"] = f"{rank}.{event['id']}"
            if "ts" in event:
                event["ts"] += shift
            if event.get("name") == "process_name":
                event["args"]["name"] = f"rank {rank}: {event['args']['name']}"
            merged.append(event)
    encoded = _encoded({"traceEvents": merged, "baseTimeNanoseconds": base, "displayTimeUnit": "ms"})
    path.write_bytes(gzip.compress(encoded) if path.suffix == ".gz" else encoded)


def _encoded(trace: dict[str, Any]) -> bytes:
    return json.dumps(trace).encode()
