"""Which job goes to which worker, and when. The supervisor's lock guards all changes."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..devices import cpu_count
from .jobs import Item, Job, Resize, Run, SetUp, Waiting
from .packing import PackedCall
from .worker import STARTED, Task
from .workers import Worker


class Schedule:
    """The jobs that wait and the workers that take them, in order.

    A busy worker whose tasks are short is sent the next item of a map as well, so that it need not wait for it. If its
    task then turns out to be long, the item is taken back: it never waits while another worker is free.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        port: Callable[[int], int],
        wake: Callable[[], None],
    ) -> None:
        """``port`` gives that of the store for an epoch; ``wake`` has the supervisor look what it has to do."""
        self.pending: deque[Waiting | Resize] = deque()
        self.workers: list[Worker] = []  # by rank
        self.epoch = 1  # see Task
        self.is_any_ahead = False  # whether there may be something for `take_back`
        self._port, self._wake = port, wake
        self._numbers = itertools.count(STARTED + 1)
        self.use(devices)

    def use(self, devices: Sequence[torch.device]) -> None:
        """From now on these are the devices of the workers."""
        self.devices, self.used_at = list(devices), time.monotonic()
        self.cores = cpu_count() // len(devices)  # for each worker

    def assign(self) -> list[tuple[list[Worker], Task, PackedCall]]:
        """Give waiting jobs to workers that can take them; the caller sends these task and call, without the lock."""
        ready: list[tuple[list[Worker], Task, PackedCall]] = []
        while self.pending:
            job = self.pending[0]
            if isinstance(job, Resize):
                self._wake()
                break
            free, size, port, is_ahead = [worker for worker in self.workers if worker.is_free], 0, 0, False
            if isinstance(job, Run):
                size = len(free)
                if size < len(self.devices):
                    break
                port = self._port(self.epoch)
                self.pending.popleft()
                job.begin(size)
            else:
                if not free and isinstance(job, Item) and job.call.parcel.is_small:
                    free, is_ahead = [worker for worker in self.workers if worker.takes_another(job.call)], True
                if not free:
                    break
                self.pending.popleft()
                if not job.begins():
                    continue
                del free[1:]
                if is_ahead and not self.is_any_ahead:
                    self.is_any_ahead = True
                    self._wake()
            number, call, self.used_at = next(self._numbers), job.call, time.monotonic()
            bind = call.options.pass_device
            task = Task(number, True, is_ahead, call.function, bind, self.cores, size, port, self.epoch)
            for worker in free:
                if is_ahead:
                    worker.get_next(job, number)
                else:
                    worker.get(job, number)
                    worker.begin(self.used_at)
            ready.append((free, task, call))
            if call.options.timeout_s is not None:
                self._wake()  # for the deadlines
        return ready

    def assign_set_up(self, worker: Worker, job: SetUp) -> Task:
        """Give ``worker``, which still starts, the initializer; the caller sends that, without the lock."""
        number = next(self._numbers)
        worker.get(job, number)
        return Task(number, True, function=job.call.function, cores=self.cores)

    def take_back(self) -> None:
        """Take back what was sent ahead to workers that are not short of work."""
        now = time.monotonic()
        self.pending.extendleft(job for worker in self.workers if (job := worker.taken_back(now)) is not None)
        self.is_any_ahead = any(worker.next_job is not None for worker in self.workers)

    def end_task(self, job: Job | Resize) -> None:
        """Cancel ``job`` where it runs."""
        for worker in self.workers:
            if worker.job is job and not worker.leaving:
                worker.cancel()

    def resize_if_due(self) -> Resize | None:
        """Begin the resize that is next, if there is one and no worker is busy; to start new ones is the caller's."""
        if not self.pending or not isinstance(job := self.pending[0], Resize):
            return None
        if len(self.workers) < len(self.devices) or not all(worker.is_free for worker in self.workers):
            return None
        self.use(job.devices)
        self.epoch += 1
        for worker in self.workers[len(job.devices) :]:
            worker.end()
        del self.workers[len(job.devices) :]
        return job

    def is_idle(self) -> bool:
        """Whether there is nothing to do, but for workers that still set themselves up."""
        return not self.pending and all(worker.job is None or not worker.is_set_up for worker in self.workers)
