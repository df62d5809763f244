"""The place of this process among the ranks that work together, and what belongs to it.

There are four ways to be in a world: a launcher started this process and `initialize_ddp` read it; this is a rank of
`ParallelExecutor.run`; some other code has initialised torch.distributed; or alone, as rank 0 of 1. The first two
*join* a `RankContext`; the last two are seen each time from the state of torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import LaunchError
from ...world import World
from ..devices import accelerators, current_index, device_of_rank, hardware_id
from . import times
from .environment import Launch, detect_launch
from .group import Group
from .links import Links
from .sockets import at_ports, bottom
from .store import (
    Member,
    StoreClient,
    StoreHost,
    clone_store,
    decode,
    encode,
    host_identity,
    member_key,
)


@dataclass(eq=False)
class RankContext:
    """This process's place in a world of ranks, and what belongs to it.

    ``generation`` counts the rounds that all ranks begin together with clean counters: what a rank left in the store in
    an earlier one is stale.
    """

    world: World  # as it was on joining; `distributed` is asked from torch each time
    open_store: Callable[[], dist.Store] | None = None  # None: this rank is alone, there is nobody to talk to
    timeout: timedelta = times.DEFAULT_TIMEOUT
    store_host: int | None = None  # the rank whose process the store lives in; None if it is no rank's
    one_node: bool = True
    on_deadlock: Callable[[Exception], None] | None = None  # takes the error of a collective outside of all blocks
    links: Links | None = None  # None: all ranks are on this node, or nothing is known of the others
    host: StoreHost | None = None  # None: nothing limits how long the store may take to answer
    generation: int = 0
    ends_by_exception: bool = False  # this process, by one that nobody has caught
    on_leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.rank = self.world.rank
        self.world_size = self.world.world_size
        self._pid = os.getpid()
        self.group = Group(self.world, self.unanswered_s)

    @functools.cached_property
    def store(self) -> dist.Store:
        """The store, connected on first use; this rank then says where it lives, so that others can see it die.

        Raises:
            LaunchError: another process has come as this rank.
        """
        assert self.open_store is not None
        store = self.open_store()
        place = self.world.local_rank, self.world.local_world_size
        port = self.links.port if self.links else 0
        me = encode(Member(host_identity(), socket.gethostname(), os.getpid(), *place, self._accelerator(), port))
        there = self._connection(store).swap(member_key(self.rank), "", me)
        if there != me:
            other = decode(Member, member_key(self.rank), there)
            raise LaunchError(
                f"There are two ranks {self.rank}: the other one is process {other.pid} on {other.host_name}. Another "
                "job uses the same address, or two processes have the same RANK. Set MASTER_PORT to a free port, the "
                "same on every rank of this job."
            )
        return store

    def _accelerator(self) -> str:
        """Return which accelerator of which host this rank has; empty if that is not known."""
        if self.world.device.type == "cpu":
            return ""
        name = None
        with contextlib.suppress(RuntimeError):  # one that cannot be used: making the group fails, and says why
            name = hardware_id(self.world.device)
        return "" if name is None else f"{os.environ.get('NCCL_HOSTID') or host_identity()}/{name}"

    @functools.cached_property
    def connection(self) -> StoreClient:
        """The main thread's connection to the store."""
        return self._connection(self.store)

    def connect(self) -> StoreClient:
        """Another connection to the store, for another thread."""
        store, sockets = clone_store(self.store, self.unanswered_s)
        connection = self._connection(store)
        if self.host is not None:
            connection.limit_requests(self.host, sockets)
        return connection

    def _connection(self, store: dist.Store) -> StoreClient:
        connection = StoreClient(store, self.rank, self.world_size, self.store_host)
        self.on_leave.callback(connection.close)
        return connection

    @property
    def has_store(self) -> bool:
        """Return true once this rank has connected to the store."""
        return "store" in vars(self)

    @property
    def is_inherited(self) -> bool:
        """True if this process is a fork of the rank, and may not use what belongs to the rank."""
        return self._pid != os.getpid()

    @property
    def lost_after_s(self) -> float:
        """Return for how long a node may be out of reach. After twice as long it surely counts as gone."""
        return min(times.LOST_AFTER, self.timeout / 3).total_seconds()

    @property
    def unanswered_s(self) -> float | None:
        """Seconds for which a connection to another node may get no answer; None if all ranks are on one node."""
        return None if self.one_node else self.lost_after_s

    def begin_generation(self, generation: int) -> None:
        """Begin another round of calls; the group stays, if there is one."""
        self.generation = generation
        self.group.begin_generation(generation)

    def leave(self, *, abort: bool = False, within_s: float = math.inf) -> None:
        """Close the process group, and for good all that was opened for this place among the ranks."""
        self.group.close(abort=abort, within_s=within_s)
        self.on_leave.close()
        self.group.release()

    def current(self) -> World:
        """Return the world as it is now: connected by a process group or not."""
        w = self.world
        connected = self.open_store is not None and dist.is_initialized()
        return World(connected, *w[1:], w.node_rank, w.local_world_size, w.launcher)


