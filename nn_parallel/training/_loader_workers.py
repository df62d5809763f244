"""The worker processes of a prepared loader ignore the signals that ask a job to stop.

SLURM sends SIGUSR1 or SIGTERM to every process of a job step. A rank that uses `stop_requested` handles the signal, and
goes on to its next step, where it may save a checkpoint. The rank needs its loader workers for that step, so the
workers must ignore the signal.

For SIGTERM this is difficult, because ``Process.terminate()`` sends SIGTERM too. Torch's loader calls this method for
workers that do not end by themselves, and `multiprocessing` calls it for all workers that are left when the rank ends.
So a worker that ignores every SIGTERM would never end. And a signal handler in Python does not learn which process has
sent the signal.

So the rank and its workers share a flag. The rank replaces the method ``terminate()`` of these workers with one that
sets the flag and then sends SIGTERM. The handler in the worker ends the process only if the flag is set. A worker that
is stuck in C code cannot run the handler, so the rank kills the worker after a second.

The handlers are installed by a ``worker_init_fn`` in the worker, because torch installs its own handlers when a worker
begins, just before it calls that function.
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

KILL_AFTER_S = 1.0  # how long the rank waits for a worker to end before it kills the worker
SIGNALS_SENT = 20  # how many times the rank sends SIGTERM before it kills a worker


class WorkerInit:
    """The ``worker_init_fn`` of a prepared loader. It installs the signal handlers, then calls the user's function."""

    def __init__(self, initialize: Callable[[int], None] | None, *, is_stream: bool) -> None:
        self._initialize = initialize
        self._is_stream = is_stream
        self._is_ending = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            # The user's handler of SIGTERM is lost already, because torch has replaced it. Other handlers are kept.
            if number == signal.SIGTERM:
                signal.signal(number, self._end_if_flag_is_set)
            elif not callable(signal.getsignal(number)):
                signal.signal(number, pass_over)
        if self._initialize is not None:
            if self._is_stream:
                info: Any = get_worker_info()
                # The user's function expects the user's dataset, and not the `Stream`. `WorkerInfo` refuses changes, so
                # its ``__setattr__`` is bypassed.
                object.__setattr__(info, "dataset", info.dataset.source)
            self._initialize(worker)

    def guard(self, workers: list[Any]) -> None:
        """Make sure that ``terminate()`` still ends the worker processes, although they ignore SIGTERM.

        The rank calls this method after torch has started the workers. ``terminate()`` of each worker is replaced with
        `_terminate`, which sets a flag and then sends SIGTERM. If the flag is set, the worker does not ignore SIGTERM.
        """
        for worker in workers:
            popen = worker._popen  # `multiprocessing` calls ``terminate()`` of this object, not of ``worker``
            popen.terminate = functools.partial(_terminate, weakref.ref(popen), self._is_ending)

    def _end_if_flag_is_set(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM in the worker: end the worker if its rank has sent the signal, otherwise do nothing."""
        if self._is_ending.item():
            os._exit(0)  # as torch's own handler does; with another exit code, torch would report an error


def _terminate(reference: Callable[[], Any], is_ending: torch.Tensor) -> None:
    """End a worker process with SIGTERM, or with SIGKILL after `KILL_AFTER_S` seconds.

    Args:
        reference: returns the process, as the Popen object of `multiprocessing`.
        is_ending: the flag that the worker's handler for SIGTERM reads.
    """
    popen = reference()
    is_ending[0] = True
    # One signal may not be enough: if the signal arrives just before the worker begins a wait in C code, Python runs
    # the handler only after this wait. So the signal is repeated.
    for _ in range(SIGNALS_SENT):
        type(popen).terminate(popen)
        if popen.wait(timeout=KILL_AFTER_S / SIGNALS_SENT) is not None:
            return
    popen.kill()
