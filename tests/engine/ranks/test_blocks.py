"""The failure-aware block: `with ParallelExecutor()` under a launcher, where a failure on one rank is raised on all."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ExecutorClosedError,
    ParallelError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    WorkerDiedError,
    barrier,
    current_world,
    initialize_ddp,
    on_rank,
)
from nn_parallel._engine.ranks.blocks import blocks_of
from nn_parallel._engine.ranks.context import rank_context
from nn_parallel._engine.ranks.sockets import bottom
from nn_parallel._engine.ranks.status_board import Wait
from tests.support.fault_table import KeywordOnly, Unpicklable
from tests.support.fault_table import loop_endlessly as spin
from tests.support.fault_table import sleep_long as sleep
from tests.support.ranks import AT_ONCE_S, Ranks, launched


@pytest.fixture(scope="module", params=[pytest.param("torchrun", marks=pytest.mark.slow), "env"])
def ranks2(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with launched(2, request.param) as ranks:
        yield ranks


def wait_in_collective() -> None:
    dist.all_reduce(torch.ones(1))


def wait_in_ddp() -> None:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def wait_in_on_rank() -> None:
    on_rank(1 - initialize_ddp().rank)(int)()


def wait_in_run() -> None:
    ParallelExecutor().run(int)


def wait_at_the_end() -> None:
    pass


WAITS = [wait_in_collective, wait_in_ddp, spin, sleep, wait_in_on_rank, wait_in_run, wait_at_the_end]


def _only_on_rank_0() -> int:
    if initialize_ddp().rank != 0:
        raise ValueError("not here")
    return 0


def outcome_of_a_block(body: Callable[[int], None]) -> dict[str, Any]:
    """What a rank gets of a block, when, and whether the ranks can go on afterwards."""
    rank = initialize_ddp().rank
    on_rank(0, barrier=True)(int)()
    start = time.monotonic()
    told: dict[str, Any] = {}
    try:
        with ParallelExecutor():
            body(rank)
    except BaseException as error:
        failures = {r: f"{type(e).__name__}: {e}" for r, e in getattr(error, "failures", {}).items()}
        told |= {"error": type(error).__name__, "failures": failures, "text": str(error)}
    told["seconds"] = time.monotonic() - start
    total = torch.ones(1)
    initialize_ddp()
    dist.all_reduce(total)
    return told | {"total": int(total)}


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_the_block_is_raised_on_all_ranks(ranks2: Ranks, wait: Callable[[], None], failing: int) -> None:
    """Whatever the other rank is in, it gets the cause at once, and both go on with a new group."""

    def body(rank: int) -> None:
        if rank == failing:
            raise ValueError("bad batch")
        wait()

    for told in ranks2.run(outcome_of_a_block, body):
        assert told["error"] == "RankError"
        assert told["failures"] == {failing: "ValueError: bad batch"}
        assert f"failed on rank {failing} of 2: ValueError: bad batch" in told["text"]
        assert told["seconds"] < AT_ONCE_S
        assert told["total"] == 2


def test_a_rank_is_freed_from_groups_that_the_user_makes(ranks2: Ranks) -> None:
    """From a collective in such a group, and from making one, where it waits for the store."""

    def make_and_wait(rank: int) -> None:
        group = dist.new_group([0, 1])
        if rank == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1), group=group)

    def wait_in_making(rank: int) -> None:
        if rank == 1:
            raise ValueError("bad batch")
        dist.new_group([0, 1])

    for body in (make_and_wait, wait_in_making, make_and_wait):
        for told in ranks2.run(outcome_of_a_block, body):
            assert told["failures"] == {1: "ValueError: bad batch"}
            assert told["seconds"] < AT_ONCE_S
            assert told["total"] == 2


@pytest.mark.slow
def test_a_rank_is_freed_where_gloo_connects_ranks_late() -> None:
    """The option TORCH_GLOO_LAZY_INIT is switched off: otherwise gloo's connections would not be known."""

    def wait(rank: int) -> None:
        if rank == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))

    with launched(2, TORCH_GLOO_LAZY_INIT="1") as ranks:
        for told in ranks.run(outcome_of_a_block, wait):
            assert told["failures"] == {1: "ValueError: bad batch"}
            assert told["seconds"] < AT_ONCE_S


