"""A model of blocks: ranks that go through the same program in every order of their steps, fail and die.

Each request to the store is one step, and the order of the steps of different ranks is random. The ranks do what
`nn_parallel._engine.ranks.blocks` does; which block a failure ends, they ask the code of the package itself.

    python -m tests.support.block_model --seconds 600
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from typing import NamedTuple

from nn_parallel._engine.failures import Failure
from nn_parallel._engine.ranks.blocks import END_MARK
from nn_parallel._engine.ranks.records import GenerationEnd

MOST_STEPS = 50_000
Steps = Iterator[None]


class Item(NamedTuple):
    """A block that holds others, a barrier, or a call of one rank."""

    name: str
    kind: str
    is_caught: bool  # what it raises
    runner: int
    inner: list[Item]


class RankError(Exception):
    """A block or a call has failed: raised on all ranks."""


class Failed(Exception):
    """A rank has to leave: by an exception of its own, a timeout or a death that it sees."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures


class Interrupted(BaseException):
    """The block around has failed."""


@dataclasses.dataclass(eq=False)
class Block:
    begin: float = math.inf
    end: float = math.inf
    must_leave: bool = False


class Store:
    """The store that all ranks share."""

    def __init__(self) -> None:
        self.arrived = Counter[int]()  # by generation
        self.ended: dict[int, GenerationEnd] = {}
        self.reports: dict[int, tuple[int, int, bool]] = {}  # by rank: the generation, the call, whether that is over
        self.failed: set[tuple[int, int]] = set()  # calls: the generation and the number
        self.dead: set[int] = set()


