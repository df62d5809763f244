"""The process group of a world: made, closed without waiting for anybody, and made again."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

# Its default arguments keep the group that exists when it is first imported, as by an optimizer: so before any exists.
import torch.distributed.nn.functional  # noqa: F401

from .errors import LaunchError, first_line
from .rendezvous import meet, raise_if_interrupted
from .sockets import bottom, connected_since, duplicate, open_sockets
from .world import Membership, stop_lingering


def make_group(member: Membership, backend: str | None, timeout: timedelta) -> None:
    """Make the default process group on the kept store, under a prefix that no earlier group used."""
    world = member.world
    on_cpu = world.device.type == "cpu"
    if backend is None:
        backend = (
            "gloo" if on_cpu else f"cpu:gloo,{world.device.type}:{dist.get_default_backend_for_device(world.device)}"
        )
    if member.one_node and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo listens on the address of the host name otherwise. It stays set for the subgroups that users make later.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        member.on_leave.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
    name = member.next_group_name()
    store = dist.PrefixStore(name, member.store)
    meet(dist.PrefixStore("before", store), member, timeout, "its process group")
    stop_lingering(member.lingering)
    rendezvous = dist.PrefixStore(name, _group_store(member))
    before, hook = open_sockets(), sys.excepthook
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
    except (RuntimeError, ValueError) as error:
        member.group_store_sockets.clear()  # it may be in the middle of a request
        if isinstance(error, ValueError) and "backend" not in str(error).lower():
            raise
        raise_if_interrupted(member, "its process group")
        raise LaunchError(
            f"Rank {world.rank} of {world.world_size} could not make a {backend} group within "
            f"{timeout.total_seconds():g} s: {first_line(error)}"
        ) from error
    finally:
        sys.excepthook = hook  # each init chains one more
    member.group_sockets = connected_since(before, member.store)
    member.end_if_unanswered(member.group_sockets)
    meet(store, member, timeout, "its process group")  # or a rank that fails now would break another's init
    *old, _ = member.group_names
    del member.group_names[:-1]
    if world.rank == 0 and old:
        _delete_groups(member.store, old)


def close_group(member: Membership) -> None:
    """Close the process group of ``member``, without waiting for any peer; `initialize_ddp` makes it anew."""
    if dist.is_initialized():
        abort_collectives(member)
        dist.destroy_process_group()
    member.group_sockets, member.interrupted = {}, False


def abort_collectives(member: Membership) -> None:
    """Free this rank from the collective that it sits in; called again, from making a group. Any thread may call this.

    Gloo has no abort: what frees a rank at once is the end of its own connections. `shutdown` ends them for every
    thread that uses them and leaves the closing to gloo. A descriptor is touched only while it is still the same socket
    (its inode), and never a listening one, whose loss ends the process.

    It ends the reading alone, and a duplicate keeps the connection open until all ranks are out of the group: where
    gloo's write fails before gloo has seen the end of the connection, it never wakes the one who waits for that write
    (`Pair::signalException` passes over unbound buffers that are being sent), and a peer may only now begin to write.
    """
    member.interrupted = True
    sockets = member.group_sockets or member.group_store_sockets
    for fd in list(sockets):
        inode = sockets.pop(fd, None)  # None: another thread has taken it
        if (connection := duplicate(fd, inode)) is not None:
            member.lingering.append(connection)  # first: it is closed in the end, also if it is no longer connected
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)


def _group_store(member: Membership) -> dist.Store:
    """A connection to the store of its own, kept for the next group: ended, it frees a rank that makes a group."""
    if member.group_store is None or not member.group_store_sockets:
        member.group_store, member.group_store_sockets = member.clone_store()
    return member.group_store


def _delete_groups(store: dist.Store, names: list[str]) -> None:
    """Delete what closed groups left in the store: the number of keys must not grow with failures."""
    whole = bottom(store)
    for key in whole.list_keys():  # whole names, whichever prefix was asked
        if any(f"/{name}/" in key for name in names):
            whole.delete_key(key)
