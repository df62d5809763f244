"""What the four scripts share: the data, the sampler, the model and the count of correct predictions."""

import hashlib

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

CLASSES = 10


class EpochShuffle(Sampler):
    """Draws the permutation that `DistributedSampler` draws for the same seed and epoch."""

    def __init__(self, length, seed=0):
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self):
        return self.length


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


def checksum(model):
    """The sha256 of the bytes of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