class Rank:
    """A rank that goes through a program; `log` is what became of blocks and barriers, `calls` of calls."""

    def __init__(self, store: Store, rank: int, world_size: int, chance: random.Random, fails: float) -> None:
        self.log: list[tuple[str, str]] = []
        self.calls: dict[str, str] = {}
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._chance = chance
        self._fails = fails
        self._generation = self._barriers = self._calls = 0
        self._blocks: list[Block] = []

    def run(self, program: list[Item]) -> Steps:
        try:
            yield from self._run(program)
        except (RankError, Failed):
            self.log.append(("the program", "has failed"))
        assert not self._blocks

    def _run(self, program: list[Item]) -> Steps:
        for item in program:
            yield from self._work()
            so_far = len(self.log)
            try:
                if item.kind == "call":
                    yield from self._call(item)
                else:
                    yield from self._block(item)
            except RankError:
                if item.kind == "block":
                    del self.log[so_far:]  # how far a rank got in a block that failed is its own
                self._note(item, "has failed")
                if not item.is_caught:
                    raise
            else:
                self._note(item, "has passed")

    def _note(self, item: Item, outcome: str) -> None:
        if item.kind == "call":
            self.calls[item.name] = outcome  # in a block that fails, not all ranks get as far
        else:
            self.log.append((item.name, outcome))

    def _work(self) -> Steps:
        """User code in a block: it may raise, and the watchdog may interrupt it."""
        for _ in range(self._chance.randrange(3)):
            yield
            if self._blocks and self._chance.random() < self._fails:
                raise Failed({self._rank: "its own"})
            if self._blocks and self._chance.random() < 0.5:
                self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if self._blocks and (self._blocks[-1].must_leave or self._generation in self._store.ended):
            self._blocks[-1].must_leave = True
            raise Interrupted

    def _call(self, item: Item) -> Steps:
        """A call that one rank runs; its failure leaves the block around whole."""
        self._raise_if_ended()
        self._calls += 1
        this = self._generation, self._calls
        if item.runner == self._rank:
            yield
            has_failed = self._chance.random() < self._fails
            if has_failed:
                self._store.failed.add(this)
            yield
            self._store.reports[self._rank] = *this, True
        else:
            while True:
                is_dead = item.runner in self._store.dead
                yield
                generation, number, is_over = self._store.reports.get(item.runner, (-1, 0, False))
                if (generation, number) > this or ((generation, number) == this and is_over):
                    if generation > this[0]:
                        self._raise_if_ended()
                    break
                if is_dead:
                    raise Failed({item.runner: "has died"})
                yield
                self._raise_if_ended()
            has_failed = this in self._store.failed
        if has_failed:
            raise RankError

    def _block(self, item: Item) -> Steps:
        """A block, or a barrier, which is a block that never begins."""
        block, is_outermost = Block(), not self._blocks
        around = None if is_outermost else self._blocks[-1]
        try:
            if item.kind == "block":
                block.begin = self._barriers + 1
                yield from self._meet()
                self._blocks.append(block)
                yield from self._work()
                yield from self._run(item.inner)
                yield from self._work()
                self._raise_if_ended()
            block.end = self._barriers + 1
            yield from self._meet()
        except (RankError, Failed, Interrupted) as error:
            end = yield from self._end_generation(getattr(error, "failures", {}))
            if end.fails(block.begin, block.end, is_outermost):
                self._generation += 1
                self._barriers = self._calls = 0
                for entered in self._blocks:
                    entered.begin = 0
                raise RankError from None
            if around is not None:
                around.must_leave = True
                raise Interrupted from None
            assert end.barriers >= block.end  # it has passed
        finally:
            if block in self._blocks:
                self._blocks.remove(block)

    def _meet(self) -> Steps:
        self._raise_if_ended_around()
        self._barriers += 1
        all_arrived = self._barriers * self._world_size
        yield
        self._store.arrived[self._generation] += 1
        while True:
            dead = sorted(self._store.dead)
            yield
            arrived = self._store.arrived[self._generation]
            if arrived >= END_MARK:
                yield
                end = self._store.ended.get(self._generation)
                if end is not None and end.barriers >= self._barriers:
                    return
                if end is not None:
                    raise Interrupted
            elif arrived >= all_arrived:
                return
            if dead:
                raise Failed({dead[0]: "has died"})
            if self._chance.random() < self._fails / 10:
                raise Failed({self._rank: "a timeout"})

    def _raise_if_ended_around(self) -> None:
        if self._blocks and self._blocks[-1].must_leave:
            raise Interrupted

    def _end_generation(self, failures: dict[int, str]) -> Generator[None, None, GenerationEnd]:
        if self._generation not in self._store.ended:
            yield
            self._store.arrived[self._generation] += END_MARK
            arrived = self._store.arrived[self._generation] % END_MARK
            yield
            told = {rank: Failure("Exception", None, text, "", "", {}) for rank, text in failures.items()}
            self._store.ended.setdefault(self._generation, GenerationEnd(arrived // self._world_size, told))
        yield
        return self._store.ended[self._generation]  # what `yield from` evaluates to


def random_program(chance: random.Random, world_size: int, depth: int = 0) -> list[Item]:
    program = []
    for _ in range(chance.randint(1, 3)):
        kind = chance.choice(["block", "block", "barrier", "call"]) if depth < 3 else "call"
        inner = random_program(chance, world_size, depth + 1) if kind == "block" else []
        name = f"{kind} {chance.randrange(1 << 30)}"
        program.append(Item(name, kind, chance.random() < 0.7, chance.randrange(world_size), inner))
    return program


def outcome_of_trial(seed: int) -> tuple[str, list[list[tuple[str, str]]]]:
    """Run one program; return what went wrong, empty if nothing did, and the logs of the ranks."""
    chance = random.Random(seed)
    world_size, fails = chance.randint(2, 4), chance.choice([0.0, 0.02, 0.1])
    dies = chance.choice([0.0, 0.0, 0.003])
    store, program = Store(), random_program(chance, world_size)
    ranks = [Rank(store, rank, world_size, random.Random(f"{seed} {rank}"), fails) for rank in range(world_size)]
    running = {rank: each.run(program) for rank, each in enumerate(ranks)}
    for _ in range(MOST_STEPS):
        if not running:
            break
        rank = chance.choice(list(running))
        if chance.random() < dies and len(store.dead) < world_size - 1:
            running.pop(rank).close()
            store.dead.add(rank)
        elif next(running[rank], running) is running:
            del running[rank]
    logs = [each.log for each in ranks]
    if running:
        return f"ranks {sorted(running)} have not ended", logs
    living = [log for rank, log in enumerate(logs) if rank not in store.dead]
    calls = Counter((name, outcome) for each in ranks for name, outcome in each.calls.items())
    if any(log != living[0] for log in living) or len({name for name, _ in calls}) < len(calls):
        return "the ranks disagree", logs
    return "", logs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    end, seed, wrong = time.monotonic() + options.seconds, options.first, 0
    while time.monotonic() < end:
        told, logs = outcome_of_trial(seed)
        if told:
            wrong += 1
            print(f"{seed}: {told}", *logs, sep="\n", flush=True)
        seed += 1
    print(f"{seed - options.first} programs, {wrong} of them ended as they must not")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