def _let_go_of_store() -> None:
    """In a fork of a rank: let others see the end of the rank's store, and of its links, though this process lives.

    The numbers stay taken, as objects in C++ close them at the end of the fork.
    """
    context = _joined
    if context is not None and context.world.launcher != "executor" and context.has_store:
        ports = {getattr(bottom(context.store), "port", 0), context.links.port if context.links else 0}
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in at_ports(ports - {0}):
            os.dup2(null, fd, inheritable=False)
        os.close(null)


def current_world() -> World:
    """Return who this process is now, as `nn_parallel.current_world` does."""
    if context := rank_context():
        return context.current()
    if launch := detect_launch(os.environ):
        return world_of(launch)
    return World(False, 0, 0, 1, _current_device())


def world_of(launch: Launch, device: torch.device | None = None) -> World:
    """Return the world of a launch, before a process group connects it; ``device`` overrules the launcher's."""
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


def rank_context() -> RankContext | None:
    """Return the ranks that this process has joined, or those of a process group that other code has made, or None."""
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        return _external_context()
    return _external if _external is not None and _external.group.default is None else None  # closed by us


def join(context: RankContext | None) -> None:
    """Enter a world in the place of the present one; None leaves it. The caller closes what belonged to the old one."""
    global _joined
    _joined = context


def _external_context() -> RankContext:
    """Return the rank context of a default group that other code made; the same one as long as the group is."""
    global _external
    if _external is None or _external.group.default is not dist.group.WORLD:
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        local_rank = rank
        node_rank = 0
        local_world_size = world_size
        one_node = False
        with contextlib.suppress(LaunchError):  # other code may have its own ways to find what it needs
            launch = detect_launch(os.environ)
            if launch is not None and (launch.rank, launch.world_size) == (rank, world_size):
                local_rank = launch.local_rank
                node_rank = launch.node_rank
                local_world_size = launch.local_world_size
                one_node = launch.one_node
        device = dist.distributed_c10d._get_default_group().bound_device_id or _device_of_foreign_rank(local_rank)
        world = World(True, rank, local_rank, world_size, device, node_rank, local_world_size, "external")
        # torch offers no public way to the store of a group; without it ranks cannot talk beside the collectives.
        store = dist.distributed_c10d._get_default_store()
        if _external is not None:
            _external.on_leave.close()
            _external.group.release()
        # The store may outlive the group: what was told in the life of an earlier one is under another prefix.
        _external = RankContext(
            world,
            lambda: dist.PrefixStore(f"nn_parallel/{next(_externals)}", store),
            one_node=one_node,
        )
        _external.group.default = dist.group.WORLD
    return _external


def _device_of_foreign_rank(local_rank: int) -> torch.device:
    """Return the current device, unless that is the first one, which it also is where nobody has chosen any."""
    current = _current_device()
    available = accelerators()
    return available[local_rank] if current.index == 0 and local_rank < len(available) else current


def _current_device() -> torch.device:
    available = accelerators()
    return available[current_index(available[0].type)] if available else torch.device("cpu")


_joined: RankContext | None = None
_external: RankContext | None = None
_externals = itertools.count(1)  # counted on first use, which is a call that all ranks make
os.register_at_fork(after_in_child=_let_go_of_store)
