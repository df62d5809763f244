"""The model, the data, the collate function, the schedule and the metric, which all scripts of this loop use."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.loops.shared import EpochShuffle, checksum  # noqa: F401

VOCABULARY, MAX_LENGTH, PAD = 40, 16, 0


@dataclass
class ClassifierOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Layer(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.intermediate = nn.Linear(hidden, 2 * hidden)
        self.output = nn.Linear(2 * hidden, hidden)
        self.output_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        size = x.shape
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.query_key_value(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None, None, :], -1e9)
        context = (self.dropout(scores.softmax(dim=-1)) @ v).transpose(1, 2).reshape(size)
        x = self.attention_norm(x + self.dropout(self.attention_output(context)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class SequenceClassifier(nn.Module):
    def __init__(self, num_labels=2, hidden=32, layers=2, heads=4, dropout=0.1):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, hidden, padding_idx=PAD)
        self.positions = nn.Embedding(MAX_LENGTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(hidden, heads, dropout) for _ in range(layers))
        self.classifier = nn.Linear(hidden, num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.bool()
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        mean = (x * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        logits = self.classifier(self.dropout(mean))
        return ClassifierOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


class Sentences(Dataset):
    """Sentences of random words and lengths. The label says if there are more good words than bad words."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        score = torch.tensor([0] + [1, -1] * ((VOCABULARY - 1) // 2) + [1])
        self.samples = []
        for length in torch.randint(4, MAX_LENGTH + 1, (size,), generator=generator).tolist():
            words = torch.randint(1, VOCABULARY, (length,), generator=generator)
            self.samples.append({"input_ids": words.tolist(), "label": int(score[words].sum() > 0)})

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def collate_with_padding(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [PAD] * (longest - len(sample["input_ids"])) for sample in samples]
    input_ids = torch.tensor(rows)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}


def grouped_parameters(model, weight_decay):
    """No weight decay for biases and norms."""
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        (no_decay if name.endswith("bias") or "norm" in name else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Metric:
    """Accuracy and F1 of all predictions that were added."""

    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self):
        pairs, self.pairs = self.pairs, []
        true_positives = sum(p == r == 1 for p, r in pairs)
        f1 = 2 * true_positives / max(1, sum(p + r for p, r in pairs))
        return {"accuracy": sum(p == r for p, r in pairs) / len(pairs), "f1": f1, "samples": len(pairs)}
