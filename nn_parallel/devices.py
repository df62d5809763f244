"""`resolve_device`: turn the name of a device into a device that exists."""

from __future__ import annotations

import torch

from ._engine.devices import existing_device


def resolve_device(device: torch.device | str) -> torch.device:
    """Turn a device specification into a `torch.device` that exists.

    ``"cuda"`` and ``"gpu"`` mean the current accelerator, whatever its type. On a machine without accelerators, the
    function returns the CPU instead of an accelerator, and warns once per program.

    Raises:
        ValueError: the specification is not a device, or names an accelerator that does not exist.

    Example::

        >>> resolve_device("cpu")
        device(type='cpu')
    """
    return existing_device(device)
