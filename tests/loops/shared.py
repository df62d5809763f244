"""The sampler and the checksum of the parameters that the loops of this folder use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import Sampler


class EpochShuffle(Sampler[int]):
    """Another order in each epoch. It is the order that `DistributedSampler` draws for all ranks together."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


def checksum(*modules: nn.Module) -> str:
    """Return the SHA-256 of the bytes of all parameters."""
    digest = hashlib.sha256()
    for module in modules:
        for parameter in module.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
