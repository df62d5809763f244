"""Who is dead? On this node a process tells by its pidfd; for other nodes each rank keeps a link to rank 0.

A process that ends, however it does, closes its link; a node that cannot be reached does not answer the kernel's
probes. Neither needs the interpreter of the rank, which may be busy for hours. Rank 0 writes into the store whom it has
lost; that rank 0 itself is lost, each of the others sees for itself.
"""

from __future__ import annotations

import contextlib
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

from ..errors import ParallelError, WorkerDiedError, summary
from .context import RankContext
from .sockets import end_if_unanswered
from .store import LOST_KEY, SERVER_KEY, Connection, Member, host_identity, member_key

ASK_EVERY_S = 0.1  # who is gone, or where one lives who has not said so
HELLO_BYTES = 64
logger = logging.getLogger("nn_parallel")


class Lost(NamedTuple):
    """The ranks that rank 0 has lost."""

    ranks: tuple[int, ...]


class ServerAddress(NamedTuple):
    """Where rank 0 awaits the links of the others; port 0 if it does not."""

    port: int
    token: str


class Liveness:
    """What one thread knows of who is dead."""

    def __init__(self, context: RankContext, connection: Connection) -> None:
        self._context, self._connection = context, connection
        self._members: dict[int, Member] = {}
        self._look_up_at = dict.fromkeys(range(context.world_size), 0.0)
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}  # by the pidfd of its process
        self._ended = set[int]()
        self._lost = Lost(())
        self._look_for_lost_at = 0.0

    def is_dead(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to have ended, or its node to be out of reach."""
        return bool(self.dead([rank]))

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that are dead: one look at all processes, however many are asked for."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._members and now > self._look_up_at[rank]:
                self._look_up_at[rank] = now + ASK_EVERY_S
                self._look_up(rank)
        self._ended.update(self._rank_of[pidfd] for pidfd, _ in self._poll.poll(0))
        return [rank for rank in ranks if rank in self._ended or self._is_lost(rank)]

    def death(self, rank: int, what: object) -> WorkerDiedError:
        """The error of a rank that died before it finished ``what``."""
        member = self._members.get(rank)
        who = f"Rank {rank} (pid {member.pid} on {member.host_name})" if member else f"Rank {rank}"
        how = "ended" if rank in self._ended else "ended, or its node went out of reach,"
        return WorkerDiedError(f"{who} {how} before it finished {what}.", rank=rank, pid=member.pid if member else 0)

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
                self._ended.add(rank)
            except OSError:  # no descriptor is left
                return
            else:
                self._rank_of[pidfd] = rank
                self._poll.register(pidfd, select.POLLIN)
        self._members[rank] = member

    def _is_lost(self, rank: int) -> bool:
        if (rank_0_is_lost := self._context.rank_0_is_lost) is None:  # all ranks are on this node
            return False
        if rank == 0:
            return rank_0_is_lost()
        if time.monotonic() > self._look_for_lost_at:
            self._look_for_lost_at = time.monotonic() + ASK_EVERY_S
            self._lost = self._connection.read(LOST_KEY, Lost) or self._lost
        return rank in self._lost.ranks


@functools.lru_cache(maxsize=1)
def local_places(context: RankContext) -> list[tuple[int, int]]:
    """The local rank and the local world size of every rank, once all of them have told where they live."""
    keys = [member_key(rank) for rank in range(context.world_size)]
    context.connection.await_keys(keys, context.timeout)
    members = [context.connection.read(key, Member) for key in keys]
    return [(member.local_rank, member.local_world_size) for member in members if member is not None]


def connect_nodes(context: RankContext, host: str) -> None:
    """Let this rank know when another one is gone; ``host`` is that of rank 0. Called by all ranks.

    Where that fails, a warning says so: then a death is found when the launcher ends the job, or a timeout is over.
    """
    try:
        link = LivenessServer(context, host) if context.rank == 0 else LivenessLink(context, host)
    except (OSError, ParallelError) as error:  # a firewall; a value that is not ours
        if context.rank == 0:
            context.connection.write(SERVER_KEY, ServerAddress(0, ""))
        logger.warning("Rank %d cannot tell whether ranks on other nodes live: %s", context.rank, summary(error))
        return
    context.rank_0_is_lost = link.is_lost
    context.on_leave.callback(link.close)


class LivenessLink:
    """A rank's connection to rank 0."""

    def __init__(self, context: RankContext, host: str) -> None:
        context.connection.await_keys([SERVER_KEY], context.timeout)
        server = context.connection.read(SERVER_KEY, ServerAddress)
        if server is None or not server.port:
            raise OSError("rank 0 awaits no links")
        self._connection = socket.create_connection((host, server.port), context.lost_after_s)
        end_if_unanswered(self._connection, context.lost_after_s)
        self._connection.sendall(f"{server.token} {context.rank}\n".encode())

    def is_lost(self) -> bool:
        """Whether rank 0 has ended, or cannot be reached any more."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)  # rank 0 sends nothing: there is an end to read, or an error
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()


class LivenessServer:
    """Where rank 0 holds its ends of the links, in a thread that waits for them to end."""

    def __init__(self, context: RankContext, host: str) -> None:
        self._world_size, self._within_s = context.world_size, context.lost_after_s
        self._connection = context.connect()
        self._lost = Lost(())
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=context.world_size)
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._loop, name="nn_parallel liveness", daemon=True)
        self._thread.start()
        context.connection.write(SERVER_KEY, ServerAddress(self._listener.getsockname()[1], self._token))

    def is_lost(self) -> bool:
        """Rank 0 is not lost to itself."""
        return False

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
                        for each in list(selector.get_map().values()):
                            if isinstance(each.data, _End):
                                each.data.connection.close()
                        return
                    if key.fileobj is self._listener:
                        try:
                            connection, _ = self._listener.accept()
                        except OSError:  # who connects has gone again; or no descriptor is left: not at once again
                            time.sleep(ASK_EVERY_S)
                            continue
                        end_if_unanswered(connection, self._within_s)
                        selector.register(connection, selectors.EVENT_READ, _End(connection))
                    elif not key.data.read(self._token):
                        selector.unregister(key.fileobj)
                        self._end(key.data)

    def _end(self, end: _End) -> None:
        end.connection.close()
        if end.rank is not None and end.rank < self._world_size:
            self._lost = Lost((*self._lost.ranks, end.rank))
            with contextlib.suppress(ParallelError):  # the store is gone with its host, of which all hear anyway
                self._connection.write(LOST_KEY, self._lost)


class _End:
    """The other end of a link, or of what somebody else has connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._hello = connection, b""
        self.rank: int | None = None
        connection.setblocking(False)

    def read(self, token: str) -> bool:
        """Take what has come; False when it is over."""
        try:
            data = self.connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._hello += data
        if not data or self.rank is not None or len(self._hello) > HELLO_BYTES:
            return False
        if self._hello.endswith(b"\n"):
            claimed, _, rank = self._hello.decode(errors="replace").strip().partition(" ")
            if not secrets.compare_digest(claimed.encode(), token.encode()) or not rank.isdecimal():
                return False
            self.rank = int(rank)
        return True
