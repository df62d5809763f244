"""Checkpoints on 2 ranks, beside torch's own: the time, and how much more memory each rank needs meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from nn_parallel import (
    ParallelExecutor,
    barrier,
    current_world,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_model,
    save_checkpoint,
)

from .harness import Figure

LAYERS, WIDTH = 16, 2048  # 256 MiB
MIB = 1 << 20
Measured = tuple[list[float], list[float]]  # seconds, and MiB


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    with tempfile.TemporaryDirectory() as folder:

        def measured(run: Callable[[nn.Module, Path], object], strategy: str) -> Measured:
            """The slower rank, and the one that needs more memory; new ones, which have kept none."""
            with ParallelExecutor(num_workers=2, devices="cpu") as two:
                ranks = two.run(_measured, run, strategy, Path(folder, "last.pt"), repetitions)
            seconds, mib = zip(*ranks, strict=True)
            return [max(each) for each in zip(*seconds, strict=True)], [max(each) for each in zip(*mib, strict=True)]

        for strategy, name, run, reference, run_reference, goal in _PAIRS:
            beside, ours = measured(run_reference, strategy), measured(run, strategy)
            yield Figure(f"{name}, 256 MiB", ours[0], goal, reference, beside[0])
            yield Figure("... the most memory that it takes on a rank", ours[1], None, "the same", beside[1], "MiB")


def _measured(run: Callable[[nn.Module, Path], object], strategy: str, path: Path, repetitions: int) -> Measured:
    warnings.simplefilter("ignore", UserWarning)  # that torch's checkpoint is overwritten
    initialize_ddp()
    model = prepare_model(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), strategy=strategy
    )
    seconds, mib = list[float](), list[float]()
    for turn in range(repetitions + 1):
        gc.collect()
        barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present
        before, start = _mib("VmRSS"), time.perf_counter()
        result = run(model, path)
        if turn:  # the first one warms up, and writes what is read
            seconds.append(time.perf_counter() - start)
        else:  # later ones use what the allocator has kept
            mib.append(max(_mib("VmHWM") - before, 1.0))
        del result
    return seconds, mib


def _mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _save(model: nn.Module, path: Path) -> None:
    save_checkpoint(path, model=model)


def _save_by_torch(model: nn.Module, path: Path) -> None:
    _write(model.state_dict(), path)


def _save_whole_by_torch(model: nn.Module, path: Path) -> None:
    _write(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), path)


def _write(state: dict[str, Any], path: Path) -> None:
    """On rank 0, to the disk, while the other waits."""
    if current_world().is_main:
        with path.open("wb") as file:
            torch.save({"model": state}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def _save_sharded(model: nn.Module, path: Path) -> None:
    save_checkpoint(path, sharded=True, model=model)


def _save_sharded_by_torch(model: nn.Module, path: Path) -> None:
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=path.with_suffix(".dcp"))


def _load(model: nn.Module, path: Path) -> object:
    on_rank(0)(_save_if_missing)(model, path)
    return load_checkpoint(path, model=model)


def _load_by_torch(model: nn.Module, path: Path) -> object:
    on_rank(0)(_save_if_missing)(model, path)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return model.load_state_dict({f"module.{name}": value for name, value in saved["model"].items()})


def _save_if_missing(model: nn.Module, path: Path) -> None:
    with contextlib.suppress(FileExistsError), path.open("xb") as file:
        torch.save({"model": model.module.state_dict()}, file)  # type: ignore[union-attr]


Runs = tuple[str, str, Callable[[nn.Module, Path], object], str, Callable[[nn.Module, Path], object], float | None]
_PAIRS: list[Runs] = [
    ("ddp", "load_checkpoint on 2 ranks", _load, "torch.load and load_state_dict on each", _load_by_torch, 1.2),
    ("ddp", "save_checkpoint", _save, "torch.save, fsync", _save_by_torch, 1.2),
    ("fsdp", "save_checkpoint, whole", _save, "get_model_state_dict, torch.save, fsync", _save_whole_by_torch, None),
    ("fsdp", "save_checkpoint(sharded=True)", _save_sharded, "checkpoint.save", _save_sharded_by_torch, None),
]
