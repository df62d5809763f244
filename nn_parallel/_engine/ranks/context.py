"""The context of this process as a rank: its world, its connection to the store and its process group.

A process is in a world in one of four ways:

1. A launcher started the process, and `initialize_ddp` read the launcher's variables.
2. The process is a rank of `ParallelExecutor.run`.
3. Other code has initialised torch.distributed.
4. The process is alone, as rank 0 of 1.

In the first two cases the process makes a `RankContext` and *joins* it: `join` stores the context in this module. If no
context is stored, `rank_context` asks torch.distributed at each call whether it is initialised, because other code may
initialise it at any time. If torch.distributed is initialised, this is case 3, otherwise case 4.
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
from ..torch_private import default_store
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

    ``generation`` is the number of the present generation. A generation consists of all calls and barriers between two
    failures of blocks. In a pool, each run begins a new generation too. All ranks begin a generation together, and then
    ignore records of earlier generations in the store.
    """

    world: World  # the world when this rank joined it; `current` returns the present state
    open_store: Callable[[], dist.Store] | None = None  # connects to the store; None for a lone rank without a store
    timeout: timedelta = times.DEFAULT_TIMEOUT
    store_host: int | None = None  # the rank that hosts the store; None if no rank hosts it
    # Whether all ranks are certainly on this node. If not, the kernel ends connections that get no answer from another
    # node, see `unanswered_s`.
    one_node: bool = True
    # Set in a worker of a pool. If a collective outside of all blocks can never end, the watchdog calls this function,
    # which ends the collective. The arguments are the error that says why the collective can never end, and the
    # generation. If the function is None, the watchdog ends the collective itself.
    on_deadlock: Callable[[Exception, int], None] | None = None
    # The connections through which this rank notices deaths on other nodes. None if no launcher has started the ranks,
    # or if all ranks are certainly on this node.
    links: Links | None = None
    host: StoreHost | None = None  # limits how long the store may take to answer; None if there is no limit
    generation: int = 0
    # Set when an uncaught exception ends this process. At the exit, this rank then aborts its collectives on the
    # accelerator instead of waiting for their end.
    ends_by_exception: bool = False
    # The functions to call when this rank leaves the world.
    on_leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.rank = self.world.rank
        self.world_size = self.world.world_size
        self._pid = os.getpid()
        self.group = Group(self.world, self.unanswered_s)

    @functools.cached_property
    def store(self) -> dist.Store:
        """The store, connected on first use.

        When this rank has connected, it writes its `Member` record, so that the other ranks can watch its process.

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
        """Return a text that identifies the accelerator of this rank. Ranks with the same text share an accelerator.

        The string is empty if this rank runs on the CPU, or if its accelerator cannot be identified.
        """
        if self.world.device.type == "cpu":
            return ""
        name = None
        # If the accelerator cannot be used, the creation of the process group fails later with an error that says why.
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
        """True if this process is a fork of the rank. A fork must not use the rank's store and process group."""
        return self._pid != os.getpid()

    @property
    def lost_after_s(self) -> float:
        """The seconds that another node may be out of reach before it can count as lost.

        A node that is out of reach for a shorter time never counts as lost. A node that stays out of reach counts as
        lost after about twice this time at the latest, see `end_if_unanswered`.
        """
        return min(times.LOST_AFTER, self.timeout / 3).total_seconds()

    @property
    def unanswered_s(self) -> float | None:
        """The seconds that a connection to another node may remain unanswered; None if all ranks are on one node."""
        return None if self.one_node else self.lost_after_s

    def begin_generation(self, generation: int) -> None:
        """Begin another generation. The process group, if there is one, stays open."""
        self.generation = generation
        self.group.begin_generation(generation)

    def close_links(self) -> None:
        """Close the connections to other nodes.

        The rank that hosts the store calls this only when the other ranks no longer need the store. Until then, that
        rank needs the connections to notice the deaths of the other ranks, see `Blocks.outlive_readers`.
        """
        if self.links is not None:
            self.links.close()

    def leave(self, *, abort: bool = False, within_s: float = math.inf) -> None:
        """Leave the world: close the process group, and everything else that this context has opened.

        Args:
            abort: passed on to `Group.close`.
            within_s: passed on to `Group.close`.
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
    """Close the sockets of the store and of the `Links` in a process that a rank has forked.

    The forked process has copies of these sockets. While it holds them open, other ranks would not see that the rank
    has ended. The descriptors are replaced by the null device instead of being closed, because objects in C++ close
    them when the forked process ends. If they were closed now, their numbers could belong to other files by then.
    """
    context = _joined
    if context is not None and context.world.launcher != "executor" and context.has_store:
        ports = {getattr(bottom(context.store), "port", 0), context.links.port if context.links else 0}
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in at_ports(ports - {0}):
            os.dup2(null, fd, inheritable=False)
        os.close(null)


def current_world() -> World:
    """Return the world that this process is in now. This is the body of `nn_parallel.current_world`."""
    if context := rank_context():
        return context.current()
    if launch := detect_launch(os.environ):
        return world_of(launch)
    return World(False, 0, 0, 1, _current_device())


def world_of(launch: Launch, device: torch.device | None = None) -> World:
    """Return the world of a launch, as it is before a process group connects the ranks.

    Args:
        launch: the launch that the launcher's variables describe.
        device: the device of this rank. If None, the device is chosen by the local rank.
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
    """Return the context that this process has joined, or a context for the process group that other code has made.

    Return None if there is neither.
    """
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        return _external_context()
    # `_external` is the context for a group that other code made. This group no longer exists. If this package has
    # closed the group after a failure, `group.default` is None, and the context is still valid, so that
    # `initialize_ddp` can make the group again. If instead the other code has destroyed the group, `group.default`
    # still refers to the group, and the context is no longer valid.
    return _external if _external is not None and _external.group.default is None else None


