"""One worker process as the parent sees it: its state, its connections, what it works on and until when."""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...errors import RankTimeoutError, TransferError, WorkerDiedError
from ..by_value.packer import PackedCall
from ..descendants import is_stopped
from ..failures import exit_reason
from ..pickling import Packed
from ..process_environment import ProcessAttributes
from ..stack_dump import by_call_site, is_whole, users_part
from .channel import Channel, Payload
from .forkserver_client import Exited, ServerConnection
from .memory_files import Files
from .messages import TASK_FORMAT, TaskHeader
from .output import Output
from .tasks import InitializerTask, Run, Task
from .worker import (
    ANSWER_FORMAT,
    CANCEL,
    FORGET,
    STACK_SIGNAL,
    STARTED,
    TELL_STACK,
    Order,
    WorkerSetup,
)

START_WITHIN_S = 300.0  # for a process to take tasks: longer than any machine is busy, so that no start hangs for ever
STACK_WITHIN_S = 0.5  # for a worker to write its stack, which takes a millisecond where it gets a core
CANCEL_GRACE_S = 0.5  # for a cancelled task to end, then its process is killed
# The same for a rank on an accelerator. NCCL's abort takes half a second. And when a collective has failed for the
# first time in a process, torch imports its compiler, to print where that was called; the group closes after that.
CANCEL_GRACE_ON_ACCELERATORS_S = 20.0
LEAVE_WITHIN_S = 2.0  # for an idle worker to exit


class State(enum.Enum):
    """What a worker process does; only an idle one is given a task."""

    STARTING = enum.auto()  # until its initializer, if there is one, has returned
    IDLE = enum.auto()
    BUSY = enum.auto()
    CANCELLING = enum.auto()  # its task has been told to end
    LEAVING = enum.auto()  # it was told to exit, or killed by us: its exit is no failure
    EXITED = enum.auto()


class Due(enum.Enum):
    """What happens at the deadline of a worker."""

    ASK_FOR_STACK = enum.auto()  # its task, or its start, has run out of time
    DUMP_STACK = enum.auto()  # it has had time to tell its stack by itself
    TIME_OUT = enum.auto()  # it has had time to tell its stack
    KILL = enum.auto()  # it has not done as it was told


class Deadline(NamedTuple):
    """When something is due, by `time.monotonic`."""

    at: float
    due: Due


