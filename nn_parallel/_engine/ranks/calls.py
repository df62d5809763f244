"""Calls that one rank runs while the others wait: how the outcome reaches them, through the store.

Each rank overwrites one key, its *report*: how many calls it has made, how far it is in the last one, how many failed,
and which they were. A rank that needs another's outcome polls that key until the other has got as far as its own call.
So success costs the rank that runs one `set` that awaits no reply, and the number of keys does not depend on the number
of calls. A failure adds to a second key per rank, the list of its last failures, for the ranks that lag behind.

Calls are numbered 1, 2, ... on each rank; ranks that make the same calls agree on the numbers, and where they do not,
the functions under one number differ and the error names both.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...errors import ParallelError, RankError, RankTimeoutError
from ..failures import Failure, rank_error, rank_names
from ..interrupts import Interrupted
from ..polling import Spin, looks
from ..tracebacks import user_frames
from . import times
from .context import RankContext
from .liveness import Liveness
from .records import (
    FINISHED,
    HAS_LEFT,
    NO_REPORT,
    NONE_FAILED,
    WAITING,
    Call,
    CallMade,
    FailedCall,
    FailedCalls,
    Progress,
    RankStatus,
    Standing,
    Waits,
    call_site,
    rebuilt,
)
from .store import decode, encode, ended_key, failures_key, report_key, standing_key
from .watchdog import RANKS_NAMED, BlockState, Watchdog, cause_of, timeout_error

CALLS_KEPT = 8
FAILURES_KEPT = 64  # of each rank, in the store
NO_BARRIER = contextlib.nullcontext(lambda: None)
logger = logging.getLogger("nn_parallel")


class Wait(NamedTuple):
    """A wait for other ranks in a call."""

    call: Call
    ranks: Sequence[int]
    phase: int  # of the call, which they have to reach
    deadline: float
    says: str  # begins what others are told of it; empty: they are not, as this rank may give up and go on


class Calls:
    """One rank's end of the calls that all ranks make."""

    def __init__(self, context: RankContext) -> None:
        self.context, self.connection = context, context.connection
        self.rank, self.world_size = context.rank, context.world_size
        self._others = [rank for rank in range(context.world_size) if rank != context.rank]
        self.nested_in: tuple[int, ...] = ()  # the ranks that run the present code, each for itself; empty: all
        self._liveness = Liveness(context, self.connection)
        self._failed_calls: dict[int, FailedCalls] = {}  # by rank, as read last
        self._report_key = report_key(context.rank)
        self._reports: dict[int, tuple[str, RankStatus]] = {}  # by rank, the last one, as text and as what it says
        self._entered_blocks: list[BlockState] = []  # that this rank is in, the innermost last
        self._watchdog: Watchdog | None = None
        self._spin = Spin()
        self._own_failures = NONE_FAILED  # on this rank
        self._warned_of = set[Call]()
        self.begin_generation(context.generation)
        context.on_leave.callback(self._leave)

    def begin_generation(self, generation: int) -> None:
        """Forget the calls so far: all ranks count from one again."""
        if generation != self.context.generation:
            self.context.begin_generation(generation)
        self.generation = generation
        self._number, self._phase = 0, WAITING
        self._last_call: Call | None = None
        self._made, self._made_text = deque[str](maxlen=CALLS_KEPT), ""  # encoded

    @contextlib.contextmanager
    def call(
        self,
        call: Call,
        timeout_s: float | None = None,
        barrier: contextlib.AbstractContextManager[Callable[[], object]] = NO_BARRIER,
    ) -> Iterator[bool]:
        """A call that one rank runs while the others wait at its end. Every rank makes it.

        Args:
            call: what errors name it by.
            timeout_s: how long the others wait.
            barrier: one after it, at which each rank arrives by calling what this yields, also if the call has failed.

        Yields:
            Whether this rank runs it; the others must do nothing in the ``with`` block.

        Raises:
            RankError: on every rank, when it raised, or the process that runs it ended before its end.
            RankTimeoutError: it did not finish within ``timeout_s``.
            ParallelError: the ranks are not in the same call; the message names both.
        """
        (runner,) = call.ranks
        deadline = deadline_of(timeout_s)
        failures: Mapping[int, BaseException] = {}
        with barrier as meet:
            self._begin(call)
            if self.rank == runner:
                outer, self.nested_in = self.nested_in, call.ranks  # as `nested` does, without another generator
                try:
                    yield True
                except Interrupted:
                    raise  # the block around it ends
                except BaseException as error:
                    failures = failures_in(cause_of(error, self._watchdog.reason if self._watchdog else None), runner)
                    self._post_failure(call, failures)
                    if not isinstance(error, Exception):
                        raise  # it is this rank's own way out
                else:
                    self._post(FINISHED)
                finally:
                    self.nested_in = outer
            else:
                yield False
                says = "" if timeout_s else "waits in"
                failures = self._await_outcome(Wait(call, call.ranks, FINISHED, deadline, says))
            meet()
        if failures:
            raise self._error(call, failures)

    def watch(self) -> Watchdog:
        """From now on free this rank from collectives that cannot end, and tell others where it stands."""
        if self._watchdog is None:
            self._watchdog = Watchdog(self.context, self._progress, self._entered_blocks)
        return self._watchdog

    @contextlib.contextmanager
    def nested(self, ranks: Sequence[int]) -> Iterator[None]:
        """While ``ranks`` run the code here: a call in it runs where it is named, and nobody waits."""
        outer, self.nested_in = self.nested_in, tuple(ranks)
        try:
            yield
        finally:
            self.nested_in = outer

    def call_of_all(self, function: str) -> Call:
        """Return the call of ``function`` that all ranks make at the present place of the user's code."""
        return Call(function, tuple(range(self.world_size)), call_site())

    def raise_if_nested(self, call: Call | str) -> None:
        if self.nested_in:
            where = f"inside the body of a function of {rank_names(self.nested_in)}"
            raise ParallelError(f"{call} is a call of all ranks, {where}: the others are not there. Make it outside.")

    # What this rank tells.

    def _begin(self, call: Call) -> None:
        self._raise_if_must_leave()
        self._number += 1
        self._phase = WAITING
        if call != self._last_call:
            self._last_call = call
            self._made.append(encode(CallMade(self._number, call.what, call.site)))
            self._made_text = ""

    def _progress(self) -> Progress:
        if self.generation != self.context.generation:  # a task of a pool has begun, and made no call yet
            return Progress(self.context.generation, 0, WAITING)
        return Progress(self.generation, self._number, self._phase)

    def _post(self, phase: int) -> None:
        self._phase = phase
        if not self._made_text:
            *earlier, last = self._made or ["null"]
            listed = ", ".join(earlier)
            self._made_text = f"{last}, {encode(f'[{listed}]')}"
        # A RankStatus as `encode` writes it; most of it is the same as before, and this is done at every call.
        progress = f"[{self.generation}, {self._number}, {phase}]"
        self.connection.set(self._report_key, f"[{progress}, {self._own_failures.total}, {self._made_text}]")

    def _post_failure(self, call: Call, failures: Mapping[int, BaseException]) -> None:
        """Make the failure of a call known: first what it is, so that whoever sees the report finds it."""
        described, earlier = self._described(failures), self._own_failures
        failed = FailedCall(self.generation, self._number, call.function, described)
        self._own_failures = FailedCalls(earlier.total + 1, (*earlier.kept, failed)[-FAILURES_KEPT:])
        self.connection.write(failures_key(self.rank), self._own_failures)
        self._post(FINISHED)
        self._flush()

    def _described(self, failures: Mapping[int, BaseException]) -> dict[int, Failure]:
        """The failures as plain data; what another rank has described stays in its words."""
        where = f"rank {self.rank} of {self.world_size}"
        others = {rank: getattr(e.__cause__, "failure", None) for rank, e in failures.items() if rank != self.rank}
        return {rank: others.get(rank) or Failure.of(error, where) for rank, error in failures.items()}

    def _flush(self) -> None:
        """Return once all that this rank has written is in the store: by a round trip."""
        self.connection.get(self._report_key)

    def tell_left(self) -> None:
        """Let the others know that this rank makes no more calls in this generation."""
        self._post(HAS_LEFT)

    def _leave(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None  # it refers to this
        with contextlib.suppress(RuntimeError):
            self.tell_left()
            self._flush()  # before this process ends
        self._liveness.close()

    def outlive_readers(self, deadline: float) -> None:
        """At the end of the process that holds the store: stay until the others have read what they wait for."""
        self.context.on_leave.close()
        for rank in range(self.world_size):
            with contextlib.suppress(RuntimeError):
                while rank != self.rank and not self._liveness.is_dead(rank):
                    report = self.connection.read(report_key(rank), RankStatus)
                    if report is None or report.progress.phase == HAS_LEFT or time.monotonic() > deadline:
                        break  # it has never come, or waits for nothing any more
                    time.sleep(times.END_EVERY_S)
        self._liveness.close()

    # What this rank learns.

    def _report_of(self, rank: int) -> RankStatus:
        """What ``rank`` says of itself in the present generation."""
        text = self.connection.get(report_key(rank)) or ""
        seen, report = self._reports.get(rank, ("", NO_REPORT))
        if text != seen:
            report = decode(RankStatus, report_key(rank), text)
            self._reports[rank] = text, report
        return report if report.progress.generation >= self.context.generation else NO_REPORT

    def _await_outcome(self, wait: Wait) -> dict[int, Exception]:
        """Return once the rank that runs the present call has done so: how it has failed; nothing if it succeeded."""
        (rank,), report = wait.ranks, NO_REPORT
        goal = Progress(self.generation, self._number, FINISHED)

        def has_run_it(waited: float) -> bool:
            nonlocal report
            report = self._report_of(rank)
            if report.progress.generation == self.generation:
                self._check_same_call(rank, report, wait.call)
                if report.progress < goal and report.progress.phase == HAS_LEFT:
                    raise self._left_error(rank, wait.call)
            has_run = report.progress >= goal  # also if it is in a later generation, unless this block has failed
            if report.progress.generation > self.generation or (waited > times.LOOK_UP_PEER_AFTER_S and not has_run):
                self._raise_if_generation_ended()
            return has_run

        self._poll(wait, has_run_it)
        return rebuilt(self._failures_of_call(rank, report))

    def _failures_of_call(self, rank: int, report: RankStatus) -> dict[int, Failure]:
        """Return how the present call has failed on ``rank``; nothing if it has succeeded.

        Args:
            rank: the one that has run it.
            report: its last one.

        Raises:
            ParallelError: it has failed too often since for that to be known.
        """
        failed = self._failed_calls.get(rank, NONE_FAILED)
        if report.failed_calls > failed.total:
            failed = self.connection.read(failures_key(rank), FailedCalls) or failed
            self._failed_calls[rank] = failed
        this = self.generation, self._number
        for each in failed.kept:
            if (each.generation, each.number) == this:
                return each.failures
        if failed.total > len(failed.kept) and this < (failed.kept[0].generation, failed.kept[0].number):
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {self._number}: whether that one "
                "failed is no longer known here."
            )
        return {}

    def _poll(self, wait: Wait, is_over: Callable[[float], bool]) -> None:
        """Return once ``is_over``, which is given the seconds waited so far.

        It looks again and again: a thread blocked in the store would see neither Ctrl-C nor a death.

        Raises:
            RankError: one of the ranks that are waited for has died.
            RankTimeoutError: the time is over.
        """
        has_told, warn_after_s = False, times.WARN_AFTER_S
        self.connection.answer_by = wait.deadline
        self._spin.offer_core()  # where ranks share cores, it may be the one that is waited for who needs this one
        try:
            for waited in looks(*times.POLL):
                # Before the look, which sees their last words.
                dead = self._liveness.dead(wait.ranks) if waited > times.LOOK_UP_PEER_AFTER_S else []
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
            self.connection.answer_by = math.inf
            if self._watchdog is not None:
                self._watchdog.waits = None

    def _tell(self, wait: Wait) -> None:
        """Let the others know that this rank waits, and for whom."""
        if self._phase == WAITING:
            self._post(WAITING)  # one that waits for this rank, in another call, sees that
        if wait.says and self._watchdog is not None:
            self._watchdog.waits = Waits(f"{wait.says} {wait.call}", tuple(wait.ranks), self._goal(wait))

    def _missing(self, wait: Wait) -> list[int]:
        goal = self._goal(wait)
        return [rank for rank in wait.ranks if self._report_of(rank).progress < goal]

    def _goal(self, wait: Wait) -> Progress:
        return Progress(self.generation, self._number, wait.phase)

    def _where(self, rank: int) -> str:
        """Return the state of another rank, from its watchdog, or else from its own last report."""
        standing = self.connection.read(standing_key(rank), Standing)
        where = standing.where if standing else self._report_of(rank).describe()
        return f"is stopped by a signal, and {where}" if self._liveness.is_stopped(rank) else where

    def _warn(self, missing: list[int], call: Call, waited: float) -> None:
        """Log for whom this rank waits, once for each call site."""
        if missing and call not in self._warned_of:
            self._warned_of.add(call)
            where = " ".join(f"Rank {rank} {self._where(rank)}." for rank in missing[:RANKS_NAMED])
            place = call, rank_names(missing), where, " ..." * (len(missing) > RANKS_NAMED)
            logger.warning("Rank %d has waited %.0f s in %s for %s. %s%s", self.rank, waited, *place)

    def _raise_if_must_leave(self) -> None:
        """Raise again in a block that this rank was to leave: user code has caught what was raised, and gone on."""
        if self._entered_blocks and self._entered_blocks[-1].must_leave:
            raise Interrupted

    def _raise_if_generation_ended(self) -> None:
        """Raise in a block if the generation has ended: this is the block that has failed."""
        if self._entered_blocks and self._has_generation_ended():
            self._entered_blocks[-1].must_leave = True
            raise Interrupted

    def _has_generation_ended(self) -> bool:
        return self.connection.get(ended_key(self.generation)) is not None

    def _check_same_call(self, rank: int, report: RankStatus, call: Call) -> None:
        """Raise if ``rank`` makes, or made, another call under the number of the present one."""
        if report.progress.call < self._number:
            return
        theirs = report.made_as(self._number)
        # None: the rank is so far ahead that it has forgotten. Its outcome is still told by its list of failures.
        if theirs is not None and theirs.what != call.what:
            self._post(self._phase)  # where this rank is, before it goes: the other may wait for it and must see it too
            raise ParallelError(
                f"The ranks are not in the same call: rank {rank} made {theirs.what} at {theirs.site}, and rank "
                f"{self.rank} made {call}. Every rank must make the same calls in the same order: look for one inside "
                "`if rank == ...`."
            )

    def _gone_error(self, rank: int, call: Call) -> ParallelError:
        """The error of this rank, which waits for one whose process has ended."""
        if self._report_of(rank).progress.phase == HAS_LEFT:
            return self._left_error(rank, call)
        return self._error(call, {rank: self._liveness.death(rank, call)})

    def _left_error(self, rank: int, call: Call) -> ParallelError:
        return ParallelError(
            f"Rank {rank} has left, and rank {self.rank} waits for it in {call}. Every rank must make the same calls."
        )

    def _timeout_error(self, missing: list[int], call: Call, waited: float) -> RankTimeoutError:
        """The error of this rank, which has waited for too long."""
        standings = {}
        for rank in missing[:RANKS_NAMED]:
            standing = self.connection.read(standing_key(rank), Standing) or Standing("", "", {}, None)
            standings[rank] = standing._replace(where=self._where(rank))
        what = f"Rank {self.rank} waited {waited:.1f} s for {rank_names(missing)} in {call}"
        why = f"Every rank must call {call.function}, and within timeout="
        return timeout_error(f"{what}. {why}", missing, standings)

    def _error(self, call: Call, failures: Mapping[int, BaseException]) -> ParallelError:
        """The error of a call or block: a timeout if the cause is one."""
        errors = exceptions_in(failures)
        cause = next(iter(errors.values()), None)
        if isinstance(cause, RankTimeoutError):
            return RankTimeoutError(str(cause), ranks=cause.ranks, stacks=cause.stacks)
        return rank_error(call.function, self.world_size, errors)


def deadline_of(timeout_s: float | None) -> float:
    """Return when a time is over that begins now; never, if there is no limit."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def exceptions_in(failures: Mapping[int, BaseException]) -> dict[int, Exception]:
    return {rank: error for rank, error in failures.items() if isinstance(error, Exception)}


def failures_in(error: BaseException, rank: int) -> dict[int, BaseException]:
    """What ``error`` of ``rank`` tells of which ranks."""
    if isinstance(error, RankError):
        return dict(error.failures)
    if isinstance(error, RankTimeoutError) and error.ranks:
        return {error.ranks[0]: error}
    return {rank: error.with_traceback(user_frames(error))}
