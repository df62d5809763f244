"""SLURM as it is used, on three nodes of the laboratory: uneven steps, arrays, allocations, notebooks, `scancel`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import laboratory, slurm
from tests.support.laboratory import Node
from tests.support.launchers import PYTHON, environ, run, told_by_ranks, wait_for_files
from tests.support.paths import SUPPORT

pytestmark = pytest.mark.slow

RANK = SUPPORT / "launched_rank.py"
PREEMPTED, NOTEBOOK = RANK.with_name("preempted.py"), RANK.with_name("notebook.py")
ALONE = "from nn_parallel import initialize_ddp as i; print(i().launcher, i().world_size)"


class Cluster(NamedTuple):
    """Three nodes, and what the commands of SLURM need in their environment."""

    nodes: list[Node]
    variables: dict[str, str]

    def run(self, folder: Path, *command: str) -> str:
        """What ``command`` prints on the first node, in ``folder``."""
        return run(self.nodes[0].command(["env", "-C", str(folder), *command]), environ(**self.variables), folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not laboratory.is_possible() or not slurm.is_there():
        pytest.skip("needs root, iproute2 and SLURM (munge, slurmctld, slurmd, slurm-client)")
    folder = tmp_path_factory.mktemp("cluster")
    with laboratory.laboratory(folder, 3) as nodes, slurm.slurm(folder, nodes) as variables:
        yield Cluster(nodes, variables)


def places(folder: Path, ranks: int) -> list[list[int]]:
    """Of each rank: rank, world size, local rank, local world size, node."""
    return [seen["place"] for seen in told_by_ranks(folder, ranks)]


def test_a_step_with_uneven_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Three ranks on the first node, one on each other."""
    cluster.run(tmp_path, "srun", "-N3", "--ntasks=5", PYTHON, str(RANK), str(tmp_path), "world")
    first = [[rank, 5, rank, 3, 0] for rank in range(3)]
    assert places(tmp_path, 5) == [*first, [3, 5, 0, 1, 1], [4, 5, 0, 1, 2]]
    assert [seen["sum"] for seen in told_by_ranks(tmp_path, 5)] == [5.0] * 5


def test_the_jobs_of_an_array_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    """They run at the same time on the same nodes."""
    for number in "01":
        (tmp_path / number).mkdir()
    step = f"srun {PYTHON} {RANK} {tmp_path}/$SLURM_ARRAY_TASK_ID world && touch done.$SLURM_ARRAY_TASK_ID"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{step}\n")
    cluster.run(tmp_path, "sbatch", "--array=0-1", "-N2", "--ntasks=2", "--output=%a.out", "job.sh")
    wait_for_files(tmp_path, "done.*", 2)
    for number in "01":
        assert places(tmp_path / number, 2) == [[0, 2, 0, 1, 0], [1, 2, 0, 1, 1]]


def test_in_an_allocation_a_script_is_alone(cluster: Cluster, tmp_path: Path) -> None:
    """``salloc`` asks for nodes and starts no ranks; a step in it does."""
    allocation = ["salloc", "--quiet", "-N2", "--ntasks=2"]
    assert cluster.run(tmp_path, *allocation, PYTHON, "-c", ALONE) == "none 1\n"
    cluster.run(tmp_path, *allocation, "srun", PYTHON, str(RANK), str(tmp_path), "failure")
    assert [seen["sum_after"] for seen in told_by_ranks(tmp_path, 2)] == [2.0, 2.0]


@pytest.mark.parametrize("how", ["salloc", "srun --pty"])
def test_a_notebook_in_an_allocation_is_alone(how: str, cluster: Cluster, tmp_path: Path) -> None:
    """Its kernel has no terminal, whichever way it was started; its pools work as ever."""
    cell = "from nn_parallel import *\nwith ParallelExecutor(num_workers=2, devices='cpu') as ex:\n"
    cell += "    print(initialize_ddp().launcher, initialize_ddp().world_size, ex.run(lambda: 7))"
    (tmp_path / "cells").write_text(json.dumps([cell]))
    (tmp_path / "run.sh").write_text(
        f'test "${{SLURM_PROCID:-0}}" = 0 || exit 0\n{PYTHON} {NOTEBOOK} < {tmp_path}/cells > {tmp_path}/told\n'
    )
    if how == "salloc":
        cluster.run(tmp_path, "salloc", "--quiet", "-N2", "--ntasks=2", "sh", "run.sh")
    else:  # the other task has no terminal
        shell = f"srun -N2 --ntasks=2 --pty sh {tmp_path}/run.sh"
        cluster.run(tmp_path, "script", "--quiet", "--return", "--command", shell, "/dev/null")
    assert json.loads((tmp_path / "told").read_text()) == [["none 1 [7, 7]\n", None]]


def test_a_cancelled_job_saves_before_it_ends(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM sends SIGCONT and SIGTERM, as it does at the time limit, and SIGKILL half a minute later."""
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\nsrun {PYTHON} {PREEMPTED} {tmp_path} 0.2\n")
    job = cluster.run(tmp_path, "sbatch", "--parsable", "-N2", "--ntasks=2", "--output=job.out", "job.sh").strip()
    wait_for_files(tmp_path, "*.step", 2)
    cluster.run(tmp_path, "scancel", job)
    wait_for_files(tmp_path, "*.stopped", 2)
    stopped = [(tmp_path / f"{rank}.stopped").read_text() for rank in range(2)]
    assert len(set(stopped)) == 1, (tmp_path / "job.out").read_text()
    assert (tmp_path / "last.pt").exists()
