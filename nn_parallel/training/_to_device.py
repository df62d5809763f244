"""Moving a batch to a device, including tensors inside containers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def move_to_device(batch: T, device: torch.device) -> T:
    """Return ``batch`` with its tensors on ``device``. Copies from pinned memory may still be under way on return.

    The function moves tensors in mappings and sequences of every type, as torch's own ``pin_memory`` does, and also in
    dataclasses and namespaces. An object with a method ``to`` is moved by calling this method.
    """
    if device.type == "cpu":
        return batch
    moved: T = _moved(batch, device)
    return moved


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, str | bytes | type):
        return part
    if hasattr(part, "to"):
        return _moved_by_itself(part, device)
    if isinstance(part, Mapping):
        return _mapping(part, {key: _moved(value, device) for key, value in part.items()})
    if isinstance(part, Sequence):
        return _sequence(part, [_moved(value, device) for value in part])
    if dataclasses.is_dataclass(part):
        names = [field.name for field in dataclasses.fields(part) if hasattr(part, field.name)]
    elif isinstance(part, SimpleNamespace):
        names = list(vars(part))
    else:
        return part
    moved = copy.copy(part)
    for name in names:
        object.__setattr__(moved, name, _moved(getattr(part, name), device))  # works for frozen dataclasses too
    return moved


def _moved_by_itself(part: Any, device: torch.device) -> Any:
    """Return ``part`` moved with its own method ``to``, without waiting if ``to`` has a parameter ``non_blocking``."""
    try:
        parameters = inspect.signature(part.to).parameters.values()
    except (TypeError, ValueError):  # the method is written in C and has no signature
        parameters = {}.values()
    waits = not any(
        parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )
    moved = part.to(device) if waits else part.to(device, non_blocking=True)
    return part if moved is None else moved  # a method that moves ``part`` in place may return None


def _mapping(part: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(part, dict):
        moved = copy.copy(part)  # keeps the attributes of ``part``, such as the default of a defaultdict
        for key, value in values.items():
            if value is not part[key]:
                moved[key] = value
        return moved
    try:
        return type(part)(values)  # type: ignore[call-arg]
    except TypeError:  # this type cannot be made from a dict
        return values


def _sequence(part: Sequence[Any], values: list[Any]) -> Any:
    if all(value is before for value, before in zip(values, part, strict=True)):
        return part
    if hasattr(part, "_fields"):  # a NamedTuple
        return type(part)(*values)
    if isinstance(part, list):
        moved = copy.copy(part)
        moved[:] = values
        return moved
    try:
        return type(part)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
