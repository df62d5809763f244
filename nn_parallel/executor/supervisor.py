"""The parent's side of a pool: one thread that receives from all workers, hands out what waits, and replaces the dead.

Whoever submits also sends, if a worker is free; who takes a worker's answer sends it the next task. Everything that
both change is guarded by one lock, and nothing is sent or unpickled while it is held.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ExecutorClosedError, ParallelError, WorkerDiedError
from ..signals import Delayed
from .answers import Answers
from .crew import Crew, End, Settings
from .futures import Callbacks
from .jobs import Job, Resize, Run, SetUp, Waiting
from .packing import CallOptions, Packer
from .schedule import Schedule
from .servers import PoolStore, stop_fork_server, take_standard_descriptors
from .transport import Header
from .worker import CANCELLED, FAILED, STARTED, SUCCEEDED
from .workers import LONG_S, Worker

MAX_FAILED_STARTS = 3


class Supervisor:
    """The workers of one pool and the thread that looks after them."""

    def __init__(self, settings: Settings) -> None:
        take_standard_descriptors()
        self._settings, self._pid = settings, os.getpid()
        self._packer = Packer(self._wake)
        self._lock = threading.Lock()
        self._closing = self._orphaned = False
        self._broken: ParallelError | None = None
        self._store = PoolStore()
        self._schedule = Schedule(settings.devices, self._store.port, self._wake)
        self._failed_starts = 0  # in a row
        self._set_up: SetUp | None = None
        if settings.initializer is not None:
            options = CallOptions(pass_device=False, timeout_s=settings.timeout_s)
            call = self._packer.pack(settings.initializer, settings.initargs, {}, options)
            self._set_up = SetUp(call)
        self.callbacks = Callbacks()
        self._crew = Crew(settings, self._packer.segments, self._hear)
        self._answers = Answers(self._crew.poller, self._lock, self._answered)
        try:
            self._schedule.workers += [self._start(index) for index in range(len(settings.devices))]
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._loop, name="nn_parallel supervisor", daemon=True)
        self.callbacks.thread.start()
        self._thread.start()
        _live.add(self)

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more jobs, at least of this process."""
        return self._closing or self._pid != os.getpid()

    def submit(self, job: Waiting | Resize, *, reads: bool = False) -> None:
        """Queue a job, and if it ``reads``, take the answers that are there. Jobs start in the order of submission."""
        self._raise_if_forked()
        try:
            with Delayed(self._hurry):
                self._hand_out(job)
                if reads:
                    self._crew.poller.read_answers()
        except BaseException:  # Ctrl-C, if not that the pool is closed
            self.abandon(job)
            raise

    def close(self, *, wait: bool = True, cancel_pending: bool = False, kill: bool = False) -> None:
        """Take no more jobs, finish those there are (or cancel the waiting, or kill the running), end the workers."""
        if self._pid != os.getpid():
            return  # a fork has the object, but neither the thread nor the right to the workers
        with Delayed(self._hurry):
            with self._lock:
                self._closing = True
                pending = self._schedule.pending
                dropped = [pending.popleft() for _ in range(len(pending) * (cancel_pending or kill))]
                if kill:
                    for worker in self._crew.living:
                        worker.kill()
                        if (ahead := worker.next_job) is not None:
                            worker.next_job = None
                            dropped.append(ahead)
            for job in dropped:
                job.drop()
            self._crew.poller.wake()
        ours = self._thread, self.callbacks.thread
        if wait and threading.current_thread() not in ours and not self._crew.poller.is_reading():
            self._thread.join()

    def orphan(self) -> None:
        """Nobody can submit any more. Called by the collector, so perhaps in a thread that holds our lock."""
        self._orphaned = True
        self._wake()

    def _wake(self) -> None:
        if self._pid == os.getpid():
            self._crew.poller.wake()

    @property
    def packer(self) -> Packer:
        """Packs what can be submitted now: not in a fork, which would pack into memory that it shares with us."""
        self._raise_if_forked()
        self._raise_if_closed()
        return self._packer

    def lead(self, is_over: Callable[[], bool], deadline: float | None = None, job: Run | None = None) -> None:
        """Submit ``job`` if it is given, and read answers in the calling thread until it has its own.

        Perhaps it reads none, because another thread does so, or a signal comes.
        """
        self._raise_if_forked()
        begin = functools.partial(self._hand_out, job) if job else None
        with Delayed(self._hurry) as delayed:
            self._crew.poller.lead(is_over, deadline, begin, delayed)

    def abandon(self, job: Waiting | Resize) -> None:
        """Nobody waits for ``job`` any more: take it out of the queue, or end it where it runs."""
        with Delayed(self._hurry):
            with self._lock:
                if job in self._schedule.pending:
                    self._schedule.pending.remove(job)
                self._schedule.end_task(job)
            self._crew.poller.wake()
            self._hand_out()  # what waited behind it

    def _hurry(self) -> bool:
        """An interrupt waits for the main thread to leave one of these blocks; whether that may never come to be."""
        self._crew.poller.wake()
        me = threading.get_ident()
        return any(worker.sender == me and worker.link.is_stuck() for worker in list(self._crew.living))

    def _raise_if_forked(self) -> None:
        if self._pid != os.getpid():
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")

    def _raise_if_closed(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise ExecutorClosedError

    def _hand_out(self, job: Waiting | Resize | None = None) -> None:
        """Queue ``job``, and send what waits to the workers that can take it."""
        with self._lock:
            if job is not None:
                self._raise_if_closed()
                self._schedule.pending.append(job)
                if self._schedule.pending[0] is not job:
                    return  # who makes room for that one hands out this one, too
            ready = self._schedule.assign()
        try:
            for workers, task, call in ready:
                for worker in workers:
                    worker.send(task, call)
        except BaseException:  # a signal's handler: with half a message a worker cannot read on
            with self._lock:
                for workers, _, _ in ready:
                    for worker in workers:
                        if worker.has_unsent:
                            worker.kill()
            raise

    def _loop(self) -> None:
        try:
            self._supervise()
        except BaseException as error:  # a bug or no descriptors left: whoever waits must hear of it
            self._break(ParallelError(f"The pool cannot go on: {error!r}"))
        finally:
            self._release()
            self.callbacks.end()

    def _release(self) -> None:
        self._crew.close()
        self._store.close()
        self._packer.close()

    def _supervise(self) -> None:
        while not self._is_over():
            self._crew.poller.wait(self._next_deadline())
            self._answers.take_left()
            while self._packer.forgotten:
                with self._lock:
                    self._crew.forget(self._packer.forgotten.popleft())
            if self._schedule.is_any_ahead:
                with self._lock:
                    self._schedule.take_back()
                self._hand_out()
            if self._crew.timed:
                self._keep_deadlines()
            self._resize_if_due()

    def _is_over(self) -> bool:
        """Whether all is done and everybody gone; ends the workers when nothing is left to do."""
        idle_limit_s = self._settings.idle_limit_s
        if not self._closing and not self._orphaned and idle_limit_s is None:
            return False
        with self._lock:
            is_idle = self._schedule.is_idle()
            if not is_idle:
                self._schedule.used_at = time.monotonic()
            elif idle_limit_s is not None and time.monotonic() - self._schedule.used_at > idle_limit_s:
                self._closing = True
            self._closing |= self._orphaned
            if self._closing and is_idle:
                for worker in self._crew.living:
                    if not worker.leaving:
                        worker.end()
                return not self._crew.living
        return False

    def _next_deadline(self) -> float | None:
        with self._lock:
            deadline = self._crew.next_deadline()
        if self._schedule.is_any_ahead:
            deadline = min(deadline or math.inf, time.monotonic() + LONG_S)
        if self._settings.idle_limit_s is not None and not self._closing:
            deadline = min(deadline or math.inf, self._schedule.used_at + self._settings.idle_limit_s)
        return deadline

    def _keep_deadlines(self) -> None:
        with self._lock:
            silent = self._crew.keep_deadlines()
        for job, workers in silent.items():
            self._time_out(job, workers)

    def _time_out(self, job: Job | None, silent: list[Worker]) -> None:
        error = self._crew.silence(silent, job)
        if job is None or isinstance(job, SetUp):
            self._break(error)
            return
        with self._lock:
            self._schedule.epoch += 1
        job.give_up(error)  # first: another thread may take the answers to what follows
        with self._lock:
            for worker in silent:
                if worker.job is job:  # it may have come to its end by now
                    worker.stack_by = None
                    if not worker.stack:  # stopped, or worse: it will not hear of a cancellation
                        worker.kill()
            self._schedule.end_task(job)
        self._crew.poller.wake()

    def _answered(self, worker: Worker, header: Header, outcome: int, value: Any) -> None:
        number, _, failed_inside = header
        job = worker.job
        if self._crew.outputs.is_any_left():  # what it printed before this answer must be seen before it, too
            for output in worker.output:
                output.copy(flush=True)
        if number == STARTED:
            with self._lock:
                worker.has_started = True
                worker.begin(time.monotonic())
            self._crew.poller.wake()  # for the deadline of the initializer
            if job is not None:
                return
        elif job is not None:
            if number != worker.number:
                raise RuntimeError(f"{worker.description} answers {number} where {worker.number} was asked.")
            if outcome != SUCCEEDED or failed_inside:
                self._has_failed(job, outcome)
            self._end(job, worker, outcome, value)
        if not worker.is_set_up:
            self._failed_starts = 0
        with self._lock:
            worker.finish()
        if self._schedule.pending:  # what comes later is assigned by whoever submits it, who sees this worker free
            self._hand_out()
        if self._closing:
            self._crew.poller.wake()  # this may have been the last

    def _has_failed(self, job: Job, outcome: int) -> None:
        """On one worker, in a block inside or as a whole."""
        if isinstance(job, Run):
            with self._lock:
                if not job.failures:
                    self._schedule.epoch += 1
                if outcome != SUCCEEDED:
                    self._schedule.end_task(job)
            self._crew.poller.wake()  # there are deadlines now, which are the supervisor's to keep

    def _end(self, job: Job, worker: Worker, outcome: int, value: Any) -> None:
        """The task of ``worker`` has ended, or the worker: another takes its place, and is set up."""
        if not isinstance(job, SetUp):
            job.end(worker.index, outcome, value)
        elif outcome == FAILED and not isinstance(value, WorkerDiedError):
            broken = ParallelError(f"The initializer failed in {worker.description}: {value!r}")
            broken.__cause__ = value
            self._break(broken)

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
            self._answers.take(worker)
            while worker.link.has_more() and self._answers.receive(worker):
                pass
            schedule = self._schedule
            with self._lock:  # in one hold of it: nothing may be given to a worker that is dismissed
                self._crew.dismiss(worker)
                error = worker.death(end.exitcode, end.evidence)
                job, not_begun = worker.let_go()
                if not_begun is not None:
                    schedule.pending.appendleft(not_begun)
                wanted = worker in schedule.workers and not (self._closing and not schedule.pending)
                if worker in schedule.workers:
                    schedule.epoch += 1
                    schedule.workers.remove(worker)
                if isinstance(job, Run):
                    schedule.end_task(job)
        if job is not None:
            self._end(job, worker, CANCELLED if worker.leaving else FAILED, error)
            self._crew.poller.wake()  # a thread that leads sees its end only when it looks
        if not worker.is_set_up and not worker.leaving:
            self._failed_starts += 1
            if self._failed_starts > MAX_FAILED_STARTS:
                self._break(error)
        if wanted and self._broken is None:
            replacement = self._start(worker.index)
            with self._lock:
                schedule.workers.insert(worker.index, replacement)
        self._hand_out()

    def _break(self, error: ParallelError) -> None:
        """The pool cannot go on: fail everything with ``error``."""
        with self._lock:
            self._broken, self._closing = self._broken or error, True
            given = [job for worker in self._crew.living for job in worker.let_go()]
            begun = (job for job in given if job is not None and not isinstance(job, SetUp))
            jobs = dict.fromkeys([*self._schedule.pending, *begun])
            self._schedule.pending.clear()
            for worker in self._crew.living:
                worker.kill()
        for job in jobs:
            job.give_up(error)
        self._crew.poller.wake()

    def _resize_if_due(self) -> None:
        schedule = self._schedule
        with self._lock:
            job = schedule.resize_if_due()
            missing = range(len(schedule.workers), len(schedule.devices))
        if job is None:
            return
        for index in missing:
            started = self._start(index)
            with self._lock:
                schedule.workers.append(started)
        with self._lock:
            is_awaited = job in schedule.pending  # still: Ctrl-C, or the end of the pool, takes it out
            if is_awaited:
                schedule.pending.remove(job)
        if is_awaited:
            job.over.set_result(None)
        self._hand_out()

    def _start(self, index: int) -> Worker:
        worker = self._crew.start(index, self._schedule.devices[index], self._answers.receive)
        if self._set_up is not None:
            with self._lock:
                task = self._schedule.assign_set_up(worker, self._set_up)
            worker.send(task, self._set_up.call)
        return worker


@atexit.register
def _end_everything() -> None:
    for supervisor in list(_live):
        supervisor.close()
    stop_fork_server()


_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()
