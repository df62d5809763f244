"""How the outcome of what all ranks do together reaches every rank: through the store, beside the collectives.

Each rank overwrites one key, its *report*: how many calls it has made, how far it is in the last one, how many failed,
and which they were. A rank that needs another's outcome polls that key until the other has got as far as its own call.
So success costs the rank that runs one `set` that awaits no reply, and the number of keys does not depend on the number
of calls. A failure adds to a second key per rank, the list of its last failures, for the ranks that lag behind.

Calls are numbered 1, 2, ... on each rank; ranks that make the same calls agree on the numbers, and where they do not,
the functions under one number differ and the error names both. A *section* is such a call. A *block* holds any number
of them and is run by all ranks; when it fails on one, all leave it and begin a new *term*, counting from one again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

from .ddp import close_group
from .errors import Failure, ParallelError, RankError, WorkerDiedError, lost_connection, rank_error, user_frames
from .peers import POLL_MAX_S, POLL_MIN_S, POLL_SHARE, Peer, Watcher, claim_first, first_to_claim
from .reports import (
    FAILED,
    FINISHED,
    GONE,
    NO_REPORT,
    WAITING,
    Call,
    Failed,
    Progress,
    Report,
    foreign_value,
    format_failed,
    not_in_step,
    timed_out,
)
from .world import Membership


class Channel:
    """One rank's end of the outcomes."""

    def __init__(self, member: Membership) -> None:
        self.member, self.store = member, member.store
        self.rank, self.world_size = member.rank, member.world_size
        self.nested_in: tuple[int, ...] = ()  # the ranks of the section whose body runs now on this rank
        self._peers = {rank: Peer(rank, self._read_text) for rank in range(self.world_size)}
        self._watcher: Watcher | None = None
        self._kept: deque[Failed] = deque(maxlen=FAILURES_KEPT)
        self._failures_made = 0
        self.begin_term(member.term)
        member.on_leave.callback(self._leave)

    def begin_term(self, term: int) -> None:
        """Forget the calls so far: all ranks count from one again."""
        self.term = self.member.term = term
        self._calls, self._phase, self._announced_in_call = 0, WAITING, 0
        self._history: deque[tuple[int, Call]] = deque(maxlen=CALLS_KEPT)
        self._history_text = ""
        self._unwaited: dict[int, tuple[int, str]] = {}  # rank -> its last call that this rank did not wait for

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
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        late = self._late_failure() if self._unwaited else None
        self._begin(call)
        try:
            if self.rank in call.ranks:
                with self._posting_outcome(call):
                    yield True
            else:
                yield False
            if call.wait:
                self._await_outcomes(call, deadline)
            else:
                self._unwaited.update({rank: (self._calls, call.function) for rank in call.ranks if rank != self.rank})
            if barrier:
                self._barrier(call, deadline)
        except ParallelError:
            for rank in call.ranks:  # what they still report of this call is answered by this error
                self._peers[rank].settled = (self.term, self._calls)
            if late is None:
                raise
        # A late failure is raised at the end: this rank has done its part, and all ranks still count alike.
        if late is not None:
            raise late

    @contextlib.contextmanager
    def block(self, call: Call) -> Iterator[None]:
        """A block that all ranks run, sections in it included, and leave together; a failure on one is raised on all.

        A failure closes the process group and begins a new term.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
        """
        if self.nested_in:
            raise ParallelError(
                f"{call} is a call of all ranks, inside the body of a function of rank "
                f"{', '.join(map(str, self.nested_in))}: the others are not there. Make it outside."
            )
        term = self.term
        try:
            with self._watching(self._first_key(0)):
                yield
            self._begin(call)
            self._barrier(call, None)
        except BaseException as error:
            self._post_failure(0, error, FAILED)
            if isinstance(error, Exception):
                failed = self._rank_error(call, 0, self._own(error))
            self.begin_term(term + 1)
            self.member.groups_made = 0  # the ranks may have made unequally many; groups are named by their term too
            if not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt: this rank's own way out
                raise
            raise failed from None

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
        if not self._history or self._history[-1][1] != call:
            self._history.append((self._calls, call))
            self._history_text = "".join(f"\n{first}\t{c.what}\t{c.place}" for first, c in self._history)

    @contextlib.contextmanager
    def _posting_outcome(self, call: Call) -> Iterator[None]:
        watching = self._watching(self._first_key(self._calls)) if call.together else _NOTHING
        try:
            with self.nested(call.ranks), watching:
                yield
        except BaseException as error:
            self._post_failure(self._calls, error, FINISHED)
            if not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt: this rank's own way out
                raise
            raise self._rank_error(call, self._calls, self._own(error)) from None
        self._post(FINISHED)

    def _own(self, error: Exception) -> dict[int, Exception]:
        """``error`` as failures by rank: what a `RankError` tells of others is theirs."""
        if isinstance(error, RankError):
            return dict(error.failures)
        return {self.rank: error.with_traceback(user_frames(error))}

    def _post(self, phase: int) -> None:
        self._phase = phase
        report = Report(Progress(self.term, self._calls, phase), self._failures_made, self._history_text)
        with self._lost_store_names_its_host():
            self.store.set(f"report/{self.rank}", report.format())

    def _post_failure(self, number: int, error: BaseException, phase: int) -> None:
        """Make ``error`` known: its description first, so that whoever sees the report finds it."""
        known = error.failures if isinstance(error, RankError) else {self.rank: error}
        described = {rank: Failure.of(e, f"rank {rank} of {self.world_size}") for rank, e in known.items()}
        failed = Failed(self.term, number, described)
        self._kept.append(failed)
        self._failures_made += 1
        with self._lost_store_names_its_host():
            self.store.set(f"failed/{self.rank}", format_failed(self._failures_made, list(self._kept)))
        self._post(phase)
        with self._lost_store_names_its_host():
            claim_first(self.store, self._first_key(number), self.rank)

    def _first_key(self, number: int) -> str:
        return f"first/{'section' if number else 'block'} {self.term} {number}"

    def _first_failed(self, number: int) -> int | None:
        """The rank that failed first in call ``number``, or in the block if that is 0."""
        with self._lost_store_names_its_host():
            return first_to_claim(self.store, self._first_key(number))

    def _leave(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        with contextlib.suppress(RuntimeError):
            self._post(GONE)
            self._first_failed(0)  # a round trip: the report is there before this process ends
        for peer in self._peers.values():
            peer.close()

    def outlive_readers(self, deadline: float) -> None:
        """At the end of the process that holds the store: stay until the others have read what they wait for."""
        self.member.on_leave.close()
        if self._kept and (self._kept[-1].term, self._kept[-1].call) == (self.term, self._calls):
            deadline = min(deadline, time.monotonic() + LINGER_AFTER_FAILURE_S)
        for rank, peer in self._peers.items():
            with contextlib.suppress(RuntimeError, ValueError):
                while rank != self.rank and not peer.is_dead():
                    report = self._read_text(f"report/{rank}")
                    if time.monotonic() > deadline or (report and Report.parse(report).progress.phase == GONE):
                        break
                    time.sleep(POLL_MAX_S / 10)
            peer.close()

    # What this rank learns.

    def _await_outcomes(self, call: Call, deadline: float | None) -> None:
        for rank in call.ranks:
            if rank != self.rank:
                report = self._await(rank, FINISHED, call, deadline)
                self._unwaited.pop(rank, None)
                if failures := self._failures_of(rank, report, self._calls):
                    raise self._rank_error(call, self._calls, failures)

    def _barrier(self, call: Call, deadline: float | None) -> None:
        """Return once every rank is here: a dissemination barrier (Hensgen, Finkel, Manber 1988), log2(n) rounds."""
        distance, phase = 1, FINISHED + 1
        while distance < self.world_size:
            self._post(phase)
            self._await((self.rank - distance) % self.world_size, phase, call, deadline)
            distance, phase = distance * 2, phase + 1

    def _await(self, rank: int, phase: int, call: Call, deadline: float | None) -> Report:
        """Poll until ``rank`` is as far as ``phase`` of the present call.

        Polls, sleeping 5 % of the time waited so far: a thread blocked in the store would see neither Ctrl-C nor a
        death.
        """
        goal, peer = Progress(self.term, self._calls, phase), self._peers[rank]
        start, polls, dead = time.perf_counter(), 0, False
        while True:
            report = self._read(rank)
            failed_block = report.progress.phase == FAILED or report.progress.term > self.term
            if failed_block and (failures := self._failures_of(rank, report, 0)):
                raise self._rank_error(call, 0, failures)
            self._check_same_call(rank, report, call)
            if report.progress >= goal:
                return report
            if report.progress.phase == GONE:
                raise ParallelError(
                    f"Rank {rank} has left after {report.progress.call} calls, and rank {self.rank} waits for it in "
                    f"call {self._calls}: {call}. Every rank must make the same calls."
                )
            if dead:
                raise self._rank_error(call, self._calls, {rank: peer.death(call)})
            if call.together and self._first_failed(self._calls) is not None:
                raise self._rank_error(call, self._calls, {})
            waited = time.perf_counter() - start
            if deadline is not None and time.monotonic() > deadline:
                raise timed_out(self.rank, rank, report, call, self._calls, waited)
            polls += 1
            if polls > 1:
                time.sleep(min(max(waited * POLL_SHARE, POLL_MIN_S), POLL_MAX_S))
            if waited > ANNOUNCE_AFTER_S and self._phase == WAITING and self._announced_in_call != self._calls:
                self._announced_in_call = self._calls
                self._post(WAITING)  # so that a rank that waits for us, in another call, sees it
            if waited > LOOK_UP_PEER_AFTER_S:
                dead = peer.is_dead()  # before the next read: its last words count

    def _read(self, rank: int) -> Report:
        text = self._read_text(f"report/{rank}")
        if text is None:
            return NO_REPORT
        try:
            report = Report.parse(text)
        except ValueError:
            raise foreign_value(f"report/{rank}", text) from None
        return report if report.progress.term >= self.term else NO_REPORT

    def _read_text(self, key: str) -> str | None:
        """The value of ``key``, None if there is none: one round trip, where `get` takes two and waits."""
        with self._lost_store_names_its_host():
            text = self.store.compare_set(key, "?", "?").decode(errors="replace")
        return None if text == "?" else text

    def _check_same_call(self, rank: int, report: Report, call: Call) -> None:
        """Raise if ``rank`` makes, or made, another call under the number of the present one."""
        if report.progress.call < self._calls and report.progress.term <= self.term:
            return
        try:
            theirs = report.made_as(self._calls) if report.progress.term == self.term else "a later block\tunknown"
        except ValueError:
            raise foreign_value(f"report/{rank}", report.history) from None
        # None: the rank is so far ahead that it has forgotten. Its outcome is still told by its list of failures.
        if theirs is not None and theirs.split("\t")[0] != call.what:
            self._post(self._phase)  # where this rank is, before it goes: the other may wait for it and must see it too
            raise not_in_step(self.rank, rank, theirs, call, self._calls)

    def _failures_of(self, rank: int, report: Report, number: int) -> dict[int, Exception]:
        """What ``rank`` reports up to call ``number`` (0: of the block) and this rank has not raised; the oldest."""
        peer = self._peers[rank]
        if report.failures_made > peer.failures_seen:
            peer.take_failures(self._read_text(f"failed/{rank}") or "")
        due = [f for f in peer.failures if f.term == self.term and (0 < f.call <= number or f.call == number == 0)]
        for failed in due:
            peer.failures.remove(failed)
        unsettled = [f for f in due if not f.call or (f.term, f.call) > peer.settled]
        if not unsettled and number and (self.term, number) < peer.forgotten:
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {number}: whether that one failed "
                "is no longer known here."
            )
        return unsettled[0].rebuild() if unsettled else {}

    def _late_failure(self) -> RankError | None:
        """The failure of an earlier call that this rank did not wait for, if one has been reported."""
        for rank, (number, function) in list(self._unwaited.items()):
            report = self._read(rank)
            if report.progress >= Progress(self.term, number, FINISHED):
                del self._unwaited[rank]
            if failures := self._failures_of(rank, report, self._calls):
                return rank_error(f"{function}, for which nobody waited,", self.world_size, failures)
        return None

    def _rank_error(self, call: Call, number: int, failures: dict[int, Exception]) -> RankError:
        """All known failures of a call (0: of the block), the cause first; closes the group if several ranks ran."""
        if call.together:
            self._collect(call, number, failures)
            first = self._first_failed(number)
            cause = first if first is not None else next((rank for rank in failures if rank != self.rank), self.rank)
            order = sorted(failures, key=lambda rank: (lost_connection(failures[rank]), rank != cause))
            unknown = ParallelError(f"Rank {cause} failed; how is no longer known here.")
            failures = {rank: failures[rank] for rank in order} or {cause: unknown}
            close_group(self.member)  # a peer may sit in a collective of it
        return rank_error(call.function, self.world_size, failures)

    def _collect(self, call: Call, number: int, failures: dict[int, Exception]) -> None:
        """Add what other ranks have reported; with nothing but lost connections, wait a little for the cause."""
        deadline = time.monotonic() + SEEK_CAUSE_S
        while True:
            for rank in call.ranks:
                if rank == self.rank or rank in failures:
                    continue
                dead = self._peers[rank].is_dead()
                report = self._read(rank)
                for other, failure in self._failures_of(rank, report, number).items():
                    failures.setdefault(other, failure)
                if dead and report.progress < Progress(self.term, self._calls, FINISHED):
                    failures.setdefault(rank, self._peers[rank].death(call))
            found_cause = not all(lost_connection(error) for error in failures.values())
            if found_cause or time.monotonic() > deadline:
                return
            time.sleep(POLL_MAX_S / 10)

    @contextlib.contextmanager
    def _watching(self, first_key: str) -> Iterator[None]:
        """While the body runs here: end this rank's collectives as soon as another rank fails in the same call."""
        if self._watcher is None:
            with self._lost_store_names_its_host():
                self._watcher = Watcher(self.member)
        with self._watcher.watching(first_key):
            yield

    @contextlib.contextmanager
    def _lost_store_names_its_host(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            host = self.member.store_host
            if host is None or host == self.rank:
                raise ParallelError(f"The store through which the ranks talk is gone: {error}") from error
            died = WorkerDiedError(f"Rank {host}, which holds the store of all, is gone: {error}", rank=host, pid=0)
            raise rank_error("The connection", self.world_size, {host: died}) from error


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

FAILURES_KEPT = 64
CALLS_KEPT = 16
ANNOUNCE_AFTER_S = 0.05
LOOK_UP_PEER_AFTER_S = 0.01
SEEK_CAUSE_S = 0.5
LINGER_AFTER_FAILURE_S = 1.0
