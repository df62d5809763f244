"""A trainer that a YAML file configures, with validator and early stopping.

    python docs/examples/trainer.py                       # starts parallel.world_size workers
    torchrun --nproc-per-node=2 docs/examples/trainer.py  # the workers are torchrun's ranks

The example shows these rows of QuantumGrav in docs/project/requirements.md: YAML with a section `parallel`, both ways
of starting, the loaders' options, validation and test on rank 0, early stopping decided there, checkpoints by rank 0,
logs headed by the rank.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
import yaml
from data import convolutions, load_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import nn_parallel as nnp

logger = logging.getLogger("trainer")


class EarlyStopping:
    """Says when the loss has not got better for some epochs. It lives on rank 0, as the validator does."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def should_stop(self, loss: float) -> bool:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.patience


def train(config: dict[str, Any], out: Path) -> float:
    """Train as one of the ranks; returns the share of the held-out digits that are right."""
    nnp.initialize_ddp()
    nnp.setup_logging()
    settings = config["training"]
    nnp.seed_everything(settings["seed"])
    digits, test_set = load_split()
    train_set, validation_set = random_split(digits, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    loader = nnp.prepare_dataloader(
        DataLoader(
            train_set,
            settings["batch_size"],
            shuffle=True,
            num_workers=settings["num_workers"],
            drop_last=settings["drop_last"],
        ),
        seed=settings["seed"],
    )
    logger.info("%d digits to train on, %d to validate, %d to test", len(train_set), len(validation_set), len(test_set))

    model = nnp.prepare_model(
        nn.Sequential(convolutions(), nn.Linear(1024, 10)),
        find_unused_parameters=config["parallel"]["find_unused_parameters"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], weight_decay=5e-5)
    stopping = EarlyStopping(config["early_stopping"]["patience"])

    @nnp.on_rank(0, broadcast=True)  # one rank validates and decides; all get the decision, or its exception
    def validate_and_decide(epoch: int) -> bool:
        loader = DataLoader(validation_set, config["validation"]["batch_size"])
        losses = torch.cat([per_sample_loss(nnp.unwrap_model(model), x, y) for x, y in loader])
        logger.info("epoch %d: validation loss %.3f ± %.3f", epoch, losses.mean(), losses.std())
        return stopping.should_stop(losses.mean().item())

    for epoch in range(settings["num_epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(to_device(x)), to_device(y)).backward()
            optimizer.step()
        if epoch % settings["checkpoint_at"] == 0:
            nnp.save_checkpoint(out / f"model_{epoch}.pt", model=model, optimizer=optimizer, epoch=epoch)
        if validate_and_decide(epoch):
            logger.info("stopped early, after epoch %d", epoch)
            break
    return test(nnp.unwrap_model(model), test_set)


@torch.no_grad()
def per_sample_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(to_device(x)), to_device(y), reduction="none")


@nnp.on_rank(0, broadcast=True)
@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset) -> float:
    x, y = map(to_device, test_set.tensors)
    return (model(x).argmax(dim=1) == y).float().mean().item()


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(nnp.current_world().device)


parser = argparse.ArgumentParser(description="Train on handwritten digits as a YAML file says.")
parser.add_argument("config", type=Path, nargs="?", default=Path(__file__).with_name("trainer.yaml"))
parser.add_argument("--out", type=Path, default=Path(), help="folder for the checkpoints")
args = parser.parse_args()
config = yaml.safe_load(args.config.read_text())
if "parallel" not in config:
    raise SystemExit(f"{args.config} has no section 'parallel'.")

launched = nnp.should_use_distributed()
with nnp.ParallelExecutor(num_workers=None if launched else config["parallel"]["world_size"]) as ex:
    accuracies = ex.run(train, config, args.out)
if nnp.current_world().is_main:
    print(f"accuracy {accuracies[0]:.1%} on {len(accuracies)} ranks")
