"""One way to measure: candidates interleaved, medians with their spread, ratios pair by pair, the machine on record."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Figure:
    """One line of the table: repeated values of a figure, beside those of a reference of the same run if it has one."""

    name: str
    values: list[float]
    goal: float | None = None  # the largest ratio, or without reference the largest value, that meets it; None: no goal
    reference: str = ""
    reference_values: list[float] = field(default_factory=list)
    unit: str = "s"  # or "MiB"
    topic: str = ""

    @property
    def ratio(self) -> float | None:
        """The median of the ratios of neighbouring measurements, which share the machine's mood."""
        if not self.reference_values:
            return None
        return statistics.median(a / b for a, b in zip(self.values, self.reference_values, strict=True))

    @property
    def is_met(self) -> bool | None:
        """None where there is no goal."""
        if self.goal is None:
            return None
        return (statistics.median(self.values) if self.ratio is None else self.ratio) <= self.goal

    def cells(self) -> list[str]:
        """Name, value with its spread, reference, its value, ratio, goal, whether it is met."""
        spread = f"{self._show(min(self.values))} to {self._show(max(self.values))}"
        times = "" if self.ratio is None else " x"
        goal = "" if self.goal is None else f"{self.goal:.3g} x" if times else self._show(self.goal)
        return [
            self.name,
            f"{self._show(statistics.median(self.values))} ({spread})",
            self.reference,
            self._show(statistics.median(self.reference_values)) if self.reference_values else "",
            "" if self.ratio is None else f"{self.ratio:.3g} x" if self.ratio < 10 else f"{self.ratio:.0f} x",
            goal,
            {None: "", True: "met", False: "NOT met"}[self.is_met],
        ]

    def _show(self, value: float) -> str:
        if self.unit != "s":
            return f"{value:.0f} {self.unit}"
        for factor, unit in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {unit}"
        return f"{value * 1e6:.3g} us"


HEADER = ["figure", "measured (spread)", "reference", "its value", "ratio", "goal", ""]
WIDTHS = [52, 34, 38, 9, 8, 8, 8]


def as_line(cells: Iterable[str]) -> str:
    """A line of the printed table."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def measure(
    name: str,
    run: Callable[[], object],
    reference: str = "",
    run_reference: Callable[[], object] | None = None,
    *,
    goal: float | None = None,
    repetitions: int,
    calls: int = 1,
    warm_up: int = 1,
) -> Figure:
    """Time ``calls`` calls of each, the reference first, ``repetitions`` times in turn."""
    for _ in range(warm_up):
        run()
        if run_reference is not None:
            run_reference()
    values, reference_values = [], []
    for _ in range(repetitions):
        if run_reference is not None:
            reference_values.append(seconds_of(run_reference, calls))
        values.append(seconds_of(run, calls))
    return Figure(name, values, goal, reference, reference_values)


def seconds_of(fn: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def python(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints that runs ``code``; it keeps compiled modules, as an installation does.

    What it writes to stderr is dropped: torchrunx ends its agents by a signal, and they tell of it.
    """
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environ()
    )
    return done.stdout


@contextlib.contextmanager
def waiting(code: str) -> Iterator[list[str]]:
    """The words that a fresh interpreter prints first; then it waits for a line, which it gets when the block ends."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environ()) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()
        process.communicate("\n")


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def environment() -> dict[str, str]:
    """What a figure depends on, and no secret."""
    models = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")]
    memory = next((line.split()[1] for line in _read("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor()}",
        "memory": f"{int(memory) >> 20} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []
