"""Real launchers start real ranks: torchrun, Open MPI, Hydra, SLURM, and torchrun on two nodes.

The nodes are two network namespaces, SLURM has one node. A launcher that is not installed is a skipped test, which
fails where CI is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
import slurm
import torch
from ranks import free_port

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("launched_rank.py")
ROOT = Path(__file__).parent.parent
PREEMPTED = RANK.with_name("preempted.py")
DIGITS = ROOT / "docs" / "examples" / "digits.py"
PYTHON = sys.executable
ENDS_WITHIN_S = 100.0
# What a launcher that started these tests may have told them.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC", "SLURM", "OMPI_", "PMI", "OMP_")

Start = Callable[[int, list[str]], list[str]]  # the command that starts so many ranks of a script and its arguments


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if not slurm.is_there():
        pytest.skip("needs SLURM (munge, slurmctld, slurmd, slurm-client) and root")
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.fixture
def nodes() -> Iterator[namespaces.Nodes]:
    if not namespaces.are_possible():
        pytest.skip("needs root and iproute2, to make network namespaces")
    with namespaces.two_nodes() as both:
        yield both


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
    command = [_installed("mpirun.openmpi"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [*command, "-n", str(ranks), PYTHON, *script]


def hydra(ranks: int, script: list[str]) -> list[str]:
    return [_installed("mpiexec.hydra"), "-n", str(ranks), PYTHON, *script]


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


def _installed(program: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    return program


def _environ(**more: str) -> dict[str, str]:
    """Our own, but for what concerns a launch; and one thread for each rank."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def _finish(processes: list[subprocess.Popen[str]], within_s: float = ENDS_WITHIN_S) -> list[tuple[int, str]]:
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


