"""Looking for something a few times before being put to sleep for it, as locks do that spin first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

SPIN_S = 1e-4
CROWDED_S = 1e-3  # where others have kept the core for longer than that, it is left to them for as long again,
MOST_BACK_OFF = 50  # then twice, four times, at most so many times as long,
RECOVERY = 1 - 1 / 64  # and so much of that for each answer that came in time

T = TypeVar("T")


class Spin:
    """Looks for what will be there soon.

    A short call is over sooner than a process is put to sleep and woken; and what that runs next is slow, because core
    and caches have been somebody else's. So here the core is offered to others before each look, as one of them may be
    who is to answer, and is ours again when they need it no longer. One who computes keeps it for milliseconds, though.
    If that is rare, it is the mood of the machine; if more than every 50th wait meets it, the core is offered ever more
    rarely, until the loss is at most 2 % of the time.
    """

    def __init__(self) -> None:
        self._not_before, self._back_off = 0.0, 1.0

    def until(self, look: Callable[[], T]) -> T:
        """What ``look()`` returns, which takes no time: the first that is true, or the last before the time is over."""
        begun = time.monotonic()
        if begun < self._not_before:
            return look()
        while True:
            os.sched_yield()
            found, now = look(), time.monotonic()
            if now - begun > CROWDED_S:
                self._not_before = now + self._back_off * (now - begun)
                self._back_off = min(2 * self._back_off, MOST_BACK_OFF)
            elif found:
                self._back_off = max(RECOVERY * self._back_off, 1)
            if found or now - begun >= SPIN_S:
                return found
