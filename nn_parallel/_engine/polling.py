"""Looking for something again and again: at first without sleeping, as locks do, then more and more seldom."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

SPIN_S = 3e-4  # how long `Spin` looks
CROWDED_S = 1e-3  # who takes an offered core for longer computes, and that time is lost
LOSS_SHARE = 0.02  # of all time that may be lost
CREDIT_S = 0.02  # that may be lost in a row
PAID_AHEAD_S = CREDIT_S / LOSS_SHARE  # until that is paid back

T = TypeVar("T")


def looks(share: float, least_s: float, most_s: float) -> Iterator[float]:
    """One for each look at what is waited for: how many seconds that has taken so far.

    From the third one on it sleeps before, a ``share`` of that time, within these bounds.
    """
    start = time.monotonic()
    yield 0.0
    while True:
        waited = time.monotonic() - start
        yield waited
        time.sleep(min(max(waited * share, least_s), most_s))


class Spin:
    """Looks for what will be there soon.

    A short call is over sooner than a process is put to sleep and woken; and what that runs next is slow, because core
    and caches have been somebody else's. So here the core is offered to others before each look, as one of them may be
    who is to answer, and is ours again when they need it no longer. One who computes keeps it for milliseconds, though.
    That may happen now and then; where it happens again and again, the core is offered no more often than costs 2 %
    of the time (a leaky bucket).
    """

    def __init__(self) -> None:
        self._paid_at = 0.0  # when what has been lost so far is that share of the time

    def offer_core(self) -> bool:
        """Let others have the core first, if they want it; False, and at once, if that has cost too much of late."""
        begun = time.monotonic()
        if self._paid_at - begun > PAID_AHEAD_S:
            return False
        os.sched_yield()
        now = time.monotonic()
        if now - begun > CROWDED_S:
            self._paid_at = max(self._paid_at, now) + (now - begun) / LOSS_SHARE
        return True

    def until(self, look: Callable[[], T]) -> T:
        """Call ``look``, which takes no time, until its result is true or the time is over; return the last result."""
        end = time.monotonic() + SPIN_S
        while self.offer_core():
            result = look()
            if result or time.monotonic() >= end:
                return result
        return look()
