"""A thread that frees this rank from a block, or a collective, that cannot come to its end any more.

It asks: has the block failed on another rank, has a rank died, is the time over, is this rank stuck for ever? It also
tells ranks that have waited for long where this one stands.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..errors import ParallelError, RankTimeoutError, lost_connection
from ..launch import flight_recorder
from ..launch.context import RankContext
from ..launch.flight_recorder import Collective
from ..launch.liveness import Liveness
from ..launch.store import ASKED_KEY, LEFT_KEY, waiting_key, where_key
from ..signals import Condition, Interrupted, Interruptible
from .deadlock import Standstill, waits_in
from .failures import BlockOutcomes
from .records import Call, Progress, Waiting, Where
from .stacks import Position, position, stack

logger = logging.getLogger("nn_parallel")

UNINTERRUPTED = True  # see signals
# How long to sleep between two looks: a share of the time waited so far, within these bounds.
POLL_SHARE, POLL_MIN_S, POLL_MAX_S = 0.05, 5e-5, 0.02
STOP_WITHIN_S = 1.0
LOOK_EVERY_S = 0.5  # whether this rank is stuck for ever, or is asked where it stands
LOOKS_PER_S = 10_000  # of all ranks together, where all are stuck, at what the others say


@dataclass(eq=False)
class Block:
    """A block that this rank is in."""

    call: Call
    number: int
    timeout_s: float | None = None
    began: float | None = None  # from when its time counts; if None, from when the first rank has left it
    left_value: str = ""  # what that rank writes into the store
    body: Interruptible = field(default_factory=Interruptible)
    is_active: bool = False  # its body runs
    has_failed: bool = False  # this rank is to leave it
    reason: ParallelError | None = None  # why, if not because of another rank

    def cause(self, error: BaseException) -> BaseException:
        """Of ``error``, which came out of it: why this rank was freed, if that is what ``error`` follows from."""
        if self.reason is not None and is_consequence(error):
            return self.reason.with_traceback(error.__traceback__)
        return error


class Watcher:
    """Looks for what ends the innermost block, while this rank may be stuck in it."""

    def __init__(self, context: RankContext, progress: Callable[[], Progress], blocks: list[Block]) -> None:
        """``progress`` tells how far this rank has got; in ``blocks`` it is, the innermost last."""
        self._context, self._progress = context, progress
        self._connection = context.connect()
        self._outcomes = BlockOutcomes(context, self._connection)
        self._liveness = Liveness(context, self._connection)
        self._blocks = blocks
        self._changed = Condition()
        self._stopped = False
        self._look_at = 0.0  # when to look next, every `LOOK_EVERY_S`
        self._answered = ""  # the question that has been answered last
        self._said: Waiting | None = None
        self._under_way, self._last = "", list[Collective]()  # see `_last_collectives`
        self._is_store_lost = False
        self.has_returned: Callable[[], Waiting] | None = None  # from a run: what this rank says then, not told yet
        self._had_returned: Callable[[], Waiting] | None = None  # when it looked last
        self._thread = threading.Thread(target=self._loop, name="nn_parallel watcher", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def entered(self, block: Block) -> Iterator[None]:
        """All of a block, the end of its failure included: what is around it is not watched meanwhile."""
        with self._changed:
            self._blocks.append(block)
        try:
            yield
        finally:
            with self._changed:
                self._blocks.remove(block)
                self._changed.notify()  # what is around it is watched again

    @contextlib.contextmanager
    def watching(self, block: Block) -> Iterator[None]:
        """The body of a block: `Interrupted` is raised in it, or at its end, when this rank has to leave it."""
        with self._changed:
            block.is_active = True
            self._changed.notify()
        try:
            with block.body:
                yield
        finally:
            with self._changed:  # while the thread holds this it frees: from here on it does not end this block
                block.is_active = False
        if block.has_failed:  # too late for the signal
            raise Interrupted

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(STOP_WITHIN_S)  # it may sit in a store whose host is gone; it is a daemon
        self._liveness.close()

    def _loop(self) -> None:
        pause = POLL_MIN_S
        while True:
            with self._changed:
                if self._stopped:
                    return
                block = self._innermost()
                if block is None and (left := self._look_at - time.monotonic()) > 0:
                    pause = POLL_MIN_S
                    self._changed.wait(None if self._is_store_lost else left)
                    continue
            must_leave, reason = False, None
            try:
                if time.monotonic() >= self._look_at:
                    reason = self._look(block)
                if block is not None:
                    reason = reason or self._timeout(block)
                    must_leave = reason is not None or self._must_leave(block)
            except Exception as error:  # the store is gone, or worse: what it should tell of would never be heard
                self._is_store_lost, must_leave, reason = True, True, _as_reason(error)
            if block is None:
                continue
            if must_leave:
                with contextlib.suppress(Exception):  # whatever it is, this rank must be freed
                    self._find_connections()
            with self._changed:
                if must_leave and block is self._innermost():
                    block.has_failed, block.reason = True, block.reason or reason
                    self._context.group.abort()  # again and again: a group may just be made, a wait begin
                    block.body.interrupt()
                if not self._stopped:
                    self._changed.wait(pause)
                    pause = min(pause * (1 + POLL_SHARE), POLL_MAX_S)

    def _innermost(self) -> Block | None:
        """The innermost block, if its body runs: what is around it fails with it, if nobody catches."""
        return self._blocks[-1] if self._blocks and self._blocks[-1].is_active else None

    def _must_leave(self, block: Block) -> bool:
        """Whether ``block`` has failed, or a rank has died in it."""
        if block.has_failed or self._outcomes.failure_of(block.number) is not None:
            return True
        # Each rank looks after one other, and whoever sees a death tells all.
        return self._liveness.is_dead((self._context.rank + 1) % self._context.world_size)

    def _timeout(self, block: Block) -> RankTimeoutError | None:
        """The error of this rank, if its time in ``block`` is over."""
        if block.timeout_s is None or block.has_failed:
            return None
        if block.began is None and self._connection.get(LEFT_KEY) == block.left_value:
            block.began = time.monotonic()
        if block.began is None or time.monotonic() - block.began <= block.timeout_s:
            return None
        me = self._context.rank
        return RankTimeoutError(
            f"Rank {me} did not finish {block.call} within timeout={block.timeout_s:g} s. It stands at:\n{stack()}",
            ranks=[me],
        )

    def _look(self, block: Block | None) -> ParallelError | None:
        """Answer who asks where this rank stands; why it must leave ``block``, if it is stuck for ever.

        Outside of all blocks its collective is ended here.
        """
        self._look_at = time.monotonic() + LOOK_EVERY_S
        if (says := self.has_returned) is not None and says is self._had_returned:  # and no other run has begun since
            self.has_returned = None
            self._connection.write(waiting_key(self._context.rank), says())
        self._had_returned = says
        asked = self._connection.get(ASKED_KEY)
        if asked is not None and asked != self._answered:
            self._answered = asked
            self._connection.write(where_key(self._context.rank), Where(asked, str(position())))
        reason = self._deadlock()
        if reason is not None and block is None:
            self._find_connections()
            (self._context.on_deadlock or self._end_it)(reason)
        return reason

    def _find_connections(self) -> None:
        """Have `Group.abort` end those of all groups in whose collectives the main thread sits."""
        group = self._context.group
        if not group.has_unknown_connections:
            return
        stands = position()
        uses_store = stands.makes_group or "group" in (stands.function or "")  # as new_group: it may wait there
        if stands.may_wait and not uses_store and flight_recorder.progress(group.first_id):
            last = flight_recorder.collectives(group.first_id)
            group.find_connections({each.group for each in last if not each.is_over})

    def _end_it(self, reason: ParallelError) -> None:
        """Outside all blocks: the collective raises, in torch's words, so the cause is told before."""
        logger.error("%s", reason)
        self._context.group.abort()

    def _deadlock(self) -> ParallelError | None:
        """The error of a rank that is stuck in what cannot end; None if there is no telling."""
        context, me, progress, stands = self._context, self._context.rank, self._progress(), position()
        last = [] if stands.makes_group else self._last_collectives(stands)
        if not last and not stands.makes_group:
            return None
        mine = waits_in(context, last, f"is {stands}")
        if mine != self._said:
            self._said = mine
            self._connection.write(waiting_key(me), mine)
        members = {rank for each in last if not each.is_over for rank in each.members} or set(range(context.world_size))
        self._look_at += len(members) * context.world_size / LOOKS_PER_S
        said = {rank: self._connection.read(waiting_key(rank), Waiting) for rank in members - {me}}
        others = {rank: waiting for rank, waiting in said.items() if waiting is not None}
        if why := Standstill(me, progress, stands.makes_group, last, mine, others).proof():
            return ParallelError(
                f"Rank {me} is {stands}, which can never end: {why}. Every rank must make the same calls and "
                "collectives in the same order."
            )
        return None

    def _last_collectives(self, stands: Position) -> list[Collective]:
        """Those up to the ones that this rank has been stuck in since it looked last; none if it goes on."""
        first_id = self._context.group.first_id
        under_way = flight_recorder.progress(first_id)
        if under_way != self._under_way:
            self._under_way, self._last = under_way, []
        elif under_way and stands.may_wait:
            self._last = self._last or flight_recorder.collectives(first_id)
            return self._last
        return []


def is_consequence(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has failed."""
    return isinstance(error, Interrupted) or lost_connection(error)


def _as_reason(error: Exception) -> ParallelError:
    return error if isinstance(error, ParallelError) else ParallelError(f"Nobody watches this rank any more: {error!r}")
