"""Tensors to workers and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from nn_parallel import ParallelExecutor

from .harness import Figure, measure
from .peers import chosen

ELEMENTS = 16 << 20  # 64 MiB


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    big = torch.ones(ELEMENTS)
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        handle = pool.put(big)

        def beside_clone(name: str, run: Callable[[], object], goal: float | None) -> Figure:
            return measure(name, run, "tensor.clone()", big.clone, goal=goal, repetitions=repetitions, warm_up=3)

        yield beside_clone("64 MiB to 2 workers", lambda: pool.run(_size, big), 0.8)
        yield beside_clone("64 MiB to 2 workers, where each reads it", lambda: pool.run(_sum, big), None)
        yield beside_clone("64 MiB back from one", lambda: pool.submit(_same, handle).result(), 1.2)
        yield beside_clone("64 MiB back, and read", lambda: pool.submit(_same, handle).result().sum(), None)
        yield measure(
            "64 MiB to 2 workers again, by put()",
            lambda: pool.run(_size, handle),
            goal=300e-6,
            repetitions=repetitions,
            calls=20,
            warm_up=3,
        )
        many = [torch.ones(100) for _ in range(10_000)]
        yield measure("10 000 small tensors to 2 workers", lambda: pool.run(len, many), repetitions=repetitions)
        for name, peer in chosen(repetitions):
            theirs = big.clone()  # where a peer moves it to shared memory, it is shared with us too
            with peer(2) as (call, _):
                yield measure(
                    "64 MiB to 2 workers",
                    lambda: pool.run(_size, big),
                    name,
                    lambda call=call, theirs=theirs: call(_size, theirs),  # type: ignore[misc]
                    repetitions=min(repetitions, 5),
                )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel()


def _sum(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
