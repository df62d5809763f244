"""The fork server: a process that has imported torch, forks workers in milliseconds, and cleans up after them.

A new Python process needs seconds to import torch. A fork of the script would not need them, but it could hang, because
it inherits the locks that other threads of the script hold, but not the threads that would release them. So the script
starts the fork server for its first pool, and keeps it for later pools. The fork server imports torch and then only
waits. It computes nothing with tensors, because a fork of a process with OpenMP threads hangs, and it does not look for
GPUs. So a fork of the fork server works like a new process.

When a worker ends, all processes that it has started must end, too, because they hold memory, GPUs, ports and files.
These processes may have started others, and some may be daemons, whose parents have ended and which are in sessions of
their own. So a signal to a process group does not reach them all. The death of the worker makes its children orphans.
By default they become children of process 1, and the fork server could not find them any more.

The solution is a setting of the kernel: an orphan becomes a child of its nearest ancestor that is a *subreaper*.

- Each worker is a subreaper. As long as it lives, the orphans among its descendants become its own children.
- The fork server is a subreaper. When a worker ends, all its children become children of the fork server.

So a child of the fork server is either a worker, or an orphan that a worker has left. The fork server kills all orphans
whenever a child has ended. The children of an orphan become orphans themselves, and are killed after its end.

If the script ends, the fork server kills all workers and orphans and ends, too. It watches the script through a pidfd.
A pipe to the script would not show that the script has ended, because processes that the script has forked keep the
pipe open. If the fork server itself is killed, the kernel kills the workers (`end_with`).

The fork server stays in the session of the script. Linux distributes processor time first between sessions (autogroup).
Once, when the workers had a session of their own and two other programs were busy, the supervisor (the thread of the
pool in the script) got no core for over a second.
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
    """Fork workers for the pools of a script, until the script ends or closes the connection.

    Args:
        control_fd: the socket on which the connections of the pools arrive, as descriptors.
        parent_pid: the process id of the script.
    """
    # Ctrl-C is for the script only. With SIGTTIN or SIGTTOU, a terminal stops a background process, such as a worker,
    # that reads from the terminal or writes to it. The workers inherit that these signals are ignored.
    for number in (signal.SIGINT, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the script may have blocked SIGCHLD
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return
    if os.getppid() != parent_pid:  # the script has ended, and the pidfd may belong to another process
        return
    blas_libraries()  # searched now, so that the workers inherit the result
    gc.collect()
    gc.freeze()  # otherwise a collection in a worker would write to all objects, and so copy the shared memory pages
    # Libraries that torch imports have registered finalizers for the end of the process. These are switched off,
    # because otherwise each worker, as a fork of this process, would run them at its own end.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    with socket.socket(fileno=control_fd) as control:
        server = _Server(control, parent)
        try:
            server.loop()
        finally:
            server.end()


class _Server:
    """The loop of the fork server, and its workers.

    A pool sends two kinds of messages. ``fork KEY``, with the descriptors for the worker, asks for a new worker. The
    pool chooses the key, which identifies the worker in later messages. ``NUMBER KEY`` asks the fork server to send the
    worker the signal with this number. The reports to the pool are JSON objects, see `_report`.
    """

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent  # a pidfd of the script
        self._packet = bytearray(64)  # the buffer for messages
        self._pools: dict[int, socket.socket] = {}  # the connections of the pools, by descriptor
        # Maps the pid of each worker to the connection of the worker's pool and the key of the worker.
        self._workers: dict[int, tuple[socket.socket, int]] = {}
        # Python writes a byte into this pipe for each signal, so that SIGCHLD ends the wait of `poll`.
        self._child_ended, self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        for fd in (control.fileno(), parent, self._child_ended):
            self._poll.register(fd, select.POLLIN)

    def loop(self) -> None:
        """Fork and reap workers, until the script ends or closes the connection."""
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
                # If this process has too many open files, ``fds`` is empty, and the pool sees its connection closed.
                for fd in fds:
                    self._pools[fd] = socket.socket(fileno=fd)
                    self._poll.register(fd, select.POLLIN)

    def end(self) -> None:
        """Kill all workers and orphans, until there are no children left."""
        self._workers.clear()  # from now on the workers count as orphans
        while self._kill_orphans():
            with contextlib.suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, 0)
                _remove_shared_memory(pid)

    def _serve_pool(self, pool: socket.socket) -> None:
        """Carry out the next request of a pool. If the pool has closed its connection, kill the workers of the pool."""
        try:
            size, fds, _ = receive_fds(pool, self._packet)
        except ConnectionError:  # the pool has closed the connection without reading the last report
            size = 0
            fds = []
        if not size:
            self._workers = {pid: worker for pid, worker in self._workers.items() if worker[0] is not pool}
            self._kill_orphans()  # the workers that were just removed count as orphans
            self._poll.unregister(pool)
            del self._pools[pool.fileno()]
            pool.close()
            return
        request, _, key = self._packet[:size].decode().partition(" ")
        worker = pool, int(key)
        if request == "fork":
            try:
                pid = self._fork(fds)
            except OSError as error:  # for example, the user has reached the limit of processes
                self._report(worker, errno=error.errno or 0)
            else:
                self._workers[pid] = worker
                self._report(worker, pid=pid)
            for fd in fds:
                os.close(fd)
        else:
            for pid, known in self._workers.items():
                if known == worker:  # a worker in this dict has not been reaped, so no other process can have its pid
                    os.kill(pid, int(request))

    def _fork(self, fds: list[int]) -> int:
        """Fork a worker, and return its pid. The worker itself does not return from this function.

        ``fds`` are the worker's ends of four connections, for tasks, orders, standard output and standard error.
        """
        server = os.getpid()
        pid = os.fork()
        if pid:
            # Parent and child both set the process group, so that it is set before either of them goes on.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)
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
            atexit._run_exitfuncs()  # `os._exit` does not call the functions that user code and modules have registered
            flush_output()
            tracker = vars(resource_tracker)["_resource_tracker"]
            if tracker._pid is not None:  # the worker has started a tracker of its own
                tracker._stop()  # the tracker removes leaked resources, such as shared memory, and ends
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Reap the children that have ended, kill orphans, and then report to the pools which workers have ended."""
        exited = []
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                _remove_shared_memory(pid)
                if pid in self._workers:
                    exited.append((self._workers.pop(pid), os.waitstatus_to_exitcode(status), usage.ru_maxrss))
        self._kill_orphans()  # before the reports, because a new worker may need the memory or ports of orphans
        for worker, exitcode, max_rss_kib in exited:
            self._report(worker, exitcode=exitcode, max_rss_kib=max_rss_kib)

    def _kill_orphans(self) -> bool:
        """Kill the children that are not workers. Return whether any child was killed."""
        has_killed = False
        for pid in set(children_of(os.getpid())) - self._workers.keys():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                has_killed = True
        return has_killed

    def _report(self, worker: tuple[socket.socket, int], **facts: int) -> None:
        """Send a report about a worker to its pool.

        The ``facts`` are ``pid`` if the worker was forked; ``errno`` if it could not be forked; and ``exitcode`` and
        ``max_rss_kib``, the peak of its memory, if it has ended.
        """
        pool, key = worker
        with contextlib.suppress(OSError):  # the pool has closed the connection
            pool.send(json.dumps({"key": key, **facts}).encode())


def _remove_shared_memory(pid: int) -> None:
    """Remove the shared memory files that torch has left in ``/dev/shm`` when the process ``pid`` was killed.

    To send a tensor, torch makes a file with a name, and removes the name a moment later. If the process is killed
    before the name is removed, the file remains.
    """
    for path in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)