@pytest.mark.slow
def test_ranks_leave_the_block_together(ranks3: Ranks) -> None:
    """A slow rank is waited for; what follows the block begins on all ranks after its end."""

    def scenario() -> tuple[float, float]:
        rank = initialize_ddp().rank
        with ParallelExecutor():
            time.sleep(0.3 * rank)
            done = time.monotonic()
        return done, time.monotonic()

    done, left = zip(*ranks3.run(scenario), strict=True)
    assert min(left) >= max(done)


def test_two_ranks_fail_at_once(ranks3: Ranks) -> None:
    """All ranks agree on the cause; the other failure is a leaf as well where it was known in time."""

    def body(rank: int) -> None:
        if rank:
            raise ValueError(f"from {rank}")
        wait_in_collective()

    tolds = ranks3.run(outcome_of_a_block, body)
    assert len({next(iter(told["failures"])) for told in tolds}) == 1
    for told in tolds:
        assert set(told["failures"].items()) <= {(1, "ValueError: from 1"), (2, "ValueError: from 2")}
        assert told["total"] == 3


def test_a_failure_stays_as_its_own_rank_has_told_it(ranks3: Ranks, tmp_path: Path) -> None:
    """A rank that passes on the failure of another one does not sign it."""

    def scenario(folder: Path) -> tuple[int, str]:
        rank, raised = initialize_ddp().rank, folder / "raised"
        with pytest.raises(RankError) as caught, ParallelExecutor():
            try:
                on_rank(1)(lambda: 1 // 0)()
            finally:  # the others are the first to tell, and free rank 1 from here
                if rank == 1:
                    raised.touch()
                    time.sleep(3600)
                while not raised.exists():
                    time.sleep(0.001)
        return os.getpid(), "".join(traceback.format_exception(caught.value)) if rank != 1 else ""

    (_, told), (pid, _), (_, told_too) = ranks3.run(scenario, tmp_path)
    for text in (told, told_too):
        assert f"raised by rank 1 of 3 (pid {pid} on" in text
        assert text.count("raised by") == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "told_as"),
    [
        (KeywordOnly, {"code": 3}, "KeywordOnly: code 3"),
        (SystemExit, {}, "SystemExit: "),
        (KeyboardInterrupt, {}, "KeyboardInterrupt: "),
    ],
)
def test_exceptions_that_cannot_be_rebuilt(
    ranks2: Ranks, kind: type[BaseException], arguments: dict[str, Any], told_as: str
) -> None:
    """The other rank gets a `RemoteError` that names the type; the failed one keeps its own way out."""

    def body(rank: int) -> None:
        if rank == 1:
            raise kind(**arguments)
        wait_in_collective()

    other, own = ranks2.run(outcome_of_a_block, body)
    assert other["failures"][1].startswith("RemoteError: ")
    assert other["failures"][1].endswith(told_as)
    assert own["error"] == ("RankError" if issubclass(kind, Exception) else kind.__name__)
    assert (other["total"], own["total"]) == (2, 2)


def test_an_exception_that_cannot_be_pickled(ranks2: Ranks) -> None:
    """Nothing is pickled: its name, message and traceback arrive."""

    def scenario() -> str:
        with pytest.raises(RankError) as caught, ParallelExecutor():
            if initialize_ddp().rank == 1:
                raise Unpicklable("strange")
            wait_in_collective()
        return str(caught.value)

    other, own = ranks2.run(scenario)
    assert "Unpicklable: strange" in other
    assert "Unpicklable: strange" in own


