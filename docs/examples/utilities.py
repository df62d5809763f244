"""Every utility for ranks and devices, on the way to an ensemble.

    python docs/examples/utilities.py
    torchrun --nproc-per-node=2 docs/examples/utilities.py

The example shows every row of nn_handler in docs/project/requirements.md.
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
from data import convolutions, load_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import nn_parallel as nnp


def build() -> nn.Module:
    return nn.Sequential(convolutions(), nn.Linear(1024, 10))


@nnp.parallelize_on_gpus()
def train_member(device: torch.device, seed: int, steps: int) -> dict[str, Tensor]:
    """One member of the ensemble per device, each with its own seed; the call returns all of them."""
    torch.manual_seed(seed + nnp.current_world().rank)
    (x, y), _ = (split.tensors for split in load_split())
    model = build().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        cross_entropy(model(x[batch].to(device)), y[batch].to(device)).backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@nnp.parallel_on_all_devices
def vote(x: Tensor, models: list[nn.Module]) -> Tensor:
    """(n, 1, 8, 8) -> (n,): each device takes its part of the images."""
    return torch.stack([model(x).softmax(dim=1) for model in models]).mean(dim=0).argmax(dim=1)


def double(device: torch.device, data: Tensor) -> Tensor:
    return data.to(device) * 2


@nnp.on_rank(0)
def save(states: list[dict[str, Tensor]], path: Path) -> None:
    """Rank 0 writes; the others wait for it, and get its exception if there is one."""
    torch.save(states, path)
    print(f"saved {len(states)} models to {path}")


@nnp.on_rank([0, -1], barrier=True)
def which() -> int:
    return nnp.current_world().rank


@nnp.on_local_rank(0)
def prepare_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def main(steps: int, out: Path) -> None:
    distributed, rank, _, world_size, device = nnp.initialize_ddp(timeout=timedelta(minutes=5))
    assert distributed == nnp.should_use_distributed()
    assert not nnp.should_use_distributed(False)
    assert device.type == nnp.resolve_device(device).type
    prepare_folder(out)
    with nnp.rank_first():
        _, held_out = load_split()  # rank 0 would download it, the others find it there

    model: nn.Module = build().to(device)
    if distributed:  # by hand, as ever; prepare_model does the same
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type != "cpu" else None)
    named = which()
    assert named == (rank if rank in (0, world_size - 1) else None)

    members = train_member(seed=1, steps=steps)
    with nnp.ParallelExecutor() as executor:
        doubled = executor.run(double, torch.tensor([1, 2, 3]))
    assert all(result.tolist() == [2, 4, 6] for result in doubled)

    models = [build().to(device) for _ in members]
    for each, state in zip(models, members, strict=True):
        each.load_state_dict(state)
    x, y = held_out.tensors
    with torch.no_grad():
        right = (vote(x.to(device), models).cpu() == y).float().mean().item()
    save(members, out / "ensemble.pt")
    if nnp.current_world().is_main:
        print(f"accuracy {right:.1%} of {len(members)} models together")
    nnp.cleanup_ddp()


parser = argparse.ArgumentParser(description="An ensemble on handwritten digits.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", type=Path, default=Path(), help="folder for ensemble.pt")
args = parser.parse_args()
main(args.steps, args.out)
