"""A day of use in an hour: all layers together, in a random order: ``python -m benchmarks.day SECONDS``.

Three workers train in blocks, with a checkpoint in each round, and each makes a pool of its own. Calls fail, workers
are killed, and a notebook's kernel with a pool is restarted. Each row of the table holds what `benchmarks.soak` counts,
in the middle of use. A count that grows from row to row is a leak.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nn_parallel import (
    ParallelExecutor,
    RankError,
    current_world,
    load_checkpoint,
    on_rank,
    prepare_dataloader,
    prepare_model,
    rank_first,
    reduce_metrics,
    save_checkpoint,
    seed_everything,
    unwrap_model,
)
from nn_parallel._engine.descendants import children_of

from .soak import state

ROWS = 12
KERNEL = """
import sys
from jupyter_client.manager import KernelManager
manager = KernelManager()
manager.start_kernel()
client = manager.client()
client.start_channels()
cell = '''
import os
from nn_parallel import ParallelExecutor
pool = ParallelExecutor(num_workers=2, devices="cpu")
print(*pool.run(os.getpid))
'''
for _ in range(3):
    client.wait_for_ready(timeout=120)
    answer = client.execute_interactive(cell, timeout=120)
    assert answer["content"]["status"] == "ok", answer
    manager.restart_kernel(now=True)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


def train(folder: str, failing_rank: int | None) -> float:
    """One epoch from the last checkpoint on. If a rank fails in the middle, the others learn of it, and all go on."""
    seed_everything(0)
    world = current_world()
    model = prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    loader = prepare_dataloader(DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4, shuffle=True), seed=0)
    path = Path(folder, "last.pt")
    if path.exists():
        load_checkpoint(path, model=model, optimizer=optimizer)
    loss = torch.zeros(())
    try:
        with ParallelExecutor():
            for step, (x,) in enumerate(loader):
                if step == 3 and world.rank == failing_rank:
                    raise ValueError("a bad batch")
                loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except* ValueError:
        model = prepare_model(unwrap_model(model))
    with rank_first():
        Path(folder, "cache").touch()
    on_rank(0)(Path(folder, "log").touch)()
    metrics = reduce_metrics({"loss": loss.item()})
    save_checkpoint(path, keep=2, asynchronous=failing_rank is None, model=model, optimizer=optimizer)
    return metrics["loss"]


def use_own_pool(x: int) -> int:
    with ParallelExecutor(num_workers=1, devices="cpu") as own:
        return sum(own.map(abs, [x] * 20))


def run_round(pool: ParallelExecutor, rng: random.Random, folder: str) -> None:
    """Some calls in a random order, of which some fail."""
    pool.run(train, folder, rng.choice([None, None, 0, 1, 2]))
    assert list(pool.map(use_own_pool, [-1, -2, -3], chunksize=1)) == [20, 40, 60]
    pool.run(torch.Tensor.sum, pool.put(torch.ones(rng.choice([10, 1 << 18]))))
    kind = rng.randrange(4)
    if kind == 0:
        with contextlib.suppress(RankError):
            pool.run(int, "no number")
    elif kind == 1:
        with contextlib.suppress(RankError):
            pool.run(lambda: os._exit(3) if current_world().rank == 1 else time.sleep(60))
    elif kind == 2:
        os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
    else:
        pool.resize(rng.choice([2, 4]))
        pool.resize(3)
    with contextlib.suppress(RankError):  # of the killed worker
        pool.run(int)
    assert sum(pool.map(abs, range(-2000, 0))) == 2_001_000


def main() -> None:
    seconds = float(sys.argv[1])
    rng = random.Random(0)
    rounds = 0
    print("| minutes | rounds | memory, MiB | descriptors | threads | keys in the store |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        with ParallelExecutor(num_workers=3, devices="cpu", timeout=120) as pool:
            for _ in range(5):  # what is loaded once is there before the first row
                run_round(pool, rng, folder)
            began = time.monotonic()
            for row in range(ROWS + 1):
                while time.monotonic() - began < seconds * row / ROWS:
                    run_round(pool, rng, folder)
                    rounds += 1
                    if rounds % 20 == 0:
                        subprocess.run([sys.executable, "-c", KERNEL], check=True, stdout=subprocess.DEVNULL)
                memory, *counts = state(pool)
                minutes = (time.monotonic() - began) / 60
                print("|", " | ".join(f"{cell:.0f}" for cell in (minutes, rounds, memory, *counts)), "|", flush=True)
        left = sorted(os.listdir(folder))
    print(f"files: {left}; processes left: {len(children_of(os.getpid())) - 1} beside the fork server")


if __name__ == "__main__":
    main()
