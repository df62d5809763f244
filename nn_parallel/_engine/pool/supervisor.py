"""The thread of a pool: the tasks that wait, the workers, and what each of them does.

All state belongs to this thread. Other threads post to it, and wait on futures. It never waits for a worker: what
cannot be sent at once is sent when there is room. So there is no lock, and Ctrl-C, which Python raises in the main
thread, finds nothing half done.

A worker goes through these states::

    STARTING -> IDLE <-> BUSY -> CANCELLING -> IDLE     it has ended its task as it was told
    any of these -> LEAVING                             it is not needed any more, was killed by the pool, or has died

A worker that has exited is replaced, unless the pool ends (`Supervisor.exited`).
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import ExecutorClosedError, ParallelError, RankTimeoutError, TransferError, WorkerDiedError
from ..by_value.packer import PackedCall, Packer
from ..failures import exit_reason
from ..stack_dump import by_call_site, is_whole, users_part
from .channel import Received
from .event_loop import EventLoop
from .futures import Future
from .messages import BATCH_S, FIRST_TASK, STARTED, Answer, Outcome, TaskHeader
from .protocols import Site, Worker
from .tasks import Batch, InitializerTask, MapItem, Mapping, ResizeTask, RunTask, Task

START_WITHIN_S = 300.0  # for a process to take tasks: longer than any machine is busy, so that no start hangs for ever
STACK_WITHIN_S = 0.5  # for a worker to tell its stack, which takes a millisecond where it gets a core
CANCEL_GRACE_S = 0.5  # for a cancelled task to end, then its process is killed
# The same for a rank on an accelerator. NCCL's abort takes half a second. And when a collective has failed for the
# first time in a process, torch imports its compiler, to print where that was called; the group closes after that.
CANCEL_GRACE_ON_ACCELERATORS_S = 20.0
HAND_BACK_AFTER_S = 2 * BATCH_S
LEAVE_WITHIN_S = 2.0  # for an idle worker to exit
MAX_FAILED_STARTS = 3  # in a row, in the place of one worker
BATCH_BYTES = 1 << 15  # of the arguments in a batch


class State(enum.Enum):
    """The state of a worker. Only an idle worker is given a task."""

    STARTING = enum.auto()  # until its initializer, if there is one, has returned
    IDLE = enum.auto()
    BUSY = enum.auto()
    CANCELLING = enum.auto()  # the worker was told to end its task
    LEAVING = enum.auto()  # the worker was told to exit, was killed by the pool, or has exited


class Due(enum.Enum):
    """The action at the deadline of a worker."""

    TIME_OUT = enum.auto()  # its task, or its start, has run out of time: ask for its stack
    STACK = enum.auto()  # the worker has told its stack, or had the time to do so: its task fails now
    HAND_BACK = enum.auto()  # it is in a call of a batch that takes long: others can do the calls behind it
    KILL = enum.auto()  # the worker has neither ended its task nor exited, as it was told


class Deadline(NamedTuple):
    """A deadline by the clock of `time.monotonic`, and the action at it."""

    at: float
    due: Due


@dataclass(eq=False)
class WorkerRecord:
    """A worker, and what the pool knows of it."""

    index: int  # its place in the pool
    worker: Worker
    state: State = State.STARTING
    has_started: bool = False  # it takes tasks, the initializer first
    task: Task | None = None
    number: int = 0  # of the task
    is_unread: bool = False  # the worker has exited without reading the task
    deadline: Deadline | None = None
    stack: str = ""

    def begin(self, task: Task, number: int, deadline: Deadline | None) -> None:
        """Note the task that the worker gets."""
        if self.state is State.IDLE:
            self.state = State.BUSY
        self.task = task
        self.number = number
        self.deadline = deadline
        self.is_unread = False

    def end_task(self) -> Task | None:
        """Note that the task of the worker, or its start, is over; return the task."""
        task = self.task
        self.task = None
        if self.state is not State.LEAVING:
            self.state = State.IDLE
            self.deadline = None
        return task

    def cancel(self) -> None:
        """Have the worker end its task; if that does not help soon, it is killed."""
        if self.state is State.BUSY:
            may_abort = self.worker.device.type != "cpu" and isinstance(self.task, RunTask)
            grace_s = CANCEL_GRACE_ON_ACCELERATORS_S if may_abort else CANCEL_GRACE_S
            # A worker that is killed counts as cancelled. If it has died instead, and made the others fail, it is the
            # cause that they must hear of.
            grace_s = max(grace_s, self.worker.exit_told_within_s)
            self.state = State.CANCELLING
            self.deadline = Deadline(time.monotonic() + grace_s, Due.KILL)
            self.worker.cancel(self.number)

    def leave(self) -> None:
        """Have an idle worker exit."""
        self.state = State.LEAVING
        self.deadline = Deadline(time.monotonic() + LEAVE_WITHIN_S, Due.KILL)
        self.worker.leave()

    def kill(self) -> None:
        """Kill the worker."""
        self.state = State.LEAVING
        self.deadline = None
        self.worker.kill()

    def death(self, exitcode: int | None, evidence: str) -> WorkerDiedError:
        """Return the error of what the worker was doing when it exited."""
        if not self.has_started:
            doing = "starting"
        elif self.task is None or self.is_unread:
            doing = "idle"
        else:
            doing = f"running {self.task.call.name}"
        message = f"{self.worker.description} {exit_reason(exitcode)} while {doing}. {evidence}"
        return WorkerDiedError(
            message, rank=self.worker.rank, pid=self.worker.pid, exitcode=exitcode, evidence=evidence
        )

    def where_it_stands(self) -> str:
        """Return the Python stack of the worker down to its task, or why there is none."""
        if self.stack:
            user = users_part(self.stack)
            name = self.task.call.name if self.task else "its start"
            return user if "File" in user else f"  In C code of {name}, with no Python frame."
        if self.worker.is_stopped:
            return "  It is stopped (SIGSTOP)."
        return "  It did not tell its stack: C code holds the GIL, or the process gets no processor time."


class Supervisor(threading.Thread):
    """The thread that owns the workers and tasks of one pool. It implements `WorkerEvents` for the workers."""

    def __init__(
        self,
        site: Site,
        devices: Sequence[torch.device],
        pack_initializer: Callable[[Packer], PackedCall] | None,
        idle_limit_s: float | None,
    ) -> None:
        """Start the workers; `start` then starts the thread."""
        super().__init__(name="nn_parallel supervisor", daemon=True)
        self.is_closing = False  # as callers see it: no more tasks are taken
        self._is_closed = False  # as the thread sees it, once it has queued the tasks that came before
        self._begins_none = False  # what waits is cancelled
        self.is_over = False  # what is posted from now on may never be called
        self.broken: ParallelError | None = None  # why the pool cannot go on
        self.packer = site.make_packer(lambda number: self.post(self._add_forgotten, number))
        self._forgotten: list[int] = []  # numbers of handles that are gone: workers need not keep their objects
        self._ended = Future(None)
        self._site = site
        self._initializer = InitializerTask(pack_initializer(self.packer), self.fail) if pack_initializer else None
        self._idle_limit_s = math.inf if idle_limit_s is None else idle_limit_s
        self._loop = EventLoop()
        self._queue: deque[Task | ResizeTask] = deque()
        self._records: dict[Worker, WorkerRecord] = {}  # of all workers that have not exited
        self._workers: list[WorkerRecord] = []  # by rank
        self._failed_starts: Counter[int] = Counter()  # by the place in the pool, since a worker there did a task
        self._numbers = itertools.count(FIRST_TASK)  # of tasks
        self._group = 1  # the number of the ranks' process group: see `Ranks`
        self._devices: list[torch.device] = []
        self._used_at = 0.0
        site.open(self._loop, self)
        try:
            self._set_devices(devices)
            self._start_missing()
        except BaseException:
            self._release()
            raise

    def __str__(self) -> str:
        devices = Counter(map(str, self._devices))
        return ", ".join(f"{count} on {device}" for device, count in devices.items())

    # In any thread

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have ``call(*args)`` called in the thread of the pool, unless the pool is over."""
        self._loop.post(call, *args)

    def close(self, *, wait: bool = True, cancel_waiting: bool = False, kill: bool = False) -> None:
        """Take no more tasks, finish those there are (or cancel the waiting, or kill the running), end the workers."""
        self.is_closing = True
        self.post(self._close, cancel_waiting or kill, kill)
        if wait:
            self.wait_for_end()

    def do_if_over(self) -> None:
        """Call what has been posted too late for the thread, if it is over."""
        if self.is_over:
            self.wait_for_end()
            self._loop.run_posted()

    def wait_for_end(self) -> None:
        """Return when the thread has ended; at once in the thread itself.

        Not by `join`: before Python 3.13, Ctrl-C in it has later calls return while the thread still runs.
        """
        if threading.current_thread() is not self:
            self._ended.result()

    def orphan(self) -> None:
        """Take no more tasks, as nobody can add any. Called by the collector, so perhaps in the middle of anything."""
        if not self.is_over:
            self.post(self._set_closed)

    # Posted by other threads

    def add(self, tasks: Sequence[Task | ResizeTask]) -> None:
        """Queue tasks. They begin in this order."""
        was_empty = not self._queue
        for task in tasks:
            if self.broken is not None:
                task.fail(self.broken)
            elif self._is_closed:
                task.discard()
            else:
                if isinstance(task, MapItem):
                    task.mapping.waiting += 1
                self._queue.append(task)
        if was_empty:  # else what makes room for the first one hands out these, too
            self._hand_out()

    def _add_forgotten(self, number: int) -> None:
        self._forgotten.append(number)

    def abandon(self, task: Task | ResizeTask) -> None:
        """End a task that nobody waits for any more."""
        if task in self._queue:
            self._queue.remove(task)
            task.discard()
            self._hand_out()  # what waited behind it
        elif isinstance(task, Task):
            self._cancel(task)

    def _set_closed(self) -> None:
        self.is_closing = True
        self._is_closed = True

    def _close(self, cancels_waiting: bool, kills: bool) -> None:
        self._set_closed()
        if cancels_waiting:
            self._begins_none = True
            while self._queue:
                self._queue.popleft().discard()
        if kills:
            for record in self._records.values():
                record.kill()

    # What workers tell

    def forked(self, worker: Worker) -> None:
        """As `WorkerEvents.forked`: the time in which the worker must start begins."""
        record = self._records[worker]
        if record.state is State.STARTING and not record.has_started:
            record.deadline = Deadline(time.monotonic() + START_WITHIN_S, Due.TIME_OUT)

    def answered(self, worker: Worker, answer: Answer, payload: Received) -> None:
        """As `WorkerEvents.answered`."""
        record = self._records[worker]
        if answer.number == STARTED:
            record.has_started = True
            record.deadline = None
            if self._initializer is not None and record.state is State.STARTING:
                self._begin(self._initializer, [record])
                return
        elif answer.number != record.number:
            raise RuntimeError(f"{worker.description} answers {answer.number} where {record.number} was asked.")
        if answer.goes_on:
            if isinstance(record.task, Batch):
                record.task.complete(worker.rank, answer, payload)
                self._return_to_queue(record.task.mapping, record.task.split(1))
            self._hand_out()
            return
        self._failed_starts[record.index] = 0
        task = record.end_task()
        if task is not None:  # else it has failed already
            self._task_answered(task, worker, answer, payload)
        if answer.is_spent and record.state is State.IDLE:
            record.leave()  # another one takes its place
        self._hand_out()

    def told_stack(self, worker: Worker, text: str) -> None:
        """As `WorkerEvents.told_stack`."""
        record = self._records[worker]
        record.stack += text
        if record.deadline is not None and record.deadline.due is Due.STACK and is_whole(record.stack):
            record.deadline = Deadline(0.0, Due.STACK)

    def unread(self, worker: Worker) -> None:
        """As `WorkerEvents.unread`."""
        if worker in self._records:  # else it has ended while it was being started
            self._records[worker].is_unread = True

    def unsent(self, worker: Worker, error: TransferError) -> None:
        """As `WorkerEvents.unsent`. The worker has perhaps stopped, and others need the room of these descriptors."""
        record = self._records.get(worker)
        if record is None:  # it is being started
            worker.kill()
            return
        record.kill()
        self._not_sent(record, error)

    def exited(
        self, worker: Worker, exitcode: int | None, evidence: str, last: Sequence[tuple[Answer, Received]] = ()
    ) -> None:
        """As `WorkerEvents.exited`: fail what the worker was doing, and replace it."""
        record = self._records[worker]
        before = record.state
        record.state = State.LEAVING  # whatever it has answered, it is given no more tasks
        for answer, payload in last:
            self.answered(worker, answer, payload)
        del self._records[worker]
        death = record.death(exitcode, evidence)
        task = record.end_task()
        if task is not None:
            cut_off = ExecutorClosedError(f"The executor was shut down while {task.call.name} ran.")
            self._task_lost(task, worker, cut_off if before is State.LEAVING else death)
        if before is State.STARTING:
            self._failed_starts[record.index] += 1
            if self._failed_starts[record.index] > MAX_FAILED_STARTS:
                self.fail(death)
        if record in self._workers:
            self._group += 1
            self._workers.remove(record)
            if not self._is_closed:
                self._start_missing()
        self._hand_out()

    def no_room(self, workers: Sequence[Worker], error: ParallelError) -> None:
        """As `WorkerEvents.no_room`: the first task that waits fails, and the next one has the workers asked for anew.

        While other workers are busy, it fails no task: they may do those that wait.
        """
        for worker in workers:
            record = self._records.pop(worker)
            if record in self._workers:
                self._workers.remove(record)
        if self._queue and all(record.task is None for record in self._workers):
            error.add_note(f"{len(self._workers)} of {len(self._devices)} workers are left.")
            self._queue.popleft().fail(error)
        self._hand_out()

    def fail(self, error: ParallelError) -> None:
        """End everything with ``error``: the pool cannot go on."""
        self.broken = self.broken or error
        self._set_closed()
        waiting = list(self._queue)
        self._queue.clear()
        for task in waiting:
            task.fail(self.broken)
        for record in self._records.values():
            running = record.end_task()
            record.kill()
            if running is not None and running is not self._initializer:
                running.fail(self.broken)
                running.lose(record.worker.rank, self.broken)

    # The thread

    def run(self) -> None:
        """As `threading.Thread.run`."""
        try:
            while not self._is_done():
                heard_until = self._loop.run_once(self._next_deadline())
                self._forget()
                self._keep_deadlines(heard_until)
        except BaseException as error:  # a bug, or no descriptors left: whoever waits must hear of it
            self.fail(ParallelError(f"The pool cannot go on: {error!r}"))
        finally:
            self._release()

    def _is_done(self) -> bool:
        """Return whether all is done and everybody gone; end the workers when nothing is left to do."""
        now = time.monotonic()
        if self._has_work():
            self._used_at = now
            return False
        if now > self._used_at + self._idle_limit_s:
            self._set_closed()
        if not self._is_closed:
            return False
        for record in self._records.values():
            if record.state is not State.LEAVING:
                record.leave()
        return not self._records

    def _has_work(self) -> bool:
        at_work = [State.BUSY, State.CANCELLING]
        if self._initializer is not None:
            at_work.append(State.STARTING)
        return bool(self._queue) or any(record.state in at_work for record in self._records.values())

    def _next_deadline(self) -> float:
        times = [record.deadline.at for record in self._records.values() if record.deadline is not None]
        if not self._is_closed:
            times.append(self._used_at + self._idle_limit_s)
        return min(times, default=math.inf)

    def _forget(self) -> None:
        """Have workers let go of the objects whose handles are gone."""
        if self._forgotten:
            numbers = self._forgotten
            self._forgotten = []
            for worker in self._records:
                worker.forget(numbers)

    def _release(self) -> None:
        self.is_over = True
        self._set_closed()
        self._site.close()
        self._loop.run_posted()  # fails what has come too late
        self._loop.close()
        self.packer.close()
        self._initializer = None  # it holds this thread
        self._workers.clear()
        self._records.clear()
        self._ended.complete(None)

    # Tasks begin and end

    def _hand_out(self) -> None:
        """Give waiting tasks to workers, in their order, as long as there are workers for the first one."""
        while self._queue:
            task = self._queue[0]
            if isinstance(task, ResizeTask) and not task.has_begun:
                if any(record.task is not None for record in self._workers):
                    return
                self._resize(task)
            self._start_missing()
            idle = [record for record in self._workers if record.state is State.IDLE]
            needed = len(self._devices) if isinstance(task, (RunTask, ResizeTask)) else 1
            if len(idle) < needed:
                return
            if isinstance(
                task, RunTask
            ):  # while it is in the queue, as this can fail: there may be no descriptors left
                task.begin_on(self._site.ranks(len(idle), self._group))
            self._queue.popleft()
            if isinstance(task, ResizeTask):
                task.reply.complete(None)
            elif isinstance(task, MapItem):
                task.mapping.waiting -= 1
                if task.begin():
                    self._begin(self._batch(task), idle[:1])
            elif task.begin():
                self._begin(task, idle[:needed])

    def _batch(self, first: MapItem) -> Batch:
        """Return a batch of the first item and those behind it in the queue that a worker can do with it.

        A batch has no more than its share of the items that wait, so that all workers are busy to the end.
        """
        mapping = first.mapping
        limit = min(mapping.batch_size, mapping.waiting // (2 * len(self._workers)) + 1)
        items = [first]
        size = len(first.arguments or b"")
        while len(items) < limit and size < BATCH_BYTES and self._queue:
            item = self._queue[0]
            if not (isinstance(item, MapItem) and item.mapping is mapping and first.can_be_joined_by(item)):
                break
            self._queue.popleft()
            mapping.waiting -= 1
            items.append(item)
            size += len(item.arguments or b"")
        return Batch(items)

    def _begin(self, task: Task, records: Sequence[WorkerRecord]) -> None:
        """Send a task to workers."""
        number = next(self._numbers)
        call = task.call
        seconds = BATCH_S if isinstance(task, Batch) else 0.0
        deadline = None
        if call.options.timeout_s is not None:
            deadline = Deadline(time.monotonic() + call.options.timeout_s + seconds, Due.TIME_OUT)
        header = TaskHeader(
            number=number,
            function=call.function,
            calls=task.calls,
            seconds=seconds,
            pass_device=call.options.pass_device,
            cores=self._cores,
            ranks=task.ranks,
        )
        if isinstance(task, Batch) and len(task.left) > 1:
            task.time_out = deadline
            deadline = Deadline(time.monotonic() + HAND_BACK_AFTER_S, Due.HAND_BACK)
        for record in records:
            record.begin(task, number, deadline)
        for record in records:
            try:
                record.worker.send(header, call)
            except TransferError as error:
                self._not_sent(record, error)

    def _not_sent(self, record: WorkerRecord, cause: TransferError) -> None:
        """End the task of a worker, if it has one, which could not be sent."""
        task = record.end_task()
        if task is None:
            return
        error = TransferError(f"{task.call.name} could not be sent to {record.worker.description}: {cause}")
        error.__cause__ = cause
        if task is self._initializer:  # without it no worker takes tasks
            self.fail(error)
        else:
            self._task_lost(task, record.worker, error)

    def _task_answered(self, task: Task, worker: Worker, answer: Answer, payload: Received) -> None:
        """Hand the answer of a worker to its task."""
        if isinstance(task, RunTask):
            has_failed = answer.outcome in (Outcome.FAILED, Outcome.CANCELLED)
            if has_failed or answer.failed_inside:
                self._group += 1
            if has_failed:
                self._cancel(task)
        task.complete(worker.rank, answer, payload)
        if isinstance(task, Batch):
            done = len(answer.results) + (answer.outcome is not None)
            mapping = task.mapping
            mapping.batch_size = max(1, done) if task.left else max(mapping.batch_size, 2 * done)
            self._return_to_queue(mapping, task.split(0))

    def _return_to_queue(self, mapping: Mapping, items: Sequence[MapItem]) -> None:
        """Put items back to the front of the queue that a worker has not begun."""
        if self._begins_none:
            for item in items:
                item.discard()
            return
        mapping.waiting += len(items)
        self._queue.extendleft(reversed(items))

    def _task_lost(self, task: Task, worker: Worker, error: Exception) -> None:
        """Tell a task that a worker will not answer it."""
        if isinstance(task, RunTask):
            self._group += 1
            self._cancel(task)
        task.lose(worker.rank, error)

    def _cancel(self, task: Task) -> None:
        for record in self._records.values():
            if record.task is task:
                record.cancel()

    # Time

    def _keep_deadlines(self, now: float) -> None:
        """Do what is due."""
        late: dict[Task | None, list[WorkerRecord]] = {}
        awaited: list[Task | None] = []  # tasks of which a worker may still tell its stack
        for record in list(self._records.values()):
            if record.deadline is None:
                continue
            at, due = record.deadline
            if due is Due.STACK:
                late.setdefault(record.task, []).append(record)
                if now < at:
                    awaited.append(record.task)
            elif now < at:
                continue
            elif due is Due.KILL:
                record.kill()
            elif due is Due.HAND_BACK:
                assert isinstance(record.task, Batch)
                record.deadline = record.task.time_out
                record.worker.hand_back()
            else:
                record.deadline = Deadline(now + STACK_WITHIN_S, Due.STACK)
                record.stack = ""
                awaited.append(record.task)
                record.worker.ask_for_stack()
        for task, records in late.items():
            if task not in awaited:
                self._time_out(task, records)

    def _time_out(self, task: Task | None, late: list[WorkerRecord]) -> None:
        """Fail a task, or the start of workers, that has run out of time on these workers."""
        error = _timeout_error(task, late)
        if task is None or task is self._initializer:
            self.fail(error)
            return
        if isinstance(task, RunTask):
            self._group += 1
        task.fail(error)
        for record in late:
            if not record.stack:  # it will not hear of a cancellation either
                record.kill()
        self._cancel(task)

    # Workers

    def _start(self, index: int) -> WorkerRecord:
        worker = self._site.start(index, self._devices[index])
        record = self._records[worker] = WorkerRecord(index, worker)
        return record

    def _start_missing(self) -> None:
        """Start the workers that the pool has not got: the places of those that are gone, or for which was no room."""
        if len(self._workers) < len(self._devices):
            there = {record.index: record for record in self._workers}
            self._workers = [there.get(index) or self._start(index) for index in range(len(self._devices))]

    def _set_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._cores = self._site.cores_for(len(devices))
        self._used_at = time.monotonic()

    def _resize(self, task: ResizeTask) -> None:
        """End workers, or all if they cannot stay, while none has a task. Then the missing ones are started."""
        task.has_begun = True
        self._group += 1
        can_stay = self._site.resize(len(task.devices))
        self._set_devices(task.devices)
        kept = len(self._devices) if can_stay else 0
        for record in self._workers:
            if record.index >= kept:
                record.leave()
        self._workers = [record for record in self._workers if record.index < kept]


def _timeout_error(task: Task | None, late: Iterable[WorkerRecord]) -> RankTimeoutError:
    """Return the error of a task, or of the start, during which these workers ran out of time."""
    if task is None:
        what = "The start of workers"
        limit = f"{START_WITHIN_S:g} s"
    else:
        what = task.call.name
        limit = f"timeout={task.call.options.timeout_s:g} s"
    late = sorted(late, key=lambda record: record.worker.rank)
    stacks = {record.worker.rank: record.where_it_stands() for record in late}
    sites = by_call_site({f"rank {record.worker.rank}": record.stack for record in late})
    details = "\n".join(f"{record.worker.description}:\n{stacks[record.worker.rank]}" for record in late)
    return RankTimeoutError(
        f"{what} did not end within {limit}. Where its workers stand:\n{sites}\n\n{details}",
        ranks=list(stacks),
        stacks=stacks,
    )
