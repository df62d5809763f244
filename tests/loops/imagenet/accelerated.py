import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from parts import EpochShuffle, SyntheticImages, checksum, count_correct, small_resnet


def train_one_epoch(accelerator, model, criterion, optimizer, data_loader, epoch, args):
    model.train()
    totals = {"loss": 0.0, "top1": 0, "top5": 0, "samples": 0}
    start = time.time()
    for step, (image, target) in enumerate(data_loader):
        output = model(image)
        loss = criterion(output, target)

        optimizer.zero_grad()
        accelerator.backward(loss)
        if args.clip_grad_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()

        add_to(totals, loss, output, target)
        if step % args.print_freq == 0:
            accelerator.print(f"result epoch {epoch} step {step} loss {loss.item()!r}")
    totals = reduce(accelerator, totals)
    log(accelerator, "train", epoch, averages(totals))
    accelerator.print(f"Epoch {epoch}: {time.time() - start:.1f} s, lr {optimizer.param_groups[0]['lr']:.4f}")


@torch.inference_mode()
def evaluate(accelerator, model, criterion, data_loader, epoch):
    model.eval()
    totals = {"loss": 0.0, "top1": 0, "top5": 0, "samples": 0}
    for image, target in data_loader:
        output, target = accelerator.gather_for_metrics((model(image), target))
        add_to(totals, criterion(output, target), output, target)
    metrics = averages(totals)
    log(accelerator, "test", epoch, metrics)
    return metrics["top1"]


def add_to(totals, loss, output, target):
    totals["loss"] += loss.item() * len(target)
    totals["top1"] += count_correct(output, target, 1)
    totals["top5"] += count_correct(output, target, 5)
    totals["samples"] += len(target)


def reduce(accelerator, totals):
    tensor = torch.tensor(list(totals.values()), dtype=torch.float64, device=accelerator.device)
    return dict(zip(totals, accelerator.reduce(tensor, reduction="sum").tolist(), strict=True))


def averages(totals):
    return {name: totals[name] / totals["samples"] for name in ("loss", "top1", "top5")} | {"of": totals["samples"]}


def log(accelerator, phase, epoch, metrics):
    accelerator.print(f"result epoch {epoch} {phase}", *(f"{name} {value!r}" for name, value in metrics.items()))


class Progress:
    """What `save_state` does not know of: the epoch and the best accuracy."""

    def __init__(self):
        self.epoch, self.best_top1 = -1, 0.0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def main(args):
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), step_scheduler_with_optimizer=False)
    set_seed(args.seed, device_specific=True)

    train_data, test_data = SyntheticImages(250, seed=1, flip=True), SyntheticImages(100, seed=2)
    train_sampler = EpochShuffle(len(train_data), seed=0)
    train_loader = DataLoader(train_data, args.batch_size, sampler=train_sampler, num_workers=args.workers)
    test_loader = DataLoader(test_data, args.batch_size, num_workers=args.workers)

    model = small_resnet()
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    cosine = CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs)
    lr_scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[args.lr_warmup_epochs])

    model, optimizer, train_loader, test_loader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, lr_scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(args.resume)
        args.start_epoch = progress.epoch + 1
        accelerator.print(f"=> loaded checkpoint '{args.resume}' (epoch {progress.epoch})")

    for epoch in range(args.start_epoch, args.epochs):
        train_loader.set_epoch(epoch)
        train_one_epoch(accelerator, model, criterion, optimizer, train_loader, epoch, args)
        lr_scheduler.step()
        top1 = evaluate(accelerator, model, criterion, test_loader, epoch)
        is_best = top1 > progress.best_top1
        progress.epoch, progress.best_top1 = epoch, max(top1, progress.best_top1)
        accelerator.save_state("checkpoint")
        if is_best:
            accelerator.save_state("model_best")
    accelerator.print(f"result best top1 {progress.best_top1!r}")
    accelerator.print("result parameters", checksum(accelerator.unwrap_model(model)))
    accelerator.end_training()


def get_args_parser():
    parser = argparse.ArgumentParser(description="Image classification")
    parser.add_argument("-b", "--batch-size", default=16, type=int, help="images for each device in a step")
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("-j", "--workers", default=0, type=int, help="processes that load data")
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--lr-warmup-epochs", default=1, type=int)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--print-freq", default=4, type=int)
    parser.add_argument("--resume", default="", type=str, help="folder of a checkpoint")
    parser.add_argument("--seed", default=0, type=int)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
