"""A real SLURM for tests: munged, slurmctld and slurmd, on the loopback or on the nodes of a laboratory."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.laboratory import Node
from tests.support.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "scancel")
READY_WITHIN_S = 30.0
CPUS = 8  # more than there may be: ranks of tests share them

CONFIG = """
ClusterName=test
SlurmctldHost={hosts[0][0]}({hosts[0][1]})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmdTimeout={lost_after_s}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def is_there() -> bool:
    """Whether SLURM is installed, and we may start its daemons."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@contextlib.contextmanager
def slurm(folder: Path, nodes: Sequence[Node] = (), *, lost_after_s: int = 300) -> Iterator[dict[str, str]]:
    """Run a cluster, of this host if no nodes are given; yields what its commands need in their environment.

    On nodes, the commands are run on the first. SLURM ends what runs on one that has been silent for ``lost_after_s``.
    """
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    hosts = [(node.name, node.address) for node in nodes]
    hosts = hosts or [(socket.gethostname().partition(".")[0], "127.0.0.1")]
    for name, _ in hosts:
        (folder / f"spool.{name}").mkdir()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            hosts=hosts,
            folder=folder,
            ports=(free_port(), free_port()),
            lost_after_s=lost_after_s,
            nodes="\n".join(f"NodeName={name} NodeAddr={at} CPUs={CPUS} State=UNKNOWN" for name, at in hosts),
        )
    )
    environ = {"SLURM_CONF": str(config)}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    on: list[Callable[[list[str]], list[str]]] = [node.command for node in nodes] or [list]
    daemons = [munge, on[0](["slurmctld", "-D", "-f", str(config)])]
    daemons += [run(["slurmd", "-D", "-N", name, "-f", str(config)]) for run, (name, _) in zip(on, hosts, strict=True)]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("w"))
        for daemon in daemons:
            process = subprocess.Popen(
                daemon, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=os.environ | environ
            )
            stack.callback(_end, process)
            if daemon is munge:
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: _are_idle(on[0], environ, len(hosts)), folder)
        yield environ


def _are_idle(on: Callable[[list[str]], list[str]], environ: dict[str, str], count: int) -> bool:
    command = on(["sinfo", "--noheader", "--Node", "--format=%t"])
    told = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=READY_WITHIN_S)
    return told.stdout.split() == ["idle"] * count


def _wait_for(ready: object, folder: Path) -> None:
    assert callable(ready)
    deadline = time.monotonic() + READY_WITHIN_S
    while not ready():
        logs = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"SLURM did not start:\n{(folder / 'output').read_text()}\n{logs}"
        time.sleep(0.05)  # between two looks


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
