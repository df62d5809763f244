"""The answers of a pool's workers, taken in whichever thread reads them: one that an interrupt stops loses none."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import TransferError
from ..signals import raised_by_a_handler
from .connection import Header, Unpack
from .poller import Poller
from .process import WorkerProcess
from .tasks import SetUp, Task
from .worker import CANCELLED, FAILED, STARTED


class Answers:
    """Rebuilds what workers answer, and hands it on."""

    def __init__(
        self, poller: Poller, lock: threading.Lock, on_answer: Callable[[WorkerProcess, Header, int, Any], None]
    ) -> None:
        """``on_answer`` gets a worker, the header of its answer, how its task ended, and the result or the exception.

        ``lock`` guards changes of a worker.
        """
        self._poller, self._lock, self._on_answer = poller, lock, on_answer
        self._left = deque[WorkerProcess]()  # by a thread that does not read on

    def receive(self, worker: WorkerProcess) -> bool:
        """Take what has arrived from ``worker``; False at the end of its connection."""
        try:
            worker.unread = worker.connection.receive(socket.MSG_DONTWAIT)
        except EOFError:
            return False  # the fork server will tell the exit code
        except BaseException:
            worker.kill()  # Ctrl-C or a bug: its answer may be lost
            raise
        self.take(worker)
        return True

    def take(self, worker: WorkerProcess) -> None:
        """Take what has been received from ``worker``."""
        if worker.unread is None:
            return
        header, unpack = worker.unread
        try:
            if worker.deadline is not None:
                with self._lock:
                    worker.answered()
            outcome, value = _rebuilt(header, unpack, worker.task)
        except BaseException:  # Ctrl-C in a thread that leads
            self._left.append(worker)
            self._poller.wake()
            raise
        try:
            worker.unread = None
            self._on_answer(worker, header, outcome, value)
        except BaseException:
            worker.kill()  # what is half done is not known
            raise

    def take_last(self, worker: WorkerProcess) -> None:
        """Take all that ``worker`` has answered before it exited."""
        self.take(worker)
        while worker.connection.has_more() and self.receive(worker):
            pass

    def take_left(self) -> None:
        """In the thread that is not interrupted: take what another one has left."""
        while self._left:
            with self._poller.reclaimed():
                self.take(self._left.popleft())


def _rebuilt(header: Header, unpack: Unpack, task: Task | SetUp | None) -> tuple[int, Any]:
    """How a task ended, and its result or its exception. Raises what the handler of a signal raises meanwhile."""
    number, outcome, _ = header
    if outcome == CANCELLED or task is None or number == STARTED:
        return outcome, None
    try:
        value = unpack()
        if outcome == FAILED:
            value, failure = value
            value.__cause__ = failure.as_cause()
    except BaseException as error:  # a SystemExit in user code must not end our thread either
        if raised_by_a_handler(error):
            raise
        value = TransferError(f"The result of {task.call.name} cannot be rebuilt in the parent process: {error!r}")
        value.__cause__ = error
        outcome = FAILED
    return outcome, value
