"""NCCL for ranks that go on after a failure: its settings, its errors, and the abort of its collectives.

A collective of NCCL is a kernel that waits on the GPU for the other ranks. The program goes on, and waits only at the
first line that needs a result, such as ``loss.item()``. This line raises no exception, even if the collective fails.
Torch's remedy is a thread that watches the collectives and ends the process. But with this package, a process should
survive a failure. Therefore the settings below make torch's thread only note the errors that it sees. The watchdog of
the rank reads these errors (`error_of`) and makes the main thread raise them.

The GPU is freed by aborting the process groups. The kernels then return, but their results are wrong. The main thread
must not use these results. Therefore the main thread is always interrupted first.

The abort of a group returns only when the kernels of this group have ended. These kernels may wait for memory that a
kernel of another stuck group holds. For this reason, if the groups are aborted one after another, the first abort may
never return, even if all aborts are between ``ncclGroupStart`` and ``ncclGroupEnd`` (seen with torch 2.11 and NCCL
2.28). Therefore all groups are aborted at the same time, each in its own thread (`Aborts`).
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
from ..torch_private import all_backends
from . import times
from .flight_recorder import running_collectives

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
# Environment variables for the thread with which torch watches the collectives of NCCL. The values keep this watching
# thread from aborting collectives and from ending the process.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # after an error, torch writes no dump of its records
    # If the watching thread hangs, another thread of torch would end the process. This value prevents that.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error, the watching thread does not wait for other ranks to write their dumps.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# A value that torchrun sets for all its ranks. The value in SETTINGS replaces it, because the user has not chosen it.
SET_BY_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
# When a collective has failed, torch sets this key in the store, which makes all ranks dump their records. The key must
# be deleted before the next group is made, because the ranks of that group would read it too.
DUMP_KEY = "exception_dump"
logger = logging.getLogger("nn_parallel")


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in ``environ`` before a group is made, without those that the user has set."""
    by_torchrun = SET_BY_TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else {}
    return {name: value for name, value in SETTINGS.items() if environ.get(name) in (None, by_torchrun.get(name))}


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group`` that can be aborted, which are all backends except gloo."""
    if type(group) is not dist.ProcessGroup:  # a process group that is written in Python is its own backend
        return [group]
    return [backend for backend in all_backends(group) if type(backend) is not dist.ProcessGroupGloo]


def error_of(groups: Iterable[dist.ProcessGroup], device: torch.device) -> dist.DistBackendError | None:
    """Return an error if a collective of ``groups`` on ``device`` has failed and cannot end; otherwise None.

    A backend may report a lost connection although no collective has failed, namely if another rank closes its
    connections after the last collective. Therefore a reported error is ignored if all work that is queued on the
    device still ends.
    """
    errors = {name for group in groups for name in _reported_errors(group)}
    if not errors or has_ended(device, times.ENDS_WITHIN_S):
        return None
    if "TIMEOUT" in errors:
        return dist.DistBackendError(
            "NCCL: Timed out waiting for a collective, which did not end within the timeout of its process group."
        )
    return dist.DistBackendError(f"NCCL: Connection closed by peer, or lost on the way to it ({min(errors)}).")


def has_ended(device: torch.device, within_s: float) -> bool:
    """Return whether all work that is queued on ``device`` ends within ``within_s``, successfully or with an error."""
    return bool(wait([synchronize_in_thread(device)], within_s).done)


def _reported_errors(group: dist.ProcessGroup) -> set[str]:
    """Return the names of the errors that the backends of ``group`` report."""
    try:
        return {backend.get_error().name for backend in backends_of(group)} - {"SUCCESS"}
    except (AttributeError, RuntimeError):  # the backend reports no errors, or is being destroyed
        return set()


class Aborts:
    """The aborts of process groups. Each abort runs in its own thread, see the docstring of this module."""

    def __init__(self) -> None:
        self._threads: dict[dist.ProcessGroup, threading.Thread] = {}  # maps each group to the thread that aborts it

    def begin(self, groups: Mapping[dist.ProcessGroup, str], first_group_id: int) -> None:
        """Begin to abort ``groups``, except those that are already being aborted. Return without waiting for the end.

        If collectives are running, they are cut off, and a warning is logged.

        Args:
            groups: the groups, with their names in torch.
            first_group_id: the lowest id of the present groups in torch's flight recorder. Collectives of groups with a
                lower id are ignored, because these groups are closed.
        """
        new = {group: name for group, name in groups.items() if group not in self._threads and backends_of(group)}
        if new and (running_collectives(first_group_id, "nccl") or any(map(_reported_errors, new))):
            logger.warning(
                "Collectives on the accelerator are cut off. Their results, and those of the work that is queued after "
                "them, are wrong. If a model was being trained, load a checkpoint before you go on with it."
            )
        for group, name in new.items():
            thread = threading.Thread(target=_abort, args=[group, name], name="nn_parallel abort", daemon=True)
            self._threads[group] = thread
        for group in new:
            self._threads[group].start()

    def finish(self) -> bool:
        """Wait until all aborts have ended, so that the groups can be destroyed. Return False if an abort hangs."""
        wait_until = time.monotonic() + times.ABORT_WITHIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, wait_until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads.values()):
            logger.error(
                "The process group could not be aborted within %g s. This process cannot make another group: start a "
                "new process.",
                times.ABORT_WITHIN_S,
            )
            return False
        self._threads.clear()
        return True


def _abort(group: dist.ProcessGroup, name: str) -> None:
    try:
        group.abort()
    except Exception as error:  # not raised, because the aborts of other groups may still free this rank
        logger.warning("Process group %s could not be aborted: %s", name, error)
