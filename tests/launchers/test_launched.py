"""Real launchers start real ranks: torchrun, Open MPI, Hydra, SLURM, and torchrun on two nodes.

The nodes are those of the laboratory; SLURM has one node, and for digits two. A launcher that is not installed is a
skipped test, which fails where CI is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import slurm
from tests.support.laboratory import Node
from tests.support.launchers import (
    LAUNCHERS,
    PYTHON,
    Start,
    environ,
    finish,
    hydra,
    on_nodes,
    open_mpi,
    popen,
    run,
    srun,
    told_by_ranks,
    torchrun,
    wait_for_files,
)
from tests.support.paths import EXAMPLES, SUPPORT

pytestmark = pytest.mark.slow

RANK = SUPPORT / "launched_rank.py"
PREEMPTED = RANK.with_name("preempted.py")
DIGITS = EXAMPLES / "digits.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if not slurm.is_there():
        pytest.skip("needs SLURM (munge, slurmctld, slurmd, slurm-client) and root")
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_script_under_every_launcher(name: str, tmp_path: Path) -> None:
    """Each rank knows its place, and collectives, `on_rank`, `on_local_rank`, an executor and errors work."""
    start, said = LAUNCHERS[name]
    run(start(2, [str(RANK), str(tmp_path), "world"]), environ(), tmp_path)
    _check_world(tmp_path, said, virtual="virtual" in name)


def test_one_script_under_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    """The same as tasks of ``srun``."""
    run(srun(2, [str(RANK), str(tmp_path), "world"]), environ(**cluster), tmp_path)
    _check_world(tmp_path, "slurm")


def _check_world(folder: Path, launcher: str, *, virtual: bool = False) -> None:
    for rank, seen in enumerate(told_by_ranks(folder, 2)):
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
    printed = run(start(2, ["-m", "nn_parallel", "doctor"]), environ(**cluster), tmp_path)
    assert len(re.findall(r"^ok +rendezvous +2 ranks in ", printed, re.MULTILINE)) == 1
    assert "rank 0 of 2, local rank 0 of 2, on node 0" in printed


def test_a_batch_script_starts_a_step(cluster: dict[str, str], tmp_path: Path) -> None:
    """``srun`` inside the script is a launch; the script itself, and a step of one task, are alone."""
    alone = f"{PYTHON} -c 'from nn_parallel import initialize_ddp as i; print(i().launcher, i().world_size)'"
    lines = ["#!/bin/sh", alone, f"srun --ntasks=1 {alone}", f"srun {PYTHON} {RANK} {tmp_path} world"]
    (tmp_path / "job.sh").write_text("\n".join([*lines, "touch done"]))
    run(["sbatch", "--ntasks=2", "--output=job.out", "job.sh"], environ(**cluster), tmp_path)
    wait_for_files(tmp_path, "done", 1)  # sooner than `sbatch --wait`, which looks every half minute
    assert (tmp_path / "job.out").read_text().split("\n")[:2] == ["none 1", "none 1"]
    assert [seen["place"] for seen in told_by_ranks(tmp_path, 2)] == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 0]]


def test_an_interactive_shell_is_no_launch(cluster: dict[str, str], tmp_path: Path) -> None:
    """What is started at its terminal is alone, though the step has two tasks; a step inside it is a launch."""
    alone = (
        f"{PYTHON} -c 'from nn_parallel import initialize_ddp as i; print(i().launcher)' > {tmp_path}/alone < /dev/null"
    )
    step = f"srun --overlap --ntasks=2 {PYTHON} {RANK} {tmp_path} failure"
    # The other task has no terminal, and its shell nothing to read.
    (tmp_path / "shell.sh").write_text(f'test "$SLURM_PROCID" = 0 || exit 0\n{alone}\n{step}\n')
    shell = f"srun --ntasks=2 --pty sh {tmp_path}/shell.sh"
    run(["script", "--quiet", "--return", "--command", shell, "/dev/null"], environ(**cluster), tmp_path)
    assert (tmp_path / "alone").read_text() == "none\n"
    assert [seen["sum_after"] for seen in told_by_ranks(tmp_path, 2)] == [2.0, 2.0]


def test_two_jobs_of_hydra_do_not_meet(tmp_path: Path) -> None:
    """They run at the same time on one host, and no variable tells which is which."""
    jobs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        jobs.append(popen(hydra(2, [str(RANK), str(tmp_path / name), "failure"]), environ(), tmp_path))
    for status, printed in finish(jobs):
        assert status == 0, printed
    for name in "ab":
        assert [seen["sum_after"] for seen in told_by_ranks(tmp_path / name, 2)] == [2.0, 2.0]


def test_two_steps_of_a_job_do_not_meet(cluster: dict[str, str], tmp_path: Path) -> None:
    """They run at the same time on one host, and each finds its own ranks."""
    steps = []
    for name in "ab":
        (tmp_path / name).mkdir()
        steps.append(f"srun --overlap --ntasks=2 {PYTHON} {RANK} {tmp_path / name} failure & p{name}=$!")
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/sh", *steps, "wait $pa && wait $pb && touch done"]))
    run(["sbatch", "--ntasks=4", "--output=job.out", "job.sh"], environ(**cluster), tmp_path)
    wait_for_files(tmp_path, "done", 1)
    for name in "ab":
        assert [seen["sum_after"] for seen in told_by_ranks(tmp_path / name, 2)] == [2.0, 2.0]


def test_two_nodes(nodes: list[Node], tmp_path: Path) -> None:
    """Four ranks on two nodes know their places, work together, and all hear of one that fails on the other node."""
    for status, printed in finish(on_nodes(nodes, [2, 2], tmp_path, [str(RANK), str(tmp_path), "world"], environ())):
        assert status == 0, printed
    for rank, seen in enumerate(told_by_ranks(tmp_path, 4)):
        assert seen["place"] == [rank, 4, rank % 2, 2, rank // 2]
        assert (seen["sum"], seen["broadcast"]) == (4.0, "from rank 0")
        assert (seen["ranks"], seen["mapped"]) == ([0, 1, 2, 3], [0, 10, 20, 30, 40])
        failure = seen["failure"]
        assert "failed on rank 3 of 4: ValueError: a bad batch" in failure["told"]
        assert (failure["cause"], failure["sum_after"]) == (3, 4.0)
        assert failure["seconds"] < 5
    first = sorted(path.name for path in tmp_path.glob("*.first_of_node"))
    assert first == ["0.first_of_node", "2.first_of_node"]


def test_an_elastic_restart_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    """A killed rank: torchrun starts all of them again, and they go on where rank 0 has saved."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, options in ((whole, []), (cut, ["--max-restarts=1"])):
        folder.mkdir()
        run(torchrun(*options)(2, [str(RANK), str(folder), "resume", *options]), environ(), folder)
    resumed, uninterrupted = told_by_ranks(cut, 2), told_by_ranks(whole, 2)
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
    run(["srun", "--ntasks=2", PYTHON, str(PREEMPTED), str(whole), "0"], environ(**cluster), tmp_path)
    step = f"srun {PYTHON} {PREEMPTED} {stopped} 0.2"
    requeue = f"if [ $? -eq 75 ]; then scontrol requeue $SLURM_JOB_ID; else touch {tmp_path}/done; fi"
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/sh", step, requeue]))
    command = ["sbatch", "--parsable", "--ntasks=2", "--requeue", "--output=job.out", "--open-mode=append", "job.sh"]
    job = run(command, environ(**cluster), tmp_path).strip()
    wait_for_files(stopped, "*.step", 2)
    run(["scancel", "--signal=USR1", job], environ(**cluster), tmp_path)
    wait_for_files(tmp_path, "done", 1)
    steps = [(stopped / f"{rank}.stopped").read_text() for rank in range(2)]
    assert len(set(steps)) == 1
    assert 0 < int(steps[0]) < 24
    ends = [torch.load(folder / "last.pt") for folder in (whole, stopped)]
    assert [end["step"] for end in ends] == [24, 24], (tmp_path / "job.out").read_text()
    for name, values in ends[0]["model"].items():
        assert torch.equal(values, ends[1]["model"][name])


