"""The parent's side of a pool: one thread that receives from all workers, hands out what waits, and replaces the dead.

Whoever submits also sends, if a worker is free; the supervisor sends when one becomes free. Everything that both change
is guarded by one lock, and nothing is sent or unpickled while it is held.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..devices import cpu_count
from ..errors import ExecutorClosedError, ParallelError
from .crew import Crew, End
from .jobs import Job, Resize, Run, opened
from .packing import PackedCall, Packer
from .servers import PoolStore, stop_fork_server
from .transport import Message
from .worker import CANCELLED, FAILED, STARTED, SUCCEEDED, TASK, Answer, Place, Task
from .workers import Worker

MAX_FAILED_STARTS = 3


class Settings(NamedTuple):
    """What a pool was made with."""

    devices: Sequence[torch.device]
    pass_device: bool
    initializer: Callable[..., object]
    initargs: tuple[Any, ...]
    timeout_s: float | None
    idle_limit_s: float | None
    prefix_output: bool


class Supervisor:
    """The workers of one pool and the thread that looks after them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.packer = Packer(self._wake)
        self._devices = list(settings.devices)
        self._threads = max(1, cpu_count() // self.world_size)  # of each worker
        self._lock = threading.Lock()
        self._pending: deque[Job | Resize] = deque()
        self._numbers = itertools.count(STARTED + 1)
        self._epoch = 1
        self._closing = self._orphaned = False
        self._broken: ParallelError | None = None
        self._pid = os.getpid()
        self._store = PoolStore()
        self._failed_starts = 0  # in a row
        self._idle_since = time.monotonic()
        self._workers: list[Worker] = []  # by rank
        initializer = PackedCall(settings.initializer, settings.initargs, {}, self.packer.segments)
        self._crew = Crew(initializer.parcel, settings.timeout_s, settings.prefix_output, self._hear)
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

    def submit(self, job: Job | Resize) -> None:
        """Queue a job; jobs start in the order of their submission."""
        with self._lock:
            self._raise_if_closed()
            self._idle_since = time.monotonic()
            self._pending.append(job)
        self._hand_out()

    def close(self, *, wait: bool = True, cancel_pending: bool = False, kill: bool = False) -> None:
        """Take no more jobs, finish those there are (or cancel the waiting, or kill the running), end the workers."""
        if self._pid != os.getpid():
            return  # a fork has the object, but neither the thread nor the right to the workers
        with self._lock:
            self._closing = True
            dropped = [self._pending.popleft() for _ in range(len(self._pending) * (cancel_pending or kill))]
            if kill:
                for worker in self._crew.living:
                    worker.kill()
        for job in dropped:
            job.drop()
        self._crew.poller.wake()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def orphan(self) -> None:
        """Nobody can submit any more. Called by the collector, so perhaps in a thread that holds our lock."""
        self._orphaned = True
        self._wake()

    def _wake(self) -> None:
        if self._pid == os.getpid():
            self._crew.poller.wake()

    def lead(self, is_over: Callable[[], bool], deadline: float | None = None) -> None:
        """Read answers in the calling thread until it has its own; perhaps not: another thread may be doing so."""
        if self._pid == os.getpid():
            self._crew.poller.lead(is_over, deadline)

    def abandon(self, job: Job, *, sent: bool) -> None:
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

    def _hand_out(self) -> None:
        """Send waiting jobs to free workers, in order."""
        if self._pending:
            with self._lock:
                ready = self._assign()
            for worker, header, call in ready:
                worker.send(header, call)

    # The lock is held.

    def _assign(self) -> list[tuple[Worker, tuple[Any, ...], PackedCall]]:
        """Give waiting jobs to free workers; what is to be sent, without the lock."""
        ready = list[tuple[Worker, tuple[Any, ...], PackedCall]]()
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
            if not isinstance(job, Run) and not job.begins():
                continue
            number, deadline = next(self._numbers), self._crew.deadline()
            task = Task(number, job.call.function, self._settings.pass_device, self._threads, place and tuple(place))
            for worker in chosen:
                worker.begin(job, number, deadline)
                ready.append((worker, (TASK, *task), job.call))
        if ready and self._settings.timeout_s is not None:
            self._crew.poller.wake()  # there is a new deadline
        return ready

    def _end_task(self, job: Job, kill: bool = False) -> None:
        for worker in self._workers:
            if worker.job is job and not worker.leaving:
                worker.kill() if kill else worker.cancel()

    # Sending and receiving. The lock is not held.

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
        self.packer.close()

    def _supervise(self) -> None:
        while not self._is_over():
            self._crew.poller.wait(self._next_deadline())
            while self.packer.forgotten:
                with self._lock:
                    self._crew.forget(self.packer.forgotten.popleft())
            if self._crew.timed:
                self._keep_deadlines()
            if self._pending:
                self._resize_if_due()

    def _is_over(self) -> bool:
        """Whether all is done and everybody gone; ends the workers when nothing is left to do."""
        idle_limit_s = self._settings.idle_limit_s
        if not self._closing and not self._orphaned and idle_limit_s is None:
            return False
        with self._lock:
            busy = self._pending or any(worker.job is not None for worker in self._workers)
            if busy:
                self._idle_since = time.monotonic()
            elif idle_limit_s is not None and time.monotonic() - self._idle_since > idle_limit_s:
                self._closing = True
            self._closing |= self._orphaned
            if self._closing and not busy:
                for worker in self._crew.living:
                    if not worker.leaving:
                        worker.end()
                return not self._crew.living
        return False

    def _next_deadline(self) -> float | None:
        with self._lock:
            deadline = self._crew.next_deadline()
        if self._settings.idle_limit_s is not None and not self._closing:
            deadline = min(deadline or math.inf, self._idle_since + self._settings.idle_limit_s)
        return deadline

    def _keep_deadlines(self) -> None:
        with self._lock:
            silent = self._crew.keep_deadlines()
        for job in dict.fromkeys(worker.job for worker in silent):
            self._time_out(job, [worker for worker in silent if worker.job is job])

    def _time_out(self, job: Job | None, silent: list[Worker]) -> None:
        error = self._crew.silence(silent, job.call.name if job else "The initializer")
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
        self._crew.poller.wake()

    def _receive(self, worker: Worker) -> bool:
        try:
            for message in worker.arriving:
                if message is None:
                    return True
                self._answered(worker, message)
        except BaseException:  # Ctrl-C in a thread that leads, or a bug: what is half done is not known
            worker.kill()
            raise
        return False  # its end; the fork server will tell the exit code

    def _answered(self, worker: Worker, message: Message) -> None:
        answer = Answer(*message.header)
        for output in worker.output:
            if answer.printed or output.is_unfinished:
                output.copy(flush=True)
        outcome, value = opened(message, answer.outcome, worker.job.call.name if worker.job else "the initializer")
        if answer.number == STARTED:
            self._has_started(worker, value if outcome == FAILED else None)
            return
        if worker.job is not None:
            if outcome != SUCCEEDED or answer.failed_inside:
                self._has_failed(worker.job, outcome)
            worker.job.end(worker.index, outcome, value)
        with self._lock:
            worker.finish()
        self._hand_out()
        if self._closing:
            self._crew.poller.wake()  # this may have been the last

    def _has_failed(self, job: Job, outcome: int) -> None:
        """On one worker, in a block inside or as a whole."""
        if isinstance(job, Run):
            with self._lock:
                if not job.failures:
                    self._epoch += 1
                if outcome != SUCCEEDED:
                    self._end_task(job)
            self._crew.poller.wake()  # there are deadlines now, which are the supervisor's to keep

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
        self._hand_out()

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
        with self._crew.poller.reclaimed():
            while worker.link.has_more() and self._receive(worker):
                pass
            with self._lock:
                self._crew.dismiss(worker)
        error = worker.death(end.exitcode, end.evidence)
        with self._lock:
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
        self._hand_out()

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
        self._crew.poller.wake()

    def _resize_if_due(self) -> None:
        with self._lock:
            if not self._pending or not isinstance(job := self._pending[0], Resize):
                return
            if not all(worker.is_free for worker in self._workers) or len(self._workers) < self.world_size:
                return
            self._devices, self._epoch = job.devices, self._epoch + 1
            self._threads = max(1, cpu_count() // self.world_size)
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
        job.over.set_result(None)
        self._hand_out()

    def _start(self, index: int) -> Worker:
        return self._crew.start(index, self._devices[index], self._threads, self._receive)


@atexit.register
def _end_everything() -> None:
    for supervisor in list(_live):
        if supervisor.is_alive():
            supervisor.close()
    stop_fork_server()


_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()
