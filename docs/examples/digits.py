"""Train a small CNN on 1 797 handwritten digits, on every device. One file, however it is started:

    python docs/examples/digits.py                       # a worker per accelerator, or per core where there is none
    python docs/examples/digits.py --ranks 1
    torchrun --nproc-per-node=2 docs/examples/digits.py  # the workers are torchrun's ranks
    python docs/examples/digits.py --engine ray          # workers on the nodes of a Ray cluster

The loop is plain PyTorch. nn_parallel starts the ranks, connects them, and keeps for rank 0 what only one should do.
"""

import argparse
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from nn_parallel import ParallelExecutor, initialize_ddp, on_rank

HELD_OUT = 360
BATCH = 64  # of all ranks together, so that the result is alike for any number of them


def train(epochs: int, out: Path) -> list[tuple[float, int, int]]:
    """Train as one of the ranks; return per epoch the loss, and how many held-out digits were right of how many."""
    _, rank, _, world_size, device = initialize_ddp()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(small_cnn().to(device))
    optimizer = torch.optim.Adam(model.parameters())

    images, held_out_images, labels, held_out_labels = load_split()
    my_images, my_labels = held_out_images[rank::world_size], held_out_labels[rank::world_size]  # each on one rank
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, max(1, BATCH // world_size), sampler=sampler)

    history = []
    for epoch in (progress := tqdm(range(epochs), unit="epoch", disable=rank != 0)):
        sampler.set_epoch(epoch)
        loss_sum = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(x)
        with torch.no_grad():
            predicted = model.module(my_images.to(device)).argmax(dim=1).cpu()

        sums = torch.tensor([loss_sum, len(sampler), (predicted == my_labels).sum(), len(my_labels)])
        dist.all_reduce(sums)
        loss_sum, trained, correct, evaluated = sums.tolist()
        history.append((loss_sum / trained, int(correct), int(evaluated)))
        progress.set_postfix(loss=loss_sum / trained, accuracy=correct / evaluated)
        check_ranks_agree(model.module)
        save_checkpoint(model.module, out / "digits.pt")
    return history


def small_cnn() -> nn.Module:
    features = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def load_split() -> list[Tensor]:
    """The images to train on, those held out, and the labels of each; the same on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return train_test_split(images, torch.tensor(labels), test_size=HELD_OUT, random_state=0)


def check_ranks_agree(model: nn.Module) -> None:
    """Raise if the parameters differ between the ranks by as much as one bit."""
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    hashes = [""] * dist.get_world_size()
    dist.all_gather_object(hashes, sha256(parameters.numpy()).hexdigest())
    if len(set(hashes)) > 1:
        raise RuntimeError(f"The parameters differ between the ranks: {hashes}")


@on_rank(0)
def save_checkpoint(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


@on_rank(0)
def report(history: list[tuple[float, int, int]], ranks: int, path: Path) -> None:
    """Draw loss and accuracy into ``path`` and print the accuracy after the last epoch."""
    from matplotlib.figure import Figure  # without pyplot it draws by Agg and needs no display

    losses, correct, evaluated = zip(*history, strict=True)
    accuracies = [c / n for c, n in zip(correct, evaluated, strict=True)]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(history) + 1), losses, marker="o")
    left.set(title="training loss", xlabel="epoch")
    right.plot(range(1, len(history) + 1), accuracies, marker="o")
    right.set(title=f"accuracy on {HELD_OUT} held-out digits", xlabel="epoch")
    figure.savefig(path)
    print(f"{correct[-1]} of {evaluated[-1]} held-out digits are right: {accuracies[-1]:.1%}, trained on {ranks} ranks")


parser = argparse.ArgumentParser(description="Train on the handwritten digits of scikit-learn.")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--ranks", type=int, help="how many workers to start; not under torchrun, which has started them")
parser.add_argument(
    "--engine", default="local", choices=["local", "ray"], help="where to start them: see docs/guide/ray.md"
)
parser.add_argument("--out", type=Path, default=Path(), help="folder for digits.pt and digits.png")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

with ParallelExecutor(num_workers=args.ranks, engine=args.engine) as ex:
    results = ex.run(train, args.epochs, args.out)
report(results[0], len(results), args.out / "digits.png")
