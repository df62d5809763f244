"""The process group of a world: how it is made, closed without waiting for other ranks, and made again.

When a block fails, each rank must leave the collective that it is in, and close the group. Torch can abort the
collectives of NCCL (see `nccl`), but not those of gloo: ``abort`` and ``destroy_process_group`` do not wake a thread
that waits in a collective of gloo. Such a thread wakes only when one of its connections ends.

Therefore `Group.abort` ends the connections of its own rank by calling ``shutdown`` on the sockets. Any thread can do
this. Gloo then sees the end of the connection, and the collective raises an error. The details:

- Torch gives no access to these sockets. But gloo writes into the store at which addresses the ranks listen. A socket
  that has such an address at either end belongs to gloo. The sockets are remembered with their inodes. A descriptor
  that has another inode later is left alone, because gloo has then closed the socket. A listening socket is never shut
  down, because gloo ends the process if it loses one.
- Only the reading side is shut down, so that the peers do not see the end of the connection. Each peer is freed by its
  own watchdog, which knows the cause of the failure. The end of a connection could even block a peer forever: if a
  write of gloo fails before gloo has noticed the end, gloo never wakes the thread that waits for this write
  (``Pair::signalException`` skips unbound buffers that are being sent).
- The connection must stay open even when gloo on this rank has closed its descriptor of the socket. A peer may begin a
  write after that, and if the write failed, the peer could be blocked forever in the same way. So this rank keeps a
  duplicate of each socket until all ranks have certainly left the group, namely until the ranks make the next group.

A closed group is kept in `_closed` until no other object refers to it. This avoids a deadlock: if a
`DistributedDataParallel` model held the last reference, the end of the model would destroy the group in C++ without
releasing the GIL, and would wait there for gloo's threads. But these threads wait for the GIL in order to drop their
last asynchronous operations. If Python code drops the last reference to a group, torch releases the GIL first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import LaunchError
from ...world import World
from .. import background
from ..devices import synchronize_in_thread
from ..failures import summary
from ..interrupts import RLock
from ..torch_private import gloo_addresses, groups, reset_group_names, set_timeout
from . import nccl, times
from .flight_recorder import next_group_id, running_collectives
from .sockets import bottom, connected_at, duplicate, interface_to_other_nodes, still_open
from .store import clone_store

# The functions of `torch.distributed.nn.functional`, which optimizers import, have default arguments that are evaluated
# at the first import. They would keep a reference to the default group of that time, even after the group was closed.
# Therefore the module is imported now, with the default group set to None meanwhile.
_present = dist.group.WORLD
dist.group.WORLD = None
import torch.distributed.nn.functional  # noqa: E402, F401

dist.group.WORLD = _present
del _present


# `sys.getrefcount` returns this number for a group to which only the list `_closed` refers, because the argument of
# `sys.getrefcount` counts as a second reference.
ONLY_OURS = 2
logger = logging.getLogger("nn_parallel")
_closed: list[dist.ProcessGroup] = []  # closed groups that other objects may still refer to


class Group:
    """The default process group of a world, and the groups that users make beside it."""

    def __init__(self, world: World, unanswered_s: float | None) -> None:
        """Set the attributes, without making a group yet.

        Args:
            world: the world of this rank.
            unanswered_s: how long a connection to another node may remain unanswered; None if all ranks are on one
                node.
        """
        self._world = world
        self._unanswered_s = unanswered_s
        self.default: Any = None  # torch's default group; None before it is made, and after this package has closed it
        # The lowest id that the present groups can have in the records of gloo in torch's flight recorder. Records with
        # lower ids are ignored, because they belong to closed groups.
        self.first_id = 0
        # The number of the present generation, and the number of groups that this rank has begun to make in this
        # generation. Both numbers are the same on all ranks until a failure, see `begin_generation`.
        self.begun = 0, 0
        # True from the moment at which this rank ends connections of the present groups until the groups are closed.
        # Meanwhile `error` returns None, because this rank itself has made the collectives in these groups fail.
        self.interrupted = False
        # A counter that rises by one when `close` begins to close the groups, and again when the groups are closed. A
        # thread reads the counter before it decides to abort the groups, and passes the value to `abort`. If the
        # counter has risen since then, `abort` does nothing, because the groups that the thread meant may be closed.
        self.times_closed = 0
        self.cannot_end = False  # set if the abort of the group hangs; this process can then make no other group
        self._names_in_store: list[str] = []  # the groups whose keys the next `make` deletes from the store
        self._sockets: dict[int, int] = {}  # gloo's connections of all groups, as ``{descriptor: inode}``
        self._found_groups: set[str] = set()  # the names of the groups whose connections `_sockets` contains
        self._aborts = nccl.Aborts()
        # The lowest id that the present groups can have in the flight recorder's records of NCCL. Gloo and NCCL number
        # the groups independently of each other; see `first_id` for gloo.
        self._first_nccl_id = 0
        self._closing = RLock()  # guards `times_closed` and `_sockets`, because any thread may call `abort`
        self._timeout_s = 0.0  # the timeout of the default group in seconds, which `make` sets
        self._store: dist.Store | None = None  # the connection to the store that `_own_connection` has opened
        # The socket of `_store`, as ``{descriptor: inode}``. Empty if the connection must not be used again.
        self._store_sockets: dict[int, int] = {}
        self._for_thread: dist.ProcessGroup | None = None  # the open group that `for_thread` has made, if any
        self._half_closed: list[socket.socket] = []  # duplicates that keep connections open, see the module's docstring
        self._on_release = contextlib.ExitStack()  # restores the environment variables that `make` has set

    def begin_generation(self, generation: int) -> None:
        """Begin a generation, in which groups are numbered from one again.

        The number of a group is part of its name, which must be the same on all ranks. Before a failure, some ranks may
        have begun to make a group that others have not begun, so that their numbers differ until the next generation.
        """
        self.begun = generation, 0

    def make(self, store: dist.Store, backend: str | None, timeout: timedelta, shared: str) -> None:
        """Make the default process group. All ranks must call this together.

        The keys of the group in the store begin with a prefix that no earlier group has used.

        Args:
            store: the store of the ranks.
            backend: torch's name of the backend. If None, a suitable backend is chosen for each kind of device.
            timeout: the limit for making the group, and for each of its collectives.
            shared: a text that says which ranks share an accelerator, for a warning; an empty string if no ranks do.

        Raises:
            LaunchError: torch could not make the group.
        """
        world = self._world
        on_cpu = world.device.type == "cpu"
        self._timeout_s = timeout.total_seconds()
        generation, made = self.begun
        name = f"group{generation}.{made + 1}"
        self.begun = (generation, made + 1)
        if backend is None:
            backend = self._backend(shared)
        if world.rank == 0:
            _delete_groups(store, self._names_in_store)  # no rank is in these groups any more
            if not on_cpu:
                bottom(store).delete_key(nccl.DUMP_KEY)
        self._close_half_closed()
        self._names_in_store = [name]
        rendezvous = dist.PrefixStore(name, self._own_connection(store))
        self._set_environment()
        connect_within = timeout
        if world.device.type in ("cpu", "cuda"):  # for other devices, torch cannot change the timeout after the init
            connect_within = _connect_within(timeout)
        hook = sys.excepthook
        self.first_id = next_group_id()
        self._first_nccl_id = next_group_id("nccl")
        reset_group_names()
        try:
            dist.init_process_group(
                backend,
                store=rendezvous,
                rank=world.rank,
                world_size=world.world_size,
                timeout=connect_within,
                device_id=None if on_cpu else world.device,
            )
            if connect_within != timeout:
                set_timeout(timeout)
            self._sockets = connected_at(gloo_addresses(bottom(rendezvous)))
        except (RuntimeError, ValueError) as error:
            self._store_sockets.clear()  # drops the connection, which may be in the middle of a request
            if isinstance(error, ValueError) and "backend" not in str(error).lower():
                raise
            if self.interrupted:
                raise LaunchError(f"Another rank failed while rank {world.rank} made its process group.") from error
            raise LaunchError(
                f"Rank {world.rank} of {world.world_size} could not make a {backend} group within "
                f"{timeout.total_seconds():g} s: {summary(error)}"
            ) from error
        finally:
            # `init_process_group` has replaced the hook by a new one that calls the old one. Without this line, each
            # new group would make this chain of hooks longer.
            sys.excepthook = hook
        self._found_groups = set(groups().values())  # only the default group exists, and its connections are known
        self.default = dist.group.WORLD
        # If `for_thread` had made a group, the user has destroyed that group together with the former default group.
        self._for_thread = None
        _drop_closed_groups()

    def for_thread(self, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
        """Return a gloo group of all ranks for the collectives of a background thread. All ranks call this together.

        The group is made at the first call, and closed together with the default group. The limit of its collectives is
        the default timeout of this package, even if the timeout of the other groups is shorter.

        Args:
            store: the connection of the calling thread to the store of the ranks.
            timeout: the limit for making the group.
        """
        if self._for_thread is None:
            self._for_thread = dist.new_group(backend="gloo", timeout=_connect_within(timeout))
            set_timeout(times.DEFAULT_TIMEOUT, self._for_thread)
            self.find_connections(store)
        return self._for_thread

    def close(self, *, abort: bool = True, within_s: float = math.inf) -> None:
        """Close all process groups without waiting for other ranks. `initialize_ddp` can make the default group again.

        Args:
            abort: if true, abort the collectives that run on the accelerator; otherwise, wait first until they end.
            within_s: the longest time to wait for these collectives; a shorter timeout of the group takes precedence.
                Collectives that have not ended in time are aborted.
        """
        if dist.is_initialized():
            is_over = not abort and self._has_ended(within_s)
            # Another thread may have decided to abort these groups, but not have called `abort` yet. The new value of
            # `times_closed` makes that call do nothing.
            with self._closing:
                self.times_closed += 1
            if is_over:
                self._end_reading()
            else:
                self.abort()
            self.cannot_end = not self._aborts.finish()
            if self.cannot_end:
                return
            # Closed groups are kept in `_closed`, see the docstring of this module. But a group whose connections are
            # not known is not kept, because its connections end only when the group is destroyed.
            _closed.extend(group for group, name in groups().items() if name in self._found_groups)
            dist.destroy_process_group()
            self.default = None
        if self._for_thread is not None:
            self._for_thread = None
            background.finish(times.THREAD_LEAVES_WITHIN_S)
        with self._closing:
            self.times_closed += 1
            self._sockets = {}
            self.interrupted = False
        self._found_groups.clear()

    def release(self) -> None:
        """Release the sockets, groups and environment variables that closed groups have left.

        Called when this rank leaves the world and makes no more groups.
        """
        self._half_closed += still_open(self._store_sockets)
        self._store_sockets.clear()
        self._store = None
        self._close_half_closed()
        self._on_release.close()
        _drop_closed_groups()

    def abort(self, times_closed: int | None = None) -> None:
        """Free this rank from its collective, or from making a group, see the docstring of this module.

        Any thread may call this method any number of times. If this rank has an accelerator, the caller must interrupt
        the main thread first, because an aborted collective of an accelerator leaves wrong numbers.

        Args:
            times_closed: the value that the attribute `times_closed` had before the caller decided to abort. If the
                attribute has changed since then, the method does nothing. If None, abort the present groups in any
                case.
        """
        with self._closing:
            if times_closed in (None, self.times_closed):
                self._end_reading()
                self._aborts.begin(groups(), self._first_nccl_id)

    def error(self) -> dist.DistBackendError | None:
        """Return the error of a failed collective of an accelerator; None if there is none.

        On the CPU there is nothing to look for, because collectives of gloo raise their errors themselves.
        """
        if self._world.device.type == "cpu" or self.interrupted:
            return None
        return nccl.error_of(groups(), self._world.device)

    def is_gloo_alone(self) -> bool:
        """Return whether gloo is the only backend of all groups.

        If there is another backend, no collective may be aborted while the main thread goes on, because an aborted
        collective of another backend returns wrong numbers.
        """
        return not any(map(nccl.backends_of, groups()))

    def has_ended_on_accelerator(self) -> bool:
        """Return whether all work that is queued on the accelerator of this rank ends within `times.ENDS_WITHIN_S`."""
        return nccl.has_ended(self._world.device, times.ENDS_WITHIN_S)

    def state_of_nccl(self) -> str:
        """Return a text that changes when a collective of NCCL begins or ends; an empty string if none is running."""
        return running_collectives(self._first_nccl_id, "nccl") if dist.is_initialized() else ""

    def find_connections(self, store: dist.Store) -> bool:
        """Find the connections of groups that users have made, so that `abort` can end them.

        Args:
            store: the calling thread's own connection to the store of the groups. A connection serves one request at a
                time, and the main thread's connection may be waiting for an answer, for instance in `new_group`.

        Returns:
            True if the connections of further groups are now known.
        """
        times_closed = self.times_closed
        names = set(groups().values()) - self._found_groups
        if not names:
            return False
        connections = connected_at(gloo_addresses(bottom(store)))
        with self._closing:
            # If these groups have been closed meanwhile, new groups may have the same names but other connections.
            if times_closed != self.times_closed:
                return False
            self._sockets.update(connections)
            self._found_groups |= names
        return True

    def _own_connection(self, store: dist.Store) -> dist.Store:
        """Return a connection to the store that is used only for making groups, so that `abort` may end it."""
        if self._store is None or not self._store_sockets:
            self._store, self._store_sockets = clone_store(store, self._unanswered_s)
        return self._store

    def _backend(self, shared: str) -> str:
        """Return the backends for the tensors of each kind of device, in torch's notation.

        If ranks share an accelerator, all tensors use gloo, because NCCL refuses to share one.

        Args:
            shared: a text that says which ranks share an accelerator; an empty string if no ranks do.
        """
        device = self._world.device
        if device.type == "cpu":
            return "gloo"
        if shared:
            if self._world.rank == 0:
                _warn_of_shared(shared)
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"

    def _set_environment(self) -> None:
        """Set the environment variables of gloo and NCCL. They stay set for groups that users make later.

        The variable for gloo makes it listen on the loopback interface if all ranks are on one node, and otherwise on
        an interface that the other nodes can reach.

        With the variables for NCCL, torch's own thread only notes errors, and this package handles them, see `nccl`.
        This package can raise errors only in the main thread. Therefore these variables are not set if this rank runs
        in another thread.
        """
        can_raise = self._world.device.type == "cuda" and threading.current_thread() is threading.main_thread()
        new = nccl.settings(os.environ) if can_raise else {}
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = "lo" if self._unanswered_s is None else interface_to_other_nodes(self._store_sockets)
            if interface is not None:
                new["GLOO_SOCKET_IFNAME"] = interface
        if "TORCH_GLOO_LAZY_INIT" in os.environ:
            # With this option gloo connects two ranks in their first collective. This class must know the connections
            # when the group is made, otherwise it could not free a rank from a collective.
            new["TORCH_GLOO_LAZY_INIT"] = "0"
        for name, value in new.items():
            self._on_release.callback(_put_back, name, os.environ.get(name))
            os.environ[name] = value

    def _has_ended(self, within_s: float) -> bool:
        """Wait for the end of the work that is queued on the accelerator. Return True if it has succeeded in time."""
        if self._world.device.type == "cpu":
            return True
        end = synchronize_in_thread(self._world.device)
        wait_until = time.monotonic() + min(within_s, self._timeout_s)
        while not end.done() and time.monotonic() < wait_until and self.error() is None:
            time.sleep(times.END_EVERY_S)
        return end.done() and end.exception() is None

    def _end_reading(self) -> None:
        """Shut down the reading side of gloo's connections, so that the collectives of gloo on this rank fail.

        Duplicates of the sockets keep the connections open for the other ranks, see the docstring of this module.
        """
        self.interrupted = True
        # If there are no connections of gloo yet, this rank may be making a group. It then waits for the other ranks in
        # a request to the store, so that the connection to the store must be ended instead.
        sockets = self._sockets or self._store_sockets
        for fd in list(sockets):
            inode = sockets.pop(fd, None)  # None if another thread has taken this socket meanwhile
            if (connection := duplicate(fd, inode)) is not None:
                self._half_closed.append(connection)
                with contextlib.suppress(OSError):  # the peer has closed the connection
                    connection.shutdown(socket.SHUT_RD)

    def _close_half_closed(self) -> None:
        """Close the connections of closed groups, once no rank is in these groups any more."""
        while self._half_closed:
            with self._half_closed.pop() as connection, contextlib.suppress(OSError):
                # `connection` is a duplicate of gloo's socket. A cache of torch, such as the one for FSDP's meshes, may
                # still refer to the closed group, so that gloo's own socket is still open. The connection would then
                # not end if only the duplicate were closed.
                connection.shutdown(socket.SHUT_RDWR)


def _connect_within(timeout: timedelta) -> timedelta:
    """Return the timeout to pass to gloo so that it makes a group within ``timeout``, see `GLOO_CONNECTS_WITHIN`."""
    return min(timeout, max(timeout / times.GLOO_CONNECTS_WITHIN, times.GLOO_CONNECT_AT_LEAST))


@functools.cache
def _warn_of_shared(shared: str) -> None:
    """Warn once that gloo is used because ranks share an accelerator."""
    logger.warning(
        "%s. NCCL refuses to share one, so all collectives use gloo and go through the CPU. To use NCCL, give each "
        "rank an accelerator of its own.",
        shared,
    )


def _put_back(name: str, value: str | None) -> None:
    """Set the environment variable ``name`` to its former ``value``, or unset it if ``value`` is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _drop_closed_groups() -> None:
    """Destroy the closed groups to which no other object refers any more."""
    for index in reversed(range(len(_closed))):
        if sys.getrefcount(_closed[index]) == ONLY_OURS:
            del _closed[index]


def _delete_groups(store: dist.Store, names: list[str]) -> None:
    """Delete the keys of closed groups from the store, so that the number of keys does not grow with each failure."""
    if not names:
        return
    inner_store = bottom(store)
    for key in inner_store.list_keys():  # torch returns all keys of the store with their prefixes
        if any(f"/{name}/" in key for name in names):
            inner_store.delete_key(key)