def test_blocks_nest(ranks2: Ranks) -> None:
    """A failure that all ranks catch inside the outer block leaves that whole; one that they do not, fails both."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        with ParallelExecutor() as outer:
            for _ in range(3):
                with pytest.raises(RankError), ParallelExecutor():
                    if rank == 1:
                        raise ValueError
                    wait_in_collective()
                with pytest.raises(RankError):
                    outer.run(lambda: 1 // (1 - rank))
            results = outer.run(lambda: initialize_ddp().rank)
        with pytest.raises(RankError) as caught, ParallelExecutor(), ParallelExecutor():
            if rank == 1:
                raise ValueError("inner")
            wait_in_collective()
        return results, {r: str(e) for r, e in caught.value.failures.items()}

    assert ranks2.run(scenario) == [([0, 1], {1: "inner"})] * 2


def random_program(seed: int, steps: int) -> list[Any]:
    """The same random program on every rank: calls, collectives and blocks in blocks, of which many fail somewhere.

    Returns what came of each step, without what only one rank can know.
    """
    rng, rank, log = random.Random(seed), initialize_ddp().rank, []

    def step(depth: int) -> None:
        kind, who, wait = rng.randrange(6), rng.randrange(3), rng.choice(WAITS)
        delays = [rng.random() * 0.003 for _ in range(3)]
        inner = [rng.randrange(1 << 30) for _ in range(rng.randrange(3) if depth < 2 else 0)]
        mark = len(log)
        time.sleep(delays[rank])
        if kind == 0:
            log.append(on_rank(who, broadcast=True)(lambda: who)())
        elif kind == 1:
            on_rank(who, barrier=True)(int)()
        elif kind == 2:
            total = torch.ones(1)
            initialize_ddp()
            dist.all_reduce(total)
            log.append(int(total))
        else:
            try:
                with ParallelExecutor() as executor:
                    initialize_ddp()
                    for number in inner:
                        rng.seed(number)
                        step(depth + 1)
                    if kind == 3:
                        log.append(executor.run(lambda: depth))
                    elif kind == 4:
                        log.append(executor.run(lambda: 1 // (0 if rank == who else 1)))
                    elif rank == who:
                        raise ValueError(f"{who}")
                    elif wait not in (wait_in_on_rank, wait_in_run, wait_in_ddp):
                        wait()
            except RankError as error:
                del log[mark:]  # how far a rank got in a block that failed is its own
                log.append((error.rank, str(error.failures[error.rank])))

    for number in range(steps):
        rng.seed(seed + number)
        step(0)
    return log


@pytest.mark.parametrize("seed", range(0, 300, 100))
def test_random_programs_end_alike_on_all_ranks(ranks3: Ranks, seed: int) -> None:
    """Whatever fails inside whatever, all ranks get the same outcomes in the same order, and stay in step."""
    first, *others = ranks3.run(random_program, seed, 40)
    assert len(first) > 20
    assert others == [first] * 2


def test_what_comes_after_a_block_does_not_fail_it(ranks3: Ranks) -> None:
    """Rank 0 fails in the next call while others still poll in the end of the block: they are through it."""

    def scenario() -> int:
        rank = initialize_ddp().rank
        for _ in range(30):
            with ParallelExecutor():
                time.sleep(0.015 * (rank == 1))
            with pytest.raises(RankError) as caught:
                on_rank(0)(lambda: 1 // 0)()
            assert isinstance(caught.value.failures[0], ZeroDivisionError)
        return 1

    assert ranks3.run(scenario) == [1, 1, 1]


@pytest.mark.parametrize("late", [TimeoutError, KeyboardInterrupt])
def test_a_block_that_one_rank_has_left_has_passed(ranks2: Ranks, tmp_path: Path, late: type[BaseException]) -> None:
    """What comes up on rank 0 as it waits to leave, when rank 1 is through, is no failure of the block."""

    def scenario(folder: Path) -> Any:
        rank, told = initialize_ddp().rank, ""
        here = blocks_of(rank_context())
        assert here is not None
        poll = here.board.wait
        through = folder / "through"  # rank 1 is through the block

        def poll_late(wait: Wait, is_over: Callable[[float], bool]) -> None:
            if not wait.call.function.startswith("the end of"):
                poll(wait, is_over)
                return
            here.board.wait = poll  # type: ignore[method-assign]
            is_over(0.0)  # rank 0 has arrived
            while not through.exists():
                time.sleep(0.001)
            raise late

        if rank == 0:
            here.board.wait = poll_late  # type: ignore[method-assign]
        try:
            with ParallelExecutor():
                pass
        except BaseException as error:
            told = type(error).__name__
        through.touch()
        total = torch.ones(1)
        dist.all_reduce(total)  # the group is the same
        with pytest.raises(RankError) as caught, ParallelExecutor():  # it cannot begin any more
            pass
        return told, on_rank(0, broadcast=True)(lambda: "in step")(), int(total), list(caught.value.failures)

    own = "KeyboardInterrupt" if late is KeyboardInterrupt else ""
    assert ranks2.run(scenario, tmp_path) == [(own, "in step", 2, [0]), ("", "in step", 2, [0])]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_give_up_as_the_last_one_comes(world_size: int) -> None:
    """Whoever comes when, a barrier has passed on all ranks or on none, and they stay in step."""

    def scenario() -> list[str]:
        rank, told = initialize_ddp().rank, []
        chance = random.Random(rank)
        for number in range(60):
            time.sleep(0.03 * chance.random())
            try:
                if number % 3:
                    barrier(timeout=0.02)
                else:
                    on_rank(number % initialize_ddp().world_size, barrier=True, timeout=0.02)(int)()
            except RankTimeoutError:
                told.append("timeout")
            else:
                told.append("passed")
        return [*told, on_rank(0, broadcast=True)(lambda: "in step")()]

    with launched(world_size) as ranks:
        first, *others = ranks.run(scenario)
    assert others == [first] * (world_size - 1)
    assert {"timeout", "passed"} < set(first)


@pytest.mark.parametrize("how", ["a barrier", "a call with a barrier", "initialize_ddp"])
def test_ctrl_c_in_a_barrier(ranks3: Ranks, tmp_path: Path, how: str) -> None:
    """The other ranks are told, and all of them can do the same again."""

    def wait() -> None:
        if how == "a barrier":
            barrier()
        elif how == "initialize_ddp":
            initialize_ddp()
        else:
            on_rank(2, barrier=True)(int)()

    def scenario() -> tuple[str, int]:
        rank, is_over = initialize_ddp().rank, tmp_path / "over"
        if how == "initialize_ddp":
            with pytest.raises(RankError), ParallelExecutor():
                raise ValueError
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        if rank == 2:
            while not is_over.exists():
                time.sleep(0.001)
        try:
            wait()
            told = ""
        except (KeyboardInterrupt, ParallelError) as error:
            told = f"{type(error).__name__}: {error}"
        if rank == 0:
            is_over.touch()
        wait()
        initialize_ddp()
        total = torch.ones(1)
        dist.all_reduce(total)
        return told, int(total)

    (own, total), *others = ranks3.run(scenario)
    assert (own, total) == ("KeyboardInterrupt: ", 3)
    for told, total in others:
        assert "KeyboardInterrupt" in told
        assert total == 3


def test_a_failure_before_a_barrier_that_one_rank_gives_up(ranks2: Ranks, tmp_path: Path) -> None:
    """The last one comes to it in that instant: then the barrier has passed on both, and both know of the failure."""

    def until(name: str) -> None:
        while not (tmp_path / name).exists():
            time.sleep(0.001)

    def scenario() -> str:
        here = blocks_of(rank_context()) if initialize_ddp() else None
        assert here is not None
        arrive = here._arrive
        end_generation = here._end_generation

        def arrive_late(*args: Any) -> None:
            until("given up")
            arrive(*args)
            (tmp_path / "has come").touch()

        def end_generation_late(*args: Any) -> Any:
            (tmp_path / "given up").touch()
            until("has come")
            return end_generation(*args)

        @on_rank(0, barrier=True, timeout=1)
        def fail() -> None:
            raise ValueError("bad batch")

        if here.rank == 0:
            here._arrive = arrive_late  # type: ignore[method-assign]
        else:
            here._end_generation = end_generation_late  # type: ignore[method-assign]
        try:
            with pytest.raises(RankError) as caught:
                fail()
        finally:
            del here.__dict__["_arrive" if here.rank == 0 else "_end_generation"]
        with contextlib.suppress(RankTimeoutError):  # the one that gave up has still to be told
            barrier()
        barrier()
        return str(caught.value.failures[0])

    assert ranks2.run(scenario) == ["bad batch"] * 2


def test_the_time_of_a_block_counts_in_the_blocks_in_it(ranks2: Ranks) -> None:
    """The inner one, which has no limit of its own, is ended when that of the outer one is over."""

    @on_rank([0, 1])
    def inner() -> None:
        if current_world().rank == 0:
            spin()

    def scenario() -> list[int]:
        initialize_ddp()
        with pytest.raises(RankTimeoutError) as caught:
            ParallelExecutor(timeout=0.5).run(inner)
        return list(caught.value.ranks)

    assert all(0 in ranks for ranks in ranks2.run(scenario))


@pytest.mark.slow
def test_a_rank_that_dies_as_it_ends_a_block() -> None:
    """It has stopped the counter, and has not said why: the others tell that it has died."""

    def scenario() -> list[str]:
        rank, told = initialize_ddp().rank, []
        here = blocks_of(rank_context())
        assert here is not None
        swap = here.context.connection.swap

        def die_before_the_record(key: str, expected: str, text: str) -> str:
            if expected == "":
                os._exit(1)
            return swap(key, expected, text)

        if rank == 1:
            here.context.connection.swap = die_before_the_record  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(RankError) as caught, ParallelExecutor():
                if rank == 1:
                    raise ValueError
            told.append(repr(caught.value.failures[1]))
        return told

    with launched(4) as ranks:
        for told in ranks.run(scenario, only=[0, 2, 3], also=[1]):
            assert len(told) == 2
            assert all(each.startswith("WorkerDiedError('Rank 1 (pid ") for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_at_different_barriers(world_size: int) -> None:
    """All are told of two places, whether a block begins or ends there or not; then all go on, with a group."""

    def scenario() -> tuple[list[str], list[float], int]:
        rank, told, totals = initialize_ddp().rank, list[str](), list[float]()

        def begin_block() -> None:
            with ParallelExecutor():
                time.sleep(3600)

        def end_block() -> None:
            with ParallelExecutor():
                pass

        def wait_in_block() -> None:
            with ParallelExecutor():
                barrier()

        for mine, others in [
            (begin_block, barrier),
            (barrier, begin_block),
            (end_block, wait_in_block),
            (barrier, on_rank(0, barrier=True)(int)),
        ]:
            with pytest.raises(ParallelError) as caught:
                if rank == 1:
                    mine()
                else:
                    others()
                barrier()  # some have come through the other one
            told.append(str(caught.value))
            with contextlib.suppress(ParallelError):
                barrier()
            initialize_ddp()
            total = torch.ones(1)
            dist.all_reduce(total)
            totals.append(total.item())
        context = rank_context()
        assert context is not None
        keys = [key for key in bottom(context.store).list_keys() if "/ended/" in key]
        return told, totals, len(keys)

    with launched(world_size) as ranks:
        for told, totals, keys in ranks.run(scenario):
            assert len(told) == 4
            assert all("The ranks are not in the same call" in each for each in told)
            assert totals == [world_size] * 4
            assert keys <= 1


def test_groups_made_unequally_often_before_a_failure(ranks2: Ranks) -> None:
    """Rank 0 has begun to make a group when rank 1 fails: the next group is the same on both."""

    def scenario() -> int:
        rank = initialize_ddp().rank

        def body() -> None:
            if rank == 1:
                time.sleep(0.05)
                raise ValueError
            initialize_ddp()
            dist.all_reduce(torch.ones(1))

        for _ in range(3):
            with pytest.raises(RankError):
                on_rank([0, 1])(body)()
        total = torch.ones(1)
        initialize_ddp()
        dist.all_reduce(total)
        return int(total)

    assert ranks2.run(scenario) == [2, 2]


def test_a_failure_while_results_are_gathered(ranks2: Ranks) -> None:
    """A rank that cannot take the others' results fails the call on all."""

    def scenario() -> str:
        rank = initialize_ddp().rank

        class Picky:
            def __reduce__(self) -> Any:
                return _only_on_rank_0, ()

        with pytest.raises(RankError) as caught:
            ParallelExecutor().run(Picky)
        assert rank == initialize_ddp().rank
        return repr(caught.value.failures[1])

    for told in ranks2.run(scenario):
        assert told.startswith("TransferError")


