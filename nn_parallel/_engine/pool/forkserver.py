"""The fork server: a process that has imported torch and forks workers in milliseconds; it also reaps them.

One per program, started for the first pool and kept for the next ones. It runs no tensor operation (a forked OpenMP
pool hangs) and never looks for a GPU, so a fork of it is as good as a fresh process.

Whatever a worker has started ends with it, daemons in other sessions too. The kernel gives an orphan to its nearest
ancestor that is a *subreaper*. Each worker is one, so what it has started stays below it; the fork server is one, so it
inherits this when the worker ends. The rule is: a child of the fork server that is no worker is killed.

The fork server watches the script through a pidfd. A pipe would not do: anyone who has forked keeps its other end open.
It stays in the session of the script. Linux shares the cores between sessions first (autogroup): with workers in
another one, a supervisor that had something to do was left without a core for more than a second beside two busy
programs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import glob
import json
import os
import select
import signal
import socket
import traceback
import weakref
from multiprocessing import resource_tracker

from ..descendants import PR_SET_CHILD_SUBREAPER, children_of, end_with, prctl
from .channel import receive_fds
from .worker import blas_libraries, flush_output, work


def serve(control_fd: int, parent_pid: int) -> None:
    """Fork workers for the pools whose connections arrive on ``control_fd``, until that or the parent ends."""
    for number in (signal.SIGINT, signal.SIGTTIN, signal.SIGTTOU):  # in the background, a terminal would stop workers
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the script may have blocked SIGCHLD
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return
    if os.getppid() != parent_pid:  # it has ended, and another process has got its number
        return
    blas_libraries()
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, the pages that all share
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # of torch's libraries
        finalizer.atexit = False  # a worker finalizes what is its own
    with socket.socket(fileno=control_fd) as control:
        server = _Server(control, parent)
        try:
            server.loop()
        finally:
            server.end()


class _Server:
    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._packet = bytearray(64)
        self._pools: dict[int, socket.socket] = {}
        self._workers: dict[int, tuple[socket.socket, int]] = {}  # by pid: its pool's connection, its key there
        self._child_ended, self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        for fd in (control.fileno(), parent, self._child_ended):
            self._poll.register(fd, select.POLLIN)

    def loop(self) -> None:
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._parent in ready:
                return
            if self._child_ended in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._child_ended, 4096)
                self._reap()
            for fd in ready & self._pools.keys():
                self._serve_pool(self._pools[fd])
            if self._control.fileno() in ready:
                size, fds, _ = receive_fds(self._control, self._packet)
                if not size:
                    return
                for fd in fds:  # one, or none where no more can be opened: then the pool finds its connection closed
                    self._pools[fd] = socket.socket(fileno=fd)
                    self._poll.register(fd, select.POLLIN)

    def end(self) -> None:
        """Kill all workers, and what they have started."""
        self._workers.clear()
        while self._kill_strangers():
            with contextlib.suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, 0)
                _remove_shared_memory(pid)

    def _serve_pool(self, pool: socket.socket) -> None:
        try:
            size, fds, _ = receive_fds(pool, self._packet)
        except ConnectionError:  # closed with something of ours unread
            size = 0
            fds = []
        if not size:  # the pool is closed: nobody waits for its workers
            self._workers = {pid: worker for pid, worker in self._workers.items() if worker[0] is not pool}
            self._kill_strangers()
            self._poll.unregister(pool)
            del self._pools[pool.fileno()]
            pool.close()
            return
        what, _, key = self._packet[:size].decode().partition(" ")
        worker = pool, int(key)
        if what == "fork":
            try:
                pid = self._fork(fds)
            except OSError as error:  # there are as many processes as there may be
                self._tell(worker, errno=error.errno or 0)
            else:
                self._workers[pid] = worker
                self._tell(worker, pid=pid)
            for fd in fds:
                os.close(fd)
        else:  # a signal
            for pid, known in self._workers.items():
                if known == worker:  # so it has not been reaped, and the number is still its own
                    os.kill(pid, int(what))

    def _fork(self, fds: list[int]) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # in both: whoever comes first
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            end_with(server)
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (self._control.detach(), self._parent, self._child_ended, self._wakeup):
                os.close(fd)
            for pool in self._pools.values():
                os.close(pool.detach())
            *sockets, stdout, stderr = fds
            sock, control = (socket.socket(fileno=fd) for fd in sockets)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            code = work(sock, control)
            atexit._run_exitfuncs()  # what user code has registered, and modules that the server has imported
            flush_output()
            tracker = vars(resource_tracker)["_resource_tracker"]
            if tracker._pid is not None:  # the worker's own, and not that of the script
                tracker._stop()  # it removes what is left, and ends
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        exited = []
        with contextlib.suppress(ChildProcessError):  # there is none left
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                _remove_shared_memory(pid)
                if pid in self._workers:
                    exited.append((self._workers.pop(pid), os.waitstatus_to_exitcode(status), usage.ru_maxrss))
        self._kill_strangers()  # first: the worker that takes the place may need what they hold
        for worker, exitcode, max_rss_kib in exited:
            self._tell(worker, exitcode=exitcode, max_rss_kib=max_rss_kib)

    def _kill_strangers(self) -> bool:
        """Kill the children that are no workers; return whether there was one that this process may kill."""
        has_killed = False
        for pid in set(children_of(os.getpid())) - self._workers.keys():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                has_killed = True
        return has_killed

    def _tell(self, worker: tuple[socket.socket, int], **what: int) -> None:
        """Tell a pool of its worker: its ``pid``, or ``errno`` if it was not forked; or how it has ended."""
        pool, key = worker
        with contextlib.suppress(OSError):  # the pool is gone
            pool.send(json.dumps({"key": key, **what}).encode())


def _remove_shared_memory(pid: int) -> None:
    """Remove what a process left that was killed as it sent a tensor: torch makes a named file and unlinks it soon."""
    for path in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)
