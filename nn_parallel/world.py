"""Who am I among the ranks that work together, and through which store do we talk?

There are four ways to be in a world: a launcher started this process and `initialize_ddp` read it; this is a rank of
`ParallelExecutor.run`; some other code has initialised torch.distributed; or alone, as rank 0 of 1. The first two
*join* a `Membership`; the last two are seen each time from the state of torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .devices import accelerators, device_of_rank, hardware_id
from .errors import LaunchError, ParallelError
from .launchers import Launch, detect_launch
from .sockets import connected_since, end_if_unanswered, open_sockets, still_open

DEFAULT_TIMEOUT = timedelta(minutes=60)
GONE_AFTER = timedelta(seconds=60)


class _WorldTuple(NamedTuple):
    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


class World(_WorldTuple):
    """Who this process is among its ranks; unpacks as ``distributed, rank, local_rank, world_size, device``.

    Attributes:
        distributed: whether a process group connects the ranks, so that collectives can be called.
        rank: this process, 0 to ``world_size - 1``.
        local_rank: this process among those of its node.
        world_size: how many ranks work together.
        device: the device of this rank.
        node_rank: this node among the nodes.
        local_world_size: how many ranks run on this node.
        launcher: ``"torchrun"``, ``"env"`` (variables or arguments set by hand), ``"slurm"``, ``"openmpi"``,
            ``"hydra"`` (MPICH, Intel MPI), ``"mvapich2"``, ``"jsrun"``, ``"executor"``, ``"external"`` (other code has
            initialised torch.distributed) or ``"none"``.

    Example::

        >>> distributed, rank, local_rank, world_size, device = current_world()
        >>> rank, world_size
        (0, 1)
    """

    node_rank: int
    local_world_size: int
    launcher: str

    def __new__(
        cls,
        distributed: bool,
        rank: int,
        local_rank: int,
        world_size: int,
        device: torch.device,
        node_rank: int = 0,
        local_world_size: int = 1,
        launcher: str = "none",
    ) -> World:
        self = super().__new__(cls, distributed, rank, local_rank, world_size, device)
        self.node_rank, self.local_world_size, self.launcher = node_rank, local_world_size, launcher
        return self

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that logs and writes files."""
        return self.rank == 0


@dataclass(eq=False)
class Membership:
    """This process's place in a world of ranks, and what belongs to it.

    ``term`` counts the rounds that all ranks begin together with clean counters: what a rank left in the store in an
    earlier term is stale.
    """

    world: World  # as it was on joining; `distributed` is asked from torch each time
    open_store: Callable[[], dist.Store] | None = None  # None: this rank is alone, there is nobody to talk to
    timeout: timedelta = DEFAULT_TIMEOUT
    store_host: int | None = None  # the rank whose process the store lives in; None if it is no rank's
    one_node: bool = True
    term: int = 0
    after_call: int = 0  # the last call of the term that failed so that the group was closed
    groups_made: int = 0  # since then
    group_names: list[str] = field(default_factory=list)
    group_sockets: dict[int, int] = field(default_factory=dict)  # fd -> inode
    groups_found: set[str] = field(default_factory=set)  # the names of those whose connections these are
    groups_aborted: set[str] = field(default_factory=set)  # the names of those that have been, as far as they can be
    group_store: dist.Store | None = None  # through which the ranks of a group find each other
    group_store_sockets: dict[int, int] = field(default_factory=dict)  # its connection, until that is ended
    lingering: list[socket.socket] = field(default_factory=list)  # of a closed group, whose other ranks may still write
    group: Any = None  # the default process group, until we close it
    first_group_id: int = 0  # of the present groups, in torch's flight recorder
    on_deadlock: Callable[[ParallelError], None] | None = None  # where no block raises the error of one on this rank
    interrupted: bool = False  # another rank has failed in what this one takes part in; until the group is closed
    rank_0_is_gone: Callable[[], bool] | None = None  # can tell where ranks may be on several nodes
    on_leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.on_leave.callback(leave_groups, self.lingering, self.group_store_sockets)

    @functools.cached_property
    def store(self) -> dist.Store:
        """The store, connected on first use; this rank then says where it lives, so that its host can see it die."""
        assert self.open_store is not None
        store = self.open_store()
        facts = {
            "host": host_identity(),
            "host_name": socket.gethostname(),
            "pid": os.getpid(),
            "local_rank": self.world.local_rank,
            "local_world_size": self.world.local_world_size,
            "device": f"{self.world.device} {hardware_id(self.world.device) or ''}".strip(),
        }
        store.set(f"member/{self.rank}", json.dumps(facts))
        return store

    def clone_store(self) -> tuple[dist.Store, dict[int, int]]:
        """The store by another connection, as one serves one request at a time; and that connection."""
        store, before = self.store, open_sockets()
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        connection = connected_since(before, store)
        self.end_if_unanswered(connection)
        return clone, connection

    def end_if_unanswered(self, sockets: dict[int, int]) -> None:
        """Have connections to other nodes end when those are out of reach, not when TCP gives up, a quarter later."""
        if not self.one_node:
            for connection in still_open(sockets):
                with connection:
                    end_if_unanswered(connection, self.gone_after_s)

    @property
    def gone_after_s(self) -> float:
        """How long a node may be out of reach before its ranks count as gone; they themselves find out in two steps."""
        return min(GONE_AFTER, self.timeout / 2).total_seconds()

    def begin_term(self, term: int) -> None:
        """Begin another round of calls; the group stays, if there is one."""
        self.term = term
        self.begin_groups(after_call=0)

    def begin_groups(self, after_call: int) -> None:
        """Name the groups that come alike on all ranks, however many each of them has made so far."""
        self.after_call, self.groups_made = after_call, 0

    def next_group_name(self) -> str:
        """The name under which all ranks meet to make the next group."""
        self.groups_made += 1
        self.group_names.append(f"group{self.term}.{self.after_call}.{self.groups_made}")
        return self.group_names[-1]

    def take_back_group_name(self) -> None:
        """No group has been made under the last name: the next one gets it."""
        self.groups_made -= 1
        self.group_names.pop()

    def await_keys(self, keys: list[str]) -> None:
        """Return once all of these stand in the store, whose own wait would be deaf to Ctrl-C.

        Raises:
            ParallelError: one did not come within the timeout of the ranks.
        """
        start, pause = time.monotonic(), 0.0001
        while not self.store.check(keys):
            if time.monotonic() - start > self.timeout.total_seconds():
                missing = ", ".join(key for key in keys if not self.store.check([key]))
                raise ParallelError(f"Rank {self.rank} waited {self.timeout} for other ranks to tell {missing}.")
            time.sleep(pause)
            pause = min(pause * 1.2, 0.05)

    def current(self) -> World:
        """The world as it is now: connected by a process group or not."""
        w = self.world
        connected = self.open_store is not None and dist.is_initialized()
        return World(connected, *w[1:], w.node_rank, w.local_world_size, w.launcher)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size


