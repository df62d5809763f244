"""The GPUs of this machine: list them, select some, parse a selection; by NVML, so that nothing initializes CUDA.

A GPU is named by its UUID: its number in NVML's order (that of ``nvidia-smi``, by PCI bus) need not be its number in
CUDA's (the fastest first, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from .errors import LaunchError

T = TypeVar("T")
MIB = 1 << 20
UUIDS = "GPU-", "MIG-"  # how they begin, the latter those of slices
logger = logging.getLogger("nn_parallel")


@dataclass(frozen=True)
class GPU:
    """One GPU, as NVML describes it; None for what it refuses to tell (in WSL, in a container, of a GPU in MIG mode).

    Attributes:
        index: its number in NVML's order, that of ``nvidia-smi``.
        uuid: its name on every machine, good for ``CUDA_VISIBLE_DEVICES``. Where that shows a slice of the GPU (in MIG
            mode), the slice stands for it, with its own name and memory.
        name: the product.
        memory_total_mb, memory_free_mb: in MiB.
        utilization: the share of the last sample period in which something ran on it, in percent.
        temperature: in °C.
        processes: the ids of those that have a context on it; in a container these may be the host's.
        is_visible: whether ``CUDA_VISIBLE_DEVICES`` lets this process use it.
    """

    index: int
    uuid: str
    name: str | None = None
    memory_total_mb: int | None = None
    memory_free_mb: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    processes: tuple[int, ...] | None = None
    is_visible: bool = True


def list_gpus() -> list[GPU]:
    """Every NVIDIA GPU of this machine, in NVML's order; an empty list, and one line in the log, where none can be had.

    Example::

        for gpu in list_gpus():
            print(gpu.index, gpu.name, gpu.memory_free_mb, "MiB free")
    """
    with _nvml() as nvml:
        if nvml is None:
            return []
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        slice_of = _shown_slice(nvml, shown)
        described = [_describe(nvml, index, slice_of) for index in range(nvml.nvmlDeviceGetCount())]
    gpus = [gpu for gpu in described if gpu]
    visible = _visible(shown, gpus)
    return [replace(gpu, is_visible=gpu.uuid in visible) for gpu in gpus]


def parse_gpu_selection(selection: str) -> list[GPU]:
    """Return the GPUs that ``"0,2-3"`` (a range includes its end), ``"all"`` or ``"GPU-1a2b,GPU-3c"`` name, in order.

    Numbers are those of `list_gpus`; a UUID may be abbreviated. All means those that ``CUDA_VISIBLE_DEVICES`` shows.

    Raises:
        ValueError: one of them does not exist, is hidden, ambiguous or named twice; the message says what there is.

    Example::

        chosen = parse_gpu_selection("0,2-3")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)  # before anything starts CUDA
    """
    gpus = list_gpus()
    exists = f"there are the GPUs 0 to {gpus[-1].index}" if gpus else "there is no GPU that NVML can see"
    if selection.strip() == "all":
        if not (visible := [gpu for gpu in gpus if gpu.is_visible]):
            hidden = f", hidden by CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}" if gpus else ""
            raise ValueError(f"'all' selects no GPU: {exists}{hidden}.")
        return visible
    chosen = list[GPU]()
    for part in selection.split(","):
        named = list(_named(part.strip(), gpus))
        if not named:
            raise ValueError(f"{part.strip()!r} names no GPU: {exists}.")
        chosen += named
    for gpu in chosen:
        if chosen.count(gpu) > 1:
            raise ValueError(f"{selection!r} names GPU {gpu.index} twice.")
        if not gpu.is_visible:
            shown = os.environ["CUDA_VISIBLE_DEVICES"]
            raise ValueError(f"GPU {gpu.index} is hidden from this process by CUDA_VISIBLE_DEVICES={shown}.")
    return chosen


def select_gpus(count: int, *, min_memory_mb: int = 0) -> list[GPU]:
    """Take the ``count`` GPUs with the most free memory, of equal ones the least busy, for the life of this process.

    Another process on this machine that selects so too, of whichever user, does not get them meanwhile: a lock on a
    file for each UUID, in the folder for temporary files, says so. Of those that this process has already, it gets the
    same again.

    Args:
        min_memory_mb: so many MiB must be free on each.

    Raises:
        ValueError: ``count`` is below one.
        LaunchError: there are fewer such GPUs; the message says what is the matter with the others. Or a lock's file
            cannot be read.

    Example::

        chosen = select_gpus(2, min_memory_mb=6000)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)  # before anything starts CUDA
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1.")
    gpus = list_gpus()
    best = sorted(gpus, key=lambda gpu: (gpu.uuid not in _held, -(gpu.memory_free_mb or 0), gpu.utilization or 0))
    chosen = list[GPU]()
    locks = dict[str, int]()
    refused = list[str]()
    try:
        for gpu in best:
            if len(chosen) == count:
                break
            if why := _unfit(gpu, min_memory_mb):
                refused.append(f"GPU {gpu.index} {why}")
                continue
            if gpu.uuid not in _held:
                lock = _lock(gpu.uuid)
                if lock is None:
                    refused.append(f"GPU {gpu.index} is taken by another process")
                    continue
                locks[gpu.uuid] = lock
                now = next((each for each in list_gpus() if each.uuid == gpu.uuid), gpu)
                if why := _unfit(now, min_memory_mb):  # who had it before may have left something running there
                    refused.append(f"GPU {gpu.index} {why}")
                    continue
                gpu = now
            chosen.append(gpu)
        if len(chosen) < count:
            why = "; ".join(refused) or ("NVML sees none" if not gpus else "there are no more")
            raise LaunchError(f"{count} GPUs were asked for, and {len(chosen)} can be had: {why}.")
        _held.update((gpu.uuid, locks.pop(gpu.uuid)) for gpu in chosen if gpu.uuid in locks)
    finally:
        for lock in locks.values():
            os.close(lock)
    return chosen


