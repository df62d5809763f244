"""Which job goes to which worker, and when. The supervisor's lock guards all changes."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..devices import cpu_count
from .jobs import Item, Job, Resize, Run
from .packing import PackedCall
from .worker import STARTED, Task
from .workers import Worker


class Schedule:
    """The jobs that wait and the workers that take them, in order.

    A busy worker whose tasks are short is sent the next item of a map as well, so that it need not wait for it. If its
    task then turns out to be long, the item is taken back: it never waits while another worker is free.
    """

    def __init__(self, devices: Sequence[torch.device], pass_device: bool, port: Callable[[int], int]) -> None:
        """``port`` gives that of the store for an epoch."""
        self.pending: deque[Job | Resize] = deque()
        self.workers: list[Worker] = []  # by rank
        self.epoch = 1  # see Task
        self.is_any_ahead = False  # whether there may be something for `take_back`
        self._pass_device, self._port = pass_device, port
        self._numbers = itertools.count(STARTED + 1)
        self.use(devices)

    def use(self, devices: Sequence[torch.device]) -> None:
        """From now on these are the devices of the workers."""
        self.devices = list(devices)
        self.cores = cpu_count() // len(devices)  # for each worker

    def assign(self) -> list[tuple[Worker, Task, PackedCall]]:
        """Give waiting jobs to workers that can take them; the caller sends these task and call, without the lock."""
        ready: list[tuple[Worker, Task, PackedCall]] = []
        while self.pending and not isinstance(job := self.pending[0], Resize):
            chosen, place = [worker for worker in self.workers if worker.is_free], _ALONE
            if isinstance(job, Run):
                if len(chosen) < len(self.devices):
                    break
                place = len(chosen), self._port(self.epoch), self.epoch
                job.begin(len(chosen))
            else:
                if not chosen and isinstance(job, Item):
                    chosen = [worker for worker in self.workers if worker.takes_another]
                if not chosen:
                    break
                del chosen[1:]
            self.pending.popleft()
            if not isinstance(job, Run) and not job.begins():
                continue
            number, call, is_ahead = next(self._numbers), job.call, not chosen[0].is_free
            self.is_any_ahead |= is_ahead
            task = Task(number, True, is_ahead, call.function, self._pass_device, self.cores, *place)
            for worker in chosen:
                worker.begin(job, number)
                ready.append((worker, task, call))
        return ready

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

    def kill_half_sent(self, job: Job | Resize) -> None:
        """Kill the workers that may hold half of ``job``'s message: they cannot read on."""
        for worker in self.workers:
            if worker.next_job is job:
                worker.next_job = None
                worker.kill()
            elif worker.job is job and not worker.leaving:
                worker.kill()

    def is_idle(self) -> bool:
        return not self.pending and all(worker.job is None for worker in self.workers)


_ALONE = 0, 0, 0  # the place of a task that is no rank
