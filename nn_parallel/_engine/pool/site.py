"""Start a pool's workers on this machine through the fork server, and pass the fork server's reports to the pool."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import torch

from ...errors import ParallelError
from ..by_value.packer import Packer
from ..devices import cpu_count
from .channel import Payload
from .event_loop import EventLoop
from .forkserver_client import Exited, Forked, ServerConnection, take_standard_descriptors
from .messages import Ranks
from .pool_store import PoolStore
from .protocols import WorkerEvents
from .worker_process import WorkerProcess


class LocalSite:
    """Workers on this machine, forked by the fork server; implements `Site`."""

    def __init__(self, prefix_output: bool) -> None:
        """Connect to the fork server. If ``prefix_output``, each line that a worker prints begins with its rank."""
        self._prefix_output = prefix_output
        # This call comes first, because a connection of this pool could otherwise get the number of a standard stream
        # that is closed.
        take_standard_descriptors()
        self._directory = os.getcwd()
        self._server = ServerConnection()
        self._workers: dict[int, WorkerProcess] = {}  # the workers, by the key that identifies them at the fork server
        self._store = PoolStore()

    def make_packer(self, on_forgotten: Callable[[int], None]) -> Packer:
        """Implement `Site.make_packer`."""
        return Packer(Payload, on_forgotten)

    def open(self, loop: EventLoop, events: WorkerEvents) -> None:
        """Implement `Site.open`."""
        self._loop = loop
        self._events = events
        loop.watch(self._server.fileno(), self._hear)

    def start(self, rank: int, device: torch.device) -> WorkerProcess:
        """Implement `Site.start`."""
        worker = WorkerProcess(rank, device, self._server, self._loop, self._events, self._prefix_output)
        self._workers[worker.key] = worker
        worker.set_up(self._directory)
        return worker

    def resize(self, workers: int) -> bool:
        """Implement `Site.resize`: on one machine, all present workers can stay."""
        return True

    def cores_for(self, workers: int) -> int:
        """Implement `Site.cores_for`: the workers share the cores of this machine."""
        return cpu_count() // workers

    def ranks(self, world_size: int, group: int) -> Ranks:
        """Implement `Site.ranks`."""
        return Ranks(world_size, *self._store.address(group), group)

    def close(self) -> None:
        """Implement `Site.close`."""
        self._loop.unwatch(self._server.fileno())
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._server.close()
        self._store.close()
        del self._events  # breaks the reference cycle with the supervisor, which would keep both objects alive

    def _hear(self) -> None:
        """Read a report of the fork server, and pass it to the pool."""
        try:
            message = self._server.receive()
        except EOFError:
            self._server_ended()
            return
        worker = self._workers[message.key]
        if isinstance(message, Forked):
            worker.pid = message.pid
            self._events.forked(worker)
        else:
            self._worker_exited(worker, message)

    def _worker_exited(self, worker: WorkerProcess, exited: Exited) -> None:
        """Report to the pool that a worker has exited, and pass on the answers of the worker that are still unread."""
        del self._workers[worker.key]
        last = worker.finish()
        self._events.exited(worker, exited.exitcode, exited.evidence, last)

    def _server_ended(self) -> None:
        """End the pool, because the fork server has ended, and the kernel has killed its workers.

        The kernel kills only the workers themselves. To end the processes that the workers have started as well, this
        method kills the process group of each worker.
        """
        self._loop.unwatch(self._server.fileno())
        self._events.fail(ParallelError("The fork server has ended, and its workers with it. Make a new executor."))
        for worker in list(self._workers.values()):
            if worker.pid:  # the pid is 0 before the fork; afterwards it is also the number of the process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
            self._worker_exited(worker, Exited(worker.key, -signal.SIGKILL, "The fork server has ended."))
