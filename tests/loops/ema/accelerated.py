import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

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
parser.add_argument("--resume", default="", help="folder of a checkpoint")
parser.add_argument("--seed", type=int, default=42)


def main():
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed, device_specific=True)

    dataset_train, dataset_eval = create_dataset(130, seed=1), create_dataset(70, seed=2)
    sampler = EpochShuffle(len(dataset_train), seed=0)
    loader_train = DataLoader(dataset_train, args.batch_size, sampler=sampler)
    loader_eval = DataLoader(dataset_eval, args.batch_size)

    model = create_model(drop=args.drop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader_train))
    train_loss_fn, validate_loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing), nn.CrossEntropyLoss()

    model, optimizer, loader_train, loader_eval, lr_scheduler = accelerator.prepare(
        model, optimizer, loader_train, loader_eval, lr_scheduler
    )
    model_ema = ModelEma(accelerator.unwrap_model(model), args.model_ema_decay)
    progress = Progress()
    accelerator.register_for_checkpointing(model_ema.module, progress)
    if args.resume:
        accelerator.load_state(args.resume)

    for epoch in range(progress.epoch + 1, args.epochs):
        loader_train.set_epoch(epoch)
        metrics = train_one_epoch(
            accelerator, model, loader_train, optimizer, train_loss_fn, lr_scheduler, model_ema, args
        )
        log(accelerator, epoch, "train", metrics)
        average_buffers(accelerator, model)
        average_buffers(accelerator, model_ema.module)
        eval_metrics = validate(accelerator, model, loader_eval, validate_loss_fn)
        log(accelerator, epoch, "eval", eval_metrics)
        ema_eval_metrics = validate(accelerator, model_ema.module, loader_eval, validate_loss_fn)
        log(accelerator, epoch, "ema", ema_eval_metrics)

        improved = ema_eval_metrics["loss"] < progress.best_loss
        progress.epoch = epoch
        if improved:
            progress.best_loss, progress.best_epoch = ema_eval_metrics["loss"], epoch
        accelerator.save_state("last")
        if improved:
            accelerator.save_state("model_best")
        if epoch - progress.best_epoch >= args.patience:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print(f"result stop after epoch {epoch}: no improvement in {args.patience} epochs")
            break
    accelerator.print(f"result best epoch {progress.best_epoch} loss {progress.best_loss!r}")
    accelerator.print("result parameters", checksum(accelerator.unwrap_model(model)))
    accelerator.print("result averaged parameters", checksum(model_ema.module))
    accelerator.end_training()


class Progress:
    """The progress of the training, which `save_state` does not save unless it is registered."""

    def __init__(self):
        self.epoch, self.best_loss, self.best_epoch = -1, float("inf"), -1

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def average_buffers(accelerator, model):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(accelerator.reduce(buffer, reduction="mean"))


def train_one_epoch(accelerator, model, loader, optimizer, loss_fn, lr_scheduler, model_ema, args):
    totals = {"loss": 0.0, "top1": 0, "samples": 0}
    model.train()
    for x, target in loader:
        output = model(x)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        model_ema.update(model)
        lr_scheduler.step()
        add_batch(totals, loss, output, target)
    tensor = torch.tensor(list(totals.values()), dtype=torch.float64, device=accelerator.device)
    totals = dict(zip(totals, accelerator.reduce(tensor, reduction="sum").tolist(), strict=True))
    return averages(totals)


@torch.no_grad()
def validate(accelerator, model, loader, loss_fn):
    totals = {"loss": 0.0, "top1": 0, "samples": 0}
    model.eval()
    for x, target in loader:
        output, target = accelerator.gather_for_metrics((model(x), target))
        add_batch(totals, loss_fn(output, target), output, target)
    return averages(totals)


def add_batch(totals, loss, output, target):
    totals["loss"] += loss.item() * len(target)
    totals["top1"] += (output.argmax(dim=1) == target).sum().item()
    totals["samples"] += len(target)


def averages(totals):
    return {"loss": totals["loss"] / totals["samples"], "top1": totals["top1"] / totals["samples"]}


def log(accelerator, epoch, name, metrics):
    accelerator.print(f"result epoch {epoch} {name} loss {metrics['loss']!r} top1 {metrics['top1']!r}")


if __name__ == "__main__":
    main()
