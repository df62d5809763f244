import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from parts import ModelEma, checksum, create_dataset, create_model

parser = argparse.ArgumentParser(description="Training with averaged weights")
parser.add_argument("-b", "--batch-size", type=int, default=16, help="samples for each device in a step")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--weight-decay", type=float, default=0.02)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--drop", type=float, default=0.2)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--model-ema-decay", type=float, default=0.8)
parser.add_argument("--patience", type=int, default=3, help="epochs without improvement before training stops")
parser.add_argument("--resume", default="", help="path of a checkpoint")
parser.add_argument("--seed", type=int, default=42)


def main():
    args = parser.parse_args()
    device = init_distributed_device()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    dataset_train, dataset_eval = create_dataset(130, seed=1), create_dataset(70, seed=2)
    sampler = DistributedSampler(dataset_train, seed=0)
    # DistributedSampler would repeat some samples, so that all ranks get the same number.
    dataset_eval = Subset(dataset_eval, range(rank, len(dataset_eval), world_size))
    loader_train = DataLoader(dataset_train, args.batch_size, sampler=sampler)
    loader_eval = DataLoader(dataset_eval, args.batch_size)

    model = create_model(drop=args.drop).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    model_ema = ModelEma(model.module, args.model_ema_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader_train))
    train_loss_fn, validate_loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing), nn.CrossEntropyLoss()

    start_epoch, best_loss, best_epoch = 0, float("inf"), -1
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device, weights_only=True)
        model.module.load_state_dict(checkpoint["model"])
        model_ema.module.load_state_dict(checkpoint["model_ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        start_epoch, best_loss, best_epoch = checkpoint["epoch"] + 1, checkpoint["best_loss"], checkpoint["best_epoch"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        metrics = train_one_epoch(model, loader_train, optimizer, train_loss_fn, lr_scheduler, model_ema, args, device)
        log(epoch, "train", metrics)
        distribute_bn(model)
        distribute_bn(model_ema.module)
        eval_metrics = validate(model, loader_eval, validate_loss_fn, device)
        log(epoch, "eval", eval_metrics)
        ema_eval_metrics = validate(model_ema.module, loader_eval, validate_loss_fn, device)
        log(epoch, "ema", ema_eval_metrics)

        improved = ema_eval_metrics["loss"] < best_loss
        if improved:
            best_loss, best_epoch = ema_eval_metrics["loss"], epoch
        state = {
            "model": model.module.state_dict(),
            "model_ema": model_ema.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
            "best_loss": best_loss,
            "best_epoch": best_epoch,
        }
        if rank == 0:
            torch.save(state, "last.pth.tar")
            if improved:
                torch.save(state, "model_best.pth.tar")
        # All ranks have the same loss, so they stop together.
        if epoch - best_epoch >= args.patience:
            print_primary(f"result stop after epoch {epoch}: no improvement in {args.patience} epochs")
            break
    print_primary(f"result best epoch {best_epoch} loss {best_loss!r}")
    print_primary("result parameters", checksum(model.module))
    print_primary("result averaged parameters", checksum(model_ema.module))
    dist.destroy_process_group()


def init_distributed_device():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def print_primary(*args):
    if dist.get_rank() == 0:
        print(*args)


def distribute_bn(model):
    """Average the running statistics of batch norm over all ranks, in one collective."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    averages = torch.cat(statistics) * (1 / dist.get_world_size())
    dist.all_reduce(averages)
    for buffer, average in zip(statistics, averages.split([len(buffer) for buffer in statistics]), strict=True):
        buffer.copy_(average)


def reduce_totals(totals, device):
    tensor = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return dict(zip(totals, tensor.tolist(), strict=True))


def train_one_epoch(model, loader, optimizer, loss_fn, lr_scheduler, model_ema, args, device):
    totals = {"loss": 0.0, "top1": 0, "samples": 0}
    model.train()
    for x, target in loader:
        x, target = x.to(device), target.to(device)
        output = model(x)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        model_ema.update(model)
        lr_scheduler.step()
        add_batch(totals, loss, output, target)
    return averages(reduce_totals(totals, device))


@torch.no_grad()
def validate(model, loader, loss_fn, device):
    totals = {"loss": 0.0, "top1": 0, "samples": 0}
    model.eval()
    for x, target in loader:
        x, target = x.to(device), target.to(device)
        output = model(x)
        add_batch(totals, loss_fn(output, target), output, target)
    return averages(reduce_totals(totals, device))


def add_batch(totals, loss, output, target):
    totals["loss"] += loss.item() * len(target)
    totals["top1"] += (output.argmax(dim=1) == target).sum().item()
    totals["samples"] += len(target)


def averages(totals):
    return {"loss": totals["loss"] / totals["samples"], "top1": totals["top1"] / totals["samples"]}


def log(epoch, name, metrics):
    print_primary(f"result epoch {epoch} {name} loss {metrics['loss']!r} top1 {metrics['top1']!r}")


if __name__ == "__main__":
    main()
