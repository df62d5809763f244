"""The fork server as the parent sees it: one process per program, and one connection to it per pool."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from .channel import send_fds

STOP_WITHIN_S = 10.0


_SERVE = """
import sys
control, parent, *sys.path[:] = sys.argv[1:]
from nn_parallel._engine.pool.forkserver import serve
serve(int(control), int(parent))
"""


class Forked(NamedTuple):
    """A worker process is there."""

    key: int  # of the worker, as `ServerConnection.fork` returned it
    pid: int


class Exited(NamedTuple):
    """A worker process is gone, or could not be forked."""

    key: int
    exitcode: int
    evidence: str  # what is known beside the exit code


class ServerConnection:
    """The connection of one pool to the fork server, which ends the pool's workers when it is closed."""

    def __init__(self) -> None:
        self._sock = _connect()
        self._keys = itertools.count(1)
        self._oom_kills = _OomKills()

    def fileno(self) -> int:
        """Is readable when there is something for `receive`."""
        return self._sock.fileno()

    def fork(self, fds: list[int]) -> int:
        """Ask for a worker process with these descriptors; return the key by which it is known here."""
        key = next(self._keys)
        with contextlib.suppress(ConnectionError):  # the server has ended: `receive` tells
            send_fds(self._sock, f"fork {key}".encode(), fds)
        return key

    def signal(self, key: int, number: int) -> None:
        """Send a signal to a worker, SIGKILL also to all that it has started; none if it is gone."""
        with contextlib.suppress(OSError):
            self._sock.send(f"{int(number)} {key}".encode())

    def receive(self) -> Forked | Exited:
        """Return what the server tells next.

        Raises:
            EOFError: it has ended.
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
        if kills := self._oom_kills.since_last_asked():
            evidence += f" The kernel's out-of-memory killer counted {kills} kill{'s' * (kills > 1)} in this cgroup."
        return Exited(key, message["exitcode"], evidence)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it too: closing is not enough
        self._sock.close()


class _ForkServer:
    """The process of the fork server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        arguments = [str(server_end.fileno()), str(self.owner), *path]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _SERVE, *arguments],
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it prints nothing, and each worker has a pipe of its own
            stderr=subprocess.DEVNULL if sys.__stderr__ is None else 2,
            process_group=0,  # so that Ctrl-C is the parent's alone
        )
        server_end.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> socket.socket:
        """Open a connection for one pool.

        Raises:
            ConnectionError: the server has ended.
            TransferError: too many descriptors are on their way.
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
        """End the server and all that it started; in a fork of its owner, only let go of it."""
        if self.owner != os.getpid():
            self._control.close()
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it too: closing is not enough
        self._control.close()
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def take_standard_descriptors() -> None:
    """Open the null device where standard input, output or error is closed, before anything of ours is opened there.

    As in a script started with ``>&-``: what C code prints would go into a connection to a worker.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def stop_fork_server() -> None:
    """End the fork server of this program, if there is one; the next pool starts another. Runs at exit by itself."""
    global _fork_server
    with _fork_server_lock:
        if _fork_server is not None:
            _fork_server.stop()
            _fork_server = None


def _connect() -> socket.socket:
    """Open a connection for one pool to the fork server, which is started now if it does not run."""
    global _fork_server
    with _fork_server_lock:
        if _fork_server is not None and _fork_server.owner == os.getpid():
            try:
                return _fork_server.connect()
            except ConnectionError:  # it has ended
                _fork_server.stop()
        _fork_server = _ForkServer()
        return _fork_server.connect()


def fork_server_pid() -> int | None:
    """Return the process id of this program's fork server; None if it does not run."""
    return _fork_server.pid if _fork_server is not None else None


class _OomKills:
    """Counts what the kernel's out-of-memory killer does in the cgroup of this process, which its workers share."""

    def __init__(self) -> None:
        self._events = _events_file()
        self._seen = self._count()

    def since_last_asked(self) -> int:
        """Return the number of its kills since the last call; 0 where the kernel does not tell."""
        before = self._seen
        self._seen = self._count()
        return self._seen - before

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in self._events.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _events_file() -> Path:
    """Return where the cgroup counts: ``memory.events`` of version 2, ``memory.oom_control`` of version 1."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                unified = Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events")
                if unified.exists():
                    return unified
            elif "memory" in controllers.split(","):
                return Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control")
    return Path("/sys/fs/cgroup/memory.events")  # in a container that sees its own cgroup as the root


_fork_server: _ForkServer | None = None
_fork_server_lock = threading.Lock()


def close_pools() -> None:
    """At the end of the script."""
    for pool in list(close_at_exit):
        pool.close()


@atexit.register
def _end_everything() -> None:
    close_pools()
    stop_fork_server()


close_at_exit = weakref.WeakSet[Any]()  # the pools
os.register_at_fork(after_in_child=close_at_exit.clear)  # a child has not got their threads
