"""The end of a worker is told with what is known of its cause."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nn_parallel import (
    ParallelExecutor,
    WorkerDiedError,
)
from nn_parallel._engine.pool import evidence


def test_a_death_is_told_with_its_evidence(executor2: ParallelExecutor) -> None:
    """Signal by name, pid, device, what it ran, and how much memory it had."""
    with pytest.raises(WorkerDiedError) as caught:
        executor2.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()
    error = caught.value
    assert error.exitcode == -signal.SIGKILL
    assert f"(pid {error.pid}, cpu) was killed by SIGKILL while running " in str(error)
    assert "Its memory use peaked at" in error.evidence


OOM_SCRIPT = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from nn_parallel import ParallelExecutor, WorkerDiedError
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    try:
        ex.submit(lambda: len(bytearray(os.urandom(1 << 20)) * 4096)).result()
    except WorkerDiedError as error:
        print(error)
"""


def _new_memory_cgroup() -> Path | None:
    """A memory cgroup (version 1) below our own; None where we may not make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = Path("/sys/fs/cgroup/memory", path.lstrip("/"), f"oom-{os.getpid()}")
            with contextlib.suppress(OSError):
                group.mkdir()
                return group
    return None


@pytest.mark.slow
def test_the_kernel_s_out_of_memory_killer_is_named(
    tmp_path: Path, executor2: ParallelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that outgrows its cgroup: the error says that the kernel killed for memory meanwhile.

    By the real killer where this process may make a cgroup, else by a file that counts in its place.
    """
    if group := _new_memory_cgroup():
        try:
            (group / "memory.limit_in_bytes").write_text(str(1 << 30))
            command = [sys.executable, "-c", OOM_SCRIPT, str(group)]
            told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        finally:
            deadline = time.monotonic() + 10
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            group.rmdir()
    else:
        counter = tmp_path / "memory.events"
        counter.write_text("oom 4\noom_kill 3\n")
        monkeypatch.setattr(evidence, "_events_file", lambda: counter)
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            pool.run(int)
            counter.write_text("oom 5\noom_kill 4\n")
            with pytest.raises(WorkerDiedError) as caught:
                pool.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()
        told = str(caught.value)
    assert "was killed by SIGKILL while running " in told
    assert "The kernel's out-of-memory killer counted 1 kill in this cgroup." in told
