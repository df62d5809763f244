import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from nn_parallel import (
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_dataloader,
    prepare_model,
    reduce_metrics,
    save_checkpoint,
    seed_everything,
    sync_buffers,
    unwrap_model,
)

from parts import EpochShuffle, ModelEma, checksum, create_dataset, create_model

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

print = on_rank(0)(print)


def main():
    args = parser.parse_args()
    device = initialize_ddp().device
    seed_everything(args.seed)

    dataset_train, dataset_eval = create_dataset(130, seed=1), create_dataset(70, seed=2)
    sampler = EpochShuffle(len(dataset_train), seed=0)
    # With a seed, the loader draws none from torch's generator, and the weights are those of the script for one device.
    loader_train = prepare_dataloader(DataLoader(dataset_train, args.batch_size, sampler=sampler), seed=args.seed)
    loader_eval = prepare_dataloader(DataLoader(dataset_eval, args.batch_size), pad=False)

    model = prepare_model(create_model(drop=args.drop))
    model_ema = ModelEma(unwrap_model(model), args.model_ema_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader_train))
    train_loss_fn, validate_loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing), nn.CrossEntropyLoss()

    start_epoch, best_loss, best_epoch = 0, float("inf"), -1
    if args.resume:
        checkpoint = load_checkpoint(
            args.resume, model=model, model_ema=model_ema.module, optimizer=optimizer, lr_scheduler=lr_scheduler
        )
        start_epoch, best_loss, best_epoch = checkpoint["epoch"] + 1, checkpoint["best_loss"], checkpoint["best_epoch"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        metrics = train_one_epoch(model, loader_train, optimizer, train_loss_fn, lr_scheduler, model_ema, args, device)
        log(epoch, "train", metrics)
        sync_buffers(model, average=True)
        sync_buffers(model_ema.module, average=True)
        eval_metrics = validate(model, loader_eval, validate_loss_fn, device)
        log(epoch, "eval", eval_metrics)
        ema_eval_metrics = validate(model_ema.module, loader_eval, validate_loss_fn, device)
        log(epoch, "ema", ema_eval_metrics)

        improved = ema_eval_metrics["loss"] < best_loss
        if improved:
            best_loss, best_epoch = ema_eval_metrics["loss"], epoch
        state = {
            "model": model,
            "model_ema": model_ema.module,
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "epoch": epoch,
            "best_loss": best_loss,
            "best_epoch": best_epoch,
        }
        save_checkpoint("last.pth.tar", **state)
        if improved:
            save_checkpoint("model_best.pth.tar", **state)
        if epoch - best_epoch >= args.patience:
            print(f"result stop after epoch {epoch}: no improvement in {args.patience} epochs")
            break
    print(f"result best epoch {best_epoch} loss {best_loss!r}")
    print("result parameters", checksum(unwrap_model(model)))
    print("result averaged parameters", checksum(model_ema.module))


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
    return averages(reduce_metrics(totals, op="sum"))


@torch.no_grad()
def validate(model, loader, loss_fn, device):
    totals = {"loss": 0.0, "top1": 0, "samples": 0}
    model.eval()
    for x, target in loader:
        x, target = x.to(device), target.to(device)
        output = model(x)
        add_batch(totals, loss_fn(output, target), output, target)
    return averages(reduce_metrics(totals, op="sum"))


def add_batch(totals, loss, output, target):
    totals["loss"] += loss.item() * len(target)
    totals["top1"] += (output.argmax(dim=1) == target).sum().item()
    totals["samples"] += len(target)


def averages(totals):
    return {"loss": totals["loss"] / totals["samples"], "top1": totals["top1"] / totals["samples"]}


def log(epoch, name, metrics):
    print(f"result epoch {epoch} {name} loss {metrics['loss']!r} top1 {metrics['top1']!r}")


if __name__ == "__main__":
    main()
