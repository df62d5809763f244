"""A model of blocks: ranks that go through the same program in every order of their steps, fail and die.

Each request to the store is one step, and the order of the steps of different ranks is random. The ranks do what
`nn_parallel._engine.ranks.blocks` does; which block a failure ends, they ask the code of the package itself. In some
programs a rank leaves out calls and barriers. Then ranks are at different ones, and need not agree, but all come to an
end; and if nothing else goes wrong, all close the process group, or none does.

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
    """A block that holds others, a barrier, a call of one rank, or such a call with a barrier."""

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
    has_passed: bool = False
    is_mixed: bool = False


class RankStatus(NamedTuple):
    """The status of a rank, as the others read it."""

    generation: int = -1
    call: int = 0
    is_over: bool = False
    made: tuple[str, ...] = ()  # the calls of this generation
    has_left: bool = False

    def is_other_call(self, call: int, name: str) -> bool:
        return len(self.made) >= call and self.made[call - 1] != name


class Store:
    """The store that all ranks share."""

    def __init__(self) -> None:
        self.arrived = Counter[int]()  # by generation
        self.ended: dict[int, GenerationEnd] = {}
        self.statuses: dict[int, RankStatus] = {}  # by rank
        self.failed: set[tuple[int, int]] = set()  # calls: the generation and the number
        self.dead: set[int] = set()


class Rank:
    """A rank that goes through a program; `log` is what became of blocks and barriers, `calls` of calls."""

    def __init__(
        self, store: Store, rank: int, world_size: int, chance: random.Random, fails: float, leaves_out: float
    ) -> None:
        self.log: list[tuple[str, str]] = []
        self.calls: dict[str, str] = {}
        self.closes: dict[int, bool] = {}  # by generation: whether its end has closed the process group
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._chance = chance
        self._fails = fails
        self._leaves_out = leaves_out
        self._generation = self._barriers = 0
        self._made: list[str] = []  # the calls of this generation
        self._blocks: list[Block] = []

    def run(self, program: list[Item]) -> Steps:
        try:
            yield from self._run(program)
        except (RankError, Failed):
            self.log.append(("the program", "has failed"))
        assert not self._blocks
        yield
        self._post(has_left=True)

    def _run(self, program: list[Item]) -> Steps:
        for item in program:
            yield from self._work()
            so_far = len(self.log)
            if item.kind != "block" and self._chance.random() < self._leaves_out:
                continue
            try:
                if item.kind == "call":
                    yield from self._call(item)
                elif item.kind == "call with a barrier":
                    yield from self._call_with_barrier(item)
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
        if item.kind.startswith("call"):
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
        self._made.append(item.name)
        this = self._generation, len(self._made)
        if item.runner == self._rank:
            yield
            has_failed = self._chance.random() < self._fails
            if has_failed:
                self._store.failed.add(this)
            yield
            self._post(is_over=True)
        else:
            yield
            self._post()
            while True:
                is_dead = item.runner in self._store.dead
                yield
                status = self._store.statuses.get(item.runner, RankStatus())
                if status.generation == this[0] and status.is_other_call(this[1], item.name):
                    raise Failed({self._rank: "another call"})
                if status[:2] > this or (status[:2] == this and (status.is_over or status.has_left)):
                    if status.generation > this[0]:
                        self._raise_if_ended()
                    break
                if is_dead or status.has_left:
                    raise Failed({item.runner: "has died" if is_dead else "has left"})
                yield
                self._raise_if_ended()
            has_failed = this in self._store.failed
        if has_failed:
            raise RankError

    def _call_with_barrier(self, item: Item) -> Steps:
        """A call after which all ranks wait for each other, also if it has failed."""
        barrier = self._new_barrier()
        has_failed = False
        try:
            try:
                yield from self._call(item)
            except RankError:
                has_failed = True
            yield from self._meet(barrier, f"the end of {item.name}")
            barrier.has_passed = True
        except (Failed, Interrupted) as error:
            yield from self._leave(barrier, error)
        if has_failed:
            raise RankError

    def _new_barrier(self) -> Block:
        """A barrier is a block that never begins."""
        self._raise_if_ended_around()
        self._barriers += 1
        return Block(end=self._barriers)

    def _block(self, item: Item) -> Steps:
        """A block, or a barrier."""
        if item.kind == "barrier":
            block = self._new_barrier()
            try:
                yield from self._meet(block, item.name)
            except (Failed, Interrupted) as error:
                yield from self._leave(block, error)
            return
        self._raise_if_ended_around()
        block = Block()
        around = list(self._blocks)
        try:
            self._barriers += 1
            block.begin = self._barriers
            yield from self._meet(block, item.name)
            self._blocks.append(block)
            yield from self._work()
            yield from self._run(item.inner)
            yield from self._work()
            self._raise_if_ended()
            self._barriers += 1
            block.end = self._barriers
            yield from self._meet(block, f"the end of {item.name}")
        except (RankError, Failed, Interrupted) as error:
            self._blocks = around
            yield from self._leave(block, error)
        finally:
            self._blocks = around

    def _leave(self, block: Block, error: BaseException) -> Steps:
        """End the generation; raise what all ranks raise, or leave the block around."""
        around = self._blocks[-1] if self._blocks else None
        end = yield from self._end_generation(getattr(error, "failures", {}), block.is_mixed)
        if end.fails(block.begin, block.end, is_outermost=around is None):
            self.closes[self._generation] = block.begin <= end.barriers or end.is_mixed
            self._generation += 1
            self._barriers = 0
            self._made.clear()
            for entered in self._blocks:
                entered.begin = 0
            yield
            self._post()
            raise RankError from None
        if around is not None:
            around.must_leave = True
            raise Interrupted from None
        assert end.barriers >= block.end or end.is_mixed  # it has passed

    def _meet(self, block: Block, name: str) -> Steps:
        self._raise_if_ended_around()
        self._made.append(name)
        all_arrived = self._barriers * self._world_size
        yield
        self._post()
        yield
        self._store.arrived[self._generation] += 1
        while True:
            dead = sorted(self._store.dead)
            yield
            has_left = self._check_neighbor(block, name)
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
                yield
                self._check_neighbor(block, name)
                return
            elif has_left:
                raise Failed({self._rank: "a rank has left"})
            if dead:
                raise Failed({dead[0]: "has died"})
            if self._chance.random() < self._fails / 10:
                raise Failed({self._rank: "a timeout"})

    def _check_neighbor(self, block: Block, name: str) -> bool:
        """Raise if the rank before this one is at another barrier; return whether it has left the others."""
        status = self._store.statuses.get((self._rank - 1) % self._world_size, RankStatus())
        if status.generation == self._generation and status.is_other_call(len(self._made), name):
            block.is_mixed = True
            raise Failed({self._rank: "another barrier"})
        return status.has_left

    def _post(self, *, is_over: bool = False, has_left: bool = False) -> None:
        made = tuple(self._made)
        self._store.statuses[self._rank] = RankStatus(self._generation, len(made), is_over, made, has_left)

    def _raise_if_ended_around(self) -> None:
        if self._blocks and self._blocks[-1].must_leave:
            raise Interrupted

    def _end_generation(self, failures: dict[int, str], is_mixed: bool) -> Generator[None, None, GenerationEnd]:
        if self._generation not in self._store.ended:
            yield
            self._store.arrived[self._generation] += END_MARK
            arrived = self._store.arrived[self._generation] % END_MARK
            yield
            barriers = min(arrived // self._world_size, self._barriers - is_mixed)
            told = {rank: Failure("Exception", None, text, "", "", {}) for rank, text in failures.items()}
            self._store.ended.setdefault(self._generation, GenerationEnd(barriers, told, is_mixed))
        yield
        return self._store.ended[self._generation]  # what `yield from` evaluates to


def random_program(chance: random.Random, world_size: int, depth: int = 0) -> list[Item]:
    program = []
    for _ in range(chance.randint(1, 3)):
        kinds = ["block", "block", "barrier", "call", "call with a barrier"] if depth < 3 else ["call"]
        kind = chance.choice(kinds)
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
    leaves_out = {chance.randrange(world_size): 0.3} if seed % 4 == 0 else {}  # by rank
    ranks = [
        Rank(store, rank, world_size, random.Random(f"{seed} {rank}"), fails, leaves_out.get(rank, 0.0))
        for rank in range(world_size)
    ]
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
    closes = {(generation, closed) for each in ranks for generation, closed in each.closes.items()}
    if leaves_out:  # later on, ranks may be in different blocks
        closes = {each for each in closes if each[0] == 0 and fails == dies == 0.0}
    if len(dict(closes)) < len(closes):
        return "not all ranks have closed the process group", logs
    if leaves_out:
        return "", logs
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
