"""The place of this process among the ranks that work together, and what belongs to it."""

from __future__ import annotations

import contextlib
import functools
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

from ..devices import device_of_rank, hardware_id
from ..errors import ParallelError
from .environment import Launch
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

        >>> from nn_parallel import current_world
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
class RankContext:
    """This process's place in a world of ranks, and what belongs to it.

    ``generation`` counts the rounds that all ranks begin together with clean counters: what a rank left in the store in
    an earlier one is stale.
    """

    world: World  # as it was on joining; `distributed` is asked from torch each time
    open_store: Callable[[], dist.Store] | None = None  # None: this rank is alone, there is nobody to talk to
    timeout: timedelta = DEFAULT_TIMEOUT
    store_host: int | None = None  # the rank whose process the store lives in; None if it is no rank's
    one_node: bool = True
    generation: int = 0
    after_call: int = 0  # the last call of the generation that failed so that the group was closed
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

    def begin_generation(self, generation: int) -> None:
        """Begin another round of calls; the group stays, if there is one."""
        self.generation = generation
        self.begin_groups(after_call=0)

    def begin_groups(self, after_call: int) -> None:
        """Name the groups that come alike on all ranks, however many each of them has made so far."""
        self.after_call, self.groups_made = after_call, 0

    def next_group_name(self) -> str:
        """The name under which all ranks meet to make the next group."""
        self.groups_made += 1
        self.group_names.append(f"group{self.generation}.{self.after_call}.{self.groups_made}")
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
    """End all connections of groups; no method, which would keep the rank context in a cycle."""
    lingering += still_open(group_store_sockets)
    stop_lingering(lingering)


def stop_lingering(connections: list[socket.socket]) -> None:
    """No rank is in the group any more whose connections these are."""
    while connections:
        with connections.pop() as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # caches of torch, as of FSDP's meshes, may keep the closed group


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


@functools.cache
def host_identity() -> str:
    """The same text in two processes if process ids mean the same in both: one boot, one pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()