def test_a_failure_that_python_cannot_write_down(ranks2: Ranks) -> None:
    """An argument with more digits than Python prints: the others learn of the failure all the same."""

    def scenario() -> str:
        with pytest.raises(RankError) as caught, ParallelExecutor():
            if initialize_ddp().rank == 1:
                raise KeyError(10**5000)
            wait_in_collective()
        return type(caught.value.failures[1]).__name__

    assert ranks2.run(scenario) == ["KeyError"] * 2


def test_a_failure_while_the_other_enters_or_leaves(ranks2: Ranks) -> None:
    """An interruption between two lines of ours leaves nothing half entered or half left."""

    def scenario() -> None:
        rank = initialize_ddp().rank
        for _ in range(300):
            on_rank(0, barrier=True)(int)()
            with pytest.raises(RankError), ParallelExecutor():
                if rank == 1:
                    raise ValueError
                torch.ones(3)

    ranks2.run(scenario)


def test_an_executor_is_closed_by_its_block(ranks2: Ranks) -> None:
    """A second block needs a second executor, as in the standard library."""

    def scenario() -> None:
        executor = ParallelExecutor()
        with executor:
            executor.run(int)
        with pytest.raises(ExecutorClosedError), executor:
            pass
        with ParallelExecutor() as another:
            another.run(int)

    ranks2.run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("skipping", [0, 1])
