"""The watchdog: a thread that frees this rank from a block or a collective that cannot come to its end.

When a block fails on one rank, the main threads of the other ranks run user code: a collective, a sleep, a loop. This
code does not learn of the failure. Gloo waits until its timeout has passed, and NCCL's kernel waits on the GPU without
raising anything. If the failing rank closed its connections, only the ranks that are in a collective with it would be
freed, and their error would be a lost connection, not the cause.

Therefore each rank has a watchdog thread, which checks the rank again and again while the rank is in a block. The rank
must leave the block if

- the block has failed, because another rank has ended the generation (see `blocks`),
- the next rank has died (each rank watches the rank after it, and the last rank watches rank 0),
- the time of the block is over,
- a collective has failed on the accelerator, or
- the rank is in a deadlock: it waits in a collective for a rank that waits for it.

The watchdog then frees its own rank. First it interrupts the main thread with a signal that raises `Interrupted` in the
body of the block, and only there. Then it aborts the process groups, so that a collective returns (`group`). The
interrupt comes first because an aborted collective of an accelerator returns normally, with wrong numbers. The watchdog
repeats both steps until the rank has left the block, because the first attempt may have no effect: a signal that
arrives just before the main thread begins to wait in C is lost, and a group that is just being made may not have its
connections yet.

About twice a second the watchdog also publishes the `Whereabouts` of its rank, if they have changed. Other ranks show
them in the errors of timeouts, and use them to detect deadlocks. Outside of all blocks, the watchdog publishes the
`Whereabouts` too, and ends collectives that can never end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import ParallelError, RankError, RankTimeoutError
from ..devices import synchronize
from ..failures import collective_timed_out, lost_connection, rank_error
from ..interrupts import (
    CancelScope,
    Condition,
    Interrupted,
    raise_if_due,
    raise_in_main_thread,
    raise_nothing,
    stay_ready,
)
from . import flight_recorder, times
from .context import RankContext
from .flight_recorder import Collective
from .liveness import Liveness
from .main_thread import CodeLocation, location, stack
from .records import HAS_LEFT, Call, Position, RankStatus, Waits, Whereabouts, timeout_error
from .status_board import StatusBoard
from .store import LOST_KEY, Lost, StoreClient, ended_key, status_key, whereabouts_key

logger = logging.getLogger("nn_parallel")

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module


@dataclass(eq=False)
class BlockState:
    """The state of a block that this rank is in.

    A separate barrier, which is not the beginning or the end of a block, has a `BlockState` too, with an ``end`` but
    without a ``begin``.
    """

    call: Call
    outer: BlockState | None = None  # the block around this block
    timeout_s: float | None = None  # the time limit of the block; None if it has none
    begin: float = math.inf  # the number of the barrier at which the block begins; infinite until this rank reaches it
    end: float = math.inf  # the number of the barrier at which the block ends; infinite until this rank reaches it
    deadline: float = math.inf  # the time at which the block times out, as a value of `time.monotonic`
    body: CancelScope = field(default_factory=CancelScope)  # the code of the block, which the watchdog can interrupt
    is_active: bool = False  # whether this rank runs the body; otherwise the watchdog does not check the block
    # Whether all ranks have come to a separate barrier, so that it can no longer fail. Always False for a block.
    has_passed: bool = False
    # Whether this rank has noticed that another rank is at a different barrier. If true, this rank tells the others in
    # `GenerationEnd.is_mixed`.
    is_mixed: bool = False
    must_leave: bool = False  # whether this rank must leave the block, because the block has failed
    reason: Exception | None = None  # the error that says why this rank must leave, see `make_leave`

    def make_leave(self, reason: Exception | None = None) -> None:
        """Record that this rank must leave the block. The caller then raises `Interrupted` in the block.

        Args:
            reason: the error that all ranks then raise; None if the store already holds this error.
        """
        self.must_leave = True
        self.reason = self.reason or reason

    def first_due(self) -> BlockState:
        """Return the block that has the earliest deadline, among this block and the blocks around it."""
        outer = self.outer.first_due() if self.outer is not None else self
        return outer if outer.deadline < self.deadline else self


class Moment(NamedTuple):
    """Two numbers that the watchdog reads at the beginning of a check.

    If one of them has changed before the watchdog acts on the result of the check, the result is outdated.
    """

    generation: int
    times_closed: int  # the value of `Group.times_closed`


class Watchdog:
    """The watchdog thread of this rank, see the docstring of this module."""

    def __init__(self, context: RankContext, board: StatusBoard, entered: list[BlockState]) -> None:
        """Start the thread.

        Args:
            context: the context of this rank.
            board: the object that knows the position of this rank in its calls, and its present wait.
            entered: the blocks that this rank is in, the innermost last. The method `entered` changes this list.
        """
        self._context = context
        self._board = board
        self._others = [rank for rank in range(context.world_size) if rank != context.rank]
        self._next_rank = (context.rank + 1) % context.world_size
        self._connection = context.connect()
        self._liveness = Liveness(context, self._connection)
        self._blocks = entered
        self._changed = Condition()  # guards `_blocks` and `_stopped`, and wakes the thread when they change
        self._stopped = False  # set by `stop`, so that the thread ends
        self._next_look = 0.0  # the time of the next `_look`
        self._published: Whereabouts | None = None  # the `Whereabouts` that this thread has published last
        self._published_losses = 0  # only on rank 0: the number of lost ranks that it has published
        # The state that `_last_collectives` read when it was last called. The method compares it to detect progress.
        self._seen_state: Any = None
        # The collectives that `_last_collectives` has read in this state. Empty if it has not read them.
        self._seen_collectives: list[Collective] = []
        # The text that `Group.state_of_nccl` returned last. If the next look gets the same text, the collectives of
        # NCCL have made no progress.
        self._seen_nccl_state = ""
        # The value that `Group.times_closed` had when this thread last raised an error in the main thread; -1 before
        # that. While `Group.times_closed` still has this value, the group has not been closed yet, and this thread
        # raises no failure on the accelerator.
        self._raised_in = -1
        self._reason: Exception | None = None  # the error that says why `_end_collective` last ended a collective
        on_cpu = context.world.device.type == "cpu"
        # Whether this thread can raise errors in the main thread outside of all blocks. If not, it logs them instead.
        self._can_raise = not on_cpu and stay_ready(context.on_leave)
        self._thread = threading.Thread(target=self._loop, name="nn_parallel watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def entered(self, block: BlockState) -> Iterator[None]:
        """Make ``block`` the innermost block until it has ended and its failure, if there is one, has been handled.

        The watchdog interrupts this rank only while the body of the innermost block runs. So while this rank begins or
        ends ``block``, or handles a failure of ``block``, the watchdog does not interrupt this rank, even if a block
        around ``block`` has failed.
        """
        with self._changed:
            self._blocks.append(block)
        try:
            yield
        finally:
            with self._changed:
                self._blocks.remove(block)
                if self._blocks:
                    self._changed.notify()  # so that the watchdog watches the block around this one again

    @contextlib.contextmanager
    def watching(self, block: BlockState) -> Iterator[None]:
        """Watch the body of ``block``. If this rank must leave the block, `Interrupted` is raised in the body."""
        with self._changed:
            block.is_active = True
            self._changed.notify()
        try:
            with block.body:
                yield
                synchronize(self._context.world.device)  # so that errors of queued work are raised inside the body
        finally:
            # The watchdog holds this lock while it frees the rank from an active block. After these lines the watchdog
            # can therefore no longer interrupt this rank for this block.
            with self._changed:
                block.is_active = False
        if block.must_leave:  # the watchdog's signal came too late to raise `Interrupted` in the body
            raise Interrupted

    @property
    def reason(self) -> Exception | None:
        """The error that says why the watchdog has ended a collective outside of all blocks.

        None if the watchdog has ended no collective, or if the group has been closed since.
        """
        return self._reason if self._context.group.interrupted else None

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended, but not longer than `times.WATCHDOG_ENDS_WITHIN_S`."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(times.WATCHDOG_ENDS_WITHIN_S)
        self._liveness.close()

    def _loop(self) -> None:
        """Check the rank again and again until `stop` is called.

        In a block, the intervals between the checks grow. Outside of all blocks, the rank is checked twice a second.
        """
        share, least_s, most_s = times.POLL
        pause = least_s
        seen: BlockState | None = None
        while True:
            with self._changed:
                if self._stopped:
                    return
                block = self._innermost()
                moment = Moment(self._context.generation, self._context.group.times_closed)
                if block is not seen:
                    pause = least_s
                    seen = block
                    if block is not None:  # most blocks end within this time, and a check would only slow them down
                        self._changed.wait(times.FIRST_LOOK_AFTER_S)
                        continue
                if block is None and (left := self._next_look - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
            self._connection.answer_by = block.first_due().deadline if block is not None else math.inf
            must_leave = False
            reason: Exception | None = None
            try:
                self._check_links()
                # The end of the generation is checked first, because a death or an error may be a consequence of this
                # end.
                if block is not None:
                    must_leave = block.must_leave or self._has_ended(moment.generation)
                if not must_leave and block is not None:
                    reason = self._death(block) or self._timeout(block) or self._context.group.error()
                if not must_leave and reason is None and time.monotonic() >= self._next_look:
                    reason = self._look(block, moment)
            except Exception as error:
                # After such an error the rank must leave the block too. For instance, if the store is gone, this rank
                # would never learn of a failure on another rank.
                reason = _as_reason(error)
                self._next_look = time.monotonic() + times.STAND_EVERY_S
                if block is None and self._is_host_out_of_reach() and location().may_wait:
                    self._end_collective(reason, moment)
            if block is None:
                continue
            if must_leave or reason is not None:
                self._free(block, moment.generation, reason)
            with self._changed:
                if not self._stopped:
                    self._changed.wait(pause)
                    pause = min(pause * (1 + share), most_s)

    def _check_links(self) -> None:
        """Check the connections to other nodes. Rank 0 publishes the list of ranks that it has lost.

        After that, rank 0 delays its next `_look`, so that the other ranks leave their collectives before rank 0
        does. Otherwise rank 0 could fail first. Then a launcher that ends all ranks when one fails would end the other
        ranks before they report the loss.
        """
        links = self._context.links
        if links is None:
            return
        links.look()
        if self._context.rank == 0 and len(links.lost) > self._published_losses:
            self._published_losses = len(links.lost)
            self._connection.write(LOST_KEY, Lost(links.lost))
            self._next_look = time.monotonic() + 2 * times.STAND_EVERY_S

    def _is_host_out_of_reach(self) -> bool:
        """Return whether the node of the store is out of reach, but this rank's collectives have not been ended yet.

        This rank must then end its collectives itself. The network does not end the connections to a node that is out
        of reach, so that a collective with this node would wait until its timeout.
        """
        host = self._context.host
        return host is not None and host.is_out_of_reach and not self._context.group.interrupted

    def _free(self, block: BlockState, generation: int, reason: Exception | None) -> None:
        """Make this rank leave ``block``. The watchdog repeats the call until the rank has left the block.

        The rank may be in a collective whose connections are not known yet. Therefore the method searches for further
        connections, and if there are any, ends the body once more.
        """
        self._end_body(block, generation, reason)
        if self._find_connections():
            self._end_body(block, generation, reason)

    def _end_body(self, block: BlockState, generation: int, reason: Exception | None) -> None:
        """Interrupt the body of ``block`` and abort the process groups. Do nothing if the body has already ended."""
        with self._changed:
            if block is self._innermost() and generation == self._context.generation:
                block.make_leave(reason)
                block.body.interrupt()  # before the abort, see the docstring of this module
                self._context.group.abort()

    def _find_connections(self) -> bool:
        """Find the connections of groups that the user has made, so that `Group.abort` can end them.

        Return whether further connections have been found.
        """
        with contextlib.suppress(Exception):  # an error must not end the watchdog, which may have to free this rank
            return self._context.group.find_connections(self._connection.store)
        return False

    def _innermost(self) -> BlockState | None:
        """Return the innermost block if its body is running; otherwise None, even if there are blocks around it."""
        return self._blocks[-1] if self._blocks and self._blocks[-1].is_active else None

    def _has_ended(self, generation: int) -> bool:
        """Return whether a rank has ended the generation, which means that the innermost block has failed."""
        return self._connection.get(ended_key(generation)) is not None

    def _death(self, block: BlockState) -> RankError | None:
        """Return the error that all ranks raise if the rank after this one has died; otherwise None.

        Each rank watches only the rank after it, and the last rank watches rank 0. If the watched rank has died, the
        error also names all other dead ranks.
        """
        if not self._liveness.is_dead(self._next_rank):
            return None
        deaths = self._liveness.deaths(self._others, block.call)
        return rank_error(block.call.function, self._context.world_size, deaths)

    def _timeout(self, block: BlockState) -> RankTimeoutError | None:
        """Return the error that all ranks raise if ``block``, or a block around it, has timed out; otherwise None."""
        due = block.first_due()
        if block.must_leave or time.monotonic() <= due.deadline:
            return None
        me = self._context.rank
        whereabouts: dict[int, Whereabouts | None] = {me: Whereabouts(f"is {location()}", stack(), {}, None)}
        whereabouts |= {rank: self._connection.read(whereabouts_key(rank), Whereabouts) for rank in self._others}
        silent = [rank for rank, each in whereabouts.items() if each is None or not each.waits_for(me)]
        return timeout_error(f"{due.call} did not end within timeout={due.timeout_s:g} s", silent, whereabouts)

    def _look(self, block: BlockState | None, moment: Moment) -> ParallelError | None:
        """Publish the whereabouts of this rank, and check whether the rank is in a collective that can never end.

        Outside of all blocks (``block`` is None), this method ends such a collective itself.

        Returns:
            The reason why this rank must leave ``block``; None if there is no reason, or no block.
        """
        self._next_look = time.monotonic() + times.STAND_EVERY_S
        if block is None and self._can_raise and (failure := self._failure_on_accelerator()):
            self._end_collective(failure, moment)
            return None
        # The position and the wait must be read before the collectives are counted. If the rank enters a collective
        # between these two steps, the count is too high, and other ranks find a deadlock only at the next look. In the
        # other order the count could be too low, and other ranks would find a deadlock that does not exist.
        position = self._board.position()
        place = location()
        waits = self._board.waits
        last = self._last_collectives(waits, place)
        self._publish(Whereabouts(waits.where if waits else f"is {place}", stack(), self._entered_at_most(last), waits))
        stuck_in = next((each for each in reversed(last) if each.by_main_thread and not each.is_over), None)
        if waits is not None or stuck_in is None:
            return None
        others = sorted(set(stuck_in.members) - {self._context.rank})
        # In a block, this check is not needed, because `_death` on this or on another rank notices a lost rank.
        reason = self._loss_error(place, others) if block is None else None
        reason = reason or self._deadlock(position, place, stuck_in, others)
        if block is not None:
            return reason
        if reason is not None:
            self._end_collective(reason, moment)
        return None

    def _publish(self, whereabouts: Whereabouts) -> None:
        """Write the whereabouts of this rank into the store if they have changed."""
        if whereabouts != self._published:
            self._published = whereabouts
            self._connection.write(whereabouts_key(self._context.rank), whereabouts)

    def _entered_at_most(self, last: list[Collective]) -> dict[str, int]:
        """Return an upper limit for the number of collectives that this rank has entered, by process group.

        Other ranks use the limit to see that this rank has not entered a certain collective yet, see `_deadlock`.
        """
        return {self._key_of(group): number for group, number in flight_recorder.entered(last).items()}

    def _key_of(self, group: str) -> str:
        """Return a name for a process group that no later group gets.

        Torch's own name does not suffice, because torch gives the names of closed groups to new groups.
        """
        generation, made = self._context.group.begun
        return f"{generation}.{made}/{group}"

    def _failure_on_accelerator(self) -> Exception | None:
        """Return the failure because of which a collective on the accelerator cannot end; None if there is none.

        NCCL does not always notice that a rank has died. Therefore, if NCCL's collectives have made no progress since
        the last look, this method itself checks whether the rank after this one has died.
        """
        group = self._context.group
        if self._raised_in == group.times_closed:
            return None
        before = self._seen_nccl_state
        self._seen_nccl_state = group.state_of_nccl()
        stands_still = self._seen_nccl_state != "" and self._seen_nccl_state == before
        next_rank = self._next_rank
        try:
            failure = group.error()
            # If another rank has left the world properly, the failure is ignored unless it is a timeout. A rank that
            # leaves closes its connections, which NCCL reports as a failure.
            if failure is not None and (collective_timed_out(failure) or not self._has_any_left()):
                return failure
            is_dead = stands_still and self._liveness.is_dead(next_rank)
            if not is_dead or has_left(self._context, self._connection, next_rank) or group.has_ended_on_accelerator():
                return None
            return dist.DistBackendError(f"NCCL: Connection closed by peer. {self._liveness.death(next_rank)}")
        except ParallelError as lost:  # the store is lost, and so is the process that holds it
            return lost if stands_still and not group.has_ended_on_accelerator() else None

    def _has_any_left(self) -> bool:
        """Return whether another rank has left the world properly."""
        return any(has_left(self._context, self._connection, rank) for rank in self._others)

    def _end_collective(self, reason: Exception, moment: Moment) -> None:
        """End the collective that this rank is in, outside of all blocks.

        When a collective of gloo is ended, it raises torch's error of a lost connection. To show the cause, ``reason``
        is logged first. When a collective on an accelerator is ended, it returns wrong numbers. The main thread must
        not use them, so ``reason`` is raised in the main thread first.

        Args:
            reason: the error that says why the collective can never end.
            moment: the moment before the reason was found. If the group has been closed since then, do nothing.
        """
        self._find_connections()
        times_closed = moment.times_closed
        if self._context.on_deadlock:
            self._context.on_deadlock(reason, moment.generation)
        elif self._context.group.times_closed != times_closed:
            return
        elif self._can_raise:
            self._raised_in = times_closed
            raise_in_main_thread(reason)
            self._context.group.abort(times_closed)
            while self._context.group.times_closed == times_closed and raise_if_due() and not self._stopped:
                time.sleep(times.POLL_MOST_S)
            raise_nothing()
        else:
            logger.error("%s", reason)
            self._reason = reason
            if self._context.group.is_gloo_alone():
                self._context.group.abort(times_closed)

    def _loss_error(self, place: CodeLocation, others: list[int]) -> ParallelError | None:
        """Return the error to raise if one of the ``others``, for which this rank waits, is on an unreachable node.

        Return None if there is no such rank.
        """
        if lost := self._liveness.out_of_reach(others):
            return self._never_ends(place, self._liveness.death(lost[0]))
        return None

    def _deadlock(
        self, position: Position, place: CodeLocation, stuck_in: Collective, others: list[int]
    ) -> ParallelError | None:
        """Return the error to raise if this rank is in a deadlock with another rank; None if it is not.

        In a deadlock, this rank waits in a collective for another rank. The other rank has not entered the collective,
        but waits for this rank in a call of this package. Nothing else counts as a deadlock, because a slow rank may
        still come, even after hours.

        Args:
            position: the position of this rank in its calls.
            place: the line of code that this rank executes, for the error.
            stuck_in: the collective in which this rank waits.
            others: the other ranks of this collective.
        """
        # Each stuck rank reads the whereabouts of the other ranks. To avoid overloading the store, the next look is
        # delayed in proportion to the number of reads by all ranks together.
        self._next_look += (len(others) + 1) * self._context.world_size / times.WHEREABOUTS_READ_PER_S
        key = self._key_of(stuck_in.group)
        number = stuck_in.number
        for rank in others:
            other = self._connection.read(whereabouts_key(rank), Whereabouts)
            if other is None or other.waits is None or other.entered.get(key, number) >= number:
                continue
            if self._context.rank in other.waits.ranks and position < other.waits.until:
                why = f"rank {rank} {other.where} without it."
                return self._never_ends(
                    place, f"{why} Every rank must make the same calls and collectives in the same order."
                )
        return None

    def _never_ends(self, place: CodeLocation, why: object) -> ParallelError:
        return ParallelError(f"Rank {self._context.rank} is {place}, which can never end: {why}")

    def _last_collectives(self, waits: Waits | None, place: CodeLocation) -> list[Collective]:
        """Return the last collectives of this rank if it has made no progress since the last look; otherwise [].

        To detect progress, the method compares a state that is quick to read, namely the numbers of collectives that
        have begun and ended, and the present wait. It reads the collectives themselves only if this state has not
        changed, because reading them takes much longer.
        """
        first_id = self._context.group.first_id
        state = under_way, _ = flight_recorder.running_collectives(first_id), waits
        if state != self._seen_state:
            self._seen_state = state
            self._seen_collectives = []
        elif waits or (under_way and place.may_wait):
            self._seen_collectives = self._seen_collectives or flight_recorder.collectives(first_id)
            return self._seen_collectives
        return []


def has_left(context: RankContext, connection: StoreClient, rank: int) -> bool:
    """Return whether ``rank`` has left the world properly in the present generation, and therefore has not failed."""
    status = connection.read(status_key(rank), RankStatus)
    if status is None or status.position.generation < context.generation:  # the status belongs to an earlier `run`
        return False
    return status.position.phase == HAS_LEFT


def is_consequence(error: BaseException) -> bool:
    """Return whether the cause of ``error`` may be a failure on another rank."""
    return isinstance(error, Interrupted) or lost_connection(error)


def cause_of(error: BaseException, reason: Exception | None) -> BaseException:
    """Return the exception that this rank must raise or report in place of ``error``.

    Args:
        error: the exception that was raised on this rank.
        reason: the error for which the watchdog has freed this rank. None if the store already holds this error, or if
            the watchdog has not freed this rank.

    Returns:
        ``reason`` if ``error`` is only a consequence of being freed, otherwise ``error``.
    """
    if reason is None or not is_consequence(error):
        return error
    frames = error.__traceback__
    error.__traceback__ = None  # to avoid a reference cycle, because the frames of the traceback refer to the error
    return reason.with_traceback(frames)


def _as_reason(error: Exception) -> ParallelError:
    """Return ``error`` itself if it is a `ParallelError`, otherwise a `ParallelError` that describes it."""
    return error if isinstance(error, ParallelError) else ParallelError(f"The watchdog of this rank failed: {error!r}")
