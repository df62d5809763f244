"""`on_rank`, `on_local_rank`, `rank_first`: the named ranks run, the others wait, and a failure reaches all."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
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
    broadcast,
    current_world,
    initialize_ddp,
    on_local_rank,
    on_rank,
    parallelize_on_gpus,
    rank_first,
)
from nn_parallel._engine.ranks.blocks import blocks_of
from nn_parallel._engine.ranks.context import rank_context
from nn_parallel._engine.ranks.outcomes import FAILURES_KEPT
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


def test_broadcast_gives_the_result_to_all(any_ranks: AnyRanks) -> None:
    """With broadcast=True every rank gets the first named rank's result, also one that plain pickle refuses."""

    def scenario() -> Any:
        @on_rank([1, 0], broadcast=True)
        def make() -> Any:
            rank = current_world().rank
            made = {"rank": rank, "tensor": torch.full((3,), float(rank)), "fn": lambda: rank}
            return made if rank == 1 else threading.Lock()  # only the result of the first is sent

        made: Any = make()
        return made["rank"], made["tensor"].tolist(), made["fn"]()

    assert set(map(str, any_ranks.run(scenario))) == {str((1, [1.0, 1.0, 1.0], 1))}


def test_a_result_that_cannot_be_broadcast_is_an_error_everywhere(any_ranks: AnyRanks) -> None:
    """A broadcast result that cannot be pickled is a failure of the call, with its path, on every rank."""

    def scenario() -> str:
        @on_rank(0, broadcast=True)
        def make() -> Any:
            return {"lock": threading.Lock()}

        with pytest.raises(RankError) as caught:
            make()
        return str(caught.value.failures[0])

    assert all("The result['lock'] is a _thread.lock" in text for text in any_ranks.run(scenario))


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
            late = "barrier() on rank 0 at test_on_rank.py"
        if me == 1:
            with contextlib.suppress(ParallelError):
                barrier()
        return seen, inside, re.sub(r"/\S*/", "", late)

    results = any_ranks.run(scenario, tmp_path)
    for seen, inside, late in results:
        assert seen == len(results)
        assert "barrier() is a call of all ranks, inside the body of a function of rank 0" in inside
        assert "barrier() on rank 0 at test_on_rank.py" in late


def test_an_object_of_one_rank_goes_to_all(any_ranks: AnyRanks) -> None:
    """From any rank, whatever the others give; one that cannot be sent is an error on all."""

    def scenario() -> Any:
        me = current_world().rank
        try:
            broadcast(threading.Lock() if me == 0 else None)
        except RankError as error:
            told = str(error)
        return broadcast({"from": me}), broadcast(torch.tensor(me), src=-1).item(), told

    results = any_ranks.run(scenario)
    for first, last, told in results:
        assert (first, last) == ({"from": 0}, len(results) - 1)
        assert "broadcast() failed on rank 0" in told
    assert broadcast(1) == 1
    assert barrier() is None  # type: ignore[func-returns-value]


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
            return inner()

        @on_rank([0, 1])
        def both() -> Any:
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
        start.begin_generation(start.generation + 1)  # in step again for the next test
        return text

    for text in any_ranks.run(scenario)[1:]:
        assert "save() on rank 0 at " in text
        assert "report() on rank 0 at " in text
        assert "test_on_rank.py:" in text


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
        here.begin_generation(here.generation + 1)  # in step again for the next test
        return text

    for text in any_ranks.run(scenario)[:2]:
        assert "first() on rank 0" in text
        assert "second() on rank 1" in text


def test_a_rank_that_lags_behind_learns_which_calls_failed(any_ranks: AnyRanks) -> None:
    """One rank is many calls ahead: the other still learns, call by call, which failed and how."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank(0)
        def work(turn: int) -> None:
            if turn % 3 == 1:
                raise ValueError(f"turn {turn}")

        dist.barrier()
        if me == 0:
            failed = _failed_turns(work)
            dist.barrier()
        else:
            dist.barrier()  # rank 0 has made all its calls before this rank makes its first
            failed = _failed_turns(work)
        return failed

    def _failed_turns(work: Any) -> list[int]:
        failed = []
        for turn in range(100):
            try:
                work(turn)
            except RankError as error:
                assert str(error.failures[0]) == f"turn {turn}"
                failed.append(turn)
        return failed

    expected = [turn for turn in range(100) if turn % 3 == 1]
    assert len(expected) < FAILURES_KEPT
    assert all(failed == expected for failed in any_ranks.run(scenario))


def test_a_rank_too_far_behind_is_told_that_it_cannot_know(any_ranks: AnyRanks) -> None:
    """Beyond the failures that are kept, a lagging rank gets an error that says so, never a false success."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank(0)
        def fail() -> None:
            raise ValueError

        outcomes = []
        if me != 0:
            dist.barrier()
        for _ in range(FAILURES_KEPT + 10):
            try:
                fail()
            except RankError:
                outcomes.append("failed")
            except ParallelError:
                outcomes.append("unknown")
        if me == 0:
            dist.barrier()
        return outcomes

    results = any_ranks.run(scenario)
    assert results[0] == ["failed"] * (FAILURES_KEPT + 10)
    for outcomes in results[1:]:
        assert outcomes == ["unknown"] * 10 + ["failed"] * FAILURES_KEPT


