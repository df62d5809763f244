"""What can be known of the end of a process beside its exit code."""

from __future__ import annotations

import contextlib
from pathlib import Path


class OomKills:
    """Counts what the kernel's out-of-memory killer does in the cgroup of this process, which its workers share."""

    def __init__(self) -> None:
        self._events = _events_file()
        self._seen = self._count()

    def since_last_asked(self) -> int:
        """Its kills since the last call; 0 where the kernel does not tell."""
        before, self._seen = self._seen, self._count()
        return self._seen - before

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in self._events.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _events_file() -> Path:
    """Where the cgroup counts: ``memory.events`` of version 2, ``memory.oom_control`` of version 1."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                unified = Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events")
                if unified.exists():
                    return unified
            elif "memory" in controllers.split(","):
                return Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control")
    return Path("/sys/fs/cgroup/memory.events")  # in a container that sees its own cgroup as the root
