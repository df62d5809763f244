"""Where there is little room: few descriptors, a small /dev/shm, nothing to write to; and however a script is started.

Below a deleted working directory torch itself ends the process, with its first operation (oneMKL finds its libraries by
it).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import torch
import torch.distributed as dist
from nn_parallel import ParallelExecutor, RankError, initialize_ddp

def check(holds):  # no assert: one script runs without asserts
    if not holds:
        raise SystemExit("wrong")

def work(x):
    rank, total = initialize_ddp().rank, torch.ones(1)
    dist.all_reduce(total)
    return rank, total.item(), x.sum().item()

workers = int(os.environ.get("WORKERS", "2"))
with ParallelExecutor(num_workers=workers, devices="cpu") as ex:
    check(ex.run(work, torch.ones(1 << 20)) == [(rank, workers, 1 << 20) for rank in range(workers)])
    try:
        ex.run(int, "no number")
    except RankError as error:
        check(isinstance(error.exceptions[0], ValueError))
    check(list(ex.map(abs, range(-4, 0))) == [4, 3, 2, 1])
print("all is well")
"""
IN_NAMESPACE = ["unshare", "--mount", "sh", "-ec"]
READ_ONLY = "for each in /tmp /var/tmp; do mount --bind $each $each; mount -o remount,ro,bind $each; done; "
SHELLS = {
    "64 descriptors": ["sh", "-ec", "ulimit -n 64; exec {python} {script}"],
    "1 MiB of /dev/shm": [*IN_NAMESPACE, "mount -t tmpfs -o size=1M none /dev/shm; exec {python} {script}"],
    "no temporary folder to write to": [*IN_NAMESPACE, READ_ONLY + "cd /; exec {python} {script}"],
    "64 workers": ["env", "WORKERS=64", "{python}", "{script}"],
    "the first process of a container": ["unshare", "--pid", "--fork", "--mount-proc", "{python}", "{script}"],
    "from the input, without asserts": ["sh", "-ec", "{python} -O < {script}"],
    "as an argument, isolated, no home": ["sh", "-ec", 'unset HOME; {python} -I -c "$(cat {script})"'],
}


def _run(command: list[str]) -> str:
    if "unshare" in command and (os.geteuid() != 0 or shutil.which("unshare") is None):
        pytest.skip("needs root, to make namespaces")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", SHELLS.values(), ids=SHELLS)
def test_a_pool_works(command: list[str], tmp_path: Path) -> None:
    """A large argument, a collective, a failure and a map."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert _run([part.format(python=sys.executable, script=script) for part in command]) == "all is well\n"


def test_a_pool_works_in_an_archive(tmp_path: Path) -> None:
    """A script in a zip file is `__main__` like any other."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(SCRIPT)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    assert _run([sys.executable, str(tmp_path / "app.pyz")]) == "all is well\n"
