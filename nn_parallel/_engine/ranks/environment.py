"""From a launcher's environment to launch facts: pure functions, no torch, nothing started.

Which variables tell what was read in the launchers' sources and documentation. The tests start torchrun, ``srun``, Open
MPI's ``mpirun`` and MPICH's Hydra for real.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from ...errors import LaunchError

T = TypeVar("T")
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(10_000, 30_000)  # for a store where nobody said a port: below those that systems hand out to anybody

# Variables that count the nodes, or the processes that a platform wants on each: with them RANK may number nodes.
_NODE_COUNTS = ("NNODES", "NUM_NODES", "PET_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_PROCESSES_PER_NODE = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE")

_HOST = r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"  # one or several, as SLURM writes them: a[1-2,07]-ib


@dataclass(frozen=True)
class Launch:
    """The launch of this process, as its launcher describes it."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    one_node: bool  # surely all ranks on this host, so that their sockets may stay on the loopback
    told_by: tuple[str, ...]  # the variables that say all this
    launcher_hosts_store: bool = False  # torchrun's agent listens on the master port; otherwise rank 0 does
    attempt: int = 0  # how often an elastic launcher has restarted the ranks


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that ``environ`` describes, or None when no launcher started this process.

    Where several launchers left their variables, the innermost is meant: torchrun or the ``env://`` variables, then an
    MPI launcher, then a SLURM step. A SLURM batch script or an interactive shell is no launch, nor is a step of one
    task: that is how SLURM starts any program.

    Raises:
        LaunchError: the variables are half set, contradict each other, or hold something that cannot be; the message
            names them.

    Example::

        >>> detect_launch({}) is None
        True
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> detect_launch(env).local_rank
        1
    """
    variables = _Variables(environ)
    present = {name: environ[name] for name in _REQUIRED if variables.has(name)}
    if len(present) == len(_REQUIRED):
        return _by_env(variables)
    for detect in (_by_mpi, _by_slurm):
        if (launch := detect(variables)) is not None:
            _check_agree(launch, present)
            return launch
    if present:
        raise LaunchError(_half_set(present))
    return None


def with_arguments(environ: Mapping[str, str], **arguments: int | str | None) -> dict[str, str]:
    """``environ`` with explicit arguments in the place of the variables of the same name.

    What a launcher said *about* a value that an argument now contradicts is stale and dropped with it: another rank has
    another local rank, and at another master address no agent of torchrun's listens.
    """
    merged = dict(environ)
    explicit = {name.upper(): str(value) for name, value in arguments.items() if value is not None}
    changed = {name for name, value in explicit.items() if merged.get(name) != value}
    if changed:
        merged.pop("GROUP_WORLD_SIZE", None)
    if changed & {"RANK", "WORLD_SIZE"}:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            merged.pop(name, None)
    if changed & {"MASTER_ADDR", "MASTER_PORT"}:
        for name in [name for name in merged if name.startswith("TORCHELASTIC_")]:
            del merged[name]
    if "LOCAL_RANK" in explicit:  # also under the name that the launcher gave it
        explicit |= dict.fromkeys(_LOCAL_RANKS & merged.keys(), explicit["LOCAL_RANK"])
    return merged | explicit


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def has_terminal() -> bool:
    """Return whether this process belongs to a terminal, wherever its input and output go."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _Names(NamedTuple):
    """The variables of a launcher that tells each process its place."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...] = ()  # tell apart two jobs on one host, and two steps of a job that run at the same time


_MPI = {
    "openmpi": _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    "hydra": _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_SLURM = _Names(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_LOCAL_RANKS = {names.local_rank for names in (*_MPI.values(), _SLURM)}


class _Variables:
    """The variables of an environment; an empty one counts as unset. It remembers which were used."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.names = dict[str, None]()

    def has(self, *names: str) -> bool:
        return all(self._environ.get(name) for name in names)

    def text(self, name: str) -> str:
        """Return the value of a variable. Raises LaunchError if it is not set."""
        if not self.has(name):
            raise LaunchError(f"{_listed(list(self.names))} set and {name} is not: the launcher tells too little.")
        self.names[name] = None
        return self._environ[name]

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """Return ``parse`` of the value. Raises LaunchError if it is not set, or ``parse`` raises a ValueError."""
        text = self.text(name)
        try:
            return parse(text)
        except ValueError as error:
            raise LaunchError(f"{name}: {error}") from None

    def number(self, name: str, *, at_least: int = 0, below: int | None = None, because: str = "") -> int:
        """Return the whole number that it holds. Raises LaunchError if that is none, or cannot be."""
        text = self.text(name)
        if not re.fullmatch(r"\s*-?\d+\s*", text, re.ASCII):
            raise LaunchError(f"{name}={text!r} is not a whole number.")
        value = int(text)
        if value < at_least or (below is not None and value >= below):
            allowed = f"{at_least}..{below - 1}" if below is not None else f"at least {at_least}"
            raise LaunchError(f"{name}={value} cannot be: it must be {allowed}{f', as {because}' if because else ''}.")
        return value

    def host(self, name: str) -> str:
        """Return the name or address of a host. Raises LaunchError if it is more than that, or not there."""
        host = self.text(name).strip()
        is_ipv6 = host.count(":") > 1 and "/" not in host
        if "/" in host or (":" in host and not is_ipv6):
            raise LaunchError(
                f"{name}={host!r} is not the name or address of a host: write it without a port and without "
                "'tcp://', for instance MASTER_ADDR=localhost and MASTER_PORT=29500."
            )
        return host