class WorkerProcess:
    """One worker process. The pool's lock guards its state, and what it works on."""

    def __init__(
        self, index: int, rank: int, device: torch.device, server: ServerConnection, prefix_output: bool
    ) -> None:
        """Have it forked; it need not be there yet. ``index`` is its place in the pool, ``rank`` that in runs."""
        self.index, self.rank, self.device, self._server = index, rank, device, server
        self.state, self.pid = State.STARTING, 0  # until the fork server has told its process id
        self.has_started = False  # it takes tasks, the initializer first
        self.task: Task | InitializerTask | None = None
        self.number = 0  # of its task
        self.deadline: Deadline | None = None
        self.stack = ""
        self.is_given = False  # its task was sent, and it has not exited without reading that
        self._stored = set[int]()  # the numbers of the handles whose objects it holds
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as given_away:
            ours, theirs = [], list[int]()
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                here, there = socket.socketpair(socket.AF_UNIX, kind)
                ours.append(on_failure.enter_context(here))
                theirs.append(given_away.enter_context(there).fileno())
            self.output = list[Output]()
            for name in ("stdout", "stderr"):
                read, write = os.pipe()
                given_away.callback(os.close, write)
                on_failure.callback(os.close, read)
                self.output.append(Output(read, name, rank, has_prefix=prefix_output))
                theirs.append(write)
            self.key = server.fork(theirs)
            on_failure.pop_all()
        self._printed = select.poll()
        for each in self.output:
            self._printed.register(each.fd, select.POLLIN)
        sock, self.control = ours
        self.connection = Channel(sock, sends=TASK_FORMAT, receives=ANSWER_FORMAT)

    @property
    def description(self) -> str:
        return f"Worker {self.rank} (pid {self.pid}, {self.device})"

    @property
    def _doing(self) -> str:
        return self.task.call.name if self.task else "its start"

    @property
    def has_told_stack(self) -> bool:
        """Whether all of its stack is here, to the outermost frame or to where faulthandler stops."""
        return is_whole(self.stack)

    # Transitions

    def set_up(self, directory: str, files: Files) -> None:
        """Send it what no fork can know."""
        setup = WorkerSetup(
            rank=self.rank,
            device=str(self.device),
            environ=dict(os.environ),
            directory=directory,
            path=list(sys.path),
            argv=list(sys.argv),
            main_file=getattr(sys.modules.get("__main__"), "__file__", None),
            authkey=bytes(multiprocessing.current_process().authkey),
            attributes=ProcessAttributes.of_this_process(),
        )
        packed = Packed(pickle.dumps(tuple(setup)), is_plain=True)
        with contextlib.suppress(OSError):  # the fork server will tell
            self.connection.send(TaskHeader(STARTED, is_call=False), Payload(packed, files))

    def forked(self, pid: int) -> None:
        """The fork server has told its process id; it starts now, or has started."""
        self.pid = pid
        if self.state is State.STARTING and not self.has_started:
            self.deadline = Deadline(time.monotonic() + START_WITHIN_S, Due.ASK_FOR_STACK)

    def started(self) -> None:
        """It takes tasks."""
        self.has_started, self.deadline = True, None

    def begin(self, task: Task | InitializerTask, number: int) -> None:
        """It gets ``task``; sending it is the caller's."""
        if self.state is State.IDLE:
            self.state = State.BUSY
        self.task, self.number, self.is_given = task, number, False
        if (timeout_s := task.call.options.timeout_s) is not None:
            self.deadline = Deadline(time.monotonic() + timeout_s, Due.ASK_FOR_STACK)

    def complete(self) -> None:
        """Its task, or its start, is over."""
        self.task = None
        if self.state is not State.LEAVING and self.state is not State.EXITED:
            self.state, self.deadline = State.IDLE, None

    def cancel(self) -> None:
        """End its task; if that does not help soon, the process."""
        if self.state is State.BUSY:
            self.state = State.CANCELLING
            may_abort = self.device.type != "cpu" and isinstance(self.task, Run)
            grace_s = CANCEL_GRACE_ON_ACCELERATORS_S if may_abort else CANCEL_GRACE_S
            self.deadline = Deadline(time.monotonic() + grace_s, Due.KILL)
            self._order(CANCEL, self.number)

    def leave(self) -> None:
        """Have an idle worker exit by itself."""
        self.state, self.deadline = State.LEAVING, Deadline(time.monotonic() + LEAVE_WITHIN_S, Due.KILL)
        with contextlib.suppress(OSError):
            self.connection.sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self.state, self.deadline = State.LEAVING, None
        self._server.signal(self.key, signal.SIGKILL)

    def exited(self, exit: Exited) -> tuple[Task | InitializerTask | None, WorkerDiedError]:
        """It is gone: what it was working on, and the error of that."""
        error = self._death(exit)
        self.state, self.deadline = State.EXITED, None
        task, self.task = self.task, None
        return task, error

    # Messages

    def send(self, header: TaskHeader, call: PackedCall) -> None:
        """Send a task, and before it the objects that it needs and this worker has not got.

        Raises:
            TransferError: one of them cannot be sent; the worker knows nothing of the task.
        """
        try:
            for handle in call.handles:
                if handle.number not in self._stored:
                    self.connection.send(TaskHeader(handle.number, is_call=False), handle.payload)
                    self._stored.add(handle.number)
            self.is_given = True
            self.connection.send(header, call.payload)
        except (OSError, TransferError) as error:
            if isinstance(error, OSError) and error.errno is None:  # of a signal's handler: it may have been sent
                raise
            if not isinstance(error, ConnectionError):
                raise TransferError(f"{call.name} could not be sent to {self.description}: {error}") from error
            self.is_given = False  # it has exited: the fork server will tell

    def copy_output(self) -> None:
        """Copy all that it has printed up to now, also an unfinished line."""
        stdout, stderr = self.output
        if self._printed.poll(0) or stdout.holds_some or stderr.holds_some:  # in this order: another thread may read it
            stdout.copy(flush=True)
            stderr.copy(flush=True)

    def forget(self, number: int) -> None:
        """The handle of that number is gone."""
        if number in self._stored:
            self._stored.remove(number)
            self._order(FORGET, number)

    def ask_for_stack(self) -> None:
        """Where it stands will be known soon, or at the deadline will not; unless its answer is here, and not read."""
        if self.connection.has_more():
            self.deadline = Deadline(time.monotonic() + STACK_WITHIN_S, Due.ASK_FOR_STACK)
            return
        self.deadline, self.stack = Deadline(time.monotonic() + STACK_WITHIN_S, Due.DUMP_STACK), ""
        self._order(TELL_STACK, 0)

    def dump_stack(self) -> None:
        """Have faulthandler tell where it stands: its other threads do not run. See stack_dump."""
        self.deadline = Deadline(time.monotonic() + STACK_WITHIN_S, Due.TIME_OUT)
        self._server.signal(self.key, STACK_SIGNAL)

    def receive_stack(self) -> bool:
        """Take what there is of its stack; False at the end of the connection."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            text = self.control.recv(1 << 16, socket.MSG_DONTWAIT)
            self.stack += text.decode(errors="replace")
            return bool(text)
        return True

    def where_it_stands(self) -> str:
        """The Python stack of its main thread down to the task, or why there is none."""
        if self.stack:
            user = users_part(self.stack)
            return user if "File" in user else f"  In C code of {self._doing}, with no Python frame."
        return "  It is stopped (SIGSTOP)." if is_stopped(self.pid) else "  It did not tell."

    @property
    def fds(self) -> list[int]:
        """What is watched of it."""
        return [self.connection.sock.fileno(), self.control.fileno(), *(output.fd for output in self.output)]

    def close(self) -> None:
        """Copy its last words, and let go of all that connects it."""
        for output in self.output:
            output.close()
        self.connection.close()
        self.control.close()

    def _death(self, exit: Exited) -> WorkerDiedError:
        is_running = self.task is not None and self.is_given
        doing = "starting" if not self.has_started else f"running {self._doing}" if is_running else "idle"
        message = f"{self.description} {exit_reason(exit.exitcode)} while {doing}. {exit.evidence}"
        return WorkerDiedError(message, rank=self.rank, pid=self.pid, exitcode=exit.exitcode, evidence=exit.evidence)

    def _order(self, kind: int, number: int) -> None:
        with contextlib.suppress(OSError):
            self.control.send(Order.pack(kind, number), socket.MSG_DONTWAIT)


def timeout_error(task: Task | InitializerTask | None, silent: Iterable[WorkerProcess]) -> RankTimeoutError:
    """The error of a task, or of the start, during which these workers ran out of time."""
    what, limit = "The start of workers", f"{START_WITHIN_S:g} s"
    if task is not None:
        what, limit = task.call.name, f"timeout={task.call.options.timeout_s:g} s"
    silent = sorted(silent, key=lambda worker: worker.rank)
    stacks = {worker.rank: worker.where_it_stands() for worker in silent}
    sites = by_call_site({f"rank {worker.rank}": worker.stack for worker in silent})
    told = "\n".join(f"{worker.description}:\n{stacks[worker.rank]}" for worker in silent)
    return RankTimeoutError(
        f"{what} did not end within {limit}. Where its workers stand:\n{sites}\n\n{told}",
        ranks=list(stacks),
        stacks=stacks,
    )
