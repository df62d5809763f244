"""The process group of a world: it is made, closed without waiting for other ranks, and made again after a failure.

When a block fails, each rank must leave the collective that it is in, and close the group. Torch can abort the
collectives of NCCL (see `nccl`), but not those of gloo: ``abort`` and ``destroy_process_group`` do not wake a thread
that waits in a collective of gloo. Such a thread wakes only when one of its connections ends.

So `Group.abort` ends the connections of its own rank, by ``shutdown`` on the sockets. Any thread can do this, gloo sees
the end of the connection, and the collective raises. The details:

- Torch does not hand out these sockets. But gloo writes the addresses at which the ranks listen into the store, so the
  sockets with such an address at either end are those of gloo. A socket is touched only while its descriptor has the
  same inode, because gloo may have closed it. A listening socket is never touched, because its loss ends the process.
- Only the reading side is shut down, which does not free the peers. Each peer is freed by its own watchdog, which knows
  the cause of the failure. For a peer, the end of the connection can even be harmful. If a write of gloo fails before
  gloo has noticed the end of the connection, gloo never wakes the thread that waits for this write
  (``Pair::signalException`` skips unbound buffers that are being sent).
- For the same reason the connection must stay open when gloo closes it: a peer may begin to write only now. So this
  rank keeps a duplicate of each socket until no rank is in the group any more. That is certain when the ranks make the
  next group.

A closed group is kept until no other object refers to it. Otherwise the last `DistributedDataParallel` model that uses
it would destroy it while holding the GIL, and wait for gloo's threads. These wait for the GIL in order to drop their
last asynchronous operations. If Python code drops the last reference to a group, torch releases the GIL first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
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
from . import nccl, times
from .flight_recorder import next_group_id, running_collectives
from .sockets import bottom, connected_at, duplicate, interface_to_other_nodes, still_open
from .store import clone_store

# `torch.distributed.nn.functional`, which optimizers import, has default arguments that refer to the default group at
# the time of its first import, even after that group was closed. So it is imported now, while there seems to be none.
_present = dist.group.WORLD
dist.group.WORLD = None
import torch.distributed.nn.functional  # noqa: E402, F401

dist.group.WORLD = _present
del _present


# The reference count of a group that is referred to only by `_closed` and by the argument of `getrefcount`.
ONLY_OURS = 2
logger = logging.getLogger("nn_parallel")
_KEY_OF_GLOO = re.compile(r"(^|/)cpu//0/\d+$")
_closed: list[dist.ProcessGroup] = []  # closed groups that other objects may still refer to


class Group:
    """The default process group of a world, and the groups that users make beside it."""

    def __init__(self, world: World, unanswered_s: float | None) -> None:
        """Prepare for making groups.

        Args:
            world: of this rank.
            unanswered_s: how long a connection to another node may get no answer; None: all ranks are on one node.
        """
        self._world = world
        self._unanswered_s = unanswered_s
        self.default: Any = None  # torch's default group, until this package closes it
        self.first_id = 0  # torch's flight recorder gives the present groups this id or higher ones
        # The present generation, and the number of groups that this rank has begun to make in it. Both are the same on
        # all ranks.
        self.begun = 0, 0
        self.interrupted = False  # connections have been ended; false again when the group is closed
        # Raised by one when the closing of a group begins, and once more when it has ended. So `abort` can tell whether
        # its caller means a group that has been closed meanwhile.
        self.times_closed = 0
        self.cannot_end = False  # the abort of the group hangs
        self._names_in_store: list[str] = []  # the names of groups that may have keys in the store
        self._sockets: dict[int, int] = {}  # gloo's connections of all groups, as ``{descriptor: inode}``
        self._found_groups: set[str] = set()  # the names of the groups whose connections are in `_sockets`
        self._aborts = nccl.Aborts()
        self._first_nccl_id = 0  # as `first_id`, in NCCL's flight recorder
        self._closing = threading.Lock()  # held while a group is closed or aborted, because any thread may abort it
        self._timeout_s = 0.0
        self._store: dist.Store | None = None  # see `_own_connection`
        self._store_sockets: dict[int, int] = {}  # the connection of `_store`; empty: it has been ended
        self._for_thread: dist.ProcessGroup | None = None  # see `for_thread`
        self._half_closed: list[socket.socket] = []  # duplicates that keep connections open, see the module's docstring
        self._on_release = contextlib.ExitStack()

    def begin_generation(self, generation: int) -> None:
        """Begin a generation, in which groups are numbered from one again.

        Ranks may have begun to make different numbers of groups before a failure. From here on their numbers, which are
        part of the names of the groups, agree again.
        """
        self.begun = generation, 0

    def make(self, store: dist.Store, backend: str | None, timeout: timedelta, shared: str) -> None:
        """Make the default process group. All ranks must call this together.

        The group uses a prefix of the store that no earlier group has used.

        Args:
            store: the store of the ranks.
            backend: torch's name of the backend; None: a suitable backend for the tensors of each kind of device.
            timeout: the limit for making the group, and for each of its collectives.
            shared: a clause that names the ranks that share an accelerator; empty if no ranks do.

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
        if world.device.type in ("cpu", "cuda"):  # only for these torch can set the timeout of collectives afterwards
            connect_within = _connect_within(timeout)
        hook = sys.excepthook
        self.first_id = next_group_id()
        self._first_nccl_id = next_group_id("nccl")
        # Torch numbers the groups by this counter, and a failed init leaves it raised on some ranks only. Ranks that
        # use different numbers never find each other.
        dist.distributed_c10d._world.group_count = 0
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
                _set_timeout(timeout)
            self._sockets = connected_at(_gloo_addresses(rendezvous))
        except (RuntimeError, ValueError) as error:
            self._store_sockets.clear()  # this connection may be in the middle of a request, so it is not used again
            if isinstance(error, ValueError) and "backend" not in str(error).lower():
                raise
            if self.interrupted:
                raise LaunchError(f"Another rank failed while rank {world.rank} made its process group.") from error
            raise LaunchError(
                f"Rank {world.rank} of {world.world_size} could not make a {backend} group within "
                f"{timeout.total_seconds():g} s: {summary(error)}"
            ) from error
        finally:
            sys.excepthook = hook  # each init adds one more hook, which calls the hook before it
        self._found_groups = set(_groups().values())  # only the default group exists, and its connections are known
        self.default = dist.group.WORLD
        self._for_thread = None  # an older one belonged to a group that the user has destroyed
        _drop_closed_groups()

    def for_thread(self, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
        """Return a gloo group of all ranks for the collectives of a background thread. All ranks call this together.

        The group is made at the first call, and closed with the default group. The limit of its collectives is the
        default timeout of this package, even if that of the other groups is shorter.

        Args:
            store: the store of the ranks, by the connection of this thread.
            timeout: the limit for making the group.
        """
        if self._for_thread is None:
            self._for_thread = dist.new_group(backend="gloo", timeout=_connect_within(timeout))
            _set_timeout(times.DEFAULT_TIMEOUT, self._for_thread)
            self.find_connections(store)
        return self._for_thread

    def close(self, *, abort: bool = True, within_s: float = math.inf) -> None:
        """Close all process groups without waiting for other ranks. `initialize_ddp` can make the default group again.

        Args:
            abort: abort the collectives that run on the accelerator. Otherwise wait for their end first.
            within_s: how long to wait for their end, if the timeout of the group is not shorter. Collectives that have
                not ended by then are aborted.
        """
        if dist.is_initialized():
            is_over = not abort and self._has_ended(within_s)
            with self._closing:
                self.times_closed += 1  # from here on a late `abort` for this group does nothing
            if is_over:
                self._end_reading()
            else:
                self.abort()
            self.cannot_end = not self._aborts.finish()
            if self.cannot_end:
                return
            # A group whose connections are not known is not kept, because only its destruction ends its connections.
            _closed.extend(group for group, name in _groups().items() if name in self._found_groups)
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
        """Release everything that closed groups have left. This rank makes no more groups."""
        self._half_closed += still_open(self._store_sockets)
        self._store_sockets.clear()
        self._store = None
        self._close_half_closed()
        self._on_release.close()
        _drop_closed_groups()

    def abort(self, times_closed: int | None = None) -> None:
        """Free this rank from its collective, or from making a group, see the docstring of this module.

        Any thread may call this, and more than once. If this rank has an accelerator, the caller must interrupt the
        main thread first, because an aborted collective of an accelerator leaves wrong numbers.

        Args:
            times_closed: the value of this attribute for the group that the caller means. If that group has been closed
                meanwhile, nothing is done. None: abort the present groups.
        """
        with self._closing:
            if times_closed in (None, self.times_closed):
                self._end_reading()
                self._aborts.begin(_groups(), self._first_nccl_id)

    def error(self) -> dist.DistBackendError | None:
        """Return why a collective of an accelerator has failed, if one has. Gloo raises its errors by itself."""
        if self._world.device.type == "cpu" or self.interrupted:
            return None
        return nccl.error_of(_groups(), self._world.device)

    def is_gloo_alone(self) -> bool:
        """Return whether all groups use only gloo. Aborted collectives of other backends would leave wrong numbers."""
        return not any(map(nccl.backends_of, _groups()))

    def has_ended_on_accelerator(self) -> bool:
        """Return whether all work that is queued on the accelerator of this rank ends within a moment."""
        return nccl.has_ended(self._world.device, times.ENDS_WITHIN_S)

    def state_of_nccl(self) -> str:
        """Return a text that changes with the progress of NCCL's collectives; empty if none is running."""
        return running_collectives(self._first_nccl_id, "nccl") if dist.is_initialized() else ""

    def find_connections(self, store: dist.Store) -> bool:
        """Find the connections of groups that users have made, so that `abort` can end them.

        Args:
            store: the store of the groups, by a connection that no other thread uses. A connection serves one request
                at a time, and that of the main thread may be waiting for an answer, for instance in `new_group`.

        Returns:
            True if there were groups whose connections were not known yet.
        """
        times_closed = self.times_closed
        names = set(_groups().values()) - self._found_groups
        if not names:
            return False
        connections = connected_at(_gloo_addresses(store))
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

        Args:
            shared: as for `make`.
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

        Gloo is to listen on the loopback interface if all ranks are on one node, and otherwise at an interface that the
        other nodes can reach. NCCL's own thread is to leave errors to this package, see `nccl`. This package can raise
        them only in the main thread, so NCCL's settings are left alone if this rank runs in another thread.
        """
        can_raise = self._world.device.type == "cuda" and threading.current_thread() is threading.main_thread()
        new = nccl.settings(os.environ) if can_raise else {}
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = "lo" if self._unanswered_s is None else interface_to_other_nodes(self._store_sockets)
            if interface is not None:
                new["GLOO_SOCKET_IFNAME"] = interface
        for name, value in new.items():
            self._on_release.callback(_put_back, name, os.environ.get(name))
            os.environ[name] = value

    def _has_ended(self, within_s: float) -> bool:
        """Wait for the end of the work that is queued on the accelerator. Return true if it has succeeded in time."""
        if self._world.device.type == "cpu":
            return True
        end = synchronize_in_thread(self._world.device)
        wait_until = time.monotonic() + min(within_s, self._timeout_s)
        while not end.done() and time.monotonic() < wait_until and self.error() is None:
            time.sleep(times.END_EVERY_S)
        return end.done() and end.exception() is None

    def _end_reading(self) -> None:
        """Shut down the reading side of gloo's connections, and keep duplicates of them."""
        self.interrupted = True
        # Without connections of gloo, this rank may be making a group. Then it waits in the store for the other ranks.
        sockets = self._sockets or self._store_sockets
        for fd in list(sockets):
            inode = sockets.pop(fd, None)  # None: another thread has taken this socket
            if (connection := duplicate(fd, inode)) is not None:
                self._half_closed.append(connection)
                with contextlib.suppress(OSError):  # the peer has closed the connection
                    connection.shutdown(socket.SHUT_RD)

    def _close_half_closed(self) -> None:
        """Close the connections of closed groups. No rank is in these groups any more."""
        while self._half_closed:
            with self._half_closed.pop() as connection, contextlib.suppress(OSError):
                # To close the duplicate would not be enough if a cache of torch, such as that of FSDP's meshes, keeps
                # the closed group and so gloo's own socket.
                connection.shutdown(socket.SHUT_RDWR)


def _connect_within(timeout: timedelta) -> timedelta:
    """Return the timeout to give to gloo, so that it makes a group within ``timeout``."""
    return min(timeout, max(timeout / times.GLOO_CONNECTS_WITHIN, times.GLOO_CONNECT_AT_LEAST))


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the limit for the collectives of ``group``, or of the default group if it is None."""
    private = dist.distributed_c10d._set_pg_timeout  # before version 2.14 torch has no public function for this
    getattr(dist, "set_timeout", private)(timeout, group)


@functools.cache
def _warn_of_shared(shared: str) -> None:
    """Warn once that gloo is used because ranks share an accelerator."""
    logger.warning(
        "%s. NCCL refuses to share one, so all collectives use gloo and go through the CPU. To use NCCL, give each "
        "rank an accelerator of its own.",
        shared,
    )


def _put_back(name: str, value: str | None) -> None:
    """Set the environment variable ``name`` to its former value; None: it was not set."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _groups() -> dict[dist.ProcessGroup, str]:
    """Return all process groups of this process, with torch's names of them, which are the same on all ranks."""
    return dict(dist.distributed_c10d._world.pg_names)


def _drop_closed_groups() -> None:
    """Destroy the closed groups to which no other object refers any more."""
    for index in reversed(range(len(_closed))):
        if sys.getrefcount(_closed[index]) == ONLY_OURS:
            del _closed[index]


def _gloo_addresses(store: dist.Store) -> set[tuple[str, int]]:
    """Return the addresses at which the ranks of gloo groups listen for each other. Gloo writes them into the store.

    Each value in the store has these parts: the length of the host name, the host name, the size of gloo's
    ``transport::tcp::Address``, and this address, which begins with a C ``sockaddr``. Length and size have 8 bytes.
    """
    inner_store = bottom(store)
    keys = [key for key in inner_store.list_keys() if _KEY_OF_GLOO.search(key)]
    addresses = set()
    for value in inner_store.multi_get(keys) if keys else ():
        socket_address = value[16 + int.from_bytes(value[:8], sys.byteorder) :]
        family = int.from_bytes(socket_address[:2], sys.byteorder)
        port = int.from_bytes(socket_address[2:4], "big")
        host = socket_address[4:8] if family == socket.AF_INET else socket_address[8:24]
        addresses.add((socket.inet_ntop(family, host), port))
    return addresses


def _delete_groups(store: dist.Store, names: list[str]) -> None:
    """Delete the keys of closed groups from the store, so that the number of keys does not grow with each failure."""
    if not names:
        return
    inner_store = bottom(store)
    for key in inner_store.list_keys():  # torch returns all keys of the store with their prefixes
        if any(f"/{name}/" in key for name in names):
            inner_store.delete_key(key)
