"""Devices: the accelerators that exist, the device of a rank, and the parameter ``device`` of a user's function.

The functions of this module do not initialize CUDA, unless their docstrings say so. A process that has initialized CUDA
uses memory on a GPU, and its forks cannot use CUDA.
"""

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
    """Return the existing device that ``device`` names; see `nn_parallel.resolve_device`."""
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
    _, _, number = text.partition(":")  # `wanted.index` keeps only 8 bits of the number, so 256 would be 0
    index = int(number) if number else current_index(available[0].type)
    if index >= len(available):
        raise ValueError(f"There is no {device}: {what_exists(available)}.")
    return available[index]


def named_device(device: torch.device | str | None) -> torch.device | None:
    """Return the existing device that ``device`` names, or None if it names only a type, as ``"cuda"`` does."""
    if device is None:
        return None
    resolved = existing_device(device)
    return resolved if resolved.type in ("cpu", "meta") or ":" in str(device) else None


def hardware_id(device: torch.device) -> str | None:
    """Return a name of an accelerator that is the same in every process of its host, or None if it has no such name.

    Ranks compare these names to find out whether some of them share an accelerator, because NCCL refuses to share one.
    The name is the address of the accelerator on the PCI bus, because NCCL distinguishes GPUs by this address. All
    slices of a GPU in MIG mode have the same address. If torch does not report an address, the name is the UUID. This
    function initializes CUDA.
    """
    if device.type == "cpu":
        return None
    properties: Any = device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def device_properties(device: torch.device) -> object:
    """Return the properties of an accelerator, such as ``name`` and ``uuid``, or None if torch does not report any.

    torch reports none for MPS, for example. This function initializes CUDA.
    """
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return ask(device) if ask else None


def accelerators() -> list[torch.device]:
    """Return all visible accelerators, in torch's order."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def current_index(kind: str) -> int:
    """Return the number of the current accelerator of this ``kind``.

    If CUDA is not initialized yet, the number is 0, because torch begins with the first accelerator. Torch is not asked
    then, because that would initialize CUDA.
    """
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return 0
    return torch.accelerator.current_device_index()


def synchronize(device: torch.device) -> None:
    """Wait for all operations that are queued on ``device``, and raise the error of an operation that has failed."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def synchronize_in_thread(device: torch.device) -> Future[None]:
    """Call `synchronize` in a thread, and return a future that is done when `synchronize` returns.

    This is for callers that must be able to give up: no signal interrupts `synchronize`, but a caller may stop waiting
    for the future, and the program may end before the thread does.
    """
    return in_thread(functools.partial(synchronize, device), "nn_parallel synchronize")


