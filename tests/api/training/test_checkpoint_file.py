"""The file of a checkpoint: whole whenever the process is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nn_parallel import (
    ParallelExecutor,
    RankError,
    initialize_ddp,
    load_checkpoint,
    save_checkpoint,
)


def test_a_link_stays_one(tmp_path: Path) -> None:
    """The file that it points to is the checkpoint."""
    (tmp_path / "run").mkdir()
    link = tmp_path / "last.pt"
    link.symlink_to("run/3.pt")
    save_checkpoint(link, epoch=3)
    assert link.is_symlink()
    assert os.listdir(tmp_path / "run") == ["3.pt"]
    assert load_checkpoint(link) == {"epoch": 3}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_a_file_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """What is there otherwise stays."""
    make(tmp_path / "a.pt")
    with pytest.raises(OSError, match="a.pt exists and is not a regular file"):
        save_checkpoint(tmp_path / "a.pt", epoch=3)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_full_disk_leaves_the_old_checkpoint(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """OSError on every rank, with its cause; the ranks go on, and the file of the time before loads."""
    path = tmp_path / "a.pt"

    def scenario() -> Any:
        import resource

        rank = initialize_ddp().rank
        save_checkpoint(path, epoch=1, weights=torch.ones(10))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0:  # as a disk with no more room than this
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            save_checkpoint(path, epoch=2, weights=torch.ones(1_000_000))
        except RankError as error:
            told = [f"{type(leaf).__name__}: {leaf}" for leaf in error.failures.values()]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return told, load_checkpoint(path)["epoch"]

    for told, epoch in executor2.run(scenario):
        assert len(told) == 1
        assert told[0].startswith("OSError: [Errno 27] File too large")
        assert epoch == 1
    assert os.listdir(tmp_path) == ["a.pt"]


# Forks of one process that has imported torch save in a loop until they are killed.
FORKS = """
import itertools, os, signal, sys, time, torch
from nn_parallel import save_checkpoint

save_checkpoint(sys.argv[1], step=-1, weights=torch.full((100_000,), -1.0))
torch.set_num_threads(1)
last = -1
for line in sys.stdin:
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        for step in itertools.count(last + 1):
            save_checkpoint(sys.argv[1], step=step, weights=torch.full((100_000,), float(step)))
            os.write(tell, step.to_bytes(4, "little"))
    os.close(tell)
    os.read(ready, 4)
    last += 1
    time.sleep(float(line))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    last += len(os.read(ready, 65536)) // 4
    os.close(ready)
    print(last, flush=True)
    last = torch.load(sys.argv[1], weights_only=True)["step"]
"""


def test_those_before_are_kept(tmp_path: Path) -> None:
    """``keep=3``: under numbers, the latest first; what is older goes, and what somebody else has there stays."""
    other = tmp_path / "last.old.pt"
    other.write_text("not ours")
    for step in range(5):
        save_checkpoint(tmp_path / "last.pt", keep=3, step=step)
    kept = {file.name: torch.load(file)["step"] for file in tmp_path.iterdir() if file != other}
    assert kept == {"last.pt": 4, "last.1.pt": 3, "last.2.pt": 2}
    assert other.read_text() == "not ours"
    save_checkpoint(tmp_path / "last.pt", step=5)
    assert [torch.load(tmp_path / name)["step"] for name in ("last.pt", "last.1.pt")] == [5, 3]
    with pytest.raises(ValueError, match="keep=0 must be a whole number of at least 1"):
        save_checkpoint(tmp_path / "last.pt", keep=0)


def test_a_file_system_without_links_keeps_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By copies."""

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    for step in range(3):
        save_checkpoint(tmp_path / "last.pt", keep=2, step=step)
    assert {file.name: torch.load(file)["step"] for file in tmp_path.iterdir()} == {"last.pt": 2, "last.1.pt": 1}


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at 100 random moments of `save_checkpoint`: the file loads, and is the last or the one after."""
    path, moments = tmp_path / "a.pt", random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = []
        for _ in range(100):
            process.stdin.write(f"{moments.random() * 0.02}\n")
            process.stdin.flush()
            finished = int(process.stdout.readline())
            saved = load_checkpoint(path)
            assert saved["step"] in (finished, finished + 1)
            assert torch.equal(saved["weights"], torch.full((100_000,), float(saved["step"])))
            found.append(len(os.listdir(tmp_path)) - 1)
        process.stdin.close()
    assert set(found) == {0, 1}  # kills struck while it was being written, and what they left did not stay
    save_checkpoint(path, step=0)
    assert os.listdir(tmp_path) == ["a.pt"]


# Saves again and again until told to stop, and prints how often.
WRITER = """
import select, sys, torch
from nn_parallel import save_checkpoint

torch.set_num_threads(1)
step = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    step += 1
    save_checkpoint(sys.argv[1], step=step, weights=torch.full((500_000,), float(step)))
print(step)
"""


@pytest.mark.slow
def test_two_jobs_that_save_to_one_path_do_not_mix_their_files(tmp_path: Path) -> None:
    """There is always the whole checkpoint of one of them, whoever is last, and neither gets an error."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, step=0, weights=torch.zeros(500_000))
    command = [sys.executable, "-c", WRITER, str(path)]
    with contextlib.ExitStack() as writers:
        processes = [
            writers.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        try:
            versions = set[int]()
            while len(versions) < 20:
                saved = torch.load(path, weights_only=True)
                assert torch.equal(saved["weights"], torch.full((500_000,), float(saved["step"])))
                versions.add(os.stat(path).st_ino)
                assert all(process.poll() is None for process in processes)
        finally:
            told = [process.communicate("stop\n")[0] for process in processes]
    assert all(int(steps) > 1 for steps in told)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_who_may_read_a_checkpoint_stays_as_it_was(tmp_path: Path) -> None:
    """The mode of the file that is replaced is that of the new one; of a new file it is as for any other."""
    path, other = tmp_path / "a.pt", tmp_path / "b"
    save_checkpoint(path, step=0)
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode
    path.chmod(0o640)
    save_checkpoint(path, step=1)
    assert path.stat().st_mode & 0o777 == 0o640


REPLACES = """
import os, pwd, signal, sys
from nn_parallel import save_checkpoint
path, unused = sys.argv[1:3]
save_checkpoint(unused, step=0)  # all is imported now
if os.getuid() == 0:  # who may do anything
    os.setuid(pwd.getpwnam("nobody").pw_uid)
if sys.argv[3:]:
    save_checkpoint(path, step=1)
    os.chmod(path, 0o444)
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(path, step=2)
"""


@pytest.mark.slow
def test_what_a_killed_process_has_left_is_taken_over(tmp_path: Path) -> None:
    """Also beside a checkpoint that nobody may write to."""
    (script := tmp_path / "script.py").write_text(REPLACES)
    (folder := tmp_path / "run").mkdir()
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o755)
    folder.chmod(0o777)
    command = [sys.executable, script, folder / "a.pt", tmp_path / "unused.pt"]
    assert subprocess.run([*command, "dies"], timeout=60).returncode == -signal.SIGKILL
    assert sorted(os.listdir(folder)) == [".a.pt.new", "a.pt"]
    subprocess.run(command, timeout=60, check=True)
    assert os.listdir(folder) == ["a.pt"]
    assert load_checkpoint(folder / "a.pt")["step"] == 2
