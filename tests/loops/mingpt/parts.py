"""A small GPT and a dataset of characters, which all scripts of this loop use."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from tests.loops.shared import EpochShuffle, checksum  # noqa: F401

WORDS = "the a cat dog bird tree sees hears likes small old green and but".split()


@dataclass
class DataConfig:
    length: int = 1019
    block_size: int = 16
    train_split: float = 0.9


class CharDataset(Dataset):
    def __init__(self, config):
        draw = random.Random(0)
        text = " ".join(draw.choice(WORDS) for _ in range(config.length))[: config.length]
        chars = sorted(set(text))
        self.stoi = {char: i for i, char in enumerate(chars)}
        self.vocab_size, self.block_size, self.text = len(chars), config.block_size, text

    def __len__(self):
        return len(self.text) - self.block_size

    def __getitem__(self, idx):
        encoded = torch.tensor([self.stoi[char] for char in self.text[idx : idx + self.block_size + 1]])
        return encoded[:-1], encoded[1:]


@dataclass
class GPTConfig:
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    vocab_size: int = 0
    block_size: int = 0
    pdrop: float = 0.1


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = nn.MultiheadAttention(config.n_embd, config.n_head, dropout=config.pdrop, batch_first=True)
        self.register_buffer("mask", torch.ones(config.block_size, config.block_size, dtype=torch.bool).triu(1))
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.pdrop),
        )

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.attn(y, y, y, attn_mask=self.mask[: x.size(1), : x.size(1)], need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.drop = nn.Dropout(config.pdrop)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)])
        logits = self.head(self.ln_f(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class OptimizerConfig:
    learning_rate: float = 1e-2
    weight_decay: float = 0.1


def create_optimizer(model, config):
    """Decay the weights of linear layers, but no biases, norms and embeddings."""
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    groups = [
        {"params": [p for p in model.parameters() if p in weights], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p not in weights], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