def test_a_rank_that_never_enters_is_named(skipping: int) -> None:
    """A rank skips the block and makes another call: both learn of it, with both places."""

    def scenario(skipping: int) -> str:
        rank = initialize_ddp().rank
        with pytest.raises(ParallelError) as caught:
            if rank == skipping:
                on_rank(1 - skipping)(int)()
            else:
                with ParallelExecutor():
                    pass
        return str(caught.value)

    with launched(2) as ranks:  # of its own: they are out of step afterwards
        for told in ranks.run(scenario, skipping):
            assert "with ParallelExecutor()" in told
            assert f"int() on rank {1 - skipping} at" in told


def test_a_block_inside_that_one_rank_never_enters(ranks2: Ranks) -> None:
    """Rank 1 enters a block inside, as rank 0 is at the end of the outer one: that has failed."""

    def scenario() -> dict[int, str]:
        rank = initialize_ddp().rank
        with pytest.raises(RankError) as caught, ParallelExecutor():
            if rank == 1:
                with contextlib.suppress(RankError), ParallelExecutor():
                    raise ValueError("inside")
        return {rank: str(error) for rank, error in caught.value.failures.items()}

    for told in ranks2.run(scenario):
        cause, *_ = told.values()  # the error of rank 1 may come after it, if that got as far as to raise one
        assert cause.startswith("The ranks are not in the same call: rank ")
        assert "made the end of with ParallelExecutor() on ranks 0-1 at" in cause
        assert "made with ParallelExecutor() on ranks 0-1 at" in cause
    assert ranks2.run(lambda: ParallelExecutor().run(int)) == [[0, 0]] * 2


