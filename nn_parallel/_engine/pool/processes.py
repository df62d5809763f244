"""The worker processes of one pool: started, watched, and let go. What they work on is the pool's affair."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..by_value.packer import PackedCall, Packer
from .channel import Header, Unpack
from .forkserver_client import Exited, ServerConnection
from .memory_files import Files
from .poller import Poller
from .tasks import InitializerTask, Task
from .worker_process import Due, WorkerProcess


class Settings(NamedTuple):
    """What a pool is made with."""

    devices: Sequence[torch.device]
    pack_initializer: Callable[[Packer], PackedCall] | None = None
    idle_limit_s: float | None = None
    prefix_output: bool = False
    ranks: Sequence[int] | None = None  # the workers, where they are some of those of a cluster
    cores: int | None = None  # for each worker; None: its share of this machine's


class Processes:
    """Those that run, also on their way out, and the connection to the fork server that forks and reaps them."""

    def __init__(
        self,
        poller: Poller,
        lock: threading.Lock,
        files: Files,
        settings: Settings,
        on_answer: Callable[[WorkerProcess, Header, Unpack], None],
        on_news: Callable[[], bool],
    ) -> None:
        """``lock`` guards the states of the workers; ``on_news`` is called when there is something to `hear`."""
        self._on_answer = on_answer
        self._poller, self._lock, self._files, self._settings = poller, lock, files, settings
        self._directory = os.getcwd()
        self._by_key = dict[int, WorkerProcess]()
        self._are_killed = False
        self._server, self.has_server = ServerConnection(), True
        poller.watch(self._server.fileno(), on_news)

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def start(self, index: int, device: torch.device) -> WorkerProcess:
        """Have a worker forked; it need not be there yet."""
        ranks = self._settings.ranks
        rank = index if ranks is None else ranks[index]
        worker = WorkerProcess(index, rank, device, self._server, self._settings.prefix_output)
        self._by_key[worker.key] = worker
        self._poller.watch(worker.connection.sock.fileno(), functools.partial(self._receive, worker), is_answer=True)
        self._poller.watch(worker.control.fileno(), worker.receive_stack)
        for output in worker.output:
            self._poller.watch(output.fd, output.copy)
        worker.set_up(self._directory, self._files)
        with self._lock:
            if self._are_killed:
                worker.kill()
        return worker

    def kill(self) -> None:
        """Kill all, and those that another thread is about to start; the caller holds the lock."""
        self._are_killed = True
        for worker in self:
            worker.kill()

    def hear(self) -> list[tuple[WorkerProcess, Exited]]:
        """The exits of workers that the fork server tells next.

        Raises:
            EOFError: it has ended.
        """
        told = self._server.receive()
        worker = self._by_key[told.worker]
        if isinstance(told, Exited):
            return [(worker, told)]
        with self._lock:
            worker.forked(told.pid)
        return []

    def kill_all(self) -> list[tuple[WorkerProcess, Exited]]:
        """The exits of all workers, after that of the fork server; what they have started may live on: it is killed."""
        self.has_server = False
        for worker in self:
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
        return [(worker, Exited(worker.key, -signal.SIGKILL, "The fork server has ended.")) for worker in self]

    def cancel(self, task: object) -> None:
        """End ``task`` where it runs; the caller holds the lock."""
        for worker in self:
            if worker.task is task:
                worker.cancel()

    def receive_last(self, worker: WorkerProcess) -> None:
        """Take all that ``worker`` has answered before it exited."""
        while worker.connection.has_more() and self._receive(worker):
            pass

    def remove(self, worker: WorkerProcess) -> None:
        """It has exited, or nobody will hear of it."""
        for fd in worker.fds:
            self._poller.unwatch(fd)
        worker.close()
        del self._by_key[worker.key]

    def forget(self, numbers: deque[int]) -> None:
        """The handles of these numbers are gone."""
        while numbers:
            number = numbers.popleft()
            with self._lock:
                for worker in self:
                    worker.forget(number)

    def next_deadline(self) -> float:
        """When there is something for `keep_deadlines`."""
        with self._lock:
            return min((worker.deadline.at for worker in self if worker.deadline is not None), default=math.inf)

    def keep_deadlines(self) -> dict[Task | InitializerTask | None, list[WorkerProcess]]:
        """Do what is due; by task, the workers that have run out of time, and told their stacks or had time to."""
        now, silent, awaited = time.monotonic(), dict[Task | InitializerTask | None, list[WorkerProcess]](), set[Any]()
        with self._lock:
            for worker in self:
                if worker.deadline is None:
                    continue
                at, due = worker.deadline
                if due is Due.DUMP_STACK and now >= at and not worker.has_told_stack:
                    worker.dump_stack()
                    at, due = worker.deadline
                if due is Due.DUMP_STACK or due is Due.TIME_OUT:
                    silent.setdefault(worker.task, []).append(worker)
                    if now < at and not worker.has_told_stack:
                        awaited.add(worker.task)
                elif now >= at:
                    worker.kill() if due is Due.KILL else worker.ask_for_stack()
        return {task: workers for task, workers in silent.items() if task not in awaited}

    def _receive(self, worker: WorkerProcess) -> bool:
        """Take the answer that has arrived from ``worker``; False at the end of its connection."""
        try:
            received = worker.connection.receive(wait=False)
        except EOFError:
            return False  # the fork server will tell the exit code
        except ConnectionResetError:
            worker.is_given = False
            return False
        try:
            if received is not None:
                self._on_answer(worker, *received)
        except BaseException:  # of a signal's handler, or a bug: what is half done is not known
            worker.kill()
            raise
        return True

    def close(self) -> None:
        """Let go of all; the fork server ends those that are left."""
        for worker in self:
            self.remove(worker)
        self._server.close()
