"""The GPUs of this machine: list them, select some of them, parse a selection.

The functions query NVML instead of CUDA, because a query to CUDA would initialize CUDA in this process.

A GPU is identified by its UUID, because its number is ambiguous. NVML and ``nvidia-smi`` number the GPUs by PCI bus.
CUDA begins with the fastest GPU, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set.
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
UUID_PREFIXES = "GPU-", "MIG-"  # the prefixes of the UUIDs of GPUs, and of slices of a GPU (in MIG mode)
logger = logging.getLogger("nn_parallel")


@dataclass(frozen=True)
class GPU:
    """One GPU, as NVML describes it.

    An attribute is None if NVML refuses to report it, as it may in WSL, in a container or for a GPU in MIG mode.

    Attributes:
        index: the number of the GPU in NVML's order, which is also the order of ``nvidia-smi``.
        uuid: a name that no other GPU on any machine has, and that ``CUDA_VISIBLE_DEVICES`` accepts. If
            ``CUDA_VISIBLE_DEVICES`` shows a slice of the GPU (in MIG mode), the UUID, the name and the memory are those
            of the slice.
        name: the name of the product.
        memory_total_mb, memory_free_mb: the total and the free memory, in MiB.
        utilization: the share of the last sample period in which something ran on the GPU, in percent.
        temperature: the temperature, in °C.
        processes: the ids of the processes that have a context on the GPU. In a container, these may be process ids of
            the host.
        is_visible: True if ``CUDA_VISIBLE_DEVICES`` lets this process use the GPU.
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
    """Return every NVIDIA GPU of this machine, in NVML's order.

    If NVML cannot be used, the function returns an empty list and logs the reason in one line.

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
    """Return the GPUs that a text such as ``"0,2-3"``, ``"all"`` or ``"GPU-1a2b,GPU-3c"`` names, in the text's order.

    Args:
        selection: one or more parts, separated by commas. Each part is the ``index`` of a GPU, a range of indices
            that includes both ends, or a UUID, which may be abbreviated. ``"all"`` means all GPUs that
            ``CUDA_VISIBLE_DEVICES`` shows.

    Raises:
        ValueError: a part of the text names no GPU, abbreviates several UUIDs, or names a GPU that is hidden or that
            another part names too. If a part names no GPU, the message says which GPUs exist.

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
    """Select the ``count`` GPUs with the most free memory, and reserve them for the life of this process.

    Among GPUs with equally much free memory, the least busy ones are selected. GPUs that this process has reserved
    before are selected first.

    While this process lives, no other process on this machine, of any user, gets these GPUs from this function. To
    reserve a GPU, the process holds the lock of a file in the folder for temporary files. Programs that do not call
    this function can still use the GPU, because they do not check the locks.

    Args:
        count: the number of GPUs.
        min_memory_mb: the memory that must be free on each GPU, in MiB.

    Raises:
        ValueError: ``count`` is below one.
        LaunchError: fewer than ``count`` GPUs can be selected, and the message says why the others cannot; or a lock
            file cannot be created or read.

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
                current = next((listed for listed in list_gpus() if listed.uuid == gpu.uuid), gpu)
                if why := _unfit(current, min_memory_mb):  # the process that held the lock before may still use memory
                    refused.append(f"GPU {gpu.index} {why}")
                    continue
                gpu = current
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
    """Return the reason why `select_gpus` may not select ``gpu``, or an empty string if there is no reason."""
    if not gpu.is_visible:
        return f"is hidden by CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    if min_memory_mb and gpu.memory_free_mb is None:
        return "does not report how much memory is free"
    if min_memory_mb > (gpu.memory_free_mb or 0):
        return f"has {gpu.memory_free_mb} MiB free, fewer than {min_memory_mb}"
    return ""


def _lock(uuid: str) -> int | None:
    """Try to reserve a GPU for this process by locking the lock file of this GPU.

    Returns:
        The descriptor of the file, which holds the lock until the descriptor is closed. None if another process holds
        the lock.
    """
    path = os.path.join(tempfile.gettempdir(), f"nn_parallel-{uuid}.lock")
    fd = None
    while fd is None:
        try:
            # Opening the file for reading is enough for `flock`, and works even if the file belongs to another user.
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
    """Create a lock file that every user may read, because other users lock the file too.

    The mode does not depend on the umask of this process.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:  # another process has just made the file
        return
    except OSError as error:
        raise LaunchError(
            f"{path}, the lock of a GPU, cannot be made: {error}. Set TMPDIR to another folder."
        ) from error
    os.fchmod(fd, 0o644)
    os.close(fd)


def _named(text: str, gpus: list[GPU]) -> Iterator[GPU]:
    """Yield the GPUs that one part of a selection names: a number, a range or a UUID. Any other text yields nothing."""
    first, dash, last = text.partition("-")
    if first.isdecimal() and (not dash or last.isdecimal()):
        wanted = range(int(first), int(last if dash else first) + 1)
        matching = [gpu for gpu in gpus if gpu.index in wanted]
        yield from matching if len(matching) == len(wanted) else []
    elif text.startswith(UUID_PREFIXES):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(text)]
        if len(matching) > 1:
            raise ValueError(f"{text!r} is short for several: {', '.join(gpu.uuid for gpu in matching)}.")
        yield from matching


def _visible(shown: str | None, gpus: list[GPU]) -> set[str]:
    """Return the UUIDs of the GPUs that ``CUDA_VISIBLE_DEVICES`` shows.

    Like CUDA, the function reads the list only up to the first entry that names no GPU. CUDA looks up a number in
    CUDA's own order of the GPUs. This function looks it up in NVML's order, which is the same if all GPUs are of one
    model.

    Args:
        shown: the value of ``CUDA_VISIBLE_DEVICES``, or None if the variable is not set.
        gpus: all GPUs.
    """
    if shown is None:
        return {gpu.uuid for gpu in gpus}
    uuids = list[str]()
    for part in shown.split(","):
        is_uuid = part.startswith(UUID_PREFIXES)
        matching = [gpu for gpu in gpus if str(gpu.index) == part.strip() or (is_uuid and gpu.uuid.startswith(part))]
        if len(matching) != 1:
            break
        if matching[0].uuid in uuids:  # if a GPU is listed twice, CUDA shows no GPU at all
            return set()
        uuids.append(matching[0].uuid)
    return set(uuids)


@contextlib.contextmanager
def _nvml() -> Iterator[ModuleType | None]:
    """Initialize NVML for the ``with`` block and yield its module. If NVML cannot be used, log why and yield None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # an error of NVML, or OSError from a broken driver; in both cases no GPU can be used
        logger.info("No NVIDIA GPU can be seen: %s.", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _shown_slice(nvml: ModuleType, shown: str | None) -> dict[str, tuple[str, Any]]:
    """Return the slice of a GPU (in MIG mode) that ``shown``, the value of ``CUDA_VISIBLE_DEVICES``, selects.

    The result is a dict ``{UUID of the GPU: (UUID of the slice, NVML handle of the slice)}``. It has at most one entry,
    because CUDA uses at most one slice.
    """
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
    except nvml.NVMLError as error:  # NVML's count includes GPUs that have failed or that this user may not use
        logger.warning("GPU %d cannot be used: %s.", index, error)
        return None

    def ask(question: Callable[[], T]) -> T | None:
        try:
            return question()
        except nvml.NVMLError:
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


_held: dict[str, int] = {}  # the GPUs that this process has reserved: ``{UUID: descriptor of the lock file}``
