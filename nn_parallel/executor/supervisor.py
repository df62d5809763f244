"""The parent's side of a pool: one thread that receives from all workers, hands out what waits, and replaces the dead.

Whoever submits also sends, if a worker is free; the supervisor sends when one becomes free. Everything that both change
is guarded by one lock, and nothing is sent or unpickled while it is held.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..devices import cpu_count
from ..errors import ExecutorClosedError, ParallelError, RankTimeoutError
from .crew import Crew, End
from .jobs import PackedCall, Resize, Run, Single, opened
from .servers import PoolStore, stop_fork_server
from .transport import Message
from .worker import CANCELLED, FAILED, STARTED, SUCCEEDED, Place, Task
from .workers import Worker

MAX_FAILED_STARTS = 3


class Settings(NamedTuple):
    """What a pool was made with."""

    devices: Sequence[torch.device]
    pass_device: bool
    initializer: PackedCall
    timeout_s: float | None
    idle_limit_s: float | None
    prefix_output: bool


class Supervisor:
    """The workers of one pool and the thread that looks after them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._devices = list(settings.devices)
        self._lock = threading.Lock()
        self._pending: deque[Single | Run | Resize] = deque()
        self._numbers = itertools.count(STARTED + 1)
        self._epoch = 1
        self._closing = self._orphaned = False
        self._broken: ParallelError | None = None
        self._pid = os.getpid()
        self._store = PoolStore()
        self._forgotten: deque[int] = deque()  # the numbers of handles that are gone
        self._failed_starts = 0  # in a row
        self._idle_since = time.monotonic()
        self._workers: list[Worker] = []  # by rank
        self._crew = Crew(settings.initializer.packed, settings.timeout_s, settings.prefix_output, self._hear)
        try:
            self._workers += [self._start(index) for index in range(self.world_size)]
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._loop, name="nn_parallel supervisor", daemon=True)
        self._thread.start()
        _live.add(self)

    @property
    def world_size(self) -> int:
        return len(self._devices)

    def is_alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    def submit(self, job: Single | Run | Resize) -> None:
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
                for worker in self._crew.living:
                    worker.kill()
        self._crew.poller.wake()
        for job in dropped:
            job.drop()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def orphan(self) -> None:
        """Nobody can submit any more. Called by the collector, so perhaps in a thread that holds our lock."""
        self._orphaned = True
        if self._pid == os.getpid():
            self._crew.poller.wake()

    def forget(self, number: int) -> None:
        """The handle of that number is gone: the workers may forget its object. Called like `orphan`."""
        self._forgotten.append(number)
        if self._pid == os.getpid():
            self._crew.poller.wake()

    def abandon(self, job: Single | Run, *, sent: bool) -> None:
        """Nobody waits for ``job`` any more: take it out of the queue, or end it where it runs.

        A worker that may hold half a message, because not all was ``sent``, ends with it.
        """
        with self._lock:
            if job in self._pending:
                self._pending.remove(job)
            self._end_task(job, kill=not sent)
        self._crew.poller.wake()

    def _raise_if_closed(self) -> None:
        if self._pid != os.getpid():
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise ExecutorClosedError("cannot schedule new work: the executor has been shut down.")

    # Handing out. The lock is held.

    def _assign(self) -> list[tuple[Worker, Task, PackedCall]]:
        """Give waiting jobs to free workers, in order; what to send is returned, to be sent without the lock."""
        ready = []
        while self._pending:
            job = self._pending[0]
            chosen = [worker for worker in self._workers if worker.is_free]
            place = None
            if isinstance(job, Resize):
                self._crew.poller.wake()  # the supervisor's own affair
                break
            if isinstance(job, Run):
                if len(chosen) < self.world_size:
                    break
                place = Place(self.world_size, self._store.port(self._epoch), self._epoch, next(self._numbers))
                job.begin(self.world_size)
            elif not chosen:
                break
            else:
                chosen = chosen[:1]
            self._pending.popleft()
            if isinstance(job, Single) and not job.begins():
                continue
            for worker in chosen:
                number = next(self._numbers)
                worker.begin(job, number, self._crew.deadline())
                ready.append((worker, Task(number, self._settings.pass_device, self._threads, place), job.call))
        if ready and self._settings.timeout_s is not None:
            self._crew.poller.wake()  # there is a new deadline
        return ready

    def _end_task(self, job: Single | Run, kill: bool = False) -> None:
        for worker in self._workers:
            if worker.job is job and not worker.leaving:
                worker.kill() if kill else worker.cancel()

    @property
    def _threads(self) -> int:
        """Of each worker."""
        return max(1, cpu_count() // self.world_size)

    # Sending and receiving. The lock is not held.

    def _send(self, ready: list[tuple[Worker, Task, PackedCall]]) -> None:
        for worker, task, call in ready:
            worker.send(task, call.packed, call.handles)

    def _loop(self) -> None:
        try:
            self._supervise()
        except BaseException as error:  # a bug or no descriptors left: whoever waits must hear of it
            self._break(ParallelError(f"The pool cannot go on: {error!r}"))
        finally:
            self._release()

    def _release(self) -> None:
        self._crew.close()
        self._store.close()

    def _supervise(self) -> None:
        while True:
            with self._lock:
                busy = self._pending or any(worker.job is not None for worker in self._workers)
                idle_limit_s = self._settings.idle_limit_s
                if busy:
                    self._idle_since = time.monotonic()
                elif idle_limit_s is not None and time.monotonic() - self._idle_since > idle_limit_s:
                    self._closing = True
                self._closing |= self._orphaned
                if self._closing and not busy:
                    if not self._crew.living:
                        return
                    for worker in self._crew.living:
                        if not worker.leaving:
                            worker.end()
                deadlines = [d for w in self._crew.living for d in (w.deadline, w.stack_by, w.kill_at) if d is not None]
                if idle_limit_s is not None and not self._closing:
                    deadlines.append(self._idle_since + idle_limit_s)
            self._crew.poller.wait(min(deadlines, default=None))
            self._forget_what_is_gone()
            self._keep_deadlines()
            self._resize_if_due()

    def _forget_what_is_gone(self) -> None:
        with self._lock:
            while self._forgotten:
                number = self._forgotten.popleft()
                for worker in self._crew.living:
                    worker.forget(number)

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            silent = []
            for worker in self._crew.living:
                if worker.kill_at is not None and now > worker.kill_at:
                    worker.kill()
                elif worker.stack_by is not None and now > worker.stack_by:
                    silent.append(worker)
                elif worker.deadline is not None and now > worker.deadline:
                    worker.ask_for_stack()
        while silent:
            job = silent[0].job
            self._time_out(job, [worker for worker in silent if worker.job is job])
            silent = [worker for worker in silent if worker.job is not job]

    def _time_out(self, job: Single | Run | None, silent: list[Worker]) -> None:
        silent = sorted(silent, key=lambda worker: worker.index)
        stacks = {worker.index: worker.where_it_stands() for worker in silent}
        told = "\n".join(f"{worker.description}:\n{stacks[worker.index]}" for worker in silent)
        name = job.call.name if job else "The initializer"
        error = RankTimeoutError(
            f"{name} did not end within timeout={self._settings.timeout_s:g} s. Where its workers stand:\n{told}",
            ranks=list(stacks),
            stacks=stacks,
        )
        if job is None:
            self._break(error)
            return
        with self._lock:
            self._epoch += 1
            for worker in silent:
                worker.stack_by = None
                if not worker.stack:  # stopped, or worse: it will not hear of a cancellation
                    worker.kill()
            self._end_task(job)
        job.give_up(error)

    def _receive(self, worker: Worker) -> bool:
        for message in worker.arriving:
            if message is None:
                return True
            self._answered(worker, message)
        return False  # its end; the fork server will tell the exit code

    def _answered(self, worker: Worker, message: Message) -> None:
        for output in worker.output:
            output.copy(flush=True)
        outcome, value = opened(message, worker.job.call.name if worker.job else "the initializer")
        if message.header.number == STARTED:
            self._has_started(worker, value if outcome == FAILED else None)
            return
        with self._lock:
            job = worker.finish()
            if isinstance(job, Run) and not job.failures and (outcome != SUCCEEDED or message.header.failed_inside):
                self._epoch += 1
            if isinstance(job, Run) and outcome != SUCCEEDED:
                self._end_task(job)
            ready = self._assign()
        if job is not None:
            job.end(worker.index, outcome, value)
        self._send(ready)

    def _has_started(self, worker: Worker, error: Exception | None) -> None:
        self._failed_starts = 0
        if error is not None:
            broken = ParallelError(f"The initializer failed in {worker.description}: {error!r}")
            broken.__cause__ = error
            self._break(broken)
            return
        with self._lock:
            worker.finish()
            worker.started = True
            ready = self._assign()
        self._send(ready)

    def _hear(self) -> bool:
        try:
            with self._lock:
                ends = self._crew.hear()
        except EOFError:
            self._break(ParallelError("The fork server has ended, and its workers with it. Make a new executor."))
            for end in self._crew.orphans():
                self._ended(end)
            return False
        for end in ends:
            self._ended(end)
        return True

    def _ended(self, end: End) -> None:
        """A worker process is gone: take its last answer, replace it, fail what it was doing."""
        worker = end.worker
        self._receive(worker)
        error = worker.death(end.exitcode, end.evidence)
        with self._lock:
            self._crew.dismiss(worker)
            job = worker.finish()
            wanted = worker in self._workers and not (self._closing and not self._pending)
            if worker in self._workers:
                self._epoch += 1
                self._workers.remove(worker)
            if isinstance(job, Run):
                self._end_task(job)
        if job is not None:
            job.end(worker.index, CANCELLED if worker.leaving else FAILED, error)
        if not worker.started and not worker.leaving:
            self._failed_starts += 1
            if self._failed_starts > MAX_FAILED_STARTS:
                self._break(error)
        if wanted and self._broken is None:
            replacement = self._start(worker.index)
            with self._lock:
                self._workers.insert(worker.index, replacement)
        with self._lock:
            ready = self._assign()
        self._send(ready)

    def _break(self, error: ParallelError) -> None:
        """The pool cannot go on: fail everything with ``error``."""
        with self._lock:
            self._broken, self._closing = self._broken or error, True
            running = (worker.finish() for worker in self._crew.living)
            jobs = dict.fromkeys([*self._pending, *(job for job in running if job is not None)])
            self._pending.clear()
            for worker in self._crew.living:
                worker.kill()
        for job in jobs:
            job.give_up(error)

    # Workers

    def _resize_if_due(self) -> None:
        with self._lock:
            if not self._pending or not isinstance(job := self._pending[0], Resize):
                return
            if not all(worker.is_free for worker in self._workers) or len(self._workers) < self.world_size:
                return
            self._devices, self._epoch = job.devices, self._epoch + 1
            for worker in self._workers[len(job.devices) :]:
                worker.end()
            del self._workers[len(job.devices) :]
            missing = range(len(self._workers), len(job.devices))
        for index in missing:
            started = self._start(index)
            with self._lock:
                self._workers.append(started)
        with self._lock:
            self._pending.remove(job)
            ready = self._assign()
        job.over.set_result(None)
        self._send(ready)

    def _start(self, index: int) -> Worker:
        return self._crew.start(index, self._devices[index], self._threads, self._receive)


def live_supervisors() -> list[Supervisor]:
    """Those whose pools have not been shut down."""
    return [supervisor for supervisor in _live if supervisor.is_alive()]


@atexit.register
def _end_everything() -> None:
    for supervisor in live_supervisors():
        supervisor.close()
    stop_fork_server()


_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()
