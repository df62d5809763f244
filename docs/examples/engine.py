"""A training engine: mixed precision, averaged weights, reduced metrics, linear rule.

    python docs/examples/engine.py --use-amp --use-ema
    python docs/examples/engine.py --world-size 1
    torchrun --nproc-per-node=2 docs/examples/engine.py

The example shows these rows of TrainingEngine in docs/project/requirements.md: SyncBatchNorm (on accelerators), mixed
precision, EMA made one before validation, metrics over uneven ranks, the linear rule, a launch function with its
fallback, the scheduler, and the best and the last checkpoint.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from data import convolutions, load_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm

import nn_parallel as nnp

BATCH = 32  # per rank
LR = 5e-4  # for one rank


def build() -> nn.Module:
    features = convolutions()
    features.insert(1, nn.BatchNorm2d(32))
    return nn.Sequential(features, nn.Linear(1024, 10))


def train(epochs: int, out: Path, use_amp: bool, use_ema: bool) -> list[dict[str, float]]:
    """Train as one of the ranks, and keep the best and the last checkpoint; returns the metrics of each epoch."""
    world = nnp.initialize_ddp()
    nnp.seed_everything(0)
    digits, held_out = load_split()
    train_loader = nnp.prepare_dataloader(DataLoader(digits, BATCH, shuffle=True))
    val_loader = nnp.prepare_dataloader(
        DataLoader(held_out, BATCH), pad=False
    )  # each digit once, so they can be counted
    model = nnp.prepare_model(build(), sync_batchnorm=True)
    ema = AveragedModel(nnp.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR * world.world_size)  # linear rule (Goyal et al., 2017)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    amp_type = torch.bfloat16 if world.device.type == "cpu" else torch.float16
    scaler = torch.amp.GradScaler(world.device.type, enabled=use_amp and amp_type == torch.float16)

    def losses(net: nn.Module, loader: DataLoader[Any]) -> Iterator[tuple[torch.Tensor, int, int]]:
        for x, y in loader:
            x, y = x.to(world.device), y.to(world.device)
            with torch.autocast(world.device.type, amp_type, enabled=use_amp):
                logits = net(x)
                loss = cross_entropy(logits, y)
            yield loss, int((logits.argmax(dim=1) == y).sum()), len(x)

    history: list[dict[str, float]] = []
    for epoch in (progress := tqdm(range(epochs), unit="epoch", disable=not world.is_main)):
        model.train()
        for loss, _, _ in losses(model, train_loader):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            ema.update_parameters(nnp.unwrap_model(model))
        scheduler.step()

        evaluated = nnp.unwrap_model(model)  # not DDP: a rank may have a batch more than another
        if use_ema:
            nnp.average_parameters(ema)  # each rank has averaged for itself
            evaluated = ema.module
        evaluated.eval()
        with torch.no_grad():
            rows = torch.tensor([(loss * n, correct, n) for loss, correct, n in losses(evaluated, val_loader)])
        loss_sum, correct, count = rows.sum(dim=0).tolist()
        metrics = nnp.reduce_metrics({"val_loss": loss_sum / count}, weight=count)
        counts = nnp.reduce_metrics({"correct": int(correct), "of": int(count)}, op="sum")
        metrics["accuracy"] = counts["correct"] / counts["of"]
        progress.set_postfix(metrics)
        is_best = all(metrics["accuracy"] > earlier["accuracy"] for earlier in history)
        history.append(metrics)
        for name in ["last.pt", *["best.pt"] * is_best]:
            nnp.save_checkpoint(
                out / name,
                model=model,
                ema=ema,
                optimizer=optimizer,
                scheduler=scheduler,
                scaler=scaler,
                epoch=epoch,
                history=history,
            )
    return history


def launch(fn: Callable[..., Any], world_size: int | None, *arguments: Any) -> Any:
    """Run ``fn`` on that many workers, on the ranks of a launcher, or here if several processes are not to be had."""
    with contextlib.ExitStack() as stack:
        try:
            run = stack.enter_context(nnp.ParallelExecutor(num_workers=world_size)).run
        except nnp.ParallelError as error:
            print(f"One process instead of several: {error}")
            return fn(*arguments)
        return run(fn, *arguments)[0]


parser = argparse.ArgumentParser(description="Train on handwritten digits with all that a training engine has.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--world-size", type=int)
parser.add_argument("--use-amp", action="store_true", help="mixed precision")
parser.add_argument("--use-ema", action="store_true", help="evaluate the averaged weights")
parser.add_argument("--out", type=Path, default=Path(), help="folder for best.pt and last.pt")
args = parser.parse_args()

history = launch(train, args.world_size, args.epochs, args.out, args.use_amp, args.use_ema)
if nnp.current_world().is_main:
    print(f"best accuracy {max(epoch['accuracy'] for epoch in history):.1%}, last {history[-1]['accuracy']:.1%}")
