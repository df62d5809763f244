"""How the outcome of what all ranks do together reaches every rank: through the store, beside the collectives.

Each rank overwrites one key, its *report*: how many calls it has made, how far it is in the last one, how many failed,
and which they were. A rank that needs another's outcome polls that key until the other has got as far as its own call.
So success costs the rank that runs one `set` that awaits no reply, and the number of keys does not depend on the number
of calls. A failure adds to a second key per rank, the list of its last failures, for the ranks that lag behind.

Calls are numbered 1, 2, ... on each rank; ranks that make the same calls agree on the numbers, and where they do not,
the functions under one number differ and the error names both. A *section* is such a call.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from ..errors import Failure, ParallelError, RankError, RankTimeoutError, rank_error, user_frames
from ..launch.context import RankContext
from ..launch.group import close_group
from ..signals import Interrupted
from ..spinning import Spin
from .long_waits import SAY_WHAT_FOR_AFTER_S, LongWaits
from .peers import FAILURES_KEPT, Peers, format_list, lost_store_names_its_host
from .records import (
    FINISHED,
    GONE,
    WAITING,
    Call,
    Failed,
    Progress,
    Report,
    foreign_value,
    not_in_step,
    timed_out,
)
from .watcher import POLL_MAX_S, POLL_MIN_S, POLL_SHARE, Watched, Watcher, follows

CALLS_KEPT = 16
ANNOUNCE_AFTER_S = 0.05
LOOK_UP_PEER_AFTER_S = 0.01
SEEK_CAUSE_S = 0.5
LINGER_AFTER_FAILURE_S = 1.0


class Sections:
    """One rank's end of the calls that all ranks make together."""

    def __init__(self, context: RankContext) -> None:
        self.context, self.store = context, context.store
        self.rank, self.world_size = context.rank, context.world_size
        self.nested_in: tuple[int, ...] = ()  # the ranks of the section whose body runs now on this rank
        self._peers = Peers(context, context.store)
        self._report_key, self._names_host = f"report/{context.rank}", lost_store_names_its_host(context)
        self._watching: Watcher | None = None
        self._spin = Spin()
        self._kept: deque[Failed] = deque(maxlen=FAILURES_KEPT)  # of the failed sections
        self._failures_made = 0
        self._failed_at = (0, 0)  # generation and call
        self._long_waits = LongWaits(context, self._peers)
        self._blocks: list[Watched] = []  # that this rank is in, the innermost last
        self.begin_generation(context.generation)
        context.on_leave.callback(self._leave)

    def begin_generation(self, generation: int) -> None:
        """Forget the calls so far: all ranks count from one again."""
        if generation != self.context.generation:
            self.context.begin_generation(generation)
        self.generation = generation
        self._calls, self._phase, self._announced_in_call = 0, WAITING, 0
        self._last_call: Call | None = None
        self._history: deque[str] = deque(maxlen=CALLS_KEPT)
        self._peers.unwaited.clear()
        self._peers.late.clear()

    @contextlib.contextmanager
    def section(
        self,
        call: Call,
        *,
        barrier: bool = False,
        timeout: timedelta | None = None,
    ) -> Iterator[bool]:
        """A block that ``call.ranks`` run while the others wait at its end. Every rank enters it.

        Yields:
            Whether this rank runs it; the others must do nothing in the block.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
            RankTimeoutError: ``call.ranks`` did not finish within ``timeout``.
            ParallelError: the ranks are not in the same section; the message names both.
        """
        self._raise_if_doomed()
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        if self._peers.unwaited:
            self._peers.look_for_late_failures(self._calls + 1)
        self._begin(call)
        if self.rank in call.ranks:
            watched = Watched(call, self._calls) if call.together else None
            outer, self.nested_in = self.nested_in, call.ranks  # as `nested` does, without another generator
            try:
                if watched is None:
                    yield True
                else:
                    watcher = self.watch()
                    with watcher.entered(watched), watcher.watching(watched):
                        yield True
            except BaseException as error:
                self._fail_section(call, watched.cause(error) if watched else error, watched)
                raise  # as it is: that is no failure of this call, or this rank's own way out
            finally:
                self.nested_in = outer
            self._post(FINISHED)
        else:
            yield False
        says = "waits in" if timeout is None else ""
        if call.wait:
            self._await_outcomes(call, deadline, says)
        else:
            for rank in call.ranks:
                if rank != self.rank:
                    self._peers.unwaited.setdefault(rank, set()).add(self._calls)
        if barrier:
            self._barrier(call, deadline, says)

    def raise_late_failure(self) -> None:
        """Raise what was reported of an earlier call, which this rank did not wait for.

        To be called when this rank has done its part of the present call, or it would fall out of step.
        """
        if self._peers.late:
            oldest, self._peers.late = self._peers.late[0], []
            function = f"{oldest.function}, for which nobody waited,"
            raise rank_error(function, self.world_size, oldest.rebuild())

    def watch(self) -> Watcher:
        """From now on free this rank from collectives that cannot end, and tell others where it stands."""
        if self._watching is None:
            with self._names_host:
                self._watching = Watcher(self.context, self._progress)
        return self._watching

    def _raise_if_doomed(self) -> None:
        if self._blocks and self._blocks[-1].doom is not None:
            raise Interrupted

    @contextlib.contextmanager
    def nested(self, ranks: Sequence[int]) -> Iterator[None]:
        """While ``ranks`` run one and the same code here, sections inside it are no calls of their own."""
        outer, self.nested_in = self.nested_in, tuple(ranks)
        try:
            yield
        finally:
            self.nested_in = outer

    # What this rank tells.

    def _begin(self, call: Call) -> None:
        self._calls += 1
        self._phase = WAITING
        if call != self._last_call:
            self._last_call = call
            self._history.append(f"\n{self._calls}\t{call.what}\t{call.place}")

    def _fail_section(self, call: Call, error: BaseException, watched: Watched | None) -> None:
        """Tell the others of ``error``, and raise what is known of the failure.

        What only follows from the failure of another rank is told as that. Returns after a SystemExit or
        KeyboardInterrupt, which is this rank's own way out, and if ``error`` frees it from what is around this call.
        """
        if isinstance(error, Interrupted) and (self._is_freed or watched is None or not watched.freed):
            return
        found: dict[int, Exception] = {}
        freed = call.together and follows(error)
        if freed:
            self._raise_if_block_failed()
            self._peers.collect(call, self._calls, found, SEEK_CAUSE_S)
        failures = found or self._failures_in(error)
        self._post_failure(call, failures)
        if freed or isinstance(error, Exception):
            failed = self._rank_error(call, exceptions_in(failures), 0.0 if freed else SEEK_CAUSE_S)
            try:
                raise failed from None
            finally:
                del failed  # it would live in a cycle with its traceback
        if call.together:
            self._close_group()

    def _failures_in(self, error: BaseException) -> dict[int, BaseException]:
        """What ``error`` of this rank tells of which ranks."""
        if isinstance(error, RankError):
            return dict(error.failures)
        if isinstance(error, RankTimeoutError) and error.ranks:
            return dict.fromkeys(error.ranks, error)
        return {self.rank: error.with_traceback(user_frames(error))}

    def _close_group(self) -> None:
        """After a failed section: some ranks may have made a group in it that others have not."""
        close_group(self.context)
        self.context.begin_groups(after_call=self._calls)

    def _progress(self) -> Progress:
        if self.generation != self.context.generation:  # a task of a pool has begun, and made no call yet
            return Progress(self.context.generation, 0, WAITING)
        return Progress(self.generation, self._calls, self._phase)

    def _post(self, phase: int) -> None:
        self._phase = phase
        report = Report(Progress(self.generation, self._calls, phase), self._failures_made, "".join(self._history))
        with self._names_host:
            self.store.set(self._report_key, report.format())

    def _post_failure(self, call: Call, failures: Mapping[int, BaseException]) -> None:
        """Make the failure of a section known: its description first, so that whoever sees the report finds it."""
        self._kept.append(Failed(self.generation, self._calls, 0, call.function, self._described(failures)))
        self._failures_made += 1
        self._failed_at = (self.generation, self._calls)
        with self._names_host:
            self.store.set(f"failed/{self.rank}", format_list(self._failures_made, self._kept))
        self._post(FINISHED)
        self._peers.claim_first(self._calls)

    def _described(self, failures: Mapping[int, BaseException]) -> dict[int, Failure]:
        return {rank: Failure.of(error, f"rank {rank} of {self.world_size}") for rank, error in failures.items()}

    def _leave(self) -> None:
        if self._watching is not None:
            self._watching.stop()
            self._watching = None  # it refers to this
        with contextlib.suppress(RuntimeError):
            self._post(GONE)
            self._peers.text("?")  # a round trip: the report is there before this process ends
        self._peers.close()

    def outlive_readers(self, deadline: float) -> None:
        """At the end of the process that holds the store: stay until the others have read what they wait for."""
        self.context.on_leave.close()
        if self._failed_at == (self.generation, self._calls):
            deadline = min(deadline, time.monotonic() + LINGER_AFTER_FAILURE_S)
        for rank in range(self.world_size):
            with contextlib.suppress(RuntimeError, ValueError):
                while rank != self.rank and not self._peers.is_dead(rank):
                    report = self._peers.text(f"report/{rank}")
                    if time.monotonic() > deadline or (report and Report.parse(report).progress.phase == GONE):
                        break
                    time.sleep(POLL_MAX_S / 10)
        self._peers.close()

    # What this rank learns.

    def _await_outcomes(self, call: Call, deadline: float | None, says: str) -> None:
        for rank in call.ranks:
            if rank != self.rank:
                report = self._await(rank, FINISHED, call, deadline, says)
                if failures := self._peers.failures_of(rank, report, self._calls):
                    raise self._rank_error(call, failures)

    def _barrier(self, call: Call, deadline: float | None, says: str, warn_after_s: float | None = None) -> None:
        """Return once every rank is here: a dissemination barrier (Hensgen, Finkel, Manber 1988), log2(n) rounds."""
        distance, phase = 1, FINISHED + 1
        while distance < self.world_size:
            self._post(phase)
            self._await((self.rank - distance) % self.world_size, phase, call, deadline, says, warn_after_s)
            distance, phase = distance * 2, phase + 1

    def _await(
        self,
        rank: int,
        phase: int,
        call: Call,
        deadline: float | None,
        says: str,
        warn_after_s: float | None = None,
    ) -> Report:
        """Poll until ``rank`` is as far as ``phase`` of the present call.

        Polls, sleeping 5 % of the time waited so far: a thread blocked in the store would see neither Ctrl-C nor a
        death. ``says`` begins what this rank tells of its wait; it is empty where the rank may give up and go on.
        """
        goal = Progress(self.generation, self._calls, phase)
        # In a barrier a rank waits, by way of others, for all.
        needed = [rank] if phase == FINISHED else [r for r in range(self.world_size) if r != self.rank]
        dead: list[int] = []
        start, polls, failed = time.perf_counter(), 0, False
        until = Progress(self.generation, self._calls, min(phase, FINISHED + 1))  # of a barrier, its beginning
        steps, step_at = self._long_waits.steps(call, needed, until, says, warn_after_s), SAY_WHAT_FOR_AFTER_S
        self._spin.offer_core()  # where ranks share cores, it may be the one that is waited for who needs this one
        while True:
            report = self._peers.report(rank)
            if report.progress.generation > self.generation:  # it has failed in a block
                self._raise_if_block_failed()
                return report  # in one that comes after this call: it was here
            self._check_same_call(rank, report, call)
            if report.progress >= goal:
                return report
            if report.progress.phase == GONE:
                raise ParallelError(
                    f"Rank {rank} has left after {report.progress.call} calls, and rank {self.rank} waits for it in "
                    f"call {self._calls}: {call}. Every rank must make the same calls."
                )
            for ended in dead:
                if ended == rank or self._peers.report(ended).progress < self._end_of_barrier:
                    raise self._rank_error(call, {ended: self._peers[ended].death(call)})
            if failed:
                raise self._rank_error(call, {})
            waited = time.perf_counter() - start
            if deadline is not None and time.monotonic() > deadline:
                raise timed_out(self.rank, rank, report, call, self._calls, waited)
            polls += 1
            if polls > 1:
                time.sleep(min(max(waited * POLL_SHARE, POLL_MIN_S), POLL_MAX_S))
            if waited > ANNOUNCE_AFTER_S and self._phase == WAITING and self._announced_in_call != self._calls:
                self._announced_in_call = self._calls
                self._post(WAITING)  # so that a rank that waits for us, in another call, sees it
            # What is seen here counts after the next read only: that shows the last words, or that the call was over.
            failed = call.together and phase == FINISHED and self._peers.first_failed(self._calls) is not None
            if waited > LOOK_UP_PEER_AFTER_S:
                dead = [r for r in needed if self._peers.is_dead(r)]
                self._raise_if_block_failed()
            if waited > step_at:
                step_at = next(steps)

    @property
    def _end_of_barrier(self) -> Progress:
        return Progress(self.generation, self._calls, FINISHED + (self.world_size - 1).bit_length())

    @property
    def _is_freed(self) -> bool:
        """Whether this rank has been freed from the innermost block."""
        return bool(self._blocks) and self._blocks[-1].freed

    def _raise_if_block_failed(self) -> None:
        if self._blocks and self._peers.failed_block(self._blocks[-1].number) is not None:
            self._blocks[-1].freed = True
            raise Interrupted

    def _check_same_call(self, rank: int, report: Report, call: Call) -> None:
        """Raise if ``rank`` makes, or made, another call under the number of the present one."""
        if report.progress.call < self._calls:
            return
        try:
            theirs = report.made_as(self._calls)
        except ValueError:
            raise foreign_value(f"report/{rank}", report.history) from None
        # None: the rank is so far ahead that it has forgotten. Its outcome is still told by its list of failures.
        if theirs is not None and theirs[0] != call.what:
            self._post(self._phase)  # where this rank is, before it goes: the other may wait for it and must see it too
            raise not_in_step(self.rank, rank, theirs, call, self._calls)

    def _rank_error(self, call: Call, failures: dict[int, Exception], seek_s: float = SEEK_CAUSE_S) -> ParallelError:
        """All known failures of the present section, the cause first; closes the group if several ranks ran."""
        if call.together:
            self._peers.collect(call, self._calls, failures, seek_s)
            cause = self._peers.first_failed(self._calls)
            if cause is None:
                cause = next((rank for rank in failures if rank != self.rank), self.rank)
            order = sorted(failures, key=lambda rank: rank != cause)
            unknown = ParallelError(f"Rank {cause} failed; how is no longer known here.")
            failures = {rank: failures[rank] for rank in order} or {cause: unknown}
            self._close_group()  # a peer may sit in a collective of it
        return self._error(call, failures)

    def _error(self, call: Call, failures: Mapping[int, Exception]) -> ParallelError:
        """The error of a section or block: a timeout if the cause is one."""
        silent = {rank: error for rank, error in failures.items() if isinstance(error, RankTimeoutError)}
        if silent and next(iter(failures)) in silent:
            stacks = {rank: str(error) for rank, error in sorted(silent.items())}
            return RankTimeoutError("\n".join(dict.fromkeys(stacks.values())), ranks=list(stacks), stacks=stacks)
        return rank_error(call.function, self.world_size, failures)


def exceptions_in(failures: Mapping[int, BaseException]) -> dict[int, Exception]:
    return {rank: error for rank, error in failures.items() if isinstance(error, Exception)}
