"""What the parent holds of one worker process: its connections, its output, what it works on and until when."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import IO, Any

from .. import devices
from ..errors import WorkerDiedError, exit_reason
from .jobs import Job
from .packing import PackedCall
from .transport import Link
from .worker import CANCEL, FORGET, STACK_SIGNAL, STORED, Order

CHUNKS_AT_A_TIME = 16
STACK_WITHIN_S = 0.2  # for a worker to write its stack
CANCEL_GRACE_S = 0.5  # for a cancelled task to end, then its process is killed
END_GRACE_S = 2.0  # for an idle worker to exit


class Worker:
    """What the parent knows of one worker process. The supervisor's lock guards it, but for `send`."""

    def __init__(
        self,
        index: int,
        device: str,
        pool: socket.socket,
        sockets: list[socket.socket],
        output: list[Output],
        timed: set[Worker],
    ) -> None:
        """Puts itself into ``timed`` whenever it gets a deadline."""
        self.index, self.device, self._pool, self.output, self._timed = index, device, pool, output, timed
        connection, self.control = sockets
        self.link = Link(connection)
        self.arriving = self.link.messages(socket.MSG_DONTWAIT)
        self.pid = 0  # until the fork server has told it
        self.started = False
        self.leaving = False  # it was told to end, or killed by us: its end is no failure
        self.job: Job | None = None
        self.stack = ""
        self._number = 0  # of its task
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
        return self.job.call.name if self.job else "the initializer"

    @property
    def is_free(self) -> bool:
        return self.started and self.job is None and not self.leaving

    def begin(self, job: Job, number: int, deadline: float | None) -> None:
        """It gets ``job`` as its task ``number``; sending it is the caller's."""
        self.job, self._number = job, number
        if deadline is not None:
            self.deadline = deadline
            self._timed.add(self)

    def finish(self) -> Job | None:
        """Its task is over."""
        job, self.job = self.job, None
        self.deadline = self.stack_by = None
        if not self.leaving:
            self.kill_at = None
        return job

    def send(self, header: tuple[Any, ...], call: PackedCall) -> None:
        """Send a task, and before it the objects that it needs and this worker has not got."""
        with contextlib.suppress(OSError):  # it has died: the fork server will tell
            for handle in call.handles:
                if handle.number not in self._stored:
                    self._stored.add(handle.number)
                    self.link.send((STORED, handle.number), handle.parcel)
            self.link.send(header, call.parcel)

    def forget(self, number: int) -> None:
        if number in self._stored:
            self._stored.remove(number)
            self._order(FORGET, number)

    def cancel(self) -> None:
        """End its task; if that does not help soon, the process."""
        self._order(CANCEL, self._number)
        self.kill_at = self.kill_at or time.monotonic() + CANCEL_GRACE_S
        self._timed.add(self)

    def ask_for_stack(self) -> None:
        self.deadline, self.stack_by, self.stack = None, time.monotonic() + STACK_WITHIN_S, ""
        self._signal(STACK_SIGNAL)

    def end(self) -> None:
        """Have an idle worker exit by itself."""
        self.leaving, self.kill_at = True, time.monotonic() + END_GRACE_S
        self._timed.add(self)
        with contextlib.suppress(OSError):
            self.link.sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self.leaving, self.kill_at = True, None
        self._kill_when_named = not self.pid
        self._signal(signal.SIGKILL)

    def named(self, pid: int, deadline: float | None) -> None:
        """The fork server has told its process id; it is to be set up by ``deadline``."""
        self.pid, self.deadline = pid, deadline
        self._timed.add(self)
        if self._kill_when_named:
            self.kill()

    def where_it_stands(self) -> str:
        """The Python stack of its main thread down to the task, or why there is none."""
        if self.stack:
            user, _, _ = self.stack.partition(_FIRST_FRAME_OF_OURS)
            return user.rstrip() if "File" in user else f"  In C code of {self._doing}, with no Python frame."
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "Tt":
                return "  It is stopped (SIGSTOP)."
        return "  It did not tell."

    def death(self, exitcode: int, evidence: str) -> WorkerDiedError:
        """The error of what it was doing when it ended."""
        doing = f"running {self._doing}" if self.job else "idle" if self.started else "starting"
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
        return [self.link.sock.fileno(), self.control.fileno(), *(output.fd for output in self.output)]

    def close(self) -> None:
        for output in self.output:
            os.close(output.fd)
        self.link.close()
        self.control.close()

    def _order(self, kind: int, number: int) -> None:
        with contextlib.suppress(OSError):
            self.control.send(Order.pack(kind, number), socket.MSG_DONTWAIT)

    def _signal(self, number: int) -> None:
        if self.pid:
            with contextlib.suppress(OSError):
                self._pool.send(f"{self.pid} {int(number)}".encode())


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time."""

    def __init__(self, fd: int, name: str, prefix: str) -> None:
        self.fd, self._name, self._prefix, self._pending = fd, name, prefix, b""
        self._copying = threading.Lock()
        os.set_blocking(fd, False)

    @property
    def is_unfinished(self) -> bool:
        """Whether part of a line has been read and not copied yet."""
        return bool(self._pending)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        with self._copying:
            return self._copy(flush)

    def _copy(self, flush: bool) -> bool:
        more = True
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS_AT_A_TIME):  # the rest next time: others must not wait for an endless writer
                if not (chunk := os.read(self.fd, 1 << 16)):
                    more = False
                    break
                self._pending += chunk
        end = len(self._pending)
        if more and not flush:
            end = max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1
        text, self._pending = self._pending[:end].decode(errors="replace"), self._pending[end:]
        if text:
            if self._prefix:
                text = "".join(f"{self._prefix}{line}" for line in text.splitlines(keepends=True))
            stream: IO[str] = getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream
            with contextlib.suppress(Exception):  # closed by the user: nobody to tell
                stream.write(text)
                stream.flush()
        return more


_FIRST_FRAME_OF_OURS = f'  File "{devices.__file__}", line'
