"""The parent's side of a pool: one thread that receives from all workers, hands out what waits, and replaces the dead.

Whoever submits also sends, if a worker is free; the supervisor sends when one becomes free. Everything that both change
is guarded by one lock, and nothing is sent or unpickled while it is held.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..devices import cpu_count
from ..errors import ExecutorClosedError, ParallelError, TransferError
from ..pickling import Packed, loads
from .handles import Output, Worker, start_worker
from .jobs import Run, Single
from .servers import PoolStore, open_pool, stop_fork_server
from .transport import Message, send
from .worker import STARTED, Answer, Place, Setup, Task

END_GRACE_S = 2.0  # for idle workers to exit
MAX_FAILED_STARTS = 3


class Supervisor:
    """The workers of one pool and the thread that looks after them."""

    def __init__(
        self, devices: Sequence[torch.device], pass_device: bool, initializer: Packed, idle_limit_s: float | None
    ) -> None:
        self._devices, self._pass_device, self._initializer = list(devices), pass_device, initializer
        self._lock = threading.Lock()
        self._pending: deque[Single | Run] = deque()
        self._numbers = itertools.count(1)
        self._epoch = 1
        self._closing = False
        self._broken: ParallelError | None = None
        self._pid = os.getpid()
        self._directory = os.getcwd()
        self._store = PoolStore()
        self._pool = open_pool()
        self._wakeup: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(self._pool, select.EPOLLIN)
        self._by_fd: dict[int, tuple[Worker, Output | None]] = {}
        self._unnamed: deque[Worker] = deque()  # forked in this order, whose process ids have not been told yet
        self._workers: list[Worker] = []
        try:
            for index in range(len(devices)):
                self._workers.append(self._start_worker(index))
        except BaseException:
            self._release()
            raise
        self._failed_starts = 0  # in a row
        self._idle_since = time.monotonic()
        self.idle_limit_s = idle_limit_s
        self._thread = threading.Thread(target=self._loop, name="nn_parallel supervisor", daemon=True)
        self._thread.start()
        _live.add(self)

    @property
    def world_size(self) -> int:
        return len(self._devices)

    def is_alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    def submit(self, job: Single | Run) -> None:
        """Queue a job; jobs start in the order of their submission."""
        with self._lock:
            self._raise_if_closed()
            self._pending.append(job)
            ready = self._assign()
        self._send(ready)

    def close(self, *, wait: bool = True, cancel_pending: bool = False, kill: bool = False) -> None:
        """Take no more jobs, finish those there are (or cancel the waiting, or kill the running), end the workers."""
        if self._pid != os.getpid():
            return  # a fork has the object, but neither the thread nor the right to the workers
        with self._lock:
            self._closing = True
            dropped = list(self._pending) if cancel_pending or kill else []
            if dropped:
                self._pending.clear()
            if kill:
                for worker in self._workers:
                    self._kill(worker)
            if self._wakeup is not None:
                os.eventfd_write(self._wakeup, 1)
        for job in dropped:
            job.cancel()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self, job: Single | Run) -> None:
        """Nobody waits for ``job`` any more: take it out of the queue, or end it where it runs."""
        with self._lock:
            if job in self._pending:
                self._pending.remove(job)
            for worker in self._workers:
                if worker.job is job:
                    self._kill(worker)

    def _raise_if_closed(self) -> None:
        if self._pid != os.getpid():
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise ExecutorClosedError("cannot schedule new work: the executor has been shut down.")

    # Handing out. The lock is held.

    def _assign(self) -> list[tuple[Worker, Task, Packed]]:
        """Give waiting jobs to free workers, in order; what to send is returned, to be sent without the lock."""
        ready = []
        while self._pending:
            job = self._pending[0]
            chosen = [w for w in self._workers if w.started and w.job is None and not w.killed]
            place = None
            if isinstance(job, Run):
                if len(chosen) < self.world_size:
                    break
                place = Place(self.world_size, self._store.port(self._epoch), self._epoch)
            elif not chosen:
                break
            else:
                chosen = chosen[:1]
            self._pending.popleft()
            if isinstance(job, Single) and not job.future.set_running_or_notify_cancel():
                continue
            for worker in chosen:
                worker.job = job
                ready.append((worker, Task(next(self._numbers), self._pass_device, place), job.packed))
        return ready

    def _kill(self, worker: Worker) -> None:
        worker.killed = True
        if worker.pid:
            with contextlib.suppress(OSError):
                self._pool.send(str(worker.pid).encode())

    # Sending and receiving. The lock is not held.

    def _send(self, ready: list[tuple[Worker, Task, Packed]]) -> None:
        for worker, task, packed in ready:
            with contextlib.suppress(OSError):  # it has died: the fork server will tell
                send(worker.connection, task, packed)

    def _loop(self) -> None:
        try:
            self._supervise()
        except BaseException as error:  # a bug or no descriptors left: whoever waits must hear of it
            self._break(ParallelError(f"The pool cannot go on: {error!r}"))
        finally:
            self._release()

    def _release(self) -> None:
        """Let go of everything; the fork server ends the workers that are left."""
        for worker in self._workers:
            for output in worker.output:
                os.close(output.fd)
            worker.connection.close()
        with contextlib.suppress(OSError):
            self._pool.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it too, so closing is not enough
        self._epoll.close()
        with self._lock:  # nobody may write to a number that is another file's by then
            if self._wakeup is not None:
                os.close(self._wakeup)
            self._wakeup = None
        self._pool.close()
        self._store.close()

    def _supervise(self) -> None:
        end_at: float | None = None
        while True:
            with self._lock:
                busy = self._pending or any(worker.job is not None for worker in self._workers)
                if busy:
                    self._idle_since = time.monotonic()
                elif self.idle_limit_s is not None and time.monotonic() - self._idle_since > self.idle_limit_s:
                    self._closing = True
                if self._closing and not busy and end_at is None:
                    end_at = time.monotonic() + END_GRACE_S
                    for worker in self._workers:
                        with contextlib.suppress(OSError):
                            worker.connection.shutdown(socket.SHUT_WR)
                if end_at is not None and not self._workers:
                    break
                deadlines = [worker.job.kill_at for worker in self._workers if isinstance(worker.job, Run)] + [end_at]
                if self.idle_limit_s is not None and end_at is None:
                    deadlines.append(self._idle_since + self.idle_limit_s)
            self._wait_until(min((d for d in deadlines if d is not None), default=None))
            with self._lock:
                now = time.monotonic()
                for worker in self._workers:
                    late = isinstance(worker.job, Run) and worker.job.kill_at is not None and now > worker.job.kill_at
                    if not worker.killed and (late or (end_at is not None and now > end_at)):
                        self._kill(worker)

    def _wait_until(self, deadline: float | None) -> None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) + 0.001
        for fd, _ in self._epoll.poll(timeout):
            if fd == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd == self._pool.fileno():
                self._hear_fork_server()
            elif fd in self._by_fd:
                worker, output = self._by_fd[fd]
                if output is None:
                    self._receive(worker)
                elif not output.copy():
                    self._forget(fd)

    def _receive(self, worker: Worker) -> None:
        for message in worker.arriving:
            if message is None:
                return
            self._answered(worker, message)
        self._forget(worker.connection.fileno())  # its end; the fork server will tell the exit code

    def _answered(self, worker: Worker, message: Message) -> None:
        answer: Answer = message.header
        for output in worker.output:
            output.copy(flush=True)
        try:
            value = loads(message.pickle, message.buffers)
        except Exception as error:
            name = worker.job.name if worker.job else "the initializer"
            value = TransferError(f"The result of {name} cannot be rebuilt in the parent process: {error!r}")
            value.__cause__ = error
            answer = answer._replace(succeeded=False)
        else:
            if not answer.succeeded:
                value, failure = value
                value.__cause__ = failure.as_cause()
        if answer.number == STARTED:
            self._failed_starts = 0
            if not answer.succeeded:
                broken = ParallelError(f"The initializer failed in {worker.description}: {value!r}")
                broken.__cause__ = value
                self._break(broken)
                return
            with self._lock:
                worker.started = True
                ready = self._assign()
            self._send(ready)
            return
        self._finish(worker, answer.succeeded, value)

    def _finish(self, worker: Worker, succeeded: bool, value: Any) -> None:
        with self._lock:
            job, worker.job = worker.job, None
            if isinstance(job, Run) and not succeeded:
                self._epoch += 1
            ready = self._assign()
        if job is not None:
            (job.succeed if succeeded else job.fail)(worker.index, value)
        self._send(ready)

    def _hear_fork_server(self) -> None:
        try:
            text = self._pool.recv(4096)
        except ConnectionError:
            text = b""
        if not text:
            self._fork_server_ended()
            return
        told: dict[str, int] = json.loads(text)
        if pid := told.get("pid"):
            worker = self._unnamed.popleft()
            with self._lock:
                worker.pid = pid
                if worker.killed:
                    self._kill(worker)
        elif gone := [worker for worker in self._workers if worker.pid == told["exited"]]:
            self._ended(gone[0], told["exitcode"], f"Its memory use peaked at {told['max_rss_kib'] // 1024} MiB.")

    def _ended(self, worker: Worker, exitcode: int, evidence: str) -> None:
        """A worker process is gone: take its last words, replace it, fail what it was doing."""
        self._receive_rest(worker)
        started, job = worker.started, worker.job
        error = worker.death(exitcode, evidence)
        with self._lock:
            ending = self._closing and not self._pending
            self._epoch += 1
            self._workers.remove(worker)
        if job is not None:
            worker.job = None
            if not worker.killed:
                job.fail(worker.index, error)
            elif isinstance(job, Run):
                job.done_with(worker.index)
            else:
                job.fail(worker.index, ExecutorClosedError(f"The executor was shut down while {job.name} ran."))
        if not started and not worker.killed:
            self._failed_starts += 1
        if self._failed_starts > MAX_FAILED_STARTS:
            self._break(error)
        elif not ending and self._broken is None:
            replacement = self._start_worker(worker.index)
            with self._lock:
                self._workers.insert(worker.index, replacement)
        with self._lock:
            ready = self._assign()
        self._send(ready)

    def _receive_rest(self, worker: Worker) -> None:
        self._receive(worker)
        for output in worker.output:
            output.copy(flush=True)
            self._forget(output.fd)
            os.close(output.fd)
        self._forget(worker.connection.fileno())
        worker.connection.close()

    def _fork_server_ended(self) -> None:
        """Its workers have ended with it; what they had started may live on."""
        self._epoll.unregister(self._pool)
        self._break(ParallelError("The fork server has ended, and its workers with it. Make a new executor."))
        for worker in list(self._workers):
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
            self._ended(worker, -signal.SIGKILL, "The fork server has ended.")

    def _break(self, error: ParallelError) -> None:
        """The pool cannot go on: fail everything with ``error``."""
        with self._lock:
            self._broken, self._closing = error, True
            jobs = list(dict.fromkeys([*self._pending, *(w.job for w in self._workers if w.job is not None)]))
            self._pending.clear()
            for worker in self._workers:
                worker.job = None
                self._kill(worker)
        for job in jobs:
            for rank in range(self.world_size) if isinstance(job, Run) else (0,):
                if isinstance(job, Run) or job.future.running() or job.future.set_running_or_notify_cancel():
                    job.fail(rank, error)

    # Workers

    def _start_worker(self, index: int) -> Worker:
        setup = Setup(
            rank=index,
            device=str(self._devices[index]),
            threads=max(1, cpu_count() // self.world_size),
            environ=dict(os.environ),
            directory=self._directory,
            path=list(sys.path),
            argv=list(sys.argv),
            main_file=getattr(sys.modules.get("__main__"), "__file__", None),
        )
        worker = start_worker(self._pool, setup, self._initializer)
        self._unnamed.append(worker)
        self._by_fd[worker.connection.fileno()] = worker, None
        for each in worker.output:
            self._by_fd[each.fd] = worker, each
        for fd in (worker.connection.fileno(), *(each.fd for each in worker.output)):
            self._epoll.register(fd, select.EPOLLIN)
        return worker

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)


def live_supervisors() -> list[Supervisor]:
    """Those whose pools have not been shut down."""
    return [supervisor for supervisor in _live if supervisor.is_alive()]


@atexit.register
def _end_everything() -> None:
    for supervisor in live_supervisors():
        supervisor.close()
    stop_fork_server()


_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()
