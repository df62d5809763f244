"""The connections between rank 0 and the ranks on other nodes, by which both sides notice the death of the other one.

No rank on another node can be watched by its process id. But if a process ends in any way, its kernel closes the
connection; and if a node cannot be reached, it does not answer the probes of the other kernel, which then ends the
connection. All of this works even while the Python interpreter of a rank is busy for hours.

After the greeting nothing is sent over these connections. The watchdog of each rank checks whether they have ended, and
the watchdog of rank 0 writes into the store which ranks it has lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from .sockets import LISTEN_BACKLOG, end_if_unanswered
from .store import ENDED, NO_ANSWER, OUT_OF_REACH, RESET

HELLO = struct.Struct("!I")  # the greeting, which is all that a rank sends: its number


class Links:
    """The ends of these connections on this rank. There are none before `listen` or `connect`."""

    def __init__(self, lost_after_s: float) -> None:
        self.lost: dict[int, str] = {}  # by lost rank: how it was lost (ENDED, OUT_OF_REACH or RESET)
        self.port = 0  # the port at which rank 0 listens; 0: it does not
        self._lost_after_s = lost_after_s
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}  # by descriptor; those of rank 0 include the listening socket
        self._rank_of: dict[int, int] = {}  # by descriptor: the rank at the other end, once it is known

    def listen(self) -> None:
        """Accept the connections of the other ranks from now on. Only rank 0 calls this."""
        has_dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_dual_stack else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=has_dual_stack)
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
        """Accept new connections, and read from the others. Return whether another rank has been lost."""
        before = len(self.lost)
        for fd, _ in self._poll.poll(0):
            sock = self._sockets.get(fd)
            if sock is None:  # another thread has closed it
                continue
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with contextlib.suppress(OSError):  # no connection is waiting, or this process has too many open files
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
        """Close all connections."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _add(self, new: socket.socket) -> None:
        """Watch a socket from now on."""
        new.setblocking(False)
        self._sockets[new.fileno()] = new
        self._poll.register(new, select.POLLIN)

    def _read(self, connection: socket.socket) -> str | None:
        """Read from a connection that has data or has ended. Return how it has ended, or None if it has not."""
        try:
            data = connection.recv(HELLO.size)
        except BlockingIOError:
            return None
        except OSError as error:
            return OUT_OF_REACH if error.errno in NO_ANSWER else RESET
        # The connection has been closed, or a program that is no rank has sent this data.
        if len(data) != HELLO.size or connection.fileno() in self._rank_of:
            return ENDED
        (self._rank_of[connection.fileno()],) = HELLO.unpack(data)
        return None
