"""Sockets: the loopback, the network interfaces, and the connections that torch opens in this process.

This package shuts down torch's connections in order to free a rank, and sets TCP options on them. But torch gives no
access to their descriptors. Therefore this package searches the open descriptors of the process, either for sockets
that were opened after a certain moment, or for sockets that are connected to a known address.

A socket is identified by its descriptor together with its inode, in dictionaries ``{descriptor: inode}``. The
descriptor alone is not enough, because torch may close the socket at any time, and the number may then refer to another
file. Functions that use a socket first duplicate the descriptor, and then check the inode of the duplicate.
"""

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

SIOCGIFADDR = 0x8915  # the ioctl of Linux that reads the IPv4 address of a network interface
LISTEN_BACKLOG = 4096  # large, because many ranks connect at the same time; the kernel may use a lower value


def open_sockets() -> dict[int, int]:
    """Return the open sockets of this process as ``{fd: inode}``; empty on systems without ``/proc``."""
    inodes = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    inodes[int(name)] = status.st_ino
    return inodes


def connected_since(before: dict[int, int], store: dist.Store) -> dict[int, int]:
    """Return the connections of this process to ``store`` that are not in ``before``, as ``{descriptor: inode}``.

    If this process hosts the store, the server's ends of the connections are not included.
    """
    return connected_to(getattr(bottom(store), "port", 0), before)


def connected_to(port: int, before: dict[int, int]) -> dict[int, int]:
    """Return the connections of this process to ``port`` on any host, as ``{descriptor: inode}``.

    Args:
        port: the port of the peer.
        before: sockets to leave out, because they were open earlier: a result of `open_sockets`.
    """
    inodes = {}
    for fd, inode in open_sockets().items():
        if before.get(fd) != inode:
            with contextlib.suppress(OSError), _duplicate(fd) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    inodes[fd] = inode
    return inodes


def at_ports(ports: set[int]) -> list[int]:
    """Return the descriptors of all sockets of this process that have one of ``ports`` at either end.

    A forked process uses this function to close the sockets that it has inherited. Listening sockets are included.
    """
    return [fd for fd, _, ends in _ends() if ports & {port for _, port, *_ in ends}]


def connected_at(addresses: set[tuple[str, int]]) -> dict[int, int]:
    """Return the connections of this process that have one of ``addresses`` at either end, as ``{descriptor: inode}``.

    Listening sockets are not included.
    """
    return {
        fd: inode
        for fd, inode, ends in _ends()
        if len(ends) == 2 and addresses & {(host.removeprefix("::ffff:"), port) for host, port, *_ in ends}
    }


def _ends() -> Iterator[tuple[int, int, list[tuple[Any, ...]]]]:
    """Yield the descriptor, the inode and the ends of each internet socket of this process.

    The ends are the address of the socket and, if it is connected, the address of its peer.
    """
    for fd, inode in open_sockets().items():
        with contextlib.suppress(OSError), _duplicate(fd) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                ends = [connection.getsockname()]
                with contextlib.suppress(OSError):  # a listening socket has no peer
                    ends.append(connection.getpeername())
                yield fd, inode, ends


def still_open(sockets: dict[int, int]) -> Iterator[socket.socket]:
    """Yield a duplicate of each of ``sockets`` that is still open. The caller must close the duplicates."""
    for fd, inode in list(sockets.items()):
        if (connection := duplicate(fd, inode)) is not None:
            yield connection


def end_connections(sockets: dict[int, int]) -> None:
    """Shut down the connections, so that threads and peers that wait for data on them notice the end."""
    for connection in still_open(sockets):
        with connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def duplicate(fd: int, inode: int | None) -> socket.socket | None:
    """Return a duplicate of the connection ``fd``. The caller must close the duplicate.

    Returns:
        None if ``fd`` does not refer to the file with this ``inode`` any more, or is a listening socket.
    """
    with contextlib.suppress(OSError):
        connection = _duplicate(fd)
        is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if os.fstat(connection.fileno()).st_ino == inode and not is_listening:
            return connection
        connection.close()
    return None


def _duplicate(fd: int) -> socket.socket:
    """Return a duplicate of the socket ``fd``. Raise OSError if ``fd`` is not an open socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def end_if_unanswered(connection: socket.socket, lost_after_s: float, *, is_idle: bool = False) -> None:
    """Make the kernel end ``connection`` if the other host does not answer for too long.

    The connection survives an interruption of up to ``lost_after_s``. A busy process on the other host does not end
    the connection, because the kernel of that host answers. The limit, which is set by TCP options, depends on the use
    of the connection:

    - An idle connection is probed at short intervals. Therefore the limit can be little more than ``lost_after_s``.
    - Data that was sent just before an interruption is sent again at intervals that double each time. If the
      interruption lasts for ``lost_after_s``, the next attempt may come only after twice this time. Therefore the limit
      is twice as long.

    Args:
        connection: the connection.
        lost_after_s: the length of an interruption that the connection must survive.
        is_idle: if true, almost no data is sent on the connection, so that the first of these limits applies.
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
    """Return a socket that listens at an address of this machine, at any free port if ``port`` is 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)


def loopback(preferred: str = "127.0.0.1") -> str:
    """Return the ``preferred`` loopback address, 127.0.0.1 or ::1, if this machine has it, and otherwise the other one.

    A machine lacks one of the two addresses if IPv4 or IPv6 is switched off.

    ``::1`` can be faster, because torch looks up the name of each address to which it connects. Torch writes 127.0.0.1
    in the form of IPv6, ``::ffff:127.0.0.1``. This address is not in ``/etc/hosts``, so that the look-up asks a name
    server if there is one. ``::1`` is in ``/etc/hosts``.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in preferred else socket.AF_INET) as probe:
        probe.bind((preferred, 0))
        return preferred
    return "127.0.0.1" if ":" in preferred else "::1"


def interface_to_other_nodes(connections: dict[int, int]) -> str | None:
    """Return the name of the network interface on which gloo should listen so that other nodes can reach this node.

    By default gloo listens at the address to which the host name resolves. On many machines this is a loopback address,
    which other nodes cannot reach.

    Args:
        connections: connections of this process to other nodes, which show the right interface.

    Returns:
        None if gloo's default address is not a loopback address, or if there are several interfaces and no connection
        shows which of them to use.
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
    """Yield the name and the addresses of each network interface of this machine that has an address."""
    ipv6_lines = list[list[str]]()
    with contextlib.suppress(OSError):  # the kernel has no IPv6
        ipv6_lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            addresses = {
                socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])) for line in ipv6_lines if line[5] == name
            }
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses.add(socket.inet_ntoa(answer[20:24]))
            if addresses:
                yield name, addresses


def bottom(store: dist.Store) -> dist.Store:
    """Return the innermost store, without the `PrefixStore` objects around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
