"""What grows with use? Hundreds of thousands of calls, and the memory, descriptors, threads and keys after each share.

``python -m benchmarks.soak docs/project/performance_soak.svg`` prints a table and draws the plot, in half an hour;
``--share 0.01`` makes one call of a hundred. Counted are the script and all its descendants.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from nn_parallel import ParallelExecutor, on_rank
from nn_parallel._engine.descendants import children_of
from nn_parallel._engine.pool.pool import Pool
from nn_parallel._engine.pool.site import LocalSite

SAMPLES = 20
QUANTITIES = ("memory, MiB", "descriptors", "threads", "keys in the store")


class Phase(NamedTuple):
    """So many ``calls`` of one kind; ``make`` makes some of them in a pool of two workers."""

    name: str
    calls: int
    make: Callable[[ParallelExecutor, int], object]


def warm_runs(pool: ParallelExecutor, calls: int) -> None:
    for _ in range(calls):
        pool.run(int)


def failing_runs(pool: ParallelExecutor, calls: int) -> None:
    for _ in range(calls):
        with contextlib.suppress(ExceptionGroup):
            pool.run(int, "no number")


def pools(_: ParallelExecutor, calls: int) -> None:
    for _ in range(calls):
        with ParallelExecutor(num_workers=2, devices="cpu") as started:
            started.run(int)


def puts(pool: ParallelExecutor, calls: int) -> None:
    for _ in range(calls):
        pool.run(torch.Tensor.sum, pool.put(torch.ones(1 << 18)))


def resizes(pool: ParallelExecutor, calls: int) -> None:
    for _ in range(calls // 2):
        for count in (4, 2):
            pool.resize(count)
            pool.run(int)


def calls_of_on_rank(pool: ParallelExecutor, calls: int) -> None:
    def loop() -> None:
        for _ in range(calls):
            on_rank(0)(int)()

    pool.run(loop)


PHASES = (
    Phase("warm run", 200_000, warm_runs),
    Phase("failing run", 50_000, failing_runs),
    Phase("pool", 2_000, pools),
    Phase("put of 1 MiB", 5_000, puts),
    Phase("resize", 500, resizes),
    Phase("on_rank", 200_000, calls_of_on_rank),
)


def soak(phase: Phase, share: float) -> Iterator[tuple[float, ...]]:
    """The quantities before the calls, and after each twentieth of them."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        phase.make(pool, 20)
        yield state(pool)
        for _ in range(SAMPLES):
            phase.make(pool, int(phase.calls * share) // SAMPLES)
            yield state(pool)


def state(pool: ParallelExecutor) -> tuple[float, ...]:
    """Of this process and all its descendants; and of the store of ``pool``."""
    pool.run(gc.collect)
    gc.collect()
    pids, memory, descriptors, threads = [os.getpid()], 0.0, 0, 0
    while pids:
        process = Path(f"/proc/{(pid := pids.pop())}")
        pids += children_of(pid)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended, of a smaller pool
            rollup = (process / "smaps_rollup").read_text()
            memory += int(rollup.partition("\nPss:")[2].split()[0]) / 1024
            descriptors += len(os.listdir(process / "fd"))
            threads += len(os.listdir(process / "task"))
    return memory, descriptors, threads, _keys(pool)


def _keys(pool: ParallelExecutor) -> int:
    assert isinstance(pool._backend, Pool)
    site = pool._backend._supervisor._site
    assert isinstance(site, LocalSite)
    store = site._store._store
    return store.num_keys() if store is not None else 0


def draw(found: dict[str, list[tuple[float, ...]]], target: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(QUANTITIES), 1, figsize=(7, 9), sharex=True)
    for index, (quantity, axis) in enumerate(zip(QUANTITIES, axes, strict=True)):
        for name, states in found.items():
            axis.plot([100 * i / SAMPLES for i in range(len(states))], [each[index] for each in states], label=name)
        axis.set(ylabel=quantity, ylim=(0, None))
    axes[-1].set(xlabel="% of the calls")
    axes[0].legend([f"{phase.calls:,} x {phase.name}".replace(",", " ") for phase in PHASES], fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("plot", type=Path, nargs="?", help="draw it there, as SVG")
    parser.add_argument("--share", type=float, default=1.0, help="of the calls to make")
    options = parser.parse_args()
    found = {}
    print("| calls | of | " + " | ".join(QUANTITIES) + " |\n|---|---|" + "---|" * len(QUANTITIES))
    for phase in PHASES:
        found[phase.name] = states = list(soak(phase, options.share))
        # The first twentieth fills caches.
        cells = [f"{first:.0f} → {last:.0f}" for first, last in zip(states[1], states[-1], strict=True)]
        print(f"| {int(phase.calls * options.share)} | {phase.name} | " + " | ".join(cells) + " |", flush=True)
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
