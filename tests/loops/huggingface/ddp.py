"""Fine-tune a sequence classifier on several devices, without a trainer: ``torchrun --nproc-per-node=3 ddp.py``."""

import argparse
import contextlib
import itertools
import json
import math
import os

import torch
import torch.distributed as dist
from parts import (
    Metric,
    Sentences,
    SequenceClassifier,
    checksum,
    collate_with_padding,
    grouped_parameters,
    linear_schedule_with_warmup,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune a model on a text classification task")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--max_train_steps", type=int, help="Overrides num_train_epochs.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpointing_steps", type=int, default=7)
    parser.add_argument("--resume_from_checkpoint", help="A file such as step_7.pt.")
    return parser.parse_args()


def save_pretrained(model, output_dir, results):
    torch.save(model.state_dict(), os.path.join(output_dir, "model.pt"))
    with open(os.path.join(output_dir, "all_results.json"), "w") as file:
        json.dump({f"eval_{name}": value for name, value in results.items()}, file)


def gather(tensor):
    """Interleave the rows of all ranks, because DistributedSampler gives each rank every world_size-th sample."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.stack(rows, dim=1).flatten()


def main():
    args = parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed + rank)
    os.makedirs(args.output_dir, exist_ok=True)

    train_dataset, eval_dataset = Sentences(196, seed=1), Sentences(73, seed=2)
    train_dataloader = DataLoader(
        train_dataset,
        sampler=DistributedSampler(train_dataset, seed=0),
        collate_fn=collate_with_padding,
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(
        eval_dataset,
        sampler=DistributedSampler(eval_dataset, shuffle=False),
        collate_fn=collate_with_padding,
        batch_size=args.per_device_eval_batch_size,
    )

    # Without this option DDP would add the gradients in another order after it is resumed.
    model = DistributedDataParallel(SequenceClassifier().to(device), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(grouped_parameters(model, args.weight_decay), lr=args.learning_rate)

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    lr_scheduler = linear_schedule_with_warmup(optimizer, args.num_warmup_steps, args.max_train_steps)
    metric = Metric()

    if rank == 0:
        print("***** Running training *****")
        print(f"  Num examples = {len(train_dataset)}, epochs = {args.num_train_epochs}")
        print(f"  Total optimization steps = {args.max_train_steps}")
    completed_steps, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        checkpoint = torch.load(args.resume_from_checkpoint, map_location="cpu")
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        completed_steps, starting_epoch = checkpoint["completed_steps"], checkpoint["epoch"]
        resume_step = checkpoint["step"] + 1

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        train_dataloader.sampler.set_epoch(epoch)
        active_dataloader = enumerate(train_dataloader)
        if args.resume_from_checkpoint and epoch == starting_epoch:
            active_dataloader = itertools.islice(active_dataloader, resume_step, None)
            torch.set_rng_state(checkpoint["rng_states"][rank])
        total_loss = 0.0
        for step, batch in active_dataloader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            complete = (step + 1) % args.gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1
            with contextlib.nullcontext() if complete else model.no_sync():
                loss = model(**batch).loss / args.gradient_accumulation_steps
                loss.backward()
            total_loss += loss.item()
            if complete:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                loss_sum = torch.tensor(total_loss, dtype=torch.float64, device=device)
                dist.all_reduce(loss_sum)
                if rank == 0:
                    mean_loss = loss_sum.item() / world_size
                    print(f"result step {completed_steps}/{args.max_train_steps} loss {mean_loss!r}")
                total_loss = 0.0
                if completed_steps % args.checkpointing_steps == 0:
                    rng_states = [None] * world_size
                    dist.all_gather_object(rng_states, torch.get_rng_state())
                    state = {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "lr_scheduler": lr_scheduler.state_dict(),
                        "rng_states": rng_states,
                        "completed_steps": completed_steps,
                        "epoch": epoch,
                        "step": step,
                    }
                    if rank == 0:
                        torch.save(state, os.path.join(args.output_dir, f"step_{completed_steps}.pt"))
                if completed_steps >= args.max_train_steps:
                    break

        model.eval()
        samples_seen = 0
        for batch in eval_dataloader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            # The sampler repeats some samples at the end, so that all ranks have the same number.
            rest = len(eval_dataset) - samples_seen
            predictions, references = gather(predictions)[:rest], gather(batch["labels"])[:rest]
            metric.add_batch(predictions=predictions, references=references)
            samples_seen += len(references)
        eval_metric = metric.compute()
        if rank == 0:
            print(f"result epoch {epoch} {eval_metric}")

    if rank == 0:
        save_pretrained(model.module, args.output_dir, eval_metric)
        print(f"result parameters {checksum(model.module)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
