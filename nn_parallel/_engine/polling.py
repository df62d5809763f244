"""Waits that check a condition again and again: `Spin` without sleeping, `looks` at growing intervals.

A *look* is one check, such as a query of the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

SPIN_S = 3e-4  # how long `Spin` looks before it gives up
# The following constants limit the time that `Spin` loses when it offers its core to other processes.
CROWDED_S = 1e-3  # if another process keeps the core for longer than this, the time counts as lost
LOSS_SHARE = 0.02  # the fraction of all time that may be lost
CREDIT_S = 0.02  # the time that may be lost in one go, before the limit of LOSS_SHARE applies
# If the leaky bucket of `Spin` needs longer than this to run empty, it counts as full, and the core is not offered.
PAID_AHEAD_S = CREDIT_S / LOSS_SHARE

T = TypeVar("T")


def looks(share: float, least_s: float, most_s: float) -> Iterator[float]:
    """Pace a loop that polls: yield each time the loop should look, and sleep in between.

    The yielded values are the seconds since the first look. The first two looks follow each other immediately.

    Args:
        share: the fraction of the elapsed time that each sleep takes.
        least_s: the shortest sleep.
        most_s: the longest sleep.
    """
    start = time.monotonic()
    yield 0.0
    while True:
        waited = time.monotonic() - start
        yield waited
        time.sleep(min(max(waited * share, least_s), most_s))


class Spin:
    """A short wait for the answer of another process, which looks again and again instead of sleeping.

    The answer often comes sooner than the kernel can put this process to sleep and wake it up. A process that has slept
    also runs slowly at first, because other processes have used its core and its caches meanwhile.

    But the other process may need this core to answer. So before each look, this process offers the core to other
    processes with `os.sched_yield`. A process that only answers returns the core soon. A process that computes keeps
    the core for milliseconds, and this process loses that time. A rare loss is harmless. A leaky bucket limits the
    losses to 2 % of the time: each loss fills the bucket, and while the bucket is full, the core is not offered.
    """

    def __init__(self) -> None:
        # The time at which the leaky bucket will be empty. Each loss delays it by the loss divided by LOSS_SHARE.
        self._paid_at = 0.0

    def offer_core(self) -> bool:
        """Offer the core to other processes, unless this has cost too much time recently.

        Returns:
            Whether the core was offered.
        """
        begun = time.monotonic()
        if self._paid_at - begun > PAID_AHEAD_S:
            return False
        os.sched_yield()
        now = time.monotonic()
        if now - begun > CROWDED_S:
            self._paid_at = max(self._paid_at, now) + (now - begun) / LOSS_SHARE
        return True

    def until(self, look: Callable[[], T]) -> T:
        """Call ``look`` until its result is true, but for at most `SPIN_S` seconds, and return the last result.

        ``look`` must be fast. The wait ends earlier, after one last call of ``look``, if too much time was lost
        recently, so that the core must not be offered (see the docstring of the class).
        """
        end = time.monotonic() + SPIN_S
        while self.offer_core():
            result = look()
            if result or time.monotonic() >= end:
                return result
        return look()
