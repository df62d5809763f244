"""What the parent runs beside a pool's workers: the fork server, one per program, and the store of the pool's ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

import torch.distributed as dist

from . import boot
from .transport import send_fds

STOP_WITHIN_S = 10.0


class PoolStore:
    """The store through which the ranks of a pool talk, in this process; made for the first `run`."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._port = self._epoch = 0

    def port(self, epoch: int) -> int:
        """The port where it listens, on the loopback; what earlier epochs left in it is deleted."""
        if self._epoch != epoch:
            if self._store is None:
                self._store = self._open()
            else:
                for key in self._store.list_keys():
                    self._store.delete_key(key)
            self._epoch = epoch
        return self._port

    def close(self) -> None:
        self._store = None

    def _open(self) -> dist.TCPStore:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._port = listener.getsockname()[1]
        # A socket of our own: TCPStore would listen on every interface, and a port chosen first can be taken.
        return dist.TCPStore(
            "127.0.0.1", self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class _ForkServer:
    """The fork server as the parent sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        arguments = [str(theirs.fileno()), str(self.owner), json.dumps(path)]
        self._process = subprocess.Popen(
            [sys.executable, *flags, boot.__file__, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it prints nothing, and each worker has a pipe of its own
            stderr=subprocess.DEVNULL if sys.__stderr__ is None else 2,
            process_group=0,  # so that Ctrl-C is the parent's alone
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open_pool(self) -> socket.socket:
        """A connection for one pool; the server ends the workers of a pool whose connection closes.

        Raises:
            ConnectionError: the server has ended.
            TransferError: too many descriptors are on their way.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                send_fds(self._control, b"p", [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

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


def open_pool() -> socket.socket:
    """A connection for one pool to the fork server, which is started now if it does not run."""
    global _fork_server
    with _fork_server_lock:
        if _fork_server is not None and _fork_server.owner == os.getpid():
            try:
                return _fork_server.open_pool()
            except ConnectionError:  # it has ended
                _fork_server.stop()
        _fork_server = _ForkServer()
        return _fork_server.open_pool()


def fork_server_pid() -> int | None:
    """The process id of this program's fork server; None if it does not run."""
    return _fork_server.pid if _fork_server is not None else None


_fork_server: _ForkServer | None = None
_fork_server_lock = threading.Lock()