def _by_env(variables: _Variables) -> Launch:
    """By torchrun, or by the variables that ``env://`` needs, which a platform or a user has set."""
    says_place = variables.has("LOCAL_RANK")  # else all ranks are here
    local_rank = "LOCAL_RANK" if says_place else "RANK"
    local_world_size = "LOCAL_WORLD_SIZE" if says_place and variables.has("LOCAL_WORLD_SIZE") else "WORLD_SIZE"
    is_torchrun = variables.has("TORCHELASTIC_RUN_ID")
    names = _Names("RANK", "WORLD_SIZE", local_rank, local_world_size)
    launch = _launch(variables, "torchrun" if is_torchrun else "env", names)
    if not says_place:
        _check_ranks_are_of_processes(variables, launch)
    nodes = variables.number("GROUP_WORLD_SIZE", at_least=1) if variables.has("GROUP_WORLD_SIZE") else 0
    if is_torchrun and nodes * launch.local_world_size == launch.world_size:
        # With --virtual-local-rank every LOCAL_RANK is 0.
        launch = replace(launch, local_rank=launch.rank % launch.local_world_size)
    return replace(
        launch,
        node_rank=variables.number("GROUP_RANK") if variables.has("GROUP_RANK") else launch.node_rank,
        launcher_hosts_store=variables.has("TORCHELASTIC_USE_AGENT_STORE")
        and variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=variables.number("TORCHELASTIC_RESTART_COUNT") if variables.has("TORCHELASTIC_RESTART_COUNT") else 0,
        one_node=nodes == 1 if nodes else is_loopback(launch.master_addr) and not _of_nodes(variables),
        told_by=tuple(variables.names),
    )


def _by_mpi(variables: _Variables) -> Launch | None:
    """By the mpirun of Open MPI, or by Hydra, which MPICH and Intel MPI start their ranks with."""
    for launcher, names in _MPI.items():
        if variables.has(names.rank, names.local_rank):
            return _launch(variables, launcher, names)
    return None


