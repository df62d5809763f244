"""The two networks and the images, which all scripts of this loop use."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.loops.shared import EpochShuffle, checksum  # noqa: F401


class Generator(nn.Sequential):
    """Turn noise of shape (nz, 1, 1) into an image of shape (1, 8, 8)."""

    def __init__(self, nz, ngf):
        super().__init__(
            nn.ConvTranspose2d(nz, ngf * 2, 2, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Turn an image into the probability that it is real."""

    def __init__(self, ndf):
        super().__init__(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, bias=False),
            nn.Flatten(0),
            nn.Sigmoid(),
        )


def weights_init(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def images(count=500):
    """Images with one bright spot each, at a random place."""
    centers = torch.rand(count, 2, 1, 1, generator=torch.Generator().manual_seed(0)) * 4 + 1.5
    rows, columns = torch.arange(8.0)[:, None], torch.arange(8.0)
    distances = (rows - centers[:, 0]) ** 2 + (columns - centers[:, 1]) ** 2
    return TensorDataset(2 * torch.exp(-distances / 3)[:, None] - 1)
