"""From a failure on one rank to the error on the others, or in the caller; and until the pool is whole again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from nn_parallel import ParallelExecutor, RankError, current_world, initialize_ddp

from .harness import Figure

TORCHRUN_SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    print(time.monotonic(), flush=True)
    raise ValueError
dist.all_reduce(torch.ones(1))
"""


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""
    for ranks, goal in ((2, 0.025), (16, 0.05)):
        told, killed = list[float](), list[float]()
        with ParallelExecutor(num_workers=ranks, devices="cpu") as pool:
            pool.run(fail_beside_all_reduce)
            for repetition in range(repetitions):
                told.append(max(pool.run(fail_beside_all_reduce)))
                if ranks == 2 and repetition < 3 < repetitions:
                    killed.append(_until_torchrun_ends())
        name = f"rank 1 raises, {ranks - 1} in all_reduce: RankError on all"
        yield Figure(name, told, goal)
        if killed:
            yield Figure(name, told[: len(killed)], None, "torchrun alone: all are killed", killed)

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        for how, fail in (("raises", _raise), ("is SIGKILLed", _die)):
            for what, wait, goal in (
                ("asleep", _sleep, 0.1),
                ("spinning", _spin, 0.1),
                ("in C holding the GIL", _hold, 1.0),
            ):
                told, whole = [], []
                for _ in range(min(repetitions, 5)):
                    seconds = _failure(pool, fail, wait)
                    told.append(seconds[0])
                    whole.append(seconds[1])
                yield Figure(f"rank 1 {how}, rank 0 {what}: run() raises", told, goal)
                yield Figure("... and from there until the pool is whole", whole, 0.5)


def _failure(pool: ParallelExecutor, fail: Callable[[], None], wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds from the failure to the error, and from there to the result of the next run."""
    at = torch.zeros(1, dtype=torch.float64).share_memory_()
    pool.run(int)
    try:
        pool.run(_work, fail, wait, at)
    except RankError:
        raised = time.monotonic()
    pool.run(int)
    return raised - float(at), time.monotonic() - raised


def _work(fail: Callable[[], None], wait: Callable[[], None], at: torch.Tensor) -> None:
    if current_world().rank == 1:
        time.sleep(0.2)  # until the other one is where it is to be
        at[0] = time.monotonic()
        fail()
    wait()


def _raise() -> None:
    raise ValueError


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    time.sleep(60)


def _spin() -> None:
    while True:
        pass


def _hold() -> None:
    sum(range(2_000_000_000))


def fail_beside_all_reduce() -> float:
    """As one of the ranks: seconds from the failure of rank 1 to the error here."""
    at = torch.zeros(1, dtype=torch.float64)
    rank = initialize_ddp().rank
    try:
        with ParallelExecutor():
            dist.barrier()
            if rank == 1:
                time.sleep(random.uniform(0.4, 0.42))  # until the others are there, and look every 20 ms
                at[0] = time.monotonic()
                raise ValueError
            dist.all_reduce(torch.ones(1))
    except RankError:
        told = time.monotonic()
    initialize_ddp()
    dist.broadcast(at, 1)
    return told - float(at)


def _until_torchrun_ends() -> float:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "script.py")
        script.write_text(TORCHRUN_SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        return time.monotonic() - float(done.stdout.split()[0])
