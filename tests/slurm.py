"""A real SLURM of one node for tests: munged, slurmctld and slurmd, on the loopback, until the block ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "scancel")
READY_WITHIN_S = 30.0
CPUS = 8  # more than there may be: ranks of tests share them

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
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
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def is_there() -> bool:
    """Whether SLURM is installed, and we may start its daemons."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of this host; yields what its commands need in their environment."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    host, ports = socket.gethostname().partition(".")[0], (free_port(), free_port())
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, folder=folder, ports=ports, cpus=CPUS))
    environ = {"SLURM_CONF": str(config)}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons = [munge, ["slurmctld", "-D", "-f", str(config)], ["slurmd", "-D", "-f", str(config)]]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("w"))
        for daemon in daemons:
            process = subprocess.Popen(
                daemon, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=os.environ | environ
            )
            stack.callback(_end, process)
            if daemon is munge:
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: _is_idle(environ), folder)
        yield environ


def _is_idle(environ: dict[str, str]) -> bool:
    command = ["sinfo", "--noheader", "--format=%t"]
    told = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=READY_WITHIN_S)
    return told.stdout.strip() == "idle"


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
