"""The context of this process as a rank: its world, its connection to the store and its process group.

A process is in a world in one of four ways: a launcher started it, and `initialize_ddp` read the launcher's variables;
it is a rank of `ParallelExecutor.run`; other code has initialised torch.distributed; or it is alone, as rank 0 of 1. In
the first two cases the process *joins* a `RankContext`, which this module then holds. The state of torch.distributed
distinguishes the last two cases, at each request.
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
    """The context of this process as a rank of a world.

    ``generation`` is the number of the present generation: all calls and barriers between two failures of blocks, or
    of one run of a pool. All ranks begin a generation together, and records of an earlier one in the store are stale.
    """

    world: World  # at the time of joining; `current` returns the present state
    open_store: Callable[[], dist.Store] | None = None  # None: this rank is alone, and needs no store
    timeout: timedelta = times.DEFAULT_TIMEOUT
    store_host: int | None = None  # the rank that hosts the store; None: no rank does
    one_node: bool = True  # all ranks are on one node
    # Called by the watchdog with the error of a collective outside of all blocks, and ends the collective. None: the
    # watchdog ends it.
    on_deadlock: Callable[[Exception], None] | None = None
    links: Links | None = None  # None: all ranks are on this node, or deaths on other nodes cannot be noticed
    host: StoreHost | None = None  # None: nothing limits how long the store may take to answer
    generation: int = 0
    ends_by_exception: bool = False  # this process is ending by an exception that was not caught
    on_leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed when this rank leaves

    def __post_init__(self) -> None:
        self.rank = self.world.rank
        self.world_size = self.world.world_size
        self._pid = os.getpid()
        self.group = Group(self.world, self.unanswered_s)

    @functools.cached_property
    def store(self) -> dist.Store:
        """The store, connected on first use.

        This rank then writes its `Member` record, by which the other ranks can watch its process.

        Raises:
            LaunchError: another process has already connected as this rank.
        """
        assert self.open_store is not None
        store = self.open_store()
        place = self.world.local_rank, self.world.local_world_size
        port = self.links.port if self.links else 0
        own_record = encode(
            Member(host_identity(), socket.gethostname(), os.getpid(), *place, self._accelerator(), port)
        )
        stored_record = self._connection(store).swap(member_key(self.rank), "", own_record)
        if stored_record != own_record:
            other = decode(Member, member_key(self.rank), stored_record)
            raise LaunchError(
                f"There are two ranks {self.rank}: the other one is process {other.pid} on {other.host_name}. Another "
                "job uses the same address, or two processes have the same RANK. Set MASTER_PORT to a free port, the "
                "same on every rank of this job."
            )
        return store

    def _accelerator(self) -> str:
        """Return a text that identifies the accelerator of this rank and its host; empty if they are not known."""
        if self.world.device.type == "cpu":
            return ""
        name = None
        # If the accelerator cannot be used, making the process group fails later, and that error says why.
        with contextlib.suppress(RuntimeError):
            name = hardware_id(self.world.device)
        return "" if name is None else f"{os.environ.get('NCCL_HOSTID') or host_identity()}/{name}"

    @functools.cached_property
    def connection(self) -> StoreClient:
        """The connection of the main thread to the store."""
        return self._connection(self.store)

    def connect(self) -> StoreClient:
        """Open another connection to the store, for another thread."""
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
        """True once this rank has connected to the store."""
        return "store" in vars(self)

    @property
    def is_inherited(self) -> bool:
        """True if this process is a fork of the rank. A fork must not use the store and the group of the rank."""
        return self._pid != os.getpid()

    @property
    def lost_after_s(self) -> float:
        """The seconds for which a node may be out of reach. After twice as long it certainly counts as lost."""
        return min(times.LOST_AFTER, self.timeout / 3).total_seconds()

    @property
    def unanswered_s(self) -> float | None:
        """Seconds for which a connection to another node may get no answer; None if all ranks are on one node."""
        return None if self.one_node else self.lost_after_s

    def begin_generation(self, generation: int) -> None:
        """Begin another generation. The process group, if there is one, stays open."""
        self.generation = generation
        self.group.begin_generation(generation)

    def leave(self, *, abort: bool = False, within_s: float = math.inf) -> None:
        """Leave the world: close the process group, and everything else that this context has opened.

        Args:
            abort: see `Group.close`, as for ``within_s``.
            within_s: see there.
        """
        self.group.close(abort=abort, within_s=within_s)
        self.on_leave.close()
        self.group.release()

    def current(self) -> World:
        """Return the present world. Its ``distributed`` is true while a process group connects the ranks."""
        w = self.world
        connected = self.open_store is not None and dist.is_initialized()
        return World(connected, *w[1:], w.node_rank, w.local_world_size, w.launcher)


def _release_store_in_fork() -> None:
    """Close the sockets of the store and of the links in a process that a rank has forked.

    The fork has copies of these sockets. While the fork holds them, other ranks would not see that the rank has ended.
    The descriptors are not closed but replaced by the null device, because objects in C++ close them again when the
    fork ends: by then the numbers could name other files.
    """
    context = _joined
    if context is not None and context.world.launcher != "executor" and context.has_store:
        ports = {getattr(bottom(context.store), "port", 0), context.links.port if context.links else 0}
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in at_ports(ports - {0}):
            os.dup2(null, fd, inheritable=False)
        os.close(null)


def current_world() -> World:
    """Return the world that this process is in now, as `nn_parallel.current_world` does."""
    if context := rank_context():
        return context.current()
    if launch := detect_launch(os.environ):
        return world_of(launch)
    return World(False, 0, 0, 1, _current_device())


def world_of(launch: Launch, device: torch.device | None = None) -> World:
    """Return the world of a launch, before a process group connects the ranks.

    Args:
        launch: as the launcher's variables describe it.
        device: the device of this rank; None: the device that fits its local rank.
    """
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
    """Return the context of this process.

    Returns:
        The context that this process has joined, or the context for a process group that other code has made. None if
        there is neither.
    """
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        return _external_context()
    # If a failure has closed the group of other code, its context is kept, so that `initialize_ddp` can make the group
    # again. Only then `group.default` is None. If the other code has destroyed its group, `group.default` still refers
    # to that group.
    return _external if _external is not None and _external.group.default is None else None


def join(context: RankContext | None) -> None:
    """Join a world in place of the present one. With None, leave the world.

    The caller must close the context of the present world itself.
    """
    global _joined
    _joined = context


def _external_context() -> RankContext:
    """Return the context for a default group that other code has made. It is the same as long as the group exists."""
    global _external
    if _external is None or _external.group.default is not dist.group.WORLD:
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        local_rank = rank
        node_rank = 0
        local_world_size = world_size
        one_node = False
        # The launcher's variables say on which node each rank is, if they describe this group. If they contradict each
        # other, they are ignored: other code need not have used them.
        with contextlib.suppress(LaunchError):
            launch = detect_launch(os.environ)
            if launch is not None and (launch.rank, launch.world_size) == (rank, world_size):
                local_rank = launch.local_rank
                node_rank = launch.node_rank
                local_world_size = launch.local_world_size
                one_node = launch.one_node
        device = dist.distributed_c10d._get_default_group().bound_device_id or _device_of_foreign_rank(local_rank)
        world = World(True, rank, local_rank, world_size, device, node_rank, local_world_size, "external")
        # The ranks need the store to communicate beside the collectives. Torch has no public function that returns it.
        store = dist.distributed_c10d._get_default_store()
        if _external is not None:
            _external.on_leave.close()
            _external.group.release()
        # Several groups may use the same store one after another. A new prefix hides the keys of the earlier groups.
        _external = RankContext(
            world,
            lambda: dist.PrefixStore(f"nn_parallel/{next(_externals)}", store),
            one_node=one_node,
        )
        _external.group.default = dist.group.WORLD
    return _external


def _device_of_foreign_rank(local_rank: int) -> torch.device:
    """Return the device of a rank whose group other code has made.

    It is the current device if that code has chosen one. If the current device is the first one, this may only mean
    that the code has chosen none. Then it is the accelerator of the local rank.
    """
    current = _current_device()
    available = accelerators()
    return available[local_rank] if current.index == 0 and local_rank < len(available) else current


def _current_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is no accelerator."""
    available = accelerators()
    return available[current_index(available[0].type)] if available else torch.device("cpu")


_joined: RankContext | None = None  # see `join`
_external: RankContext | None = None  # see `_external_context`
# The numbers of the prefixes in `_external_context`. The number is drawn when the store is first used. All ranks do
# this in the same call, so they draw the same number.
_externals = itertools.count(1)
os.register_at_fork(after_in_child=_release_store_in_fork)
