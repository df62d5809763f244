"""Calls that one rank runs while the others wait, and blocks that all ranks begin and end together.

Each rank numbers its *calls*. The rank that runs a call publishes the outcome in its status, where the other ranks
read the outcome (`status_board`). If a call fails, all ranks raise the failure, and no process group is closed.

A *block* contains user code, such as a training loop, and also calls and other blocks. All ranks begin a block
together and end it together, at *barriers*. If one rank fails in a block, all ranks must raise the failure out of the
same block.

The problem is that the ranks are at different places when one of them fails. Some may have passed a barrier that others
have not reached yet. If each rank simply failed the block that it is in, the ranks would fail different blocks. A rank
that gives up waiting at a barrier cannot withdraw its arrival either, because another rank may already have counted the
arrival and passed the barrier.

The solution is one counter and one record for each *generation*. A generation consists of all calls and barriers until
a block fails; then the next generation begins. In a pool, each run begins a new generation too.

- All ranks go through the same barriers in the same order. Therefore one counter serves for all barriers: a rank
  arrives by adding 1, and barrier number b is complete when the counter has reached ``b * world_size``.
- A rank may have to leave a block or barrier early: because of its own exception, a timeout or the death of another
  rank. It then *ends the generation* by adding `END_MARK` to the counter. The store returns the sum, from which the
  rank computes how many barriers were complete. It writes this number and its failure into the record, a
  `GenerationEnd`. If several ranks end the generation, the number that is written first is valid for all ranks.
- A rank that finds `END_MARK` in the counter at a barrier waits for the record, and passes only if the record counts
  this barrier as complete. If the rank that has added `END_MARK` dies before it writes the record, another rank notices
  the death and writes the record.
- Every rank computes from the number in the record which block has failed. The failed block is the innermost block that
  was open after this number of barriers, see `GenerationEnd.fails`. All ranks get the same result, and raise the
  failure out of this block.

A rank that is in the body of a block when the generation ends is freed by its watchdog, see `watchdog`.
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

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
NO_BARRIER = contextlib.nullcontext(lambda: None)  # used instead of `Blocks._barrier` if a call has no barrier
# A rank that ends a generation adds this number to the counter of arrivals. It is greater than any possible count.
END_MARK = 1 << 40


class Blocks:
    """The calls and blocks that this rank makes in one world. All ranks make the same ones, in the same order."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.board = StatusBoard(context)
        self.rank = context.rank
        self.world_size = context.world_size
        self.nested_in: tuple[int, ...] = ()  # the ranks that run the present code; an empty tuple if all ranks run it
        self.stop_calls = 0  # the number of calls of `stop_requested` by this rank in this generation
        self._connection = context.connection
        self._others = [rank for rank in range(context.world_size) if rank != context.rank]
        # The rank before this one. At each barrier this rank checks that the neighbor is at the same barrier.
        self._neighbor = (context.rank - 1) % context.world_size
        self._barriers = 0  # the number of the last barrier in this generation that this rank has come to
        self._earlier_generations: list[int] = []  # the earlier generations whose keys may still be in the store
        self._entered: list[BlockState] = []  # the blocks that this rank is in, the innermost last
        self._watchdog: Watchdog | None = None  # None until `watch` has started it, and after `_leave`
        context.on_leave.callback(self._leave)

    @property
    def generation(self) -> int:
        return self.board.generation

    def begin_generation(self, generation: int) -> None:
        """Begin a generation, in which calls and barriers are numbered from one again."""
        if self._barriers or self._entered:
            self._earlier_generations.append(self.generation)
        if generation != self.context.generation:
            self.context.begin_generation(generation)
        self.board.begin_generation(generation)
        self._barriers = 0
        self.stop_calls = 0
        for block in self._entered:
            # The block began in an earlier generation, and so before barrier 1 of the new generation.
            block.begin = 0

    @contextlib.contextmanager
    def call(self, call: Call, timeout_s: float | None = None, *, barrier: bool = False) -> Iterator[bool]:
        """Make a call that one rank runs while the other ranks wait for its end. Every rank must make the call.

        Args:
            call: holds the rank that runs the call, and the name of the call for errors.
            timeout_s: how long the other ranks wait; no limit if None.
            barrier: if true, all ranks wait for each other after the call, even if the call has failed.

        Yields:
            True on the rank that runs the call. False on the other ranks, which must do nothing in the ``with`` block.

        Raises:
            RankError: on every rank, if the call raised, or if the rank that runs the call died before the end.
            RankTimeoutError: the call did not finish within ``timeout_s``.
            ParallelError: the ranks are not in the same call; the message names both calls.
        """
        (runner,) = call.ranks
        failures: Mapping[int, BaseException] = {}
        with self._barrier(call, timeout_s) if barrier else NO_BARRIER as arrive:
            self._begin(call)
            if self.rank == runner:
                outer = self.nested_in
                self.nested_in = call.ranks  # `nested` does the same, but its generator would make each call slower
                try:
                    yield True
                except Interrupted:
                    raise  # this rank must leave the block around the call, and that block handles the exception
                except BaseException as error:
                    failures = failures_in(cause_of(error, self._watchdog.reason if self._watchdog else None), runner)
                    self.board.post_failure(call, self._describe(failures))
                    if not isinstance(error, Exception):
                        raise  # a SystemExit or KeyboardInterrupt is raised unchanged on this rank
                else:
                    self.board.post(FINISHED)
                finally:
                    self.nested_in = outer
            else:
                yield False
                failures = self._await_outcome(self._wait(call, call.ranks, FINISHED, timeout_s))
            arrive()
        if failures:
            raise self._error(call, failures)

    def barrier(self, call: Call, timeout_s: float | None = None, refusal: Exception | None = None) -> None:
        """Wait until every rank has come to this barrier.

        Args:
            call: holds the name of the barrier for errors.
            timeout_s: how long this rank waits; no limit if None.
            refusal: an error that this rank raises instead of arriving at the barrier, so that the barrier fails with
                this error on all ranks. None if this rank arrives.

        Raises:
            RankError: on every rank, if a rank gave up waiting, or its process ended before all ranks had come.
            RankTimeoutError: on every rank, if a rank has waited for longer than its ``timeout_s``.
            ParallelError: the ranks are not at the same barrier; the message names both calls.
        """
        with self._barrier(call, timeout_s) as arrive:
            if refusal is not None:
                raise refusal
            arrive()

    @contextlib.contextmanager
    def block(self, call: Call, timeout_s: float | None = None, *, from_end: bool = False) -> Iterator[None]:
        """Run a block, which all ranks begin and end together.

        If the block fails on one rank, the other ranks are freed from their waits and collectives in it. All ranks
        close the process group, begin a new generation and raise the failure.

        Args:
            call: holds the name of the block for errors.
            timeout_s: the time limit of the block; no limit if None.
            from_end: if true, the limit counts from the moment at which this rank has come to the end of the block;
                otherwise, from the beginning of the block.

        Raises:
            RankError: on every rank, if the block raised on a rank, or the process of a rank ended in the block.
            RankTimeoutError: on every rank, if the block took longer than ``timeout_s`` on a rank, or if a rank did not
                come to the beginning of the block within ``timeout_s`` or within the timeout of the process group.
        """
        self.raise_if_nested(call)
        self._raise_if_must_leave()
        block = BlockState(call, self._innermost, timeout_s)
        watchdog = self.watch()
        with watchdog.entered(block), self._on_all_ranks(block):
            block.begin = self._next_barrier()
            self._begin(call)
            limits_s = timeout_s, self.context.timeout.total_seconds()
            begin_by = min(block.first_due().deadline, *map(deadline_of, limits_s))
            self._arrive(block, Wait(call, self._others, ARRIVED, begin_by, "waits in"))
            block.deadline = math.inf if from_end else deadline_of(timeout_s)
            with watchdog.watching(block):
                yield
            self._end_block(block)

    def watch(self) -> Watchdog:
        """Return the watchdog of this rank. The first call starts the watchdog.

        The watchdog frees this rank from collectives that cannot end, and publishes where in its program this rank is.
        """
        if self._watchdog is None:
            self._watchdog = Watchdog(self.context, self.board, self._entered)
        return self._watchdog

    @contextlib.contextmanager
    def nested(self, ranks: Sequence[int]) -> Iterator[None]:
        """Mark the body of the ``with`` block as code that only ``ranks`` run.

        Inside this code, `on_rank` runs its function at once on the ranks that the decorator names, and no other rank
        waits for the end of this function.
        """
        outer = self.nested_in
        self.nested_in = tuple(ranks)
        try:
            yield
        finally:
            self.nested_in = outer

    def call_of_all(self, function: str) -> Call:
        """Return a call of ``function`` by all ranks, at the present line of the user's code."""
        return Call(function, tuple(range(self.world_size)), call_site())

    def raise_if_nested(self, call: Call | str) -> None:
        """Raise if only some ranks run the present code, because ``call`` would wait for the other ranks forever."""
        if self.nested_in:
            where = f"inside the body of a function of {rank_names(self.nested_in)}"
            raise ParallelError(
                f"{call} is a call of all ranks, {where}, which the other ranks do not run. Make this call outside of "
                "that function."
            )

    def outlive_readers(self, deadline: float) -> None:
        """Leave the world, and return when the other ranks no longer need the store, or at the ``deadline``.

        Called at the end of the process that hosts the store, because the store ends with this process.
        """
        self.context.on_leave.close()
        self.board.outlive_readers(deadline)
        self.context.close_links()

    def _leave(self) -> None:
        """Stop the watchdog, and publish that this rank makes no more calls."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None  # so that the watchdog's connection to the store is closed
        with contextlib.suppress(RuntimeError):
            self.board.post(HAS_LEFT)
            self.board.flush()  # otherwise this process could end before the status has been sent
        self.board.liveness.close()

    # The parts of a call.

    def _begin(self, call: Call) -> None:
        self._raise_if_must_leave()
        self.board.begin(call)

    def _wait(self, call: Call, ranks: Sequence[int], phase: int, timeout_s: float | None) -> Wait:
        """Return the description of a wait that begins now: this rank waits until ``ranks`` have reached ``phase``.

        If the wait has no timeout, the watchdog publishes that this rank waits for ``ranks``. Suppose that rank 3 is
        one of them, and is in a collective that this rank does not enter. The watchdog of rank 3 then reads that this
        rank waits for rank 3, and notices the deadlock, see `Watchdog._deadlock`. A wait with a timeout is not
        published, because it is no deadlock: this rank gives up after the timeout and goes on.
        """
        return Wait(call, ranks, phase, deadline_of(timeout_s), "" if timeout_s else "waits in")

    def _await_outcome(self, wait: Wait) -> dict[int, Exception]:
        """Wait until the rank in ``wait`` has finished the present call, and return the failures of the call.

        Returns:
            A dict from each failed rank to its exception. The dict is empty if the call succeeded.
        """
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
            # `rank` may already be in the next generation, because a block has failed before `rank` ran the call. The
            # position of `rank` is then greater than `goal`, although `rank` will never run the call. Therefore the
            # next lines check whether the generation of the call has ended.
            has_run = status.position >= goal
            if status.position.generation > self.generation or (waited > times.LOOK_UP_PEER_AFTER_S and not has_run):
                self._raise_if_generation_ended()
            return has_run

        self.board.wait(wait, has_run_it)
        return rebuilt(self.board.failures_of_call(rank, status))

    def _describe(self, failures: Mapping[int, BaseException]) -> dict[int, Failure]:
        """Return the failures as plain data, which can be written into the store.

        An exception that was rebuilt from the description of another rank keeps this description.
        """
        where = f"rank {self.rank} of {self.world_size}"
        others = {rank: getattr(e.__cause__, "failure", None) for rank, e in failures.items() if rank != self.rank}
        return {rank: others.get(rank) or Failure.from_exception(error, where) for rank, error in failures.items()}

    def _error(self, call: Call, failures: Mapping[int, BaseException]) -> ParallelError:
        """Return the error that a call or block raises for these failures, the first of which is the cause.

        If the cause is a `RankTimeoutError`, the error is a `RankTimeoutError` too, otherwise a `RankError`.
        """
        errors = exceptions_in(failures)
        cause = next(iter(errors.values()), None)
        if isinstance(cause, RankTimeoutError):
            return RankTimeoutError(str(cause), ranks=cause.ranks, stacks=cause.stacks)
        return rank_error(call.function, self.world_size, errors)

    def _raise_if_must_leave(self) -> None:
        """Raise `Interrupted` if this rank must leave the innermost block.

        This is needed because user code in the block may have caught the first `Interrupted` and gone on.
        """
        if self._entered and self._entered[-1].must_leave:
            raise Interrupted

    def _raise_if_generation_ended(self) -> None:
        """Raise `Interrupted` if the generation has ended, because this rank must then leave its innermost block.

        Outside of all blocks, do nothing.
        """
        if self._entered and self._has_generation_ended():
            self._entered[-1].make_leave()
            raise Interrupted

    def _has_generation_ended(self) -> bool:
        return self._connection.get(ended_key(self.generation)) is not None

    # The parts of a barrier and of a block.

    def _next_barrier(self) -> int:
        """Count the barrier that this rank comes to now, and return its number."""
        self._barriers += 1
        return self._barriers

    @property
    def _innermost(self) -> BlockState | None:
        return self._entered[-1] if self._entered else None

    @contextlib.contextmanager
    def _barrier(self, call: Call, timeout_s: float | None) -> Iterator[Callable[[], None]]:
        """Make a barrier. Yield a function that arrives at the barrier and waits for the other ranks.

        If the body of the ``with`` block raises before it has called this function, the barrier fails on all ranks.
        """
        self._raise_if_must_leave()
        barrier = BlockState(call, self._innermost, end=self._next_barrier())

        def arrive() -> None:
            self._begin(call)
            self._arrive(barrier, self._wait(call, self._others, ARRIVED, timeout_s))
            barrier.has_passed = True

        with self._on_all_ranks(barrier):
            yield arrive

    def _end_block(self, block: BlockState) -> None:
        """Wait for the other ranks at the end of ``block``."""
        if (failure := self.context.group.error()) is not None:
            raise failure
        call = block.call._replace(function=f"the end of {block.call.function}")
        self._begin(call)
        block.end = self._next_barrier()
        block.deadline = min(block.deadline, deadline_of(block.timeout_s))
        self._arrive(block, Wait(call, self._others, ARRIVED, block.first_due().deadline, "waits at"))

    def _arrive(self, block: BlockState, wait: Wait) -> None:
        """Arrive at the present barrier, which belongs to ``block``, and wait until every rank has arrived there.

        Raise an exception instead if one of the ranks cannot arrive any more, for instance because it has died.
        """
        self.board.post(ARRIVED)
        key = arrived_key(self.generation)
        arrivals_needed = self._barriers * self.world_size
        has_arrived = False

        def is_complete(waited: float) -> bool:
            nonlocal has_arrived
            # Check the neighbor first, and read the counter second. In the other order, the neighbor could arrive as
            # the last rank and leave the world between the two steps. This rank would then see an old count, and raise
            # an error because the neighbor has left.
            has_left = waited > times.LOOK_UP_PEER_AFTER_S and self._check_neighbor(block, wait.call)
            arrivals = self._connection.add(key, 0 if has_arrived else 1)
            has_arrived = True
            if arrivals >= END_MARK:
                record = self._connection.read(ended_key(self.generation), GenerationEnd)
                if record is not None and record.barriers < self._barriers:
                    block.make_leave()
                    raise Interrupted
                return record is not None
            if arrivals >= arrivals_needed:
                self._check_neighbor(block, wait.call)
                return True
            if has_left:
                raise self.board.left_error(self._neighbor, wait.call)
            return False

        self.board.wait(wait, is_complete)
        while self._earlier_generations:  # every rank is in the present generation, and no longer reads these keys
            earlier = self._earlier_generations.pop()
            if self.rank == 0:
                self._connection.delete(ended_key(earlier))
                self._connection.delete(arrived_key(earlier))

    def _check_neighbor(self, block: BlockState, call: Call) -> bool:
        """Raise if the neighbor (the rank before this one) is at another barrier than this rank.

        The check is needed because the counter of arrivals does not distinguish the barriers: if some ranks arrive at
        one barrier and the others at another one, the sum looks complete.

        It is enough that each rank checks one other rank. For example, ranks 0 and 1 are at one barrier, and ranks 2
        and 3 at another one. Rank 2 checks rank 1, rank 0 checks rank 3, and both raise. Ranks 1 and 3 notice nothing,
        and may already have passed their barriers. Therefore a rank that notices the difference sets ``is_mixed``,
        which becomes a part of the `GenerationEnd`. All ranks then close the process group.

        Returns:
            True if the neighbor has left the world.
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
        """End the generation if the body of the ``with`` block raises, so that all ranks raise the failure.

        Each rank raises the failure out of the block that has failed, which may be ``block`` or a block around it.
        """
        try:
            yield
        except BaseException as error:
            if block.has_passed:
                raise
            raised: BaseException | None = None
            # `DeferredSignals` delays Ctrl-C, which could otherwise stop this rank after it has added END_MARK to the
            # counter, but before it has written the record. The other ranks would then wait for the record.
            with DeferredSignals():
                if block.outer is not None and block.outer.must_leave:  # the outer block failed before this one began
                    block.make_leave(block.outer.reason)
                is_of_block = isinstance(error, Exception) or (isinstance(error, Interrupted) and block.must_leave)
                # Remove this frame and the one of `block` from the traceback to avoid a reference cycle. Since Python
                # 3.12 these frames refer to the frames that called them, and the latter refer to ``error``. If no frame
                # is the user's, `user_frames` removes none, so this frame is removed before.
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                error.__traceback__ = user_frames(error)
                try:
                    raised = self._leave_block(block, cause_of(error, block.reason))
                except ParallelError:  # the store is gone
                    self.context.group.close()
                    if is_of_block:
                        raise
            try:
                # SystemExit, KeyboardInterrupt, and the `Interrupted` of a cancelled task: raised unchanged.
                if not is_of_block:
                    raise
                if raised is not None:
                    raise raised from None
            finally:
                # The exception refers to this frame through its traceback. If the frame also referred to the exception,
                # this reference cycle would keep alive all objects in the frames of the traceback.
                del raised

    def _leave_block(self, block: BlockState, error: BaseException) -> BaseException | None:
        """End the generation because ``error`` was raised in ``block``, and return the exception to raise.

        On a rank that another rank's failure has freed, the generation has already ended. This rank then only reads the
        record of its end.

        Args:
            block: a block, or the `BlockState` of a separate barrier.
            error: the exception that was raised in the block.

        Returns:
            The exception to raise out of ``block``:

            - the error that all ranks raise, if ``block`` has failed;
            - `Interrupted`, if a block around ``block`` has failed, which then raises the error;
            - None, if all ranks have already come to the end of the outermost block, which can then no longer fail.
              This rank goes on, and all ranks raise the failure at their next barrier.

        Raises:
            ParallelError: the store is gone.
        """
        failures = self._failures_to_report(block, error)  # the exceptions themselves, by rank
        described = self._describe(failures)  # the same as plain data, which the store can hold
        record = self._end_generation(described, block.is_mixed)
        if not record.fails(block.begin, block.end, is_outermost=block.outer is None):
            if block.outer is None:
                return None
            block.outer.make_leave()
            # `Interrupted` is no subclass of `Exception`. So ``except Exception``, in user code between this block and
            # the outer block, does not catch it.
            return Interrupted()
        # The group is closed if a rank may be in a collective of the block. The failure of a separate barrier does not
        # close the group, because a barrier contains no code, and therefore no collective.
        closes_group = block.begin <= record.barriers or record.is_mixed
        try:
            self.begin_generation(self.generation + 1)
            self.board.post(WAITING)
        finally:
            if closes_group:
                self.context.group.close()
        # The exceptions that were raised in this process replace their rebuilt copies, which have no traceback.
        own = exceptions_in(failures)
        recorded = {rank: own[rank] for rank in own if record.failures[rank] == described[rank]}
        return self._error(block.call, rebuilt(record.failures) | recorded)

    def _end_generation(self, failures: dict[int, Failure], is_mixed: bool) -> GenerationEnd:
        """End the generation unless another rank has done so, and return the record of its end.

        The first failure in the record is the cause, which is the same on all ranks. Ranks may add their own failures
        later, so a rank that reads the record early may not see all failures.

        Args:
            failures: the failures that this rank adds to the record.
            is_mixed: true if this rank has noticed that the ranks are at different barriers. The store has only one
                count for the arrivals at all barriers. Arrivals at other barriers may make this count so high that the
                last barrier of this rank wrongly seems complete. So if ``is_mixed`` is true, the record says that this
                barrier is not complete.
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

    def _failures_to_report(self, block: BlockState, error: BaseException) -> dict[int, BaseException]:
        """Return a dict from failed ranks to the exceptions that this rank adds to the `GenerationEnd` record.

        The dict is empty if ``error`` is only a consequence of a failure on another rank.
        """
        # If this rank must leave the block, `Interrupted` is a consequence of a failure that the record already holds.
        # Otherwise the pool has cancelled the task. The last line then reports `Interrupted` as this rank's failure.
        if isinstance(error, Interrupted) and block.must_leave:
            return {}
        if lost_connection(error):
            deaths = self._seek_deaths(block)
            if deaths or self._has_generation_ended():
                return deaths
        return failures_in(error, self.rank)

    def _seek_deaths(self, block: BlockState) -> dict[int, BaseException]:
        """Look for dead ranks, because the death of a rank may be the reason for a lost connection.

        Returns:
            A dict from each dead rank to the error that reports the death. The dict is empty if the generation ends
            first, or if no death is noticed within `times.CAUSE_WITHIN_S`.
        """
        for waited in looks(*times.POLL):
            if self._has_generation_ended() or waited > times.CAUSE_WITHIN_S:
                break
            if deaths := self.board.liveness.deaths(self._others, block.call):
                return {**deaths}
        return {}


def blocks_of(context: RankContext | None) -> Blocks | None:
    """Return the `Blocks` of the world that this process is in; None if this process is the only rank."""
    global _current
    if context is None or context.world_size == 1:
        return None
    if _current is None or _current.context is not context:
        _current = Blocks(context)
        if context.store_host == context.rank:
            # From now on, `_outlive_readers` waits only for the ranks of the present world. Ranks that have joined this
            # world no longer read the records of the previous one.
            for previous in _hosted:
                previous.context.close_links()
            _hosted[:] = [_current]
    if _current.generation != context.generation:
        _current.begin_generation(context.generation)
    return _current


def block(
    function: str, timeout_s: float | None = None, *, from_end: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Return a block that all ranks run, see `Blocks.block`. If this is the only rank, the block does nothing."""
    if (blocks := blocks_of(rank_context())) is None:
        return contextlib.nullcontext()
    return blocks.block(blocks.call_of_all(function), timeout_s, from_end=from_end)


def exceptions_in(failures: Mapping[int, BaseException]) -> dict[int, Exception]:
    return {rank: error for rank, error in failures.items() if isinstance(error, Exception)}


def failures_in(error: BaseException, rank: int) -> dict[int, BaseException]:
    """Return the failures that an ``error`` stands for, by the rank that failed.

    A `RankError` stands for the failures that it holds, and a `RankTimeoutError` for the failure of a rank that did not
    come in time. Any other error is a failure of ``rank``, the rank on which the error was raised.
    """
    if isinstance(error, RankError):
        return dict(error.failures)
    if isinstance(error, RankTimeoutError) and error.ranks:
        return {error.ranks[0]: error}
    return {rank: error.with_traceback(user_frames(error))}


@atexit.register
def _outlive_readers() -> None:
    """Wait, at the end of a process that holds the store, until the other ranks have read the last outcomes."""
    deadline = time.monotonic() + times.LINGER_S
    for hosted in _hosted:
        if not hosted.context.is_inherited:
            hosted.outlive_readers(deadline)


_current: Blocks | None = None  # the `Blocks` that `blocks_of` has returned last
_hosted: list[Blocks] = []  # the `Blocks` of the last world whose store this process hosts; empty if there is none
