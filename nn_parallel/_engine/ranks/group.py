"""The process group of a world: made, closed without waiting for anybody, and made again."""

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

# `torch.distributed.nn.functional`, which optimizers import, keeps the default group that there is at its first import,
# in default arguments. So it is imported now, as if there were none.
_present = dist.group.WORLD
dist.group.WORLD = None
import torch.distributed.nn.functional  # noqa: E402, F401

dist.group.WORLD = _present
del _present


ONLY_OURS = 2  # references: of a list, and of the argument of `getrefcount`
logger = logging.getLogger("nn_parallel")
_KEY_OF_GLOO = re.compile(r"(^|/)cpu//0/\d+$")
_closed: list[dist.ProcessGroup] = []


class Group:
    """The default process group of a world, and the groups that users make beside it."""

    def __init__(self, world: World, unanswered_s: float | None) -> None:
        """``unanswered_s``: how long a connection to another node may get no answer; None on one node."""
        self._world = world
        self._unanswered_s = unanswered_s
        self.default: Any = None  # torch's, until we close it
        self.first_id = 0  # of the present groups, in torch's flight recorder
        self.begun = 0, 0  # the generation, and how many groups this rank has begun to make in it: alike on all ranks
        self.interrupted = False  # connections have been ended, because a rank has failed; until the group is closed
        self.times_closed = 0  # rises before and after a group is closed: a late `abort` of it does nothing
        self.cannot_end = False  # its abort hangs
        self._names: list[str] = []  # of the groups of which there may be something in the store
        self._sockets: dict[int, int] = {}  # of all groups: fd -> inode
        self._found: set[str] = set()  # the names of the groups whose connections these are
        self._aborts = nccl.Aborts()
        self._first_nccl_id = 0  # of the present groups, in NCCL's flight recorder
        self._closing = threading.Lock()  # held to close, or to abort: for whoever aborts, in any thread
        self._timeout_s = 0.0
        self._store: dist.Store | None = None  # through which the ranks of a group find each other
        self._store_sockets: dict[int, int] = {}  # its connection, until that is ended
        self._for_thread: dist.ProcessGroup | None = None
        self._half_closed: list[socket.socket] = []  # of a closed group, whose other ranks may still write
        self._on_release = contextlib.ExitStack()

    def begin_generation(self, generation: int) -> None:
        """Name the groups that come alike on all ranks, however many each of them has made so far."""
        self.begun = generation, 0

    def make(self, store: dist.Store, backend: str | None, timeout: timedelta, shared: str) -> None:
        """Make the default process group, under a prefix of the store that no earlier group used. All ranks are here.

        Args:
            store: where the ranks talk.
            backend: as torch calls it; if None, the backends for the tensors of each kind of device.
            timeout: of making the group, and of its collectives.
            shared: which ranks share which accelerator; empty if none do.

        Raises:
            LaunchError: torch could not make it.
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
            _delete_groups(store, self._names)  # no rank is in them any more
            if not on_cpu:
                bottom(store).delete_key(nccl.DUMP_KEY)
        self._close_half_closed()
        self._names = [name]
        rendezvous = dist.PrefixStore(name, self._own_connection(store))
        self._set_environment()
        connect_within = timeout
        if world.device.type in ("cpu", "cuda"):  # for which torch can set it afterwards
            connect_within = _connect_within(timeout)
        hook = sys.excepthook
        self.first_id = next_group_id()
        self._first_nccl_id = next_group_id("nccl")
        # An init that failed leaves torch's count of groups raised, and ranks that differ in it never find each other.
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
            self._store_sockets.clear()  # it may be in the middle of a request
            if isinstance(error, ValueError) and "backend" not in str(error).lower():
                raise
            if self.interrupted:
                raise LaunchError(f"Another rank failed while rank {world.rank} made its process group.") from error
            raise LaunchError(
                f"Rank {world.rank} of {world.world_size} could not make a {backend} group within "
                f"{timeout.total_seconds():g} s: {summary(error)}"
            ) from error
        finally:
            sys.excepthook = hook  # each init chains one more
        self._found = set(_groups().values())  # of other groups there is none yet
        self.default = dist.group.WORLD
        self._for_thread = None  # that of a group which the user has destroyed
        _drop_closed_groups()

    def for_thread(self, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
        """Return a process group of all ranks, by gloo, for the collectives of another thread. All ranks are here.

        It is for work of `background`, and is closed with the default group. Its collectives have as long as those of
        any group by default, however short the timeout of the others is.

        Args:
            store: that of the ranks, by the connection of this thread.
            timeout: of making it.
        """
        if self._for_thread is None:
            self._for_thread = dist.new_group(backend="gloo", timeout=_connect_within(timeout))
            _set_timeout(times.DEFAULT_TIMEOUT, self._for_thread)
            self.find_connections(store)
        return self._for_thread

    def close(self, *, abort: bool = True, within_s: float = math.inf) -> None:
        """Close the process group, without waiting for any peer; `initialize_ddp` makes it anew.

        Unless ``abort``, what is under way on accelerators comes to its end first, if it does ``within_s`` and within
        the timeout of the group.

        The closed groups are kept as long as anybody uses them. Otherwise the last `DistributedDataParallel` model of
        one would destroy it, with the GIL held, and wait for gloo's threads, which wait for the GIL to drop the last
        asynchronous operations. Where Python drops the last reference to a group, torch releases the GIL.
        """
        if dist.is_initialized():
            is_over = not abort and self._has_ended(within_s)
            with self._closing:
                self.times_closed += 1  # from here on nobody else aborts it, or raises what has failed in it
            if is_over:
                self._end_reading()
            else:
                self.abort()
            self.cannot_end = not self._aborts.finish()
            if self.cannot_end:
                return
            # Connections that we do not know end with a group alone.
            _closed.extend(group for group, name in _groups().items() if name in self._found)
            dist.destroy_process_group()
            self.default = None
        if self._for_thread is not None:
            self._for_thread = None
            background.finish(times.THREAD_LEAVES_WITHIN_S)
        with self._closing:
            self.times_closed += 1
            self._sockets = {}
            self.interrupted = False
        self._found.clear()

    def release(self) -> None:
        """Let go of all that closed groups have left: this rank makes no further one."""
        self._half_closed += still_open(self._store_sockets)
        self._store_sockets.clear()
        self._store = None
        self._close_half_closed()
        self._on_release.close()
        _drop_closed_groups()

    def abort(self, times_closed: int | None = None) -> None:
        """Free this rank from its collective, or from making a group, as NCCL has it, and by the end of gloo's sockets.

        Any thread may call this, more than once. Interrupt the main thread before: a collective of an accelerator that
        is aborted leaves wrong numbers behind. Gloo has no abort: what frees a rank at once is that its own connections
        end, so that its collective raises. `shutdown` ends them for every thread that uses them and leaves the
        closing to gloo. A descriptor is touched only while it is still the same socket (its inode), and never a
        listening one, whose loss ends the process.

        Only the reading is ended, so a peer is not freed by this: its own watchdog frees it. A duplicate keeps the
        connection open until all ranks are out of the group: where gloo's write fails before gloo has seen the end of
        the connection, it never wakes the one who waits for that write (`Pair::signalException` passes over unbound
        buffers that are being sent), and a peer may only now begin to write.
        """
        with self._closing:
            if times_closed in (None, self.times_closed):  # else this is about a group that has been closed meanwhile
                self._end_reading()
                self._aborts.begin(_groups(), self._first_nccl_id)

    def error(self) -> dist.DistBackendError | None:
        """Return what has gone wrong in a collective of an accelerator. Gloo raises it by itself."""
        if self._world.device.type == "cpu" or self.interrupted:
            return None
        return nccl.error_of(_groups(), self._world.device)

    def is_gloo_alone(self) -> bool:
        """Return whether no group has a backend beside gloo, whose collectives would end with wrong numbers."""
        return not any(map(nccl.backends_of, _groups()))

    def has_ended_on_accelerator(self) -> bool:
        """Return whether all that was queued on this rank's accelerator ends in a moment."""
        return nccl.has_ended(self._world.device, times.ENDS_WITHIN_S)

    def state_of_nccl(self) -> str:
        """Return how far NCCL's collectives are; empty if none is under way, or there is no group."""
        return running_collectives(self._first_nccl_id, "nccl") if dist.is_initialized() else ""

    def find_connections(self, store: dist.Store) -> bool:
        """Let `abort` end the connections of all process groups, whoever has made them.

        Returns whether there were groups that it did not know yet.

        Args:
            store: the store of the groups, by a connection that no other thread uses: it serves one request at a time,
                and the main thread may wait for the answer to one, as in `new_group`.
        """
        times_closed = self.times_closed
        names = set(_groups().values()) - self._found
        if not names:
            return False
        connections = connected_at(_gloo_addresses(store))
        with self._closing:
            if times_closed != self.times_closed:  # they are those of closed groups, of whose names others may be now
                return False
            self._sockets.update(connections)
            self._found |= names
        return True

    def _own_connection(self, store: dist.Store) -> dist.Store:
        """Return a connection to the store for making groups. To end it frees a rank that is making one."""
        if self._store is None or not self._store_sockets:
            self._store, self._store_sockets = clone_store(store, self._unanswered_s)
        return self._store

    def _backend(self, shared: str) -> str:
        """Return the backends for the tensors of each kind of device."""
        device = self._world.device
        if device.type == "cpu":
            return "gloo"
        if shared:
            if self._world.rank == 0:
                _warn_of_shared(shared)
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"

    def _set_environment(self) -> None:
        """Have gloo listen on the loopback if all ranks are on one node, else where the others can reach it.

        And have NCCL's thread leave to us what becomes of errors. It stays so for subgroups that users make later.
        """
        is_watched = self._world.device.type == "cuda" and threading.current_thread() is threading.main_thread()
        new = nccl.settings(os.environ) if is_watched else {}
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = "lo" if self._unanswered_s is None else interface_to_other_nodes(self._store_sockets)
            if interface is not None:
                new["GLOO_SOCKET_IFNAME"] = interface
        for name, value in new.items():
            self._on_release.callback(_put_back, name, os.environ.get(name))
            os.environ[name] = value

    def _has_ended(self, within_s: float) -> bool:
        """Wait until all that is under way on an accelerator has ended; return whether it has."""
        if self._world.device.type == "cpu":
            return True
        end = synchronize_in_thread(self._world.device)
        wait_until = time.monotonic() + min(within_s, self._timeout_s)
        while not end.done() and time.monotonic() < wait_until and self.error() is None:
            time.sleep(times.END_EVERY_S)
        return end.done() and end.exception() is None

    def _end_reading(self) -> None:
        self.interrupted = True
        # Where they have ended already, or there are none yet, this rank waits in the store, to make a group.
        sockets = self._sockets or self._store_sockets
        for fd in list(sockets):
            inode = sockets.pop(fd, None)  # None: another thread has taken it
            if (connection := duplicate(fd, inode)) is not None:
                self._half_closed.append(connection)  # before `shutdown`, which fails if it is connected no longer
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def _close_half_closed(self) -> None:
        """No rank is in the group any more whose connections these are."""
        while self._half_closed:
            with self._half_closed.pop() as connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # caches of torch, as of FSDP's meshes, may keep the closed group