def leave_groups(lingering: list[socket.socket], group_store_sockets: dict[int, int]) -> None:
    """End all connections of groups; no method, which would keep the membership in a cycle."""
    lingering += still_open(group_store_sockets)
    stop_lingering(lingering)


def stop_lingering(connections: list[socket.socket]) -> None:
    """No rank is in the group any more whose connections these are."""
    while connections:
        with connections.pop() as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # caches of torch, as of FSDP's meshes, may keep the closed group


def current_world() -> World:
    """Who this process is now.

    Asks and starts nothing: in a process that a launcher started, before `initialize_ddp`, it tells what the launcher
    said, with ``distributed`` False.

    Raises:
        LaunchError: the launch environment is half set.

    Example::

        >>> current_world().is_main
        True
    """
    if member := membership():
        return member.current()
    if launch := detect_launch(os.environ):
        return world_of(launch)
    return World(False, 0, 0, 1, _current_device())


def world_of(launch: Launch, device: torch.device | None = None) -> World:
    """The world that a launcher describes, before a process group connects it; ``device`` overrules the launcher's."""
    return World(
        False,
        launch.rank,
        launch.local_rank,
        launch.world_size,
        device or device_of_rank(launch.local_rank, launch.local_world_size),
        launch.node_rank,
        launch.local_world_size,
        launch.launcher,
    )


def membership() -> Membership | None:
    """What this process has joined, or the process group that other code has made, or None."""
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        return _external_membership()
    return _external if _external is not None and _external.group is None else None  # closed by us


def join(member: Membership | None) -> None:
    """Enter a world in the place of the present one; None leaves it. The caller closes what belonged to the old one."""
    global _joined
    _joined = member


@functools.cache
def host_identity() -> str:
    """The same text in two processes if process ids mean the same in both: one boot, one pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _external_membership() -> Membership:
    """The membership of the default group that other code made, the same object until other code makes another one."""
    global _external
    if _external is None or _external.group is not dist.group.WORLD:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank, node_rank, local_world_size, one_node = rank, 0, world_size, False
        with contextlib.suppress(LaunchError):  # other code may have its own ways to find what it needs
            launch = detect_launch(os.environ)
            if launch is not None and (launch.rank, launch.world_size) == (rank, world_size):
                local_rank, node_rank, local_world_size = launch.local_rank, launch.node_rank, launch.local_world_size
                one_node = launch.one_node
        device = _current_device()
        world = World(True, rank, local_rank, world_size, device, node_rank, local_world_size, "external")
        # torch offers no public way to the store of a group; without it ranks cannot talk beside the collectives.
        store = dist.distributed_c10d._get_default_store()
        if _external is not None:
            _external.on_leave.close()
        # The store may outlive the group: what was told in the life of an earlier one is under another prefix.
        _external = Membership(
            world,
            lambda: dist.PrefixStore(f"nn_parallel/{next(_externals)}", store),
            one_node=one_node,
            group=dist.group.WORLD,
        )
    return _external


def _current_device() -> torch.device:
    found = accelerators()
    return found[torch.accelerator.current_device_index()] if found else torch.device("cpu")


_joined: Membership | None = None
_external: Membership | None = None
_externals = itertools.count(1)  # counted on first use, which is a call that all ranks make
