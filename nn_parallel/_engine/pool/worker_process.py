"""A worker process on this machine, as its pool sees it: the connections to the process, and the messages on them.

Four connections lead to a worker: a `Channel` for tasks and answers; a socket for orders, such as to cancel a task, and
for the Python stack of the worker; and one pipe each for its standard output and standard error.

The end of a connection does not show that the process has ended, because the worker may have closed the connection.
Nor does it show what the worker has done, because its last answer or output may still be unread. So only the fork
server, which is the parent of the process, reports that the process has ended. Then `WorkerProcess.finish` reads the
rest from the connections.
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
from .channel import Channel, Payload, Received, no_room_error
from .event_loop import EventLoop
from .forkserver_client import ServerConnection
from .messages import HAND_BACK, TELL_STACK, Answer, ForgetObjects, KeepObject, Order, TaskHeader, WorkerSetup
from .output import Output
from .protocols import WorkerEvents

NUMBERS_AT_ONCE = 1000  # the maximum number of objects that a `ForgetObjects` message names, so that it fits a packet
CLOSED = errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN  # the errors of sending if the worker has closed its end
ROOM_EVERY_S = 0.01  # how often to try again to send a message whose descriptors the kernel has refused


class WorkerProcess:
    """A process that the fork server forks for a pool; implements `Worker`. Only the pool's thread uses it."""

    exit_told_within_s = 0.0  # the pool learns of a death at once, from the fork server

    def __init__(
        self,
        rank: int,
        device: torch.device,
        server: ServerConnection,
        loop: EventLoop,
        events: WorkerEvents,
        prefix_output: bool,
    ) -> None:
        """Ask the fork server for the process, and open the connections. The process may be forked later.

        Args:
            rank: the rank of the worker.
            device: the device of its tasks.
            server: the pool's connection to the fork server.
            loop: the event loop of the pool, which reads the connections.
            events: receives the events of the worker.
            prefix_output: begin each line that the worker prints with its rank.
        """
        self.rank = rank
        self.device = device
        self.pid = 0  # it stays 0 until the fork server has reported the process id
        self._server = server
        self._loop = loop
        self._events = events
        self._kept_handles: set[int] = set()  # the numbers of the objects that the worker keeps for later tasks
        # True if the latest message to the worker is a task. If the worker dies without reading this message, the error
        # of the task says that the worker was idle, see `_report_unread`.
        self._is_task_last = False
        # The time at which to give up sending a message whose descriptors the kernel refuses. None while the kernel
        # refuses nothing.
        self._room_deadline: float | None = None
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as worker_ends:
            pool_ends: list[socket.socket] = []
            worker_fds: list[int] = []
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                pool_end, worker_end = socket.socketpair(socket.AF_UNIX, kind)
                pool_ends.append(on_failure.enter_context(pool_end))
                worker_fds.append(worker_ends.enter_context(worker_end).fileno())
            self._output: list[Output] = []
            for name in ("stdout", "stderr"):
                read, write = os.pipe()
                worker_ends.callback(os.close, write)
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
        """The worker in words, for errors."""
        return f"Worker {self.rank} (pid {self.pid}, {self.device})"

    @property
    def is_stopped(self) -> bool:
        """True while the process is stopped by a signal."""
        return is_stopped(self.pid)

    def set_up(self, directory: str) -> None:
        """Send the first message: the attributes of the script's process that the fork server does not have.

        ``directory`` is the working directory of the worker.
        """
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
        # The setup is sent as a payload, because a header must fit into a packet, and the environment can be larger.
        self._channel.enqueue(None, Payload(dumps(setup)))
        self._flush()

    def send(self, task: TaskHeader, call: PackedCall) -> None:
        """Implement `Worker.send`. If the socket is full, the message goes out later."""
        for handle in call.handles:
            if handle.number not in self._kept_handles:
                self._channel.enqueue(KeepObject(handle.number), handle.payload)
                self._kept_handles.add(handle.number)
        self._channel.enqueue(task, call.payload)
        self._is_task_last = True
        self._flush()

    def forget(self, numbers: Iterable[int]) -> None:
        """Implement `Worker.forget`."""
        for forgotten in _chunks(self._kept_handles.intersection(numbers)):
            self._kept_handles.difference_update(forgotten)
            self._channel.enqueue(ForgetObjects(forgotten))
            self._is_task_last = False
        self._flush()

    def cancel(self, number: int) -> None:
        """Implement `Worker.cancel`: send an order, which the worker follows even while a task runs."""
        with contextlib.suppress(OSError):
            self._control.send(Order.pack(number), socket.MSG_DONTWAIT)

    def ask_for_stack(self) -> None:
        """Implement `Worker.ask_for_stack`."""
        self.cancel(TELL_STACK)  # no task has this number, so the worker takes it as the order to send its stack

    def hand_back(self) -> None:
        """Implement `Worker.hand_back`."""
        self.cancel(HAND_BACK)  # no task has this number, so the worker takes it as the order to send its results

    def leave(self) -> None:
        """Implement `Worker.leave`: the worker exits when it reads the end of its channel."""
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Implement `Worker.kill`."""
        self._server.signal(self.key, signal.SIGKILL)

    def finish(self) -> list[tuple[Answer, Received]]:
        """Close the connections to the process, which has ended. Return the answers that were still unread."""
        answers = []
        while self._channel.has_more():
            try:
                received = self._channel.receive(wait=False)
            except EOFError:
                break
            except ConnectionResetError:
                self._report_unread()
                continue
            if received is not None:  # it is None for the first part of a message
                answers.append(received)
        self.close()
        return answers

    def close(self) -> None:
        """Copy the rest of the output of the process, and close the connections to it."""
        for fd in (self._channel.sock.fileno(), self._control.fileno(), *(output.fd for output in self._output)):
            self._loop.unwatch(fd)
        for output in self._output:
            output.close()
        self._channel.close()
        self._control.close()

    def _receive(self) -> None:
        """Read a message from the worker, and pass it to the pool if it is a whole answer."""
        try:
            received = self._channel.receive(wait=False)
        except EOFError:
            self._loop.unwatch(self._channel.sock.fileno())
            return
        except ConnectionResetError:
            # The worker has closed its end without reading the last message. The kernel reports this once, before it
            # delivers the answers that the worker had sent.
            self._report_unread()
            return
        if received is not None:  # it is None for the first part of a message
            self._copy_output()  # output that was printed before the answer must also appear before the result
            self._events.answered(self, *received)

    def _copy(self, output: Output) -> None:
        """Copy the output that has arrived on one of the pipes."""
        if not output.copy():
            self._loop.unwatch(output.fd)

    def _copy_output(self) -> None:
        """Copy all output that has arrived, including unfinished lines."""
        if self._printed.poll(0) or any(output.holds_some for output in self._output):
            for output in self._output:
                output.copy(flush=True)

    def _receive_stack(self) -> None:
        """Read a part of the worker's stack, and pass it to the pool."""
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
        """Send the messages in the outbox. If the kernel does not accept all of them, send the rest later."""
        fd = self._channel.sock.fileno()
        try:
            has_room = self._channel.flush()
        except OSError as error:
            if error.errno in CLOSED:
                self._report_unread()
                return
            if error.errno != errno.ETOOMANYREFS:
                self._events.unsent(self, TransferError(str(error)))
                return
            # Too many descriptors are in flight, see `no_room_error`. Try again after a while, because no event reports
            # when the kernel accepts descriptors again.
            now = time.monotonic()
            self._room_deadline = self._room_deadline or now + channel.ROOM_WITHIN_S
            if now < self._room_deadline:
                self._loop.call_later(ROOM_EVERY_S, self._flush_again)
            else:
                self._events.unsent(self, no_room_error(error))
            return
        self._room_deadline = None
        self._loop.watch_for_room(fd, None if has_room else self._flush)

    def _report_unread(self) -> None:
        """Report that the worker has closed its end without reading its last message, if this message is a task.

        The error of the task then says that the worker was idle when it died.
        """
        if self._is_task_last:
            self._events.unread(self)

    def _flush_again(self) -> None:
        """Try again to send the messages in the outbox, unless the connection was closed meanwhile."""
        if self._channel.sock.fileno() >= 0:
            self._flush()


def _chunks(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield the numbers in lists that are short enough for one message."""
    remaining = list(numbers)
    for start in range(0, len(remaining), NUMBERS_AT_ONCE):
        yield remaining[start : start + NUMBERS_AT_ONCE]