def _connect_within(timeout: timedelta) -> timedelta:
    """Return the timeout by which gloo makes a group within ``timeout``."""
    return min(timeout, max(timeout / times.GLOO_CONNECTS_WITHIN, times.GLOO_CONNECT_AT_LEAST))


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    private = dist.distributed_c10d._set_pg_timeout  # before torch 2.14 there is no public way
    getattr(dist, "set_timeout", private)(timeout, group)


@functools.cache
def _warn_of_shared(reason: str) -> None:
    logger.warning("%s, which NCCL refuses: all collectives go by gloo, through the CPU.", reason)


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _groups() -> dict[dist.ProcessGroup, str]:
    """All process groups of this process, and torch's names of them, which are the same on all ranks."""
    return dict(dist.distributed_c10d._world.pg_names)


def _drop_closed_groups() -> None:
    """Destroy the closed groups that nobody else refers to any more."""
    for index in reversed(range(len(_closed))):
        if sys.getrefcount(_closed[index]) == ONLY_OURS:
            del _closed[index]


def _gloo_addresses(store: dist.Store) -> set[tuple[str, int]]:
    """Return the addresses at which ranks listen for each other in gloo groups: gloo writes them into the store.

    Each value begins with the name of the host, headed by its length, and gloo's `transport::tcp::Address`, headed by
    its size, which begins with a C `sockaddr`.
    """
    whole = bottom(store)
    keys = [key for key in whole.list_keys() if _KEY_OF_GLOO.search(key)]
    addresses = set()
    for value in whole.multi_get(keys) if keys else ():
        socket_address = value[16 + int.from_bytes(value[:8], sys.byteorder) :]
        family = int.from_bytes(socket_address[:2], sys.byteorder)
        port = int.from_bytes(socket_address[2:4], "big")
        host = socket_address[4:8] if family == socket.AF_INET else socket_address[8:24]
        addresses.add((socket.inet_ntop(family, host), port))
    return addresses


def _delete_groups(store: dist.Store, names: list[str]) -> None:
    """Delete what closed groups left in the store: the number of keys must not grow with failures."""
    if not names:
        return
    whole = bottom(store)
    for key in whole.list_keys():  # whole names, whichever prefix was asked
        if any(f"/{name}/" in key for name in names):
            whole.delete_key(key)
