"""Where the processes of a job stand, as another process sees it: of a pool, under a launcher, in C code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nn_parallel import ParallelExecutor, RankTimeoutError, initialize_ddp
from nn_parallel.__main__ import main
from nn_parallel._engine.descendants import children_of
from nn_parallel._engine.stack_dump import by_call_site, call_site_of, stacks_below
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
    """Return once these are among the lines: there are other processes, such as the launcher."""
    deadline = time.monotonic() + 60
    while not set(expected) <= set(sites := _sites(pid)):
        assert time.monotonic() < deadline, sites


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "gil"])
def test_of_a_pool(how: str, tmp_path: Path) -> None:
    """The script and its workers, those at one place together; one holds the GIL in C code."""
    (tmp_path / "train.py").write_text(POOL)
    line = 7 if how == "gil" else 8
    with _running("train.py", how, cwd=tmp_path) as pid:
        sites = [
            "ranks 0, 2-3: in all_reduce(), called at train.py:13",
            f"process {pid}: in run(), called at train.py:16",
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
        rank_0 = next(child for child in children_of(pid) if "in report\n" in stacks_below(child)[child])
        assert _sites(rank_0) == ["rank 0: in report(), train.py:7"]


def test_of_a_process_that_is_stopped(tmp_path: Path) -> None:
    """As a debugger does: it takes no part in it."""
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        pids = ex.run(os.getpid)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for_state(pids[1], "T")
        try:
            stacks = stacks_below(os.getpid())
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert all("in work\n" in stacks[pid] for pid in pids)
        assert "in test_of_a_process_that_is_stopped" in stacks[os.getpid()]


@pytest.mark.slow
def test_of_a_process_that_does_not_use_the_package(tmp_path: Path) -> None:
    """Any Python process has a stack; where there is none, the error says so."""
    with _running("-c", "import time; print(1, flush=True); time.sleep(100)", cwd=tmp_path) as pid:
        _await_sites(pid, [f"process {pid}: in <module>, <string>:1"])
    with pytest.raises(ValueError, match="py-spy finds no Python process with the id 1234567 or below it"):
        stacks_below(1234567)


def test_without_py_spy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what to install."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    assert main(["stacks", str(os.getpid())]) == 1
    assert "pip install nn_parallel[debug]" in capsys.readouterr().err


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
