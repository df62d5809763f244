"""The connections that torch makes in this process: which they are, and an end to those that nobody answers."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

import torch.distributed as dist


def open_sockets() -> dict[int, int]:
    """The open sockets of this process, as ``{fd: inode}``; empty where the system does not tell."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


def connected_since(before: dict[int, int], store: dist.Store) -> dict[int, int]:
    """The connections of this process to ``store`` that were not there before; not those of others, if it hosts it."""
    port, found = getattr(bottom(store), "port", None), {}
    for fd, inode in open_sockets().items():
        if before.get(fd) != inode:
            with contextlib.suppress(OSError), _duplicate(fd) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    found[fd] = inode
    return found


def connected_at(addresses: set[tuple[str, int]]) -> dict[int, int]:
    """The connections of this process of which one end has one of these addresses."""
    found = {}
    for fd, inode in open_sockets().items():
        with contextlib.suppress(OSError), _duplicate(fd) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                ends = connection.getsockname(), connection.getpeername()  # the second is an OSError where it listens
                if addresses & {(host.removeprefix("::ffff:"), port) for host, port, *_ in ends}:
                    found[fd] = inode
    return found


def still_open(sockets: dict[int, int]) -> Iterator[socket.socket]:
    """Those that are still the same connections, each as a duplicate for the caller to close."""
    for fd, inode in list(sockets.items()):
        if (connection := duplicate(fd, inode)) is not None:
            yield connection


def duplicate(fd: int, inode: int | None) -> socket.socket | None:
    """The connection ``fd``, for the caller to close; None if it is another file by now, or a socket that listens."""
    with contextlib.suppress(OSError):
        connection = _duplicate(fd)
        is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if os.fstat(connection.fileno()).st_ino == inode and not is_listening:
            return connection
        connection.close()
    return None


def _duplicate(fd: int) -> socket.socket:
    """Raises OSError where ``fd`` is no socket any more."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def end_if_unanswered(connection: socket.socket, within_s: float) -> None:
    """Have the kernel end ``connection`` when the other end's host has not answered it for so long.

    A process that computes, or holds its interpreter, does not keep its host from answering.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, within_s / 2),
        (socket.TCP_KEEPINTVL, within_s / 6),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, within_s * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))


def bottom(store: dist.Store) -> dist.Store:
    """The store itself, under all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
