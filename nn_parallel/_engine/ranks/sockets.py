"""The loopback; and the connections that torch makes in this process: which they are, and when they end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .environment import is_loopback

SIOCGIFADDR = 0x8915  # of Linux
LISTEN_BACKLOG = 4096  # the kernel may hold fewer; all ranks of a node connect at once


def open_sockets() -> dict[int, int]:
    """Return the open sockets of this process, as ``{fd: inode}``; empty where the system does not tell."""
    inodes = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    inodes[int(name)] = status.st_ino
    return inodes


def connected_since(before: dict[int, int], store: dist.Store) -> dict[int, int]:
    """Return the connections of this process to ``store`` that were not there before, without those of its clients."""
    return connected_to(getattr(bottom(store), "port", 0), before)


def connected_to(port: int, before: dict[int, int]) -> dict[int, int]:
    """Return the connections of this process to a ``port``, on whatever host, that were not there before."""
    inodes = {}
    for fd, inode in open_sockets().items():
        if before.get(fd) != inode:
            with contextlib.suppress(OSError), _duplicate(fd) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    inodes[fd] = inode
    return inodes


def at_ports(ports: set[int]) -> list[int]:
    """Return the sockets of this process that listen at one of these ports, or of whose ends one has it."""
    return [fd for fd, _, ends in _ends() if ports & {port for _, port, *_ in ends}]


def connected_at(addresses: set[tuple[str, int]]) -> dict[int, int]:
    """Return the connections of this process of which one end has one of these addresses."""
    return {
        fd: inode
        for fd, inode, ends in _ends()
        if len(ends) == 2 and addresses & {(host.removeprefix("::ffff:"), port) for host, port, *_ in ends}
    }


def _ends() -> Iterator[tuple[int, int, list[tuple[Any, ...]]]]:
    """Of each internet socket of this process: its number, its inode, its address, and that of its peer, if any."""
    for fd, inode in open_sockets().items():
        with contextlib.suppress(OSError), _duplicate(fd) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                ends = [connection.getsockname()]
                with contextlib.suppress(OSError):  # it listens
                    ends.append(connection.getpeername())
                yield fd, inode, ends


def still_open(sockets: dict[int, int]) -> Iterator[socket.socket]:
    """Those that are still the same connections, each as a duplicate for the caller to close."""
    for fd, inode in list(sockets.items()):
        if (connection := duplicate(fd, inode)) is not None:
            yield connection


def end_connections(sockets: dict[int, int]) -> None:
    """Have whoever waits for something from them see their end."""
    for connection in still_open(sockets):
        with connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def duplicate(fd: int, inode: int | None) -> socket.socket | None:
    """Return the connection ``fd``, for the caller to close; None if it is another file by now, or if it listens."""
    with contextlib.suppress(OSError):
        connection = _duplicate(fd)
        is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if os.fstat(connection.fileno()).st_ino == inode and not is_listening:
            return connection
        connection.close()
    return None


def _duplicate(fd: int) -> socket.socket:
    """Return a socket for ``fd``. Raises OSError if that is no socket any more."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def end_if_unanswered(connection: socket.socket, lost_after_s: float, *, is_idle: bool = False) -> None:
    """Have the kernel end ``connection`` when the other host has not answered for so long, and survive less.

    A process that computes, or holds its interpreter, does not keep its host from answering. What is under way when the
    other host goes out of reach is sent again at intervals that double each time, so it may arrive only after twice as
    long; a connection that ``is_idle`` is asked at short intervals, and ends soon after ``lost_after_s``.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    ask_every_s = max(1, int(lost_after_s / 8))
    limit_s = lost_after_s + 2 * ask_every_s if is_idle else 2 * lost_after_s + 1
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, ask_every_s),
        (socket.TCP_KEEPINTVL, ask_every_s),
        (socket.TCP_USER_TIMEOUT, int(limit_s * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Return a socket at one address of this machine; any free port if none is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)


def loopback(preferred: str = "127.0.0.1") -> str:
    """Return the ``preferred`` address of this machine to itself, or the other one, where IPv4 or IPv6 is switched off.

    Torch looks up the name of whom it connects to, and writes an address of IPv4 as one of IPv6: 127.0.0.1 becomes one
    that is in no ``/etc/hosts``, and a name server is asked, if there is one. ``::1`` is there.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in preferred else socket.AF_INET) as tried:
        tried.bind((preferred, 0))
        return preferred
    return "127.0.0.1" if ":" in preferred else "::1"


def interface_to_other_nodes(connections: dict[int, int]) -> str | None:
    """Return the network interface through which other nodes reach this one, which has these ``connections`` to them.

    None where the host name tells, at whose address gloo listens; on many machines that is one of the loopback. None
    also where there are several interfaces, and no connection shows which.
    """
    with contextlib.suppress(OSError):
        if not is_loopback(str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])):
            return None
    own = set()
    for connection in still_open(connections):
        with connection:
            own.add(connection.getsockname()[0].removeprefix("::ffff:"))
    interfaces = {name: addresses for name, addresses in _interfaces() if not any(map(is_loopback, addresses))}
    used = [name for name, addresses in interfaces.items() if addresses & own] or list(interfaces)
    return used[0] if len(used) == 1 else None


def _interfaces() -> Iterator[tuple[str, set[str]]]:
    """Yield the network interfaces of this machine that have addresses, and the addresses."""
    of_ipv6 = list[list[str]]()
    with contextlib.suppress(OSError):  # the kernel has no IPv6
        of_ipv6 = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            addresses = {
                socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])) for line in of_ipv6 if line[5] == name
            }
            with contextlib.suppress(OSError):  # it has none of IPv4
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses.add(socket.inet_ntoa(answer[20:24]))
            if addresses:
                yield name, addresses


def bottom(store: dist.Store) -> dist.Store:
    """Return the store itself, under all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
