"""The connections between rank 0 and the ranks on other nodes: by its end each side knows that the other one is gone.

A process that ends, however it does, closes its connections; a node that cannot be reached does not answer the probes
of the kernel. Neither needs the interpreter of the rank, which may be busy for hours. The watchdogs look after the
connections, and that of rank 0 writes into the store which ranks it has lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from .sockets import LISTEN_BACKLOG, end_if_unanswered
from .store import ENDED, NO_ANSWER, OUT_OF_REACH, RESET

HELLO = struct.Struct("!I")  # what a rank sends first, and all that it sends: its number


class Links:
    """This rank's ends of the connections; none until it listens, or connects."""

    def __init__(self, lost_after_s: float) -> None:
        self.lost: dict[int, str] = {}  # the ranks that are gone, and how
        self.port = 0  # where rank 0 listens
        self._lost_after_s = lost_after_s
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}  # by descriptor; the first one of rank 0 listens
        self._rank_of: dict[int, int] = {}  # by descriptor, for those whose rank is known

    def listen(self) -> None:
        """Await the other ranks, on rank 0."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=both)
        self.port = listener.getsockname()[1]
        self._add(listener)

    def connect(self, rank: int, host: str, port: int) -> None:
        """Connect this ``rank`` to rank 0.

        Raises:
            OSError: rank 0 cannot be reached there.
        """
        self.port = port
        connection = socket.create_connection((host, port), self._lost_after_s)
        connection.sendall(HELLO.pack(rank))
        end_if_unanswered(connection, self._lost_after_s, is_idle=True)
        self._rank_of[connection.fileno()] = 0
        self._add(connection)

    def look(self) -> bool:
        """Take what has come; return whether a rank is lost that was not before."""
        before = len(self.lost)
        for fd, _ in self._poll.poll(0):
            sock = self._sockets.get(fd)
            if sock is None:  # closed by another thread
                continue
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with contextlib.suppress(OSError):  # nobody else has come; or no descriptor is left
                    while True:
                        connection, _ = sock.accept()
                        end_if_unanswered(connection, self._lost_after_s, is_idle=True)
                        self._add(connection)
            elif (how := self._read(sock)) is not None:
                self._poll.unregister(fd)
                self._sockets.pop(fd).close()
                if fd in self._rank_of:
                    self.lost[self._rank_of.pop(fd)] = how
        return len(self.lost) > before

    def close(self) -> None:
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _add(self, new: socket.socket) -> None:
        new.setblocking(False)
        self._sockets[new.fileno()] = new
        self._poll.register(new, select.POLLIN)

    def _read(self, connection: socket.socket) -> str | None:
        """Take what the other side has sent; return how the connection has ended, if it has."""
        try:
            data = connection.recv(HELLO.size)
        except BlockingIOError:
            return None
        except OSError as error:
            return OUT_OF_REACH if error.errno in NO_ANSWER else RESET
        if len(data) != HELLO.size or connection.fileno() in self._rank_of:  # closed, or no rank sent this
            return ENDED
        (self._rank_of[connection.fileno()],) = HELLO.unpack(data)
        return None
