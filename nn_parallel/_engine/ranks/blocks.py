"""Calls that one rank runs while the others wait, and blocks that all ranks go through together.

A *call* is counted on each rank, and the status of the rank that runs it tells its outcome: see `status_board`. A
failure is raised on all ranks, and nothing is closed.

A *block* holds any number of calls and of blocks. All ranks begin it together and end it together, at *barriers*. They
go through the same barriers in the same order, so one counter serves for all: to arrive is to add 1, and the b-th
barrier is complete once ``b * world_size`` have arrived.

A rank that has to leave early, by its own exception, a timeout or a death that it sees, *ends the generation*: it adds
`END_MARK` to the counter. From then on a rank at a barrier waits for the `GenerationEnd` before it goes on: the record
of how many barriers were complete, and what failed. The first rank to write one decides for all. If it dies between the
mark and the record, a rank that sees the death writes the record. Which block has failed follows from the number of
barriers, alike on all ranks: the innermost one that was open. There all ranks raise what the record says, and begin the
next generation, in which calls and barriers are counted from one again.

If a generation ends while a rank is in the body of a block, this block has failed, and the watchdog frees the rank. If
the rank is at a barrier, the number tells whether all had come.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...errors import ParallelError, RankError, RankTimeoutError
from ..failures import Failure, lost_connection, rank_error, rank_names
from ..interrupts import DeferredSignals, Interrupted
from ..polling import looks
from ..tracebacks import user_frames
from . import times
from .context import RankContext, rank_context
from .records import (
    ARRIVED,
    FINISHED,
    HAS_LEFT,
    NO_STATUS,
    WAITING,
    Call,
    GenerationEnd,
    Position,
    call_site,
    rebuilt,
)
from .status_board import StatusBoard, Wait, deadline_of
from .store import arrived_key, decode, encode, ended_key
from .watchdog import BlockState, Watchdog, cause_of

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
NO_BARRIER = contextlib.nullcontext(lambda: None)
END_MARK = 1 << 40  # more than can arrive in a generation


class Blocks:
    """One rank's end of the calls and blocks that all ranks make."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.board = StatusBoard(context)
        self.rank = context.rank
        self.world_size = context.world_size
        self.nested_in: tuple[int, ...] = ()  # the ranks that run the present code, each for itself; empty: all
        self.stop_calls = 0  # how often this rank has called `stop_requested` in this generation
        self._connection = context.connection
        self._others = [rank for rank in range(context.world_size) if rank != context.rank]
        self._neighbor = (context.rank - 1) % context.world_size
        self._barriers = 0  # that this rank has come to in this generation
        self._earlier: list[int] = []  # generations of which there may still be a key in the store
        self._entered: list[BlockState] = []  # the blocks that this rank is in, the innermost last
        self._watchdog: Watchdog | None = None
        context.on_leave.callback(self._leave)

    @property
    def generation(self) -> int:
        return self.board.generation

    def begin_generation(self, generation: int) -> None:
        """Count calls and barriers from one again."""
        if self._barriers or self._entered:
            self._earlier.append(self.generation)
        if generation != self.context.generation:
            self.context.begin_generation(generation)
        self.board.begin_generation(generation)
        self._barriers = 0
        self.stop_calls = 0
        for block in self._entered:
            block.begin = 0

    @contextlib.contextmanager
    def call(self, call: Call, timeout_s: float | None = None, *, barrier: bool = False) -> Iterator[bool]:
        """Make a call that one rank runs while the others wait at its end. Every rank makes it.

        Args:
            call: what errors name it by.
            timeout_s: how long the others wait.
            barrier: then all ranks wait for each other, also if it has failed.

        Yields:
            Whether this rank runs it; the others must do nothing in the ``with`` block.

        Raises:
            RankError: on every rank, when it raised, or the process that runs it ended before its end.
            RankTimeoutError: it did not finish within ``timeout_s``.
            ParallelError: the ranks are not in the same call; the message names both.
        """
        (runner,) = call.ranks
        failures: Mapping[int, BaseException] = {}
        with self._barrier(call, timeout_s) if barrier else NO_BARRIER as meet:
            self._begin(call)
            if self.rank == runner:
                outer = self.nested_in
                self.nested_in = call.ranks  # as `nested` does, without another generator
                try:
                    yield True
                except Interrupted:
                    raise  # the block around it ends
                except BaseException as error:
                    failures = failures_in(cause_of(error, self._watchdog.reason if self._watchdog else None), runner)
                    self.board.post_failure(call, self._described(failures))
                    if not isinstance(error, Exception):
                        raise  # it is this rank's own way out
                else:
                    self.board.post(FINISHED)
                finally:
                    self.nested_in = outer
            else:
                yield False
                failures = self._await_outcome(self._wait(call, call.ranks, FINISHED, timeout_s))
            meet()
        if failures:
            raise self._error(call, failures)

    def barrier(self, call: Call, timeout_s: float | None = None, refusal: Exception | None = None) -> None:
        """Return once every rank is here. A ``refusal`` of this rank is raised on all instead.

        Raises:
            RankError: on every rank, when one did not wait until all had come, or a process ended before.
            RankTimeoutError: on every rank, when one has waited for longer than its ``timeout_s``.
            ParallelError: the ranks are not in the same call; the message names both.
        """
        with self._barrier(call, timeout_s) as meet:
            if refusal is not None:
                raise refusal
            meet()

    @contextlib.contextmanager
    def block(self, call: Call, timeout_s: float | None = None, *, from_end: bool = False) -> Iterator[None]:
        """Run a block that all ranks begin and end together, with the calls in it; a failure is raised on all.

        ``call`` is what errors name it by. A failure frees the others from what they sit in, closes the process group
        and begins a new generation.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
            RankTimeoutError: on every rank, when one took longer than ``timeout_s``: from its beginning, or with
                ``from_end`` from when the first rank was through. Or one did not come within ``timeout_s``, or within
                the timeout of the process group.
        """
        self.raise_if_nested(call)
        self._raise_if_must_leave()
        block = BlockState(call, self._innermost, timeout_s)
        watchdog = self.watch()
        with watchdog.entered(block), self._on_all_ranks(block):
            block.begin = self._next_barrier()
            self._begin(call)
            limits_s = timeout_s, self.context.timeout.total_seconds()
            come_by = min(block.first_due().deadline, *map(deadline_of, limits_s))
            self._meet(block, Wait(call, self._others, ARRIVED, come_by, "waits in"))
            block.deadline = math.inf if from_end else deadline_of(timeout_s)
            with watchdog.watching(block):
                yield
            self._end_block(block)

    def watch(self) -> Watchdog:
        """From now on free this rank from collectives that cannot end, and tell others where it stands."""
        if self._watchdog is None:
            self._watchdog = Watchdog(self.context, self.board, self._entered)
        return self._watchdog

    @contextlib.contextmanager
    def nested(self, ranks: Sequence[int]) -> Iterator[None]:
        """While ``ranks`` run the code here: a call in it runs where it is named, and nobody waits."""
        outer = self.nested_in
        self.nested_in = tuple(ranks)
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

    def outlive_readers(self, deadline: float) -> None:
        """At the end of the process that holds the store: stay until the others have read what they wait for."""
        self.context.on_leave.close()
        self.board.outlive_readers(deadline)

    def _leave(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None  # it refers to this
        with contextlib.suppress(RuntimeError):
            self.board.post(HAS_LEFT)
            self.board.flush()  # before this process ends
        self.board.liveness.close()

    # The parts of a call.

    def _begin(self, call: Call) -> None:
        self._raise_if_must_leave()
        self.board.begin(call)

    def _wait(self, call: Call, ranks: Sequence[int], phase: int, timeout_s: float | None) -> Wait:
        """Return a wait that begins now. The others are told of it only if this rank will not give up and go on."""
        return Wait(call, ranks, phase, deadline_of(timeout_s), "" if timeout_s else "waits in")

    def _await_outcome(self, wait: Wait) -> dict[int, Exception]:
        """Return once the rank that runs the present call has done so: how it has failed; nothing if it succeeded."""
        (rank,) = wait.ranks
        status = NO_STATUS
        goal = Position(self.generation, self.board.number, FINISHED)

        def has_run_it(waited: float) -> bool:
            nonlocal status
            status = self.board.status_of(rank)
            if status.position.generation == self.generation:
                self.board.check_same_call(rank, status, wait.call)
                if status.position < goal and status.position.phase == HAS_LEFT:
                    raise self.board.left_error(rank, wait.call)
            has_run = status.position >= goal  # also if it is in a later generation, unless this block has failed
            if status.position.generation > self.generation or (waited > times.LOOK_UP_PEER_AFTER_S and not has_run):
                self._raise_if_generation_ended()
            return has_run

        self.board.wait(wait, has_run_it)
        return rebuilt(self.board.failures_of_call(rank, status))

    def _described(self, failures: Mapping[int, BaseException]) -> dict[int, Failure]:
        """Return the failures as plain data; what another rank has described stays in its words."""
        where = f"rank {self.rank} of {self.world_size}"
        others = {rank: getattr(e.__cause__, "failure", None) for rank, e in failures.items() if rank != self.rank}
        return {rank: others.get(rank) or Failure.from_exception(error, where) for rank, error in failures.items()}

    def _error(self, call: Call, failures: Mapping[int, BaseException]) -> ParallelError:
        """Return the error of a call or block: a timeout if the cause is one."""
        errors = exceptions_in(failures)
        cause = next(iter(errors.values()), None)
        if isinstance(cause, RankTimeoutError):
            return RankTimeoutError(str(cause), ranks=cause.ranks, stacks=cause.stacks)
        return rank_error(call.function, self.world_size, errors)

    def _raise_if_must_leave(self) -> None:
        """Raise again in a block that this rank was to leave: user code has caught what was raised, and gone on."""
        if self._entered and self._entered[-1].must_leave:
            raise Interrupted

    def _raise_if_generation_ended(self) -> None:
        """Raise in a block if the generation has ended: this is the block that has failed."""
        if self._entered and self._has_generation_ended():
            self._entered[-1].make_leave()
            raise Interrupted

    def _has_generation_ended(self) -> bool:
        return self._connection.get(ended_key(self.generation)) is not None

    # The parts of a barrier and of a block.

    def _next_barrier(self) -> int:
        """Return the number of the barrier that this rank comes to now."""
        self._barriers += 1
        return self._barriers

    @property
    def _innermost(self) -> BlockState | None:
        return self._entered[-1] if self._entered else None

    @contextlib.contextmanager
    def _barrier(self, call: Call, timeout_s: float | None) -> Iterator[Callable[[], None]]:
        """Make a barrier. A rank arrives by calling what this yields; if it leaves before, it gives the barrier up."""
        self._raise_if_must_leave()
        barrier = BlockState(call, self._innermost, end=self._next_barrier())

        def meet() -> None:
            self._begin(call)
            self._meet(barrier, self._wait(call, self._others, ARRIVED, timeout_s))
            barrier.has_passed = True

        with self._on_all_ranks(barrier):
            yield meet

    def _end_block(self, block: BlockState) -> None:
        """Wait at the end of ``block`` for the others."""
        if (failure := self.context.group.error()) is not None:
            raise failure
        call = block.call._replace(function=f"the end of {block.call.function}")
        self._begin(call)
        block.end = self._next_barrier()
        block.deadline = min(block.deadline, deadline_of(block.timeout_s))
        self._meet(block, Wait(call, self._others, ARRIVED, block.first_due().deadline, "waits at"))

    def _meet(self, block: BlockState, wait: Wait) -> None:
        """Return once every rank has arrived at the present barrier, of ``block``; raise if one never will."""
        self.board.post(ARRIVED)
        key = arrived_key(self.generation)
        all_arrived = self._barriers * self.world_size
        has_arrived = False

        def is_complete(waited: float) -> bool:
            nonlocal has_arrived
            # Before the counter: a rank that leaves as soon as all have arrived has done nothing wrong.
            has_left = waited > times.LOOK_UP_PEER_AFTER_S and self._check_neighbor(block, wait.call)
            arrived = self._connection.add(key, 0 if has_arrived else 1)
            has_arrived = True
            if arrived >= END_MARK:
                record = self._connection.read(ended_key(self.generation), GenerationEnd)
                if record is not None and record.barriers < self._barriers:
                    block.make_leave()
                    raise Interrupted
                return record is not None
            if arrived >= all_arrived:
                self._check_neighbor(block, wait.call)
                return True
            if has_left:
                raise self.board.left_error(self._neighbor, wait.call)
            return False

        self.board.wait(wait, is_complete)
        while self._earlier:  # every rank is through them
            earlier = self._earlier.pop()
            if self.rank == 0:
                self._connection.delete(ended_key(earlier))
                self._connection.delete(arrived_key(earlier))

    def _check_neighbor(self, block: BlockState, call: Call) -> bool:
        """Raise if the rank before this one is at another barrier; return whether it has left the others.

        Where ranks are at different barriers, some rank at each of them has such a neighbor. A rank whose neighbor is
        at the same one may go on, as one counter serves for all barriers: so the end of the generation tells of that.
        """
        status = self.board.status_of(self._neighbor)
        if status.position.generation == self.generation:
            try:
                self.board.check_same_call(self._neighbor, status, call)
            except ParallelError:
                block.is_mixed = True
                raise
        return status.position.phase == HAS_LEFT

    @contextlib.contextmanager
    def _on_all_ranks(self, block: BlockState) -> Iterator[None]:
        """Have what is raised in here end the generation: all ranks raise it, each out of the block that has failed."""
        try:
            yield
        except BaseException as error:
            if block.has_passed:
                raise
            raised: BaseException | None = None
            with DeferredSignals():  # Ctrl-C leaves no generation half ended
                if block.around is not None and block.around.must_leave:  # it has failed just before this one began
                    block.make_leave(block.around.reason)
                is_of_block = isinstance(error, Exception) or (isinstance(error, Interrupted) and block.must_leave)
                # The frames that hand ``error`` to this one keep it, and since Python 3.12 this frame keeps them.
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                try:
                    raised = self._leave_block(block, cause_of(error, block.reason))
                except ParallelError:  # the store is gone
                    self.context.group.close()
                    if is_of_block:
                        raise
            try:
                if not is_of_block:  # it has its own way out: a SystemExit, a KeyboardInterrupt, the end of a task
                    raise
                if raised is not None:
                    raise raised from None
            finally:
                del raised  # it would live in a cycle with its traceback, and all that the frames there hold

    def _leave_block(self, block: BlockState, error: BaseException) -> BaseException | None:
        """End the generation with ``error``, which has come up in ``block``, or at a barrier alone.

        Returns:
            What to raise there. If this block has failed, the error of all ranks. If the one around it has,
            `Interrupted`, which comes out there. None if neither has, as all ranks had come to the end just then: this
            rank goes on, and its next barrier raises the failure.

        Raises:
            ParallelError: the store is gone.
        """
        failures = self._failures_of(block, error)
        described = self._described(failures)
        record = self._end_generation(described, block.is_mixed)
        if not record.fails(block.begin, block.end, is_outermost=block.around is None):
            if block.around is None:
                return None
            block.around.make_leave()
            return Interrupted()  # no `except Exception` on the way there catches it
        # Some rank has run code in it, perhaps a collective. In a barrier alone, which never begins, nobody has.
        closes_group = block.begin <= record.barriers or record.is_mixed
        try:
            self.begin_generation(self.generation + 1)
            self.board.post(WAITING)
        finally:
            if closes_group:
                self.context.group.close()
        own = exceptions_in(failures)  # as it was raised here, with its traceback
        known = {rank: own[rank] for rank in own if record.failures[rank] == described[rank]}
        return self._error(block.call, rebuilt(record.failures) | known)

    def _end_generation(self, failures: dict[int, Failure], is_mixed: bool) -> GenerationEnd:
        """End the generation, if nobody has: how it has ended, with these ``failures`` among the others.

        The cause, which comes first, is the same on all ranks; which others a rank sees depends on when it looks. If
        ranks are at different barriers, the counter tells nothing of the present one: it was not complete.
        """
        key = ended_key(self.generation)
        text = self._connection.get(key)
        if text is None:
            arrived = self._connection.add(arrived_key(self.generation), END_MARK) % END_MARK
            barriers = min(arrived // self.world_size, self._barriers - is_mixed)
            text = self._connection.swap(key, "", encode(GenerationEnd(barriers, failures, is_mixed)))
        while True:
            record = decode(GenerationEnd, key, text)
            added = {rank: failure for rank, failure in failures.items() if rank not in record.failures}
            if not added:
                return record
            text = self._connection.swap(key, text, encode(record._replace(failures=record.failures | added)))

    def _failures_of(self, block: BlockState, error: BaseException) -> dict[int, BaseException]:
        """Return the failures that this rank has to tell the others, by rank; none if they know the cause already."""
        if isinstance(error, Interrupted) and block.must_leave:  # else it is the end of a task
            return {}
        if lost_connection(error):
            deaths = self._seek_deaths(block)
            if deaths or self._has_generation_ended():
                return deaths
        return failures_in(error, self.rank)

    def _seek_deaths(self, block: BlockState) -> dict[int, BaseException]:
        """Return the deaths that end the generation; none if it has ended already, or nothing is found in time."""
        for waited in looks(*times.POLL):
            if self._has_generation_ended() or waited > times.CAUSE_WITHIN_S:
                break
            if deaths := self.board.liveness.deaths(self._others, block.call):
                return {**deaths}
        return {}


def blocks_of(context: RankContext | None) -> Blocks | None:
    """Those of the world that this process is in; None when it is the only rank."""
    global _current
    if context is None or context.world_size == 1:
        return None
    if _current is None or _current.context is not context:
        _current = Blocks(context)
        if context.store_host == context.rank:
            _hosted[:] = [_current]  # who has joined again has heard of the one before
    if _current.generation != context.generation:
        _current.begin_generation(context.generation)
    return _current


def block(
    function: str, timeout_s: float | None = None, *, from_end: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Return a block that all ranks run, see `Blocks.block`; plain code where this is the only rank."""
    if (blocks := blocks_of(rank_context())) is None:
        return contextlib.nullcontext()
    return blocks.block(blocks.call_of_all(function), timeout_s, from_end=from_end)


def exceptions_in(failures: Mapping[int, BaseException]) -> dict[int, Exception]:
    return {rank: error for rank, error in failures.items() if isinstance(error, Exception)}


def failures_in(error: BaseException, rank: int) -> dict[int, BaseException]:
    """Return the failures that an ``error`` of ``rank`` tells of, by rank."""
    if isinstance(error, RankError):
        return dict(error.failures)
    if isinstance(error, RankTimeoutError) and error.ranks:
        return {error.ranks[0]: error}
    return {rank: error.with_traceback(user_frames(error))}


@atexit.register
def _outlive_readers() -> None:
    """Stay while another rank may still have to read an outcome: the store ends with the process that holds it."""
    deadline = time.monotonic() + times.LINGER_S
    for hosted in _hosted:
        if not hosted.context.is_inherited:
            hosted.outlive_readers(deadline)


_current: Blocks | None = None
_hosted: list[Blocks] = []  # those whose store lives in this process
