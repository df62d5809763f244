"""The ranks that a launcher started find each other: in a store, each with a device of its own."""

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
    """Return this process's place among the ranks of ``launch``, once all of them have come.

    Raises:
        LaunchError: on every rank, if one of them does not come, or has no device.
    """
    refusal: LaunchError | None = None
    try:
        world = world_of(launch, device)
        if world.device.type != "cpu":
            torch.accelerator.set_device_index(world.device.index)  # before anything can open a context on device 0
    except RuntimeError as error:  # also a LaunchError; the others, who wait for this rank, must hear of it
        world = world_of(launch, torch.device("cpu"))
        refusal = LaunchError(f"Rank {launch.rank} has no device: {error}")
    before = open_sockets()
    address = (launch.master_addr, launch.master_port)
    if address not in _stores:  # kept for the life of the process: a second one could not listen on the same port
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
        context.on_leave.callback(context.links.close)
        if launch.rank == 0:
            with contextlib.suppress(OSError):  # the others then say that they cannot connect
                context.links.listen()
    try:
        _meet(context, f"{launch.master_addr}:{launch.master_port}", refusal)
    except BaseException:
        context.on_leave.close()
        raise
    rank_0 = context.connection.read(member_key(0), Member)
    if context.links is not None and launch.rank != 0:
        _link(context.links, launch, rank_0)
    context.host = StoreHost(
        context.store_host, rank_0, context.world_size, timeout.total_seconds(), context.lost_after_s
    )
    context.connection.limit_requests(context.host, kept.sockets)
    return context


def _link(links: Links, launch: Launch, rank_0: Member | None) -> None:
    """Connect this rank to rank 0. Where that fails, a death on another node is found when a timeout is over."""
    try:
        links.connect(launch.rank, launch.master_addr, rank_0.port if rank_0 else 0)
    except OSError as error:  # a firewall
        place = launch.rank, launch.master_addr, summary(error)
        logger.warning("Rank %d cannot tell whether ranks on other nodes live: nobody answers at %s: %s", *place)


def _meet(context: RankContext, where: str, refusal: LaunchError | None) -> None:
    """Return once all ranks have come ``where`` they meet, and none has a ``refusal`` to tell."""
    with as_launch_error(where, context.world_size, context.timeout):
        if (blocks := blocks_of(context)) is not None:
            blocks.barrier(blocks.call_of_all("initialize_ddp()"), context.timeout.total_seconds(), refusal)
        elif refusal is not None:
            raise refusal


@contextlib.contextmanager
def as_launch_error(where: str, world_size: int, timeout: timedelta) -> Iterator[None]:
    """Have what ranks raise together be a `LaunchError`: of one that did not come, or what one has raised."""
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
    """Of all keys of these ranks at this meeting: ranks of a job of another size, at the same address, are not them."""
    return f"nn_parallel/{launch.world_size}/{launch.attempt}.{kept.meetings}"


def _open_store(launch: Launch, timeout: timedelta, before: dict[int, int]) -> dist.Store:
    """Connect to the store at the master address; rank 0 hosts it, unless the launcher does.

    ``before``: the sockets that were open already.
    """
    hosts_store = launch.rank == 0 and not launch.launcher_hosts_store
    address = f"{launch.master_addr}:{launch.master_port}"
    is_here = launch.one_node and not launch.launcher_hosts_store
    host = loopback() if is_here or is_loopback(launch.master_addr) else launch.master_addr
    listener = None
    if hosts_store and is_here:
        # A socket of our own: TCPStore would listen on every interface.
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
    except (OSError, UnicodeError, RuntimeError) as error:  # RuntimeError: DistNetworkError, DistStoreError
        if hosts_store:
            raise LaunchError(f"Rank 0 cannot listen on {address}: {summary(error)}") from error
        who = "The launcher" if launch.launcher_hosts_store else "Rank 0"
        seconds = f"{timeout.total_seconds():g}"
        raise LaunchError(
            f"Rank {launch.rank} of {launch.world_size} found no store at {address} within {seconds} s. {who} "
            "should listen there, and no other program: is it running, are MASTER_ADDR and MASTER_PORT its own, does a "
            "firewall block them?"
        ) from error


@contextlib.contextmanager
def _ended_after(timeout: timedelta, port: int, before: dict[int, int]) -> Iterator[None]:
    """End the connections to ``port`` that are made here, again and again, when the time is up.

    A TCPStore waits without limit for the first answer of whoever listens there, who may be no store.
    """

    def end() -> None:
        wait_s = timeout.total_seconds()
        while not done.wait(wait_s):
            end_connections(connected_to(port, before))
            wait_s = times.ATTEMPT_MAX_S

    done = threading.Event()
    thread = threading.Thread(target=end, name="nn_parallel connect", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _await_listener(address: tuple[str, int], timeout: timedelta) -> None:
    """Return once somebody listens at ``address``.

    A TCPStore that finds nobody tries again after half a second, and then more and more seldom, and is deaf to Ctrl-C.

    Raises:
        OSError: why nobody could be reached within ``timeout``.
        UnicodeError: no host can have such a name.
    """
    warn_after_s = times.WARN_AFTER_S
    for waited in looks(*times.ATTEMPTS):
        left = timeout.total_seconds() - waited
        answer_within_s = min(max(left, times.ATTEMPT_MIN_S), times.ATTEMPT_MAX_S)
        try:
            # Ctrl-C is raised when the attempt is over: in the middle it would leave a socket open.
            with DeferredSignals(), socket.create_connection(address, answer_within_s):
                return
        except OSError as error:
            if left <= 0:
                raise
            if waited > warn_after_s:
                warn_after_s = math.inf
                logger.warning("Nobody answers at %s:%d for %.0f s: %s.", *address, waited, summary(error))


@dataclass
class _KeptStore:
    store: dist.Store
    sockets: dict[int, int]  # the connection, by descriptor and inode
    meetings: int = 0  # how often this rank has come there to meet the others, also in vain


_stores: dict[tuple[str, int], _KeptStore] = {}  # by address
