"""The rank, the world size and the store's address, read from the environment variables that a launcher sets.

The functions only read. They do not use torch, and start no process.

The meaning of each variable is taken from the sources and the documentation of its launcher. The tests start the real
launchers: torchrun, ``srun``, Open MPI's ``mpirun`` and MPICH's Hydra.
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
# If MASTER_PORT is not set, the port of the store is chosen from this range. It lies below the ephemeral ports, because
# the kernel may give an ephemeral port to any connection.
_PORTS = range(10_000, 30_000)

# Variables in which a platform counts the nodes, or the processes of each node. If one of them is set, RANK may be the
# number of a node instead of the number of a process.
_NODE_COUNTS = ("NNODES", "NUM_NODES", "PET_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_PROCESSES_PER_NODE = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE")

# A regular expression for one item of SLURM's list of hosts. An item with brackets, such as a[1-2,07]-ib, stands for
# several hosts.
_HOST = r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"


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
    one_node: bool  # True only if all ranks certainly run on this host, so that their sockets may use the loopback
    told_by: tuple[str, ...]  # the variables from which these values were read
    launcher_hosts_store: bool = False  # whether torchrun's agent hosts the store at the master port, instead of rank 0
    attempt: int = 0  # the number of times that torchrun has restarted the ranks


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that ``environ`` describes, or None if no launcher started this process.

    If several launchers have set their variables, the innermost launcher is used. The ``env://`` variables, which
    torchrun also sets, take precedence over an MPI launcher, and an MPI launcher over a SLURM step.

    A SLURM batch script and an interactive shell do not count as a launch. A SLURM step with a single task does not
    count either, because SLURM also starts ordinary programs in this way.

    Raises:
        LaunchError: some variables are missing, contradict each other or hold an impossible value. The message names
            the variables.

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
    """Return a copy of ``environ`` in which the given arguments replace the variables of the same name.

    If an argument differs from its variable, other variables that depend on the old value are removed. For instance,
    LOCAL_RANK is wrong for another rank, and torchrun's agent does not listen at another master address.
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
    # An MPI launcher and SLURM have their own variables for the local rank. `detect_launch` reads them, so they are
    # replaced too.
    if "LOCAL_RANK" in explicit:
        explicit |= dict.fromkeys(_LOCAL_RANKS & merged.keys(), explicit["LOCAL_RANK"])
    return merged | explicit


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or ``localhost``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal. Redirected input and output do not matter."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _Names(NamedTuple):
    """The names of the variables in which a launcher writes the rank of a process and the size of its world."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    # Variables that distinguish two jobs on a host, such as SLURM_JOB_ID, or two steps of a job that run at the same
    # time, such as SLURM_STEP_ID. The port of the store is computed from their values.
    job: tuple[str, ...] = ()


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
    """The variables of an environment. A variable that holds an empty string counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.names = dict[str, None]()  # the names of the variables that have been read so far, for error messages

    def has(self, *names: str) -> bool:
        """Return whether all these variables are set."""
        return all(self._environ.get(name) for name in names)

    def text(self, name: str) -> str:
        """Return the value of a variable. Raise LaunchError if the variable is not set."""
        if not self.has(name):
            raise LaunchError(f"{_listed(list(self.names))} set and {name} is not: the launcher must set all of them.")
        self.names[name] = None
        return self._environ[name]

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """Return ``parse(value)`` for the value of a variable.

        Raises:
            LaunchError: the variable is not set, or ``parse`` raises ValueError.
        """
        text = self.text(name)
        try:
            return parse(text)
        except ValueError as error:
            raise LaunchError(f"{name}: {error}") from None

    def number(self, name: str, *, at_least: int = 0, below: int | None = None, because: str = "") -> int:
        """Return the value of a variable as an integer.

        Args:
            name: the variable.
            at_least: the smallest value that is allowed.
            below: the smallest value that is too large. If None, there is no upper limit.
            because: the reason for the upper limit, as a clause for the error message.

        Raises:
            LaunchError: the variable is not set, its value is not an integer, or the value is out of these limits.
        """
        text = self.text(name)
        if not re.fullmatch(r"\s*-?\d+\s*", text, re.ASCII):
            raise LaunchError(f"{name}={text!r} is not a whole number.")
        value = int(text)
        if value < at_least or (below is not None and value >= below):
            allowed = f"{at_least}..{below - 1}" if below is not None else f"at least {at_least}"
            raise LaunchError(f"{name}={value} cannot be: it must be {allowed}{f', as {because}' if because else ''}.")
        return value

    def host(self, name: str) -> str:
        """Return the value of a variable that names a host.

        Raises:
            LaunchError: the variable is not set, or its value is not just a host name or an address, but contains a
                port or is a URL.
        """
        host = self.text(name).strip()
        is_ipv6 = host.count(":") > 1 and "/" not in host
        if "/" in host or (":" in host and not is_ipv6):
            raise LaunchError(
                f"{name}={host!r} is not the name or address of a host: write it without a port and without "
                "'tcp://', for instance MASTER_ADDR=localhost and MASTER_PORT=29500."
            )
        return host


