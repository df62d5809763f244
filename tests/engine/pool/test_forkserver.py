"""What befalls the script itself: Ctrl-C, SIGTERM, SIGKILL, also in a notebook. Nothing stays behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.notebook import run_cells

GONE_WITHIN_S = 4.0  # DataLoader processes look for themselves whether their parent is there, after 5 s
IMPORTED_WITHIN_S = 20.0  # a fork server that imports torch sees the end of the script after that
SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from nn_parallel import ParallelExecutor

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

def ready():
    print("ready\\n", end="", flush=True)  # all of it or nothing, whenever it is interrupted

def endless():
    # Two processes of its own, which live as long as the worker lets them. They send no tensors: the thread of
    # `multiprocessing` that sends descriptors prints a traceback whenever its receiver is interrupted.
    while True:
        for batch in DataLoader(list(range(1000)), num_workers=2, persistent_workers=True, collate_fn=list):
            ready()
            time.sleep(0.001)

def pool():
    return ParallelExecutor(num_workers=2, devices="cpu")

phase = sys.argv[1]
data = torch.ones(8 << 20)
try:
    if phase == "run":
        with pool() as ex:
            ex.run(endless)
    if phase == "transfer":
        with pool() as ex:
            while True:
                ex.run(lambda x: x, data)
                ready()
    while True:
        if phase == "start":
            ready()
        ex = pool()
        if phase == "shutdown":
            ex.run(int)
            ready()
        ex.submit(int)
        ex.shutdown()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
IMPORTS_S = 1.5  # about; the script is killed while its fork server still imports torch, or later


@contextlib.contextmanager
def script(tmp_path: Path, phase: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The script above in its endless ``phase``, and a mark that it and all of its descendants carry."""
    path, mark = tmp_path / "script.py", f"TEST_MARK={uuid.uuid4()}"
    path.write_text(SCRIPT)
    environ = os.environ | dict([mark.split("=")])
    with subprocess.Popen(
        [sys.executable, str(path), phase],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", process.stdout.read()
            yield process, mark
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """The living processes with this variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():  # empty for a zombie
                    found.append(int(entry.name))
    return found


def assert_gone(mark: str, within_s: float = GONE_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while left := marked(mark):
        names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()]
        assert time.monotonic() < deadline, f"{left} live on: {names}"
        time.sleep(0.01)


PHASES = ["start", "transfer", "run", "shutdown"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "repetition", [pytest.param(n, marks=pytest.mark.slow if n < 2 else pytest.mark.faults) for n in range(50)]
)
def test_a_killed_parent_leaves_nothing(tmp_path: Path, phase: str, repetition: int) -> None:
    """SIGKILL at a random moment of a phase: no worker, no DataLoader process, no fork server lives on."""
    with script(tmp_path, phase) as (process, mark):
        time.sleep(
            random.Random(f"{phase}{repetition}").random() * (IMPORTS_S if phase == "start" else 0.1)
        )  # the moment
        process.kill()
        process.wait()
        assert_gone(mark, IMPORTED_WITHIN_S if phase == "start" else GONE_WITHIN_S)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_terminated_parent_leaves_nothing(tmp_path: Path, phase: str) -> None:
    """SIGTERM ends it like any program, and all that it started."""
    with script(tmp_path, phase) as (process, mark):
        process.terminate()
        assert process.wait() == -signal.SIGTERM
        assert_gone(mark)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_reaches_the_script_alone(tmp_path: Path, phase: str) -> None:
    """SIGINT to the whole foreground group: the script gets its KeyboardInterrupt, the workers print no traceback."""
    with script(tmp_path, phase) as (process, mark):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        printed = process.stdout.read().split("\n")
        assert process.wait() == 0
        assert set(printed) <= {"ready", "interrupted", ""}
        assert "interrupted" in printed
        assert_gone(mark)


TERMINAL = """
import os
from nn_parallel import ParallelExecutor

def ask(device):
    assert os.getsid(0) == parents_session
    with open("/dev/tty") as terminal:
        return terminal.readline()

parents_session = os.getsid(0)
with ParallelExecutor(num_workers=1, devices="cpu", timeout=20) as ex:
    print(repr(ex.submit(ask).exception()), flush=True)
"""


@pytest.mark.slow
def test_a_worker_that_asks_the_terminal_gets_an_error() -> None:
    """It is in the background of the script's session, where reading the terminal would stop it for good."""
    here, there = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TERMINAL],
            stdin=there,
            capture_output=True,
            timeout=40,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(there, termios.TIOCSCTTY, 0),
        )
    finally:
        os.close(here)
        os.close(there)
    assert done.stdout == b"OSError(5, 'Input/output error')\n", done.stderr


CLOSED = """
import os, sys
from pathlib import Path
from nn_parallel import ParallelExecutor

def work():
    print("printed")
    print("told", file=sys.stderr)
    os.system("echo printed; echo told >&2")
    return sys.stdin.read()

with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    results = ex.run(work)
    os.write(1, b"printed by C code\\n")
    os.write(2, b"told by C code\\n")
    results += ex.run(work)
Path(sys.argv[1]).write_text(repr(results))
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    """A script that was started without some of them has a pool, and what is printed goes where there is somebody."""
    (tmp_path / "script.py").write_text(CLOSED)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, tmp_path / "script.py", tmp_path / "results"],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results").read_text() == repr([""] * 4)
    for stream, mark, word, text in ((1, " >&-", "printed", done.stdout), (2, "2>&-", "told", done.stderr)):
        lines = [word] * 8 + [f"{word} by C code"] if mark not in f" {closed}" else []
        assert sorted(text.splitlines()) == lines, stream


@pytest.mark.slow
def test_in_a_notebook() -> None:
    """Functions of a cell run on the workers, what they print appears in the cell, and a stopped cell stops them."""
    first, stopped, after = run_cells(
        "from nn_parallel import ParallelExecutor, current_world\n"
        "ex = ParallelExecutor(num_workers=2, devices='cpu')\n"
        "factor = 3\n"
        "class Box:\n"
        "    def __init__(self, value): self.value = value\n"
        "def work(x):\n"
        "    print('hello from', current_world().rank)\n"
        "    return Box(factor * x)\n"
        "print([box.value for box in ex.run(work, 2)])\n",
        "# stop\nimport time\nprint('ready', flush=True)\nex.run(time.sleep, 3600)",
        "print(ex.run(lambda: factor))",
    )
    assert sorted(first[0].splitlines()) == ["[6, 6]", "hello from 0", "hello from 1"]
    assert first[1] is None
    assert stopped[1] == "KeyboardInterrupt"
    assert after == ("[3, 3]\n", None)