def test_ranks_of_a_pool_that_went_through_unequal_blocks() -> None:
    """A block of a `run` that only one rank enters does not put the next `run` out of step."""

    def scenario() -> str:
        if initialize_ddp().rank == 1:
            with pytest.raises(ParallelError) as caught, ParallelExecutor():
                raise ValueError
            return str(caught.value)
        return ""

    with ParallelExecutor(num_workers=2, devices="cpu", timeout=20) as pool:
        assert "Rank 0 has left, and rank 1 waits for it in with Parallel" in pool.run(scenario)[1]
        assert pool.run(lambda: on_rank(0, broadcast=True)(lambda: 7)()) == [7, 7]
        assert pool.run(lambda: ParallelExecutor().run(int)) == [[0, 0]] * 2


@pytest.mark.slow
def test_a_rank_that_ends_before_the_block_is_named() -> None:
    """Rank 1 ends its program where rank 0 enters the block and waits in a collective, or for its end."""

    def scenario(wait: Callable[[], None]) -> str:
        if initialize_ddp().rank == 1:
            os._exit(0)
        with pytest.raises(RankError) as caught, ParallelExecutor():
            wait()
        return repr(caught.value.failures[1])

    for wait in (wait_in_collective, wait_at_the_end, sleep):
        with launched(2) as ranks:
            told, gone = ranks.run(scenario, wait)
        assert told.startswith("WorkerDiedError('Rank 1 (pid ")
        assert gone == "gone"