def _by_env(variables: _Variables) -> Launch:
    """Return the launch that the ``env://`` variables describe. Torchrun, a platform or the user has set them.

    If LOCAL_RANK is not set, the function uses the rank as the local rank. This is right only if all ranks run on this
    node, which `_check_rank_numbers_processes` checks.
    """
    has_local_rank = variables.has("LOCAL_RANK")
    local_rank = "LOCAL_RANK" if has_local_rank else "RANK"
    local_world_size = "LOCAL_WORLD_SIZE" if has_local_rank and variables.has("LOCAL_WORLD_SIZE") else "WORLD_SIZE"
    is_torchrun = variables.has("TORCHELASTIC_RUN_ID")
    names = _Names("RANK", "WORLD_SIZE", local_rank, local_world_size)
    launch = _launch(variables, "torchrun" if is_torchrun else "env", names)
    if not has_local_rank:
        _check_rank_numbers_processes(variables, launch)
    nodes = variables.number("GROUP_WORLD_SIZE", at_least=1) if variables.has("GROUP_WORLD_SIZE") else 0
    if is_torchrun and nodes * launch.local_world_size == launch.world_size:
        # LOCAL_RANK is not used, because torchrun with the option --virtual-local-rank sets it to 0 on every rank.
        launch = replace(launch, local_rank=launch.rank % launch.local_world_size)
    return replace(
        launch,
        node_rank=variables.number("GROUP_RANK") if variables.has("GROUP_RANK") else launch.node_rank,
        launcher_hosts_store=variables.has("TORCHELASTIC_USE_AGENT_STORE")
        and variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=variables.number("TORCHELASTIC_RESTART_COUNT") if variables.has("TORCHELASTIC_RESTART_COUNT") else 0,
        one_node=nodes == 1 if nodes else is_loopback(launch.master_addr) and not _mention_of_nodes(variables),
        told_by=tuple(variables.names),
    )


def _by_mpi(variables: _Variables) -> Launch | None:
    """Return the launch by Open MPI's ``mpirun`` or by Hydra, the launcher of MPICH and Intel MPI; None if neither."""
    for launcher, names in _MPI.items():
        if variables.has(names.rank, names.local_rank):
            return _launch(variables, launcher, names)
    return None


