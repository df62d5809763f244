"""Training on several CPU ranks beside one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nn_parallel import ParallelExecutor, initialize_ddp

from .harness import Figure

BATCH, WIDTH = 8192, 512  # bound by computing: a weight is used 8192 times for each time that it is sent


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    with (
        ParallelExecutor(num_workers=1, devices="cpu", initializer=torch.set_num_threads, initargs=(1,)) as one,
        ParallelExecutor(num_workers=2, devices="cpu") as two,
    ):
        alone, both = [], []
        for _ in range(repetitions):
            alone.append(one.run(_seconds_per_sample, repetitions)[0])
            both.append(max(two.run(_seconds_per_sample, repetitions)) / 2)
    name = "DDP training on 2 CPU ranks, per sample"
    yield Figure(name, both, 1 / 1.8, "1 rank, 1 thread each", alone)


def _seconds_per_sample(steps: int) -> float:
    torch.set_num_threads(1)
    initialize_ddp()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    data = torch.randn(BATCH, WIDTH)
    for step in range(steps + 1):
        if step == 1:
            start = time.perf_counter()
        model(data).square().mean().backward()
    return (time.perf_counter() - start) / (steps * BATCH)
