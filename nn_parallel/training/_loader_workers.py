"""Workers of a loader outlive the signals by which a rank is asked to stop, until the rank has saved its checkpoint.

SLURM sends SIGUSR1 or SIGTERM to every process of a job step. The rank handles it, by `stop_requested`, and goes on to
the next step, for which it needs its workers. They must therefore ignore these signals.

SIGTERM is difficult, because ``Process.terminate()`` sends it too: torch's loader ends workers by it that do not end
by themselves, and `multiprocessing` all that are left when the rank ends. Python does not tell a handler who has sent
a signal. So each worker and its rank share a flag. ``terminate()`` of these workers raises the flag first, and a
worker that finds it raised ends. A worker that is stuck in C runs no handler; the rank kills it after a second.

This is done in the worker, by a ``worker_init_fn``, since torch installs handlers of its own as a worker begins.
"""

from __future__ import annotations

import functools
import os
import signal
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from .._engine.ranks.stop_signals import SIGNALS, pass_over

KILL_AFTER_S = 1.0
SIGNALS_SENT = 20  # until then


class WorkerInit:
    """The ``worker_init_fn`` of a prepared loader: it calls the user's own."""

    def __init__(self, initialize: Callable[[int], None] | None, *, is_stream: bool) -> None:
        self._initialize = initialize
        self._is_stream = is_stream
        self._ends = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            if number == signal.SIGTERM:  # torch has replaced what the user had for it
                signal.signal(number, self._end_if_told)
            elif not callable(signal.getsignal(number)):
                signal.signal(number, pass_over)
        if self._initialize is not None:
            if self._is_stream:
                info: Any = get_worker_info()
                object.__setattr__(info, "dataset", info.dataset.source)  # the user's own, past the setter
            self._initialize(worker)

    def guard(self, workers: list[Any]) -> None:
        """Have ``terminate()`` of ``workers``, processes of `multiprocessing`, end them."""
        for worker in workers:
            popen = worker._popen  # by which `multiprocessing` ends them, without ``worker.terminate()``
            popen.terminate = functools.partial(_terminate, weakref.ref(popen), self._ends)

    def _end_if_told(self, number: int, frame: FrameType | None) -> None:
        if self._ends.item():
            os._exit(0)  # as torch's own handler does it; another code would be an error of the loader


def _terminate(reference: Callable[[], Any], ends: torch.Tensor) -> None:
    popen = reference()
    ends[0] = True
    for _ in range(SIGNALS_SENT):  # one that comes just before the worker waits in C does not end that wait
        type(popen).terminate(popen)
        if popen.wait(timeout=KILL_AFTER_S / SIGNALS_SENT) is not None:
            return
    popen.kill()
