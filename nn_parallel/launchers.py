"""From a launcher's environment to launch facts: a pure function, no torch, nothing started.

Known so far: torchrun and the ``env://`` variables set by hand.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import LaunchError

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """What a launcher told this process."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher_hosts_store: bool  # torchrun's agent listens on the master port; otherwise rank 0 does
    attempt: int  # how often an elastic launcher has restarted the ranks
    one_node: bool  # surely all ranks on this host, so that their sockets may stay on the loopback


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launch that ``environ`` describes, or None when no launcher started this process.

    Raises:
        LaunchError: the variables are half set, or hold something that cannot be; the message names them.

    Example::

        >>> detect_launch({}) is None
        True
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> detect_launch(env).local_rank
        1
    """
    present = {name: environ[name] for name in _REQUIRED if environ.get(name)}  # an empty string counts as unset
    if not present:
        return None
    if missing := [name for name in _REQUIRED if name not in present]:
        raise LaunchError(_half_set(present, missing))

    world_size = _whole_number(environ, "WORLD_SIZE", at_least=1)
    rank = _whole_number(environ, "RANK", below=world_size, because=f"WORLD_SIZE={world_size}")
    port = _whole_number(environ, "MASTER_PORT", at_least=1, below=65536, because="it is a port")
    master = environ["MASTER_ADDR"]

    if environ.get("LOCAL_RANK"):
        local_world_size = world_size
        if environ.get("LOCAL_WORLD_SIZE"):
            local_world_size = _whole_number(
                environ, "LOCAL_WORLD_SIZE", at_least=1, below=world_size + 1, because=f"WORLD_SIZE={world_size}"
            )
        local_rank = _whole_number(
            environ, "LOCAL_RANK", below=local_world_size, because=f"{local_world_size} ranks run on this node"
        )
    elif is_this_host(master):
        local_rank, local_world_size = rank, world_size
    else:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set and MASTER_ADDR={master} is another host, so LOCAL_RANK, "
            "this process's place on its own node, cannot be guessed. Set LOCAL_RANK (0 for one process per node)."
        )

    return Launch(
        launcher="torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "env",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_whole_number(environ, "GROUP_RANK") if environ.get("GROUP_RANK") else rank // local_world_size,
        master_addr="127.0.0.1" if is_loopback(master) else master,
        master_port=port,
        launcher_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_whole_number(environ, "TORCHELASTIC_RESTART_COUNT")
        if environ.get("TORCHELASTIC_RESTART_COUNT")
        else 0,
        one_node=is_loopback(master) or environ.get("GROUP_WORLD_SIZE") == "1",
    )


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
    return merged | explicit


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def is_this_host(host: str) -> bool:
    return is_loopback(host) or host == socket.gethostname()


def _half_set(present: Mapping[str, str], missing: list[str]) -> str:
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


def _whole_number(
    environ: Mapping[str, str], name: str, *, at_least: int = 0, below: int | None = None, because: str = ""
) -> int:
    text = environ[name]
    if not text.strip().isdecimal():
        raise LaunchError(f"{name}={text!r} is not a whole number.")
    value = int(text)
    if value < at_least or (below is not None and value >= below):
        allowed = f"{at_least}..{below - 1}" if below is not None else f"at least {at_least}"
        raise LaunchError(f"{name}={value} cannot be: it must be {allowed}{f', as {because}' if because else ''}.")
    return value
