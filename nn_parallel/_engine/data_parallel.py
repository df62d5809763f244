"""Data parallelism in one process: a batch is split over the devices, and a thread runs the function on each device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .ranks.records import call_name
from .torch_private import tree_flatten, tree_unflatten


def split_run_gather(
    func: Callable[..., Any], devices: list[torch.device], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``func`` with a part of the batch on each device, and join the results on the first device.

    Every tensor among the arguments that has a dimension 0 belongs to the batch, and is split along this dimension. If
    there is no such tensor, or if the batch has fewer than two rows, ``func`` is called once with its arguments
    unchanged. If there are fewer rows than devices, only as many devices as rows are used.

    Raises:
        ValueError, TypeError: as `nn_parallel.parallel_on_all_devices`.
    """
    leaves, structure = tree_flatten((args, kwargs))
    lengths = sorted({len(leaf) for leaf in leaves if _is_batch(leaf)})
    if len(lengths) > 1:
        raise ValueError(
            f"{call_name(func)} got tensors of lengths {', '.join(map(str, lengths))} along dimension 0: tensors that "
            "are split together must be equally long."
        )
    if not lengths or lengths[0] < 2:
        return func(*args, **kwargs)
    devices = devices[: lengths[0]]
    columns = [_over_devices(leaf, devices) for leaf in leaves]
    calls = [tree_unflatten(row, structure) for row in zip(*columns, strict=True)]
    # The following settings apply to one thread only, so each new thread must get those of the calling thread.
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    kind = devices[0].type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)
    streams = [None if kind == "cpu" else torch.accelerator.current_stream(device) for device in devices]

    def run(call: Any, stream: torch.Stream | None) -> Any:
        if stream is not None:
            torch.accelerator.set_stream(stream)  # this also sets the current device
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast(kind, dtype, autocast):
            return func(*call[0], **call[1])

    with ThreadPoolExecutor(len(devices)) as threads:
        results = list(threads.map(run, calls, streams))
    parts, (shape, *others) = zip(*(tree_flatten(result) for result in results), strict=True)
    if any(other != shape for other in others):
        raise TypeError(
            f"{call_name(func)} returned differently nested results on different devices, which cannot be joined: "
            "return the same nest of tensors everywhere."
        )
    return tree_unflatten([_gather(func, pieces, devices[0]) for pieces in zip(*parts, strict=True)], shape)


def _is_batch(leaf: Any) -> bool:
    """Return whether this part of an argument is split along its dimension 0."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _over_devices(leaf: Any, devices: list[torch.device]) -> list[Any]:
    """Return the values that the user's function gets in place of ``leaf``: one value for each device.

    ``leaf`` is an argument, or a part of a nested argument. A batch is split over the devices. Any other tensor, and
    any module, is put on each device. Other objects are passed as they are.
    """
    if _is_batch(leaf):
        pieces = torch.tensor_split(leaf, len(devices))
        return [piece.to(device) for piece, device in zip(pieces, devices, strict=True)]
    if isinstance(leaf, torch.Tensor):
        return [leaf.to(device) for device in devices]
    if isinstance(leaf, torch.nn.Module):
        return [_replica(leaf, device) for device in devices]
    return [leaf] * len(devices)


def _replica(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Copy ``module`` to ``device`` so that gradients flow back to the parameters of the original.

    `copy.deepcopy` alone would make independent parameters. So its memo, the dict of objects that are copied already,
    maps each tensor of ``module`` to the tensor that ``to(device)`` returns. `copy.deepcopy` then uses these tensors as
    the copies. ``to`` is differentiable, so gradients flow through it.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor.to(device) for tensor in tensors})


def _gather(func: Callable[..., Any], pieces: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return the results of all devices as one tensor on ``device``: concatenated, or stacked if they are scalars.

    Raises:
        TypeError: a result is not a tensor.
    """
    for piece in pieces:
        if not isinstance(piece, torch.Tensor):
            raise TypeError(
                f"{call_name(func)} returned a {type(piece).__name__}: on several devices it must return tensors, "
                "or a nest of them."
            )
    moved = [piece.to(device) for piece in pieces]
    return torch.stack(moved) if moved[0].dim() == 0 else torch.cat(moved)
