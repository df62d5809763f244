"""The statuses in the store: this rank writes its own, and reads those of the others.

Each rank overwrites one key, its *status*: how many calls it has made, how far it is in the last one, how many failed,
and which they were. A rank that needs another's outcome looks at that key until the other has got as far as its own
call. So success costs the rank that runs one `set` that awaits no reply, and the number of keys does not depend on the
number of calls. A failure adds to a second key per rank, the list of its last failures, for the ranks that lag behind.

Calls are numbered 1, 2, ... on each rank; ranks that make the same calls agree on the numbers, and where they do not,
the functions under one number differ and the error names both.
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

CALLS_KEPT = 8
FAILURES_KEPT = 64  # of each rank, in the store
logger = logging.getLogger("nn_parallel")


class Wait(NamedTuple):
    """A wait for other ranks in a call."""

    call: Call
    ranks: Sequence[int]
    phase: int  # of the call, which they have to reach
    deadline: float
    says: str  # what the others are told of it; empty if nothing, as this rank may give up the wait


class StatusBoard:
    """The status of this rank, and those of the others; for its main thread."""

    def __init__(self, context: RankContext) -> None:
        self.liveness = Liveness(context, context.connection)
        self.waits: Waits | None = None  # for whom this rank waits, where its watchdog is to tell the others
        self._context = context
        self._connection = context.connection
        self._rank = context.rank
        self._key = status_key(context.rank)
        self._seen: dict[int, tuple[str, RankStatus]] = {}  # by rank, the last one, as text and as what it says
        self._own_failures = NONE_FAILED  # on this rank
        self._failed_calls: dict[int, FailedCalls] = {}  # by rank, as read last
        self._spin = Spin()
        self._warned_of = set[Call]()
        self.begin_generation(context.generation)

    def begin_generation(self, generation: int) -> None:
        """Forget the calls so far: all ranks count from one again."""
        self.generation = generation
        self.number = 0  # of the present call
        self.phase = WAITING  # how far this rank is in it
        self._last_call: Call | None = None
        self._made = deque[str](maxlen=CALLS_KEPT)
        self._made_text = ""  # encoded

    def begin(self, call: Call) -> None:
        """Count a call that this rank makes."""
        self.number += 1
        self.phase = WAITING
        if call != self._last_call:
            self._last_call = call
            self._made.append(encode(CallMade(self.number, call.what, call.site)))
            self._made_text = ""

    def position(self) -> Position:
        """Return how far this rank has got."""
        if self.generation != self._context.generation:  # a task of a pool has begun, and made no call yet
            return Position(self._context.generation, 0, WAITING)
        return Position(self.generation, self.number, self.phase)

    def post(self, phase: int) -> None:
        """Let the others know that this rank has got so far in the present call."""
        self.phase = phase
        if not self._made_text:
            *earlier, last = self._made or ["null"]
            listed = ", ".join(earlier)
            self._made_text = f"{last}, {encode(f'[{listed}]')}"
        # A RankStatus as `encode` writes it; most of it is the same as before, and this is done at every call.
        position = f"[{self.generation}, {self.number}, {phase}]"
        self._connection.set(self._key, f"[{position}, {self._own_failures.total}, {self._made_text}]")

    def post_failure(self, call: Call, failures: dict[int, Failure]) -> None:
        """Make the failure of a call known: first what it is, so that whoever sees the status finds it."""
        earlier = self._own_failures
        failed = FailedCall(self.generation, self.number, call.function, failures)
        self._own_failures = FailedCalls(earlier.total + 1, (*earlier.kept, failed)[-FAILURES_KEPT:])
        self._connection.write(failures_key(self._rank), self._own_failures)
        self.post(FINISHED)
        self.flush()

    def flush(self) -> None:
        """Return once all that this rank has written is in the store: by a round trip."""
        self._connection.get(self._key)

    def outlive_readers(self, deadline: float) -> None:
        """At the end of the process that holds the store: stay until the others have read what they wait for."""
        for rank in range(self._context.world_size):
            with contextlib.suppress(RuntimeError):
                while rank != self._rank and not self.liveness.is_dead(rank):
                    status = self._connection.read(status_key(rank), RankStatus)
                    if status is None or status.position.phase == HAS_LEFT or time.monotonic() > deadline:
                        break  # it has never come, or waits for nothing any more
                    time.sleep(times.END_EVERY_S)
        self.liveness.close()

    def status_of(self, rank: int) -> RankStatus:
        """Return the status of ``rank``; `NO_STATUS` if it is of an earlier generation."""
        text = self._connection.get(status_key(rank)) or ""
        seen, status = self._seen.get(rank, ("", NO_STATUS))
        if text != seen:
            status = decode(RankStatus, status_key(rank), text)
            self._seen[rank] = text, status
        return status if status.position.generation >= self._context.generation else NO_STATUS

    def failures_of_call(self, rank: int, status: RankStatus) -> dict[int, Failure]:
        """Return how the present call has failed on ``rank``; nothing if it has succeeded.

        Args:
            rank: the one that has run it.
            status: its last one.

        Raises:
            ParallelError: it has failed too often since for that to be known.
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
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {self.number}: whether that one "
                "failed is no longer known here."
            )
        return {}

    def wait(self, wait: Wait, is_over: Callable[[float], bool]) -> None:
        """Return once ``is_over``, which is given the seconds waited so far.

        It looks again and again: a thread blocked in the store would see neither Ctrl-C nor a death.

        Raises:
            RankError: one of the ranks that are waited for has died.
            RankTimeoutError: the time is over.
        """
        has_told = False
        warn_after_s = times.WARN_AFTER_S
        self._connection.answer_by = wait.deadline
        self._spin.offer_core()  # where ranks share cores, it may be the one that is waited for who needs this one
        try:
            for waited in looks(*times.POLL):
                # Before the look, which sees their last words.
                dead = self.liveness.dead(wait.ranks) if waited > times.LOOK_UP_PEER_AFTER_S else []
                if is_over(waited):
                    return
                if dead:
                    raise self._gone_error(dead[0], wait.call)
                if time.monotonic() > wait.deadline:
                    raise self._timeout_error(self._missing(wait) or list(wait.ranks), wait.call, waited)
                if waited > times.TELL_AFTER_S and not has_told:
                    has_told = True
                    self._tell(wait)
                if waited > warn_after_s:
                    warn_after_s = math.inf
                    self._warn(self._missing(wait), wait.call, waited)
        finally:
            self._connection.answer_by = math.inf
            self.waits = None

    def _tell(self, wait: Wait) -> None:
        """Let the others know that this rank waits, and for whom."""
        if self.phase == WAITING:
            self.post(WAITING)  # one that waits for this rank, in another call, sees that
        if wait.says:
            self.waits = Waits(f"{wait.says} {wait.call}", tuple(wait.ranks), self._goal(wait))

    def _missing(self, wait: Wait) -> list[int]:
        goal = self._goal(wait)
        return [rank for rank in wait.ranks if self.status_of(rank).position < goal]

    def _goal(self, wait: Wait) -> Position:
        return Position(self.generation, self.number, wait.phase)

    def _where(self, rank: int) -> str:
        """Return the state of another rank, from its watchdog, or else from its own last status."""
        whereabouts = self._connection.read(whereabouts_key(rank), Whereabouts)
        where = whereabouts.where if whereabouts else self.status_of(rank).describe()
        return f"is stopped by a signal, and {where}" if self.liveness.is_stopped(rank) else where

    def _warn(self, missing: list[int], call: Call, waited: float) -> None:
        """Log for whom this rank waits, once for each call site."""
        if missing and call not in self._warned_of:
            self._warned_of.add(call)
            where = " ".join(f"Rank {rank} {self._where(rank)}." for rank in missing[:RANKS_NAMED])
            place = call, rank_names(missing), where, " ..." * (len(missing) > RANKS_NAMED)
            logger.warning("Rank %d has waited %.0f s in %s for %s. %s%s", self._rank, waited, *place)

    def check_same_call(self, rank: int, status: RankStatus, call: Call) -> None:
        """Raise if ``rank`` makes, or made, another call under the number of the present one."""
        if status.position.call < self.number:
            return
        other = status.made_as(self.number)
        # None if that call is too long ago to be known. Whether it has failed, the list of failures tells.
        if other is not None and other.what != call.what:
            self.post(self.phase)  # where this rank is, before it goes: the other may wait for it and must see it too
            raise ParallelError(
                f"The ranks are not in the same call: rank {rank} made {other.what} at {other.site}, and rank "
                f"{self._rank} made {call}. Every rank must make the same calls in the same order: look for one inside "
                "`if rank == ...`."
            )

    def _gone_error(self, rank: int, call: Call) -> ParallelError:
        """Return the error of this rank, which waits for one whose process has ended."""
        if self.status_of(rank).position.phase == HAS_LEFT:
            return self.left_error(rank, call)
        return rank_error(call.function, self._context.world_size, {rank: self.liveness.death(rank, call)})

    def left_error(self, rank: int, call: Call) -> ParallelError:
        return ParallelError(
            f"Rank {rank} has left, and rank {self._rank} waits for it in {call}. Every rank must make the same calls."
        )

    def _timeout_error(self, missing: list[int], call: Call, waited: float) -> RankTimeoutError:
        """Return the error of this rank, which has waited for too long."""
        whereabouts = {}
        for rank in missing[:RANKS_NAMED]:
            latest = self._connection.read(whereabouts_key(rank), Whereabouts) or Whereabouts("", "", {}, None)
            whereabouts[rank] = latest._replace(where=self._where(rank))
        what = f"Rank {self._rank} waited {waited:.1f} s for {rank_names(missing)} in {call}"
        why = f"Every rank must call {call.function}, and within timeout="
        return timeout_error(f"{what}. {why}", missing, whereabouts)


def deadline_of(timeout_s: float | None) -> float:
    """Return when a time is over that begins now; never, if there is no limit."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s