def _unfit(gpu: GPU, min_memory_mb: int) -> str:
    if not gpu.is_visible:
        return f"is hidden by CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    if min_memory_mb and gpu.memory_free_mb is None:
        return "does not tell how much memory is free"
    if min_memory_mb > (gpu.memory_free_mb or 0):
        return f"has {gpu.memory_free_mb} MiB free, fewer than {min_memory_mb}"
    return ""


def _lock(uuid: str) -> int | None:
    """Return the descriptor of a lock that lasts until it is closed; None if another process has it."""
    path = os.path.join(tempfile.gettempdir(), f"nn_parallel-{uuid}.lock")
    fd = None
    while fd is None:
        try:  # to read it is enough, and all that another user may do
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            _make_lock(path)
        except PermissionError as error:
            raise LaunchError(f"{path}, the lock of a GPU, cannot be read: its owner can `chmod 644` it.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _make_lock(path: str) -> None:
    """Make the file, which any user may read, whatever the umask is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:  # another process has been faster
        return
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be made, the lock of a GPU: {error}. TMPDIR may name another folder."
        ) from error
    os.fchmod(fd, 0o644)
    os.close(fd)


def _named(text: str, gpus: list[GPU]) -> Iterator[GPU]:
    first, dash, last = text.partition("-")
    if first.isdecimal() and (not dash or last.isdecimal()):
        wanted = range(int(first), int(last if dash else first) + 1)
        matching = [gpu for gpu in gpus if gpu.index in wanted]
        yield from matching if len(matching) == len(wanted) else []
    elif text.startswith(UUIDS):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(text)]
        if len(matching) > 1:
            raise ValueError(f"{text!r} is short for several: {', '.join(gpu.uuid for gpu in matching)}.")
        yield from matching


def _visible(shown: str | None, gpus: list[GPU]) -> set[str]:
    """Return the UUIDs of what ``CUDA_VISIBLE_DEVICES`` shows, read as CUDA reads it: up to the first that is none.

    Its numbers are taken for those of NVML, which they are where all GPUs are alike.
    """
    if shown is None:
        return {gpu.uuid for gpu in gpus}
    uuids = list[str]()
    for part in shown.split(","):
        is_uuid = part.startswith(UUIDS)
        matching = [gpu for gpu in gpus if str(gpu.index) == part.strip() or (is_uuid and gpu.uuid.startswith(part))]
        if len(matching) != 1:
            break
        if matching[0].uuid in uuids:  # CUDA then shows none at all
            return set()
        uuids.append(matching[0].uuid)
    return set(uuids)


@contextlib.contextmanager
def _nvml() -> Iterator[ModuleType | None]:
    """NVML, ready to be asked; None, and a line in the log, where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # of NVML's own types, or OSError: a driver that is broken is none
        logger.info("No NVIDIA GPU can be seen: %s.", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _shown_slice(nvml: ModuleType, shown: str | None) -> dict[str, tuple[str, Any]]:
    """Return the slice that CUDA sees, its UUID and NVML's handle, by the UUID of its GPU; CUDA sees one at most."""
    uuid = (shown or "").split(",")[0]
    if not uuid.startswith("MIG-"):
        return {}
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return {nvml.nvmlDeviceGetUUID(gpu): (uuid, handle)}
    except nvml.NVMLError as error:
        logger.warning("CUDA_VISIBLE_DEVICES=%s names no slice of a GPU that can be used: %s.", shown, error)
        return {}


def _describe(nvml: ModuleType, index: int, slice_of: dict[str, tuple[str, Any]]) -> GPU | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        uuid, handle = slice_of.get(uuid, (uuid, handle))
    except nvml.NVMLError as error:  # NVML counts those too that have failed, or are not this user's
        logger.warning("GPU %d cannot be used: %s.", index, error)
        return None

    def ask(question: Callable[[], T]) -> T | None:
        try:
            return question()
        except nvml.NVMLError:  # each answer is optional
            return None

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return GPU(
        index=index,
        uuid=uuid,
        name=ask(lambda: nvml.nvmlDeviceGetName(handle)),
        memory_total_mb=memory and memory.total // MIB,
        memory_free_mb=memory and memory.free // MIB,
        utilization=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        temperature=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        processes=None if processes is None else tuple(process.pid for process in processes),
    )


_held: dict[str, int] = {}  # the locks of this process, by UUID
