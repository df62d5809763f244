"""The commands of real launchers, and how tests run them. Who lacks one skips the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.laboratory import Node
from tests.support.paths import ROOT
from tests.support.ranks import free_port

PYTHON = sys.executable
ENDS_WITHIN_S = 100.0
# What a launcher that started these tests may have told them.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC", "SLURM", "OMPI_", "PMI", "OMP_")

Start = Callable[[int, list[str]], list[str]]  # the command that starts so many ranks of a script and its arguments


def torchrun(*options: str) -> Start:
    def start(ranks: int, script: list[str]) -> list[str]:
        command = [PYTHON, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
        return [*command, *options, *script]

    return start


def launch_module(ranks: int, script: list[str]) -> list[str]:
    command = [PYTHON, "-W", "ignore", "-m", "torch.distributed.launch", f"--nproc-per-node={ranks}"]
    return [*command, f"--master-port={free_port()}", *script]


def nn_parallel_run(ranks: int, script: list[str]) -> list[str]:
    return [PYTHON, "-m", "nn_parallel", "run", f"--nproc={ranks}", *script]


def open_mpi(ranks: int, script: list[str]) -> list[str]:
    command = [installed("mpirun.openmpi"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [*command, "-n", str(ranks), PYTHON, *script]


def hydra(ranks: int, script: list[str]) -> list[str]:
    return [installed("mpiexec.hydra"), "-n", str(ranks), PYTHON, *script]


def srun(ranks: int, script: list[str]) -> list[str]:
    return ["srun", f"--ntasks={ranks}", PYTHON, *script]


LAUNCHERS: dict[str, tuple[Start, str]] = {
    "torchrun": (torchrun(), "torchrun"),
    "torchrun --virtual-local-rank": (torchrun("--virtual-local-rank"), "torchrun"),
    "torch.distributed.launch": (launch_module, "torchrun"),
    "nn-parallel run": (nn_parallel_run, "torchrun"),
    "mpirun": (open_mpi, "openmpi"),
    "mpiexec": (hydra, "hydra"),
}


def installed(program: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    return program


def environ(**more: str) -> dict[str, str]:
    """Our own, but for what concerns a launch; and one thread for each rank."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def finish(processes: list[subprocess.Popen[str]], within_s: float = ENDS_WITHIN_S) -> list[tuple[int, str]]:
    """The exit status of each, and what it printed; all are ended when the time is up."""
    deadline = time.monotonic() + within_s
    done = []
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            late = process.poll() is None
            if late:
                process.terminate()  # a launcher ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            status = process.wait()
            done.append((124 if late else status, process.stdout.read()))
            process.stdout.close()
    return done


def popen(command: list[str], environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environ,
        cwd=folder,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(command: list[str], environ: dict[str, str], folder: Path) -> str:
    [(status, printed)] = finish([popen(command, environ, folder)])
    assert status == 0, printed
    return printed


def told_by_ranks(folder: Path, ranks: int) -> list[Any]:
    """What each rank has written, in rank order."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (found := len(list(folder.glob(pattern)))) < count:
        assert time.monotonic() < deadline, f"{found} of {count} files {pattern} are there"
        time.sleep(0.05)  # between two looks


def on_nodes(
    nodes: list[Node], ranks_of: list[int], folder: Path, script: list[str], environ: dict[str, str]
) -> list[subprocess.Popen[str]]:
    """So many ranks on each, by ``nn-parallel run``, which hands all these options on to torchrun."""
    torchrun = [PYTHON, "-m", "nn_parallel", "run", f"--nnodes={len(nodes)}"]
    torchrun += [f"--master-addr={nodes[0].name}", "--master-port=29511"]
    return [
        popen(node.command([*torchrun, f"--nproc-per-node={ranks}", f"--node-rank={index}", *script]), environ, folder)
        for index, (node, ranks) in enumerate(zip(nodes, ranks_of, strict=True))
    ]
