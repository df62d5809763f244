"""The same figures at 1 to 64 workers: which cost grows, and how."""

from __future__ import annotations

from collections.abc import Iterator

from nn_parallel import ParallelExecutor

from . import calls, failures, on_rank
from .harness import Figure, seconds_of

COUNTS = (1, 2, 4, 8, 16, 32, 64)


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another; the names end in the number of workers."""
    for count in COUNTS if repetitions > 2 else COUNTS[:2]:

        def a_pool(count: int = count) -> None:
            with ParallelExecutor(num_workers=count, devices="cpu") as started:
                started.run(int)

        yield Figure(f"start, run, end: {count}", [seconds_of(a_pool) for _ in range(3)])
        with ParallelExecutor(num_workers=count, devices="cpu") as pool:
            name, fn = f"warm run: {count}", calls.of_a_script(lambda: 1)
            yield from calls.beside_raw_pipe(pool, {name: fn}, count, "raw pipe", repetitions=3, times=50)
            if count > 1:
                runs, in_step, _, barrier = on_rank.costs(pool, 3)
                yield Figure(f"on_rank(0), the rank that runs: {count}", runs)
                yield Figure(
                    f"on_rank, each call waiting for the one before: {count}", in_step, None, "barrier", barrier
                )
                told = [max(pool.run(failures.fail_beside_all_reduce)) for _ in range(4)][1:]
                yield Figure(f"from a failure to RankError on all: {count}", told)
