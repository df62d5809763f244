"""The supervisor: the thread of a pool, which gives tasks to workers and takes their answers.

One thread owns all state. If several threads changed the queue and the records of the workers, they would need
locks. Python raises Ctrl-C in the main thread between any two instructions, so Ctrl-C could leave a lock taken for
ever, or a record half changed. So only the supervisor reads and changes this state. Other threads post functions to the
supervisor, and wait for futures and replies that it completes. The supervisor itself never waits for a worker: a
message for which there is no room in the socket stays in an outbox until there is room.

A worker goes through these states::

    STARTING -> IDLE <-> BUSY -> CANCELLING -> IDLE     a cancelled task has ended in time
    any of these -> LEAVING                             the worker was asked to exit or was killed, or it has died

The death of a worker. The future of its task must get the result if the worker has sent the result, and an error if
the worker died before it could send the result. The end of the connection to the worker is not enough to decide this: a
worker may close its end and live on, its last answer may still be in the socket, and the cause of death is unknown. So
the supervisor waits until the parent process of the worker, the fork server, reports how the worker has exited. (For a
worker on a Ray cluster, Ray reports the exit.) Then:

1. The site, which is the object that has started the worker (`Site`), reads the answers that are left in the socket,
   and calls `Supervisor.exited` with them. `exited` first treats these answers like any other answers.
2. If the answer to the task is not among them, `exited` reports the loss to the task through `Task.lose`. A single task
   completes its future with a `WorkerDiedError`. Each unfinished item of a `map` that the worker had received gets this
   error. A `run` records the failure of this rank, and its other ranks are cancelled. The `run` ends when all ranks
   have answered or exited.
3. `exited` starts another worker with the same rank, on the same device. No other task is affected. (In a pool that is
   closed, another worker is started only if a task waits for one.) But if every worker dies during its start, for
   example because of a segmentation fault in the initializer, workers would be replaced for ever. Therefore the pool
   fails with the last error after `MAX_FAILED_STARTS` replacements in a row.
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

START_WITHIN_S = 300.0  # the time limit for the start of a worker; a busy machine may need minutes
STACK_WITHIN_S = 1.0  # how long to wait for the stack of a worker; a worker that gets a core sends it within 1 ms
CANCEL_GRACE_S = 0.5  # a cancelled task must end within this time, or its worker is killed
# A cancelled rank of a `run` on an accelerator has this time instead, because it must first close its process group.
# NCCL's abort takes half a second. When a collective fails for the first time in a process, torch also imports its
# compiler, to print the line of the call.
CANCEL_GRACE_ON_ACCELERATORS_S = 20.0
# If a batch (several items of a `map` in one task) takes longer than this, one of its items takes long. The worker must
# then hand back the items that it has not begun, see `Due.HAND_BACK`.
HAND_BACK_AFTER_S = 2 * BATCH_S
LEAVE_WITHIN_S = 2.0  # an idle worker that was asked to exit is killed after this time
# How many workers of the same rank the pool replaces in a row because they died during their start. If the last
# replacement also dies during its start, the pool fails.
MAX_FAILED_STARTS = 3
BATCH_BYTES = 1 << 15  # once the pickled arguments of a batch are this large, no item is added to it


class State(enum.Enum):
    """The state of a worker. Only an idle worker is given a task."""

    STARTING = enum.auto()  # from the request for a process until the initializer, if there is one, has returned
    IDLE = enum.auto()
    BUSY = enum.auto()
    CANCELLING = enum.auto()  # the worker must end its task, but has not answered yet
    LEAVING = enum.auto()  # the worker was told to exit, was killed by the pool, or has exited


class Due(enum.Enum):
    """The action to take when the deadline of a worker has passed."""

    TIME_OUT = enum.auto()  # ask the worker for its stack, because the task or the start has run out of time
    # Fail the task or the start, which has run out of time. The worker was asked for its stack; either it has sent the
    # stack, or `STACK_WITHIN_S` has passed.
    STACK = enum.auto()
    HAND_BACK = enum.auto()  # let the worker hand back the calls that it has not begun, so that other workers do them
    KILL = enum.auto()  # kill the worker, which has ignored an order to end its task or to exit


class Deadline(NamedTuple):
    """A deadline on the clock of `time.monotonic`, and the action to take then."""

    at: float
    due: Due


@dataclass(eq=False)
class WorkerRecord:
    """A worker, its state, and the task that it has."""

    index: int  # the place of the worker in the pool, and its rank during a `run`; a replacement takes over the place
    worker: Worker
    state: State = State.STARTING
    has_started: bool = False  # True once the process takes tasks; the initializer is the first one
    task: Task | None = None
    task_number: int = 0  # the number of the task in the messages from and to the worker
    # True if the worker has closed its connection without reading the task. Errors then say that the worker was idle.
    is_task_unread: bool = False
    deadline: Deadline | None = None
    stack: str = ""  # the part of the worker's stack that has arrived

    def begin(self, task: Task, number: int, deadline: Deadline | None) -> None:
        """Record that the worker is given a task."""
        if self.state is State.IDLE:
            self.state = State.BUSY
        self.task = task
        self.task_number = number
        self.deadline = deadline
        self.is_task_unread = False

    def end_task(self) -> Task | None:
        """Record that the task of the worker, or its start, is over; return the task, if it had one."""
        task = self.task
        self.task = None
        if self.state is not State.LEAVING:
            self.state = State.IDLE
            self.deadline = None
        return task

    def cancel(self) -> None:
        """Tell the worker to end its task. If the task has not ended after a grace period, the worker is killed."""
        if self.state is State.BUSY:
            may_abort = self.worker.device.type != "cpu" and isinstance(self.task, RunTask)
            grace_s = CANCEL_GRACE_ON_ACCELERATORS_S if may_abort else CANCEL_GRACE_S
            # This worker may be dead already, and its death may be the cause of the cancellation. The report of the
            # death can take seconds on Ray. If the grace period ended before the report, `kill` would mark the worker
            # as killed by the pool, `exited` would not count its death as a failure, and the error of the run would
            # lack its cause.
            grace_s = max(grace_s, self.worker.exit_told_within_s)
            self.state = State.CANCELLING
            self.deadline = Deadline(time.monotonic() + grace_s, Due.KILL)
            self.worker.cancel(self.task_number)

    def leave(self) -> None:
        """Tell an idle worker to exit."""
        self.state = State.LEAVING
        self.deadline = Deadline(time.monotonic() + LEAVE_WITHIN_S, Due.KILL)
        self.worker.leave()

    def kill(self) -> None:
        """Kill the worker."""
        self.state = State.LEAVING
        self.deadline = None
        self.worker.kill()

    def make_death_error(self, exitcode: int | None, evidence: str) -> WorkerDiedError:
        """Return the error that says how the worker has exited, and in which task."""
        if not self.has_started:
            activity = "starting"
        elif self.task is None or self.is_task_unread:
            activity = "idle"
        else:
            activity = f"running {self.task.call.name}"
        message = f"{self.worker.description} {exit_reason(exitcode)} while {activity}. {evidence}"
        return WorkerDiedError(
            message, rank=self.worker.rank, pid=self.worker.pid, exitcode=exitcode, evidence=evidence
        )

    def describe_stack(self) -> str:
        """Return the part of the worker's stack that belongs to its task, or the reason why there is none."""
        if self.stack:
            stack_of_task = users_part(self.stack)
            name = self.task.call.name if self.task else "its start"
            return stack_of_task if "File" in stack_of_task else f"  In C code of {name}, with no Python frame."
        if self.worker.is_stopped:
            return "  The process is stopped (SIGSTOP)."
        return "  The worker did not tell its stack: C code holds the GIL, or the process gets no processor time."


