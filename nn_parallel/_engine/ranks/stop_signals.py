"""Preemption: a signal to one process, and all ranks stop at the same step.

Ranks are not at the same step when the signal comes: one may be ahead by some. So the step is agreed through the store,
and no rank waits for another. Each rank counts its calls of `stop_requested`, tells the number, and only then looks
whether a stop has been asked for. Whoever finds one asked for fixes it to the call after the last that any rank has
told: ranks that have not looked since tell a later number, and then find what has been fixed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, NamedTuple, Protocol

from ...errors import ParallelError
from .blocks import Blocks
from .store import STOP_KEY, decode, encode, stops_key

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # of SLURM, clouds and launchers; each would end the process
logger = logging.getLogger("nn_parallel")


class StopCall(NamedTuple):
    """A call of `stop_requested`, by its number in a generation; ``a >= b``: it is ``b`` or comes after it."""

    generation: int
    call: int


ASKED = encode(StopCall(-1, 0))  # older than any generation: not fixed yet


class AsksRanks(Protocol):
    """Something that passes on to other processes that they are to stop."""

    def ask_to_stop(self) -> None: ...


def is_asked() -> bool:
    """Return whether this process has been asked to stop."""
    return _received is not None


def ask_to_stop(source: str) -> None:
    """Ask this process to stop, and the ranks to which that is passed on; ``source`` is told."""
    global _received
    _received = source
    for ranks in list(_passed_on_to):
        ranks.ask_to_stop()


def pass_on_to(ranks: AsksRanks) -> None:
    """Have ``ranks`` asked as well, now or when a signal comes, as long as somebody else refers to it."""
    _passed_on_to.add(ranks)
    if is_asked():
        ranks.ask_to_stop()


def is_reached(blocks: Blocks) -> bool:
    """Return whether the ranks stop at this call of `stop_requested`."""
    blocks.raise_if_nested("stop_requested()")
    blocks.stop_calls += 1
    own_call = StopCall(blocks.generation, blocks.stop_calls)
    connection = blocks.context.connection
    connection.write(stops_key(blocks.rank), own_call)
    fixed = connection.get(STOP_KEY)
    if fixed is None and is_asked():
        fixed = connection.swap(STOP_KEY, "", ASKED)
        logger.info("Rank %d has received %s: the ranks are asked to stop.", blocks.rank, _received)
    while fixed is not None:
        stop = decode(StopCall, STOP_KEY, fixed)
        if stop.generation >= blocks.generation:
            return own_call >= stop
        calls = [connection.read(stops_key(rank), StopCall) for rank in range(blocks.world_size)]
        last = max(each.call for each in calls if each is not None and each.generation == blocks.generation)
        fixed = connection.swap(STOP_KEY, fixed, encode(StopCall(blocks.generation, last + 1)))
    return False


def listen() -> None:
    """Have `SIGNALS` ask this process to stop, from now on; only the first call has work to do."""
    if _handlers_before:
        return
    if threading.current_thread() is not threading.main_thread():
        raise ParallelError("The first stop_requested() must be in the main thread: Python takes signals only there.")
    for number in SIGNALS:
        _handlers_before[number] = signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    ask_to_stop(signal.Signals(number).name)
    before = _handlers_before[number]
    if callable(before):
        before(number, frame)


def pass_over(number: int, frame: FrameType | None) -> None:
    """Ignore a signal, as SIG_IGN does, but for programs that this process starts: they begin with the default."""


def _hold_signals() -> None:
    """Before a fork: no signal comes to the fork while it still has our handlers."""
    if _handlers_before:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    if _handlers_before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _stop_listening() -> None:
    """Have the signals do what they did before the first `stop_requested`."""
    for number, before in _handlers_before.items():
        signal.signal(number, before)
    _handlers_before.clear()


def _begin_in_fork() -> None:
    """In a fork, which nobody asks to stop: SIGTERM ends it as before, the other signals are for the rank.

    SLURM sends them to every process of a job step. SIGTERM is also what ends a fork that is not needed any more, and a
    handler cannot know who has sent it. The workers of a prepared loader: see `training._loader_workers`.
    """
    if not _handlers_before:
        return
    handlers = dict(_handlers_before)
    _stop_listening()
    for number, before in handlers.items():
        if number != signal.SIGTERM and not callable(before):
            signal.signal(number, pass_over)
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


_received: str | None = None  # the name of the last signal that has asked
_handlers_before: dict[int, Any] = {}  # by the number of the signal; empty until the first call
_fork = threading.local()  # in the thread that forks: the signals that it had blocked
_passed_on_to: weakref.WeakSet[AsksRanks] = weakref.WeakSet()
os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_begin_in_fork)
