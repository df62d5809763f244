import math
import random

import torch
from torch.utils.data import DataLoader

from parts import EpochShuffle, add_lora, base_model, checksum, linear_schedule_with_warmup
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
    return math.exp(total / tokens)


def main():
    random.seed(SEED)
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_data, eval_data = token_data(200, seed=0), token_data(50, seed=1)
    sampler = EpochShuffle(len(train_data), seed=0)
    train_loader = DataLoader(train_data, batch_size=BATCH_SIZE, sampler=sampler)
    eval_loader = DataLoader(eval_data, batch_size=BATCH_SIZE)

    model = add_lora(base_model(), TARGET_MODULES).to(device)
    print_trainable_parameters(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    training_steps = EPOCHS * math.ceil(len(train_loader) / GRADIENT_ACCUMULATION_STEPS)
    scheduler = linear_schedule_with_warmup(optimizer, int(WARMUP_RATIO * training_steps), training_steps)

    best = evaluate(model, eval_loader, device)
    print(f"result base perplexity {best!r}")
    completed, losses = 0, []
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(train_loader):
            loss = token_losses(model, ids.to(device)).mean()
            (loss / GRADIENT_ACCUMULATION_STEPS).backward()
            losses.append(loss.item())
            if (step + 1) % GRADIENT_ACCUMULATION_STEPS == 0 or step + 1 == len(train_loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                completed += 1
                if completed % LOGGING_STEPS == 0:
                    mean_loss, lr = sum(losses) / len(losses), scheduler.get_last_lr()[0]
                    print(f"result step {completed} loss {mean_loss!r} learning rate {lr!r}")
                    losses = []

        perplexity = evaluate(model, eval_loader, device)
        print(f"result epoch {epoch} perplexity {perplexity!r}")
        if perplexity < best:
            best = perplexity
            torch.save(lora_state_dict(model), "adapter_model.pt")

    model.load_state_dict(torch.load("adapter_model.pt"), strict=False)
    model = merge_lora(model)
    print(f"result merged perplexity {evaluate(model, eval_loader, device)!r}")
    print(f"result parameters {checksum(model)}")


if __name__ == "__main__":
    main()
