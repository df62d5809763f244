"""`resolve_device`: from a name to a device that exists."""

from __future__ import annotations

import torch

from ._engine.devices import existing_device


def resolve_device(device: torch.device | str) -> torch.device:
    """Turn a device specification into a `torch.device` that exists.

    ``"cuda"`` and ``"gpu"`` mean the current accelerator, whatever its type. Where there is no accelerator, one that
    was asked for becomes the CPU, with one warning per program.

    Raises:
        ValueError: the specification is not a device, or names an accelerator beyond those that exist.

    Example::

        >>> resolve_device("cpu")
        device(type='cpu')
    """
    return existing_device(device)