def test_without_waiting_an_error_comes_at_the_next_call(any_ranks: AnyRanks) -> None:
    """wait=False: the others go on at once and raise the error of that call at their next one."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank(0, wait=False)
        def log(text: str) -> None:
            if text == "bad":
                raise OSError(28, "No space left on device")

        @on_rank(1)
        def other() -> str:
            return "ran"

        log("good")
        first = ""
        try:
            log("bad")
        except RankError as error:
            first = str(error)
        dist.barrier()  # rank 0 has failed by now
        second = ""
        try:
            other()
        except RankError as error:
            second = str(error.failures[0])
        return me, first, second, other()

    results = any_ranks.run(scenario)
    assert "No space left" in results[0][1]
    assert results[0][2] == ""
    assert all(first == "" and "No space left" in second for _, first, second, _ in results[1:])
    assert [r[3] for r in results] == [None, "ran"] + [None] * (len(results) - 2)


def test_several_without_waiting_fail_alike_everywhere(any_ranks: AnyRanks) -> None:
    """wait=False with several ranks: the named ones learn at a later call too, and the group goes on."""

    def scenario() -> Any:
        me = initialize_ddp().rank

        @on_rank([0, 1], wait=False)
        def log() -> None:
            if me == 1:
                raise OSError(28, "No space left on device")

        texts = []
        for call in (log, on_rank(1)(int)):
            try:
                call()
            except RankError as error:
                texts.append(str(error.failures[1]))
        total = torch.ones(1)
        dist.all_reduce(total)
        return texts, total.item()

    results = any_ranks.run(scenario)
    assert results == [(["[Errno 28] No space left on device"], len(results))] * len(results)


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
    with pytest.raises(TypeError, match="it decorates a function, not 3"):
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

        @on_rank([0, 1], timeout=0.3)
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


@pytest.mark.slow
def test_the_store_stays_bounded(any_ranks: AnyRanks) -> None:
    """100 000 calls, one rank far ahead, failures and lists of ranks: the number of keys does not grow."""

    def scenario() -> Any:
        initialize_ddp()
        here = blocks_of(rank_context())
        assert here is not None

        def keys() -> int:
            store = here.connection.store
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            return len(store.list_keys())

        @on_rank(0)
        def cheap() -> None: ...

        @on_rank([0, 1])
        def both(fail: bool) -> None:
            if fail:
                raise ValueError

        @on_rank(0)
        def failing() -> None:
            raise ValueError

        def round_of_calls(count: int) -> None:
            for _ in range(count):
                cheap()
            for fail in (False, True):
                try:
                    both(fail)
                except RankError:
                    initialize_ddp()
            for _ in range(3):
                with pytest.raises(RankError):
                    failing()

        round_of_calls(10)
        dist.barrier()
        before = keys()
        dist.barrier()
        round_of_calls(100_000)
        round_of_calls(10)
        dist.barrier()
        return before, keys()

    counts = any_ranks.run(scenario)
    for before, after in counts:
        assert after <= before + len(counts)  # each rank may have come to say what it waits for


def test_a_hostile_value_in_the_store_is_an_error_and_never_runs(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """What stands under our keys is read as data: a pickle there is reported, not executed."""

    def scenario(trap: str) -> Any:
        import pickle

        class Trap:
            def __reduce__(self) -> Any:
                return os.mkdir, (trap,)

        here = blocks_of(rank_context())
        assert here is not None
        me = here.rank
        initialize_ddp()
        dist.barrier()
        if me == 0:
            here.connection.store.set("report/0", pickle.dumps(Trap()))
        dist.barrier()
        text = ""
        if me != 0:

            @on_rank(0)
            def never() -> None: ...

            with pytest.raises(ParallelError) as caught:
                never()
            text = str(caught.value)
            here._number -= 1
        dist.barrier()
        if me == 0:
            here._post(here._phase)
        dist.barrier()
        return text

    for text in any_ranks.run(scenario, str(tmp_path / "trap"))[1:]:
        assert "'report/0'" in text
    assert not (tmp_path / "trap").exists()


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


def test_once_per_node(any_ranks: AnyRanks) -> None:
    """on_local_rank runs once on this one node, and on the rank that the number says."""

    def scenario() -> Any:
        @on_local_rank(-1)
        def last() -> int:
            return current_world().local_rank

        with pytest.raises(ValueError, match="a local rank is 0"):
            on_local_rank(9)(last)()
        return last()

    results = any_ranks.run(scenario)
    assert results == [None] * (len(results) - 1) + [len(results) - 1]


def test_ranks_out_of_range(any_ranks: AnyRanks) -> None:
    """A rank beyond the world is a ValueError on every rank, which names the world size and the valid range."""

    def scenario() -> str:
        with pytest.raises(ValueError, match="cannot run") as caught:
            on_rank(7)(print)()
        return str(caught.value)

    results = any_ranks.run(scenario)
    n = len(results)
    expected = f"on_rank(7) cannot run: world_size is {n}, so a rank is 0..{n - 1} (or -{n}..-1 from the end)."
    assert set(results) == {expected}


@pytest.mark.parametrize(
    ("rank", "error", "text"),
    [
        ("0", TypeError, "a rank is an int"),
        ([], ValueError, "names no rank"),
        (1.5, TypeError, "a rank is an int"),
        (True, TypeError, "a rank is an int"),
        ([0, "1"], TypeError, "a rank is an int"),
        (print, TypeError, r"write @on_rank\(0\) above"),
    ],
)
def test_what_is_no_rank_is_said_at_once(rank: Any, error: type[Exception], text: str) -> None:
    """A wrong argument is an error where the decorator stands, in any world."""
    with pytest.raises(error, match=text):
        on_rank(rank)


@pytest.mark.parametrize("several", [[0, 1], [0], []])
def test_one_rank_of_a_node_is_meant(several: Any) -> None:
    """Where several make no sense, the error says what is asked for."""
    with pytest.raises(TypeError, match=rf"on_local_rank\({re.escape(str(several))}\): a rank is an int"):
        on_local_rank(several)
    with pytest.raises(TypeError, match=r"rank_first\(.*\): a rank is an int"), rank_first(several):
        pass


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


def test_a_late_failure_does_not_put_the_ranks_out_of_step(any_ranks: AnyRanks) -> None:
    """Rank 0 failed in a call that nobody waited for: the others take part in the next one, its broadcast too."""

    def scenario() -> tuple[str, str, int]:
        initialize_ddp()
        told = []

        def fail() -> None:
            raise ValueError("log")

        for call in (on_rank(0, wait=False)(fail), on_rank(0, broadcast=True)(lambda: 5)):
            try:
                told.append(str(call()))
            except RankError as error:
                told.append(str(error))
            dist.barrier()  # what rank 0 tells of its failure is there
        return told[0], told[1], on_rank(0, broadcast=True)(lambda: 6)()

    first, *others = any_ranks.run(scenario)
    assert "ValueError: log" in first[0]
    assert first[1:] == ("5", 6)
    for answer in others:
        assert answer[0] == "None"
        assert "for which nobody waited, failed on rank 0" in answer[1]
        assert answer[2] == 6


@pytest.mark.slow
@pytest.mark.parametrize("is_known_before", [True, False])
@pytest.mark.parametrize("together", [False, True])
def test_a_late_failure_is_told_as_that_of_its_own_call(
    any_ranks: AnyRanks, is_known_before: bool, together: bool
) -> None:
    """Not of a later call that nobody waits for, nor of one that all wait for: that one's own failure comes first."""

    def scenario() -> list[list[str]]:
        initialize_ddp()

        def log_a() -> None:
            if not is_known_before:
                time.sleep(0.3)  # the others are in save() by then; if not, this is the other case
            raise OSError("log")

        def log_b() -> None:
            pass

        def save(fails: bool) -> None:
            if fails and current_world().rank == 1:
                raise ValueError("save")

        def told_of(call: Callable[[], Any]) -> str:
            try:
                call()
            except RankError as error:
                return str(error)
            return ""

        waited, found = on_rank([0, 1] if together else 1)(save), list[list[str]]()
        for fails in (False, True):
            told_of(on_rank(1, wait=False)(log_a))
            told = [told_of(on_rank(1, wait=False)(log_b))]
            if is_known_before:
                dist.barrier()
            found.append([*told, told_of(functools.partial(waited, fails)), told_of(on_rank(0)(int))])
        return found

    for rank, (fine, failed) in enumerate(any_ranks.run(scenario)):
        for told in (fine, failed):
            late = [text for text in told if "log_a(), for which nobody waited, failed on rank 1 of" in text]
            assert len(late) == (rank != 1)
            others = [text for text in told if text and text not in late]
            assert len(others) == (told is failed)
            assert all("save() failed on rank 1 of" in text and "ValueError: save" in text for text in others)


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
