"""This machine, as the place where the workers of a pool run."""

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
        self._prefix_output = prefix_output
        take_standard_descriptors()
        self._directory = os.getcwd()
        self._server = ServerConnection()
        self._workers: dict[int, WorkerProcess] = {}  # by their key at the fork server
        self._store = PoolStore()

    def make_packer(self, on_forgotten: Callable[[int], None]) -> Packer:
        """As `Site.make_packer`."""
        return Packer(Payload, on_forgotten)

    def open(self, loop: EventLoop, events: WorkerEvents) -> None:
        """As `Site.open`."""
        self._loop = loop
        self._events = events
        loop.watch(self._server.fileno(), self._hear)

    def start(self, rank: int, device: torch.device) -> WorkerProcess:
        """As `Site.start`."""
        worker = WorkerProcess(rank, device, self._server, self._loop, self._events, self._prefix_output)
        self._workers[worker.key] = worker
        worker.set_up(self._directory)
        return worker

    def resize(self, workers: int) -> bool:
        """As `Site.resize`."""
        return True

    def cores_for(self, workers: int) -> int:
        """As `Site.cores_for`."""
        return cpu_count() // workers

    def ranks(self, world_size: int, group: int) -> Ranks:
        """As `Site.ranks`."""
        return Ranks(world_size, *self._store.address(group), group)

    def close(self) -> None:
        """As `Site.close`."""
        self._loop.unwatch(self._server.fileno())
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._server.close()
        self._store.close()
        del self._events  # it holds this object

    def _hear(self) -> None:
        """Follow what the fork server tells."""
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
        del self._workers[worker.key]
        last = worker.finish()
        self._events.exited(worker, exited.exitcode, exited.evidence, last)

    def _server_ended(self) -> None:
        """Note that the fork server has ended, and its workers with it; kill what they have started."""
        self._loop.unwatch(self._server.fileno())
        self._events.fail(ParallelError("The fork server has ended, and its workers with it. Make a new executor."))
        for worker in list(self._workers.values()):
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
            self._worker_exited(worker, Exited(worker.key, -signal.SIGKILL, "The fork server has ended."))
