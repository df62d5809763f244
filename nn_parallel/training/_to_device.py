"""A batch moved to a device, whatever it is made of."""

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
    """Return ``batch`` with its tensors on ``device``, without waiting for those in pinned memory.

    Tensors are found where torch's own ``pin_memory`` finds them, in mappings and sequences of every type, and also in
    dataclasses and namespaces. Anything else with a method ``to`` is moved by that.
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
        object.__setattr__(moved, name, _moved(getattr(part, name), device))  # it may be frozen
    return moved


def _moved_by_itself(part: Any, device: torch.device) -> Any:
    try:
        parameters = inspect.signature(part.to).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        parameters = {}.values()
    waits = not any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters)
    moved = part.to(device) if waits else part.to(device, non_blocking=True)
    return part if moved is None else moved  # it moves in place


def _mapping(part: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(part, dict):
        moved = copy.copy(part)  # with the attributes of its own type, and its default
        for key, value in values.items():
            if value is not part[key]:
                moved[key] = value
        return moved
    try:
        return type(part)(values)  # type: ignore[call-arg]
    except TypeError:  # it cannot be made of a dict
        return values


def _sequence(part: Sequence[Any], values: list[Any]) -> Any:
    if all(value is before for value, before in zip(values, part, strict=True)):
        return part
    if hasattr(part, "_fields"):  # a named tuple
        return type(part)(*values)
    if isinstance(part, list):
        moved = copy.copy(part)
        moved[:] = values
        return moved
    try:
        return type(part)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
