"""The base model, its adapters, the token data and the schedule, which all scripts of this loop use."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.loops.shared import EpochShuffle, checksum  # noqa: F401

VOCABULARY = 24


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            proj(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(h.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class CausalLM(nn.Module):
    def __init__(self, width=32, heads=2, layers=2, length=16):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.size(1)]
        return self.lm_head(self.norm(self.blocks(x)))


def base_model():
    """The base model with frozen weights, the same in each process, as if they came from a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return CausalLM().requires_grad_(False)


class LoRALinear(nn.Module):
    """A frozen linear layer, and beside it the product of two small matrices that are trained."""

    def __init__(self, base, r, alpha, dropout):
        super().__init__()
        self.base, self.scaling, self.dropout = base, alpha / r, nn.Dropout(dropout)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scaling * (self.dropout(x) @ self.lora_A.T @ self.lora_B.T)

    @torch.no_grad()
    def merged(self):
        self.base.weight += self.scaling * (self.lora_B @ self.lora_A)
        return self.base


def add_lora(model, target_modules, r=4, alpha=8, dropout=0.05):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in target_modules:
                setattr(module, name, LoRALinear(child, r, alpha, dropout))
    return model


def merge_lora(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoRALinear):
                setattr(module, name, child.merged())
    return model


def lora_state_dict(model):
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


def token_data(count, seed, length=16):
    """Sequences in which each token is the one before plus a number, which differs between the sequences."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(VOCABULARY, (2, count, 1), generator=generator)
    return TensorDataset((start + (1 + step % 5) * torch.arange(length)) % VOCABULARY)


def token_losses(model, ids):
    """The loss of each token but the first."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


def linear_schedule_with_warmup(optimizer, warmup_steps, training_steps):
    def factor(step):
        if step < warmup_steps:
            return step / warmup_steps
        return max(0.0, (training_steps - step) / (training_steps - warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