def test_a_rank_that_leaves_while_the_other_is_in_a_collective(ranks2: Ranks) -> None:
    """Rank 0 is through, rank 1 waits in all_reduce for it: both end with an error that says who is where."""

    def body(rank: int) -> None:
        if rank == 1:
            wait_in_collective()

    for told in ranks2.run(outcome_of_a_block, body):
        assert told["seconds"] < AT_ONCE_S
        assert list(told["failures"]) == [1]
        assert "Rank 1 is in all_reduce() at " in told["text"]
        assert "test_blocks.py:" in told["text"]
        assert "which can never end: rank 0 waits at the end of with ParallelExecutor()" in told["text"]
        assert told["total"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("wait", [sleep, spin, wait_in_collective, wait_at_the_end])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_a_failure_of_the_block(wait: Callable[[], None], victim: int) -> None:
    """SIGKILL of one rank: the others get a WorkerDiedError for it, whatever they are in."""

    def scenario(victim: int) -> Any:
        rank = initialize_ddp().rank
        start = time.monotonic()  # where the host of the store dies, the call before may not end
        with pytest.raises(RankError) as caught, ParallelExecutor():
            on_rank(0, barrier=True)(int)()
            start = time.monotonic()
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            wait()
        return {r: type(e) for r, e in caught.value.failures.items()}, time.monotonic() - start

    with launched(3) as ranks:
        answers = ranks.run(scenario, victim)
    for rank, answer in enumerate(answers):
        if rank != victim:
            assert answer[0] == {victim: WorkerDiedError}
            assert answer[1] < AT_ONCE_S


def fail_beside_a_collective() -> None:
    """Rank 1 raises as the others enter a collective."""
    rank = initialize_ddp().rank
    with pytest.raises(RankError), ParallelExecutor():
        dist.barrier()
        if rank == 1:
            raise ValueError
        wait_in_collective()


def test_nothing_of_a_failed_block_stays(ranks2: Ranks) -> None:
    """Once the next group stands: neither descriptors nor threads of gloo, and not until the next collection only."""

    def threads() -> int:
        """The fewest within a moment: the kernel lists one that has been joined until it gets to letting go of it."""
        end, fewest = time.monotonic() + 0.2, len(os.listdir("/proc/self/task"))
        while time.monotonic() < end:
            fewest = min(fewest, len(os.listdir("/proc/self/task")))
        return fewest

    def scenario() -> list[tuple[int, int]]:
        fail_beside_a_collective()
        gc.collect()
        gc.disable()
        try:
            found = []
            for _ in range(4):
                fail_beside_a_collective()
                initialize_ddp()
                dist.barrier()
                found.append((len(os.listdir("/proc/self/fd")), threads()))
            return found
        finally:
            gc.enable()

    for found in ranks2.run(scenario):
        assert len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "run"])
