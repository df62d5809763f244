"""A worker process of this machine, as its pool sees it: the connections to it.

That the process has ended is told by the fork server alone, which reaps it. The end of a connection says less: the
worker may have closed it, and what it has answered or printed may still be on its way.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator

import torch

from ...errors import TransferError
from ..by_value.packer import PackedCall
from ..descendants import is_stopped
from ..pickling import dumps
from ..process_environment import ProcessAttributes
from . import channel
from .channel import Channel, Payload, Received, no_room
from .event_loop import EventLoop
from .forkserver_client import ServerConnection
from .messages import HAND_BACK, TELL_STACK, Answer, ForgetObjects, KeepObject, Order, TaskHeader, WorkerSetup
from .output import Output
from .protocols import WorkerEvents

NUMBERS_AT_ONCE = 1000  # of objects to forget, in one message
CLOSED = errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN  # how the kernel says that a worker has closed its end
ROOM_EVERY_S = 0.01  # how often a message is tried again for which the kernel has no room


class WorkerProcess:
    """A process that the fork server has forked; implements `Worker`. It lives in the thread of the pool."""

    exit_told_within_s = 0.0

    def __init__(
        self,
        rank: int,
        device: torch.device,
        server: ServerConnection,
        loop: EventLoop,
        events: WorkerEvents,
        prefix_output: bool,
    ) -> None:
        """Have it forked; it need not be there yet."""
        self.rank = rank
        self.device = device
        self.pid = 0  # until the fork server has told
        self._server = server
        self._loop = loop
        self._events = events
        self._kept: set[int] = set()  # the numbers of the handles whose objects the worker keeps
        self._has_task_last = False  # the last message to it was a task
        self._room_by: float | None = None  # until when descriptors must have been sent
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as given_away:
            pool_ends: list[socket.socket] = []
            worker_fds: list[int] = []
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                pool_end, worker_end = socket.socketpair(socket.AF_UNIX, kind)
                pool_ends.append(on_failure.enter_context(pool_end))
                worker_fds.append(given_away.enter_context(worker_end).fileno())
            self._output: list[Output] = []
            for name in ("stdout", "stderr"):
                read, write = os.pipe()
                given_away.callback(os.close, write)
                on_failure.callback(os.close, read)
                self._output.append(Output(read, name, rank, has_prefix=prefix_output))
                worker_fds.append(write)
            self.key = server.fork(worker_fds)
            on_failure.pop_all()
        sock, self._control = pool_ends
        self._channel = Channel(sock)
        self._printed = select.poll()
        for output in self._output:
            self._printed.register(output.fd, select.POLLIN)
            loop.watch(output.fd, functools.partial(self._copy, output))
        loop.watch(sock.fileno(), self._receive)
        loop.watch(self._control.fileno(), self._receive_stack)

    @property
    def description(self) -> str:
        """As errors name the worker."""
        return f"Worker {self.rank} (pid {self.pid}, {self.device})"

    @property
    def is_stopped(self) -> bool:
        """True while the process is stopped by a signal."""
        return is_stopped(self.pid)

    def set_up(self, directory: str) -> None:
        """Send what no fork can know."""
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
        self._channel.enqueue(None, Payload(dumps(setup)))  # as a payload, since an environment can be large
        self._flush()

    def send(self, task: TaskHeader, call: PackedCall) -> None:
        """As `Worker.send`."""
        for handle in call.handles:
            if handle.number not in self._kept:
                self._channel.enqueue(KeepObject(handle.number), handle.payload)
                self._kept.add(handle.number)
        self._channel.enqueue(task, call.payload)
        self._has_task_last = True
        self._flush()

    def forget(self, numbers: Iterable[int]) -> None:
        """As `Worker.forget`."""
        for gone in _chunks(self._kept.intersection(numbers)):
            self._kept.difference_update(gone)
            self._channel.enqueue(ForgetObjects(gone))
            self._has_task_last = False
        self._flush()

    def cancel(self, number: int) -> None:
        """As `Worker.cancel`."""
        with contextlib.suppress(OSError):
            self._control.send(Order.pack(number), socket.MSG_DONTWAIT)

    def ask_for_stack(self) -> None:
        """As `Worker.ask_for_stack`."""
        self.cancel(TELL_STACK)

    def hand_back(self) -> None:
        """As `Worker.hand_back`."""
        self.cancel(HAND_BACK)

    def leave(self) -> None:
        """As `Worker.leave`."""
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """As `Worker.kill`."""
        self._server.signal(self.key, signal.SIGKILL)

    def finish(self) -> list[tuple[Answer, Received]]:
        """Return what the process, which is gone, had answered, and let go of it."""
        last = []
        while self._channel.has_more():
            try:
                received = self._channel.receive(wait=False)
            except EOFError:
                break
            except ConnectionResetError:
                self._tell_unread()
                continue
            if received is not None:  # else it is the first part of a message
                last.append(received)
        self.close()
        return last

    def close(self) -> None:
        """Copy the last output of the process, which is gone, and close the connections to it."""
        for fd in (self._channel.sock.fileno(), self._control.fileno(), *(output.fd for output in self._output)):
            self._loop.unwatch(fd)
        for output in self._output:
            output.close()
        self._channel.close()
        self._control.close()

    def _receive(self) -> None:
        """Take the answer that has arrived."""
        try:
            received = self._channel.receive(wait=False)
        except EOFError:
            self._loop.unwatch(self._channel.sock.fileno())
            return
        except ConnectionResetError:
            # Its end was closed with a message of ours unread. The kernel tells this once, before it gives us the
            # answers that the worker had sent.
            self._tell_unread()
            return
        if received is not None:  # else it is the first part of a message
            self._copy_output()  # what was printed before the answer must be seen before it, too
            self._events.answered(self, *received)

    def _copy(self, output: Output) -> None:
        if not output.copy():
            self._loop.unwatch(output.fd)

    def _copy_output(self) -> None:
        if self._printed.poll(0) or any(output.holds_some for output in self._output):
            for output in self._output:
                output.copy(flush=True)

    def _receive_stack(self) -> None:
        try:
            text = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            text = b""
        if text:
            self._events.told_stack(self, text.decode(errors="replace"))
        else:
            self._loop.unwatch(self._control.fileno())

    def _flush(self) -> None:
        """Send what is enqueued, now or when there is room."""
        fd = self._channel.sock.fileno()
        try:
            has_room = self._channel.flush()
        except OSError as error:
            if error.errno in CLOSED:
                self._tell_unread()
                return
            if error.errno != errno.ETOOMANYREFS:
                self._events.unsent(self, TransferError(str(error)))
                return
            now = time.monotonic()
            self._room_by = self._room_by or now + channel.ROOM_WITHIN_S
            if now < self._room_by:
                self._loop.call_later(ROOM_EVERY_S, self._flush_again)
            else:
                self._events.unsent(self, no_room(error))
            return
        self._room_by = None
        self._loop.watch_for_room(fd, None if has_room else self._flush)

    def _tell_unread(self) -> None:
        if self._has_task_last:
            self._events.unread(self)

    def _flush_again(self) -> None:
        if self._channel.sock.fileno() >= 0:  # else it is closed
            self._flush()


def _chunks(numbers: Iterable[int]) -> Iterator[list[int]]:
    rest = list(numbers)
    for start in range(0, len(rest), NUMBERS_AT_ONCE):
        yield rest[start : start + NUMBERS_AT_ONCE]
