"""What the examples share: 1 797 handwritten digits of scikit-learn, 360 of them held out, and a small model."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

HELD_OUT = 360


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """The digits to train on and those held out, alike on every rank: images of shape (1, 8, 8) in 0 to 1; labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train_x, held_out_x, train_y, held_out_y = train_test_split(
        images, torch.tensor(labels), test_size=HELD_OUT, random_state=0
    )
    return TensorDataset(train_x, train_y), TensorDataset(held_out_x, held_out_y)


def convolutions() -> nn.Sequential:
    """(n, 1, 8, 8) -> (n, 1024)"""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
