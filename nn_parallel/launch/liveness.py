"""Whether ranks on other nodes live: each keeps a connection to rank 0, and the kernels at both ends answer for it.

A process that ends, however it does, closes its connection; a node that cannot be reached does not answer the kernel's
probes. Neither needs the interpreter of the rank, which may be busy for hours. Rank 0 writes into the store whom it has
lost; that rank 0 itself is lost, each of the others sees for itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import select
import selectors
import socket
import threading

from ..errors import first_line
from .context import RankContext
from .sockets import end_if_unanswered

HELLO_BYTES = 64
GONE_KEY = "gone"  # the ranks that are lost: one key for all, as every rank that waits reads it now and then
logger = logging.getLogger("nn_parallel")


def connect_nodes(context: RankContext, host: str) -> None:
    """Let this rank know when another one is gone; ``host`` is that of rank 0. Called by all ranks.

    Where that fails, a warning says so: then a death is found when the launcher ends the job, or a timeout is over.
    """
    try:
        line = Switchboard(context, host) if context.rank == 0 else Line(context, host)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a firewall; a value that is not ours
        if context.rank == 0:
            context.store.set("switchboard", "null")
        logger.warning("Rank %d cannot tell whether ranks on other nodes live: %s", context.rank, first_line(error))
        return
    context.rank_0_is_gone = line.is_lost
    context.on_leave.callback(line.close)


class Line:
    """A rank's connection to rank 0."""

    def __init__(self, context: RankContext, host: str) -> None:
        context.await_keys(["switchboard"])
        where = json.loads(context.store.get("switchboard"))
        if where is None:
            raise OSError("rank 0 has no switchboard")
        self._connection = socket.create_connection((host, where["port"]), context.gone_after_s)
        end_if_unanswered(self._connection, context.gone_after_s)
        self._connection.sendall(f"{where['token']} {context.rank}\n".encode())

    def is_lost(self) -> bool:
        """Whether rank 0 has ended, or cannot be reached any more."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)  # rank 0 sends nothing: there is an end to read, or an error
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()


class Switchboard:
    """Where rank 0 holds its ends of the lines, in a thread that waits for them to end."""

    def __init__(self, context: RankContext, host: str) -> None:
        self._world_size, self._within_s = context.world_size, context.gone_after_s
        self._store, _ = context.clone_store()
        self._gone: list[int] = []
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=context.world_size)
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._loop, name="nn_parallel switchboard", daemon=True)
        self._thread.start()
        where = {"port": self._listener.getsockname()[1], "token": self._token}
        context.store.set("switchboard", json.dumps(where))

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
            self._gone.append(end.rank)
            with contextlib.suppress(RuntimeError):  # the store is gone with its host, of which all hear anyway
                self._store.set(GONE_KEY, " ".join(map(str, self._gone)))


class _End:
    """The other end of a line, or of what somebody else has connected."""

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
