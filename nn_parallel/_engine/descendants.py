"""Functions for processes on Linux: find descendants, end a process with its parent, recognize a stopped process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def descendants_of(pid: int) -> list[int]:
    """Return the ids of all descendants of a process.

    When a process ends, its children get another parent: the nearest ancestor that is a subreaper, or else process 1.
    Such children are found only if their new parent is ``pid`` or one of its descendants.
    """
    pids = [pid]
    for parent in pids:  # the list grows during the loop, so that the children of children are visited too
        pids += children_of(parent)
    return pids[1:]


def children_of(pid: int) -> list[int]:
    """Return the ids of the children of a process, including orphans that it has adopted as a subreaper."""
    children = list[int]()
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # the kernel keeps a list of children for each thread
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def prctl(option: int, value: int) -> None:
    """Set an option of this process; see ``man 2 prctl``."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends.

    The setting is PR_SET_PDEATHSIG. The kernel drops it when the process changes its user, so call this function again
    then.

    Args:
        parent: the process id of the parent. If the parent has ended already, this process exits now.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP, Ctrl-Z or a debugger. If the process has ended, return False."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False
