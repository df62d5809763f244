"""`initialize_ddp` and `cleanup_ddp`: from a launch to a store, from the store to a process group, and back."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import socket
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from . import world as _world
from .devices import resolve_device
from .errors import LaunchError
from .launchers import Launch, detect_launch, is_loopback, with_arguments
from .world import DEFAULT_TIMEOUT, Membership, World, current_world, membership, stop_lingering, world_of

logger = logging.getLogger("nn_parallel")


def initialize_ddp(
    timeout: timedelta | float | None = None,
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    fallback: bool = False,
) -> World:
    """Join the ranks that were started together, and connect them by a process group.

    Works however this process was started: by torchrun, with the ``env://`` variables or with explicit arguments; as a
    rank of `ParallelExecutor.run`; or alone, where it makes no group and returns the world of one rank. Call it as
    often as you like: it returns the same world, and makes the group again after a failure has closed it.

    Args:
        timeout: seconds (or a timedelta) for the ranks to find each other and for each collective; 60 minutes if None.
        backend: of torch.distributed. If None: ``"gloo"`` on CPU, gloo for CPU tensors and the accelerator's own
            backend for its tensors otherwise.
        device: of this rank. If None: the accelerator of the local rank, or the CPU where there is none.
        rank, world_size, local_rank, master_addr, master_port: win over the environment.
        fallback: where the environment is broken, warn and go on alone instead of raising.

    Returns:
        `World`, which unpacks as ``distributed, rank, local_rank, world_size, device``.

    Raises:
        LaunchError: the environment is half set or contradicts itself, the port is in use, a rank did not come within
            ``timeout``, or there are fewer accelerators than ranks. The message says what to set.

    Example::

        distributed, rank, local_rank, world_size, device = initialize_ddp()
        model = MyModel().to(device)
        if distributed:
            model = DistributedDataParallel(model)
    """
    limit = as_timedelta(timeout) or DEFAULT_TIMEOUT
    member = membership()
    try:
        if member is None:
            environ = with_arguments(
                os.environ,
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                master_addr=master_addr,
                master_port=master_port,
            )
            launch = detect_launch(environ)
            if launch is None:
                return current_world() if device is None else World(False, 0, 0, 1, resolve_device(device))
            member = _join(launch, resolve_device(device) if device is not None else None, limit)
        if member.open_store is not None and not dist.is_initialized():
            _make_group(member, backend, as_timedelta(timeout) or member.timeout)
    except LaunchError as error:
        if not fallback:
            raise
        cleanup_ddp()
        warnings.warn(f"Running alone, not distributed. {error}", stacklevel=2)
        alone = World(False, 0, 0, 1, resolve_device(device or "cpu"))
        _world.join(Membership(alone))
        return alone
    return member.current()


def cleanup_ddp() -> None:
    """Leave the world that `initialize_ddp` joined and close its process group. Harmless when there is none.

    Runs by itself at the end of the program. Inside `ParallelExecutor.run` it closes the group; the rank stays a rank.
    """
    member = membership()
    if member is None or member.world.launcher == "external":
        return
    close_group(member)
    if member.world.launcher != "executor":
        member.on_leave.close()
        _world.join(None)


def join_launched_world() -> Membership | None:
    """The membership of this process, joined now if a launcher started it and `initialize_ddp` has not been called.

    Without this, every rank of a script that forgot to call it would take itself for rank 0 and write the checkpoint.
    """
    member = membership()
    if member is None and detect_launch(os.environ) is not None:
        world = initialize_ddp()
        logger.info("initialize_ddp() was called for you: rank %d of %d (%s).", *world[1:4:2], world.launcher)
        member = membership()
    return member


def should_use_distributed(flag: bool | None = None) -> bool:
    """Whether to train distributed.

    Args:
        flag: False: no. None: what the environment says, yes if several ranks were started together. True: yes if it is
            possible at all, also with a single launched rank; if it is not, a warning says so.

    Example::

        >>> should_use_distributed(False)
        False
    """
    if flag is False:
        return False
    world = current_world()
    if flag is None:
        return world.world_size > 1
    possible = world.launcher != "none"
    if not possible:
        warnings.warn("No launcher started this process, so it runs alone: start it with torchrun.", stacklevel=2)
    return possible


def as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    """Seconds or a timedelta, as a timedelta.

    Raises:
        ValueError: it is not above zero.
    """
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if limit is not None and limit <= timedelta(0):
        raise ValueError(f"timeout={timeout} must be above zero.")
    return limit


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
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(fd))
            if os.fstat(connection.fileno()).st_ino != inode or connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                connection.close()
            else:
                member.lingering.append(connection)  # first: it is closed in the end, also if it is no longer connected
                connection.shutdown(socket.SHUT_RD)


def _join(launch: Launch, device: torch.device | None, timeout: timedelta) -> Membership:
    world = world_of(launch, device)
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index)  # before anything can open a context on device 0
    address = launch.master_addr, launch.master_port
    if address not in _stores:  # kept for the life of the process: a second one could not listen on the same port
        _stores[address] = _open_store(launch, timeout), itertools.count(1)
    store, joins = _stores[address]
    own_keys = dist.PrefixStore(f"nn_parallel/{launch.attempt}.{next(joins)}", store)
    member = Membership(
        world,
        lambda: own_keys,
        timeout,
        store_host=None if launch.launcher_hosts_store else 0,
        one_node=launch.one_node,
    )
    meet(member.store, member, timeout, f"{launch.master_addr}:{launch.master_port}")
    _world.join(member)
    atexit.register(cleanup_ddp)
    logger.info("Rank %d of %d on %s, started by %s.", world.rank, world.world_size, world.device, world.launcher)
    return member


def _open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the store at the master address; rank 0 hosts it, unless the launcher does."""
    hosts_store = launch.rank == 0 and not launch.launcher_hosts_store
    address = f"{launch.master_addr}:{launch.master_port}"
    listener = None
    if hosts_store and is_loopback(launch.master_addr):
        # A socket of our own: TCPStore would listen on every interface.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((launch.master_addr, launch.master_port))
            listener.listen(max(launch.world_size, 128))
        except OSError as error:
            listener.close()
            raise LaunchError(
                f"Rank 0 cannot listen on {address}: {error.strerror}. Set MASTER_PORT to a free port on every rank."
            ) from error
    try:
        return dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=hosts_store,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        if hosts_store:
            raise LaunchError(f"Rank 0 cannot listen on {address}: {_first_line(error)}") from error
        host, seconds = "The launcher" if launch.launcher_hosts_store else "Rank 0", f"{timeout.total_seconds():g}"
        raise LaunchError(
            f"Rank {launch.rank} of {launch.world_size} found nobody at {address} within {seconds} s. {host} "
            "should listen there: is it running, are MASTER_ADDR and MASTER_PORT its own, does a firewall block them?"
        ) from error


