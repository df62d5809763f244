"""Calls of a pool that is there: one on each worker, and many small tasks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nn_parallel import ParallelExecutor

from .harness import Figure, measure
from .peers import installed, raw_pipes

TASKS = 10_000
GOALS = {"ProcessPoolExecutor": (0.5, 0.5), "Ray actors": (0.15, None)}  # of one call, of many tasks


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        with raw_pipes(2) as round_trip:
            for name, fn in (("run(fn)", _one), ("run(fn that uses torch)", _uses_torch)):
                yield measure(
                    f"warm {name} on 2 workers",
                    lambda fn=fn: pool.run(fn),  # type: ignore[misc]
                    "raw pipe to 2 processes and back",
                    round_trip,
                    goal=2,
                    repetitions=repetitions,
                    calls=200,
                    warm_up=200,
                )
        tasks = TASKS if repetitions > 3 else TASKS // 10
        for name, peer in installed():
            one, many = GOALS.get(name, (None, None))
            with peer(2) as (call, map_):
                yield measure(
                    "warm run(fn) on 2 workers",
                    lambda: pool.run(_one),
                    f"{name}: the function on each of 2",
                    lambda call=call: call(_one),  # type: ignore[misc]
                    goal=one,
                    repetitions=repetitions,
                    calls=50,
                )
                yield measure(
                    f"{tasks:,} small tasks by map".replace(",", " "),
                    lambda: list(pool.map(_one_of, range(tasks))),
                    f"{name}: map",
                    lambda map_=map_: list(map_(_one_of, range(tasks))),  # type: ignore[misc]
                    goal=many,
                    repetitions=min(repetitions, 5),
                )


def _one() -> int:
    return 1


def _one_of(_: int) -> int:
    return 1


def _uses_torch() -> torch.dtype:
    return torch.float32
