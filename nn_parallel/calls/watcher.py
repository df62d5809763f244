"""A thread that frees this rank from what it sits in, once that cannot come to an end any more.

It also tells ranks that have waited for long where this one stands.
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
from ..launch.group import abort_collectives, find_connections, has_unknown_connections
from ..signals import Condition, Interrupted, Interruptible
from .deadlock import Standstill, Waiting, waiting_key, waits_in
from .peers import ASKED_KEY, LEFT_KEY, Peers, where_key
from .records import Call, Progress
from .stacks import Position, position, stack

logger = logging.getLogger("nn_parallel")

UNINTERRUPTED = True  # see interrupt
# How long to sleep between two looks: a share of the time waited so far, within these bounds.
POLL_SHARE, POLL_MIN_S, POLL_MAX_S = 0.05, 5e-5, 0.02
STOP_WITHIN_S = 1.0
LOOK_EVERY_S = 0.5  # whether this rank is held up for ever, or is asked where it stands
LOOKS_PER_S = 10_000  # of all ranks together, where all are held up, at what the others say


@dataclass(eq=False)
class Watched:
    """A call that this rank takes part in, and from which it may have to be freed."""

    call: Call
    number: int  # of the section, or the negative one of the block
    left_value: str = ""  # how the word begins that another rank leaves behind when it is through the block
    timeout_s: float | None = None
    began: float | None = None  # when the time began to run; None: it does when the first rank is through
    block: Interruptible = field(default_factory=Interruptible)
    active: bool = False  # its body runs
    freed: bool = False
    reason: ParallelError | None = None  # why it was freed, if not for another rank
    doom: ParallelError | None = None  # it has failed, as this rank knows from a block inside it, and has not ended yet

    def cause(self, error: BaseException) -> BaseException:
        """Of ``error``, which came out of it: why this rank was freed, if that is what ``error`` follows from."""
        if self.reason is not None and follows(error):
            return self.reason.with_traceback(error.__traceback__)
        return error


class Watcher:
    """Looks for the failure or the end of another rank while this one may be stuck.

    It has a connection of its own: a store connection serves one request at a time.
    """

    def __init__(self, context: RankContext, progress: Callable[[], Progress]) -> None:
        """``progress`` tells how far this rank has got."""
        self._context, self._progress = context, progress
        store, _ = context.clone_store()
        self._peers = Peers(context, store)
        self._entered: list[Watched] = []  # the innermost last
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
    def entered(self, watched: Watched) -> Iterator[None]:
        """All of a call, the end of a failure included: what is around it is not watched meanwhile."""
        with self._changed:
            self._entered.append(watched)
        try:
            yield
        finally:
            with self._changed:
                self._entered.remove(watched)
                self._changed.notify()  # what is around it is watched again

    @contextlib.contextmanager
    def watching(self, watched: Watched) -> Iterator[None]:
        """The body of a call: `Interrupted` is raised in it, or at its end, when this rank has to be freed."""
        with self._changed:
            watched.active = True
            self._changed.notify()
        try:
            with watched.block:
                yield
        finally:
            with self._changed:  # the thread frees only while it holds this: from here on it touches no group
                watched.active = False
        if watched.freed or watched.doom is not None:  # too late for the signal
            raise Interrupted

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(STOP_WITHIN_S)  # it may sit in a store whose host is gone; it is a daemon
        self._peers.close()

    def _loop(self) -> None:
        pause = POLL_MIN_S
        while True:
            with self._changed:
                if self._stopped:
                    return
                watched = self._innermost()
                if not watched and (left := self._look_at - time.monotonic()) > 0:
                    pause = POLL_MIN_S
                    self._changed.wait(None if self._is_store_lost else left)
                    continue
            try:
                if time.monotonic() >= self._look_at:
                    self._look(watched)
                hopeless = [each for each in watched if self._is_hopeless(each)]
            except Exception as error:  # the store is gone, or worse: what it should tell of would never be heard
                self._is_store_lost, hopeless = True, watched
                for each in hopeless:
                    each.reason = each.reason or _as_reason(error)
            if hopeless:
                with contextlib.suppress(Exception):  # whatever it is, this rank must be freed
                    self._find_connections()
            with self._changed:
                for each in self._innermost():  # what is around a block that was entered meanwhile is not touched
                    if each in hopeless:
                        abort_collectives(self._context)  # again and again: a group may just be made, a wait begin
                        each.freed = True
                        each.block.interrupt()
                if watched and not self._stopped:
                    self._changed.wait(pause)
                    pause = min(pause * (1 + POLL_SHARE), POLL_MAX_S)

    def _innermost(self) -> list[Watched]:
        """The innermost block and the sections in it: what is around that block fails with it, if nobody catches."""
        found = []
        for each in reversed(self._entered):
            found.append(each)
            if each.number < 0:
                break
        return [each for each in found if each.active]

    def _is_hopeless(self, watched: Watched) -> bool:
        """Whether this rank must be freed from ``watched``; sets the reason if it is this rank's own."""
        me, call = self._context.rank, watched.call
        if watched.freed or watched.reason is not None:
            return True
        if watched.number > 0:
            return self._peers.first_failed(watched.number) not in (None, me)
        if watched.doom is not None or self._peers.failed_block(watched.number) is not None:
            return True
        neighbour = (me + 1) % self._context.world_size  # one for each rank: whoever sees a death tells the others
        if self._peers.is_dead(neighbour):
            return True
        if watched.timeout_s is None:
            return False
        if self._peers.text(LEFT_KEY) == watched.left_value:
            watched.began = watched.began or time.monotonic()
        if watched.began is not None and time.monotonic() - watched.began > watched.timeout_s:
            watched.reason = RankTimeoutError(
                f"Rank {me} did not finish {call} within timeout={watched.timeout_s:g} s. It stands at:\n{stack()}",
                ranks=[me],
            )
        return watched.reason is not None

    def _look(self, watched: list[Watched]) -> None:
        """Answer who asks where this rank stands; free it if it is held up for ever."""
        self._look_at = time.monotonic() + LOOK_EVERY_S
        if (says := self.has_returned) is not None and says is self._had_returned:  # and no other run has begun since
            self.has_returned = None
            self._peers.tell(waiting_key(self._context.rank), says().format())
        self._had_returned = says
        asked = self._peers.text(ASKED_KEY)
        if asked is not None and asked != self._answered:
            self._answered = asked
            self._peers.tell(where_key(self._context.rank), f"{asked}\t{position()}")
        if (reason := self._deadlock()) is None:
            return
        for each in watched:
            each.reason = each.reason or reason
        if not watched:
            self._find_connections()
            (self._context.on_deadlock or self._end_it)(reason)

    def _find_connections(self) -> None:
        """Have `abort_collectives` end those of all groups in whose collectives the main thread sits."""
        if not has_unknown_connections(self._context):
            return
        stands, first_group_id = position(), self._context.first_group_id
        uses_store = stands.makes_group or "group" in (stands.function or "")  # as new_group: it may wait there
        if stands.may_wait and not uses_store and flight_recorder.progress(first_group_id):
            last = flight_recorder.collectives(first_group_id)
            find_connections(self._context, {each.group for each in last if not each.is_over})

    def _end_it(self, reason: ParallelError) -> None:
        """Outside all blocks: the collective raises, in torch's words, so the cause is told before."""
        logger.error("%s", reason)
        abort_collectives(self._context)

    def _deadlock(self) -> ParallelError | None:
        """The error of a rank that is held up in what cannot end; None if there is no telling."""
        context, me, progress, stands = self._context, self._context.rank, self._progress(), position()
        last = [] if stands.makes_group else self._last_collectives(stands)
        if not last and not stands.makes_group:
            return None
        mine = waits_in(context, last, f"is {stands}")
        if mine != self._said:
            self._said = mine
            self._peers.tell(waiting_key(me), mine.format())
        members = {rank for each in last if not each.is_over for rank in each.members} or set(range(context.world_size))
        self._look_at += len(members) * context.world_size / LOOKS_PER_S
        others = {}
        for rank in members - {me}:
            if text := self._peers.text(waiting_key(rank)):
                others[rank] = Waiting.parse(waiting_key(rank), text)
        if why := Standstill(me, progress, stands.makes_group, last, mine, others).proof():
            return ParallelError(
                f"Rank {me} is {stands}, which can never end: {why}. Every rank must make the same calls and "
                "collectives in the same order."
            )
        return None

    def _last_collectives(self, stands: Position) -> list[Collective]:
        """Those up to the ones that this rank has been held up in since it looked last; none if it goes on."""
        first_group_id = self._context.first_group_id
        under_way = flight_recorder.progress(first_group_id)
        if under_way != self._under_way:
            self._under_way, self._last = under_way, []
        elif under_way and stands.may_wait:
            self._last = self._last or flight_recorder.collectives(first_group_id)
            return self._last
        return []


def follows(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has failed."""
    return isinstance(error, Interrupted) or lost_connection(error)


def _as_reason(error: Exception) -> ParallelError:
    return error if isinstance(error, ParallelError) else ParallelError(f"Nobody watches this rank any more: {error!r}")