def test_models_are_dropped_after_failures(ranks2: Ranks, how: str) -> None:
    """A model that was prepared with a closed group is destroyed at any moment, and no rank waits for the GIL then."""

    def train(failing: int, kept: list[Any]) -> None:
        rank = initialize_ddp().rank
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        kept.append(model)
        for step in range(3):
            if rank == failing and step == 1:
                raise ValueError("bad batch")
            model(torch.ones(2, 4)).sum().backward()

    def scenario() -> int:
        initialize_ddp()
        kept: list[Any] = []
        for attempt in range(40):
            with pytest.raises(RankError) as caught:
                if how == "run":
                    ParallelExecutor().run(train, attempt % 2, kept)
                else:
                    with ParallelExecutor():
                        train(attempt % 2, kept)
            assert caught.value.rank == attempt % 2
            del caught, kept[: attempt % 3]  # at once, or after the next group stands
        return len(kept)

    first, second = ranks2.run(scenario)
    assert first == second


@pytest.mark.slow
def test_a_closed_group_outlives_its_models(ranks2: Ranks) -> None:
    """Until the next group stands, or later if a model is kept: no model destroys it, on neither rank."""

    def fail() -> torch.nn.parallel.DistributedDataParallel:
        rank = initialize_ddp().rank
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        with pytest.raises(RankError), ParallelExecutor():
            if rank == 1:
                raise ValueError
            model(torch.ones(2, 4)).sum().backward()
        return model

    def scenario() -> list[bool]:
        is_kept = []
        for next_groups in range(2):
            model = fail()
            group = weakref.ref(model.process_group)
            for _ in range(next_groups):
                fail()
            del model
            is_kept.append(group() is not None)
            fail()
            is_kept.append(group() is not None)
        return is_kept

    for is_kept in ranks2.run(scenario):
        assert is_kept == [True, False] * 2


def test_an_import_is_not_interrupted(ranks2: Ranks, tmp_path: Path) -> None:
    """A module of which half has run could not be imported again, as mpmath, which torch imports, cannot."""
    (tmp_path / "slow_module.py").write_text(
        """
import pathlib, time
times = pathlib.Path(__file__).with_name("times")
times.open("a").write("x")
end = time.monotonic() + 0.5
while time.monotonic() < end:
    time.sleep(0.01)
"""
    )

    def scenario() -> tuple[list[int], str]:
        rank, times = initialize_ddp().rank, tmp_path / "times"
        with pytest.raises(RankError) as caught, ParallelExecutor():
            if rank == 1:
                while not times.exists() or not times.read_text():
                    time.sleep(0.001)
                raise ValueError("bad batch")
            sys.path.insert(0, str(tmp_path))
            importlib.import_module("slow_module")
            time.sleep(3600)
        if rank == 0:
            del sys.modules["slow_module"], sys.path[0]  # it is there
        return list(caught.value.failures), times.read_text()

    assert ranks2.run(scenario) == [([1], "x")] * 2
    (tmp_path / "times").unlink()
