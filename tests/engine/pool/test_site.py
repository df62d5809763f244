"""The worker processes of a pool: started, replaced, and ended with all that they have started."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from nn_parallel import (
    ParallelError,
    ParallelExecutor,
    RankTimeoutError,
    WorkerDiedError,
    current_world,
)


def test_a_killed_process_leaves_no_shared_memory(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """A DataLoader process that is killed with its worker, just as it hands over a tensor: its file goes with it."""

    def leave_behind() -> None:
        child = os.fork()
        Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()  # the worker, and its child
        if child == 0:
            time.sleep(3600)
        while not Path(f"/dev/shm/torch_{child}_1_0").exists():
            time.sleep(0.001)
        (tmp_path / "pids").write_text(f"{os.getpid()} {child}")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDiedError):
        executor2.submit(leave_behind).result()
    worker, child = (Path(f"/dev/shm/torch_{pid}_1_0") for pid in (tmp_path / "pids").read_text().split())
    deadline = time.monotonic() + 10
    while worker.exists() or child.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_a_worker_has_registered_runs_as_it_leaves(tmp_path: Path) -> None:
    """As at the end of a script: temporary folders go, also that of `multiprocessing`, and `atexit` is heard."""

    def register() -> int:
        setattr(sys, "kept", tempfile.TemporaryDirectory(dir=tmp_path))  # noqa: B010
        tempfile.tempdir = str(tmp_path)
        multiprocessing.util.get_temp_dir()
        atexit.register(print, os.getpid(), end=" ")
        return os.getpid()

    with ParallelExecutor(num_workers=3, devices="cpu") as pool:
        first = pool.run(register)
        assert len(list(tmp_path.iterdir())) == 6
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            pool.resize(1)
            pool.shutdown()
    assert list(tmp_path.iterdir()) == []
    assert sorted(printed.getvalue().split()) == sorted(map(str, first))


def _wait_after_the_first(folder: Path) -> None:
    """Return in the first process that calls this, and wait in all others."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) > 1:
        time.sleep(0.001)


def test_a_worker_that_just_takes_the_place_of_another_one_ends_with_the_pool(tmp_path: Path) -> None:
    """An exception in the block kills this one too, whatever its initializer waits for."""
    with (
        contextlib.suppress(ZeroDivisionError),
        ParallelExecutor(1, "cpu", initializer=_wait_after_the_first, initargs=(tmp_path,)) as pool,
    ):
        (pid,) = pool.run(os.getpid)
        os.kill(pid, signal.SIGKILL)
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.001)
        raise ZeroDivisionError


def test_shared_memory_that_a_task_has_left_goes_with_the_worker() -> None:
    """As at the end of a script: Python's resource tracker removes it, and has the time to."""

    def leave() -> str:
        return SharedMemory(create=True, size=1).name

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        names = pool.run(leave)
        assert all(os.path.exists(f"/dev/shm/{name}") for name in names)
    assert not any(os.path.exists(f"/dev/shm/{name}") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_worker_has_started_ends_with_it(own_session: bool) -> None:
    """With one that is killed because it does not end, and with one that leaves; and with no other worker."""

    def start() -> list[int]:
        command = ["sh", "-c", "sleep 3600 & echo $!; wait"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session)
        assert child.stdout is not None
        return [child.pid, int(child.stdout.readline())]

    def hang_on_rank_0() -> None:
        while current_world().rank == 0:
            with contextlib.suppress(BaseException):
                time.sleep(60)

    with ParallelExecutor(num_workers=2, devices="cpu", timeout=5) as pool:
        killed, left = pool.run(start)
        with pytest.raises(RankTimeoutError):
            pool.run(hang_on_rank_0)
        _wait_for_ends(killed)
        assert all(map(_is_alive, left))
    _wait_for_ends(left)


def _wait_for_ends(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.001)


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_too_many_descriptors_is_an_error_and_no_leak() -> None:
    """A pool for which there are no descriptors left says so, and what it had opened is closed."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, before[1]))
    try:
        with pytest.raises((OSError, ParallelError)):
            ParallelExecutor(num_workers=8, devices="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        assert pool.run(int) == [0, 0]


NO_MORE_PROCESSES = """
import os

fork = os.fork

def refuse():
    if os.path.exists("full"):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = refuse
"""


NO_MORE_WORKERS = """
import os
from pathlib import Path
from nn_parallel import ParallelError, ParallelExecutor

with ParallelExecutor(num_workers=1, devices="cpu") as pool:
    pid = pool.run(os.getpid)
    Path("full").touch()
    with ParallelExecutor(num_workers=2, devices="cpu") as another:
        try:
            another.run(int)
        except ParallelError as error:
            print(error)
    assert pool.run(os.getpid) == pid
    os.remove("full")
    with ParallelExecutor(num_workers=2, devices="cpu") as another:
        assert another.run(int) == [0, 0]
"""


def _wait_to_be_killed_once(folder: str) -> None:
    """The first five processes that call this wait; those after them go on."""
    for index in range(5):
        with contextlib.suppress(FileExistsError):
            Path(folder, f"{index}.new").touch(exist_ok=False)
            Path(folder, f"{index}.new").with_suffix(".pid").write_text(str(os.getpid()))
            time.sleep(3600)


def test_all_workers_may_die_once_as_they_start(tmp_path: Path) -> None:
    """That is no row of failures: each place has had one."""
    with ParallelExecutor(
        num_workers=5, devices="cpu", initializer=_wait_to_be_killed_once, initargs=(str(tmp_path),)
    ) as pool:
        while len(list(tmp_path.glob("*.pid"))) < 5:
            time.sleep(0.01)
        for path in tmp_path.glob("*.pid"):
            while not (pid := path.read_text()):
                time.sleep(0.01)
            os.kill(int(pid), signal.SIGKILL)
        assert pool.run(abs, -1) == [1] * 5


@pytest.mark.slow
def test_no_more_processes_is_an_error_of_the_pool_that_needs_them(tmp_path: Path) -> None:
    """The others go on. Nothing limits the number of root's processes, so the fork that is refused is a fake."""
    (tmp_path / "sitecustomize.py").write_text(NO_MORE_PROCESSES)
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "error", "-c", NO_MORE_WORKERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert "It could not be forked: Resource temporarily unavailable." in done.stdout


@pytest.mark.slow
def test_nothing_is_given_to_a_worker_that_is_gone() -> None:
    """Items that come as the parent learns of its end, and what it had not begun, go to the next one."""

    def items(pause_s: float) -> Iterator[str]:
        yield from ["pass"] * 20
        time.sleep(0.01)
        yield "os._exit(1)"
        time.sleep(pause_s)
        yield from ["pass"] * 2

    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.run(int)
        for step in range(10):
            with pytest.raises(WorkerDiedError):
                list(pool.map(lambda code: exec(code, {"os": os}), items(0.006 * step)))
