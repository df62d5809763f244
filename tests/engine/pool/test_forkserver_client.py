"""The fork server, as the parent sees it."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nn_parallel import (
    ExecutorClosedError,
    ParallelError,
    ParallelExecutor,
    WorkerDiedError,
)
from nn_parallel._engine.pool import forkserver_client


@pytest.mark.slow
def test_the_workers_of_a_killed_parent_end(tmp_path: Path) -> None:
    """SIGKILL of the script: no worker, no child of a worker and no fork server is left."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, subprocess, sys, time
from nn_parallel import ParallelExecutor
from nn_parallel._engine.pool import forkserver_client
def busy():
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    ex.run(int)
    print(forkserver_client.fork_server_pid(), flush=True)
    ex.run(busy)
"""
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for _ in range(3) for pid in parent.stdout.readline().split()]
        assert len(pids) == 5
        handles = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    deadline = time.monotonic() + 5
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        os.close(handle)
        assert ended


@pytest.mark.slow
def test_a_killed_fork_server_is_a_clear_error_and_the_next_pool_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool that it held is broken and says so; a new executor works."""
    monkeypatch.setattr(forkserver_client, "_fork_server", None)  # not the one that the other tests share
    try:
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            pool.run(int)
            future = pool.submit(time.sleep, 3600)
            os.kill(forkserver_client.fork_server_pid() or 0, signal.SIGKILL)
            with pytest.raises(ParallelError, match="fork server has ended"):
                future.result()
            with pytest.raises(ParallelError, match="fork server has ended"):
                pool.run(int)
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            assert pool.run(int) == [0]
    finally:
        forkserver_client.stop_fork_server()


def test_a_fork_of_the_parent_may_not_use_its_pool(own_executor2: ParallelExecutor) -> None:
    """In a child that user code forked, the executor says whose it is, and its end harms nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            own_executor2.run(int)
        except ExecutorClosedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert f"belongs to process {os.getpid()}" in file.read()
    assert own_executor2.run(int) == [0, 0]


def test_a_fork_leaves_alone_what_its_parent_sends() -> None:
    """The files for tensors that a pool fills again and again are the fork's, too."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.put(torch.ones(100_000))  # its file is free again at once
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(reader, 1)
            for call in (pool.put, functools.partial(pool.run, len), functools.partial(pool.submit, len)):
                with contextlib.suppress(ExecutorClosedError):
                    call(bytes(400_000))
            os._exit(0)
        handle = pool.put(torch.ones(100_000))
        os.write(writer, b" ")
        assert os.waitpid(pid, 0)[1] == 0
        assert pool.run(torch.sum, handle) == [100_000.0]
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_a_fork_that_lives_on_does_not_keep_the_program(tmp_path: Path) -> None:
    """A child that user code forked holds copies of our sockets: the program ends all the same, and its workers too."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, sys
from nn_parallel import ParallelExecutor
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    (worker,) = ex.run(os.getpid)
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
print(worker)
"""
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        assert program.wait(20) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


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
        monkeypatch.setattr(forkserver_client, "_events_file", lambda: counter)
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            pool.run(int)
            counter.write_text("oom 5\noom_kill 4\n")
            with pytest.raises(WorkerDiedError) as caught:
                pool.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()
        told = str(caught.value)
    assert "was killed by SIGKILL while running " in told
    assert "The kernel's out-of-memory killer counted 1 kill in this cgroup." in told