def parse_devices(devices: str | torch.device | Sequence[str | torch.device | int]) -> list[torch.device]:
    """Return the devices that an argument ``devices=`` names.

    Args:
        devices: ``"cpu"``; or ``"all"``, ``"cuda"`` or ``"gpu"`` for all accelerators; or the numbers of accelerators,
            as in ``"0,2-3"``, where a range includes its end; or a list of devices. If a device is named several times,
            several workers share it.

    Raises:
        ValueError: a named device does not exist, or a part of the string names no device. The message says which
            devices exist.
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
        device_types = " and ".join(sorted({device.type for device in chosen}))
        raise ValueError(f"devices mixes {device_types}, but all workers of a pool must have devices of one type.")
    return chosen


def choose_devices(
    num_gpus: int | None,
    devices: str | torch.device | Sequence[str | torch.device | int] | None,
    num_workers: int | None = None,
) -> list[torch.device]:
    """Return the device of each worker of a `ParallelExecutor`, from the arguments that the user has given to it.

    If there are more workers than devices, several workers share a device.

    Raises:
        TypeError: both ``num_gpus`` and ``devices`` are given, or a number is no integer.
        ValueError: a number is below one, ``num_gpus`` is more than the GPUs that exist, or a named device does not
            exist.
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
    """Check an argument that is a number of things, such as workers, and return it as an int.

    Args:
        name: the name of the argument, for error messages.
        value: the argument.
        what_exists: a clause with which the message of the ValueError ends, see the function `what_exists`.

    Raises:
        TypeError: the argument is no integer; True and 2.0 are not accepted.
        ValueError: the argument is below one.
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
    """Return the device of a rank.

    If one accelerator is visible, it is the device, because a launcher may show each rank only its own accelerator. If
    several are visible, the device is the one whose number is the local rank. This number is not taken modulo the
    number of accelerators, because then two ranks would silently share one of them. If none is visible, the device
    is the CPU.

    Args:
        local_rank: the number of the rank among those on its node.
        local_world_size: the number of ranks on this node.

    Raises:
        LaunchError: several accelerators are visible, but fewer than there are ranks on this node.
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
    """Return a string with one line for each row and with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def call_on_device(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None
) -> Any:
    """Call ``fn`` with ``device`` as the argument of its parameter ``device``, at any place among its parameters.

    The positional arguments are for the other parameters. For example, ``def f(device, data)`` can be called with
    ``data`` as its only positional argument.

    ``fn`` is called without ``device`` if it has no such parameter, if it is a function of an installed library, such
    as `numpy.zeros`, if ``kwargs`` has a ``device``, or if ``device`` is None.

    Raises:
        TypeError: there are more positional arguments than other parameters.
        Exception: any exception that ``fn`` raises.
    """
    if device is None or "device" in kwargs or not (parameter := _device_parameter(fn)) or _is_of_a_library(fn):
        return fn(*args, **kwargs)
    kind, before, most = parameter
    if len(args) > most:
        raise TypeError(
            f"{getattr(fn, '__qualname__', type(fn).__qualname__)}() was given {len(args)} positional arguments and "
            f"takes {most} beside 'device', which pass_device=True binds to the worker's device. Leave the device out "
            "of the call, or set pass_device=False and pass the device yourself."
        )
    if kind is inspect.Parameter.KEYWORD_ONLY or len(args) < before:
        if kind is not inspect.Parameter.POSITIONAL_ONLY:
            return fn(*args, **kwargs, device=device)
        left_out = [skipped.default for skipped in inspect.signature(fn).parameters.values()][len(args) : before]
        if any(default is inspect.Parameter.empty for default in left_out):
            return fn(*args, **kwargs)  # Python raises a TypeError that names the missing arguments
        args = [*args, *left_out]
    return fn(*args[:before], device, *args[before:], **kwargs)


def _device_parameter(fn: Callable[..., Any]) -> tuple[Any, int, float] | None:
    """Describe the parameter ``device`` of a function, so that `call_on_device` can pass the device at its position.

    Returns:
        Three values: the kind of the parameter, the number of parameters before this parameter, and the number of
        positional arguments that all other parameters together accept (infinite if there is ``*args``). None if the
        function has no such parameter or no signature, or if it is a `functools.partial` that sets the parameter.
    """
    if isinstance(fn, types.FunctionType) and not fn.__dict__:  # a fast path, because `inspect.signature` is slow
        code = fn.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "device" not in names:
            return None
        before = names.index("device")
        kind = _KINDS[(before >= code.co_posonlyargcount) + (before >= code.co_argcount)]
        takes_all = code.co_flags & inspect.CO_VARARGS
        return kind, before, math.inf if takes_all else code.co_argcount - (before < code.co_argcount)
    if isinstance(fn, types.BuiltinFunctionType) and "device" not in (getattr(fn, "__text_signature__", None) or ""):
        # To parse the signature, `inspect` would look at all loaded modules. In a forked worker this would copy memory
        # that all workers share.
        return None
    if isinstance(fn, functools.partial) and "device" in fn.keywords:
        return None
    try:
        kinds = {name: parameter.kind for name, parameter in inspect.signature(fn).parameters.items()}
    except (ValueError, TypeError):  # a function written in C, without a signature
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
    """Return the devices that one part of an argument ``devices=`` names."""
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
    if device not in available or text != str(device):  # torch keeps only 8 bits of the number, so 256 would be 0
        raise ValueError(f"There is no {text}: {what_exists(available)}.")
    return [device]


def what_exists(available: list[torch.device]) -> str:
    """Return a clause for error messages that says which accelerators exist."""
    if not available:
        return "this machine has no accelerator, only the cpu"
    if len(available) == 1:
        return f"the only accelerator is {available[0]}"
    return f"the accelerators are {available[0]} to {available[-1]}"


def _warn_no_accelerator_once(wanted: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"{wanted} was asked for and there is no accelerator, so the CPU is used.", stacklevel=4)


ALL_ACCELERATORS = "all", "gpu", "cuda"  # words for all accelerators in an argument ``devices=``
_warned = False  # True once `_warn_no_accelerator_once` has warned, so that it does not warn again
# The kinds of parameters that take a single argument, in the order in which they stand in a signature.
_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
