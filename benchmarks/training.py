"""Training on several CPU ranks beside one, and through `prepare_model` and `prepare_dataloader` beside plain DDP."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nn_parallel import ParallelExecutor, accumulate, initialize_ddp, prepare_dataloader, prepare_model

from .harness import Figure

# What torch offers to make a step faster: options of DDP, and of AdamW; each beside the step without.
VIEWS, STATIC, FUSED = {"gradient_as_bucket_view": True}, {"static_graph": True}, {"fused": True}
OFFERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient_as_bucket_view": (VIEWS, {}),
    "static_graph": (STATIC, {}),
    "AdamW(fused=True)": ({}, FUSED),
    "AdamW(fused=True), gradient_as_bucket_view": (VIEWS, FUSED),
}
BATCH, WIDTH = 8192, 512  # bound by computing: a weight is used 8192 times for each time that it is sent


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    with (
        ParallelExecutor(num_workers=1, devices="cpu") as one,
        ParallelExecutor(num_workers=2, devices="cpu") as two,
    ):
        alone, both = [], []
        for _ in range(repetitions):
            alone.append(one.run(_seconds_per_sample, repetitions)[0])
            both.append(max(two.run(_seconds_per_sample, repetitions)) / 2)
        turns = 22 * repetitions**2  # to tell hundredths takes many
        plain, prepared = two.run(
            _seconds_per_step, [functools.partial(_steps, each) for each in (False, True)], turns
        )[0]
        offers = [functools.partial(_wide_steps, *options) for options in [({}, {}), *OFFERS.values()]]
        without, *others = two.run(_seconds_per_step, offers, 5 * repetitions)[0]
    name = "DDP training on 2 CPU ranks, per sample"
    yield Figure(name, both, 1 / 1.8, "1 rank, 1 thread each", alone)
    name = "step through prepare_model and prepare_dataloader"
    yield Figure(name, prepared, 1.02, "the same loop in plain DDP", plain)
    for name, measured in zip(OFFERS, others, strict=True):
        yield Figure(f"step of 4 million parameters with {name}", measured, None, "DDP and AdamW without", without)


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


def _seconds_per_step(make: list[Callable[[], Iterator[None]]], turns: int) -> list[list[float]]:
    """Of several loops, step by step in turn, so that all share the machine's mood."""
    torch.set_num_threads(1)
    initialize_ddp()
    loops = [(each(), list[float]()) for each in make]
    for turn in range(turns + 1):
        for loop, measured in loops if turn % 2 else loops[::-1]:  # whichever comes first has the worse of it
            dist.barrier()
            start = time.perf_counter()
            next(loop)
            if turn:  # the first one warms up
                measured.append(time.perf_counter() - start)
    return [measured for _, measured in loops]


def _steps(prepared: bool) -> Iterator[None]:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64 * 256, 256))
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    if prepared:
        model = prepare_model(model)
        loader = prepare_dataloader(DataLoader(dataset, 256, shuffle=True))
    else:
        model = DistributedDataParallel(model)
        loader = DataLoader(dataset, 256, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for step, (x,) in enumerate(loader):
            with accumulate(model, step, 1) if prepared else contextlib.nullcontext():
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def _wide_steps(ddp: dict[str, Any], adamw: dict[str, Any]) -> Iterator[None]:
    """Of a model that has many parameters for what it computes: sending and updating them takes most of a step."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    x = torch.randn(32, 1024)
    while True:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
