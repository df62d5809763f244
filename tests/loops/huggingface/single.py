"""Fine-tune a sequence classifier on one device, without a trainer."""

import argparse
import itertools
import json
import math
import os

import torch
from parts import (
    EpochShuffle,
    Metric,
    Sentences,
    SequenceClassifier,
    checksum,
    collate_with_padding,
    grouped_parameters,
    linear_schedule_with_warmup,
)
from torch.utils.data import DataLoader


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


def main():
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)

    train_dataset, eval_dataset = Sentences(196, seed=1), Sentences(73, seed=2)
    train_dataloader = DataLoader(
        train_dataset,
        sampler=EpochShuffle(len(train_dataset), seed=0),
        collate_fn=collate_with_padding,
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=collate_with_padding, batch_size=args.per_device_eval_batch_size
    )

    model = SequenceClassifier().to(device)
    optimizer = torch.optim.AdamW(grouped_parameters(model, args.weight_decay), lr=args.learning_rate)

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    lr_scheduler = linear_schedule_with_warmup(optimizer, args.num_warmup_steps, args.max_train_steps)
    metric = Metric()

    print("***** Running training *****")
    print(f"  Num examples = {len(train_dataset)}, epochs = {args.num_train_epochs}")
    print(f"  Total optimization steps = {args.max_train_steps}")
    completed_steps, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        checkpoint = torch.load(args.resume_from_checkpoint)
        model.load_state_dict(checkpoint["model"])
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
            torch.set_rng_state(checkpoint["rng_state"])
        total_loss = 0.0
        for step, batch in active_dataloader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            complete = (step + 1) % args.gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1
            loss = model(**batch).loss / args.gradient_accumulation_steps
            loss.backward()
            total_loss += loss.item()
            if complete:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                print(f"result step {completed_steps}/{args.max_train_steps} loss {total_loss!r}")
                total_loss = 0.0
                if completed_steps % args.checkpointing_steps == 0:
                    state = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "lr_scheduler": lr_scheduler.state_dict(),
                        "rng_state": torch.get_rng_state(),
                        "completed_steps": completed_steps,
                        "epoch": epoch,
                        "step": step,
                    }
                    torch.save(state, os.path.join(args.output_dir, f"step_{completed_steps}.pt"))
                if completed_steps >= args.max_train_steps:
                    break

        model.eval()
        for batch in eval_dataloader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            metric.add_batch(predictions=predictions, references=batch["labels"])
        eval_metric = metric.compute()
        print(f"result epoch {epoch} {eval_metric}")

    save_pretrained(model, args.output_dir, eval_metric)
    print(f"result parameters {checksum(model)}")


if __name__ == "__main__":
    main()
