"""Preemption: after a signal to one process, all ranks stop at the same step.

When the signal comes, some ranks may be several steps ahead of others. If the rank that receives the signal stopped at
its own next step, the other ranks would wait for it in a collective. Therefore the ranks agree on a step. They do this
through the store, and without waiting for each other:

1. Each rank counts its calls of `stop_requested`. In each call it writes its count into the store, and only then reads
   the key ``stop``.
2. A rank that has received a signal writes `ASKED` under this key. `ASKED` means that the ranks are to stop, but that
   the call at which they stop is not fixed yet.
3. A rank that reads `ASKED` reads the counts of all ranks, and replaces `ASKED` by the highest count plus one. If
   several ranks do so at the same time, the first replacement counts.
4. At the call of this number `stop_requested` returns True on every rank.

Let N be the number that is written in step 3. Each rank learns of N in its call N at the latest, because of the order
of writing and reading in step 1. Take rank 5 as an example. The rank that chose N had read a count of rank 5 that was
lower than N, or else it would have chosen a higher number. So it read this count before rank 5 wrote its count N, and
`ASKED` was in the store even earlier. Rank 5 reads the key ``stop`` only after it has written N, and therefore finds
either N, or still `ASKED`. In the second case rank 5 performs step 3 itself.
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

# The signals with which SLURM, clouds and launchers ask a process to stop. By default each of them ends the process.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
logger = logging.getLogger("nn_parallel")


class StopCall(NamedTuple):
    """The number of a call of `stop_requested` within its generation (the calls between two failures of blocks).

    ``a >= b`` means that ``a`` is the same call as ``b`` or a later one.
    """

    generation: int
    call: int


# Means that the ranks are to stop, but that the call at which they stop is not fixed yet. The numbers of generations
# begin at 0, so that no generation has the number -1.
ASKED = encode(StopCall(-1, 0))


class AsksRanks(Protocol):
    """An object that can forward a request to stop to ranks in other processes."""

    def ask_to_stop(self) -> None:
        """Ask the ranks to stop. A signal handler may call this method."""


def is_asked() -> bool:
    """Return whether this process has been asked to stop."""
    return _received is not None


def ask_to_stop(source: str) -> None:
    """Record that this process is asked to stop, and pass the request on to the ranks of its pools.

    Args:
        source: the origin of the request, such as the name of a signal, for the log.
    """
    global _received
    _received = source
    for ranks in list(_passed_on_to):
        ranks.ask_to_stop()


def pass_on_to(ranks: AsksRanks) -> None:
    """Register ``ranks``, so that they are asked to stop when this process is asked to stop.

    If this process has already been asked to stop, the ranks are asked immediately.

    This module keeps only a weak reference to ``ranks``.
    """
    _passed_on_to.add(ranks)
    if is_asked():
        ranks.ask_to_stop()


def is_reached(blocks: Blocks) -> bool:
    """Return whether the ranks stop at this call of `stop_requested`, see the docstring of this module."""
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
    """Install handlers for `SIGNALS` that call `ask_to_stop`. Only the first call has an effect."""
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
    """Handle a signal by doing nothing.

    This handler is used instead of ``SIG_IGN``, because programs that this process starts would inherit ``SIG_IGN``.
    Such programs do not inherit a handler, but start with the default action.
    """


def _hold_signals() -> None:
    """Block `SIGNALS` before a fork, so that the child receives none before `_begin_in_fork` has set its handlers."""
    if _handlers_before:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    """Unblock the signals in the parent process after a fork, see `_hold_signals`."""
    if _handlers_before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _stop_listening() -> None:
    """Restore the handlers that the signals had before the first `stop_requested`."""
    for number, before in _handlers_before.items():
        signal.signal(number, before)
    _handlers_before.clear()


def _begin_in_fork() -> None:
    """Restore the handlers in a forked process, which is not a rank, and ignore SIGUSR1 and SIGUSR2 there.

    SLURM sends the signals to every process of a job step, but only the rank should react to them. The default action
    of SIGUSR1 and SIGUSR2 would end the forked process.

    SIGTERM is not ignored, because the rank itself may send SIGTERM to end the forked process, and a handler cannot
    know whether SLURM or the rank has sent the signal. Only the workers of a prepared loader ignore SIGTERM from SLURM:
    the rank sets a flag before it sends SIGTERM to them, see `training._loader_workers`.
    """
    if not _handlers_before:
        return
    handlers = dict(_handlers_before)
    _stop_listening()
    for number, before in handlers.items():
        if number != signal.SIGTERM and not callable(before):
            signal.signal(number, pass_over)
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


_received: str | None = None  # the origin of the last request to stop, such as the name of a signal
_handlers_before: dict[int, Any] = {}  # maps each signal to its previous handler; empty until `listen` is called
_fork = threading.local()  # its attribute ``mask`` is the signal mask that this thread had before `_hold_signals`
_passed_on_to: weakref.WeakSet[AsksRanks] = weakref.WeakSet()  # the objects that `pass_on_to` has registered
os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_begin_in_fork)
