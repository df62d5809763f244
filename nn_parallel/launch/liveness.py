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
from typing import NamedTuple

from ..errors import ParallelError, WorkerDiedError, first_line
from .context import RankContext
from .sockets import end_if_unanswered
from .store import GONE_KEY, SERVER_KEY, Connection, Member, host_identity, member_key

ASK_EVERY_S = 0.1  # who is gone, or where one lives who has not said so
HELLO_BYTES = 64
logger = logging.getLogger("nn_parallel")


class Gone(NamedTuple):
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
        self._processes = {rank: _Process() for rank in range(context.world_size)}
        self._gone = Gone(())
        self._look_for_gone_at = 0.0

    def is_dead(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to have ended, or its node to be out of reach."""
        process, now = self._processes[rank], time.monotonic()
        if not process.is_known and now > process.look_up_at:
            process.look_up_at = now + ASK_EVERY_S
            if (member := self._connection.read(member_key(rank), Member)) is not None:
                process.open(member)
        return process.has_ended() or self._is_gone(rank)

    def death(self, rank: int, what: object) -> WorkerDiedError:
        """The error of a rank that died before it finished ``what``."""
        process = self._processes[rank]
        how = "ended" if process.has_ended() else "ended, or its node went out of reach,"
        message = f"Rank {rank} (pid {process.pid} on {process.host_name}) {how} before it finished {what}."
        return WorkerDiedError(message, rank=rank, pid=process.pid)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def _is_gone(self, rank: int) -> bool:
        if (rank_0_is_gone := self._context.rank_0_is_gone) is None:  # all ranks are on this node
            return False
        if rank == 0:
            return rank_0_is_gone()
        if time.monotonic() > self._look_for_gone_at:
            self._look_for_gone_at = time.monotonic() + ASK_EVERY_S
            self._gone = self._connection.read(GONE_KEY, Gone) or self._gone
        return rank in self._gone.ranks


class _Process:
    """The process of another rank."""

    def __init__(self) -> None:
        self.pid, self.host_name = 0, ""
        self.is_known = False  # where it lives
        self.look_up_at = 0.0
        self._pidfd: int | None = None
        self._has_ended = False

    def open(self, member: Member) -> None:
        self.pid, self.host_name, self.is_known = member.pid, member.host_name, True
        if member.host == host_identity() and hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._has_ended = True
            except OSError:  # no descriptor is left
                self.is_known = False

    def has_ended(self) -> bool:
        if self._pidfd is not None and not self._has_ended:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._has_ended = bool(poll.poll(0))
        return self._has_ended

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd, self.is_known = None, False


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
        logger.warning("Rank %d cannot tell whether ranks on other nodes live: %s", context.rank, first_line(error))
        return
    context.rank_0_is_gone = link.is_lost
    context.on_leave.callback(link.close)


class LivenessLink:
    """A rank's connection to rank 0."""

    def __init__(self, context: RankContext, host: str) -> None:
        context.connection.await_keys([SERVER_KEY], context.timeout)
        server = context.connection.read(SERVER_KEY, ServerAddress)
        if server is None or not server.port:
            raise OSError("rank 0 awaits no links")
        self._connection = socket.create_connection((host, server.port), context.gone_after_s)
        end_if_unanswered(self._connection, context.gone_after_s)
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
        self._world_size, self._within_s = context.world_size, context.gone_after_s
        self._connection = context.connect()
        self._gone = Gone(())
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
                        with contextlib.suppress(OSError):
                            connection, _ = self._listener.accept()
                            end_if_unanswered(connection, self._within_s)
                            selector.register(connection, selectors.EVENT_READ, _End(connection))
                    elif not key.data.read(self._token):
                        selector.unregister(key.fileobj)
                        self._end(key.data)

    def _end(self, end: _End) -> None:
        end.connection.close()
        if end.rank is not None and end.rank < self._world_size:
            self._gone = Gone((*self._gone.ranks, end.rank))
            with contextlib.suppress(ParallelError):  # the store is gone with its host, of which all hear anyway
                self._connection.write(GONE_KEY, self._gone)


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
