"""Train a small GPT. The command line can change each setting: --batch_size=32 --init_from=resume."""

import os
import sys
import time
from contextlib import nullcontext

import torch
from nn_parallel import (
    accumulate,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_model,
    save_checkpoint,
    seed_everything,
    unwrap_model,
)
from parts import GPT, GPTConfig, checksum, get_lr, load_tokens

# output
out_dir = "out"
eval_interval = 10
log_interval = 2
eval_iters = 5
init_from = "scratch"  # or "resume"
# data
gradient_accumulation_steps = 6  # simulates a larger batch
batch_size = 8
block_size = 16
vocab_size = 64
# model
n_layer = 2
n_head = 4
n_embd = 32
dropout = 0.1
# AdamW
learning_rate = 1e-2
max_iters = 40
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
# learning rate decay
warmup_iters = 5
lr_decay_iters = 40
min_lr = 1e-3
# system
world = initialize_ddp()
device = world.device
dtype = "bfloat16"  # or "float16", used on a GPU
config = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
for arg in sys.argv[1:]:
    if arg.startswith("--"):
        key, value = arg[2:].split("=")
        globals()[key] = config[key] = type(config[key])(value)

tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
assert gradient_accumulation_steps % world.world_size == 0
gradient_accumulation_steps //= world.world_size
print = on_rank(0)(print)
print(f"tokens per iteration will be: {tokens_per_iter:,}")
os.makedirs(out_dir, exist_ok=True)
seed_everything(1337)
ctx = nullcontext() if device.type == "cpu" else torch.autocast(device.type, getattr(torch, dtype))

data = {split: load_tokens(split, vocab_size) for split in ("train", "val")}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


iter_num = 0
best_val_loss = 1e9
model_args = dict(
    n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size, dropout=dropout
)
model = prepare_model(GPT(GPTConfig(**model_args)))
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and dtype == "float16")
optimizer = unwrap_model(model).configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.type)
if init_from == "resume":
    checkpoint = load_checkpoint(os.path.join(out_dir, "ckpt.pt"), model=model, optimizer=optimizer)
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]


@on_rank(0, broadcast=True)
@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


X, Y = get_batch("train")
t0 = time.time()
while iter_num <= max_iters:
    lr = get_lr(iter_num, learning_rate, min_lr, warmup_iters, lr_decay_iters)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"result step {iter_num}: train loss {losses['train']!r}, val loss {losses['val']!r}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": model,
                    "optimizer": optimizer,
                    "model_args": model_args,
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                    "config": config,
                }
                print(f"saving checkpoint to {out_dir}")
                save_checkpoint(os.path.join(out_dir, "ckpt.pt"), **checkpoint)

    for micro_step in range(gradient_accumulation_steps):
        with accumulate(model, micro_step, every=gradient_accumulation_steps):
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")  # while the GPU computes the forward
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"result iter {iter_num}: loss {lossf!r}")
        print(f"time {(time.time() - t0) * 1000:.2f}ms")
    t0 = time.time()
    iter_num += 1

print("result parameters", checksum(unwrap_model(model)))
