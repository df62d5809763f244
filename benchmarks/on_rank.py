"""What `on_rank` costs the rank that runs and those that wait, beside a barrier of the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from nn_parallel import ParallelExecutor, initialize_ddp, on_rank

from .harness import Figure


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    for ranks, goal in ((2, 0.4), (8, 0.1)):
        with ParallelExecutor(num_workers=ranks, devices="cpu") as pool:
            runs, in_step, in_a_row, barrier = costs(pool, repetitions)
        yield Figure(f"on_rank(0), the rank that runs, {ranks} ranks", runs, 15e-6)
        name = f"on_rank, {ranks} ranks: each call waits for the one before"
        yield Figure(name, in_step, goal, "dist.barrier()", barrier)
        yield Figure(
            f"on_rank(0), the ranks that wait, {ranks} ranks, in a row", in_a_row, None, "dist.barrier()", barrier
        )


def costs(pool: ParallelExecutor, repetitions: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds per call, for each repetition: the rank that runs, all in step, those that wait, a barrier.

    Of several ranks the slowest.

    In step are calls of which each is another rank's, so that all of them wait for each, as they do at a barrier. Where
    all calls in a row are rank 0's, it is soon far ahead, and the others find what they wait for.
    """
    measured = pool.run(_turns, repetitions)

    def slowest(what: str, ranks: Sequence[dict[str, list[float]]]) -> list[float]:
        return [max(turn) for turn in zip(*(times[what] for times in ranks), strict=True)]

    in_step, barrier = slowest("in step", measured), slowest("barrier", measured)
    return measured[0]["in a row"], in_step, slowest("in a row", measured[1:]), barrier


def _turns(repetitions: int) -> dict[str, list[float]]:
    """As one of the ranks: seconds per call, for each repetition."""
    initialize_ddp()
    times: dict[str, list[float]] = {"barrier": [], "in step": [], "in a row": []}

    @on_rank(0)
    def nothing() -> None: ...

    @on_rank(1)
    def nothing_there() -> None: ...

    def per_call(calls: int, *fns: Callable[[], object]) -> float:
        dist.barrier()
        for fn in fns:  # a barrier lets its ranks go one after another: the first would count how long the last takes
            fn()
        start = time.perf_counter()
        for _ in range(calls // len(fns)):
            for fn in fns:
                fn()
        return (time.perf_counter() - start) / calls

    for _ in range(repetitions):
        times["barrier"].append(per_call(50, dist.barrier))
        times["in step"].append(per_call(200, nothing, nothing_there))
        times["in a row"].append(per_call(500, nothing))
    return times
