import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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


def print_trainable_parameters(accelerator, model):
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    percent = 100 * trainable / total
    accelerator.print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {percent:.2f}")


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    total, tokens = 0.0, 0
    for (ids,) in loader:
        losses = accelerator.gather_for_metrics(token_losses(model, ids))
        total += losses.double().sum().item()
        tokens += losses.numel()
    return math.exp(total / tokens)


def main():
    # Without cpu=True, torchrun would start separate trainings on a machine without GPUs.
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS)
    set_seed(SEED, device_specific=True)

    train_data, eval_data = token_data(200, seed=0), token_data(50, seed=1)
    sampler = EpochShuffle(len(train_data), seed=0)
    train_loader = DataLoader(train_data, batch_size=BATCH_SIZE, sampler=sampler)
    eval_loader = DataLoader(eval_data, batch_size=BATCH_SIZE)

    model = add_lora(base_model(), TARGET_MODULES)
    print_trainable_parameters(accelerator, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    training_steps = EPOCHS * math.ceil(len(train_loader) / GRADIENT_ACCUMULATION_STEPS)
    scheduler = linear_schedule_with_warmup(optimizer, int(WARMUP_RATIO * training_steps), training_steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    best = evaluate(accelerator, model, eval_loader)
    accelerator.print(f"result base perplexity {best!r}")
    completed, losses = 0, []
    for epoch in range(EPOCHS):
        model.train()
        train_loader.set_epoch(epoch)
        for (ids,) in train_loader:
            with accelerator.accumulate(model):
                loss = token_losses(model, ids).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                completed += 1
                if completed % LOGGING_STEPS == 0:
                    mean_loss, lr = sum(losses) / len(losses), scheduler.get_last_lr()[0]
                    accelerator.print(f"result step {completed} loss {mean_loss!r} learning rate {lr!r}")
                    losses = []

        perplexity = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"result epoch {epoch} perplexity {perplexity!r}")
        if perplexity < best:
            best = perplexity
            accelerator.save(lora_state_dict(accelerator.unwrap_model(model)), "adapter_model.pt")

    accelerator.wait_for_everyone()
    model = accelerator.unwrap_model(model)
    model.load_state_dict(torch.load("adapter_model.pt"), strict=False)
    model = merge_lora(model)
    accelerator.print(f"result merged perplexity {evaluate(accelerator, model, eval_loader)!r}")
    accelerator.print(f"result parameters {checksum(model)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
