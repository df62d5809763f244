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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from .ddp import close_group
from .errors import Failure, ParallelError, RankError, RankTimeoutError, lost_connection, rank_error, user_frames
from .interrupt import Interrupted
from .peers import FAILURES_KEPT, LEFT_KEY, Peers, claim_first, claim_key, lost_store_names_its_host
from .reports import (
    FAILED,
    FINISHED,
    GONE,
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
from .watcher import POLL_MAX_S, POLL_MIN_S, POLL_SHARE, Watched, Watcher
from .world import Membership

CALLS_KEPT = 16
ANNOUNCE_AFTER_S = 0.05
LOOK_UP_PEER_AFTER_S = 0.01
SEEK_CAUSE_S = 0.5
TIMEOUT_MARGIN_S = 0.5  # for the silent rank to tell where it stands, before those that wait say that it is silent
LINGER_AFTER_FAILURE_S = 1.0


class Channel:
    """One rank's end of the outcomes."""

    def __init__(self, member: Membership) -> None:
        self.member, self.store = member, member.store
        self.rank, self.world_size = member.rank, member.world_size
        self.nested_in: tuple[int, ...] = ()  # the ranks of the section whose body runs now on this rank
        self._peers = Peers(member, member.store)
        self._watching: Watcher | None = None
        self._kept: deque[Failed] = deque(maxlen=FAILURES_KEPT)
        self._failures_made = 0
        self._blocks_entered = 0
        self._blocks: list[Watched] = []  # that this rank is in, the innermost last
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
        self._raise_if_doomed()
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
    def block(self, call: Call, timeout: timedelta | None = None, *, from_end: bool = False) -> Iterator[None]:
        """A block that all ranks run, sections in it included, and leave together; a failure on one is raised on all.

        A failure frees the others from what they sit in, closes the process group and begins a new term.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
            RankTimeoutError: on every rank, when one took longer than ``timeout``: from when it entered, or with
                ``from_end`` from when the first rank was through.
        """
        if self.nested_in:
            raise ParallelError(
                f"{call} is a call of all ranks, inside the body of a function of rank "
                f"{', '.join(map(str, self.nested_in))}: the others are not there. Make it outside."
            )
        self._raise_if_doomed()
        self._blocks_entered += 1
        number = -self._blocks_entered
        timeout_s = None if timeout is None else timeout.total_seconds()
        watched = Watched(call, number, f"{self.term} {number}", timeout_s, None if from_end else time.monotonic())
        watcher = self._watcher()
        self._blocks.append(watched)
        with watcher.entered(watched):
            try:
                with watcher.watching(watched):
                    yield
                self._raise_if_doomed()
                with lost_store_names_its_host(self.member):
                    self.store.set(LEFT_KEY, f"{watched.left_value}\trank {self.rank} has left {call}")
                self._begin(call)
                began = watched.began or time.monotonic()
                self._barrier(call, None if timeout_s is None else began + timeout_s + TIMEOUT_MARGIN_S)
            except BaseException as error:
                if watched.reason is not None and _follows(error):
                    error = watched.reason.with_traceback(error.__traceback__)
                failed = self._fail_block(watched, error)
                if failed is None:
                    raise
                raise failed from None
            finally:
                self._blocks.remove(watched)

    def _fail_block(self, watched: Watched, error: BaseException) -> ParallelError | None:
        """`_fail` of the innermost block; all ranks leave it and count from one again."""
        number = watched.number
        failed = watched.doom
        if failed is None:
            failed = self._fail(watched.call, number, error, FAILED)
            outermost = self._peers.outermost_failed(number)
            for block in self._blocks[:-1]:
                if block.number <= outermost:  # user code must not catch this error in there and go on
                    block.doom = failed
            self.begin_term(self.term + 1)
        close_group(self.member)  # also what the watcher has done to it since the block inside failed
        self._blocks_entered = -number  # ranks may have entered unequally many, and made unequally many groups,
        self.member.groups_made = 0  # which are named by their term too
        return failed

    @property
    def _block(self) -> int:
        """The innermost block that this rank is in, as a negative number; 0 if it is in none."""
        return self._blocks[-1].number if self._blocks else 0

    def _raise_if_doomed(self) -> None:
        if self._blocks and self._blocks[-1].doom is not None:
            raise self._blocks[-1].doom

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
        try:
            with contextlib.ExitStack() as inside:
                inside.enter_context(self.nested(call.ranks))
                if call.together:
                    watched, watcher = Watched(call, self._calls), self._watcher()
                    inside.enter_context(watcher.entered(watched))
                    inside.enter_context(watcher.watching(watched))
                yield
        except BaseException as error:
            if isinstance(error, Interrupted) and not (call.together and watched.freed):
                raise  # from what is around this call
            failed = self._fail(call, self._calls, error, FINISHED)
            if failed is None:
                raise
            raise failed from None
        self._post(FINISHED)

    def _fail(self, call: Call, number: int, error: BaseException, phase: int) -> ParallelError | None:
        """Tell the others of ``error`` in a section, or in a block; what to raise for it, with all that is known.

        What only follows from the failure of another rank is told as that. None for a SystemExit or KeyboardInterrupt:
        it is this rank's own way out.
        """
        failures: dict[int, Exception] = {}
        follows = call.together and _follows(error)
        if follows:
            self._peers.collect(call, self._calls, number, failures, SEEK_CAUSE_S)
        if isinstance(error, RankError):  # what it tells of others is theirs
            failures = dict(error.failures)
        elif isinstance(error, RankTimeoutError) and error.ranks:
            failures = dict.fromkeys(error.ranks, error)
        elif isinstance(error, Exception) and not failures:
            failures = {self.rank: error.with_traceback(user_frames(error))}
        told = self._peers.outermost_failed(number) if number < 0 else number
        self._post_failure(told, failures or {self.rank: error}, phase)
        if follows or isinstance(error, Exception):
            return self._rank_error(call, number, failures, 0.0 if follows else SEEK_CAUSE_S)
        if call.together:
            close_group(self.member)
        return None

    def _watcher(self) -> Watcher:
        if self._watching is None:
            with lost_store_names_its_host(self.member):
                self._watching = Watcher(self.member)
        return self._watching

    def _post(self, phase: int) -> None:
        self._phase = phase
        report = Report(Progress(self.term, self._calls, phase), self._failures_made, self._history_text)
        with lost_store_names_its_host(self.member):
            self.store.set(f"report/{self.rank}", report.format())

    def _post_failure(self, number: int, failures: Mapping[int, BaseException], phase: int) -> None:
        """Make ``failures`` known: their description first, so that whoever sees the report finds it."""
        described = {rank: Failure.of(e, f"rank {rank} of {self.world_size}") for rank, e in failures.items()}
        self._kept.append(Failed(self.term, number, described))
        self._failures_made += 1
        with lost_store_names_its_host(self.member):
            self.store.set(f"failed/{self.rank}", format_failed(self._failures_made, list(self._kept)))
            self._post(phase)
            claim_first(self.store, claim_key(self.term, number), self.rank)

    def _leave(self) -> None:
        if self._watching is not None:
            self._watching.stop()
        with contextlib.suppress(RuntimeError):
            self._post(GONE)
            self._peers.text("?")  # a round trip: the report is there before this process ends
        self._peers.close()

    def outlive_readers(self, deadline: float) -> None:
        """At the end of the process that holds the store: stay until the others have read what they wait for."""
        self.member.on_leave.close()
        if self._kept and (self._kept[-1].term, self._kept[-1].call) == (self.term, self._calls):
            deadline = min(deadline, time.monotonic() + LINGER_AFTER_FAILURE_S)
        for rank in range(self.world_size):
            with contextlib.suppress(RuntimeError, ValueError):
                while rank != self.rank and not self._peers[rank].is_dead():
                    report = self._peers.text(f"report/{rank}")
                    if time.monotonic() > deadline or (report and Report.parse(report).progress.phase == GONE):
                        break
                    time.sleep(POLL_MAX_S / 10)
        self._peers.close()

    # What this rank learns.

    def _await_outcomes(self, call: Call, deadline: float | None) -> None:
        for rank in call.ranks:
            if rank != self.rank:
                report = self._await(rank, FINISHED, call, deadline)
                self._unwaited.pop(rank, None)
                if failures := self._peers.failures_of(rank, report, self._calls):
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
            report = self._peers.report(rank)
            if report.progress.phase == FAILED or report.progress.term > self.term:
                if self._block and (failures := self._peers.failures_of(rank, report, self._block)):
                    raise self._rank_error(call, self._block, failures)
                if not self._block or report.progress.term > self.term:
                    return report  # it was here, and has failed in what comes next
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
            if call.together and self._peers.first_failed(self._calls) is not None:
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
                if self._block and self._peers.first_failed(self._block) is not None:
                    raise self._rank_error(call, self._block, {})

    def _check_same_call(self, rank: int, report: Report, call: Call) -> None:
        """Raise if ``rank`` makes, or made, another call under the number of the present one."""
        if report.progress.call < self._calls:
            return
        try:
            theirs = report.made_as(self._calls)
        except ValueError:
            raise foreign_value(f"report/{rank}", report.history) from None
        # None: the rank is so far ahead that it has forgotten. Its outcome is still told by its list of failures.
        if theirs is not None and theirs.split("\t")[0] != call.what:
            self._post(self._phase)  # where this rank is, before it goes: the other may wait for it and must see it too
            raise not_in_step(self.rank, rank, theirs, call, self._calls)

    def _late_failure(self) -> RankError | None:
        """The failure of an earlier call that this rank did not wait for, if one has been reported."""
        for rank, (number, function) in list(self._unwaited.items()):
            report = self._peers.report(rank)
            if report.progress >= Progress(self.term, number, FINISHED):
                del self._unwaited[rank]
            if failures := self._peers.failures_of(rank, report, self._calls):
                return rank_error(f"{function}, for which nobody waited,", self.world_size, failures)
        return None

    def _rank_error(
        self, call: Call, number: int, failures: dict[int, Exception], seek_s: float = SEEK_CAUSE_S
    ) -> ParallelError:
        """All known failures of a section or block, the cause first; closes the group if several ranks ran."""
        if call.together:
            self._peers.collect(call, self._calls, number, failures, seek_s)
            first = self._peers.first_failed(number)
            cause = (
                first.rank if first is not None else next((rank for rank in failures if rank != self.rank), self.rank)
            )
            order = sorted(failures, key=lambda rank: rank != cause)
            unknown = ParallelError(f"Rank {cause} failed; how is no longer known here.")
            failures = {rank: failures[rank] for rank in order} or {cause: unknown}
            close_group(self.member)  # a peer may sit in a collective of it
        silent = {rank: error for rank, error in failures.items() if isinstance(error, RankTimeoutError)}
        if silent and next(iter(failures)) in silent:
            stacks = {rank: str(error) for rank, error in sorted(silent.items())}
            return RankTimeoutError("\n".join(dict.fromkeys(stacks.values())), ranks=list(stacks), stacks=stacks)
        return rank_error(call.function, self.world_size, failures)


def _follows(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has failed."""
    return isinstance(error, Interrupted) or lost_connection(error)
