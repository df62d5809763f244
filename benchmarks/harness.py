"""One way to measure: candidates interleaved, medians with their spread, ratios pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Figure(NamedTuple):
    """One line of the table: a figure in seconds beside a reference of the same run."""

    name: str
    reference: str
    goal: float  # the largest ratio that meets it
    seconds: list[float]
    reference_seconds: list[float]

    @property
    def ratio(self) -> float:
        """The median of the ratios of neighbouring measurements, which share the machine's mood."""
        return statistics.median(a / b for a, b in zip(self.seconds, self.reference_seconds, strict=True))

    def __str__(self) -> str:
        figure, reference = statistics.median(self.seconds), statistics.median(self.reference_seconds)
        low, high = min(self.seconds), max(self.seconds)
        met = "met" if self.ratio <= self.goal else "NOT met"
        return (
            f"{self.name:44s} {_unit(figure):>9s} ({_unit(low)} to {_unit(high)})   {self.reference:26s} "
            f"{_unit(reference):>9s}   {self.ratio:6.2f} x, goal {self.goal:g} x: {met}"
        )


def measure(
    name: str,
    run: Callable[[], object],
    reference: str,
    run_reference: Callable[[], object],
    *,
    goal: float,
    repetitions: int,
    calls: int = 1,
) -> Figure:
    """Time ``calls`` calls of each, the reference first, ``repetitions`` times in turn."""
    seconds, reference_seconds = [], []
    for _ in range(repetitions):
        reference_seconds.append(seconds_of(run_reference, calls))
        seconds.append(seconds_of(run, calls))
    return Figure(name, reference, goal, seconds, reference_seconds)


def seconds_of(fn: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def _unit(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"
