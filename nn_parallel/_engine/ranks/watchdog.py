"""A thread that frees this rank from a block, or a collective, that cannot come to its end any more.

It asks: has the block failed on another rank, has a rank died, is the time over, is this rank stuck for ever? It also
tells the others where this rank stands.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module


@dataclass(eq=False)
class BlockState:
    """A block that this rank is in; or a barrier alone, as a block that never begins."""

    call: Call
    around: BlockState | None = None  # the block that this one is in
    timeout_s: float | None = None
    begin: float = math.inf  # the number of the barrier at which it begins, once this rank has come there
    end: float = math.inf  # and of that at which it ends
    deadline: float = math.inf  # when its time is over
    body: CancelScope = field(default_factory=CancelScope)
    is_active: bool = False  # its body runs
    has_passed: bool = False  # of a barrier alone: all ranks have come
    is_mixed: bool = False  # another rank was at another barrier
    must_leave: bool = False  # see `make_leave`
    reason: Exception | None = None

    def make_leave(self, reason: Exception | None = None) -> None:
        """Note that this rank has to leave it, by `Interrupted`.

        Without a ``reason``, which is for all ranks to raise, another rank has told already why.
        """
        self.must_leave = True
        self.reason = self.reason or reason

    def first_due(self) -> BlockState:
        """Return that of this block and those around it whose time is over first."""
        around = self.around.first_due() if self.around is not None else self
        return around if around.deadline < self.deadline else self


class Watchdog:
    """Looks for what ends the innermost block, while this rank may be stuck in it."""

    def __init__(self, context: RankContext, board: StatusBoard, entered: list[BlockState]) -> None:
        """Watch the blocks ``entered``, the innermost last, of a rank whose position ``board`` tells."""
        self._context = context
        self._board = board
        self._others = [rank for rank in range(context.world_size) if rank != context.rank]
        self._next_rank = (context.rank + 1) % context.world_size
        self._connection = context.connect()
        self._liveness = Liveness(context, self._connection)
        self._blocks = entered
        self._changed = Condition()
        self._stopped = False
        self._next_look = 0.0  # when to look next, where this rank stands
        self._told: Whereabouts | None = None
        self._state: Any = None  # as it was at the last look, see `_last_collectives`,
        self._last: list[Collective] = []  # and what it found then
        self._nccl = ""  # how far its collectives were
        self._raised_in = -1  # the group in which a failure on the accelerator was raised, see `Group.times_closed`
        self._reason: Exception | None = None  # see `reason`
        on_cpu = context.world.device.type == "cpu"
        self._can_raise = not on_cpu and stay_ready(context.on_leave)  # outside all blocks
        self._thread = threading.Thread(target=self._loop, name="nn_parallel watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def entered(self, block: BlockState) -> Iterator[None]:
        """From entering a block until its end, the handling of its failure included: the one around is not watched."""
        with self._changed:
            self._blocks.append(block)
        try:
            yield
        finally:
            with self._changed:
                self._blocks.remove(block)
                if self._blocks:
                    self._changed.notify()  # what is around it is watched again

    @contextlib.contextmanager
    def watching(self, block: BlockState) -> Iterator[None]:
        """Raise `Interrupted` in the body of the block, or at its end, when this rank has to leave it."""
        with self._changed:
            block.is_active = True
            self._changed.notify()
        try:
            with block.body:
                yield
                synchronize(self._context.world.device)  # the block is through when all that it has queued is
        finally:
            with self._changed:  # the thread frees this rank only while it holds this: no more from here on
                block.is_active = False
        if block.must_leave:  # too late for the signal
            raise Interrupted

    @property
    def reason(self) -> Exception | None:
        """Why a collective outside all blocks was ended, as long as its group is there."""
        return self._reason if self._context.group.interrupted else None

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(times.WATCHDOG_ENDS_WITHIN_S)  # else it stays, as a daemon
        self._liveness.close()

    def _loop(self) -> None:
        share, least_s, most_s = times.POLL
        pause = least_s
        seen: BlockState | None = None
        while True:
            with self._changed:
                if self._stopped:
                    return
                block = self._innermost()
                generation = self._context.generation
                if block is not seen:
                    pause = least_s
                    seen = block
                    if block is not None:  # most are over in a moment, and this thread would hold them up
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
                if block is not None:  # first: what is found below may only follow from that
                    must_leave = block.must_leave or self._has_ended(generation)
                if not must_leave and block is not None:
                    reason = self._death(block) or self._timeout(block) or self._context.group.error()
                if not must_leave and reason is None and time.monotonic() >= self._next_look:
                    reason = self._look(block)
            except Exception as error:  # the store is gone, or worse: what it should tell of would never be heard
                reason = _as_reason(error)
                self._next_look = time.monotonic() + times.STAND_EVERY_S
                if block is None and self._is_host_out_of_reach() and location().may_wait:
                    self._end_collective(reason)
            if block is None:
                continue
            if must_leave or reason is not None:
                self._free(block, generation, reason)
            with self._changed:
                if not self._stopped:
                    self._changed.wait(pause)
                    pause = min(pause * (1 + share), most_s)

    def _check_links(self) -> None:
        """Let all know of the ranks on other nodes that rank 0 has lost; it leaves its own collective after them.

        Else its launcher, which may end the ranks beside one that fails, would end them before they can tell.
        """
        links = self._context.links
        if links is not None and links.look() and self._context.rank == 0:
            self._connection.write(LOST_KEY, Lost(links.lost))
            self._next_look = time.monotonic() + 2 * times.STAND_EVERY_S

    def _is_host_out_of_reach(self) -> bool:
        """Return whether the node of the store is, so that gloo's connections do not end by themselves."""
        host = self._context.host
        return host is not None and host.is_out_of_reach and not self._context.group.interrupted

    def _free(self, block: BlockState, generation: int, reason: Exception | None) -> None:
        """Have this rank leave ``block``. Called at every look, as the first may miss a group that is just being made.

        First comes the interrupt, and then the abort, after which a collective of an accelerator returns wrong numbers.
        """
        self._end_body(block, generation, reason)
        if self._find_connections():
            self._end_body(block, generation, reason)

    def _end_body(self, block: BlockState, generation: int, reason: Exception | None) -> None:
        with self._changed:
            if block is self._innermost() and generation == self._context.generation:  # else another one has ended
                block.make_leave(reason)
                block.body.interrupt()
                self._context.group.abort()

    def _find_connections(self) -> bool:
        """Find the connections of groups that the user has made; return whether `Group.abort` now knows more."""
        with contextlib.suppress(Exception):  # the watchdog must go on, to free this rank again
            return self._context.group.find_connections(self._connection.store)
        return False

    def _innermost(self) -> BlockState | None:
        """Return the innermost block, if its body runs: what is around it fails with it, if nobody catches."""
        return self._blocks[-1] if self._blocks and self._blocks[-1].is_active else None

    def _has_ended(self, generation: int) -> bool:
        """Return whether another rank has ended it, so that the innermost block has failed."""
        return self._connection.get(ended_key(generation)) is not None

    def _death(self, block: BlockState) -> RankError | None:
        """Return the error of all ranks, if one has died. Each rank watches the next one, and tells of its death."""
        if not self._liveness.is_dead(self._next_rank):
            return None
        deaths = self._liveness.deaths(self._others, block.call)
        return rank_error(block.call.function, self._context.world_size, deaths)

    def _timeout(self, block: BlockState) -> RankTimeoutError | None:
        """Return the error of all ranks, if the time of ``block`` is over, or of one around it."""
        due = block.first_due()
        if block.must_leave or time.monotonic() <= due.deadline:
            return None
        me = self._context.rank
        whereabouts: dict[int, Whereabouts | None] = {me: Whereabouts(f"is {location()}", stack(), {}, None)}
        whereabouts |= {rank: self._connection.read(whereabouts_key(rank), Whereabouts) for rank in self._others}
        silent = [rank for rank, each in whereabouts.items() if each is None or not each.waits_for(me)]
        return timeout_error(f"{due.call} did not end within timeout={due.timeout_s:g} s", silent, whereabouts)

    def _look(self, block: BlockState | None) -> ParallelError | None:
        """Tell where this rank stands; why it must leave ``block``, if it is stuck for ever.

        Outside of all blocks its collective is ended here, also if it waits for a rank that is lost.
        """
        self._next_look = time.monotonic() + times.STAND_EVERY_S
        if block is None and self._can_raise and (failure := self._failure_on_accelerator()):
            self._end_collective(failure)
            return None
        # Before the collectives: what is entered meanwhile makes their counts too high, which hides a standstill until
        # the next look. Too low they would make one up.
        position = self._board.position()
        place = location()
        waits = self._board.waits
        last = self._last_collectives(waits, place)
        self._tell(Whereabouts(waits.where if waits else f"is {place}", stack(), self._entered(last), waits))
        stuck_in = next((each for each in reversed(last) if each.by_main_thread and not each.is_over), None)
        if waits is not None or stuck_in is None:
            return None
        others = sorted(set(stuck_in.members) - {self._context.rank})
        reason = self._loss(place, others) if block is None else None  # a block fails by itself if a rank is lost
        reason = reason or self._deadlock(position, place, stuck_in, others)
        if block is not None:
            return reason
        if reason is not None:
            self._end_collective(reason)
        return None

    def _tell(self, whereabouts: Whereabouts) -> None:
        """Let the others know where this rank stands."""
        if whereabouts != self._told:
            self._told = whereabouts
            self._connection.write(whereabouts_key(self._context.rank), whereabouts)

    def _entered(self, last: list[Collective]) -> dict[str, int]:
        """By process group, how many collectives this rank can have entered at most."""
        return {self._key_of(group): number for group, number in flight_recorder.entered(last).items()}

    def _key_of(self, group: str) -> str:
        """Return a name of a process group that no later one gets; torch's begin at 0 when all are made again."""
        generation, made = self._context.group.begun
        return f"{generation}.{made}/{group}"

    def _failure_on_accelerator(self) -> Exception | None:
        """Return why a collective on the accelerator cannot end. That a rank has died, NCCL need not see."""
        group = self._context.group
        if self._raised_in == group.times_closed:
            return None
        before = self._nccl
        self._nccl = group.state_of_nccl()
        stands_still = self._nccl != "" and self._nccl == before
        next_rank = self._next_rank
        try:
            failure = group.error()
            if failure is not None and (collective_timed_out(failure) or not self._has_one_left()):
                return failure
            is_dead = stands_still and self._liveness.is_dead(next_rank)
            if not is_dead or has_left(self._context, self._connection, next_rank) or group.has_ended_on_accelerator():
                return None
            return dist.DistBackendError(f"NCCL: Connection closed by peer. {self._liveness.death(next_rank)}")
        except ParallelError as lost:  # the store, with its host
            return lost if stands_still and not group.has_ended_on_accelerator() else None

    def _has_one_left(self) -> bool:
        """Return whether a rank has left the others as it should, which closes its connections."""
        return any(has_left(self._context, self._connection, rank) for rank in self._others)

    def _end_collective(self, reason: Exception) -> None:
        """Outside all blocks: gloo's collective raises, in torch's words, so the cause is told before.

        One on an accelerator returns, with wrong numbers: so ``reason`` itself is raised there, before that.
        """
        times_closed = self._context.group.times_closed
        self._find_connections()
        if self._context.on_deadlock:
            self._context.on_deadlock(reason)
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

    def _loss(self, place: CodeLocation, others: list[int]) -> ParallelError | None:
        """Return the error of this rank, if one of ``others``, with which it is stuck, is on a silent node."""
        if lost := self._liveness.out_of_reach(others):
            return self._never(place, self._liveness.death(lost[0]))
        return None

    def _deadlock(
        self, position: Position, place: CodeLocation, stuck_in: Collective, others: list[int]
    ) -> ParallelError | None:
        """Return the error of this rank, if one of ``others`` waits for it before the collective it is ``stuck_in``.

        All ranks make the same calls and collectives in the same order. So a rank that waits in a call for this one,
        and has not entered the collective yet, never enters it. It may be late for hours and still come in any other
        case, of which nothing is said.
        """
        self._next_look += (len(others) + 1) * self._context.world_size / times.STANDINGS_PER_S
        key = self._key_of(stuck_in.group)
        number = stuck_in.number
        for rank in others:
            other = self._connection.read(whereabouts_key(rank), Whereabouts)
            if other is None or other.waits is None or other.entered.get(key, number) >= number:
                continue
            if self._context.rank in other.waits.ranks and position < other.waits.until:
                why = f"rank {rank} {other.where} without it."
                return self._never(
                    place, f"{why} Every rank must make the same calls and collectives in the same order."
                )
        return None

    def _never(self, place: CodeLocation, why: object) -> ParallelError:
        return ParallelError(f"Rank {self._context.rank} is {place}, which can never end: {why}")

    def _last_collectives(self, waits: Waits | None, place: CodeLocation) -> list[Collective]:
        """Return the last collectives of this rank, if it has not moved since the last look; none if it goes on."""
        first_id = self._context.group.first_id
        state = under_way, _ = flight_recorder.running_collectives(first_id), waits
        if state != self._state:
            self._state = state
            self._last = []
        elif waits or (under_way and place.may_wait):
            self._last = self._last or flight_recorder.collectives(first_id)
            return self._last
        return []


def has_left(context: RankContext, connection: StoreClient, rank: int) -> bool:
    """Return whether ``rank`` has left the others as it should: it has no part in a failure."""
    status = connection.read(status_key(rank), RankStatus)
    if status is None or status.position.generation < context.generation:  # in an earlier `run`
        return False
    return status.position.phase == HAS_LEFT


def is_consequence(error: BaseException) -> bool:
    """Return whether ``error`` is what a rank gets when another one has failed."""
    return isinstance(error, Interrupted) or lost_connection(error)


def cause_of(error: BaseException, reason: Exception | None) -> BaseException:
    """Return the exception to raise for ``error``: why this rank was freed, if ``error`` follows from that."""
    if reason is None or not is_consequence(error):
        return error
    frames = error.__traceback__
    error.__traceback__ = None  # it would live in a cycle with its frames
    return reason.with_traceback(frames)


def _as_reason(error: Exception) -> ParallelError:
    return error if isinstance(error, ParallelError) else ParallelError(f"Nobody watches this rank any more: {error!r}")