def _proxy_of_hydra() -> int:
    """Return the process that has started the ranks of a job of Hydra on this node: no variable tells the job."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name == "hydra_pmi_proxy":
                return pid
            pid = int(rest.split()[1])  # its parent
    return 0


def _by_slurm(variables: _Variables) -> Launch | None:
    """By srun. A batch script has some of these variables too; only a step tells its tasks and nodes."""
    if not variables.has(_SLURM.world_size, "SLURM_STEP_NODELIST"):
        return None
    # `srun --pty bash`, and a notebook in there; a step inside inherits the variable alone.
    if variables.has("SLURM_PTY_PORT") and (has_terminal() or "ipykernel.kernelapp" in sys.modules):
        return None
    world_size = variables.number(_SLURM.world_size, at_least=1)
    if world_size == 1:
        return None
    host = variables.parsed("SLURM_STEP_NODELIST", first_host)
    tasks = variables.parsed(_SLURM.local_world_size, task_counts)
    if sum(tasks) != world_size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={variables.text(_SLURM.local_world_size)} counts {sum(tasks)} tasks, and "
            f"SLURM_STEP_NUM_TASKS={world_size}: they contradict each other."
        )
    node_rank = variables.number("SLURM_NODEID", below=len(tasks), because=f"the step has {len(tasks)} nodes")
    return _launch(variables, "slurm", _SLURM, tasks[node_rank], node_rank, host)


def first_host(text: str) -> str:
    """Return the first host of a list of SLURM: ``a01-ib`` of ``a[01-02,07]-ib,b3``; ValueError for other text."""
    if not re.fullmatch(f"{_HOST}(?:,{_HOST})*", text):
        raise ValueError(f"{text!r} is not a list of hosts in SLURM's notation, which is like a[1-2,07]-ib,b3.")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.findall(_HOST, text)[0])


def task_counts(text: str) -> list[int]:
    """Return the number of tasks on each node: 2, 2, 2 and 1 for SLURM's ``2(x3),1``; ValueError for other text."""
    counts = list[int]()
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"{text!r} does not count the tasks of nodes in SLURM's notation, which is like 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _launch(
    variables: _Variables,
    launcher: str,
    names: _Names,
    local_world_size: int | None = None,
    node_rank: int | None = None,
    first_host: str | None = None,
) -> Launch:
    """Return the launch that the variables ``names`` describe; without MASTER_ADDR the store is on ``first_host``."""
    world_size = variables.number(names.world_size, at_least=1)
    of_all = f"{names.world_size}={world_size}"
    rank = variables.number(names.rank, below=world_size, because=of_all)
    if local_world_size is None:
        local_world_size = variables.number(names.local_world_size, at_least=1, below=world_size + 1, because=of_all)
    of_node = f"{local_world_size} ranks run on this node"
    local_rank = variables.number(names.local_rank, below=local_world_size, because=of_node)
    one_node = local_world_size == world_size
    if variables.has("MASTER_ADDR"):
        first_host = variables.host("MASTER_ADDR")
    elif one_node:
        first_host = "127.0.0.1"
    elif first_host is None:
        raise LaunchError(
            f"{local_world_size} of the {world_size} ranks that {launcher} started run on this node, and it does not "
            "say where rank 0 is. Set MASTER_ADDR to the host of rank 0, on every rank."
        )
    if variables.has("MASTER_PORT"):
        port = variables.number("MASTER_PORT", at_least=1, below=65536, because="it is a port")
    else:  # one that follows from the job, alike on all its ranks
        job = " ".join([launcher, *(variables.text(name) for name in names.job if variables.has(name))])
        if launcher == "hydra" and one_node:
            job += f" {_proxy_of_hydra()}"
        port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
    return Launch(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        master_addr="127.0.0.1" if is_loopback(first_host) else first_host,
        master_port=port,
        one_node=one_node,
        told_by=tuple(variables.names),
    )


def _check_ranks_are_of_processes(variables: _Variables, launch: Launch) -> None:
    """Raise if RANK may be the rank of a node: a platform that starts one pod a node leaves its processes to us."""
    is_here = launch.world_size == 1 or is_loopback(launch.master_addr) or launch.master_addr == socket.gethostname()
    why = _of_nodes(variables) or ("" if is_here else f"MASTER_ADDR={launch.master_addr} is another host")
    if why:
        raise LaunchError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} are set and {why}, so LOCAL_RANK, this process's "
            "place on its own node, cannot be guessed. Set LOCAL_RANK (0 for one process per node), or start the "
            "processes of a node by torchrun."
        )


def _of_nodes(variables: _Variables) -> str:
    """Return the variable in which a platform counts nodes, or the processes of each, and what follows; else nothing.

    Where it does, a master called localhost may be how one node knows itself, and RANK may number the nodes.
    """
    for name in (*_NODE_COUNTS, *_PROCESSES_PER_NODE):
        if variables.has(name) and (name in _PROCESSES_PER_NODE or variables.text(name) != "1"):
            return f"{name}={variables.text(name)} speaks of nodes with ranks of their own"
    return ""


def _check_agree(launch: Launch, present: Mapping[str, str]) -> None:
    """Raise if RANK or WORLD_SIZE, set by somebody else, contradict the launcher."""
    for name, value in (("RANK", launch.rank), ("WORLD_SIZE", launch.world_size)):
        if present.get(name, str(value)) != str(value):
            raise LaunchError(
                f"{name}={present[name]} is set, and {launch.launcher} says {value} ({', '.join(launch.told_by)}). "
                f"Unset {name}, or set all of {', '.join(_REQUIRED)}."
            )


def _half_set(present: Mapping[str, str]) -> str:
    missing = [name for name in _REQUIRED if name not in present]
    ranks = present.get("WORLD_SIZE", "4")
    return (
        f"{_listed([f'{name}={value}' for name, value in present.items()])} set, {_listed(missing)} not.\n"
        f"Start with `torchrun --nproc-per-node={ranks} your_script.py`, which sets them all, or set what is missing "
        f"(or unset {', '.join(present)} to run alone)."
    )


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"
