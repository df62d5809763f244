"""Decorators for every device: `parallelize_on_gpus` over processes, `parallel_on_all_devices` over threads."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree

from .ddp import join_launched_world
from .devices import accelerators, choose_devices
from .errors import ExecutorClosedError
from .executor import ParallelExecutor
from .reports import call_name
from .world import current_world

P = ParamSpec("P")
R = TypeVar("R")
IDLE_LIMIT_S = 60.0


def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: bool = True,
    *,
    devices: str | torch.device | Sequence[str | torch.device | int] | None = None,
    timeout: timedelta | float | None = None,
) -> Callable[[Callable[..., R]], Callable[..., list[R]]]:
    """Make a function run on every device at once and return the list of its results, one per device.

    The processes are started at the first call, shared by all functions with the same devices, and let go after an idle
    minute. Under a launcher it is a collective call on the ranks already there, and the devices are theirs. See
    `ParallelExecutor.run` for how the function is called and what it raises.

    Args:
        num_gpus: the first so many accelerators; on a machine without any, so many CPU workers. If None: all.
        pass_device: bind each worker's device to the parameter called ``device``.
        devices: instead of ``num_gpus``; see `ParallelExecutor`.
        timeout: seconds (or a timedelta) that a call may take.

    Raises:
        TypeError, ValueError: at the call, as `ParallelExecutor`.
        RankError, RankTimeoutError, TransferError: at the call, as `ParallelExecutor.run`.

    Example::

        @parallelize_on_gpus(num_gpus=2)
        def double(device, data):
            return data.to(device) * 2

        double(torch.tensor([1, 2]))  # [tensor([2, 4]), tensor([2, 4])]
    """

    def decorate(fn: Callable[..., R]) -> Callable[..., list[R]]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> list[R]:
            while True:
                pool = _shared_pool(num_gpus, pass_device, devices, timeout)
                try:
                    return pool.run(fn, *args, **kwargs)
                except ExecutorClosedError:  # its idle minute ended just now
                    continue

        return wrapper

    return decorate


def parallel_on_all_devices(func: Callable[P, R]) -> Callable[P, R]:
    """Split the batch over all devices of this process, run a thread on each, and gather the results on the first.

    Every tensor among the arguments (in lists, tuples and dicts too) with at least one dimension is split along
    dimension 0; 0-dim tensors and modules are copied to each device; everything else is passed on. The results must be
    tensors, or the same nest of tensors everywhere: they are concatenated along dimension 0, 0-dim ones stacked.
    Gradients flow through all of it to the original tensors and parameters. Simpler than DDP, and slower: the threads
    share one interpreter, and modules are copied at each call.

    With one device, under a launcher, or without a tensor to split: a plain call.

    Raises:
        ValueError: the tensors differ in the length of dimension 0; the message names the lengths.
        TypeError: with several devices, a result that is not a tensor.

    Example::

        @parallel_on_all_devices
        def forward(batch):
            return batch * 2

        forward(torch.ones(4, 3)).shape  # torch.Size([4, 3])
    """

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        join_launched_world()
        devices = accelerators() if current_world().launcher == "none" else []
        if len(devices) < 2:
            return func(*args, **kwargs)
        result: R = _split_run_gather(func, devices, args, kwargs)
        return result

    return wrapper


class _SharedPool(ParallelExecutor):
    _idle_limit_s = IDLE_LIMIT_S

    @property
    def has_ended(self) -> bool:
        """Whether it was idle for so long, could not go on, or is that of a process of which this is a fork."""
        return self._supervisor is None or self._supervisor.has_ended

    def for_calls(self, pass_device: bool, timeout: timedelta | float | None) -> _SharedPool:
        """The same workers, called in another way."""
        view = _SharedPool.__new__(_SharedPool)
        vars(view).update(vars(self))
        view._make_calls(pass_device, timeout)
        return view


def _shared_pool(num_gpus: int | None, pass_device: bool, devices: Any, timeout: Any) -> ParallelExecutor:
    """The pool of these devices; under a launcher the ranks, where there is nothing to start or to keep."""
    if join_launched_world() is not None:
        return ParallelExecutor(num_gpus, pass_device, devices=devices, timeout=timeout)
    key = tuple(choose_devices(num_gpus, devices))
    with _pools_lock:
        if key not in _pools or _pools[key].has_ended:
            _pools[key] = _SharedPool(num_gpus, devices=devices, timeout=timeout)
        return _pools[key].for_calls(pass_device, timeout)


def _split_run_gather(
    func: Callable[..., Any], devices: list[torch.device], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    lengths = sorted({len(leaf) for leaf in leaves if _is_batch(leaf)})
    if len(lengths) > 1:
        raise ValueError(
            f"{call_name(func)} got tensors of lengths {', '.join(map(str, lengths))} along dimension 0: what is "
            "split together must be equally long."
        )
    if not lengths or lengths[0] < 2:
        return func(*args, **kwargs)
    devices = devices[: lengths[0]]
    columns = [_over_devices(leaf, devices) for leaf in leaves]
    calls = [pytree.tree_unflatten(row, structure) for row in zip(*columns, strict=True)]
    kind = devices[0].type
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
    )
    with ThreadPoolExecutor(len(devices)) as threads:
        results = list(threads.map(functools.partial(_run_in_thread, func, modes), calls, devices))
    parts, (shape, *others) = zip(*(pytree.tree_flatten(result) for result in results), strict=True)
    if any(other != shape for other in others):
        raise TypeError(f"{call_name(func)} returned different structures on different devices: they cannot be joined.")
    return pytree.tree_unflatten([_gather(func, pieces, devices[0]) for pieces in zip(*parts, strict=True)], shape)


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _over_devices(leaf: Any, devices: list[torch.device]) -> list[Any]:
    """What each device gets of one argument."""
    if _is_batch(leaf):
        pieces = torch.tensor_split(leaf, len(devices))
        return [piece.to(device) for piece, device in zip(pieces, devices, strict=True)]
    if isinstance(leaf, torch.Tensor):
        return [leaf.to(device) for device in devices]
    if isinstance(leaf, torch.nn.Module):
        return [_replica(leaf, device) for device in devices]
    return [leaf] * len(devices)


def _replica(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A copy whose tensors are the original's, moved, so that gradients flow back to it."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor.to(device) for tensor in tensors})  # the memo: copied already


def _run_in_thread(
    func: Callable[..., Any],
    modes: tuple[bool, bool, bool, torch.dtype],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
) -> Any:
    """Call with the thread-local modes of the caller, on the device that is current in this thread."""
    (args, kwargs), (grad, inference, autocast, dtype) = call, modes
    with (
        torch.inference_mode(inference),
        torch.set_grad_enabled(grad),
        torch.autocast(device.type, dtype, enabled=autocast),
    ):
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        return func(*args, **kwargs)


def _gather(func: Callable[..., Any], pieces: Sequence[Any], device: torch.device) -> torch.Tensor:
    for piece in pieces:
        if not isinstance(piece, torch.Tensor):
            raise TypeError(
                f"{call_name(func)} returned a {type(piece).__name__}: on several devices it must return tensors, "
                "or a nest of them."
            )
    moved = [piece.to(device) for piece in pieces]
    return torch.stack(moved) if moved[0].dim() == 0 else torch.cat(moved)


_pools: dict[tuple[torch.device, ...], _SharedPool] = {}
_pools_lock = threading.Lock()
