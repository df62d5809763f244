"""Calls of a pool that is there: one on each worker, and many small tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from nn_parallel import ParallelExecutor

from .harness import Figure, measure
from .peers import chosen, raw_pipes

T = TypeVar("T")
TASKS = 10_000
GOALS = {"ProcessPoolExecutor": (0.5, 0.5), "Ray actors": (0.15, None)}  # of one call, of many tasks


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        one, uses_torch = of_a_script(lambda: 1), of_a_script(lambda: torch.get_num_threads())
        for name, fn in (("run(fn)", one), ("run(fn that uses torch)", uses_torch)):
            reference, often = "raw pipe to 2 processes and back", 10 * repetitions  # the mood changes within a second
            yield beside_raw_pipe(f"warm {name} on 2 workers", pool, fn, 2, reference, goal=2, repetitions=often)
        three = torch.ones(3)
        name = "a tensor of 3 elements to 2 workers and back"
        yield measure(name, lambda: pool.run(_same, three), repetitions=repetitions, calls=50)
        tasks = TASKS if repetitions > 2 else TASKS // 10
        for name, peer in chosen(repetitions):
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


def beside_raw_pipe(
    name: str,
    pool: ParallelExecutor,
    fn: Callable[[], object],
    workers: int,
    reference: str,
    *,
    goal: float | None = None,
    repetitions: int,
    times: int = 200,
) -> Figure:
    """A warm run of ``fn``, ``times`` times for each repetition, beside the floor."""
    with raw_pipes(workers) as round_trip:
        return measure(
            name,
            lambda: pool.run(fn),
            reference,
            round_trip,
            goal=goal,
            repetitions=repetitions,
            calls=times,
            warm_up=times,
        )


def of_a_script(fn: Callable[[], T]) -> Callable[[], T]:
    """``fn`` as if the user's script defined it: it travels by value."""
    fn.__module__ = "__main__"
    return fn


def _one() -> int:
    return 1


def _one_of(_: int) -> int:
    return 1


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
