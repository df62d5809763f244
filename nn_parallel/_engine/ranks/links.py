"""The connections between rank 0 and the ranks on other nodes, through which each side notices the death of the other.

A process on another node cannot be watched through its process id. But when a process ends in any way, its kernel
closes the connection. If a node cannot be reached, it does not answer the probes that the other node's kernel sends,
and this kernel then ends the connection. All of this works even if the Python interpreter of a rank is busy for hours.

Over its connection, a rank sends only a greeting with its rank number (`HELLO`) to rank 0. The watchdog of each rank
checks whether the connections of this rank have ended, and so does each thread that looks for the cause of a failure.
The watchdog of rank 0 writes the list of lost ranks into the store.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from ..interrupts import RLock
from .sockets import LISTEN_BACKLOG, end_if_unanswered
from .store import ENDED, NO_ANSWER, OUT_OF_REACH, RESET

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
HELLO = struct.Struct("!I")  # the format of the greeting, which holds only the number of the rank that sends it


class Links:
    """This rank's connections through which it notices deaths on other nodes, see the docstring of this module.

    Rank 0 calls `listen`, and then accepts a connection from each other rank. Any other rank calls `connect`, and has
    only the connection to rank 0.
    """

    def __init__(self, lost_after_s: float) -> None:
        self.lost: dict[int, str] = {}  # maps each lost rank to ENDED, OUT_OF_REACH or RESET
        self.port = 0  # the port at which rank 0 listens; 0 if it is not known, or if rank 0 does not listen
        self._lost_after_s = lost_after_s
        self._looking = RLock()  # held while a thread checks the connections
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}  # all sockets by descriptor, on rank 0 also the listening one
        # Maps the descriptor of a connection to the rank at its other end. Rank 0 adds a rank when the rank's greeting
        # arrives.
        self._rank_of: dict[int, int] = {}

    def listen(self) -> None:
        """Open the socket at which the other ranks connect. Only rank 0 calls this method."""
        has_dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_dual_stack else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=has_dual_stack)
        self.port = listener.getsockname()[1]
        self._add(listener)

    def connect(self, rank: int, host: str, port: int) -> None:
        """Connect this ``rank`` to rank 0.

        Raises:
            OSError: rank 0 cannot be reached at ``host`` and ``port``.
        """
        self.port = port
        connection = socket.create_connection((host, port), self._lost_after_s)
        connection.sendall(HELLO.pack(rank))
        end_if_unanswered(connection, self._lost_after_s, is_idle=True)
        self._rank_of[connection.fileno()] = 0
        self._add(connection)

    def look(self) -> None:
        """Accept new connections, and check whether existing ones have ended. Any thread may call this method."""
        with self._looking:
            self._look()

    def loss_of(self, rank: int) -> str | None:
        """Check the connections, and return how ``rank`` was lost: ENDED, OUT_OF_REACH or RESET.

        Return None if ``rank`` is not known to be lost.
        """
        self.look()
        return self.lost.get(rank)

    def _look(self) -> None:
        for fd, _ in self._poll.poll(0):
            sock = self._sockets.get(fd)
            if sock is None:  # another thread has closed the socket
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

    def close(self) -> None:
        """Close all connections."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _add(self, new: socket.socket) -> None:
        """Include a socket in the checks of `look` from now on."""
        new.setblocking(False)
        self._sockets[new.fileno()] = new
        self._poll.register(new, select.POLLIN)

    def _read(self, connection: socket.socket) -> str | None:
        """Read from a connection, which either has data, namely the greeting of a rank, or has ended.

        Returns:
            ENDED, OUT_OF_REACH or RESET if the connection has ended; None if it has not.
        """
        try:
            data = connection.recv(HELLO.size)
        except BlockingIOError:
            return None
        except OSError as error:
            return OUT_OF_REACH if error.errno in NO_ANSWER else RESET
        # Either the connection has been closed, or a program that is not a rank has sent this data.
        if len(data) != HELLO.size or connection.fileno() in self._rank_of:
            return ENDED
        (self._rank_of[connection.fileno()],) = HELLO.unpack(data)
        return None
