"""What the parent holds of one worker process: its connections, its output, what it works on and until when."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO

from .. import devices
from ..errors import TransferError, WorkerDiedError, exit_reason
from .jobs import Job, Waiting
from .packing import PackedCall
from .poller import AT_ONCE
from .transport import Link, Message
from .worker import ANSWER_FORMAT, CANCEL, FORGET, STACK_SIGNAL, TASK_FORMAT, Order, Task

CHUNKS_AT_A_TIME = 16
STACK_WITHIN_S = 0.5  # for a worker to write its stack, which takes a millisecond where it gets a core
CANCEL_GRACE_S = 0.5  # for a cancelled task to end, then its process is killed
END_GRACE_S = 2.0  # for an idle worker to exit
QUICK_S = 0.001  # after a task that took less it is sent the next one ahead,
LONG_S = 0.005  # which is taken back when the one before takes more: QUICK_S must be less, see `taken_back`


class Worker:
    """What the parent knows of one worker process. The supervisor's lock guards changes, but those of `send`."""

    def __init__(
        self,
        index: int,
        device: str,
        pool: socket.socket,
        sockets: list[socket.socket],
        output: list[Output],
        tokens: int,
        timed: set[Worker],
    ) -> None:
        """Puts itself into ``timed`` whenever it gets a deadline; ``tokens`` as in `worker.work`."""
        self.index, self.device, self._pool, self.output = index, device, pool, output
        self._tokens, self._timed = tokens, timed
        connection, descriptors, self.control = sockets
        self.link = Link(connection, descriptors, sends=TASK_FORMAT, receives=ANSWER_FORMAT)
        self.receive: Callable[[], Iterable[Message] | None] = functools.partial(self.link.receive, socket.MSG_DONTWAIT)
        self.unread = deque[Message]()  # answers that have arrived, until they are taken
        self.pid = 0  # until the fork server has told it
        self.has_started = False  # it takes tasks, the initializer first,
        self.is_set_up = False  # which is over
        self.leaving = False  # it was told to end, or killed by us: its end is no failure
        self.is_free = False
        self.job: Job | None = None
        self.next_job: Waiting | None = None  # sent ahead
        self.stack = ""
        self.number = self._next_number = 0  # of its task, and of the one sent ahead
        self._since = 0.0  # when it began, by `time.monotonic`
        self._is_quick = False
        self._unsent: list[int] = []  # the tasks that have been given to it and not been sent yet
        self.sender = 0  # the identifier of the thread that sends one
        self._unsendable: TransferError | None = None  # why one could not be sent
        self._stored: set[int] = set()  # the numbers of the handles whose objects it holds
        self.deadline: float | None = None  # when its stack is asked for,
        self.stack_by: float | None = None  # when it has run out of time,
        self.kill_at: float | None = None  # and when it is killed
        self._kill_when_named = False

    @property
    def description(self) -> str:
        return f"Worker {self.index} (pid {self.pid}, {self.device})"

    @property
    def _doing(self) -> str:
        return self.job.call.name if self.job else "its start"

    @property
    def has_told(self) -> bool:
        """Whether all of its stack is here, to the outermost frame or to where faulthandler stops."""
        return self.stack.endswith((" in <module>\n", "  ...\n"))

    @property
    def has_unsent(self) -> bool:
        """Whether it has been given a task that has not been sent, or not all of it."""
        return bool(self._unsent)

    def takes_another(self, call: PackedCall) -> bool:
        """Whether it may be sent ``call`` while it has a task: its tasks are short, and it holds all that comes along.

        An object would not fit into the buffer of a socket that it does not read now; and it would not be taken back.
        """
        if not self._is_quick or self.next_job is not None or self._unsent or self.leaving:
            return False
        return all(handle.number in self._stored for handle in call.handles)

    def get(self, job: Job, number: int) -> None:
        """It gets ``job`` as its task ``number``; sending it is the caller's."""
        self._unsent.append(number)
        self.job, self.number, self.is_free = job, number, False

    def begin(self, now: float) -> None:
        """Its task begins."""
        self._since, self.deadline = now, None
        if self.job is not None and (timeout_s := self.job.call.options.timeout_s) is not None:
            self._set_deadline(now + timeout_s)

    def get_next(self, job: Waiting, number: int) -> None:
        """It gets ``job`` as the task after the one that it has; sending it is the caller's."""
        self._unsent.append(number)
        self.next_job, self._next_number = job, number
        os.eventfd_write(self._tokens, 1)

    def finish(self) -> None:
        """Its task, or its start, is over, and it begins the next task if there is one."""
        now, self.is_set_up = time.monotonic(), True
        self._is_quick = now - self._since < QUICK_S
        self.deadline = self.stack_by = None
        if not self.leaving:
            self.kill_at = None
        if self.next_job is not None:
            self.job, self.number, self.next_job = self.next_job, self._next_number, None
            self.begin(now)
        else:
            self.job, self.is_free = None, not self.leaving

    def let_go(self) -> tuple[Job | None, Waiting | None]:
        """It does nothing any more: the job that it had begun, and the one that it had not."""
        begun, not_begun, self.job, self.next_job = self.job, self.next_job, None, None
        self.deadline = self.stack_by = None
        return begun, not_begun

    def _set_deadline(self, deadline: float) -> None:
        self.deadline = deadline
        self._timed.add(self)

    def taken_back(self, now: float) -> Waiting | None:
        """What was sent ahead and has not begun, if the task before takes long.

        Nothing else may be sent ahead before the worker has passed over that: it would take its token for this one's.
        """
        if self.next_job is None or self._unsent or now - self._since < LONG_S:
            return None
        try:
            os.eventfd_read(self._tokens)
        except BlockingIOError:  # it has begun: the answer to the one before is on its way
            return None
        job, self.next_job, self._is_quick = self.next_job, None, False
        return job

    def send(self, task: Task, call: PackedCall) -> None:
        """Send a task, and before it the objects that it needs and this worker has not got."""
        self.sender = threading.get_ident()
        try:
            for handle in call.handles:
                if handle.number not in self._stored:
                    self._stored.add(handle.number)
                    self.link.send(Task(handle.number, is_call=False), handle.parcel)
            self.link.send(task, call.parcel)
            self._unsent.pop()
        except OSError:  # it has died: the fork server will tell
            pass
        except TransferError as error:
            self._unsendable = error
            self._signal(signal.SIGKILL)  # its end is that of the task
        finally:
            self.sender = 0

    def forget(self, number: int) -> None:
        if number in self._stored:
            self._stored.remove(number)
            self._order(FORGET, number)

    def cancel(self) -> None:
        """End its task; if that does not help soon, the process."""
        self._order(CANCEL, self.number)
        self.kill_at = self.kill_at or time.monotonic() + CANCEL_GRACE_S
        self._timed.add(self)

    def ask_for_stack(self) -> None:
        self.deadline, self.stack_by, self.stack = None, time.monotonic() + STACK_WITHIN_S, ""
        self._signal(STACK_SIGNAL)

    def end(self) -> None:
        """Have an idle worker exit by itself."""
        self.leaving, self.is_free, self.kill_at = True, False, time.monotonic() + END_GRACE_S
        self._timed.add(self)
        with contextlib.suppress(OSError):
            self.link.sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self.leaving, self.is_free, self.kill_at = True, False, None
        self._signal(signal.SIGKILL)

    def named(self, pid: int, start_within_s: float) -> None:
        """The fork server has told its process id; it starts now, in this time, or has done so."""
        self.pid = pid
        if not self.has_started:
            self._set_deadline(time.monotonic() + start_within_s)
        if self._kill_when_named:
            self._signal(signal.SIGKILL)

    def where_it_stands(self) -> str:
        """The Python stack of its main thread down to the task, or why there is none."""
        if self.stack:
            user, _, _ = self.stack.partition(_FIRST_FRAME_OF_OURS)
            return user.rstrip() if "File" in user else f"  In C code of {self._doing}, with no Python frame."
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "Tt":
                return "  It is stopped (SIGSTOP)."
        return "  It did not tell."

    def death(self, exitcode: int, evidence: str) -> WorkerDiedError | TransferError:
        """The error of what it was doing when it ended."""
        if self._unsendable is not None:
            error = TransferError(f"{self._doing} could not be sent to {self.description}: {self._unsendable}")
            error.__cause__ = self._unsendable
            return error
        doing = "starting" if not self.has_started else f"running {self._doing}" if self.job else "idle"
        message = f"{self.description} {exit_reason(exitcode)} while {doing}. {evidence}"
        return WorkerDiedError(message, rank=self.index, pid=self.pid, exitcode=exitcode, evidence=evidence)

    def receive_stack(self) -> bool:
        """Take what there is of its stack; False at the end of the connection."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            text = self.control.recv(1 << 16, socket.MSG_DONTWAIT)
            self.stack += text.decode(errors="replace")
            return bool(text)
        return True

    @property
    def fds(self) -> list[int]:
        """What is watched of it, but for its output."""
        return [self.link.sock.fileno(), self.control.fileno()]

    def close(self) -> None:
        for fd in (self._tokens, *(output.fd for output in self.output)):
            os.close(fd)
        self.link.close()
        self.control.close()

    def _order(self, kind: int, number: int) -> None:
        with contextlib.suppress(OSError):
            self.control.send(Order.pack(kind, number), socket.MSG_DONTWAIT)

    def _signal(self, number: int) -> None:
        if self.pid:
            with contextlib.suppress(OSError):
                self._pool.send(f"{self.pid} {int(number)}".encode())
        elif number == signal.SIGKILL:
            self._kill_when_named = True


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time."""

    def __init__(self, fd: int, name: str, prefix: str, held_up: set[Output]) -> None:
        """It is in ``held_up`` while it may hold what it has read and not copied."""
        self.fd, self._name, self._prefix, self._held_up = fd, name, prefix, held_up
        self._unfinished = b""  # part of a line
        self._copying = threading.Lock()
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        with self._copying:
            self._held_up.add(self)
            more = self._copy(flush)
            if not self._unfinished:
                self._held_up.discard(self)
            return more

    def _copy(self, flush: bool) -> bool:
        more = True
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS_AT_A_TIME):  # the rest next time: others must not wait for an endless writer
                if not (chunk := os.read(self.fd, 1 << 16)):
                    more = False
                    break
                self._unfinished += chunk
        end = len(self._unfinished)
        if more and not flush:
            end = max(self._unfinished.rfind(b"\n"), self._unfinished.rfind(b"\r")) + 1
        text, self._unfinished = self._unfinished[:end].decode(errors="replace"), self._unfinished[end:]
        if text:
            if self._prefix:
                text = "".join(f"{self._prefix}{line}" for line in text.splitlines(keepends=True))
            stream: IO[str] = getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream
            with contextlib.suppress(Exception):  # closed by the user: nobody to tell
                stream.write(text)
                stream.flush()
        return more


class Outputs:
    """What all workers of a pool print."""

    def __init__(self) -> None:
        self.held_up = set[Output]()
        self._epoll = select.epoll()
        self._by_fd: dict[int, Output] = {}

    def fileno(self) -> int:
        """Is readable when there is something for `copy`."""
        return self._epoll.fileno()

    def add(self, output: Output) -> None:
        self._by_fd[output.fd] = output
        self._epoll.register(output.fd, select.EPOLLIN)

    def remove(self, output: Output) -> None:
        if self._by_fd.pop(output.fd, None) is not None:
            self._epoll.unregister(output.fd)

    def is_any_left(self) -> bool:
        """Whether some of what has been printed up to now has not been copied."""
        return bool(self._epoll.poll(0, 1) or self.held_up)  # in this order: what is read meanwhile is held up

    def copy(self) -> bool:
        """Copy what there is."""
        for fd, _ in self._epoll.poll(0, AT_ONCE):
            if (output := self._by_fd.get(fd)) is not None and not output.copy():
                self.remove(output)
        return True

    def close(self) -> None:
        self._epoll.close()


_FIRST_FRAME_OF_OURS = f'  File "{devices.__file__}", line'.encode("ascii", "backslashreplace").decode()
