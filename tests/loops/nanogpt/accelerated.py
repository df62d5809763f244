"""Train a small GPT. The command line can change each setting: --batch_size=32 --init_from=resume."""

import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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
dtype = "bf16"  # or "fp16", used on a GPU
config = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
for arg in sys.argv[1:]:
    if arg.startswith("--"):
        key, value = arg[2:].split("=")
        globals()[key] = config[key] = type(config[key])(value)

tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
gpu = torch.cuda.is_available()
accelerator = Accelerator(cpu=not gpu, mixed_precision=dtype if gpu else "no")
assert gradient_accumulation_steps % accelerator.num_processes == 0
gradient_accumulation_steps //= accelerator.num_processes
accelerator.gradient_accumulation_steps = gradient_accumulation_steps
device = accelerator.device
accelerator.print(f"tokens per iteration will be: {tokens_per_iter:,}")
os.makedirs(out_dir, exist_ok=True)
set_seed(1337, device_specific=True)

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
model = GPT(GPTConfig(**model_args))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.type)
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]
model, optimizer = accelerator.prepare(model, optimizer)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with accelerator.autocast():
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

    if iter_num % eval_interval == 0 and accelerator.is_main_process:
        losses = estimate_loss()
        print(f"result step {iter_num}: train loss {losses['train']!r}, val loss {losses['val']!r}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": accelerator.unwrap_model(model).state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "model_args": model_args,
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                    "config": config,
                }
                print(f"saving checkpoint to {out_dir}")
                accelerator.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

    for micro_step in range(gradient_accumulation_steps):
        with accelerator.accumulate(model):
            with accelerator.autocast():
                logits, loss = model(X, Y)
            X, Y = get_batch("train")  # while the GPU computes the forward
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad()

    if iter_num % log_interval == 0:
        lossf = loss.item()
        accelerator.print(f"result iter {iter_num}: loss {lossf!r}")
        accelerator.print(f"time {(time.time() - t0) * 1000:.2f}ms")
    t0 = time.time()
    iter_num += 1

accelerator.print("result parameters", checksum(accelerator.unwrap_model(model)))
accelerator.end_training()
