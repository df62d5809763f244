"""Fine-tune a sequence classifier on every rank, without a trainer."""

import argparse
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

from nn_parallel import (
    accumulate,
    all_gather_tensor,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_dataloader,
    prepare_model,
    reduce_metrics,
    save_checkpoint,
    seed_everything,
    unwrap_model,
)

print = on_rank(0)(print)


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


@on_rank(0)
def save_pretrained(model, output_dir, results):
    torch.save(model.state_dict(), os.path.join(output_dir, "model.pt"))
    with open(os.path.join(output_dir, "all_results.json"), "w") as file:
        json.dump({f"eval_{name}": value for name, value in results.items()}, file)


def main():
    args = parse_args()
    initialize_ddp()
    seed_everything(args.seed)
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

    train_dataloader = prepare_dataloader(train_dataloader, seed=args.seed)
    eval_dataloader = prepare_dataloader(eval_dataloader, pad=False)

    # Without this option DDP would add the gradients in another order after it is resumed.
    model = prepare_model(SequenceClassifier(), find_unused_parameters=True)
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
    completed_steps, starting_epoch = 0, 0
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "train_dataloader": train_dataloader}
    if args.resume_from_checkpoint:
        saved = load_checkpoint(args.resume_from_checkpoint, **state)
        completed_steps, starting_epoch = saved["completed_steps"], saved["epoch"]

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        train_dataloader.sampler.set_epoch(epoch)
        total_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            last = step == len(train_dataloader) - 1
            with accumulate(model, step, args.gradient_accumulation_steps, last=last) as complete:
                loss = model(**batch).loss / args.gradient_accumulation_steps
                loss.backward()
            total_loss += loss.item()
            if complete:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                total_loss = reduce_metrics({"loss": total_loss})["loss"]
                print(f"result step {completed_steps}/{args.max_train_steps} loss {total_loss!r}")
                total_loss = 0.0
                if completed_steps % args.checkpointing_steps == 0:
                    path = os.path.join(args.output_dir, f"step_{completed_steps}.pt")
                    save_checkpoint(path, completed_steps=completed_steps, epoch=epoch, **state)
                if completed_steps >= args.max_train_steps:
                    break

        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = all_gather_tensor(predictions), all_gather_tensor(batch["labels"])
            metric.add_batch(predictions=predictions, references=references)
        eval_metric = metric.compute()
        print(f"result epoch {epoch} {eval_metric}")

    save_pretrained(unwrap_model(model), args.output_dir, eval_metric)
    print(f"result parameters {checksum(unwrap_model(model))}")


if __name__ == "__main__":
    main()
