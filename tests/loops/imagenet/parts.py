"""The data, the model and the count of correct predictions, which all scripts of this loop use."""

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.loops.shared import EpochShuffle, checksum  # noqa: F401

CLASSES = 10


class SyntheticImages(Dataset):
    """Noisy copies of one pattern for each class. Training images are flipped at random."""

    def __init__(self, length, seed, flip=False):
        patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(CLASSES, (length,), generator=generator)
        self.images = patterns[self.targets] + torch.randn(length, 3, 8, 8, generator=generator)
        self.flip = flip

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, int(self.targets[index])


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn(self.conv(x)))


def small_resnet(width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width),
        nn.MaxPool2d(2),
        Block(width),
        nn.Flatten(),
        nn.Linear(16 * width, CLASSES),
    )


def count_correct(output, target, k):
    """How many targets are among the k classes with the highest output."""
    return (output.topk(k, dim=1).indices == target[:, None]).sum().item()
