"""What tests ask of other processes, and of what they leave in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

TORCH_MADE = re.compile(r"torch_(\d+)_")  # in /dev/shm, by the process of this number


def abandoned_in_shared_memory() -> set[str]:
    """The files in /dev/shm of processes that were killed as they sent a tensor: torch names each after its process.

    All else there belongs to other programs, or to a process that lives and is about to remove it.
    """
    names = os.listdir("/dev/shm")
    return {name for name in names if (made := TORCH_MADE.match(name)) and not os.path.exists(f"/proc/{made[1]}")}


def wait_for_state(pid: int, state: str) -> None:
    """Return once all threads of a process are in this state, as the kernel names it."""

    def differs(stat: Path) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            return stat.read_text().rpartition(")")[2].split()[0] != state
        return False

    while any(map(differs, Path(f"/proc/{pid}/task").glob("*/stat"))):
        time.sleep(0.001)


def listening_addresses() -> list[str]:
    """The local addresses, as the kernel writes them, on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found
