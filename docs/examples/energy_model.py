"""Train a classifier that is an energy model too: it tells digits from what is none.

    python docs/examples/energy_model.py                        # DDP over a worker per accelerator, or per core
    python docs/examples/energy_model.py --no-ddp               # one process, DataParallel over its accelerators
    torchrun --nproc-per-node=2 docs/examples/energy_model.py
    python docs/examples/energy_model.py --resume               # goes on from the last checkpoint, however it was saved

The energy of an image is -logsumexp of its logits (Grathwohl et al., 2020). Images that are no digits are noise, moved
for some steps to where the model takes it for digits; there are more of these steps in later epochs.

The example shows these rows of rebm in docs/project/requirements.md: DDP by default and DataParallel without, batch
size per GPU, seed + rank, EMA not wrapped, evaluation and logging on rank 0, checkpoints across wrappers, and
resumption with all that belongs to it.
"""

import argparse
import logging
from pathlib import Path

import torch
from data import convolutions, load_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import nn_parallel as nnp

BATCH_PER_RANK = 32  # the effective batch is this times the number of ranks
logger = logging.getLogger("energy_model")


def energy(logits: Tensor) -> Tensor:
    return -logits.logsumexp(dim=1)


def no_digits(model: nn.Module, n: int, steps: int, device: torch.device) -> Tensor:
    """(n, 1, 8, 8): noise, moved downhill in energy; other noise on every rank, by its own seed."""
    x = torch.rand(n, 1, 8, 8, device=device)
    for _ in range(steps):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(energy(model(x)).sum(), x)
        x = (x - 0.05 * slope.sign()).clamp(0, 1).detach()
    return x


def train(epochs: int, out: Path, resume: bool, ddp: bool) -> dict[str, float]:
    """Train as one of the ranks; returns what rank 0 measured last."""
    world = nnp.initialize_ddp()
    nnp.setup_logging()
    nnp.seed_everything(0)  # and the rank
    logger.info("%s with %d processes", "DDP" if ddp else "DataParallel", world.world_size)
    model = nnp.prepare_model(nn.Sequential(convolutions(), nn.Linear(1024, 10)), strategy="ddp" if ddp else "dp")
    plain = nnp.unwrap_model(model)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # not wrapped: each rank updates its own
    optimizer = torch.optim.Adam(model.parameters())
    digits, held_out = load_split()
    loader = nnp.prepare_dataloader(DataLoader(digits, BATCH_PER_RANK, shuffle=True, drop_last=True))
    state = {"model": model, "average": average, "optimizer": optimizer, "sampler": loader.sampler}
    history: list[dict[str, float]] = []
    if resume:
        history = nnp.load_checkpoint(out / "energy_model.pt", **state)["history"]

    for epoch in range(len(history), epochs):
        attack_steps = epoch // 2
        loss_sum = count = 0
        for x, y in loader:
            x, y = x.to(world.device), y.to(world.device)
            strangers = no_digits(plain, len(x), attack_steps, world.device)
            logits = model(torch.cat([x, strangers]))
            inside, outside = energy(logits).chunk(2)
            loss = cross_entropy(logits[: len(x)], y) + 0.1 * (softplus(inside) + softplus(-outside)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(plain)
            loss_sum, count = loss_sum + loss.item() * len(x), count + len(x)
        metrics = nnp.reduce_metrics({"loss": loss_sum / count}, weight=count) | evaluate(average, held_out)
        history.append(metrics)
        logger.info("epoch %d: %s", epoch, metrics)
        nnp.save_checkpoint(out / "energy_model.pt", **state, epoch=epoch, attack_steps=attack_steps, history=history)
    return history[-1]


@nnp.on_rank(0, broadcast=True)
@torch.no_grad()
def evaluate(model: nn.Module, held_out: TensorDataset) -> dict[str, float]:
    """Rank 0 alone evaluates, and all learn the result."""
    x, y = (tensor.to(next(model.parameters()).device) for tensor in held_out.tensors)
    logits, of_noise = model(x), model(torch.rand_like(x))
    told_apart = (energy(logits)[:, None] < energy(of_noise)).float().mean()  # the area under the ROC curve
    return {"accuracy": (logits.argmax(dim=1) == y).float().mean().item(), "auroc": told_apart.item()}


parser = argparse.ArgumentParser(description="Train an energy model on handwritten digits.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--ranks", type=int, help="how many workers to start; not under torchrun, which has started them")
parser.add_argument("--no-ddp", action="store_true", help="one process, DataParallel")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--out", type=Path, default=Path(), help="folder for the checkpoint")
args = parser.parse_args()

with nnp.ParallelExecutor(num_workers=1 if args.no_ddp else args.ranks) as ex:
    metrics = ex.run(train, args.epochs, args.out, args.resume, not args.no_ddp)[0]
if nnp.current_world().is_main:
    print(f"accuracy {metrics['accuracy']:.1%}, digits told from noise {metrics['auroc']:.1%}")
