"""Random programs of blocks in blocks, calls, barriers and collectives, of which many fail somewhere.

Ranks are late at random, and are stopped for a while. All ranks of a program must get the same outcomes in the same
order, and no program may hang.

    python -m tests.support.random_blocks --seconds 3600 --late 1
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import ParallelExecutor, RankError, RankTimeoutError, barrier, initialize_ddp, on_rank
from tests.support import ranks
from tests.support.random_programs import stop_and_continue

STEPS = 40
GIVES_UP_AFTER_S = 0.05


def wait_in_collective() -> None:
    dist.all_reduce(torch.ones(1))


def wait_in_sleep() -> None:
    time.sleep(3600)


def wait_in_loop() -> None:
    while True:
        pass


def wait_in_barrier() -> None:
    barrier()


def wait_at_the_end() -> None:
    pass


WAITS = [wait_in_collective, wait_in_sleep, wait_in_loop, wait_in_barrier, wait_at_the_end]


class Program:
    """A random program as one rank runs it. Its `log` leaves out what only this rank can know."""

    def __init__(self, seed: int, late_s: float) -> None:
        self.log: list[Any] = []
        world = initialize_ddp()
        self._rank = world.rank
        self._world_size = world.world_size
        self._seed = seed
        self._late_s = late_s
        self._lateness = random.Random(f"{seed} {self._rank}")

    def run(self, steps: int) -> list[Any]:
        for number in range(steps):
            self._step(f"{self._seed} {number}", 0)
        return self.log

    def _step(self, name: str, depth: int) -> None:
        chance = random.Random(name)  # of its own: in a step that fails, not all ranks draw equally often
        if self._lateness.random() < 0.1:
            time.sleep(self._late_s * self._lateness.random())
        kind, who = chance.randrange(8), chance.randrange(self._world_size)
        if kind == 0:
            self._note(lambda: self.log.append(on_rank(who, broadcast=True)(lambda: who)()))
        elif kind == 1:
            self._note(lambda: on_rank(who, barrier=True)(self._fail_sometimes)(chance.random()))
        elif kind == 2:
            self._note(self._all_reduce)
        elif kind == 3:
            self._note(lambda: barrier(timeout=GIVES_UP_AFTER_S))
        elif kind == 4:
            both = sorted({who, chance.randrange(self._world_size)})
            self._note(lambda: on_rank(both)(self._fail_sometimes)(chance.random()))
        else:
            self._note(lambda: self._block(name, chance, depth, kind))

    def _note(self, call: Callable[[], object]) -> None:
        """Log how ``call`` has ended."""
        so_far = len(self.log)
        try:
            call()
        except RankTimeoutError:
            del self.log[so_far:]
            self.log.append("has timed out")
        except RankError as error:
            del self.log[so_far:]  # how far a rank got in a block that failed is its own
            self.log.append((error.rank, str(error.failures[error.rank])))
        else:
            self.log.append("has passed")

    def _all_reduce(self) -> None:
        total = torch.ones(1)
        initialize_ddp()  # may raise that a rank gave up the barrier before, just as all had come
        dist.all_reduce(total)
        self.log.append(int(total))

    def _fail_sometimes(self, number: float) -> None:
        if number < 0.5:
            raise ValueError(f"{number}")

    def _block(self, name: str, chance: random.Random, depth: int, kind: int) -> None:
        failing = chance.randrange(self._world_size)
        wait = chance.choice(WAITS)
        with ParallelExecutor() as executor:
            initialize_ddp()
            for number in range(chance.randrange(3) if depth < 3 else 0):
                self._step(f"{name} {number}", depth + 1)
            if kind == 5:
                self.log.append(executor.run(lambda: depth))
            elif kind == 6 and self._rank == failing:
                raise ValueError(f"rank {failing}")
            elif kind == 6:
                wait()


def take_part(seed: int, late_s: float, steps: int = STEPS) -> list[Any]:
    """As a rank: run the program of that seed; what came of it."""
    return Program(seed, late_s).run(steps)


def run_programs(number: int, late_s: float, programs: int = 5) -> list[str]:
    """Run some programs on the same ranks; what is wrong with each, empty if nothing is."""
    chance, over = random.Random(number), threading.Event()
    world_size = chance.randint(2, 5)
    with ranks.launched(world_size) as started:
        stopper = threading.Thread(target=stop_and_continue, args=(started.pids, number, late_s, over))
        if late_s:
            stopper.start()
        try:
            found = []
            for index in range(programs):
                seed = number * programs + index
                try:
                    first, *others = started.run(take_part, seed, late_s)
                except pytest.fail.Exception as error:
                    return [*found, f"{seed} on {world_size} ranks hangs\n{error}"]
                except Exception as error:
                    return [*found, f"{seed} on {world_size} ranks raises {error!r}"]
                differ = [f"\n{log}" for log in (first, *others)] if others != [first] * len(others) else []
                found.append(f"{seed} on {world_size} ranks: they disagree{''.join(differ)}" if differ else "")
            return found
        finally:
            over.set()
            if stopper.ident:
                stopper.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--late", type=float, default=0.1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    ranks.ANSWER_WITHIN_S, ranks.END_WITHIN_S = 120 + 100 * options.late, 60.0
    end, number, done, wrong = time.monotonic() + options.seconds, options.first, 0, 0
    while time.monotonic() < end:
        for told in run_programs(number, options.late):
            done += 1
            if told:
                wrong += 1
                print(told, flush=True)
        number += 1
    print(f"{done} programs, {wrong} of them ended as they must not")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
