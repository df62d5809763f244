"""The command line, run as a user runs it; with made-up GPUs where it needs some."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import nn_parallel
from nn_parallel import doctor
from tests.support.command_line import clean_environment, run_command
from tests.support.paths import ROOT
from tests.support.ranks import free_port

FAKE = """
import sys
from tests.support import fake_nvml
gpus = [fake_nvml.gpu(0, 10_000), fake_nvml.gpu(1, 20_000), {"uuid": "GPU-22ab-2"}]
sys.modules[__name__] = fake_nvml.Nvml(*gpus)
"""
UUIDS = ("GPU-00ab-0", "GPU-11ab-1", "GPU-22ab-2")


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with three GPUs, one of which tells nothing of itself, as far as NVML knows."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pynvml.py").write_text(FAKE)
    path = os.pathsep.join([str(tmp_path / "fake"), str(ROOT)])
    return {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}


@pytest.mark.slow
def test_the_table_of_gpus(fake: dict[str, str]) -> None:
    """A line for each, a dash for what is not told, and which are hidden from this process."""
    done = run_command("gpus", CUDA_VISIBLE_DEVICES="2,0", **fake)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["GPU", "name", "free", "MiB", "of", "MiB", "busy", "%", "°C", "UUID"],
        ["0", "NVIDIA", "Test", "10000", "80000", "0", "40", "GPU-00ab-0"],
        ["1", "NVIDIA", "Test", "20000", "80000", "0", "41", "GPU-11ab-1", "(hidden)"],
        ["2", "-", "-", "-", "-", "-", "GPU-22ab-2"],
    ]


@pytest.mark.slow
def test_gpus_as_json(fake: dict[str, str]) -> None:
    """All that is known of each, for a program."""
    told = json.loads(run_command("gpus", "--json", **fake).stdout)
    assert [gpu["uuid"] for gpu in told] == list(UUIDS)
    assert told[1] == {
        "index": 1,
        "uuid": "GPU-11ab-1",
        "name": "NVIDIA Test",
        "memory_total_mb": 80_000,
        "memory_free_mb": 20_000,
        "utilization": 0,
        "temperature": 41,
        "processes": [101],
        "is_visible": True,
    }


@pytest.mark.slow
def test_gpus_chosen_for_cuda(fake: dict[str, str]) -> None:
    """What is printed is a value for CUDA_VISIBLE_DEVICES, and nothing but that."""
    assert run_command("gpus", "--auto", "2", **fake).stdout == "GPU-11ab-1,GPU-00ab-0\n"
    done = run_command("gpus", "--auto", "2", "--min-memory", "15000", **fake)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(
        "2 GPUs were asked for, and 1 can be had: .*GPU 0 has 10000 MiB free, fewer than 15000", done.stderr
    )


@pytest.mark.slow
def test_gpus_chosen_on_a_terminal(fake: dict[str, str]) -> None:
    """It shows the table, asks, and prints the choice alone into the pipe."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "nn_parallel", "gpus", "--choose"]
    try:
        os.write(ours, b"1-2\n")
        done = subprocess.run(
            command, env=clean_environment() | fake, stdin=theirs, capture_output=True, text=True, timeout=100
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout == "GPU-11ab-1,GPU-22ab-2\n"
    assert done.stderr.startswith("GPU  name")
    assert done.stderr.endswith("Which (0,2-3 or all)? ")
    refused = run_command("gpus", "--choose", **fake)
    assert refused.returncode == 1
    assert "--choose asks on a terminal, and there is none: use --auto N" in refused.stderr


@pytest.mark.slow
def test_without_a_driver(fake: dict[str, str], tmp_path: Path) -> None:
    """One line that says so, on the side where it is not taken for a value, and no failure."""
    (tmp_path / "fake" / "pynvml.py").write_text("def nvmlInit(): raise OSError('no library')")
    done = run_command("gpus", **fake)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "No NVIDIA GPU can be seen: no library.\n"
    auto = run_command("gpus", "--auto", "1", **fake)
    assert (auto.returncode, auto.stdout) == (1, "")
    assert auto.stderr == "nn-parallel: 1 GPUs were asked for, and 0 can be had: NVML sees none.\n"


SCRIPT = """
import os, sys
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    print(sys.argv[2:], *(os.environ.get(name) for name in names), file=file)
sys.exit(len(sys.argv) > 3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_run_starts_a_rank_per_core_or_gpu(script: Path, fake: dict[str, str], tmp_path: Path) -> None:
    """Without a number: as many as there are; with a selection of GPUs, these; and the cores are shared out."""
    cores = len(os.sched_getaffinity(0))
    done = run_command("run", str(script), str(tmp_path), "--nproc")  # what comes after the script is the script's
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(cores)] == [
        f"['--nproc'] {rank} {cores} 1 None\n" for rank in range(cores)
    ]
    done = run_command("run", "--gpus", "2,0", str(script), str(tmp_path), **fake)
    assert done.returncode == 0, done.stderr
    threads = max(1, cores // 2)
    assert (tmp_path / "1").read_text() == f"[] 1 2 {threads} GPU-22ab-2,GPU-00ab-0\n"


@pytest.mark.slow
def test_run_passes_on_what_is_torchruns(script: Path, tmp_path: Path) -> None:
    """A module, a port, a number of ranks; and the status of ranks that fail."""
    options = ["--nproc=1", f"--master-port={free_port()}", "--nnodes=1"]
    path = f"{tmp_path}:{ROOT}"
    done = run_command("run", *options, "-m", "script", str(tmp_path), "x", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").read_text().startswith("['x'] 0 1 ")
    done = run_command("run", *options, str(script), str(tmp_path), "x", "fail")
    assert done.returncode == 1
    assert "exitcode  : 1" in done.stderr


@pytest.mark.slow
def test_run_with_what_cannot_be(script: Path) -> None:
    """GPUs that are not there; no ranks; nothing to run; and the help says what there is."""
    done = run_command("run", "--gpus", "9", str(script))
    assert done.returncode == 1
    assert "nn-parallel: '9' names no GPU: there is no GPU that NVML can see." in done.stderr
    for ranks in ("0", "-1"):
        done = run_command("run", f"--nproc={ranks}", str(script))
        assert done.returncode == 2
        assert f"nn-parallel run: error: --nproc={ranks} must be at least 1" in done.stderr
    assert run_command("run").returncode == 2
    told = run_command("run", "--help").stdout
    assert "usage: nn-parallel run" in told
    assert "--gpus SEL" in told


def test_the_version_is_the_same_everywhere() -> None:
    """As the package, its metadata and the command line say it."""
    assert nn_parallel.__version__ == metadata.version("nn_parallel")
    assert run_command("--version").stdout == f"nn-parallel {nn_parallel.__version__}\n"


def test_the_versions_are_the_same_everywhere() -> None:
    """What pip installs, the classifiers list, the doctor accepts and the README says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    torch = ".".join(map(str, doctor.OLDEST_TORCH))
    assert [each for each in project["dependencies"] if each.startswith("torch")] == [f"torch>={torch}"]
    assert re.findall(r"torch ≥ ([\d.]*\d)", readme) == [torch]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">={pythons[0]}"
    assert re.findall(r"Python\s(3\.\d+) to (3\.\d+)", readme) == [(pythons[0], pythons[-1])]


@pytest.mark.slow
def test_the_versions_have_been_tested() -> None:
    """Each Python that is declared has passed with the oldest torch and with the newest one that the README names."""
    readme, record = ((ROOT / name).read_text() for name in ("README.md", "docs/project/tested_on.md"))
    [(first, last)] = re.findall(r"Python\s3\.(\d+) to 3\.(\d+)", readme)
    [(oldest, newest)] = re.findall(r"torch ≥ (\d+\.\d+), tested on CPU up to torch (\d+\.\d+)", readme)
    passed = set(re.findall(r"^\| 3\.(\d+)\.\d+ \| (\d+\.\d+)\.\S+ \| \d+ passed", record, re.MULTILINE))
    assert {(str(minor), torch) for minor in range(int(first), int(last) + 1) for torch in (oldest, newest)} <= passed


@pytest.mark.slow
def test_a_script_that_fails_under_run(tmp_path: Path) -> None:
    """Its own traceback is shown, and torchrun's table, and nothing of ours."""
    (tmp_path / "script.py").write_text("raise ValueError('bad batch')")
    done = run_command("run", "--nproc=1", str(tmp_path / "script.py"))
    assert done.returncode == 1
    assert "ValueError: bad batch" in done.stderr
    assert "Root Cause (first observed failure)" in done.stderr
    assert "nn_parallel" not in done.stderr.replace(str(ROOT), "")
