"""Devices: those that exist, the one of a rank, and a function's parameter ``device``. None of it initializes CUDA."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, SupportsIndex

import torch

from ..errors import LaunchError
from .background import in_thread
from .process_environment import is_installed


def existing_device(device: torch.device | str) -> torch.device:
    """Return the device that ``device`` names and that exists, as `nn_parallel.resolve_device` does."""
    text = str(device)
    if text.split(":")[0] == "gpu":
        text = text.replace("gpu", "cuda", 1)
    try:
        wanted = torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from None
    if wanted.type in ("cpu", "meta"):
        return wanted
    available = accelerators()
    if not available:
        _warn_no_accelerator_once(str(device))
        return torch.device("cpu")
    if wanted.type not in ("cuda", available[0].type):
        raise ValueError(f"There is no {wanted}: {what_exists(available)}.")
    _, _, number = text.partition(":")  # torch keeps eight bits of it: 256 would be 0
    index = int(number) if number else current_index(available[0].type)
    if index >= len(available):
        raise ValueError(f"There is no {device}: {what_exists(available)}.")
    return available[index]


def named_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device that ``device`` names, as `existing_device`; None if it leaves it open, as ``"cuda"`` does."""
    if device is None:
        return None
    resolved = existing_device(device)
    return resolved if resolved.type in ("cpu", "meta") or ":" in str(device) else None


def hardware_id(device: torch.device) -> str | None:
    """Return what names an accelerator in every process of its host; None if its driver does not tell.

    Its place on the PCI bus, by which NCCL knows it; the slices of a GPU in MIG mode have the same one. Begins the use
    of CUDA.
    """
    if device.type == "cpu":
        return None
    properties: Any = device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def device_properties(device: torch.device) -> object:
    """Return what the driver says of an accelerator, as ``name`` and ``uuid``; None where torch cannot ask (MPS)."""
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return ask(device) if ask else None


def accelerators() -> list[torch.device]:
    """Every visible accelerator, in torch's order; an empty list where there is none."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def current_index(kind: str) -> int:
    """Return the number of the current accelerator of this ``kind``.

    Before the first use of CUDA that is the first one, as far as torch knows; to ask would begin its use.
    """
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return 0
    return torch.accelerator.current_device_index()


def synchronize(device: torch.device) -> None:
    """Wait for all that was queued on ``device``: what has failed there is raised here."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def synchronize_in_thread(device: torch.device) -> Future[None]:
    """Return the end of `synchronize`, which no signal interrupts, in a thread that nobody has to wait for."""
    return in_thread(functools.partial(synchronize, device), "nn_parallel synchronize")


def parse_devices(devices: str | torch.device | Sequence[str | torch.device | int]) -> list[torch.device]:
    """Return the devices that a ``devices=`` argument names.

    ``"cpu"``; all accelerators, as ``"all"``, ``"cuda"`` or ``"gpu"``; accelerators by number, ``"0,2-3"`` (a range
    includes its end); or a list of devices. Numbers and devices may repeat: several workers then share one.

    Raises:
        ValueError: one of them does not exist, or the text is none of these; the message says what exists.
    """
    available = accelerators()
    if isinstance(devices, torch.device):
        devices = [devices]
    if isinstance(devices, str):
        devices = [part.strip() for part in devices.split(",")]
    chosen = [device for part in devices for device in _expand(part, available)]
    if not chosen:
        raise ValueError(f"devices names no device; {what_exists(available)}.")
    if len({device.type for device in chosen}) > 1:
        raise ValueError(f"devices mixes {' and '.join(sorted({d.type for d in chosen}))}: one pool has one kind.")
    return chosen


def choose_devices(
    num_gpus: int | None,
    devices: str | torch.device | Sequence[str | torch.device | int] | None,
    num_workers: int | None = None,
) -> list[torch.device]:
    """Return the device of each worker of a `ParallelExecutor`.

    Raises:
        TypeError: ``num_gpus`` together with ``devices``; a count is no integer.
        ValueError: there are fewer devices, or none of that name.
    """
    if num_gpus is not None and devices is not None:
        raise TypeError(f"num_gpus={num_gpus} and devices={devices!r} both choose the devices: give one of them.")
    available = accelerators()
    num_gpus = None if num_gpus is None else count("num_gpus", num_gpus, f"; {what_exists(available)}")
    num_workers = None if num_workers is None else count("num_workers", num_workers, f"; {what_exists(available)}")
    cpu = torch.device("cpu")
    if devices is not None:
        chosen = parse_devices(devices)
    elif available:
        if num_gpus is not None and num_gpus > len(available):
            raise ValueError(f"num_gpus={num_gpus} asks for more than there are: {what_exists(available)}.")
        chosen = available[:num_gpus]
    else:
        chosen = [cpu] * (num_gpus or 1)
    if num_workers is None:
        num_workers = cpu_count() if chosen == [cpu] and num_gpus is None else len(chosen)
    return [chosen[index % len(chosen)] for index in range(num_workers)]


