"""What the parent holds of one worker process: its connection, its output, what it works on."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import IO

from ..errors import WorkerDiedError, exit_reason
from ..pickling import Packed
from .jobs import Run, Single
from .transport import messages, send
from .worker import Setup

CHUNKS_AT_A_TIME = 16


class Worker:
    """What the parent knows of one worker process."""

    def __init__(self, index: int, device: str, connection: socket.socket, output: list[Output]) -> None:
        self.index, self.device, self.connection, self.output = index, device, connection, output
        self.arriving = messages(connection, socket.MSG_DONTWAIT)
        self.pid = 0  # until the fork server has told it
        self.job: Single | Run | None = None
        self.started = False
        self.killed = False  # by us, so that its end is no failure

    @property
    def description(self) -> str:
        return f"Worker {self.index} (pid {self.pid}, {self.device})"

    def death(self, exitcode: int, evidence: str) -> WorkerDiedError:
        """The error of what it was doing when it ended."""
        doing = f"running {self.job.name}" if self.job else "idle"
        message = f"{self.description} {exit_reason(exitcode)} while {doing}. {evidence}"
        return WorkerDiedError(message, rank=self.index, pid=self.pid, exitcode=exitcode, evidence=evidence)


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self._name, self._pending = fd, name, b""
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        more = True
        with contextlib.suppress(BlockingIOError):
            for _ in range(
                CHUNKS_AT_A_TIME
            ):  # the rest next time: the other workers must not wait for an endless writer
                if not (chunk := os.read(self.fd, 1 << 16)):
                    more = False
                    break
                self._pending += chunk
        end = (
            len(self._pending) if flush or not more else max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1
        )
        text, self._pending = self._pending[:end].decode(errors="replace"), self._pending[end:]
        if text:
            stream: IO[str] = getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream
            with contextlib.suppress(Exception):  # closed by the user: nobody to tell
                stream.write(text)
                stream.flush()
        return more


def start_worker(pool: socket.socket, setup: Setup, initializer: Packed) -> Worker:
    """Have the fork server fork a worker for ``pool`` and send it its set-up; it need not be there yet."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as on_failure, contextlib.ExitStack() as given_away:
        on_failure.callback(ours.close)
        output, writers = [], []
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            given_away.callback(os.close, write)
            on_failure.callback(os.close, read)
            output.append(Output(read, name))
            writers.append(write)
        with contextlib.suppress(OSError):  # the fork server has ended: we hear of it
            socket.send_fds(pool, [b"fork"], [theirs.fileno(), *writers])
        on_failure.pop_all()
    with contextlib.suppress(OSError):
        send(ours, setup, initializer)
    return Worker(setup.rank, setup.device, ours, output)