def _popen(command: list[str], environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
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


def _run(command: list[str], environ: dict[str, str], folder: Path) -> str:
    [(status, printed)] = _finish([_popen(command, environ, folder)])
    assert status == 0, printed
    return printed


def _seen(folder: Path, ranks: int) -> list[Any]:
    """What each rank has written, in rank order."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _wait_for_files(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S / 2
    while len(list(folder.glob(pattern))) < count and time.monotonic() < deadline:
        time.sleep(0.05)  # between two looks


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_script_under_every_launcher(name: str, tmp_path: Path) -> None:
    """Each rank knows its place, and collectives, `on_rank`, `on_local_rank`, an executor and errors work."""
    start, said = LAUNCHERS[name]
    _run(start(2, [str(RANK), str(tmp_path), "world"]), _environ(), tmp_path)
    _check_world(tmp_path, said, virtual="virtual" in name)


def test_one_script_under_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    """The same as tasks of ``srun``."""
    _run(srun(2, [str(RANK), str(tmp_path), "world"]), _environ(**cluster), tmp_path)
    _check_world(tmp_path, "slurm")


def _check_world(folder: Path, launcher: str, *, virtual: bool = False) -> None:
    for rank, seen in enumerate(_seen(folder, 2)):
        assert seen["place"] == [rank, 2, rank, 2, 0]
        assert (seen["launcher"], seen["sum"], seen["broadcast"]) == (launcher, 2.0, "from rank 0")
        assert (seen["ranks"], seen["mapped"]) == ([0, 1], [0, 10, 20, 30, 40])
        failure = seen["failure"]
        assert "failed on rank 1 of 2: ValueError: a bad batch" in failure["told"]
        assert (failure["cause"], failure["sum_after"]) == (1, 2.0)
        assert failure["seconds"] < 5
        assert seen["cuda_visible_devices"] == (str(rank) if virtual else None)
    assert [path.name for path in folder.glob("*.first_of_node")] == ["0.first_of_node"]


@pytest.mark.parametrize("start", [open_mpi, hydra, srun])
def test_the_doctor_under_a_launcher(start: Start, cluster: dict[str, str], tmp_path: Path) -> None:
    """All ranks take part, one of them prints, and all is well."""
    printed = _run(start(2, ["-m", "nn_parallel", "doctor"]), _environ(**cluster), tmp_path)
    assert printed.count("rendezvous   2 ranks in ") == 1
    assert "rank 0 of 2, local rank 0 of 2, on node 0" in printed


def test_a_batch_script_starts_a_step(cluster: dict[str, str], tmp_path: Path) -> None:
    """``srun`` inside the script is a launch; the script itself, and a step of one task, are alone."""
    alone = f"{PYTHON} -c 'from nn_parallel import initialize_ddp as i; print(i().launcher, i().world_size)'"
    lines = ["#!/bin/sh", alone, f"srun --ntasks=1 {alone}", f"srun {PYTHON} {RANK} {tmp_path} world"]
    (tmp_path / "job.sh").write_text("\n".join(lines))
    command = ["sbatch", "--wait", "--ntasks=2", "--output=job.out", "job.sh"]
    _run(command, _environ(**cluster), tmp_path)
    assert (tmp_path / "job.out").read_text().split("\n")[:2] == ["none 1", "none 1"]
    assert [seen["place"] for seen in _seen(tmp_path, 2)] == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 0]]


def test_an_interactive_shell_is_no_launch(cluster: dict[str, str], tmp_path: Path) -> None:
    """What is started at its terminal is alone, though the step has two tasks; a step inside it is a launch."""
    alone = (
        f"{PYTHON} -c 'from nn_parallel import initialize_ddp as i; print(i().launcher)' > {tmp_path}/alone < /dev/null"
    )
    step = f"srun --overlap --ntasks=2 {PYTHON} {RANK} {tmp_path} failure"
    # The other task has no terminal, and its shell nothing to read.
    (tmp_path / "shell.sh").write_text(f'test "$SLURM_PROCID" = 0 || exit 0\n{alone}\n{step}\n')
    shell = f"srun --ntasks=2 --pty sh {tmp_path}/shell.sh"
    _run(["script", "--quiet", "--return", "--command", shell, "/dev/null"], _environ(**cluster), tmp_path)
    assert (tmp_path / "alone").read_text() == "none\n"
    assert [seen["sum_after"] for seen in _seen(tmp_path, 2)] == [2.0, 2.0]


def test_two_steps_of_a_job_do_not_meet(cluster: dict[str, str], tmp_path: Path) -> None:
    """They run at the same time on one host, and each finds its own ranks."""
    steps = []
    for name in "ab":
        (tmp_path / name).mkdir()
        steps.append(f"srun --overlap --ntasks=2 {PYTHON} {RANK} {tmp_path / name} failure & p{name}=$!")
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/sh", *steps, "wait $pa && wait $pb"]))
    _run(["sbatch", "--wait", "--ntasks=4", "--output=job.out", "job.sh"], _environ(**cluster), tmp_path)
    for name in "ab":
        assert [seen["sum_after"] for seen in _seen(tmp_path / name, 2)] == [2.0, 2.0]


def _on_two_nodes(
    nodes: namespaces.Nodes, folder: Path, script: list[str], environ: dict[str, str]
) -> list[subprocess.Popen[str]]:
    """Two ranks on each, by ``nn-parallel run``, which hands all these options on to torchrun."""
    torchrun = [PYTHON, "-m", "nn_parallel", "run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += [f"--master-addr={namespaces.ADDRESSES[0]}", "--master-port=29511"]
    environ = environ | {"GLOO_SOCKET_IFNAME": namespaces.INTERFACE}
    return [
        _popen(nodes.command(node, [*torchrun, f"--node-rank={node}", *script]), environ, folder) for node in range(2)
    ]


def test_two_nodes(nodes: namespaces.Nodes, tmp_path: Path) -> None:
    """Four ranks on two nodes know their places, work together, and all hear of one that fails on the other node."""
    for status, printed in _finish(_on_two_nodes(nodes, tmp_path, [str(RANK), str(tmp_path), "world"], _environ())):
        assert status == 0, printed
    for rank, seen in enumerate(_seen(tmp_path, 4)):
        assert seen["place"] == [rank, 4, rank % 2, 2, rank // 2]
        assert (seen["sum"], seen["broadcast"]) == (4.0, "from rank 0")
        assert (seen["ranks"], seen["mapped"]) == ([0, 1, 2, 3], [0, 10, 20, 30, 40])
        failure = seen["failure"]
        assert "failed on rank 3 of 4: ValueError: a bad batch" in failure["told"]
        assert (failure["cause"], failure["sum_after"]) == (3, 4.0)
        assert failure["seconds"] < 5
    first = sorted(path.name for path in tmp_path.glob("*.first_of_node"))
    assert first == ["0.first_of_node", "2.first_of_node"]


@pytest.mark.parametrize("how", ["collective", "on_rank"])
def test_a_node_that_is_cut_off(how: str, nodes: namespaces.Nodes, tmp_path: Path) -> None:
    """Both nodes live and cannot reach each other: each rank gets an error within the timeout of 8 s, and none hangs.

    Rank 3 is asleep in its function for 10 s: it hears of it after that.
    """
    processes = _on_two_nodes(nodes, tmp_path, [str(RANK), str(tmp_path), "cut_off", how], _environ())
    _wait_for_files(tmp_path, "*.ready", 4)
    cut = time.time()
    nodes.cut()
    _wait_for_files(tmp_path, "*.json", 4)
    printed = [text for _, text in _finish(processes, 0)]  # the agents of torchrun wait for each other much longer
    for rank, seen in enumerate(_seen(tmp_path, 4)):
        gone = "ended, or its node went out of reach" if rank < 2 else "The store through which the ranks talk is gone"
        assert gone in seen["told"], (rank, seen, printed)
        asleep = 10 if (how, rank) == ("on_rank", 3) else 0
        assert seen["at"] - cut < asleep + 8 + 2 * (rank >= 2), (rank, seen)


def test_an_elastic_restart_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    """A killed rank: torchrun starts all of them again, and they go on where rank 0 has saved."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, options in ((whole, []), (cut, ["--max-restarts=1"])):
        folder.mkdir()
        _run(torchrun(*options)(2, [str(RANK), str(folder), "resume", *options]), _environ(), folder)
    resumed, uninterrupted = _seen(cut, 2), _seen(whole, 2)
    assert [(seen["attempt"], seen["steps"]) for seen in resumed] == [("1", [2])] * 2
    assert [(seen["attempt"], seen["steps"]) for seen in uninterrupted] == [("0", [0, 1, 2])] * 2
    assert [seen["weights"] for seen in resumed] == [seen["weights"] for seen in uninterrupted]


def test_a_job_that_slurm_signals_goes_on_when_it_is_requeued(cluster: dict[str, str], tmp_path: Path) -> None:
    """Both ranks save at the same step and leave by 75, and the script requeues the job.

    By ``scancel``: SLURM sends the same signal before a time limit, but looks only every half minute.
    """
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    _run(["srun", "--ntasks=2", PYTHON, str(PREEMPTED), str(whole), "0"], _environ(**cluster), tmp_path)
    step = f"srun {PYTHON} {PREEMPTED} {stopped} 0.2"
    requeue = f"if [ $? -eq 75 ]; then scontrol requeue $SLURM_JOB_ID; else touch {tmp_path}/done; fi"
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/sh", step, requeue]))
    command = ["sbatch", "--parsable", "--ntasks=2", "--requeue", "--output=job.out", "--open-mode=append", "job.sh"]
    job = _run(command, _environ(**cluster), tmp_path).strip()
    _wait_for_files(stopped, "*.step", 2)
    _run(["scancel", "--signal=USR1", job], _environ(**cluster), tmp_path)
    _wait_for_files(tmp_path, "done", 1)
    steps = [(stopped / f"{rank}.stopped").read_text() for rank in range(2)]
    assert len(set(steps)) == 1
    assert 0 < int(steps[0]) < 24
    ends = [torch.load(folder / "last.pt") for folder in (whole, stopped)]
    assert [end["step"] for end in ends] == [24, 24], (tmp_path / "job.out").read_text()
    for name, values in ends[0]["model"].items():
        assert torch.equal(values, ends[1]["model"][name])


@pytest.mark.timeout(400)
def test_digits_comes_out_alike_however_it_is_started(
    cluster: dict[str, str], nodes: namespaces.Nodes, tmp_path: Path
) -> None:
    """One epoch on four ranks: the same parameters within 1e-6 from the executor and from every launcher."""
    _installed("mpirun.openmpi")
    starts = {"python": [PYTHON, str(DIGITS), "--ranks=4"]}
    for name, start in {"torchrun": torchrun(), "mpirun": open_mpi, "srun": srun}.items():
        starts[name] = start(4, [str(DIGITS)])
    for name, command in starts.items():
        _run([*command, "--epochs=1", f"--out={tmp_path / name}"], _environ(**cluster), tmp_path)
    script = [str(DIGITS), "--epochs=1", f"--out={tmp_path / 'two nodes'}"]
    for status, printed in _finish(_on_two_nodes(nodes, tmp_path, script, _environ())):
        assert status == 0, printed
    expected = torch.load(tmp_path / "python" / "digits.pt", weights_only=True)
    for name in ("torchrun", "mpirun", "srun", "two nodes"):
        found = torch.load(tmp_path / name / "digits.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=f"{name}: {key} differs")