def _hydra_proxy_pid() -> int:
    """Return the id of Hydra's proxy process, which has started the ranks on this node; 0 if there is none.

    The id distinguishes two jobs on one node, because Hydra sets no variable that distinguishes them.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name == "hydra_pmi_proxy":
                return pid
            pid = int(rest.split()[1])  # the parent process
    return 0


def _by_slurm(variables: _Variables) -> Launch | None:
    """Return the launch by ``srun``; None if this process is not one of several tasks of a SLURM step.

    SLURM sets some of its variables for a batch script too. The variables that count the tasks and nodes of a step are
    set for a step only.
    """
    if not variables.has(_SLURM.world_size, "SLURM_STEP_NODELIST"):
        return None
    # The shell of `srun --pty bash`, and a notebook that is started from this shell, are not ranks. A step that is
    # started from this shell inherits SLURM_PTY_PORT, but has no terminal.
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
    """Return the first host of a list in SLURM's notation. For ``a[01-02,07]-ib,b3`` this is ``a01-ib``.

    Raises:
        ValueError: the text is not in this notation.
    """
    if not re.fullmatch(f"{_HOST}(?:,{_HOST})*", text):
        raise ValueError(f"{text!r} is not a list of hosts in SLURM's notation, which is like a[1-2,07]-ib,b3.")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.findall(_HOST, text)[0])


def task_counts(text: str) -> list[int]:
    """Return the number of tasks on each node from SLURM's notation. For example, ``2(x3),1`` means [2, 2, 2, 1].

    Raises:
        ValueError: the text is not in this notation.
    """
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
    """Return the launch, as described by environment variables.

    Args:
        variables: the environment.
        launcher: the name of the launcher.
        names: the names of the launcher's variables.
        local_world_size: the number of ranks on this node. If None, it is read from the launcher's variable.
        node_rank: the number of this node. If None, it is computed from the rank. This assumes that the ranks are
            numbered node by node, with equally many ranks on each node.
        first_host: the host of rank 0, which is used if MASTER_ADDR is not set; None if it is not known.

    Raises:
        LaunchError: a value is missing or impossible.
    """
    world_size = variables.number(names.world_size, at_least=1)
    world_limit = f"{names.world_size}={world_size}"
    rank = variables.number(names.rank, below=world_size, because=world_limit)
    if local_world_size is None:
        local_world_size = variables.number(
            names.local_world_size, at_least=1, below=world_size + 1, because=world_limit
        )
    node_limit = f"{local_world_size} ranks run on this node"
    local_rank = variables.number(names.local_rank, below=local_world_size, because=node_limit)
    one_node = local_world_size == world_size
    if variables.has("MASTER_ADDR"):
        first_host = variables.host("MASTER_ADDR")
    elif one_node:
        first_host = "127.0.0.1"
    elif first_host is None:
        raise LaunchError(
            f"{local_world_size} of the {world_size} ranks that {launcher} started run on this node, and {launcher} "
            "does not say where rank 0 is. Set MASTER_ADDR to the host of rank 0, on every rank."
        )
    if variables.has("MASTER_PORT"):
        port = variables.number("MASTER_PORT", at_least=1, below=65536, because="it is a port")
    else:  # the port is computed from the variables that identify the job, so that all its ranks use the same port
        job = " ".join([launcher, *(variables.text(name) for name in names.job if variables.has(name))])
        if launcher == "hydra" and one_node:
            job += f" {_hydra_proxy_pid()}"
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


def _check_rank_numbers_processes(variables: _Variables, launch: Launch) -> None:
    """Raise LaunchError if RANK may be the number of a node instead of the number of a process.

    Some platforms start one pod per node and set RANK to the number of the pod. The script in the pod then has to start
    one process per device itself.
    """
    master_is_here = (
        launch.world_size == 1 or is_loopback(launch.master_addr) or launch.master_addr == socket.gethostname()
    )
    why = _mention_of_nodes(variables) or (
        "" if master_is_here else f"MASTER_ADDR={launch.master_addr} is another host"
    )
    if why:
        raise LaunchError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} are set, but LOCAL_RANK is not, which numbers the "
            f"ranks of one node. It cannot be guessed, because {why}. Set LOCAL_RANK (0 for one process per node), or "
            "start the processes of a node by torchrun."
        )


def _mention_of_nodes(variables: _Variables) -> str:
    """Return a text for error messages if a variable such as NNODES shows that RANK may be the number of a node.

    For example, the text is "NNODES=2 speaks of nodes, so RANK may be the number of a node". If there is no such
    variable, the text is empty.

    If there is one, MASTER_ADDR=localhost does not prove that all ranks are on one node. The platform may set
    MASTER_ADDR to localhost only on the node of rank 0, and to the host name of that node on all other nodes.
    """
    for name in (*_NODE_COUNTS, *_PROCESSES_PER_NODE):
        if variables.has(name) and (name in _PROCESSES_PER_NODE or variables.text(name) != "1"):
            return f"{name}={variables.text(name)} speaks of nodes, so RANK may be the number of a node"
    return ""


def _check_agree(launch: Launch, present: Mapping[str, str]) -> None:
    """Raise LaunchError if RANK or WORLD_SIZE is set and contradicts ``launch``.

    An MPI launcher and SLURM do not set these two variables, so another program or the user has set them.
    """
    for name, value in (("RANK", launch.rank), ("WORLD_SIZE", launch.world_size)):
        if present.get(name, str(value)) != str(value):
            raise LaunchError(
                f"{name}={present[name]} is set, and {launch.launcher} says {value} ({', '.join(launch.told_by)}). "
                f"Unset {name}, or set all of {', '.join(_REQUIRED)}."
            )


def _half_set(present: Mapping[str, str]) -> str:
    """Return the message for an environment in which only some of the ``env://`` variables are set."""
    missing = [name for name in _REQUIRED if name not in present]
    ranks = present.get("WORLD_SIZE", "4")
    return (
        f"{_listed([f'{name}={value}' for name, value in present.items()])} set, {_listed(missing)} not.\n"
        f"Start with `torchrun --nproc-per-node={ranks} your_script.py`, which sets them all, or set what is missing "
        f"(or unset {', '.join(present)} to run alone)."
    )


def _listed(names: list[str]) -> str:
    """Return the names with a verb, as ``"A is"`` or ``"A, B and C are"``."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"
