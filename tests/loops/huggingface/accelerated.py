"""Fine-tune a sequence classifier with accelerate, without a trainer: ``accelerate launch accelerated.py``."""

import argparse
import json
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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
    parser.add_argument("--resume_from_checkpoint", help="A folder such as step_7.")
    return parser.parse_args()


def save_pretrained(model, output_dir, results):
    torch.save(model.state_dict(), os.path.join(output_dir, "model.pt"))
    with open(os.path.join(output_dir, "all_results.json"), "w") as file:
        json.dump({f"eval_{name}": value for name, value in results.items()}, file)


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

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

    model = SequenceClassifier()
    optimizer = torch.optim.AdamW(grouped_parameters(model, args.weight_decay), lr=args.learning_rate)

    overrode_max_train_steps = args.max_train_steps is None
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    # The prepared scheduler makes a step for each process at each step of the optimizer.
    steps = args.max_train_steps if overrode_max_train_steps else args.max_train_steps * accelerator.num_processes
    lr_scheduler = linear_schedule_with_warmup(optimizer, args.num_warmup_steps * accelerator.num_processes, steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    # The prepared loader may be shorter.
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    metric = Metric()

    accelerator.print("***** Running training *****")
    accelerator.print(f"  Num examples = {len(train_dataset)}, epochs = {args.num_train_epochs}")
    accelerator.print(f"  Total optimization steps = {args.max_train_steps}")
    completed_steps, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        completed_steps = int(os.path.basename(args.resume_from_checkpoint).removeprefix("step_"))
        starting_epoch = completed_steps // num_update_steps_per_epoch
        resume_step = (completed_steps % num_update_steps_per_epoch) * args.gradient_accumulation_steps

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        train_dataloader.set_epoch(epoch)
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step > 0:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        total_loss = 0.0
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            total_loss += loss.detach().float() / args.gradient_accumulation_steps
            if accelerator.sync_gradients:
                completed_steps += 1
                mean_loss = accelerator.reduce(total_loss, reduction="mean").item()
                accelerator.print(f"result step {completed_steps}/{args.max_train_steps} loss {mean_loss!r}")
                total_loss = 0.0
                if completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
                if completed_steps >= args.max_train_steps:
                    break

        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        eval_metric = metric.compute()
        accelerator.print(f"result epoch {epoch} {eval_metric}")

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        save_pretrained(unwrapped_model, args.output_dir, eval_metric)
    accelerator.print(f"result parameters {checksum(unwrapped_model)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
