"""The process group of a world: made, closed without waiting for anybody, and made again."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

from ..errors import LaunchError, first_line
from .context import RankContext, stop_lingering
from .flight_recorder import next_group_id
from .rendezvous import meet, raise_if_interrupted
from .sockets import bottom, connected_at, duplicate

# Its default arguments keep the group that exists when it is first imported, as by an optimizer: so import it now, as
# if there were none.
_present, dist.group.WORLD = dist.group.WORLD, None
import torch.distributed.nn.functional  # noqa: E402, F401

dist.group.WORLD = _present
del _present


ONLY_OURS = 2  # references: of a list, and of the argument of `getrefcount`
_closed: list[dist.ProcessGroup] = []


def make_group(context: RankContext, backend: str | None, timeout: timedelta) -> None:
    """Make the default process group on the kept store, under a prefix that no earlier group used."""
    world = context.world
    on_cpu = world.device.type == "cpu"
    if backend is None:
        backend = (
            "gloo" if on_cpu else f"cpu:gloo,{world.device.type}:{dist.get_default_backend_for_device(world.device)}"
        )
    if context.one_node and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo listens on the address of the host name otherwise. It stays set for the subgroups that users make later.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        context.on_leave.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
    name = context.next_group_name()
    store = dist.PrefixStore(name, context.store)
    try:
        meet(dist.PrefixStore("before", store), context, timeout, "its process group")
    except LaunchError:
        context.take_back_group_name()  # under which a late rank waits
        raise
    stop_lingering(context.lingering)
    rendezvous = dist.PrefixStore(name, _group_store(context))
    hook, context.first_group_id = sys.excepthook, next_group_id()
    # An init that failed leaves torch's count of groups raised, and ranks that differ in it never find each other.
    dist.distributed_c10d._world.group_count = 0
    try:
        dist.init_process_group(
            backend,
            store=rendezvous,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=None if on_cpu else world.device,
        )
        context.group_sockets = connected_at(_gloo_addresses(dist.distributed_c10d._get_default_group()))
    except (RuntimeError, ValueError) as error:
        context.group_store_sockets.clear()  # it may be in the middle of a request
        if isinstance(error, ValueError) and "backend" not in str(error).lower():
            raise
        raise_if_interrupted(context, "its process group")
        raise LaunchError(
            f"Rank {world.rank} of {world.world_size} could not make a {backend} group within "
            f"{timeout.total_seconds():g} s: {first_line(error)}"
        ) from error
    finally:
        sys.excepthook = hook  # each init chains one more
    context.groups_found = set(dist.distributed_c10d._world.pg_names.values())
    context.end_if_unanswered(context.group_sockets)
    context.group = dist.group.WORLD
    _drop_closed_groups()
    meet(store, context, timeout, "its process group")  # or a rank that fails now would break another's init
    *old, _ = context.group_names
    del context.group_names[:-1]
    if world.rank == 0 and old:
        _delete_groups(context.store, old)


def close_group(context: RankContext, *, abort: bool = True) -> None:
    """Close the process group of ``context``, without waiting for any peer; `initialize_ddp` makes it anew.

    Unless ``abort``, what is under way on accelerators comes to its end first.

    The closed groups are kept as long as anybody uses them. Otherwise the last `DistributedDataParallel` model of one
    would destroy it, with the GIL held, and wait for gloo's threads, which wait for the GIL to drop the last
    asynchronous operations. Where Python drops the last reference to a group, torch releases the GIL.
    """
    if dist.is_initialized():
        names = dist.distributed_c10d._world.pg_names.items()  # connections that we do not know end with a group alone
        _closed.extend(group for group, name in names if name in context.groups_found)
        if abort:
            abort_collectives(context)
        else:
            _end_connections(context)
        dist.destroy_process_group()
        context.group = None
    context.group_sockets, context.interrupted = {}, False
    context.groups_found.clear()
    context.groups_aborted.clear()


def leave(context: RankContext) -> None:
    """Close the process group of ``context``, and for good all that was opened for its place among the ranks."""
    close_group(context, abort=False)
    context.on_leave.close()
    _drop_closed_groups()


def _drop_closed_groups() -> None:
    """Destroy the closed groups that nobody else refers to any more."""
    for index in reversed(range(len(_closed))):
        if sys.getrefcount(_closed[index]) == ONLY_OURS:
            del _closed[index]


def abort_collectives(context: RankContext) -> None:
    """Free this rank from the collective that it sits in; called again, from making a group. Any thread may call this.

    Backends that have an abort of their own, as NCCL, end their collectives by it. Gloo has none: what frees a rank at
    once is the end of its own connections. `shutdown` ends them for every thread that uses them and leaves the closing
    to gloo. A descriptor is touched only while it is still the same socket (its inode), and never a listening one,
    whose loss ends the process.

    It ends the reading alone, and a duplicate keeps the connection open until all ranks are out of the group: where
    gloo's write fails before gloo has seen the end of the connection, it never wakes the one who waits for that write
    (`Pair::signalException` passes over unbound buffers that are being sent), and a peer may only now begin to write.
    """
    _end_connections(context)
    names = dist.distributed_c10d._world.pg_names
    for group, name in sorted(names.items(), key=lambda item: item[1], reverse=True):  # in torch's order
        if name not in context.groups_aborted:
            context.groups_aborted.add(name)
            with contextlib.suppress(RuntimeError):
                group.abort()


def _end_connections(context: RankContext) -> None:
    context.interrupted = True
    sockets = context.group_sockets or context.group_store_sockets
    for fd in list(sockets):
        inode = sockets.pop(fd, None)  # None: another thread has taken it
        if (connection := duplicate(fd, inode)) is not None:
            context.lingering.append(connection)  # first: it is closed in the end, also if it is no longer connected
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)


def has_unknown_connections(context: RankContext) -> bool:
    """Whether there are process groups that `find_connections` could find the connections of."""
    return not context.groups_found.issuperset(dist.distributed_c10d._world.pg_names.values())


def find_connections(context: RankContext, names: set[str]) -> None:
    """Let `abort_collectives` end those of process groups of these names as well, whoever has made them.

    This rank must sit in a collective: else it may use the store of the groups, which serves one request at a time.
    """
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if name in names and name not in context.groups_found:
            context.groups_found.add(name)
            with contextlib.suppress(RuntimeError):  # the connection to that store has been ended already
                context.group_sockets |= connected_at(_gloo_addresses(group))


def _gloo_addresses(group: dist.ProcessGroup) -> set[tuple[str, int]]:
    """Where the ranks of a gloo group listen for each other, as gloo has written it into the store of the group.

    Each value begins with the name of the host, headed by its length, and gloo's `transport::tcp::Address`, headed by
    its size, which begins with a C `sockaddr`.
    """
    store, found = group.get_group_store(), set()
    keys = [f"cpu//0/{rank}" for rank in range(group.size())]
    for value in store.multi_get(keys) if store is not None and store.check(keys) else ():
        socket_address = value[16 + int.from_bytes(value[:8], sys.byteorder) :]
        family, port = int.from_bytes(socket_address[:2], sys.byteorder), int.from_bytes(socket_address[2:4], "big")
        host = socket_address[4:8] if family == socket.AF_INET else socket_address[8:24]
        found.add((socket.inet_ntop(family, host), port))
    return found


def _group_store(context: RankContext) -> dist.Store:
    """A connection to the store of its own, kept for the next group: ended, it frees a rank that makes a group."""
    if context.group_store is None or not context.group_store_sockets:
        context.group_store, connection = context.clone_store()
        context.group_store_sockets.update(connection)
    return context.group_store


def _delete_groups(store: dist.Store, names: list[str]) -> None:
    """Delete what closed groups left in the store: the number of keys must not grow with failures."""
    whole = bottom(store)
    for key in whole.list_keys():  # whole names, whichever prefix was asked
        if any(f"/{name}/" in key for name in names):
            whole.delete_key(key)
