"""The table of faults of several nodes: fault by launcher, in the laboratory. Nothing is left on any node.

Four ranks, on two nodes or on one, run a program that adds numbers up, `node_rank`, until something goes wrong. Each
fault is tried with one launcher by the slow tests, and with all of them by ``-m faults``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import laboratory, slurm
from tests.support.laboratory import Node
from tests.support.launchers import PYTHON, environ, finish, hydra, on_nodes, open_mpi, popen, torchrun, wait_for_files
from tests.support.node_rank import LOST_AFTER_S, TIMEOUT_S
from tests.support.paths import SUPPORT

RANK = [str(SUPPORT / "node_rank.py")]
PATH = re.compile(r"/\S*/tests/")  # of this machine
AT_ONCE_S, ENDS_SOON_S = 3.0, 10.0
GONE_WITHIN_S = 2 * LOST_AFTER_S + 1 + AT_ONCE_S  # see `end_if_unanswered`


class Job:
    """Running ranks: ``ranks_of`` each node, in order, or all on the first."""

    def __init__(
        self,
        nodes: list[Node],
        folder: Path,
        launcher: str,
        how: str,
        cluster: dict[str, str],
        ranks_of: tuple[int, ...] = (2, 2),
    ) -> None:
        self.nodes, self.folder, count = nodes, folder, sum(ranks_of)
        self._places = [node for node, ranks in enumerate(ranks_of) for _ in range(ranks)]
        if launcher not in ON_NODES:
            self._places = [0] * count
        script, variables = [*RANK, str(folder), how], environ(**cluster)
        if launcher == "torchrun on nodes":
            self.processes = on_nodes(nodes, list(ranks_of), folder, script, variables)
        else:
            self.processes = [popen(nodes[0].command(COMMANDS[launcher](script)), variables, folder)]
        wait_for_files(folder, "*.ready", count)

    def node_of(self, rank: int) -> Node:
        return self.nodes[self._places[rank]]

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = (self.folder / f"{rank}.ready").read_text()
        subprocess.run(self.node_of(rank).command(["kill", f"-{number}", pid]), check=True, timeout=10)

    def left(self) -> list[str]:
        """Return the command lines of its processes that still run, on nodes that are not switched off."""
        return [line for node in self.nodes if not node.is_off for line in node.processes() if RANK[0] in line]


class Fault(NamedTuple):
    """What goes wrong, as ranks are in a ``block`` or in a ``loop`` outside of all; what ranks then raise or print."""

    how: str
    cause: Callable[[Job], object]
    first: str = ""  # told by ranks 0 and 1; nothing: all goes on as if nothing had been
    second: str = ""  # by ranks 2 and 3
    within_s: float = AT_ONCE_S
    silent: tuple[int, ...] = ()  # ranks that can tell nothing
    ends: int | None = None  # the rank whose process ends: some launchers then end those beside it
    of_nodes: bool = False


def kill(job: Job) -> None:
    job.signal(3, signal.SIGKILL)


def stop(job: Job) -> None:
    job.signal(3, signal.SIGSTOP)


def kill_rank_0(job: Job) -> None:
    """It holds the store, but for torchrun."""
    job.signal(0, signal.SIGKILL)


def stop_rank_0(job: Job) -> None:
    job.signal(0, signal.SIGSTOP)


def stop_for_a_while(job: Job) -> None:
    """For longer than a node may be silent: its kernel still answers."""
    job.signal(3, signal.SIGSTOP)
    time.sleep(LOST_AFTER_S + 2)
    job.signal(3, signal.SIGCONT)


def cut_for_a_while(job: Job) -> None:
    """For less than a node may be silent."""
    job.nodes[1].cut()
    time.sleep(LOST_AFTER_S - 1)
    job.nodes[1].mend()


OUT_OF_REACH = f"went out of reach.*?its node has not answered for {LOST_AFTER_S:g} s"
FIRST_OUT, SECOND_OUT = (
    rf"Rank 0 \(pid \d+ on node1\) {OUT_OF_REACH}",
    rf"Rank [23] \(pid \d+ on node2\) {OUT_OF_REACH}",
)
# Rank 3 is killed, and torchrun then ends rank 2 beside it. Rank 0 may see both deaths at once.
ENDED, OUTSIDE = r"Rank [23] \(pid \d+ on node\d\) ended", r"On rank 3:\n.*?ValueError: a bad batch\n\nTherefore:\n"
RANK_0_ENDED = r"Rank 0( \(pid \d+ on node1\) ended|, which holds the store, is gone)"
TIMED_OUT = f"Timed out waiting {TIMEOUT_S * 1000:.0f}ms"
SILENT = rf"{TIMED_OUT}|Rank 0 \(pid \d+ on node1\), which holds the store, has not answered for"

FAULTS = {
    "an exception in a block": Fault("block", lambda job: job.tell("raise"), *["ValueError: a bad batch"] * 2),
    "an exception outside of blocks": Fault("loop", lambda job: job.tell("raise"), OUTSIDE, "a bad batch", ends=3),
    "SIGKILL in a block": Fault("block", kill, ENDED, ENDED, silent=(3,), ends=3),
    "SIGKILL outside of blocks": Fault("loop", kill, *[f"{ENDED}.*?Therefore:"] * 2, silent=(3,), ends=3),
    "SIGKILL of rank 0 in a block": Fault("block", kill_rank_0, RANK_0_ENDED, RANK_0_ENDED, silent=(0,), ends=0),
    "SIGSTOP of rank 0 in a block": Fault("block", stop_rank_0, SILENT, SILENT, TIMEOUT_S + AT_ONCE_S, (0,)),
    "SIGSTOP, and SIGCONT after 6 s": Fault("loop", stop_for_a_while),
    "SIGSTOP": Fault("block", stop, TIMED_OUT, TIMED_OUT, TIMEOUT_S + AT_ONCE_S, (3,)),
    "SIGSTOP outside of blocks": Fault(
        "loop", stop, TIMED_OUT, "Rank 3 is stopped by a signal", TIMEOUT_S + AT_ONCE_S, (3,)
    ),
    "the cable out for 3 s": Fault("loop", cut_for_a_while, of_nodes=True),
    "the cable out, in a block": Fault(
        "block", lambda job: job.nodes[1].cut(), SECOND_OUT, FIRST_OUT, GONE_WITHIN_S, of_nodes=True
    ),
    "the cable out, outside of blocks": Fault(
        "loop", lambda job: job.nodes[1].cut(), SECOND_OUT, FIRST_OUT, GONE_WITHIN_S, of_nodes=True
    ),
    "a node without power": Fault(
        "block", lambda job: job.nodes[1].power_off(), SECOND_OUT, "", GONE_WITHIN_S, (2, 3), of_nodes=True
    ),
}
HYDRA = "mpiexec (Hydra)"
COMMANDS = {
    "srun -N2": lambda script: ["srun", "-N2", "--ntasks=4", "--ntasks-per-node=2", PYTHON, *script],
    "torchrun": lambda script: torchrun()(4, script),
    "srun -N1": lambda script: ["srun", "-N1", "--ntasks=4", PYTHON, *script],
    "mpirun": lambda script: open_mpi(4, script),
    HYDRA: lambda script: hydra(4, script),
}
ON_NODES = ("torchrun on nodes", "srun -N2")
ENDING_OTHERS = {
    "torchrun on nodes": "Root Cause",  # torchrun looks ten times a second; ranks have told by then, or not
    "torchrun": "Root Cause",
    HYDRA: "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed",
}
"""The launchers that end the ranks on the node of a dead one, and how they say that."""
IN_SLOW_TESTS = {
    "an exception outside of blocks",
    "SIGKILL outside of blocks",
    "the cable out for 3 s",
    "the cable out, in a block",
}


def cells() -> Iterator[object]:
    for fault, launcher in itertools.product(FAULTS, (*ON_NODES, *(name for name in COMMANDS if "-N2" not in name))):
        if launcher in ON_NODES or not FAULTS[fault].of_nodes:
            is_slow = launcher == "srun -N2" and fault in IN_SLOW_TESTS
            yield pytest.param(fault, launcher, marks=[pytest.mark.faults, *[pytest.mark.slow] * is_slow])


@pytest.mark.parametrize(("fault", "launcher"), list(cells()))
def test_each_side_is_told(
    fault: str, launcher: str, nodes: list[Node], tmp_path: Path, record: Callable[..., None]
) -> None:
    """The cause, in the same words on both sides, and soon; what is not to be noticed is not."""
    case = FAULTS[fault]
    with contextlib.ExitStack() as stack:
        cluster: dict[str, str] = {}
        if "srun" in launcher:
            if not slurm.is_there():
                pytest.skip("needs SLURM (munge, slurmctld, slurmd, slurm-client) and root")
            cluster = stack.enter_context(slurm.slurm(tmp_path, nodes))
        job = Job(nodes, tmp_path, launcher, case.how, cluster)
        began = time.time()
        case.cause(job)
        if not case.first:
            job.tell("end")
        living = [rank for rank in range(4) if rank not in case.silent]
        may_be_ended = [
            rank
            for rank in living
            if launcher in ENDING_OTHERS and case.ends is not None and job.node_of(rank) is job.node_of(case.ends)
        ]
        must_tell = [rank for rank in living if rank not in may_be_ended]
        wait_for_files(tmp_path, f"[{''.join(map(str, must_tell))}-].json", len(must_tell))
        if case.cause in (stop, stop_rank_0):
            for rank in case.silent:
                job.signal(rank, signal.SIGCONT)
        ends, printed = zip(*finish(job.processes, ENDS_SOON_S), strict=True)
        assert launcher != HYDRA or not may_be_ended or ends[0] not in (0, 124)
        found: dict[str, list[object]] = {}
        for rank in living:
            if rank in may_be_ended and not (tmp_path / f"{rank}.json").exists():
                assert ENDING_OTHERS[launcher] in "".join(printed), printed
                found.setdefault(f"{rank // 2}", [f"ended by {launcher.split()[0]}", time.time() - began, ""])
                continue
            seen = json.loads((tmp_path / f"{rank}.json").read_text())
            text = f"{seen['told']}\n{(tmp_path / f'{rank}.stderr').read_text()}"
            expected = case.first if rank < 2 else case.second
            match = re.search(expected, text, re.DOTALL)
            assert match, (rank, text, printed)
            assert bool(seen["error"]) == bool(expected)
            assert seen["at"] - began < case.within_s or not expected, (rank, seen)
            found.setdefault(
                f"{rank // 2}", [seen["error"] or "goes on", seen["at"] - began, PATH.sub("tests/", match[0])]
            )
        deadline = time.monotonic() + ENDS_SOON_S
        while job.left() and time.monotonic() < deadline:
            time.sleep(0.1)  # between two looks
        assert job.left() == []
    record(fault=fault, launcher=launcher, sides=found)


@pytest.mark.slow
@pytest.mark.parametrize("cause", [kill, lambda job: job.nodes[2].power_off()], ids=["SIGKILL", "a node without power"])
def test_three_nodes_and_eight_ranks(cause: Callable[[Job], object], tmp_path: Path) -> None:
    """All nodes are told the same, also those between which nothing is wrong."""
    if not laboratory.is_possible():
        pytest.skip("needs root and iproute2, to make namespaces")
    with laboratory.laboratory(tmp_path, 3) as nodes:
        job = Job(nodes, tmp_path, "torchrun on nodes", "block", {}, ranks_of=(3, 3, 2))
        is_killed, began = cause is kill, time.time()
        living = [0, 1, 2, 6, 7] if is_killed else list(range(6))  # torchrun may end 4 and 5 before they tell
        cause(job)
        wait_for_files(tmp_path, f"[{''.join(map(str, living))}].json", len(living))
        for rank in living:
            seen = json.loads((tmp_path / f"{rank}.json").read_text())
            expected = ENDED if is_killed else rf"Rank [67] \(pid \d+ on node3\) {OUT_OF_REACH}"
            assert re.search(expected, seen["told"], re.DOTALL), (rank, seen)
            assert seen["at"] - began < (AT_ONCE_S if is_killed else GONE_WITHIN_S), (rank, seen)
        finish(job.processes, ENDS_SOON_S)
        assert job.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", [{"ipv4": False}, {"own_name_is_loopback": True}], ids=["IPv6 alone", "like Debian"]
)
def test_networks_as_they_are(network: dict[str, bool], tmp_path: Path) -> None:
    """Ranks on two nodes meet, and hear of a death on the other one; a pool works on a node."""
    if not laboratory.is_possible():
        pytest.skip("needs root and iproute2, to make namespaces")
    with laboratory.laboratory(tmp_path, **network) as nodes:
        pool = "from nn_parallel import *; import torch.distributed as dist, torch\n"
        pool += "def f():\n    initialize_ddp(); x = torch.ones(1); dist.all_reduce(x); return x.item()\n"
        pool += "with ParallelExecutor(num_workers=2, devices='cpu') as ex: print(ex.run(f))"
        command = nodes[0].command([PYTHON, "-c", pool])
        [(status, printed)] = finish([popen(command, environ(), tmp_path)])
        assert (status, printed) == (0, "[2.0, 2.0]\n")  # and no warning of torch's that a name cannot be looked up
        doctor = nodes[0].command([PYTHON, "-m", "nn_parallel", "doctor"])
        [(status, printed)] = finish([popen(doctor, environ(), tmp_path)])
        assert (status, "warning" in printed) == (0, False), printed
        job = Job(nodes, tmp_path, "torchrun on nodes", "block", {})
        began = time.time()
        kill(job)
        wait_for_files(tmp_path, "[01].json", 2)
        finish(job.processes, ENDS_SOON_S)
        for rank in range(2):  # torchrun may end rank 2 before it has told
            seen = json.loads((tmp_path / f"{rank}.json").read_text())
            assert re.search(ENDED, seen["told"]), seen
            assert seen["at"] - began < AT_ONCE_S


@pytest.mark.slow
def test_a_slow_and_lossy_cable(nodes: list[Node], tmp_path: Path) -> None:
    """A tenth of a second there and back, and every fiftieth frame lost: nobody takes anybody for lost."""
    nodes[1].delay_s, nodes[1].loss = 0.1, 0.02
    job = Job(nodes, tmp_path, "torchrun on nodes", "block", {})
    time.sleep(LOST_AFTER_S)  # of work
    job.tell("end")
    for status, printed in finish(job.processes):
        assert status == 0, printed
