"""A thread that frees this rank from what it sits in, once that cannot come to an end any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from .errors import ParallelError, RankTimeoutError
from .groups import abort_collectives
from .interrupt import Condition, Interrupted, Interruptible
from .peers import LEFT_KEY, Peers
from .positions import position
from .reports import Call
from .world import Membership

UNINTERRUPTED = True  # see interrupt
# How long to sleep between two looks: a share of the time waited so far, within these bounds.
POLL_SHARE, POLL_MIN_S, POLL_MAX_S = 0.05, 5e-5, 0.02
STOP_WITHIN_S = 1.0
STUCK_AFTER_S = 1.0  # in one collective, after another rank has left the block


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
    stuck: tuple[int, str, float] | None = None  # in which collective, where, since when
    doom: ParallelError | None = None  # it has failed, as this rank knows from a block inside it, and has not ended yet


class Watcher:
    """Looks for the failure or the end of another rank while this one may be stuck.

    It has a connection of its own: a store connection serves one request at a time.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        store, _ = member.clone_store()
        self._peers = Peers(member, store)
        self._entered: list[Watched] = []  # the innermost last
        self._changed = Condition()
        self._stopped = False
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
                if not watched:
                    pause = POLL_MIN_S
                    self._changed.wait()
                    continue
            try:
                hopeless = [each for each in watched if self._is_hopeless(each)]
            except Exception as error:  # the store is gone, or worse: what it should tell of would never be heard
                hopeless = watched
                for each in hopeless:
                    each.reason = each.reason or _as_reason(error)
            with self._changed:
                for each in self._innermost():  # what is around a block that was entered meanwhile is not touched
                    if each in hopeless:
                        abort_collectives(self._member)  # again and again: a group may just be made, a wait begin
                        each.freed = True
                        each.block.interrupt()
                if not self._stopped:
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
        me, call = self._member.rank, watched.call
        if watched.freed:
            return True
        if watched.number > 0:
            return self._peers.first_failed(watched.number) not in (None, me)
        if watched.doom is not None or self._peers.failed_block(watched.number) is not None:
            return True
        neighbour = (me + 1) % self._member.world_size  # one for each rank: whoever sees a death tells the others
        if self._peers.is_dead(neighbour):
            return True
        left, _, who = (self._peers.text(LEFT_KEY) or "").partition("\t")
        others_have_left = any(left == each.left_value for each in list(self._entered))  # this block, or one around it
        if left == watched.left_value:
            watched.began = watched.began or time.monotonic()
        began, timeout_s = watched.began, watched.timeout_s
        if timeout_s is not None and began is not None and time.monotonic() - began > timeout_s:
            watched.reason = RankTimeoutError(
                f"Rank {me} did not finish {call} within timeout={timeout_s:g} s. It stands at:\n{position().stack}",
                ranks=[me],
            )
        elif others_have_left and _is_stuck(watched):
            watched.reason = ParallelError(f"Rank {me} is {position()}, which can never end: {who}.")
        return watched.reason is not None


def _is_stuck(watched: Watched) -> bool:
    """Whether this rank has waited for a while in one and the same collective for all."""
    where = position()
    if where.collective is None:
        watched.stuck = None
        return False
    group = dist.group.WORLD
    number: int = group._get_sequence_number_for_group() if group else 0  # type: ignore[attr-defined]
    if watched.stuck is None or watched.stuck[:2] != (number, str(where)):
        watched.stuck = number, str(where), time.monotonic()
    return time.monotonic() - watched.stuck[2] > STUCK_AFTER_S


def _as_reason(error: Exception) -> ParallelError:
    return error if isinstance(error, ParallelError) else ParallelError(f"Nobody watches this rank any more: {error!r}")
