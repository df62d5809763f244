"""NCCL, as a rank needs it that outlives a failure: its settings, its errors, and the end of its collectives.

A collective of NCCL is a kernel that waits on the GPU for the other ranks. The program goes on, and waits in whatever
needs a result, as ``loss.item()``: no exception is raised there, whatever becomes of the collective. Torch's own remedy
is a thread that watches the collectives and ends the process. Here ranks go on after a failure, so that thread only
notes what it sees, the watchdog of the rank asks for it (`error_of`), and it is raised in the main thread.

What frees a GPU is the abort of the group. The kernels then return, and what they leave behind is wrong: so the main
thread is always interrupted first. Abort waits until the kernels of its own group have ended, and these may wait for
memory that another stuck group holds: so all groups are aborted at the same time, in a thread each (`Aborts`). Called
one after another they waited for each other for ever, also between ``ncclGroupStart`` and ``ncclGroupEnd`` (seen with
torch 2.11 and NCCL 2.28).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from typing import Any

import torch
import torch.distributed as dist

from ..devices import synchronize_in_thread
from . import times
from .flight_recorder import running_collectives

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
# The thread that watches neither aborts collectives nor ends the process, and waits for nobody before it goes on; and
# nobody watches that thread.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
SET_BY_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
# Torch sets it in the store when a collective has failed, for the ranks to write down what they have done. Ranks that
# make a group later would find it, too.
DUMP_KEY = "exception_dump"
logger = logging.getLogger("nn_parallel")


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be set in ``environ`` before a group is made; what the user has set there stays."""
    by_torchrun = SET_BY_TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else {}
    return {name: value for name, value in SETTINGS.items() if environ.get(name) in (None, by_torchrun.get(name))}


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group`` that have an abort of their own: all but gloo."""
    if type(group) is not dist.ProcessGroup:  # one that is written in Python is its own backend
        return [group]
    backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    return [backend for backend in backends.values() if type(backend) is not dist.ProcessGroupGloo]


def error_of(groups: Iterable[dist.ProcessGroup], device: torch.device) -> dist.DistBackendError | None:
    """Return why a collective of these groups on ``device`` cannot end, as far as their backends tell.

    A connection that was lost is no error where all that was queued has come to its end: another rank may have left.
    """
    errors = {each for group in groups for each in _told_by(group)}
    if not errors or has_ended(device, times.ENDS_WITHIN_S):
        return None
    if "TIMEOUT" in errors:
        return dist.DistBackendError(
            "NCCL: Timed out waiting for a collective, which did not end within the timeout of its process group."
        )
    return dist.DistBackendError(f"NCCL: Connection closed by peer, or lost on the way to it ({min(errors)}).")


def has_ended(device: torch.device, within_s: float) -> bool:
    """Return whether all that was queued on ``device`` comes to its end, if only by an error, within this time."""
    return bool(wait([synchronize_in_thread(device)], within_s).done)


def _told_by(group: dist.ProcessGroup) -> set[str]:
    """Return the names of the errors that the backends of ``group`` tell of."""
    try:
        return {backend.get_error().name for backend in backends_of(group)} - {"SUCCESS"}
    except (AttributeError, RuntimeError):  # it tells nothing of the kind, or is being destroyed
        return set()


class Aborts:
    """The aborts of process groups, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads: dict[dist.ProcessGroup, threading.Thread] = {}

    def begin(self, groups: Mapping[dist.ProcessGroup, str], first_group_id: int) -> None:
        """Abort these groups, by torch's names of them, each of them once. Returns at once.

        What has not ended in NCCL's groups from that id on is cut off, as the log then says.
        """
        new = {group: name for group, name in groups.items() if group not in self._threads and backends_of(group)}
        if new and (running_collectives(first_group_id, "nccl") or any(map(_told_by, new))):
            logger.warning(
                "Collectives on the accelerator are cut off: what they and the work after them compute is wrong. If "
                "that is a model, load a checkpoint before you go on."
            )
        for group, name in new.items():
            thread = threading.Thread(target=_abort, args=[group, name], name="nn_parallel abort", daemon=True)
            self._threads[group] = thread
        for group in new:
            self._threads[group].start()

    def finish(self) -> bool:
        """Wait for all of them, before the groups are destroyed; return whether they have ended."""
        wait_until = time.monotonic() + times.ABORT_WITHIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, wait_until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads.values()):
            logger.error("The process group did not end within %g s: this process can only exit.", times.ABORT_WITHIN_S)
            return False
        self._threads.clear()
        return True


def _abort(group: dist.ProcessGroup, name: str) -> None:
    try:
        group.abort()
    except Exception as error:  # the rank is freed by what else there is
        logger.warning("Process group %s could not be aborted: %s", name, error)