def meet(store: dist.Store, member: Membership, timeout: timedelta, where: str) -> None:
    """Return once every rank has called this with the same store; name those that do not come."""
    world = member.world
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.0001
    try:
        _raise_if_interrupted(member, where)  # before anything of it stands in the store
        if store.add(f"arrived/{world.rank}", 1) > 1:
            raise LaunchError(
                f"There are two ranks {world.rank} at {where}: another job uses the same address, or two processes "
                "have the same RANK. Set MASTER_PORT to a free port, the same on every rank of this job."
            )
        arrived = store.add("arrived", 1)  # one counter to poll, however many ranks; the keys name the missing
        while arrived < world.world_size:
            _raise_if_interrupted(member, where)
            if time.monotonic() > deadline:
                missing = [rank for rank in range(world.world_size) if not store.check([f"arrived/{rank}"])]
                raise LaunchError(
                    f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {world.world_size} did not come "
                    f"to {where} within {timeout.total_seconds():g} s. Does every rank run, with the same MASTER_ADDR, "
                    "MASTER_PORT and WORLD_SIZE?"
                )
            time.sleep(pause)
            pause = min(pause * 1.2, 0.05)
            arrived = store.add("arrived", 0)
    except dist.DistError as error:
        _raise_if_interrupted(member, where)
        raise LaunchError(f"The store was lost while the ranks met at {where}: its host has ended.") from error


def _raise_if_interrupted(member: Membership, where: str) -> None:
    if member.interrupted:
        raise LaunchError(f"Another rank failed while rank {member.rank} waited for it at {where}.")


def _make_group(member: Membership, backend: str | None, timeout: timedelta) -> None:
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
    before, hook = _sockets(), sys.excepthook
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
        _raise_if_interrupted(member, "its process group")
        raise LaunchError(
            f"Rank {world.rank} of {world.world_size} could not make a {backend} group within "
            f"{timeout.total_seconds():g} s: {_first_line(error)}"
        ) from error
    finally:
        sys.excepthook = hook  # each init chains one more
    member.group_sockets = _new_sockets(before, member.store)
    meet(store, member, timeout, "its process group")  # or a rank that fails now would break another's init
    *old, _ = member.group_names
    del member.group_names[:-1]
    if world.rank == 0 and old:
        _delete_groups(member.store, old)


def _group_store(member: Membership) -> dist.Store:
    """A connection to the store of its own, kept for the next group: ended, it frees a rank that makes a group."""
    if member.group_store is None or not member.group_store_sockets:
        before = _sockets()
        member.group_store = member.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        member.group_store_sockets = _new_sockets(before, member.store)
    return member.group_store


def _delete_groups(store: dist.Store, names: list[str]) -> None:
    """Delete what closed groups left in the store: the number of keys must not grow with failures."""
    whole = _bottom(store)
    for key in whole.list_keys():  # whole names, whichever prefix was asked
        if any(f"/{name}/" in key for name in names):
            whole.delete_key(key)


def _new_sockets(before: dict[int, int], store: dist.Store) -> dict[int, int]:
    """What this process has connected since; not what others have connected to the store that it may host."""
    port, found = getattr(_bottom(store), "port", None), {}
    for fd, inode in _sockets().items():
        with contextlib.suppress(OSError):
            if before.get(fd) != inode:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.family != socket.AF_UNIX and connection.getsockname()[1] != port:
                        found[fd] = inode
    return found


def _bottom(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _sockets() -> dict[int, int]:
    """The open sockets of this process, as ``{fd: inode}``; empty where the system does not tell."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_stores: dict[tuple[str, int], tuple[dist.Store, Iterator[int]]] = {}  # and how often each was joined
