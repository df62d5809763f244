"""An accelerator that this machine lacks, and a process group for it: of the type ``stand_in``, as CUDA and NCCL.

Nothing can be computed there. A test says what becomes of what would be queued, and sees what is called.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist

calls: list[str] = []
is_in_use = False
current = 0
failure: str | None = None  # of what has been queued: raised by the next `synchronize`
is_broken = False  # each `synchronize` raises
idle = threading.Event()  # nothing is queued
idle.set()
ErrorType = Enum("ErrorType", "SUCCESS TIMEOUT COMM_ERROR")


def is_initialized() -> bool:
    return is_in_use


def current_device_index() -> int:
    global is_in_use
    is_in_use = True
    return current


def set_device_index(device: int) -> None:
    global is_in_use, current
    is_in_use = True
    current = device


def synchronize(device: Any = None) -> None:
    global failure
    idle.wait()
    due, failure = failure, None
    if is_broken or due:
        raise RuntimeError(due or "an earlier failure")


def empty_cache() -> None:
    calls.append("empty_cache")


def get_rng_state() -> torch.Tensor:
    global is_in_use
    is_in_use = True
    return torch.zeros(1, dtype=torch.uint8)


class Collective(dist.Work):
    """One that nobody matches: it ends with its group, in silence, and its tensors keep what they held."""

    def __init__(self, aborted: dist.Store) -> None:
        super().__init__()
        self._aborted = aborted

    def wait(self, timeout: Any = None) -> bool:
        self._aborted.wait(["aborted"])  # in C++, deaf to signals
        return True


class ProcessGroup(dist.ProcessGroup):
    """As NCCL's: abort waits until that of each other group has begun, as groups on one GPU do."""

    supports_splitting = False
    made: ClassVar[list[ProcessGroup]] = []

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aborted = dist.HashStore()
        self.aborted.set_timeout(timedelta(hours=1))
        self.error = ErrorType.SUCCESS
        self.made.append(self)

    def _get_backend(self, device: Any) -> ProcessGroup:
        return self

    def get_error(self) -> Any:
        return self.error

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:
        idle.clear()
        return Collective(self.aborted)

    def abort(self) -> None:
        calls.append("abort")
        self.aborted.set("aborted", "")
        for each in self.made:
            each.aborted.wait(["aborted"])
        self.made.clear()
        idle.set()


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    return ProcessGroup(rank, size)