def count(name: str, value: SupportsIndex, what_exists: str = "") -> int:
    """Return the argument ``name``, a number of things, as an int; ``what_exists`` ends the message if it is too small.

    Raises:
        TypeError: it is no integer; True and 2.0 are none.
        ValueError: it is below one.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}={value!r} must be an integer, not a {type(value).__name__}.")
    if number < 1:
        raise ValueError(f"{name}={value} must be at least 1{what_exists}.")
    return number


def device_of_rank(local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of the rank that is ``local_rank`` of the ``local_world_size`` on this node.

    The only visible accelerator (a launcher may show each rank its own), else the one numbered by the local rank, else
    the CPU where there is none at all. Never the rank modulo the count: that silently puts two ranks on one device.

    Raises:
        LaunchError: fewer accelerators than ranks.
    """
    available = accelerators()
    if not available:
        return torch.device("cpu")
    if len(available) == 1:
        return available[0]
    if len(available) < local_world_size:
        raise LaunchError(
            f"{local_world_size} ranks run on this node and {what_exists(available)}: start at most {len(available)} "
            "ranks per node, or pass device= to share one on purpose."
        )
    return available[local_rank]


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Lines in which the columns stand below each other, for a person to read."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def cpu_count() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def call_on_device(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None
) -> Any:
    """Call ``fn`` with ``device`` bound to its parameter of that name, wherever it stands.

    The caller's positional arguments fill the other parameters: ``def f(device, data)`` is called for ``f(data)``. A
    function without such a parameter, one of an installed library, as `numpy.zeros`, a caller that passed ``device=``
    itself and ``device=None`` change nothing.

    Raises:
        TypeError: there are more positional arguments than other parameters; and whatever ``fn`` raises.
    """
    if device is None or "device" in kwargs or not (place := _device_parameter(fn)) or _is_of_a_library(fn):
        return fn(*args, **kwargs)
    kind, before, most = place
    if len(args) > most:
        raise TypeError(
            f"{getattr(fn, '__qualname__', type(fn).__qualname__)}() was given {len(args)} positional arguments and "
            f"takes {most} beside 'device', which pass_device=True binds to the worker's device: leave the device out "
            "of the call, or say pass_device=False and pass it yourself."
        )
    if kind is inspect.Parameter.KEYWORD_ONLY or len(args) < before:
        if kind is not inspect.Parameter.POSITIONAL_ONLY:
            return fn(*args, **kwargs, device=device)
        left_out = [skipped.default for skipped in inspect.signature(fn).parameters.values()][len(args) : before]
        if any(default is inspect.Parameter.empty for default in left_out):
            return fn(*args, **kwargs)  # and Python says what is missing
        args = [*args, *left_out]
    return fn(*args[:before], device, *args[before:], **kwargs)


def _device_parameter(fn: Callable[..., Any]) -> tuple[Any, int, float] | None:
    """Return the kind of the parameter ``device``, how many are before it, and how many others may be positional.

    None if there is no such parameter that could be passed.
    """
    if isinstance(fn, types.FunctionType) and not fn.__dict__:  # `inspect` needs longer than many a call
        code = fn.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "device" not in names:
            return None
        before = names.index("device")
        kind = _KINDS[(before >= code.co_posonlyargcount) + (before >= code.co_argcount)]
        takes_all = code.co_flags & inspect.CO_VARARGS
        return kind, before, math.inf if takes_all else code.co_argcount - (before < code.co_argcount)
    if isinstance(fn, types.BuiltinFunctionType) and "device" not in (getattr(fn, "__text_signature__", None) or ""):
        return None  # without having it parsed, which touches every module, in memory that forks share
    if isinstance(fn, functools.partial) and "device" in fn.keywords:
        return None
    try:
        kinds = {name: parameter.kind for name, parameter in inspect.signature(fn).parameters.items()}
    except (ValueError, TypeError):  # a builtin that tells no signature
        return None
    if kinds.get("device") not in _KINDS:
        return None
    before = list(kinds).index("device")
    bound = kinds.pop("device")
    most = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds.values())
    return bound, before, math.inf if inspect.Parameter.VAR_POSITIONAL in kinds.values() else most


def _is_of_a_library(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return is_installed(getattr(fn, "__module__", None))


def _expand(part: str | torch.device | int, available: list[torch.device]) -> list[torch.device]:
    text = str(part).strip()
    if text in ALL_ACCELERATORS:
        if not available:
            raise ValueError(f"devices={text!r} asks for accelerators, and there is none; 'cpu' asks for the CPU.")
        return available
    first, dash, last = text.partition("-")
    if first.isdecimal() and (not dash or last.isdecimal()):
        wanted = range(int(first), int(last if dash else first) + 1)
        if not wanted or wanted[-1] >= len(available):
            raise ValueError(f"There is no accelerator {text}: {what_exists(available)}.")
        return [available[index] for index in wanted]
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"{text!r} names no device; {what_exists(available)}.") from None
    if device.type == "cpu":
        return [torch.device("cpu")]
    if device not in available or text != str(device):  # torch keeps eight bits of the index: 256 would be 0
        raise ValueError(f"There is no {text}: {what_exists(available)}.")
    return [device]


def what_exists(available: list[torch.device]) -> str:
    if not available:
        return "this machine has no accelerator, only the cpu"
    if len(available) == 1:
        return f"the only accelerator is {available[0]}"
    return f"the accelerators are {available[0]} to {available[-1]}"


def _warn_no_accelerator_once(wanted: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"{wanted} was asked for and there is no accelerator: the CPU is used.", stacklevel=4)


ALL_ACCELERATORS = "all", "gpu", "cuda"
_warned = False
_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