class Supervisor(threading.Thread):
    """The thread that owns the workers and tasks of one pool. It implements `WorkerEvents` for the workers."""

    def __init__(
        self,
        site: Site,
        devices: Sequence[torch.device],
        pack_initializer: Callable[[Packer], PackedCall] | None,
        idle_limit_s: float | None,
    ) -> None:
        """Start the workers. The caller then calls `start`, which starts the thread.

        Args:
            site: starts the workers on this machine or on a Ray cluster.
            devices: the device of each worker.
            pack_initializer: packs the call of the initializer; None if the pool has no initializer.
            idle_limit_s: the time without a task after which the pool closes. If None, it never closes by itself.
        """
        super().__init__(name="nn_parallel supervisor", daemon=True)
        # A closed pool takes no more tasks. Threads of the user read `is_closing`, which `close` sets at once. The
        # supervisor reads `_is_closed`. It sets `_is_closed` later, when it has queued all tasks that were posted
        # before `close` was called.
        self.is_closing = False
        self._is_closed = False
        self._discards_waiting = False  # True if `close` was asked to cancel tasks that have not begun
        # True once this thread is ending. A thread that posts a function must then also call it, see `do_if_over`.
        self.is_over = False
        self.broken: ParallelError | None = None  # the error of all further calls; None unless the pool has failed
        self.packer = site.make_packer(lambda number: self.post(self._add_deleted_handle, number))
        self._deleted_handles: list[int] = []  # numbers of deleted handles whose objects the workers still keep
        self._ended = Future(None)  # completed at the end of the thread; `wait_for_end` waits for this future
        self._site = site
        self._initializer = InitializerTask(pack_initializer(self.packer), self.fail) if pack_initializer else None
        self._idle_limit_s = math.inf if idle_limit_s is None else idle_limit_s
        self._loop = EventLoop()
        self._queue: deque[Task | ResizeTask] = deque()
        self._records: dict[Worker, WorkerRecord] = {}  # the records of all workers that have not exited
        self._workers: list[WorkerRecord] = []  # the workers that get tasks, in the order of their ranks
        # For each rank, the number of its workers that have died during their start since the last successful start.
        self._failed_starts: Counter[int] = Counter()
        self._numbers = itertools.count(FIRST_TASK)  # the numbers of tasks
        # The number of the ranks' process group, see `Ranks`. It is increased when a rank has failed, has exited or is
        # removed, so that the group cannot be used again. The next `run` then makes a new group.
        self._group_number = 1
        self._devices: list[torch.device] = []  # the device of the worker in each place
        self._used_at = 0.0  # the time at which the pool last had a task
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

    # Methods that any thread may call

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Let the supervisor call ``call(*args)`` in its thread, or in `do_if_over` if the thread has ended."""
        self._loop.post(call, *args)

    def close(self, *, wait: bool = True, cancel_waiting: bool = False, kill: bool = False) -> None:
        """Take no more tasks, finish the tasks of the pool, and then end the workers.

        Args:
            wait: return only when the workers have exited.
            cancel_waiting: cancel the tasks that have not begun.
            kill: cancel the tasks that have not begun, and kill the workers at once.
        """
        self.is_closing = True
        self.post(self._close, cancel_waiting or kill, kill)
        if wait:
            self.wait_for_end()

    def do_if_over(self) -> None:
        """If the supervisor has ended, call the posted functions that it has left uncalled, so that their tasks fail.

        A thread that needs an answer calls this method after `post`. Otherwise the thread would wait for ever if the
        supervisor ended just before the `post`.
        """
        if self.is_over:
            self.wait_for_end()
            self._loop.run_posted()

    def wait_for_end(self) -> None:
        """Return when the thread has ended. In the thread itself, return at once.

        `threading.Thread.join` is not used: before Python 3.13, if Ctrl-C interrupts a ``join``, later calls of it
        return while the thread still runs.
        """
        if threading.current_thread() is not self:
            self._ended.result()

    def orphan(self) -> None:
        """Close the pool: its `Pool` object was deleted, and therefore no task can be added any more.

        The garbage collector calls this in any thread and between any two instructions, so this only posts a function.
        """
        if not self.is_over:
            self.post(self._set_closed)

    # Functions that other threads post

    def add(self, tasks: Sequence[Task | ResizeTask]) -> None:
        """Queue tasks, which begin in this order. If the pool has failed or is closed, end them instead."""
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
        if was_empty:  # otherwise these tasks must wait until the earlier ones have been handed out
            self._hand_out()

    def _add_deleted_handle(self, number: int) -> None:
        self._deleted_handles.append(number)

    def abandon(self, task: Task | ResizeTask) -> None:
        """End a task whose result is not needed any more, whether it waits or runs."""
        if task in self._queue:
            self._queue.remove(task)
            task.discard()
            self._hand_out()  # the tasks behind this task may need fewer workers, and may be able to begin
        elif isinstance(task, Task):
            self._cancel(task)

    def _set_closed(self) -> None:
        self.is_closing = True
        self._is_closed = True

    def _close(self, cancels_waiting: bool, kills: bool) -> None:
        self._set_closed()
        if cancels_waiting:
            self._discards_waiting = True
            while self._queue:
                self._queue.popleft().discard()
        if kills:
            for record in self._records.values():
                record.kill()

    # Events of workers

    def forked(self, worker: Worker) -> None:
        """Implement `WorkerEvents.forked`: from now on, the time of the worker's start is limited."""
        record = self._records[worker]
        if record.state is State.STARTING and not record.has_started:
            record.deadline = Deadline(time.monotonic() + START_WITHIN_S, Due.TIME_OUT)

    def answered(self, worker: Worker, answer: Answer, payload: Received) -> None:
        """Implement `WorkerEvents.answered`: complete the task of the worker, and give it the next one."""
        record = self._records[worker]
        if answer.number == STARTED:
            record.has_started = True
            if record.state is State.LEAVING:  # the worker was told to exit, or has already exited
                return
            record.deadline = None
            if self._initializer is not None:
                self._begin(self._initializer, [record])
                return
        elif answer.number != record.task_number:
            raise RuntimeError(
                f"{worker.description} has answered task {answer.number}, but has task {record.task_number}. This is a "
                "bug of nn_parallel."
            )
        if answer.goes_on:  # the worker returns the rest of its batch, and goes on with the call that it has begun
            if isinstance(record.task, Batch):
                record.task.complete(worker.rank, answer, payload)
                self._return_to_queue(record.task.mapping, record.task.split(1))
            self._hand_out()
            return
        self._failed_starts[record.index] = 0
        task = record.end_task()
        # The task is None if this answer only reports the start of the worker, or if `fail` or `unsent` has ended the
        # task already.
        if task is not None:
            self._task_answered(task, worker, answer, payload)
        if answer.is_spent and record.state is State.IDLE:
            record.leave()  # once this worker has exited, `exited` replaces it
        self._hand_out()

    def told_stack(self, worker: Worker, text: str) -> None:
        """Implement `WorkerEvents.told_stack`: keep the stack for the timeout error of the task.

        Once the stack is complete, the task waits no longer for this worker.
        """
        record = self._records[worker]
        record.stack += text
        if record.deadline is not None and record.deadline.due is Due.STACK and is_whole(record.stack):
            record.deadline = Deadline(0.0, Due.STACK)

    def unread(self, worker: Worker) -> None:
        """Implement `WorkerEvents.unread`: record that the worker has not read its task.

        If the worker dies, the error of the task then says that the worker was idle.
        """
        if worker in self._records:  # a worker has no record while `_start` sends the first message
            self._records[worker].is_task_unread = True

    def unsent(self, worker: Worker, error: TransferError) -> None:
        """Implement `WorkerEvents.unsent`: fail the task and kill the worker.

        The usual reason is that too many descriptors are in flight: sent, but not received yet. The kernel limits their
        number, and a worker that is suspended (SIGSTOP) receives none. When the worker dies, the kernel drops the
        descriptors that are in flight to this worker. Descriptors can then be sent to other workers again.
        """
        record = self._records.get(worker)
        if record is None:  # a worker has no record while `_start` sends the first message
            worker.kill()
            return
        record.kill()
        self._fail_unsent(record, error)

    def exited(
        self, worker: Worker, exitcode: int | None, evidence: str, last: Sequence[tuple[Answer, Received]] = ()
    ) -> None:
        """Implement `WorkerEvents.exited`: fail the task of the worker, and replace the worker.

        The beginning of this module describes the steps.
        """
        record = self._records[worker]
        state_before = record.state
        record.state = State.LEAVING  # set first, because `answered` must give no more tasks to the dead worker
        for answer, payload in last:
            self.answered(worker, answer, payload)
        del self._records[worker]
        death = record.make_death_error(exitcode, evidence)
        task = record.end_task()
        if task is not None:
            # A worker that was in the state LEAVING with a task was killed by the pool.
            cut_off = ExecutorClosedError(f"The executor was shut down while {task.call.name} ran.")
            self._report_loss(task, worker, cut_off if state_before is State.LEAVING else death)
        if state_before is State.STARTING:
            self._failed_starts[record.index] += 1
            if self._failed_starts[record.index] > MAX_FAILED_STARTS:
                self.fail(death)
        if record in self._workers:
            self._group_number += 1  # the group has lost a rank
            self._workers.remove(record)
            if not self._is_closed:
                self._start_missing()
        self._hand_out()

    def no_room(self, workers: Sequence[Worker], error: ParallelError) -> None:
        """Implement `WorkerEvents.no_room`: fail the first task that waits for workers.

        While other workers are busy, no task fails, because the busy workers may do the waiting tasks. Before the next
        task is handed out, the pool tries again to start the missing workers.
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
        """Close the pool because it cannot go on: kill the workers, and fail all tasks with ``error``."""
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
                # `fail` has ended the task, unless the task is a `Batch`. `Batch.fail` only stores the error, and
                # `Batch.lose` then gives the stored error to the unfinished items.
                running.lose(record.worker.rank, self.broken)

    # The thread

    def run(self) -> None:
        """Run the pool until it is closed and all its workers have exited."""
        try:
            while not self._is_done():
                heard_until = self._loop.run_once(self._next_deadline())
                self._forget_deleted_handles()
                self._keep_deadlines(heard_until)
        except BaseException as error:  # a bug, or no descriptor is free; callers must not wait for ever
            self.fail(ParallelError(f"The pool cannot go on: {error!r}. Make a new executor."))
        finally:
            self._release()

    def _is_done(self) -> bool:
        """Return whether the pool is closed and all workers have exited.

        If the pool has had no task for its idle limit, close it. If the pool is closed and has no task, tell the
        workers to exit.
        """
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
        """Return whether a task waits or runs, the initializer included."""
        at_work = [State.BUSY, State.CANCELLING]
        if self._initializer is not None:
            at_work.append(State.STARTING)
        return bool(self._queue) or any(record.state in at_work for record in self._records.values())

    def _next_deadline(self) -> float:
        """Return the time at which this thread must act, even if no event occurs until then."""
        times = [record.deadline.at for record in self._records.values() if record.deadline is not None]
        if not self._is_closed:
            times.append(self._used_at + self._idle_limit_s)
        return min(times, default=math.inf)

    def _forget_deleted_handles(self) -> None:
        """Tell the workers to delete the objects whose handles were deleted."""
        if self._deleted_handles:
            numbers = self._deleted_handles
            self._deleted_handles = []
            for worker in self._records:
                worker.forget(numbers)

    def _release(self) -> None:
        """Close everything that the pool has opened, at the end of the thread."""
        self.is_over = True
        self._set_closed()
        try:
            self._site.close()
            self._loop.run_posted()  # ends the tasks that were posted after the last turn of the loop
            self._loop.close()
            self.packer.close()
        finally:  # otherwise an error would let the caller of `close` wait forever
            self._initializer = None  # breaks the reference cycle with this object, which would keep both alive
            self._workers.clear()
            self._records.clear()
            self._ended.complete(None)

    # The beginning and the end of tasks

    def _hand_out(self) -> None:
        """Give the tasks of the queue to workers, in order, until there are too few idle workers for the next task."""
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
            # `ranks` raises an error if no file descriptor is free. The pool then fails, and with it all tasks in the
            # queue. So this task is removed from the queue only after `ranks` has returned.
            if isinstance(task, RunTask):
                task.begin_on(self._site.ranks(len(idle), self._group_number))
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
        """Return a batch: the item ``first``, and further items of the same `map`, which are taken from the queue.

        If one worker took all the last items, the other workers would be idle. So a batch holds at most about half the
        number of items that each worker would get if the waiting items were divided equally. For example, if 80 items
        wait for 4 workers, each worker would get 20, and a batch holds at most 10.
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
        """Send a task to these workers."""
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
        # All records get the task before the task is sent to any worker. If the task cannot be sent to one worker, it
        # is cancelled on all workers whose records have it, including those to which it has not been sent yet.
        for record in records:
            record.begin(task, number, deadline)
        for record in records:
            try:
                record.worker.send(header, call)
            except TransferError as error:
                self._fail_unsent(record, error)

    def _fail_unsent(self, record: WorkerRecord, cause: TransferError) -> None:
        """Fail the task of a worker, if it has one, because the task could not be sent."""
        task = record.end_task()
        if task is None:
            return
        error = TransferError(f"{task.call.name} could not be sent to {record.worker.description}: {cause}")
        error.__cause__ = cause
        if task is self._initializer:  # no worker can take tasks without its initializer
            self.fail(error)
        else:
            self._report_loss(task, record.worker, error)

    def _task_answered(self, task: Task, worker: Worker, answer: Answer, payload: Received) -> None:
        """Pass the answer of a worker to its task. Requeue the items of a batch that the worker has not begun."""
        if isinstance(task, RunTask):
            has_failed = answer.outcome in (Outcome.FAILED, Outcome.CANCELLED)
            if has_failed or answer.failed_inside:
                self._group_number += 1
            if has_failed:
                self._cancel(task)
        task.complete(worker.rank, answer, payload)
        if isinstance(task, Batch):
            done = len(answer.results) + (answer.outcome is not None)
            mapping = task.mapping
            mapping.batch_size = max(1, done) if task.left else max(mapping.batch_size, 2 * done)
            self._return_to_queue(mapping, task.split(0))

    def _return_to_queue(self, mapping: Mapping, items: Sequence[MapItem]) -> None:
        """Put items that a worker has not begun back to the front of the queue."""
        if self._discards_waiting:
            for item in items:
                item.discard()
            return
        mapping.waiting += len(items)
        self._queue.extendleft(reversed(items))

    def _report_loss(self, task: Task, worker: Worker, error: Exception) -> None:
        """Call `Task.lose`, because ``worker`` will not answer ``task``. Also cancel a `run` on its other workers."""
        if isinstance(task, RunTask):
            self._group_number += 1
            self._cancel(task)
        task.lose(worker.rank, error)

    def _cancel(self, task: Task) -> None:
        """Cancel a task on all workers to which it was given."""
        for record in self._records.values():
            if record.task is task:
                record.cancel()

    # Deadlines

    def _keep_deadlines(self, now: float) -> None:
        """Take the action of each deadline that has passed.

        A task that has run out of time fails only after each of its workers has sent its stack or has had the time to
        do so, because the error of the task contains all these stacks.

        Args:
            now: the time at which this thread last began to look for events, see `EventLoop.run_once`. All earlier
                events have been handled. So an answer that arrived before the deadline of its task counts, even if this
                thread was late.
        """
        late: dict[Task | None, list[WorkerRecord]] = {}  # for each task, the workers that have run out of time
        awaited: list[Task | None] = []  # the tasks for which a stack may still arrive
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
        """Fail a task, because the workers ``late`` have not ended it in time.

        If ``task`` is None, these workers have not started in time. Then the pool fails. The pool also fails if the
        task is the initializer.
        """
        error = _timeout_error(task, late)
        if task is None or task is self._initializer:
            self.fail(error)
            return
        if isinstance(task, RunTask):
            self._group_number += 1
        task.fail(error)
        for record in late:
            # A worker that has not followed the order to send its stack would not follow an order to cancel either.
            if not record.stack:
                record.kill()
        self._cancel(task)

    # Workers

    def _start(self, index: int) -> WorkerRecord:
        """Start a worker in this place of the pool."""
        worker = self._site.start(index, self._devices[index])
        record = self._records[worker] = WorkerRecord(index, worker)
        return record

    def _start_missing(self) -> None:
        """Start a worker in each empty place of the pool."""
        if len(self._workers) < len(self._devices):
            present = {record.index: record for record in self._workers}
            self._workers = [present.get(index) or self._start(index) for index in range(len(self._devices))]

    def _set_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._cores = self._site.cores_for(len(devices))
        self._used_at = time.monotonic()

    def _resize(self, task: ResizeTask) -> None:
        """Adapt the pool to another number of workers, while no worker has a task.

        Workers beyond the new number exit; all workers exit if the site needs new ones. The caller starts the missing
        workers.
        """
        task.has_begun = True
        self._group_number += 1
        can_stay = self._site.resize(len(task.devices))
        self._set_devices(task.devices)
        kept = len(self._devices) if can_stay else 0
        for record in self._workers:
            if record.index >= kept:
                record.leave()
        self._workers = [record for record in self._workers if record.index < kept]


def _timeout_error(task: Task | None, late: Iterable[WorkerRecord]) -> RankTimeoutError:
    """Return the error for a task that the workers ``late`` have not ended in time.

    If ``task`` is None, these workers have not started in time.
    """
    if task is None:
        name = "The start of workers"
        limit = f"{START_WITHIN_S:g} s"
    else:
        name = task.call.name
        limit = f"timeout={task.call.options.timeout_s:g} s"
    late = sorted(late, key=lambda record: record.worker.rank)
    stacks = {record.worker.rank: record.describe_stack() for record in late}
    sites = by_call_site({f"rank {record.worker.rank}": record.stack for record in late})
    details = "\n".join(f"{record.worker.description}:\n{stacks[record.worker.rank]}" for record in late)
    return RankTimeoutError(
        f"{name} did not end within {limit}. Where its workers stand:\n{sites}\n\n{details}",
        ranks=list(stacks),
        stacks=stacks,
    )
