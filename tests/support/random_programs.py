"""Random programs of all kinds of collectives and calls, on ranks that are late at random, or stopped for a while.

None may end with an error.

    python -m tests.support.random_programs --seconds 3600 --late 5
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import (
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    all_gather_object,
    initialize_ddp,
    on_rank,
    reduce_metrics,
)
from tests.support import ranks

COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "asynchronous",
    "subgroup",
    "subgroup_rooted",
    "ddp",
    "metrics",
]
OTHERS = ["on_rank", "on_ranks", "on_rank_broadcast", "on_rank_barrier", "on_rank_unwaited", "send", "block", "run"]
GIVE_UP = timedelta(minutes=30)
PROGRAMS_PER_WORLD = 5
HANGS = "no rank tells of it"


class Step(NamedTuple):
    kind: str
    root: int
    inner: list[Step]  # of a block


class Plan:
    """A random program, the same for all ranks."""

    def __init__(self, seed: str, world_size: int) -> None:
        self._chance, self._world_size = random.Random(seed), world_size
        self.members = [self._some_ranks(), self._some_ranks()]
        self.steps = [*self._steps(self._chance.randint(5, 15), 0), self._step("all_reduce", 0)]

    def _some_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._chance.sample(range(self._world_size), self._chance.randint(2, self._world_size))))

    def _steps(self, count: int, depth: int) -> list[Step]:
        kinds = OTHERS if depth < 2 else OTHERS[:-2]
        return [
            self._step(self._chance.choice(COLLECTIVES if self._chance.random() < 0.6 else kinds), depth)
            for _ in range(count)
        ]

    def _step(self, kind: str, depth: int) -> Step:
        root = self._chance.randrange(self._world_size)
        inner = self._steps(self._chance.randint(1, 3), depth + 1) if kind in ("block", "run") else []
        return Step(kind, root, inner)


class Program:
    """A plan as one rank runs it: late to some steps, as its own random numbers say."""

    def __init__(self, plan: Plan, seed: str, rank: int, world_size: int, late_s: float) -> None:
        self.rank, self.world_size, self._plan, self._late_s = rank, world_size, plan, late_s
        self._lateness = random.Random(f"{seed} {rank}")
        self._pending: list[Any] = []
        self._groups = [dist.new_group(list(members)) for members in plan.members]
        self._model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            if step.kind == "block":
                with ParallelExecutor():
                    self.run(step.inner)
            elif step.kind == "run":
                ParallelExecutor().run(self.run, step.inner)
            else:
                self._be_late()
                getattr(self, f"_{step.kind}")(step.root)
        self._wait()

    def _be_late(self) -> None:
        if self._late_s and self._lateness.random() < 0.3:
            time.sleep(self._lateness.uniform(0, self._late_s))

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop().wait()

    def _all_reduce(self, root: int) -> None:
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [self.world_size] * 4

    def _broadcast(self, root: int) -> None:
        sent = torch.tensor([self.rank])
        dist.broadcast(sent, root)
        assert sent.tolist() == [root]

    def _reduce(self, root: int) -> None:
        dist.reduce(torch.ones(1), root)

    def _gather(self, root: int) -> None:
        mine = torch.ones(1)
        dist.gather(mine, [mine.clone() for _ in range(self.world_size)] if self.rank == root else None, root)

    def _scatter(self, root: int) -> None:
        mine = torch.ones(1)
        dist.scatter(mine, [mine.clone() for _ in range(self.world_size)] if self.rank == root else None, root)

    def _all_gather(self, root: int) -> None:
        dist.all_gather([torch.empty(2) for _ in range(self.world_size)], torch.ones(2))

    def _reduce_scatter(self, root: int) -> None:
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * self.world_size))

    def _all_to_all(self, root: int) -> None:
        dist.all_to_all_single(torch.empty(self.world_size), torch.ones(self.world_size))

    def _barrier(self, root: int) -> None:
        dist.barrier()

    def _all_gather_object(self, root: int) -> None:
        assert all_gather_object(self.rank) == list(range(self.world_size))

    def _gather_object(self, root: int) -> None:
        dist.gather_object("a", [None] * self.world_size if self.rank == root else None, root)

    def _broadcast_object_list(self, root: int) -> None:
        dist.broadcast_object_list(["b"], root)

    def _asynchronous(self, root: int) -> None:
        self._pending.append(dist.all_reduce(torch.ones(4), async_op=True))
        if root % 2:
            self._wait()

    def _subgroup(self, root: int) -> None:
        which = root % 2
        if self.rank in self._plan.members[which]:
            dist.all_reduce(torch.ones(3), group=self._groups[which])

    def _subgroup_rooted(self, root: int) -> None:
        which = root % 2
        if self.rank in self._plan.members[which]:
            dist.broadcast(torch.ones(3), self._plan.members[which][-1], group=self._groups[which])

    def _ddp(self, root: int) -> None:
        self._model(torch.ones(2, 4)).sum().backward()

    def _metrics(self, root: int) -> None:
        assert reduce_metrics({"a": self.rank}, op="sum")["a"] == sum(range(self.world_size))

    def _on_rank(self, root: int) -> None:
        on_rank(root)(self._be_late)()

    def _on_ranks(self, root: int) -> None:
        on_rank([0, root])(self._be_late)()

    def _on_rank_broadcast(self, root: int) -> None:
        assert on_rank(root, broadcast=True)(lambda: root)() == root

    def _on_rank_barrier(self, root: int) -> None:
        on_rank(root, barrier=True)(self._be_late)()

    def _on_rank_unwaited(self, root: int) -> None:
        on_rank(root, wait=False)(int)()

    def _send(self, root: int) -> None:
        receiver = (root + 1) % self.world_size
        if self.rank == root:
            dist.send(torch.ones(1), receiver)
        elif self.rank == receiver:
            dist.recv(torch.empty(1), root)


def take_part(seed: str, late_s: float) -> str:
    """As a rank: run the program of that seed; how it ended, if not well."""
    world = initialize_ddp(GIVE_UP)
    plan = Plan(seed, world.world_size)
    try:
        with ParallelExecutor():
            Program(plan, seed, world.rank, world.world_size, late_s).run(plan.steps)
    except Exception as error:
        return repr(getattr(error, "failures", error))
    return ""


@contextlib.contextmanager
def ranks_of(world_size: int, in_pool: bool) -> Iterator[tuple[Callable[..., list[str]], list[int]]]:
    """What calls a function on every rank, and the process ids of the ranks."""
    if in_pool:
        with ParallelExecutor(num_workers=world_size, devices="cpu", timeout=ranks.ANSWER_WITHIN_S) as pool:
            yield pool.run, pool.run(os.getpid)
    else:
        with contextlib.suppress(AssertionError), ranks.launched(world_size) as started:  # they hang: that is told
            yield started.run, started.pids


def stop_and_continue(pids: list[int], seed: int, late_s: float, over: threading.Event) -> None:
    """Stop ranks now and then, and let them go on."""
    chance = random.Random(seed)
    while not over.wait(chance.uniform(0.5, 5)):
        pid = chance.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        over.wait(chance.uniform(0, late_s))
        os.kill(pid, signal.SIGCONT)


def outcomes_in_world(number: int, late_s: float, programs: int = PROGRAMS_PER_WORLD) -> list[tuple[str, list[str]]]:
    """Run some programs on the same ranks; what each was, and what the ranks told."""
    chance = random.Random(number)
    world_size, in_pool, stops = chance.randint(2, 8), chance.random() < 0.5, chance.random() < 0.5
    over, outcomes = threading.Event(), list[tuple[str, list[str]]]()
    with ranks_of(world_size, in_pool) as (run, pids):
        stopper = threading.Thread(target=stop_and_continue, args=(pids, number, late_s, over))
        if stops and late_s:
            stopper.start()
        try:
            for index in range(programs):
                seed = f"{number}.{index}"
                try:
                    told = run(take_part, seed, late_s)
                except RankError as error:  # of a pool: a rank has died, of what gloo makes of messages that do not fit
                    told = [repr(error)]
                except (RankTimeoutError, pytest.fail.Exception) as error:
                    told = [f"{HANGS}\n{error}"]
                outcomes.append((f"{seed}: {world_size} ranks of a {'pool' if in_pool else 'launch'}", told))
                if "gone" in told or told[0].startswith(HANGS):
                    break
        finally:
            over.set()
            if stopper.ident:
                stopper.join()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--late", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    ranks.ANSWER_WITHIN_S, ranks.END_WITHIN_S = 60 + 100 * options.late, 60.0
    end, wrong, done = time.monotonic() + options.seconds, 0, 0
    seeds = iter(range(options.first, sys.maxsize))
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        running = set()
        while running or time.monotonic() < end:
            while len(running) < options.at_once and time.monotonic() < end:
                running.add(pool.submit(outcomes_in_world, next(seeds), options.late))
            over, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for each in over:
                for what, told in each.result():
                    done += 1
                    if any(told):
                        wrong += 1
                        print(what, *told, sep="\n", flush=True)
    print(f"{done} programs, {wrong} of them ended as they must not")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
