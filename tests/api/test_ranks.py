"""`on_rank`, `on_local_rank`, `rank_first`: the named ranks run, the others wait, and a failure reaches all."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ParallelError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    RemoteError,
    barrier,
    current_world,
    initialize_ddp,
    on_local_rank,
    on_rank,
    parallelize_on_gpus,
    rank_first,
)
from nn_parallel._engine.ranks.blocks import blocks_of
from nn_parallel._engine.ranks.context import rank_context
from tests.support.ranks import AnyRanks


def _cause(error: BaseException) -> str:
    """The failure as Python prints it, with its remote traceback."""
    return "".join(traceback.format_exception(error))


def test_the_named_rank_runs_and_the_others_get_none(any_ranks: AnyRanks) -> None:
    """The function runs where it is named, the call returns None elsewhere."""

    def scenario() -> Any:
        @on_rank(0)
        def double(x: int, *, plus: int = 0) -> int:
            return 2 * x + plus

        @on_rank(-1)
        def where() -> int:
            return current_world().rank

        @on_rank([0, 1])
        def both() -> int:
            return current_world().rank

        return double(3, plus=1), where(), both()

    results = any_ranks.run(scenario)
    last = len(results) - 1
    assert [r[0] for r in results] == [7] + [None] * last
    assert [r[1] for r in results] == [None] * last + [last]
    assert [r[2] for r in results] == [0, 1] + [None] * (last - 1)


def test_the_others_wait(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """When the call returns anywhere, the named rank has finished."""

    def scenario(folder: Path) -> bool:
        @on_rank(0)
        def write() -> None:
            time.sleep(0.05)
            (folder / "done").touch()

        write()
        return (folder / "done").exists()

    assert all(any_ranks.run(scenario, tmp_path))


def test_with_a_barrier_nobody_goes_on_before_all_have_arrived(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """barrier=True: each rank sees the traces of all others after the call, the named one included."""

    def scenario(folder: Path) -> int:
        me = current_world().rank
        seen = 10
        for turn in range(5):

            @on_rank(0, barrier=True)
            def nothing() -> None:
                pass

            time.sleep(0.01 * ((me + turn) % 2))
            (folder / f"{turn}-{me}").touch()
            nothing()
            seen = min(seen, len(list(folder.glob(f"{turn}-*"))))
        return seen

    results = any_ranks.run(scenario, tmp_path)
    assert results == [len(results)] * len(results)


def test_a_barrier_waits_for_all_and_is_no_call_of_some(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """As the call above; one that does not come within the timeout is named, and so is the line of the call."""

    def scenario(folder: Path) -> Any:
        me = current_world().rank
        (folder / str(me)).touch()
        barrier()
        seen = len(list(folder.glob("*")))
        try:
            on_rank(0)(barrier)()
        except RankError as error:
            inside = str(error)
        try:
            if me != 1:
                barrier(timeout=0.2)
        except RankTimeoutError as error:
            late = str(error)
        else:
            late = "barrier() on rank 0 at test_ranks.py"
        if me == 1:
            with contextlib.suppress(ParallelError):
                barrier()
        return seen, inside, re.sub(r"/\S*/", "", late)

    results = any_ranks.run(scenario, tmp_path)
    for seen, inside, late in results:
        assert seen == len(results)
        assert "barrier() is a call of all ranks, inside the body of a function of rank 0" in inside
        assert "barrier() on rank 0 at test_ranks.py" in late


def test_a_failure_reaches_every_rank_with_its_traceback_and_the_group_goes_on(any_ranks: AnyRanks) -> None:
    """Rank 1 raises: every rank raises RankError with its type, message and traceback in time, and the group works."""

    def scenario() -> Any:
        me = initialize_ddp().rank
        raised_at = torch.zeros(1, dtype=torch.float64)

        @on_rank(1)
        def load_the_data() -> None:
            raised_at[0] = time.time()
            raise FileNotFoundError(2, "No such file or directory", "digits.csv")

        seconds = []
        for _ in range(5):
            dist.barrier()
            with pytest.raises(RankError) as caught:
                load_the_data()
            told_at = time.time()
            dist.broadcast(raised_at, 1)  # the group still works
            seconds.append(told_at - float(raised_at))
        error = caught.value.failures[1]
        assert caught.value.rank == 1
        return type(error).__name__, str(error), me == 1 or "load_the_data" in _cause(error), min(seconds)

    for name, text, shows_where, seconds in any_ranks.run(scenario):
        assert name == "FileNotFoundError"
        assert text == "[Errno 2] No such file or directory: 'digits.csv'"
        assert shows_where
        assert seconds < 0.1


def test_what_cannot_be_rebuilt_is_a_remote_error(any_ranks: AnyRanks) -> None:
    """An exception type that only one rank may know arrives as RemoteError with its name; so does SystemExit."""

    def scenario() -> Any:
        class OurError(Exception):
            pass

        @on_rank(0)
        def fail() -> None:
            raise OurError("mine")

        @on_rank(0)
        def leave() -> None:
            raise SystemExit(3)

        with pytest.raises(RankError) as caught:
            fail()
        try:
            leave()
        except RankError as error:
            left = str(error.failures[0])
        except SystemExit as error:
            left = f"itself: {error}"
        return current_world().rank == 0 or type(caught.value.failures[0]) is RemoteError, str(caught.value), left

    results = any_ranks.run(scenario)
    assert all(ok and "OurError: mine" in text.replace("RemoteError: ", "") for ok, text, _ in results[1:])
    assert results[0][2] == "itself: 3"
    assert all(left == "SystemExit: 3" for _, _, left in results[1:])


def test_one_of_several_raises_while_another_sits_in_a_collective(any_ranks: AnyRanks) -> None:
    """The worst case: rank 1 raises, rank 0 waits for it in all_reduce: all get the cause first, and can go on."""

    def scenario() -> Any:
        me = initialize_ddp().rank
        raised_at = []

        @on_rank([0, 1])
        def train() -> None:
            if me == 1:
                time.sleep(0.05)  # rank 0 is in the collective by then; if not, the test is easier, not wrong
                raised_at.append(time.time())
                raise ValueError("bad batch")
            dist.all_reduce(torch.ones(4))

        with pytest.raises(RankError) as caught:
            train()
        told_at = time.time()
        closed = not current_world().distributed
        initialize_ddp()
        total = torch.ones(1)
        dist.all_reduce(total)
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, raised_at)
        error = caught.value
        return error.rank, str(error.failures[1]), closed, total.item(), told_at - times[1][0]

    results = any_ranks.run(scenario)
    assert all(r[:4] == (1, "bad batch", True, len(results)) for r in results)
    assert all(r[4] < 1.0 for r in results)


def test_two_fail_at_once(any_ranks: AnyRanks) -> None:
    """Each failed rank is a leaf of the error, on every rank that knows of it."""

    def scenario() -> Any:
        @on_rank([0, 1])
        def fail() -> None:
            raise ValueError(f"rank {current_world().rank}")

        with pytest.raises(RankError) as caught:
            fail()
        initialize_ddp()
        return {rank: str(error) for rank, error in caught.value.failures.items()}

    for failures in any_ranks.run(scenario):
        assert failures
        assert all(text == f"rank {rank}" for rank, text in failures.items())


def test_nested_calls_run_where_they_are_named_and_nobody_waits(any_ranks: AnyRanks) -> None:
    """Inside the body of another, a call is no call of its own; one that could run nowhere is an error."""

    def scenario() -> Any:
        @on_rank(0)
        def inner() -> str:
            return "inner"

        @on_rank(1)
        def elsewhere() -> str:
            return "elsewhere"

        @on_rank(0)
        def outer() -> Any:
            with pytest.raises(ValueError, match="it would run nowhere"):
                elsewhere()
            assert on_rank(0, broadcast=True)(inner)() == "inner"
            return inner()

        @on_rank([0, 1])
        def both() -> Any:
            with pytest.raises(ValueError, match="not all of these ranks would get the result"):
                on_rank(0, broadcast=True)(inner)()
            return inner(), elsewhere()

        return outer(), both(), inner()

    results = any_ranks.run(scenario)
    assert results[0] == ("inner", ("inner", None), "inner")
    assert results[1] == (None, (None, "elsewhere"), None)


def test_ranks_in_different_calls_get_both_call_sites(any_ranks: AnyRanks) -> None:
    """Where ranks call different functions under one number, the error names both, not the other's result."""

    def scenario() -> Any:
        me = current_world().rank
        start = blocks_of(rank_context())
        assert start is not None

        @on_rank(0)
        def save() -> str:
            return "saved"

        @on_rank(0)
        def report() -> str:
            return "reported"

        if me == 0:
            save()
            report()
            text = ""
        else:
            with pytest.raises(ParallelError) as caught:
                report()
            text = str(caught.value)
        if start.context.world.launcher != "executor":  # there each `run` begins another generation
            start.begin_generation(start.generation + 1)  # in step again for the next test
        return text

    for text in any_ranks.run(scenario)[1:]:
        assert "save() on rank 0 at " in text
        assert "report() on rank 0 at " in text
        assert "test_ranks.py:" in text


