"""`verify_ddp_setup` and `nn-parallel doctor`: what works, and what to do about the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nn_parallel import verify_ddp_setup
from tests.support.command_line import clean_environment, run_command
from tests.support.paths import ROOT
from tests.support.ranks import free_port


@pytest.mark.slow
def test_the_doctor_alone() -> None:
    """A line for each part, all of them good here, and status 0."""
    done = run_command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [re.match(r"(\w+) +(\S.*?)  ", line) for line in done.stdout.splitlines() if not line.startswith(" ")]
    found = {part[2]: part[1] for part in parts if part}
    assert set(found) == {"launch", "software", "devices", "workers", "gloo on cpu"}
    assert set(found.values()) == {"ok"}
    assert re.search(r"all_reduce of 16 MiB among 2 ranks in [\d.]+ ms, [\d.e+-]+ GB/s", done.stdout)
    report = verify_ddp_setup()
    assert report
    assert "gloo on cpu" in str(report)


@pytest.mark.slow
def test_the_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken launch environment, and an interface that does not exist: failed, what it is, and status 1."""
    broken = run_command("doctor", WORLD_SIZE="2")
    assert broken.returncode == 1
    assert re.match(r"failed +launch +WORLD_SIZE=2 is set, RANK, MASTER_ADDR and MASTER_PORT are not", broken.stdout)
    wrong = run_command("doctor", GLOO_SOCKET_IFNAME="nowhere0")
    assert wrong.returncode == 1
    assert re.search(r"^failed +workers on cpu .*", wrong.stdout, re.MULTILINE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = verify_ddp_setup()
    assert not report
    assert re.match(r"failed +launch +WORLD_SIZE=2 is set", str(report))


OLD_TORCH = """
import torch

def refuse(*_):
    raise RuntimeError("Cannot access accelerator device when none is available.")

torch.__version__ = "2.7.1+cu126"
torch.accelerator.current_accelerator = refuse
"""


@pytest.mark.slow
def test_the_doctor_of_an_old_torch(tmp_path: Path) -> None:
    """It says which one is needed, and tries nothing with it; a stand-in for 2.7 where there is no accelerator."""
    (tmp_path / "sitecustomize.py").write_text(OLD_TORCH)
    done = run_command("doctor", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert (done.returncode, done.stderr) == (1, "")
    launch, software, advice = done.stdout.splitlines()
    assert launch.startswith("ok ")
    assert re.match(r"failed +software +Python .*, torch 2\.7\.1\+cu126, nn_parallel ", software)
    assert advice.strip() == "-> install torch >= 2.11"


@pytest.mark.slow
def test_the_doctor_says_for_whom_it_waits() -> None:
    """Each line is there as soon as it is known, also where the other rank never comes."""
    env = clean_environment() | {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "nn_parallel", "doctor"], env=env, stdout=subprocess.PIPE, text=True
    ) as doctor:
        try:
            assert doctor.stdout is not None
            lines = iter(doctor.stdout.readline, "")
            waits = next(line for line in lines if line.startswith("..."))
        finally:
            doctor.kill()
    assert re.fullmatch(r"\.\.\. +rendezvous +for 2 ranks at 127.0.0.1:\d+, up to 60 s\n", waits)


@pytest.mark.slow
def test_the_doctor_under_a_launcher() -> None:
    """Each rank takes part, one of them prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*command, "-m", "nn_parallel", "doctor"], env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ok +rendezvous +2 ranks in", done.stdout, re.MULTILINE)) == 1
    assert "by torchrun: rank 0 of 2, local rank 0 of 2, on node 0" in done.stdout
