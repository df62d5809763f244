"""The rendezvous of the ranks that a launcher has started: all of them connect to one store and wait for each other.

The store listens at the master address. Usually rank 0 hosts the store. With torchrun, torchrun's agent may host it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import LaunchError, RankError, RankTimeoutError
from ..failures import rank_names, summary
from ..interrupts import DeferredSignals
from ..polling import looks
from . import times
from .blocks import blocks_of
from .context import RankContext, world_of
from .environment import Launch, is_loopback
from .links import Links
from .sockets import (
    connected_since,
    connected_to,
    end_connections,
    listen_at,
    loopback,
    open_sockets,
)
from .store import Member, StoreHost, end_unanswered, member_key

logger = logging.getLogger("nn_parallel")


def join_launch(launch: Launch, device: torch.device | None, timeout: timedelta) -> RankContext:
    """Connect to the store, wait there for the other ranks of ``launch``, and return the context of this rank.

    Raises:
        LaunchError: on every rank, if one of the ranks does not come within ``timeout`` or has no device.
    """
    refusal: LaunchError | None = None
    try:
        world = world_of(launch, device)
        if world.device.type != "cpu":
            # Otherwise the first use of the accelerator would open a context on device 0, which costs memory there.
            torch.accelerator.set_device_index(world.device.index)
    except RuntimeError as error:  # this includes LaunchError
        # This rank still joins the rendezvous, so that the other ranks do not wait for it. There it reports the error,
        # which all ranks raise.
        world = world_of(launch, torch.device("cpu"))
        refusal = LaunchError(f"Rank {launch.rank} has no device: {error}")
    before = open_sockets()
    address = (launch.master_addr, launch.master_port)
    # A store is kept until the process ends, because a second store could not listen at the same port.
    if address not in _stores:
        opened = _open_store(launch, timeout, before)
        _stores[address] = _KeptStore(opened, connected_since(before, opened))
    kept = _stores[address]
    kept.meetings += 1
    own_keys = dist.PrefixStore(_prefix(launch, kept), kept.store)
    context = RankContext(
        world,
        lambda: own_keys,
        timeout,
        store_host=None if launch.launcher_hosts_store else 0,
        one_node=launch.one_node,
    )
    if not launch.one_node:
        end_unanswered(kept.sockets, context.unanswered_s)
        context.links = Links(context.lost_after_s)
        # The rank that hosts the store needs the links until the other ranks have left, see `Blocks.outlive_readers`.
        if launch.rank != context.store_host:
            context.on_leave.callback(context.links.close)
        if launch.rank == 0:
            # If rank 0 cannot listen, the other ranks cannot connect, and log a warning in `_link`.
            with contextlib.suppress(OSError):
                context.links.listen()
    try:
        _meet(context, f"{launch.master_addr}:{launch.master_port}", refusal)
    except BaseException:
        context.on_leave.close()
        context.close_links()
        raise
    rank_0 = context.connection.read(member_key(0), Member)
    if context.links is not None and launch.rank != 0:
        _link(context.links, launch, rank_0)
    links = context.links  # a reference to `context` in the next lines would make a reference cycle
    context.host = StoreHost(
        context.store_host,
        rank_0,
        context.world_size,
        timeout.total_seconds(),
        context.lost_after_s,
        lambda: links.loss_of(0) if links is not None else None,
    )
    context.connection.limit_requests(context.host, kept.sockets)
    return context


def _link(links: Links, launch: Launch, rank_0: Member | None) -> None:
    """Connect this rank to rank 0, so that each of them notices the death of the other.

    If the connection cannot be made, this rank logs a warning. A death is then noticed only when a timeout has passed.
    """
    try:
        links.connect(launch.rank, launch.master_addr, rank_0.port if rank_0 else 0)
    except OSError as error:  # for instance because of a firewall
        place = launch.rank, launch.master_addr, summary(error)
        logger.warning("Rank %d cannot see whether ranks on other nodes are alive: no answer from %s: %s", *place)


def _meet(context: RankContext, where: str, refusal: LaunchError | None) -> None:
    """Wait until all ranks have connected to the store and are ready to join.

    Args:
        context: the context of this rank.
        where: the address of the store, for error messages.
        refusal: if this rank refuses to join, the error that says why. All ranks then raise this error. None if this
            rank joins.

    Raises:
        LaunchError: a rank has not come in time, or has refused.
    """
    with as_launch_error(where, context.world_size, context.timeout):
        if (blocks := blocks_of(context)) is not None:
            blocks.barrier(blocks.call_of_all("initialize_ddp()"), context.timeout.total_seconds(), refusal)
        elif refusal is not None:
            raise refusal


@contextlib.contextmanager
def as_launch_error(where: str, world_size: int, timeout: timedelta) -> Iterator[None]:
    """Turn errors of the ``with`` block into a `LaunchError`.

    A timeout becomes an error that names the missing ranks. A `LaunchError` that one rank has raised is raised on all
    ranks. Any other error of a rank becomes the text of a new `LaunchError`.

    Args:
        where: the address or the call at which the ranks meet, for the message of a timeout.
        world_size: the number of ranks, for the same message.
        timeout: the timeout that has passed, for the same message.
    """
    try:
        yield
    except RankTimeoutError as error:
        missing = rank_names(error.ranks).capitalize()
        raise LaunchError(
            f"{missing} of {world_size} did not come to {where} within {timeout.total_seconds():g} s. Does every rank "
            "run, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        ) from error
    except RankError as error:
        cause = error.exceptions[0]
        if isinstance(cause, LaunchError):
            raise cause from cause.__cause__
        raise LaunchError(str(error)) from error


def _prefix(launch: Launch, kept: _KeptStore) -> str:
    """Return the prefix of all keys that the ranks use in the store.

    The prefix contains the world size, so that a job of another size at the same address uses other keys. It also
    contains two counters, so that the ranks do not read the keys of an earlier attempt. The first one counts the
    restarts by the launcher. The second one counts how often this rank has tried to join at this address.
    """
    return f"nn_parallel/{launch.world_size}/{launch.attempt}.{kept.meetings}"


def _open_store(launch: Launch, timeout: timedelta, before: dict[int, int]) -> dist.Store:
    """Connect to the store at the master address. Rank 0 hosts the store unless the launcher does.

    Args:
        launch: the launch of this rank.
        timeout: how long rank 0 or the launcher may take to listen. This is also the limit of later requests.
        before: the sockets that were open in this process before this call, as ``{descriptor: inode}``. If the store
            does not answer in time, all later connections to its port are shut down, but not these sockets.

    Raises:
        LaunchError: rank 0 cannot listen at the master address, or this rank cannot connect within ``timeout``.
    """
    hosts_store = launch.rank == 0 and not launch.launcher_hosts_store
    address = f"{launch.master_addr}:{launch.master_port}"
    is_here = launch.one_node and not launch.launcher_hosts_store
    host = loopback() if is_here or is_loopback(launch.master_addr) else launch.master_addr
    listener = None
    if hosts_store and is_here:
        # A `TCPStore` that opens its own socket would listen on every network interface.
        try:
            listener = listen_at(host, launch.master_port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise LaunchError(
                f"Rank 0 cannot listen on {address}: {why}. Set MASTER_PORT to a free port on every rank."
            ) from error
    try:
        if not hosts_store and not launch.launcher_hosts_store:
            _await_listener((host, launch.master_port), timeout)
        with _ended_after(timeout, launch.master_port, before):
            return dist.TCPStore(
                host,
                launch.master_port,
                is_master=hosts_store,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener else None,
            )
    except (OSError, UnicodeError, RuntimeError) as error:  # RuntimeError includes torch's DistError
        if hosts_store:
            raise LaunchError(f"Rank 0 cannot listen on {address}: {summary(error)}") from error
        who = "The launcher" if launch.launcher_hosts_store else "Rank 0"
        seconds = f"{timeout.total_seconds():g}"
        raise LaunchError(
            f"Rank {launch.rank} of {launch.world_size} found no store at {address} within {seconds} s. {who} should "
            "listen there, and no other program. Check that it is running, that MASTER_ADDR and MASTER_PORT are its "
            "own address and port, and that no firewall blocks them."
        ) from error


@contextlib.contextmanager
def _ended_after(timeout: timedelta, port: int, before: dict[int, int]) -> Iterator[None]:
    """After ``timeout``, end all connections to ``port`` that the ``with`` block has made, so that the block raises.

    This is needed because a `TCPStore` waits without limit for the first answer of the program that listens at this
    port. The program may not be a store, and may never answer. A thread ends the connections again and again, because
    the `TCPStore` connects again.

    Args:
        timeout: how long the block may take.
        port: the port of the store.
        before: the sockets that were open earlier, as ``{descriptor: inode}``. These sockets are not shut down.
    """

    def end_connections_to_port() -> None:
        wait_s = timeout.total_seconds()
        while not done.wait(wait_s):
            end_connections(connected_to(port, before))
            wait_s = times.ATTEMPT_MAX_S

    done = threading.Event()
    thread = threading.Thread(target=end_connections_to_port, name="nn_parallel connect", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _await_listener(address: tuple[str, int], timeout: timedelta) -> None:
    """Wait until a program listens at ``address``.

    A `TCPStore` would also wait for this. But it tries again only after half a second and then at growing intervals,
    and Ctrl-C does not interrupt it.

    Raises:
        OSError: no program listens at ``address`` when ``timeout`` has passed.
        UnicodeError: the host name contains a part that no host name can have, for instance an empty part.
    """
    warn_after_s = times.WARN_AFTER_S
    for waited in looks(*times.ATTEMPTS):
        left = timeout.total_seconds() - waited
        answer_within_s = min(max(left, times.ATTEMPT_MIN_S), times.ATTEMPT_MAX_S)
        try:
            # `DeferredSignals` delays Ctrl-C until the attempt has ended. In the middle of an attempt, Ctrl-C would
            # leave a socket open.
            with DeferredSignals(), socket.create_connection(address, answer_within_s):
                return
        except OSError as error:
            if left <= 0:
                raise
            if waited > warn_after_s:
                warn_after_s = math.inf
                logger.warning("No answer from %s:%d for %.0f s: %s.", *address, waited, summary(error))


@dataclass
class _KeptStore:
    """A connection to the store at a master address. It is kept for later launches at the same address."""

    store: dist.Store
    sockets: dict[int, int]  # the socket of the connection, as ``{descriptor: inode}``
    meetings: int = 0  # how often this rank has tried to join the other ranks in this store, see `_prefix`


_stores: dict[tuple[str, int], _KeptStore] = {}  # maps master addresses to stores
