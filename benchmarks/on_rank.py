"""What `on_rank` costs the rank that runs and those that wait, beside a barrier of the same ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from nn_parallel import ParallelExecutor, initialize_ddp, on_rank

from .harness import Figure


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    for ranks, goal in ((2, 0.5), (8, 0.1)):
        with ParallelExecutor(num_workers=ranks, devices="cpu") as pool:
            runs, waits, barrier = costs(pool, repetitions)
        yield Figure(f"on_rank(0), the rank that runs, {ranks} ranks", runs, 20e-6 if ranks == 2 else None)
        yield Figure(f"on_rank(0), the ranks that wait, {ranks} ranks", waits, goal, "dist.barrier()", barrier)


def costs(pool: ParallelExecutor, repetitions: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds per call, for each repetition: of the rank that runs, the slowest that waits, the fastest barrier."""
    measured = pool.run(_turns, repetitions)
    waits = [max(turn) for turn in zip(*(times["waits"] for times in measured[1:]), strict=True)]
    barrier = [min(turn) for turn in zip(*(times["barrier"] for times in measured), strict=True)]
    return measured[0]["runs"], waits, barrier


def _turns(repetitions: int) -> dict[str, list[float]]:
    """As one of the ranks: seconds per call, for each repetition."""
    rank = initialize_ddp().rank
    times: dict[str, list[float]] = {"barrier": [], "runs": [], "waits": []}

    @on_rank(0)
    def nothing() -> None: ...

    def per_call(fn: Any, calls: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - start) / calls

    for _ in range(repetitions):
        times["barrier"].append(per_call(dist.barrier, 50))
        times["runs" if rank == 0 else "waits"].append(per_call(nothing, 500))
    return times
