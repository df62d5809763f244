import math
import os
import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from parts import add_lora, base_model, checksum, linear_schedule_with_warmup
from parts import lora_state_dict, merge_lora, token_data, token_losses

SEED = 42
EPOCHS = 3
BATCH_SIZE = 8
GRADIENT_ACCUMULATION_STEPS = 2
LEARNING_RATE = 2e-2
WARMUP_RATIO = 0.2
LOGGING_STEPS = 2
TARGET_MODULES = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]


def print_trainable_parameters(model):
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.2f}")


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total, tokens = 0.0, 0
    for (ids,) in loader:
        losses = token_losses(model, ids.to(device))
        total += losses.double().sum().item()
        tokens += losses.numel()
    sums = torch.tensor([total, tokens], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    total, tokens = sums.tolist()
    return math.exp(total / tokens)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    random.seed(SEED + rank)  # other dropout on each rank
    torch.manual_seed(SEED + rank)

    train_data, eval_data = token_data(200, seed=0), token_data(50, seed=1)
    sampler = DistributedSampler(train_data, seed=0)
    train_loader = DataLoader(train_data, batch_size=BATCH_SIZE, sampler=sampler)
    # A DistributedSampler would evaluate some samples twice.
    eval_data = Subset(eval_data, range(rank, len(eval_data), world_size))
    eval_loader = DataLoader(eval_data, batch_size=BATCH_SIZE)

    model = add_lora(base_model(), TARGET_MODULES).to(device)
    if rank == 0:
        print_trainable_parameters(model)
    model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    training_steps = EPOCHS * math.ceil(len(train_loader) / GRADIENT_ACCUMULATION_STEPS)
    scheduler = linear_schedule_with_warmup(optimizer, int(WARMUP_RATIO * training_steps), training_steps)

    best = evaluate(model.module, eval_loader, device)
    if rank == 0:
        print(f"result base perplexity {best!r}")
    completed, losses = 0, []
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(train_loader):
            complete = (step + 1) % GRADIENT_ACCUMULATION_STEPS == 0 or step + 1 == len(train_loader)
            with nullcontext() if complete else model.no_sync():
                loss = token_losses(model, ids.to(device)).mean()
                (loss / GRADIENT_ACCUMULATION_STEPS).backward()
            losses.append(loss.item())
            if complete:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                completed += 1
                if completed % LOGGING_STEPS == 0:
                    mean_loss, lr = sum(losses) / len(losses), scheduler.get_last_lr()[0]
                    mean_loss = torch.tensor(mean_loss, dtype=torch.float64, device=device)
                    dist.all_reduce(mean_loss)
                    mean_loss = mean_loss.item() / world_size
                    if rank == 0:
                        print(f"result step {completed} loss {mean_loss!r} learning rate {lr!r}")
                    losses = []

        perplexity = evaluate(model.module, eval_loader, device)
        if rank == 0:
            print(f"result epoch {epoch} perplexity {perplexity!r}")
        if perplexity < best:
            best = perplexity
            if rank == 0:
                torch.save(lora_state_dict(model.module), "adapter_model.pt")

    dist.barrier()  # the file is complete
    model = model.module
    model.load_state_dict(torch.load("adapter_model.pt", map_location=device), strict=False)
    model = merge_lora(model)
    perplexity = evaluate(model, eval_loader, device)
    if rank == 0:
        print(f"result merged perplexity {perplexity!r}")
        print(f"result parameters {checksum(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
