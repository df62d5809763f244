import argparse
import shutil
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from parts import EpochShuffle, SyntheticImages, checksum, count_correct, small_resnet


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args):
    model.train()
    totals = {"loss": 0.0, "top1": 0, "top5": 0, "samples": 0}
    start = time.time()
    for step, (image, target) in enumerate(data_loader):
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(image)
        loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()

        add_to(totals, loss, output, target)
        if step % args.print_freq == 0:
            print(f"result epoch {epoch} step {step} loss {loss.item()!r}")
    log("train", epoch, averages(totals))
    print(f"Epoch {epoch}: {time.time() - start:.1f} s, lr {optimizer.param_groups[0]['lr']:.4f}")


@torch.inference_mode()
def evaluate(model, criterion, data_loader, device, epoch):
    model.eval()
    totals = {"loss": 0.0, "top1": 0, "top5": 0, "samples": 0}
    for image, target in data_loader:
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(image)
        add_to(totals, criterion(output, target), output, target)
    metrics = averages(totals)
    log("test", epoch, metrics)
    return metrics["top1"]


def add_to(totals, loss, output, target):
    totals["loss"] += loss.item() * len(target)
    totals["top1"] += count_correct(output, target, 1)
    totals["top5"] += count_correct(output, target, 5)
    totals["samples"] += len(target)


def averages(totals):
    return {name: totals[name] / totals["samples"] for name in ("loss", "top1", "top5")} | {"of": totals["samples"]}


def log(phase, epoch, metrics):
    print(f"result epoch {epoch} {phase}", *(f"{name} {value!r}" for name, value in metrics.items()))


def save_checkpoint(state, is_best, filename="checkpoint.pth"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth")


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    train_data, test_data = SyntheticImages(250, seed=1, flip=True), SyntheticImages(100, seed=2)
    train_sampler = EpochShuffle(len(train_data), seed=0)
    train_loader = DataLoader(train_data, args.batch_size, sampler=train_sampler, num_workers=args.workers)
    test_loader = DataLoader(test_data, args.batch_size, num_workers=args.workers)

    model = small_resnet().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    cosine = CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs)
    lr_scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[args.lr_warmup_epochs])

    best_top1 = 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        args.start_epoch = checkpoint["epoch"] + 1
        best_top1 = checkpoint["best_top1"]
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, train_loader, device, epoch, args)
        lr_scheduler.step()
        top1 = evaluate(model, criterion, test_loader, device, epoch)
        is_best = top1 > best_top1
        best_top1 = max(top1, best_top1)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
            "best_top1": best_top1,
        }
        save_checkpoint(state, is_best)
    print(f"result best top1 {best_top1!r}")
    print("result parameters", checksum(model))


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
    parser.add_argument("--resume", default="", type=str, help="path of a checkpoint")
    parser.add_argument("--seed", default=0, type=int)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
