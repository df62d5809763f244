"""The data, the model and its moving average, which all scripts of this loop use."""

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.loops.shared import EpochShuffle, checksum  # noqa: F401


def create_dataset(length, seed):
    """Points in 16 dimensions, with the class that a linear map gives them. A fifth of the labels are random."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 16, generator=generator)
    y = (x @ torch.randn(16, 4, generator=torch.Generator().manual_seed(7))).argmax(dim=1)
    noise = torch.randint(4, (length,), generator=generator)
    return TensorDataset(x, torch.where(torch.rand(length, generator=generator) < 0.2, noise, y))


def create_model(width=64, drop=0.2):
    return nn.Sequential(
        nn.Linear(16, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.Linear(width, 4),
    )


class ModelEma:
    """An exponential moving average of the parameters of a model. The buffers are those of the model."""

    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        self.module.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.decay)
        for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(buffer)
