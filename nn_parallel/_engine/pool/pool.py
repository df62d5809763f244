"""A pool: the tasks that wait, the worker processes that do them, and the thread that supervises both.

Whoever submits a task also sends it, if a worker is idle; whoever reads a worker's answer sends it the next one. One
lock guards the queue and the states of the workers; nothing is sent or unpickled while it is held.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from ...errors import ParallelError, TransferError
from ..by_value.packer import PackedCall, Packer
from ..devices import cpu_count
from ..interrupts import DeferredSignals
from ..stack_dump import offer_stack
from .channel import Header, Unpack
from .forkserver_client import Exited, close_at_exit, take_standard_descriptors
from .messages import ALONE, Ranks, TaskHeader
from .poller import Poller
from .pool_store import PoolStore
from .processes import Processes, Settings
from .tasks import Answer, CallFuture, InitializerTask, Item, Resize, Run, TakesTasks, Task
from .worker import CANCELLED, FAILED, STARTED, SUCCEEDED
from .worker_process import State, WorkerProcess, timeout_error

MAX_FAILED_STARTS = 3  # in a row, in the place of one worker


class Pool(TakesTasks):
    """The tasks, the workers, and the thread that supervises them."""

    def __init__(self, settings: Settings) -> None:
        take_standard_descriptors()
        offer_stack()
        super().__init__(Packer(self._wake))
        self._cores_given = settings.cores
        self._idle_limit_s = math.inf if settings.idle_limit_s is None else settings.idle_limit_s
        self._lock = threading.Lock()
        self._queue = deque[Task | Resize]()
        self._workers: list[WorkerProcess] = []  # by rank
        self._use(settings.devices)
        self._numbers = itertools.count(STARTED + 1)  # of tasks
        self.group, self._failed_starts = 1, Counter[int]()  # see `Ranks`; by rank
        self._orphaned = False
        self.store = PoolStore()
        self._set_up = InitializerTask(settings.pack_initializer(self._packer)) if settings.pack_initializer else None
        self._poller = Poller()
        self._processes = Processes(self._poller, self._lock, self._packer.files, settings, self._answered, self._hear)
        try:
            self._workers += [self._start(index) for index in range(len(self._devices))]
        except BaseException:
            self._release()
            raise
        self.thread = threading.Thread(target=self._loop, name="nn_parallel supervisor", daemon=True)
        self.callbacks.thread.start()
        self.thread.start()
        close_at_exit.add(self)

    def __str__(self) -> str:
        devices = ", ".join(f"{n} on {device}" for device, n in Counter(map(str, self._devices)).items())
        return "shut down" if self.has_ended else f"workers: {devices}"

    # What is asked of it, in any thread

    def submit(self, task: Task | Resize, reads: bool = False) -> None:
        """Queue ``task``, and if it ``reads``, take the answers that are there. Tasks begin in this order."""
        self._raise_if_forked()
        try:
            with DeferredSignals():
                self._hand_out(task)
                if reads:
                    self._poller.read_answers()
        except BaseException:  # Ctrl-C, if not that the pool is closed
            self.abandon(task)
            raise

    def lead(self, is_over: Callable[[], bool], deadline: float = math.inf, task: Task | None = None) -> None:
        """Submit ``task`` if it is given, and read answers in the calling thread until it has its own.

        Perhaps it reads none, because another thread does so, or a signal comes.
        """
        self._raise_if_forked()
        begin = functools.partial(self._hand_out, task) if task else None
        with DeferredSignals(self._poller.wake) as signals:
            self._poller.lead(lambda: signals.due is not None or is_over(), deadline, begin)

    def abandon(self, task: Task | Resize) -> None:
        """Nobody waits for ``task`` any more: take it out of the queue, or end it where it runs."""
        with DeferredSignals():
            with self._lock:
                if was_waiting := task in self._queue:
                    self._queue.remove(task)
                self._processes.cancel(task)
            if was_waiting:
                task.discard()
            self._poller.wake()
            self._hand_out()  # what waited behind it

    def close(self, *, wait: bool = True, cancel_pending: bool = False, kill: bool = False) -> None:
        """Take no more tasks, finish those there are (or cancel the waiting, or kill the running), end the workers."""
        if self._is_inherited:
            return
        with DeferredSignals():
            with self._lock:
                self._closing = True
                discarded = [self._queue.popleft() for _ in range(len(self._queue) * (cancel_pending or kill))]
                if kill:
                    self._processes.kill()
            for task in discarded:
                task.discard()
            self._poller.wake()
        ours = self.thread, self.callbacks.thread
        if wait and threading.current_thread() not in ours and not self._poller.is_reading():
            self.thread.join()

    def orphan(self) -> None:
        """Nobody can submit any more. Called by the collector, so perhaps in a thread that holds our lock."""
        self._orphaned = True
        self._wake()

    def _wake(self) -> None:
        if not self._is_inherited:
            self._poller.wake()

    # Which task goes to which workers, in whichever thread

    def _hand_out(self, task: Task | Resize | None = None) -> None:
        """Queue ``task``, and send what waits to the workers that can take it. Tasks begin in their order."""
        if task is not None:
            with self._lock:
                self._raise_if_closed()
                self._queue.append(task)
                if self._queue[0] is not task:
                    return  # who makes room for the first one hands out this one, too
        while self._queue and (assigned := self._assign()) is not None:
            workers, header, call = assigned
            unsent = list(workers)
            try:
                while unsent:
                    self._send(unsent[0], header, call)
                    del unsent[0]
            except BaseException:  # a signal's handler: whether a worker has got the task is not known
                with self._lock:
                    for worker in unsent:
                        worker.kill()
                raise

    def _send(self, worker: WorkerProcess, header: TaskHeader, call: PackedCall) -> None:
        """Send ``worker`` its task; if that cannot be sent, it has failed."""
        try:
            worker.send(header, call)
        except TransferError as error:
            with self._lock:
                task = worker.task
                worker.complete()
                if worker.connection.has_strays:
                    worker.kill()  # it has perhaps stopped, and others need the room of these descriptors
            if task is not None:
                self._complete(task, worker, Answer.of(task.call, error))

    def _assign(self) -> tuple[Sequence[WorkerProcess], TaskHeader, PackedCall] | None:
        """Give the first task that waits to workers, if they are idle; sending it is the caller's, without the lock."""
        with self._lock:
            while self._queue:
                task = self._queue[0]
                if isinstance(task, Resize):
                    self._poller.wake()
                    return None
                idle, ranks = [worker for worker in self._workers if worker.state is State.IDLE], ALONE
                if len(idle) < (len(self._devices) if isinstance(task, Run) else 1):
                    return None
                if isinstance(task, Run):
                    ranks = task.ranks or Ranks(len(idle), self.store.port(self.group), self.group)
                self._queue.popleft()
                if not task.begin(len(idle)):
                    continue
                if ranks is ALONE:
                    del idle[1:]
                self._used_at = time.monotonic()
                return idle, self._given(task, idle, ranks), task.call
        return None

    def _given(
        self, task: Task | InitializerTask, workers: Sequence[WorkerProcess], ranks: Ranks = ALONE
    ) -> TaskHeader:
        """Let ``workers`` begin ``task``: the header by which they are told."""
        number, (bind, timeout_s) = next(self._numbers), task.call.options
        for worker in workers:
            worker.begin(task, number)
        if timeout_s is not None:
            self._poller.wake()  # for the deadlines
        return TaskHeader(number, True, task.call.function, bind, self._cores, *ranks)

    def _use(self, devices: Sequence[torch.device]) -> None:
        """From now on these are the devices of the workers."""
        self._devices, self._used_at = list(devices), time.monotonic()
        self._cores = self._cores_given or cpu_count() // len(devices)  # for each worker

    # What workers tell, in whichever thread reads

    def _answered(self, worker: WorkerProcess, header: Header, unpack: Unpack) -> None:
        number, outcome, failed_inside, is_spent = header
        worker.copy_output()  # what it printed before this answer must be seen before it, too
        if number == STARTED:
            with self._lock:
                worker.started()
                set_up = self._set_up
                told = self._given(set_up, [worker]) if set_up is not None else None
            if set_up is not None and told is not None:
                self._send(worker, told, set_up.call)
                return
        elif (task := worker.task) is not None:  # else the pool has ended meanwhile
            if number != worker.number:
                raise RuntimeError(f"{worker.description} answers {number} where {worker.number} was asked.")
            self._complete(task, worker, Answer(task.call, outcome, unpack), failed_inside)
        if worker.state is State.STARTING:
            self._failed_starts[worker.index] = 0
        with self._lock:
            worker.complete()
            if is_spent:
                worker.leave()  # another one takes its place
                self._poller.wake()  # there is a deadline now
        if self._queue:  # what comes later is assigned by whoever submits it, who sees this worker idle
            self._hand_out()
        if self._closing:
            self._poller.wake()  # this may have been the last

    def _complete(
        self, task: Task | InitializerTask, worker: WorkerProcess, answer: Answer, failed_inside: bool = False
    ) -> None:
        """A worker has come to an end with ``task``, or to its own."""
        if isinstance(task, InitializerTask):
            if answer.outcome == FAILED:
                self._break(task.failed(worker.description, answer))
            return
        if isinstance(task, Run) and (answer.outcome != SUCCEEDED or failed_inside):
            with self._lock:
                self.group += 1
                if answer.outcome != SUCCEEDED:
                    self._processes.cancel(task)
            self._poller.wake()  # there are deadlines now, which are the supervisor's to keep
        task.complete(worker.index, answer)

    # The supervisor's thread

    def _loop(self) -> None:
        try:
            while not self._is_over():
                self._poller.wait(self._next_deadline())
                self._processes.forget(self._packer.forgotten)
                for task, workers in self._processes.keep_deadlines().items():
                    self._time_out(task, workers)
                self._resize_if_due()
        except BaseException as error:  # a bug or no descriptors left: whoever waits must hear of it
            self._break(ParallelError(f"The pool cannot go on: {error!r}"))
        finally:
            self._release()
            self.callbacks.end()

    def _is_over(self) -> bool:
        """Whether all is done and everybody gone; ends the workers when nothing is left to do."""
        at_work = {State.BUSY, State.CANCELLING, State.STARTING if self._set_up is not None else None}
        with self._lock:
            now = time.monotonic()
            is_idle = not self._queue and all(worker.state not in at_work for worker in self._workers)
            if not is_idle:
                self._used_at = now
            self._closing |= self._orphaned or now > self._used_at + self._idle_limit_s
            if self._closing and is_idle:
                for worker in self._processes:
                    if worker.state is not State.LEAVING:
                        worker.leave()
                return not len(self._processes)
        return False

    def _next_deadline(self) -> float:
        idle_until = math.inf if self._closing else self._used_at + self._idle_limit_s
        return min(self._processes.next_deadline(), idle_until)

    def _time_out(self, task: Task | InitializerTask | None, silent: list[WorkerProcess]) -> None:
        error = timeout_error(task, silent)
        if task is None or isinstance(task, InitializerTask):
            self._break(error)
            return
        with self._lock:
            self.group += 1
        task.fail(error)  # first: another thread may take the answers to what follows
        with self._lock:
            for worker in silent:
                if worker.task is task and not worker.stack:  # stopped, or worse: it will not hear of a cancellation
                    worker.kill()
            self._processes.cancel(task)
        self._poller.wake()

    def _resize_if_due(self) -> None:
        with self._lock:
            task = self._queue[0] if self._queue else None
            if not isinstance(task, Resize) or any(worker.state is not State.IDLE for worker in self._workers):
                return
            self._use(task.devices)
            self.group += 1
            for worker in self._workers[len(self._devices) :]:
                worker.leave()
            del self._workers[len(self._devices) :]
            missing = range(len(self._workers), len(self._devices))
        started = [self._start(index) for index in missing]
        with self._lock:
            self._workers += started
            if is_awaited := task in self._queue:  # still: Ctrl-C, or the end of the pool, takes it out
                self._queue.remove(task)
        if is_awaited:
            task.set_result(None)
        self._hand_out()

    def _hear(self) -> bool:
        """Follow what the fork server tells; False at its end."""
        try:
            exits = self._processes.hear()
        except EOFError:
            self._break(ParallelError("The fork server has ended, and its workers with it. Make a new executor."))
            exits = self._processes.kill_all()
        for worker, exited in exits:
            self._exited(worker, exited)
        return self._processes.has_server

    def _exited(self, worker: WorkerProcess, told: Exited) -> None:
        """A worker process is gone: take its last answer, replace it, fail what it was doing."""
        with self._poller.reclaimed():
            self._processes.receive_last(worker)
            with self._lock:  # in one hold of it: nothing may be given to a worker that is let go
                self._processes.remove(worker)
                before = worker.state
                task, error = worker.exited(told)
                if is_missed := worker in self._workers:
                    self.group += 1
                    self._workers.remove(worker)
                if before is State.BUSY and not worker.is_given and isinstance(task, CallFuture | Item):
                    self._queue.appendleft(task)  # for another worker
                    task = None
        if task is not None and not isinstance(task, InitializerTask):  # else another worker takes its place
            self._complete(task, worker, Answer.of(task.call, error, CANCELLED if before is State.LEAVING else FAILED))
            self._poller.wake()  # a thread that leads sees its end only when it looks
        if before is State.STARTING:
            self._failed_starts[worker.index] += 1
            if self._failed_starts[worker.index] > MAX_FAILED_STARTS:
                self._break(error)
        if is_missed and self._broken is None and (self._queue or not self._closing):
            replacement = self._start(worker.index)
            with self._lock:
                self._workers.insert(worker.index, replacement)
        self._hand_out()

    def _break(self, error: ParallelError) -> None:
        """The pool cannot go on: fail everything with ``error``."""
        with self._lock:
            self._broken, self._closing = self._broken or error, True
            tasks = dict.fromkeys([*self._queue, *(worker.task for worker in self._processes)])
            self._queue.clear()
            for worker in self._processes:
                worker.task = None
            self._processes.kill()
        for task in tasks:
            if task is not None and not isinstance(task, InitializerTask):
                task.fail(error)
        self._poller.wake()

    def _release(self) -> None:
        with self._poller.reclaimed():
            self._processes.close()
        self._poller.close()
        self.store.close()
        self._packer.close()

    def _start(self, index: int) -> WorkerProcess:
        return self._processes.start(index, self._devices[index])
