"""Who is dead? On this node a process tells by its pidfd; for other nodes each rank keeps a link to rank 0.

A process that ends, however it does, closes its link; a node that cannot be reached does not answer the kernel's
probes. Neither needs the interpreter of the rank, which may be busy for hours. Rank 0 watches all links, and writes
into the store which ranks it has lost. Each other rank watches its own, and sees by itself when rank 0 is lost.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import ParallelError, WorkerDiedError
from ..descendants import is_stopped
from ..failures import rank_names, summary
from . import times
from .context import RankContext
from .sockets import LISTEN_BACKLOG, connected_since, end_connections, end_if_unanswered
from .store import LOST_KEY, SERVER_KEY, Member, StoreClient, host_identity, member_key

HELLO_BYTES, WELCOME = 64, b"."
STRANGERS = 64  # may be connected to rank 0 at once, beside the ranks
ENDED, OUT_OF_REACH, RESET = "ended", "went out of reach", "ended, or its connection was reset"
NO_ANSWER = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH
LINK_ATTEMPTS = 3  # of which a flood of strangers may have rank 0 hang up on one
logger = logging.getLogger("nn_parallel")


class Lost(NamedTuple):
    """The ranks that rank 0 has lost, and how: `ENDED`, `OUT_OF_REACH` or `RESET`."""

    how: dict[int, str]


class ServerAddress(NamedTuple):
    """Where rank 0 awaits the links of the others; port 0 if it does not."""

    port: int
    token: str


class Liveness:
    """What one thread knows of who is dead."""

    def __init__(self, context: RankContext, connection: StoreClient) -> None:
        self._context, self._connection = context, connection
        self._members: dict[int, Member] = {}
        self._look_up_at = dict.fromkeys(range(context.world_size), 0.0)
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}  # by the pidfd of its process
        self._how = dict[int, str]()  # those that are known to be dead died
        self._lost = Lost({})
        self._look_for_lost_at = 0.0

    def is_dead(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to have ended, or its node to be out of reach."""
        return bool(self.dead([rank]))

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that are dead: one look at all processes, however many are asked for."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._members and now > self._look_up_at[rank]:
                self._look_up_at[rank] = now + times.ASK_EVERY_S * self._context.world_size  # of all ranks alike
                self._look_up(rank)
        self._how.update((self._rank_of[pidfd], ENDED) for pidfd, _ in self._poll.poll(0))
        return [rank for rank in ranks if self._is_known_dead(rank)]

    def out_of_reach(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` whose nodes do not answer any more."""
        return [rank for rank in self.dead(ranks) if self._how[rank] == OUT_OF_REACH]

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this node, and stopped."""
        if rank not in self._members:
            self._look_up(rank)
        member = self._members.get(rank)
        return member is not None and member.host == host_identity() and is_stopped(member.pid)

    def death(self, rank: int, what: object = None) -> WorkerDiedError:
        """The error of a rank that died, before it finished ``what``."""
        if rank not in self._members:
            with contextlib.suppress(ParallelError):  # the store is gone, too
                self._look_up(rank)
        return _death(rank, self._members.get(rank), self._how.get(rank, ENDED), self._context.lost_after_s, what)

    def close(self) -> None:
        for pidfd in self._rank_of:
            self._poll.unregister(pidfd)
            os.close(pidfd)
        self._rank_of.clear()
        self._members.clear()

    def _look_up(self, rank: int) -> None:
        member = self._connection.read(member_key(rank), Member)
        if member is None:
            return
        if member.host == host_identity() and hasattr(os, "pidfd_open"):
            try:
                pidfd = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self._how[rank] = ENDED
            except OSError:  # no descriptor is left
                return
            else:
                self._rank_of[pidfd] = rank
                self._poll.register(pidfd, select.POLLIN)
        self._members[rank] = member

    def _is_known_dead(self, rank: int) -> bool:
        rank_0 = self._context.rank_0
        if rank not in self._how and rank_0.is_linked:
            if rank == 0:
                how = rank_0.how_lost
            else:
                if time.monotonic() > self._look_for_lost_at:
                    self._look_for_lost_at = time.monotonic() + times.ASK_EVERY_S
                    self._lost = self._connection.read(LOST_KEY, Lost) or self._lost
                how = self._lost.how.get(rank)
            if how is not None:
                self._how[rank] = how
        return rank in self._how


def _death(rank: int, member: Member | None, how: str, lost_after_s: float, what: object = None) -> WorkerDiedError:
    who = f"Rank {rank} (pid {member.pid} on {member.host_name})" if member else f"Rank {rank}"
    when = f" before it finished {what}" if what else ""
    why = f": its node has not answered for {lost_after_s:g} s" if how == OUT_OF_REACH else ""
    return WorkerDiedError(f"{who} {how}{when}{why}.", rank=rank, pid=member.pid if member else 0)


@functools.lru_cache(maxsize=1)
def members(context: RankContext) -> list[Member]:
    """Wait until all ranks have told where they live; return that, in rank order."""
    keys = [member_key(rank) for rank in range(context.world_size)]
    context.connection.await_keys(keys, context.timeout)
    found = [context.connection.read(key, Member) for key in keys]
    return [member for member in found if member is not None]


def shared_accelerator(context: RankContext) -> str:
    """Return a sentence that names the ranks that have the same accelerator; empty if there are none."""
    ranks_of: dict[str, list[int]] = {}
    if context.world.device.type != "cpu":
        for rank, member in enumerate(members(context)):
            if member.accelerator:
                ranks_of.setdefault(member.accelerator, []).append(rank)
    for accelerator, ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"{rank_names(ranks).capitalize()} share the accelerator at {accelerator.rpartition('/')[2]}"
    return ""


def connect_nodes(context: RankContext, host: str) -> None:
    """Let this rank know when another one is gone; ``host`` is that of rank 0. Called by all ranks.

    Where that fails, a warning says so: then a death is found when the launcher ends the job, or a timeout is over.
    """
    try:
        link = LivenessServer(context) if context.rank == 0 else LivenessLink(context, host)
    except (OSError, RuntimeError, ValueError) as error:  # a firewall; the store; a value that is not ours
        if context.rank == 0:
            context.connection.write(SERVER_KEY, ServerAddress(0, ""))
        logger.warning("Rank %d cannot tell whether ranks on other nodes live: %s", context.rank, summary(error))
        return
    context.rank_0.is_linked = True
    context.on_leave.callback(link.close)


class LivenessLink:
    """A rank's connection to rank 0, and a thread that waits for its end.

    Where the node of rank 0 goes out of reach, the thread ends the connections to the store too, which is there: a rank
    that awaits an answer hears of it now.
    """

    def __init__(self, context: RankContext, host: str) -> None:
        context.connection.await_keys([SERVER_KEY], context.timeout)
        server = context.connection.read(SERVER_KEY, ServerAddress)
        if server is None or not server.port:
            raise OSError("rank 0 awaits no links")
        context.rank_0.port = server.port
        self._store, self._lost_after_s = context.store, context.lost_after_s
        self._rank_0, self._member_0 = context.rank_0, context.connection.read(member_key(0), Member)
        self._is_closed, self._hello = False, f"{server.token} {context.rank}\n".encode()
        for _ in range(LINK_ATTEMPTS):
            self._connection = socket.create_connection((host, server.port), context.lost_after_s)
            if self._is_welcome():
                break
            self._connection.close()
        else:
            raise OSError("rank 0 has hung up")
        self._connection.settimeout(None)
        self._thread = threading.Thread(target=self._await_end, name="nn_parallel liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _is_welcome(self) -> bool:
        end_if_unanswered(self._connection, self._lost_after_s, is_idle=True)
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(self._hello)
            return self._connection.recv(1) == WELCOME
        return False

    def _await_end(self) -> None:
        how = ENDED
        try:
            self._connection.recv(1)  # rank 0 says no more: this is its end
        except OSError as error:
            how = _how_lost(error)
        if self._is_closed:
            return
        self._rank_0.how_lost, self._rank_0.loss = how, _death(0, self._member_0, how, self._lost_after_s)
        if how == OUT_OF_REACH:
            end_connections(connected_since({}, self._store))


class LivenessServer:
    """Where rank 0 holds its ends of the links, in a thread that waits for them to end."""

    def __init__(self, context: RankContext) -> None:
        self._world_size, self._lost_after_s = context.world_size, context.lost_after_s
        self._connection = context.connect()
        self._lost = Lost({})
        self._token = secrets.token_hex(16)
        self._unknown = dict[_End, None]()  # who has not shown the token yet, the first to connect first
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=both)
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._loop, name="nn_parallel liveness", daemon=True)
        self._thread.start()
        context.rank_0.port = self._listener.getsockname()[1]
        context.connection.write(SERVER_KEY, ServerAddress(context.rank_0.port, self._token))

    def close(self) -> None:
        self._wake.close()
        self._thread.join()
        self._woken.close()

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.closing(self._listener):
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._close_all(selector)
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.data.connection.fileno() != -1:  # else it was hung up on just now
                        self._read(selector, key.data)

    def _close_all(self, selector: selectors.BaseSelector) -> None:
        for each in list(selector.get_map().values()):
            if isinstance(each.data, _End):
                each.data.connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # who connects has gone again; or no descriptor is left: not at once again
            time.sleep(times.ASK_EVERY_S)
            return
        end_if_unanswered(connection, self._lost_after_s, is_idle=True)
        end = _End(connection)
        selector.register(connection, selectors.EVENT_READ, end)
        self._unknown[end] = None
        if len(self._unknown) > self._world_size + STRANGERS:
            self._hang_up(selector, next(iter(self._unknown)))

    def _read(self, selector: selectors.BaseSelector, end: _End) -> None:
        how = end.read(self._token)
        if end.rank is not None:
            self._unknown.pop(end, None)
        if how is not None:
            self._hang_up(selector, end)
            self._note_loss(end.rank, how)

    def _hang_up(self, selector: selectors.BaseSelector, end: _End) -> None:
        self._unknown.pop(end, None)
        selector.unregister(end.connection)
        end.connection.close()

    def _note_loss(self, rank: int | None, how: str) -> None:
        if rank is not None and rank < self._world_size:
            self._lost.how[rank] = how
            with contextlib.suppress(ParallelError):  # the store is gone with its host, of which all hear anyway
                self._connection.write(LOST_KEY, self._lost)


class _End:
    """The other end of a link, or of what somebody else has connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._hello = connection, b""
        self.rank: int | None = None
        connection.setblocking(False)

    def read(self, token: str) -> str | None:
        """Take what has come; how the connection has ended, if it has."""
        try:
            data = self.connection.recv(HELLO_BYTES)
            self._hello += data
            if not data or self.rank is not None or len(self._hello) > HELLO_BYTES:
                return ENDED
            if self._hello.endswith(b"\n"):
                claimed, _, rank = self._hello.decode(errors="replace").strip().partition(" ")
                if not secrets.compare_digest(claimed.encode(), token.encode()) or not rank.isdecimal():
                    return ENDED
                self.connection.sendall(WELCOME)
                self.rank = int(rank)
        except BlockingIOError:
            pass
        except OSError as error:
            return _how_lost(error)
        return None


def _how_lost(error: OSError) -> str:
    return OUT_OF_REACH if error.errno in NO_ANSWER else RESET
