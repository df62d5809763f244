"""The processes that a process has started, and whether one is stopped, as Linux tells."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def descendants_of(pid: int) -> list[int]:
    """All that descends from a process, but for those that have lost their parent."""
    pids = [pid]
    for parent in pids:  # it grows on the way
        pids += children_of(parent)
    return pids[1:]


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that it has inherited as their subreaper."""
    children = list[int]()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # each has its own
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def prctl(option: int, value: int) -> None:
    """Set an option of this process; see ``man 2 prctl``."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with(parent: int) -> None:
    """Have the kernel kill this process as its parent, of that number, ends. It forgets this as the user changes."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped: by SIGSTOP, Ctrl-Z or a debugger."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:  # else it has ended
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False