@pytest.mark.timeout(400)
def test_digits_comes_out_alike_however_it_is_started(
    cluster: dict[str, str], nodes: list[Node], tmp_path: Path
) -> None:
    """One epoch on two ranks: the same parameters within 1e-6 from the executor and from every launcher.

    By torchrun and srun on two nodes.
    """
    starts = {"python": [PYTHON, str(DIGITS), "--ranks=2"]}
    for name, start in {"mpirun": open_mpi, "mpiexec": hydra}.items():
        starts[name] = start(2, [str(DIGITS)])
    for name, command in starts.items():
        run([*command, "--epochs=1", f"--out={tmp_path / name}"], environ(**cluster), tmp_path)
    script = [str(DIGITS), "--epochs=1", f"--out={tmp_path / 'two nodes'}"]
    for status, printed in finish(on_nodes(nodes, [1, 1], tmp_path, script, environ())):
        assert status == 0, printed
    with slurm.slurm(tmp_path, nodes) as variables:
        step = [
            "srun",
            "-N2",
            "--ntasks=2",
            PYTHON,
            *script[:2],
            f"--out={tmp_path / 'srun -N2'}",
        ]
        run(nodes[0].command(step), environ(**variables), tmp_path)
    expected = torch.load(tmp_path / "python" / "digits.pt", weights_only=True)
    for name in (*list(starts)[1:], "two nodes", "srun -N2"):
        found = torch.load(tmp_path / name / "digits.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=f"{name}: {key} differs")