def join(context: RankContext | None) -> None:
    """Replace the world of this process by the world of ``context``; with None, leave the world.

    This function does not close the context of the former world. The caller must do so.
    """
    global _joined
    _joined = context


def _external_context() -> RankContext:
    """Return the context for the default group that other code has made.

    The function returns the same context as long as this group exists.
    """
    global _external
    if _external is None or _external.group.default is not dist.group.WORLD:
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        local_rank = rank
        node_rank = 0
        local_world_size = world_size
        one_node = False
        # If the launcher's variables describe this group, they say on which node this rank is. If the variables
        # contradict each other, they are ignored, because the code that made the group may not have used them.
        with contextlib.suppress(LaunchError):
            launch = detect_launch(os.environ)
            if launch is not None and (launch.rank, launch.world_size) == (rank, world_size):
                local_rank = launch.local_rank
                node_rank = launch.node_rank
                local_world_size = launch.local_world_size
                one_node = launch.one_node
        assert dist.group.WORLD is not None
        device = dist.group.WORLD.bound_device_id or _device_of_foreign_rank(local_rank)
        world = World(True, rank, local_rank, world_size, device, node_rank, local_world_size, "external")
        # The ranks communicate through the store of the group. Torch has no public function that returns this store.
        store = default_store()
        if _external is not None:
            _external.on_leave.close()
            _external.group.release()
        # Several groups may use the same store one after another. Each group gets its own prefix, so that its ranks do
        # not read the keys of earlier groups.
        _external = RankContext(
            world,
            lambda: dist.PrefixStore(f"nn_parallel/{next(_externals)}", store),
            one_node=one_node,
        )
        _external.group.default = dist.group.WORLD
    return _external


def _device_of_foreign_rank(local_rank: int) -> torch.device:
    """Return the device of this rank, if other code has made the process group.

    This is usually the current device. But if the current device is the first accelerator, the other code may have
    chosen no device. In this case the function returns the accelerator whose index is the local rank, if it exists.
    """
    current = _current_device()
    available = accelerators()
    return available[local_rank] if current.index == 0 and local_rank < len(available) else current


def _current_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is no accelerator."""
    available = accelerators()
    return available[current_index(available[0].type)] if available else torch.device("cpu")


_joined: RankContext | None = None  # the context that this process has joined, see `join`
_external: RankContext | None = None  # the last context that `_external_context` has returned
# Numbers for the prefixes in `_external_context`. A rank takes the next number when it first uses the store of a group.
# All ranks do this in the same call, so that they take the same number.
_externals = itertools.count(1)
os.register_at_fork(after_in_child=_release_store_in_fork)
