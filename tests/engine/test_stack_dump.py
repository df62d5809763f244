"""Where the processes of a job stand, as another process sees it: of a pool, under a launcher, in C code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nn_parallel import ParallelExecutor, RankTimeoutError, initialize_ddp
from nn_parallel._engine.stack_dump import by_call_site, call_site_of, processes_of, stacks_of
from tests.support.fault_table import loop_endlessly as spin
from tests.support.processes import wait_for_state

POOL = """
import ctypes, sys, time, torch
from nn_parallel import ParallelExecutor, initialize_ddp

def load():
    if sys.argv[1] == "gil":
        ctypes.PyDLL(None).sleep(100)  # holds the GIL
    time.sleep(100)

def step():
    if initialize_ddp().rank == 1:
        load()
    torch.distributed.all_reduce(torch.ones(1))

with ParallelExecutor(num_workers=4, devices="cpu") as ex:
    ex.run(step)
"""
LAUNCHED = """
import time, torch
from nn_parallel import initialize_ddp, on_rank

@on_rank(0)
def report():
    time.sleep(100)

initialize_ddp()
report()
"""


@contextmanager
def _running(*command: str, cwd: Path) -> Iterator[int]:
    """The process id of a command that runs meanwhile."""
    process = subprocess.Popen([sys.executable, *command], cwd=cwd, stderr=subprocess.DEVNULL, process_group=0)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _sites(pid: int) -> list[str]:
    command = [sys.executable, "-m", "nn_parallel", "stacks", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.split("\n\n")[0].splitlines()


def _await_sites(pid: int, expected: list[str]) -> None:
    deadline = time.monotonic() + 60
    while (sites := _sites(pid)) != expected:
        assert time.monotonic() < deadline, sites


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "gil"])
def test_of_a_pool(how: str, tmp_path: Path) -> None:
    """The script and its workers, those at one place together; one holds the GIL in C code."""
    (tmp_path / "train.py").write_text(POOL)
    line = 7 if how == "gil" else 8
    with _running("train.py", how, cwd=tmp_path) as pid:
        sites = [
            "the script: in run(), called at train.py:16",
            "ranks 0, 2-3: in all_reduce(), called at train.py:13",
            f"rank 1: in load(), train.py:{line}",
        ]
        _await_sites(pid, sites)


@pytest.mark.slow
def test_under_a_launcher(tmp_path: Path) -> None:
    """The ranks below the launcher; or one of them by itself."""
    (tmp_path / "train.py").write_text(LAUNCHED)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "train.py")
    with _running(*command, cwd=tmp_path) as pid:
        _await_sites(pid, ["rank 0: in report(), train.py:7", "ranks 1-2: in call_on_rank(), called at train.py:10"])
        rank_0 = next(process for process in processes_of(pid) if process.name == "rank 0")
        assert _sites(rank_0.pid) == ["rank 0: in report(), train.py:7"]


def test_a_fork_is_not_its_parent() -> None:
    """It has the memory file too, and the handler of the signal."""
    with ParallelExecutor(num_workers=1, devices="cpu"):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        try:
            assert processes_of(pid) == []
            (script,) = (process for process in processes_of(os.getpid()) if process.pid == os.getpid())
            assert "test_a_fork_is_not_its_parent" in stacks_of([script])[script]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_who_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    """A process that is stopped, as a debugger does."""
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        pids = ex.run(os.getpid)
        stopped, other = (process for process in processes_of(os.getpid()) if process.pid in pids)
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_for_state(stopped.pid, "T")
        try:
            stacks = stacks_of([stopped, other])
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert stacks[stopped] == ""
        assert stacks[other] != ""


def test_the_stack_of_python_code_is_not_read_by_faulthandler() -> None:
    """Which could end the process: a thread that waits for the GIL writes it."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=1) as ex:
        pids = ex.run(os.getpid)
        (worker,) = (process for process in processes_of(os.getpid()) if process.pid in pids)
        future = ex.submit(spin)
        stacks = [stacks_of([worker])[worker]]
        with pytest.raises(RankTimeoutError) as caught:
            future.result()
        stacks += caught.value.stacks.values()
        for stack in stacks:
            assert "in <module>" in stack or "in loop_endlessly" in stack
            assert "most recent call first" not in stack  # its words


def test_a_process_that_has_not_said_what_the_signal_does(tmp_path: Path) -> None:
    """Between the making of its memory file and the handler, the signal would end it."""
    code = "import os, time; fd = os.memfd_create(f'stack of nn_parallel {os.getpid()} rank 0'); time.sleep(100)"
    with _running("-c", code, cwd=tmp_path) as pid:
        while not any("stack of" in os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()):
            time.sleep(0.01)
        assert processes_of(pid) == []


def test_a_process_that_takes_no_part(tmp_path: Path) -> None:
    """It is said, and is not killed by a signal that it does not know."""
    with _running("-c", "import time; time.sleep(100)", cwd=tmp_path) as pid:
        command = [sys.executable, "-m", "nn_parallel", "stacks", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"no process that uses nn_parallel is {pid} or descends from it" in done.stderr
        assert Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
def test_a_timeout_tells_who_is_where_first() -> None:
    """Then the stacks."""

    def step() -> None:
        import torch

        if initialize_ddp().rank == 1:
            time.sleep(60)
        torch.distributed.all_reduce(torch.ones(1))

    with (
        ParallelExecutor(num_workers=3, devices="cpu", timeout=3) as ex,
        pytest.raises(
            RankTimeoutError, match=r"ranks 0, 2: in all_reduce\(\), called at test_stack_dump.py:\d+\n"
        ) as told,
    ):
        ex.run(step)
    assert "\nrank 1: in step(), test_stack_dump.py:" in str(told.value)


def test_lines_for_many_ranks() -> None:
    """Runs of ranks are told as such; what has no stack is told too."""
    there = '  File "/home/me/train.py", line 4 in step\n'
    names = [*(f"rank {rank}" for rank in (0, 1, 2, 4, 6, 7)), "the script"]
    assert by_call_site(dict.fromkeys(names, there)) == "ranks 0-2, 4, 6-7, the script: in step(), train.py:4"
    assert by_call_site({"rank 3": there, "rank 4": ""}) == "rank 3: in step(), train.py:4\nrank 4: not known"


def test_what_a_user_has_called_is_named() -> None:
    """The outermost function of torch.distributed; none of the standard library."""
    import json

    assert (
        call_site_of(f'  File "{json.__file__}", line 1 in loads\n  File "/t.py", line 4 in step\n')
        == "in step(), t.py:4"
    )