def test_two_ranks_that_wait_for_each_other_learn_so(any_ranks: AnyRanks) -> None:
    """A deadlock by different orders of calls ends in an error on both ranks."""

    def scenario() -> Any:
        here = blocks_of(rank_context())
        assert here is not None
        text = ""

        @on_rank(0)
        def first() -> None: ...

        @on_rank(1)
        def second() -> None: ...

        if here.rank < 2:
            with pytest.raises(ParallelError) as caught:
                second() if here.rank == 0 else first()
            text = str(caught.value)
        if here.context.world.launcher != "executor":  # there each `run` begins another generation
            here.begin_generation(here.generation + 1)  # in step again for the next test
        return text

    for text in any_ranks.run(scenario)[:2]:
        assert "first() on rank 0" in text
        assert "second() on rank 1" in text


def test_without_waiting_it_is_a_plain_call(any_ranks: AnyRanks) -> None:
    """wait=False: its exception is the named rank's own; the others are told nothing, and all stay in step."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank([0, 1], wait=False)
        def log() -> Any:
            if me == 1:
                raise OSError(28, "No space left on device")
            return on_rank(0)(lambda: "ran")(), on_rank(0, barrier=True)(lambda: "at once")()

        told: Any = None
        try:
            told = log()
        except OSError as error:
            told = error.strerror
        total = torch.ones(1)
        dist.all_reduce(total)
        return told, total.item(), on_rank(0, broadcast=True)(lambda: "next")()

    world_size = len(results := any_ranks.run(scenario))
    assert [told for told, *_ in results[:2]] == [("ran", "at once"), "No space left on device"]
    assert all(told is None for told, *_ in results[2:])
    assert {(total, after) for _, total, after in results} == {(world_size, "next")}


def test_without_waiting_a_failure_fails_the_block_around_it(any_ranks: AnyRanks) -> None:
    """As any line in the block does."""

    def scenario() -> str:
        initialize_ddp()

        def log() -> None:
            raise OSError(28, "No space left on device")

        try:
            with ParallelExecutor():
                on_rank(1, wait=False)(log)()
                dist.all_reduce(torch.ones(1))
        except RankError as error:
            return str(error.failures[1])
        finally:
            initialize_ddp()
        return "passed"

    assert set(any_ranks.run(scenario)) == {"[Errno 28] No space left on device"}


def test_a_timeout_names_the_silent_rank_and_slow_is_not_dead(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """Past its timeout a waiting rank raises RankTimeoutError; without one it waits as long as it takes."""

    def scenario(folder: Path) -> Any:
        me = current_world().rank
        told = [folder / str(rank) for rank in range(1, current_world().world_size)]

        @on_rank(0, timeout=0.1)
        def slow() -> None:
            while not all(path.exists() for path in told):
                time.sleep(0.01)

        @on_rank(0)
        def patient() -> str:
            time.sleep(0.4)
            return "done"

        caught: Any = None
        try:
            slow()
        except RankTimeoutError as error:
            caught = (error.ranks, list(error.stacks), str(error))
            (folder / str(me)).touch()
        patient()
        return me, caught

    for me, caught in any_ranks.run(scenario, tmp_path):
        if me == 0:
            assert caught is None
        else:
            assert caught[:2] == ([0], [0])
            assert "rank 0" in caught[2]


def test_what_is_no_function() -> None:
    """It is said where the decorator is written, not at the call."""
    with pytest.raises(TypeError, match="takes a function, not 3"):
        on_rank(0)(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="with parentheses"):
        parallelize_on_gpus(print)  # type: ignore[arg-type]


def test_what_several_ranks_run_ends_on_all_together(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """Nobody goes on before all have arrived, whether named or not; past the timeout all of them get one error."""

    def scenario(folder: Path) -> tuple[int, Any]:
        initialize_ddp()
        me = current_world().rank

        @on_rank([0, 1])
        def nothing() -> None: ...

        @on_rank([0, 1], timeout=1.5)  # a rank tells twice a second where it stands
        def slow() -> None:
            time.sleep(3600 if me == 1 else 0)

        time.sleep(0.3 * (me == current_world().world_size - 1))
        (folder / str(me)).touch()
        nothing()
        seen = len(list(folder.iterdir()))
        with pytest.raises(RankTimeoutError) as caught:
            slow()
        initialize_ddp()
        dist.barrier()
        return seen, (caught.value.ranks, "in slow" in str(caught.value))

    results = any_ranks.run(scenario, tmp_path)
    assert results == [(len(results), ([1], True))] * len(results)


def test_rank_first_goes_first(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """The others run the block only when the first rank has left it; nested on_rank calls do not wait."""

    def scenario(folder: Path) -> Any:
        me = current_world().rank

        @on_rank(1)
        def one() -> str:
            return "one"

        with rank_first(1):
            found = (folder / "cache").exists()
            (folder / "cache").touch()
            inner = one()
        with rank_first(0, local=True):
            pass
        return me, found, inner

    for me, found, inner in any_ranks.run(scenario, tmp_path):
        assert found == (me != 1)
        assert inner == ("one" if me == 1 else None)


def test_rank_first_failing_keeps_the_others_out(any_ranks: AnyRanks) -> None:
    """If the first rank raises, the others do not run the block: every rank raises RankError."""

    def scenario() -> Any:
        entered = []
        with pytest.raises(RankError, match="KeyError"), rank_first():
            entered.append(True)
            raise KeyError("missing")
        return bool(entered)

    results = any_ranks.run(scenario)
    assert results == [True] + [False] * (len(results) - 1)


def test_options_that_exclude_each_other() -> None:
    """wait=False cannot be had with what makes every rank wait; a coroutine has no body to wait for."""

    async def later() -> None: ...

    with pytest.raises(ValueError, match="wait=False"):
        on_rank(0, wait=False, barrier=True)
    with pytest.raises(ValueError, match="wait=False"):
        on_rank(0, wait=False, broadcast=True)
    with pytest.raises(TypeError, match="async"):
        on_rank(0)(later)
    with pytest.raises(ValueError, match="above zero"):
        on_rank(0, timeout=0)


def test_alone_it_is_a_plain_call() -> None:
    """Alone any rank runs here, exceptions are themselves, and the decorated function keeps its name and signature."""

    @on_rank([0, 1])
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    class Model:
        @on_rank(0)
        def name(self) -> str:
            return type(self).__name__

    assert add(1) == 2
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert list(inspect.signature(add).parameters) == ["a", "b"]
    assert Model().name() == "Model"
    with pytest.raises(TypeError):
        add()  # type: ignore[call-arg]
    with rank_first(3):
        pass


def test_a_rank_that_waits_for_the_places_of_all_can_be_interrupted(tmp_path: Path) -> None:
    """Another rank fails before it has said where it is: the run ends, and no worker has to be killed."""
    waits = tmp_path / "waits"

    def scenario() -> None:
        if current_world().rank == 1:
            while not waits.exists():
                time.sleep(0.001)
            raise ValueError("bad batch")
        waits.touch()
        on_local_rank(0)(int)()

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        pids = pool.run(os.getpid)
        with pytest.raises(RankError, match="failed on rank 1 of 2: ValueError: bad batch"):
            pool.run(scenario)
        assert pool.run(os.getpid) == pids
