"""The script's side of the fork server, a process that forks the workers of all pools of the script.

The script starts the fork server, and has one connection to it for each pool.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from ..interrupts import RLock
from .channel import send_fds

STOP_WITHIN_S = 10.0  # a fork server that has not ended after this time is killed

# The program of the fork server. Its arguments are the descriptor of a socket to the script, the process id of the
# script, and the entries of `sys.path`.
_SERVE = """
import sys
control, parent, *sys.path[:] = sys.argv[1:]
from nn_parallel._engine.pool.forkserver import serve
serve(int(control), int(parent))
"""


class Forked(NamedTuple):
    """The report that a worker process has been forked."""

    key: int  # the key that `ServerConnection.fork` has returned for the worker
    pid: int


class Exited(NamedTuple):
    """The report that a worker process has ended, or could not be forked."""

    key: int  # the key that `ServerConnection.fork` has returned for the worker
    exitcode: int
    evidence: str  # further facts about the end of the process, as sentences


class ServerConnection:
    """The connection of one pool to the fork server. When it is closed, the fork server kills the pool's workers."""

    def __init__(self) -> None:
        self._sock = _connect()
        self._keys = itertools.count(1)
        self._oom_kills = _OomKills()

    def fileno(self) -> int:
        """Return the descriptor of the connection, which is readable when there is a report for `receive`."""
        return self._sock.fileno()

    def fork(self, fds: list[int]) -> int:
        """Ask for a worker with the descriptors ``fds``. Return the key that names the worker in later messages."""
        key = next(self._keys)
        with contextlib.suppress(ConnectionError):  # the server has ended; `receive` will report this
            send_fds(self._sock, f"fork {key}".encode(), fds)
        return key

    def signal(self, key: int, number: int) -> None:
        """Send a signal to a worker, if it still runs. SIGKILL also ends the processes that the worker has started."""
        with contextlib.suppress(OSError):
            self._sock.send(f"{int(number)} {key}".encode())

    def receive(self) -> Forked | Exited:
        """Return the next report of the fork server.

        Raises:
            EOFError: the fork server has ended.
        """
        try:
            text = self._sock.recv(4096)
        except ConnectionError:
            text = b""
        if not text:
            raise EOFError
        message: dict[str, Any] = json.loads(text)
        key = message["key"]
        if "errno" in message:
            return Exited(key, os.EX_OSERR, f"It could not be forked: {os.strerror(message['errno'])}.")
        if "pid" in message:
            return Forked(key, message["pid"])
        evidence = f"Its memory use peaked at {message['max_rss_kib'] // 1024} MiB."
        if kills := self._oom_kills.since_last_call():
            evidence += f" The kernel's out-of-memory killer counted {kills} kill{'s' * (kills > 1)} in this cgroup."
        return Exited(key, message["exitcode"], evidence)

    def close(self) -> None:
        """End the connection, and thereby the workers of the pool."""
        with contextlib.suppress(OSError):
            # A fork of this process may have the socket open, too, so `close` alone would not end the connection.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class _ForkServer:
    """The process of the fork server."""

    def __init__(self) -> None:
        self.owner = os.getpid()  # the process that has started the server; its forks must not use or stop the server
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        arguments = [str(server_end.fileno()), str(self.owner), *path]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _SERVE, *arguments],
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the server prints nothing, and each worker has a pipe of its own
            stderr=subprocess.DEVNULL if sys.__stderr__ is None else 2,
            process_group=0,  # a new group, because a terminal sends Ctrl-C to the whole group of the script
        )
        server_end.close()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def connect(self) -> socket.socket:
        """Open a connection for one pool.

        Raises:
            ConnectionError: the server has ended.
            TransferError: too many descriptors are in flight, see `channel.no_room_error`.
        """
        pool_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            try:
                send_fds(self._control, b"p", [server_end.fileno()])
            except BaseException:
                pool_end.close()
                raise
        return pool_end

    def stop(self) -> None:
        """End the server, and with it all workers. In a fork of the script, only close the copy of the connection."""
        if self.owner != os.getpid():
            self._control.close()
            return
        with contextlib.suppress(OSError):
            # A fork of this process may have the socket open, too, so `close` alone would not end the connection.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def take_standard_descriptors() -> None:
    """Open the null device as standard input, output or error, if one of them is closed.

    For example, a script that is started with ``>&-`` has no standard output, so the next file that it opens gets the
    descriptor 1. If this file is a connection to a worker, C code that prints writes into the connection.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def stop_fork_server() -> None:
    """End the fork server of this script, if there is one. The next pool starts another one. This is called at exit."""
    global _fork_server
    with _fork_server_lock:
        if _fork_server is not None:
            _fork_server.stop()
            _fork_server = None


def _connect() -> socket.socket:
    """Open a connection to the fork server for one pool. If the fork server does not run, start it."""
    global _fork_server
    with _fork_server_lock:
        if _fork_server is not None and _fork_server.owner == os.getpid():
            try:
                return _fork_server.connect()
            except ConnectionError:  # the fork server has ended, for example because it was killed
                _fork_server.stop()
        _fork_server = _ForkServer()
        return _fork_server.connect()


def fork_server_pid() -> int | None:
    """Return the process id of this script's fork server; None if it has not been started."""
    return _fork_server.pid if _fork_server is not None else None


class _OomKills:
    """A counter of the processes that the kernel kills for lack of memory in the cgroup of this process.

    The workers are in the same cgroup. If the count increases when a worker dies, the worker was probably killed for
    lack of memory.
    """

    def __init__(self) -> None:
        self._events = _events_file()
        self._last_count = self._count()

    def since_last_call(self) -> int:
        """Return how many processes the kernel has killed for lack of memory since the last call of this method.

        Return 0 if the kernel does not count them.
        """
        before = self._last_count
        self._last_count = self._count()
        return self._last_count - before

    def _count(self) -> int:
        """Return how many processes the kernel has killed for lack of memory since the cgroup was made."""
        with contextlib.suppress(OSError, ValueError):
            for line in self._events.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _events_file() -> Path:
    """Return the file in which the kernel counts the kills for lack of memory in the cgroup of this process.

    The file is ``memory.events`` in version 2 of cgroups, and ``memory.oom_control`` in version 1.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                unified = Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events")
                if unified.exists():
                    return unified
            elif "memory" in controllers.split(","):
                return Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control")
    return Path("/sys/fs/cgroup/memory.events")  # a container may see its own cgroup as the root


_fork_server: _ForkServer | None = None
_fork_server_lock = RLock()


def _renew_lock() -> None:
    """Replace the lock in a fork of this process.

    If another thread held the lock at the time of the fork, the copy in the fork would stay locked for ever.
    """
    global _fork_server_lock
    _fork_server_lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)


def close_pools() -> None:
    """Close all pools at the end of the script."""
    for pool in list(close_at_exit):
        pool.close()


@atexit.register
def _close_all() -> None:
    """Close all pools and end the fork server at the end of the script."""
    close_pools()
    stop_fork_server()


close_at_exit = weakref.WeakSet[Any]()  # the supervisors of all pools of this process
os.register_at_fork(after_in_child=close_at_exit.clear)  # a fork has no threads of the pools, so it cannot close them
