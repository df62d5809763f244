"""The statuses of the ranks in the store. This rank writes its own status, and reads those of the others.

Each rank overwrites one key, its *status*. The status says how many calls the rank has made, how far it is in the last
call, how many of its calls have failed, and which functions its last calls were. A rank that needs the outcome of a
call reads the status of the rank that runs the call, again and again, until that rank has finished the call. Therefore
a successful call costs the rank that runs it only a single `set`, which does not wait for a reply. The number of keys
does not depend on the number of calls.

A rank whose call has failed also writes a second key, the list of its last failures. A slower rank that makes the same
call later finds the failure of this call there.

Calls are numbered 1, 2, ... on each rank. If all ranks make the same calls, a number means the same call on all ranks.
If they do not, two ranks have different functions under the same number, and the error names both functions.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import ParallelError, RankTimeoutError
from ..failures import Failure, rank_error, rank_names
from ..polling import Spin, looks
from . import times
from .context import RankContext
from .liveness import Liveness
from .records import (
    FINISHED,
    HAS_LEFT,
    NO_STATUS,
    NONE_FAILED,
    RANKS_NAMED,
    WAITING,
    Call,
    CallMade,
    FailedCall,
    FailedCalls,
    Position,
    RankStatus,
    Waits,
    Whereabouts,
    timeout_error,
)
from .store import decode, encode, failures_key, status_key, whereabouts_key

CALLS_KEPT = 8  # the number of calls that a status lists
FAILURES_KEPT = 64  # the number of failures that a rank keeps in its list of failures; older ones are dropped
logger = logging.getLogger("nn_parallel")


class Wait(NamedTuple):
    """The arguments of `StatusBoard.wait`: this rank waits in a call until other ranks reach a phase of this call."""

    call: Call
    ranks: Sequence[int]  # the ranks that this rank waits for
    phase: int  # the phase of the call that these ranks have to reach
    deadline: float  # when this rank gives up, as a value of `time.monotonic`
    verb: str  # "waits in" or "waits at", for the published text; an empty string if the wait must not be published


class StatusBoard:
    """The status of this rank, and those of the others.

    The main thread of the rank uses this object. The watchdog thread of the rank only reads `position` and `waits`.
    """

    def __init__(self, context: RankContext) -> None:
        self.liveness = Liveness(context, context.connection)
        # The record that the watchdog publishes: in which call this rank waits, and for which ranks. None if this rank
        # does not wait, if it has only begun to wait, or if the wait must not be published.
        self.waits: Waits | None = None
        self._context = context
        self._connection = context.connection
        self._rank = context.rank
        self._key = status_key(context.rank)
        self._seen: dict[int, tuple[str, RankStatus]] = {}  # the last status read from each rank, encoded and decoded
        self._own_failures = NONE_FAILED  # the list of failures that this rank has written into the store
        self._failed_calls: dict[int, FailedCalls] = {}  # the list of failures that was last read from each rank
        self._spin = Spin()
        self._warned_of = set[Call]()  # calls for which a warning about a long wait has been logged
        self.begin_generation(context.generation)

    def begin_generation(self, generation: int) -> None:
        """Begin a generation (all calls and barriers between two failed blocks). Calls are counted from one again."""
        self.generation = generation
        self.number = 0  # the number of the present call
        self.phase = WAITING  # the phase of this rank in the present call
        self._last_call: Call | None = None  # the last call; None until this rank begins a call in this generation
        self._recent_calls = deque[str](maxlen=CALLS_KEPT)  # the last calls, as encoded `CallMade` records
        # The fields ``last`` and ``earlier`` of the status, encoded; an empty string if they must be encoded again.
        self._recent_calls_text = ""

    def begin(self, call: Call) -> None:
        """Begin a call of this rank, under the next number."""
        self.number += 1
        self.phase = WAITING
        if call != self._last_call:
            self._last_call = call
            self._recent_calls.append(encode(CallMade(self.number, call.what, call.site)))
            self._recent_calls_text = ""

    def position(self) -> Position:
        """Return the position of this rank in its calls."""
        if self.generation != self._context.generation:  # a task of a pool has begun, but has made no call yet
            return Position(self._context.generation, 0, WAITING)
        return Position(self.generation, self.number, self.phase)

    def post(self, phase: int) -> None:
        """Publish that this rank has reached ``phase`` in the present call."""
        self.phase = phase
        if not self._recent_calls_text:
            *earlier, last = self._recent_calls or ["null"]
            listed = ", ".join(earlier)
            self._recent_calls_text = f"{last}, {encode(f'[{listed}]')}"
        # The text that is written is an encoded `RankStatus`. It is joined from parts to save time, because `post` runs
        # at every call, and most of the text is often the same as at the previous call.
        position = f"[{self.generation}, {self.number}, {phase}]"
        self._connection.set(self._key, f"[{position}, {self._own_failures.total}, {self._recent_calls_text}]")

    def post_failure(self, call: Call, failures: dict[int, Failure]) -> None:
        """Publish the failure of a call.

        The failure is written before the status. Otherwise a rank could see the new status, but not find the failure.
        """
        earlier = self._own_failures
        failed = FailedCall(self.generation, self.number, call.function, failures)
        self._own_failures = FailedCalls(earlier.total + 1, (*earlier.kept, failed)[-FAILURES_KEPT:])
        self._connection.write(failures_key(self._rank), self._own_failures)
        self.post(FINISHED)
        self.flush()

    def flush(self) -> None:
        """Return once everything that this rank has written is in the store."""
        self._connection.get(self._key)  # the store answers only after the earlier requests of this connection

    def outlive_readers(self, deadline: float) -> None:
        """Wait until the other ranks no longer need the store, or until ``deadline``.

        The process that hosts the store calls this method before it ends, because the store ends with this process.
        """
        for rank in range(self._context.world_size):
            with contextlib.suppress(RuntimeError):
                while rank != self._rank and not self.liveness.is_dead(rank):
                    status = self._connection.read(status_key(rank), RankStatus)
                    if status is None or status.position.phase == HAS_LEFT or time.monotonic() > deadline:
                        break  # the rank has never come, or has read everything that it needs, or time is over
                    time.sleep(times.END_EVERY_S)
        self.liveness.close()

    def status_of(self, rank: int) -> RankStatus:
        """Return the status of ``rank``; `NO_STATUS` if the rank has not written a status in this generation."""
        text = self._connection.get(status_key(rank)) or ""
        seen, status = self._seen.get(rank, ("", NO_STATUS))
        if text != seen:
            status = decode(RankStatus, status_key(rank), text)
            self._seen[rank] = text, status
        return status if status.position.generation >= self._context.generation else NO_STATUS

    def failures_of_call(self, rank: int, status: RankStatus) -> dict[int, Failure]:
        """Return a dict from failed ranks to their failures in the present call; empty if the call has succeeded.

        Args:
            rank: the rank that has run the call.
            status: the last status of that rank.

        Raises:
            ParallelError: it is no longer known whether the call has failed, because the store holds only the last
                failures of ``rank``, and all of them came later than this call.
        """
        failed = self._failed_calls.get(rank, NONE_FAILED)
        if status.failed_calls > failed.total:
            failed = self._connection.read(failures_key(rank), FailedCalls) or failed
            self._failed_calls[rank] = failed
        this = self.generation, self.number
        for failed_call in failed.kept:
            if (failed_call.generation, failed_call.number) == this:
                return failed_call.failures
        if failed.total > len(failed.kept) and this < (failed.kept[0].generation, failed.kept[0].number):
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {self.number}, so it is no longer "
                f"known whether call {self.number} failed."
            )
        return {}

    def wait(self, wait: Wait, is_over: Callable[[float], bool]) -> None:
        """Call ``is_over`` again and again, with the seconds waited so far, until it returns True.

        The method does not use the ``wait`` of torch's store, because a thread that is blocked in the store's ``wait``
        notices neither Ctrl-C nor the death of a rank.

        Raises:
            RankError: a rank that this rank waits for has died.
            ParallelError: a rank that this rank waits for has left the world.
            RankTimeoutError: the deadline of the wait has passed.
        """
        has_published = False
        warn_after_s = times.WARN_AFTER_S
        self._connection.answer_by = wait.deadline
        self._spin.offer_core()  # if ranks share cores, the awaited rank may need the core of this rank
        try:
            for waited in looks(*times.POLL):
                # Deaths must be looked up before `is_over` reads the store. Then `is_over` sees everything that a dead
                # rank has written before its death.
                dead = self.liveness.dead(wait.ranks) if waited > times.LOOK_UP_PEER_AFTER_S else []
                if is_over(waited):
                    return
                if dead:
                    raise self._gone_error(dead[0], wait.call)
                if time.monotonic() > wait.deadline:
                    raise self._timeout_error(self._missing(wait) or list(wait.ranks), wait.call, waited)
                if waited > times.PUBLISH_WAIT_AFTER_S and not has_published:
                    has_published = True
                    self._publish_wait(wait)
                if waited > warn_after_s:
                    warn_after_s = math.inf
                    self._warn(self._missing(wait), wait.call, waited)
        finally:
            self._connection.answer_by = math.inf
            self.waits = None

    def _publish_wait(self, wait: Wait) -> None:
        """Publish that this rank waits, and for which ranks."""
        if self.phase == WAITING:
            # The status of this rank in the store does not show the present call yet. If another rank waits for this
            # rank in a different call, the other rank notices the difference when it reads the new status.
            self.post(WAITING)
        if wait.verb:
            self.waits = Waits(f"{wait.verb} {wait.call}", tuple(wait.ranks), self._goal(wait))

    def _missing(self, wait: Wait) -> list[int]:
        """Return the ranks that have not yet reached the position that this rank waits for."""
        goal = self._goal(wait)
        return [rank for rank in wait.ranks if self.status_of(rank).position < goal]

    def _goal(self, wait: Wait) -> Position:
        return Position(self.generation, self.number, wait.phase)

    def _where(self, rank: int) -> str:
        """Return a text that says where another rank is, for messages.

        The text comes from the `Whereabouts` of the rank. If the rank has not published any, it comes from its status.
        """
        whereabouts = self._connection.read(whereabouts_key(rank), Whereabouts)
        where = whereabouts.where if whereabouts else self.status_of(rank).describe()
        return f"is stopped by a signal, and {where}" if self.liveness.is_stopped(rank) else where

    def _warn(self, missing: list[int], call: Call, waited: float) -> None:
        """Log a warning that this rank has waited long for the ``missing`` ranks.

        If the same line of code makes the call several times, only the first long wait is logged.
        """
        if missing and call not in self._warned_of:
            self._warned_of.add(call)
            where = " ".join(f"Rank {rank} {self._where(rank)}." for rank in missing[:RANKS_NAMED])
            place = call, rank_names(missing), where, " ..." * (len(missing) > RANKS_NAMED)
            logger.warning("Rank %d has waited %.0f s in %s for %s. %s%s", self._rank, waited, *place)

    def check_same_call(self, rank: int, status: RankStatus, call: Call) -> None:
        """Raise ParallelError if another rank makes a different call under the number of the present call.

        For instance, call number 5 is save() on this rank, but load() on the other rank.

        Args:
            rank: the other rank.
            status: the last status of the other rank.
            call: the present call of this rank.
        """
        if status.position.call < self.number:
            return
        other = status.made_as(self.number)  # None if the status no longer lists the call with this number
        if other is not None and other.what != call.what:
            self.post(self.phase)  # so that the other rank, which may wait for this one, also notices the difference
            raise ParallelError(
                f"The ranks are not in the same call: rank {rank} made {other.what} at {other.site}, and rank "
                f"{self._rank} made {call}. Every rank must make the same calls in the same order: look for a call "
                "inside `if rank == ...`."
            )

    def _gone_error(self, rank: int, call: Call) -> ParallelError:
        """Return the error that this rank raises because it waits for ``rank``, whose process has ended."""
        if self.status_of(rank).position.phase == HAS_LEFT:
            return self.left_error(rank, call)
        return rank_error(call.function, self._context.world_size, {rank: self.liveness.death(rank, call)})

    def left_error(self, rank: int, call: Call) -> ParallelError:
        return ParallelError(
            f"Rank {rank} has left, and rank {self._rank} waits for it in {call}. Every rank must make the same calls."
        )

    def _timeout_error(self, missing: list[int], call: Call, waited: float) -> RankTimeoutError:
        """Return the error that this rank raises because it has waited too long for the ``missing`` ranks."""
        whereabouts = {}
        for rank in missing[:RANKS_NAMED]:
            latest = self._connection.read(whereabouts_key(rank), Whereabouts) or Whereabouts("", "", {}, None)
            whereabouts[rank] = latest._replace(where=self._where(rank))
        what = f"Rank {self._rank} waited {waited:.1f} s for {rank_names(missing)} in {call}"
        why = f"Every rank must call {call.function} within the timeout"
        return timeout_error(f"{what}. {why}", missing, whereabouts)


def deadline_of(timeout_s: float | None) -> float:
    """Return the time at which a timeout that begins now is over; infinity if ``timeout_s`` is None."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s
