"""Federated learning: clients keep their digits and share what they learn.

    python docs/examples/federated.py                              # a worker per accelerator, or per core
    python docs/examples/federated.py --gpus 0,2-3                 # on these; --gpus 2 --auto takes the two freest
    torchrun --nproc-per-node=4 docs/examples/federated.py         # 2 clients at a time, each on 2 ranks by DDP
    python docs/examples/federated.py --ranks 1                    # one process: one client after another

Each client first learns its backbone on a pretext, the order of the four patches of an image, then backbone and
classifier on its labels. After each round backbone and classifier become the average of all clients', weighted by their
digits (McMahan et al., 2017); the pretext's head stays with the client. More clients join from round to round.

The example shows these rows of FedGFE in docs/project/requirements.md: parts wrapped with find_unused_parameters, DDP
inside each client, weighted aggregation, GPUs chosen by hand or by themselves, the status of each process, clients that
come and go, and the single process where the environment is broken.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from data import convolutions, load_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset

import nn_parallel as nnp

BATCH = 32  # of one client, however many ranks train it
ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # of the patches: the 24 classes of the pretext


class Client(nn.Module):
    """The parts that a client trains: a backbone for both tasks, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = convolutions()
        self.downstream_task = nn.Linear(1024, 10)
        self.pretext_task = nn.Linear(1024, len(ORDERS))

    def forward(self, x: Tensor, pretext: bool) -> Tensor:
        features = self.backbone(x)
        return self.pretext_task(features) if pretext else self.downstream_task(features)

    def shared(self) -> nn.ModuleList:
        return nn.ModuleList([self.backbone, self.downstream_task])


def with_shuffled_patches(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 1, 8, 8) -> the same with its four quarters in some order, and (n,) the number of that order."""
    order = torch.randint(len(ORDERS), (len(x),))
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(x), 4, 4, 4)
    patches = patches[torch.arange(len(x))[:, None], ORDERS[order]].view(-1, 2, 2, 4, 4)
    return patches.permute(0, 1, 3, 2, 4).reshape(-1, 1, 8, 8), order


def federate(rounds: int, clients: int, out: Path) -> float:
    """Train as one of the ranks; returns the share of the held-out digits that the averaged model gets right."""
    world = nnp.initialize_ddp(fallback=True)  # alone, with a warning, where the environment is broken
    digits, held_out = load_split()
    belongs_to = torch.arange(len(digits)) % (clients * (clients + 1) // 2)  # to client k: k + 1 parts of these
    bounds = torch.tensor([k * (k + 1) // 2 for k in range(clients + 1)])
    held_by = [((belongs_to >= bounds[k]) & (belongs_to < bounds[k + 1])).nonzero().flatten() for k in range(clients)]

    teams = max(1, min(clients, world.world_size // 2))  # each trains one client after another, by DDP
    team = world.rank % teams
    groups = [dist.new_group(range(t, world.world_size, teams)) for t in range(teams)] if world.distributed else [None]
    size, place = (dist.get_world_size(groups[team]), dist.get_rank(groups[team])) if world.distributed else (1, 0)
    sizes = [len(each) for each in held_by]
    print_status(team, sizes)

    nnp.seed_everything(0, per_rank=False)  # all begin with the same model
    members = [Client().to(world.device) for _ in range(clients)]
    models = [nnp.prepare_model(member, process_group=groups[team], find_unused_parameters=True) for member in members]
    nnp.seed_everything(0)
    accuracy = 0.0
    for number in range(rounds):
        taking_part = range(max(1, clients * (number + 1) // rounds))
        mine = [k for k in taking_part if k % teams == team]
        for k in mine:
            data = Subset(digits, held_by[k].tolist())
            sampler = DistributedSampler(data, size, place)  # within the team: prepare_dataloader is for all ranks
            sampler.set_epoch(number)
            loader = DataLoader(data, max(1, BATCH // size), sampler=sampler)
            for pretext in (True, False):
                train(models[k], loader, pretext)
        aggregate(members, mine, sizes, size)
        accuracy = evaluate(members[0], held_out)
        if world.is_main:
            print(f"round {number}: {len(taking_part)} clients, accuracy {accuracy:.1%}", flush=True)
    nnp.save_checkpoint(out / "federated.pt", model=members[0].shared(), rounds=rounds)
    return accuracy


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], pretext: bool) -> None:
    device = nnp.current_world().device
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for x, y in loader:
            if pretext:
                x, y = with_shuffled_patches(x)
            optimizer.zero_grad()
            cross_entropy(model(x.to(device), pretext), y.to(device)).backward()
            optimizer.step()


def aggregate(members: list[Client], mine: list[int], sizes: list[int], ranks_in_team: int) -> None:
    """Give every client, on every rank, the average of the shared parts of those that were trained."""
    weight = float(sum(sizes[k] for k in mine))
    states = [members[k].shared().state_dict() for k in mine]
    average = members[0].shared()
    with torch.no_grad():
        for name, value in average.state_dict().items():
            if mine:
                value.copy_(sum(state[name] * (sizes[k] / weight) for k, state in zip(mine, states, strict=True)))
    nnp.average_parameters(average, weight=weight / ranks_in_team)
    for member in members:
        member.shared().load_state_dict(average.state_dict())


@torch.no_grad()
def evaluate(model: Client, held_out: torch.utils.data.TensorDataset) -> float:
    loader = nnp.prepare_dataloader(DataLoader(held_out, 64), pad=False)
    device = nnp.current_world().device
    right = [(model(x.to(device), False).argmax(dim=1) == y.to(device)).cpu() for x, y in loader]
    return nnp.all_gather_tensor(torch.cat([torch.ones(0, dtype=torch.bool), *right])).float().mean().item()


def print_status(team: int, sizes: list[int]) -> None:
    """What runs where, from every rank, in one place."""
    world = nnp.current_world()
    about = {"rank": world.rank, "device": str(world.device), "team": team, "launcher": world.launcher}
    for told in nnp.all_gather_object(about):
        if world.is_main:
            print(told, flush=True)
    if world.is_main:
        print(f"digits of the clients: {sizes}; is_distributed: {world.distributed}", flush=True)


parser = argparse.ArgumentParser(description="Federated learning on handwritten digits.")
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--clients", type=int, default=3)
parser.add_argument("--ranks", type=int, help="how many workers to start; not under torchrun, which has started them")
parser.add_argument("--gpus", help='"0,2-3", "all"; with --auto how many')
parser.add_argument("--auto", action="store_true", help="the GPUs with the most free memory")
parser.add_argument("--min-memory", type=int, default=0, help="MiB that must be free on each of them")
parser.add_argument("--out", type=Path, default=Path(), help="folder for federated.pt")
args = parser.parse_args()
devices = args.gpus
if args.auto:
    devices = ",".join(str(gpu.index) for gpu in nnp.select_gpus(int(args.gpus), min_memory_mb=args.min_memory))

with nnp.ParallelExecutor(devices=devices, num_workers=args.ranks) as ex:
    accuracies = ex.run(federate, args.rounds, args.clients, args.out)
if nnp.current_world().is_main:
    print(f"accuracy {accuracies[0]:.1%} on {len(accuracies)} ranks")
