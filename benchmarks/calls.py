"""Calls of a pool that is there: one on each worker, and many small tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from nn_parallel import ParallelExecutor

from .harness import Figure, measure, seconds_of
from .peers import chosen, raw_pipes

F = TypeVar("F", bound=Callable[..., object])
TASKS = 10_000
# The goals of one call and of many tasks, beside each peer.
GOALS = {"ProcessPoolExecutor": (0.5, 0.15), "Ray actors": (0.15, None), "joblib": (None, 1.0)}


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        named = {
            "warm run(fn) on 2 workers": of_a_script(lambda: 1),
            "warm run(fn that uses torch) on 2 workers": of_a_script(lambda: torch.get_num_threads()),
        }
        often = 10 * repetitions  # the mood changes within a second
        yield from beside_raw_pipe(pool, named, 2, "raw pipe to 2 processes and back", goal=3.5, repetitions=often)
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
                    f"{name}: two calls of it",
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
    pool: ParallelExecutor,
    named: Mapping[str, Callable[[], object]],
    workers: int,
    reference: str,
    *,
    goal: float | None = None,
    repetitions: int,
    times: int = 200,
) -> Iterator[Figure]:
    """A warm run of each function, ``times`` times for each repetition, beside the floor.

    That has new processes in each repetition: the kernel leaves them on the cores on which it has put them.
    """
    floor, measured = list[float](), {name: list[float]() for name in named}
    for _ in range(repetitions):
        with raw_pipes(workers) as round_trip:
            seconds_of(round_trip, times)
            floor.append(seconds_of(round_trip, times))
            for name, fn in named.items():
                seconds_of(functools.partial(pool.run, fn), times)
                measured[name].append(seconds_of(functools.partial(pool.run, fn), times))
    for name, values in measured.items():
        yield Figure(name, values, goal, reference, floor)


def of_a_script(fn: F) -> F:
    """``fn`` as if the user's script defined it: it travels by value."""
    fn.__module__ = "__main__"
    return fn


def _one() -> int:
    return 1


def _one_of(_: int) -> int:
    return 1


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
