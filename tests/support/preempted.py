"""A training script that signals stop, and that goes on where it was when it is started again.

    preempted.py FOLDER SECONDS [RANK:STEP]

Each step takes so many seconds. That rank sends itself SIGTERM twice in that step, if it is the first run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nn_parallel import (
    initialize_ddp,
    load_checkpoint,
    prepare_dataloader,
    prepare_model,
    save_checkpoint,
    seed_everything,
    stop_requested,
)

STEPS, EPOCH = 24, 10
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
rank_and_step = tuple(map(int, sys.argv[3].split(":"))) if len(sys.argv) > 3 else None
world, step = initialize_ddp(), 0
seed_everything(0)
model = prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters())
samples = torch.randn(3 * EPOCH * world.world_size, 4, generator=torch.Generator().manual_seed(0))
loader = prepare_dataloader(DataLoader(TensorDataset(samples), batch_size=3, shuffle=True))
if resumed := (folder / "last.pt").exists():
    step = load_checkpoint(folder / "last.pt", model=model, optimizer=optimizer, loader=loader)["step"]
while step < STEPS:
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(seconds)
        if (world.rank, step) == rank_and_step and not resumed:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        stops = stop_requested()
        (folder / f"{world.rank}.step").write_text(str(step))  # from here on a signal does not end this
        if stops or step == STEPS:
            save_checkpoint(folder / "last.pt", model=model, optimizer=optimizer, loader=loader, step=step)
        if stops:
            (folder / f"{world.rank}.stopped").write_text(str(step))
            sys.exit(os.EX_TEMPFAIL)
        if step == STEPS:
            break
