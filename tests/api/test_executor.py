"""`ParallelExecutor` as a pool, and under a launcher."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import nn_parallel._engine.devices
from nn_parallel import (
    ExecutorClosedError,
    ParallelError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    RemoteError,
    TransferError,
    WorkerDiedError,
    all_gather_object,
    current_world,
    initialize_ddp,
    on_rank,
)
from nn_parallel._engine.pool import site, supervisor
from nn_parallel.errors import RemoteTraceback
from tests.support.ranks import launched
from tests.support.scripts import run_script


def _printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _pids(executor: ParallelExecutor) -> list[int]:
    return executor.run(os.getpid)


def test_run_calls_every_worker_once_and_binds_the_device(own_executor2: ParallelExecutor) -> None:
    """One result per worker, in rank order, from two processes; ``device`` is bound by name."""

    def describe(device: torch.device, x: int) -> Any:
        world = current_world()
        return str(device), x, tuple(world)[:4], os.getpid()

    results = own_executor2.run(describe, 5)
    assert [r[:3] for r in results] == [("cpu", 5, (False, rank, rank, 2)) for rank in range(2)]
    assert len({r[3] for r in results} | {os.getpid()}) == 3


def test_pass_device_false() -> None:
    """pass_device=False leaves the parameter to the caller."""
    with ParallelExecutor(num_workers=1, devices="cpu", pass_device=False) as pool:
        assert pool.run(lambda device: device, "mine") == ["mine"]


def test_ranks_of_a_run_can_make_a_group_and_keep_it(own_executor2: ParallelExecutor) -> None:
    """initialize_ddp() inside run connects the ranks as in a launched script, and the next run finds the group."""

    def total(device: torch.device) -> Any:
        connected = dist.is_initialized()
        world = initialize_ddp()
        value = torch.tensor([float(world.rank + 1)], device=device)
        dist.all_reduce(value)
        return connected, world.distributed, value.item()

    own_executor2.run(total)
    assert own_executor2.run(total) == [(True, True, 3.0)] * 2


@pytest.mark.slow
def test_a_group_that_was_closed_is_freed() -> None:
    """Once the next one stands; also where an optimizer was made, with which torch imports what keeps a group."""

    def fail(groups: list[Any]) -> None:
        initialize_ddp()
        torch.optim.SGD([torch.zeros(1)])
        groups.append(weakref.ref(dist.group.WORLD))
        dist.barrier()
        raise ValueError

    def is_freed(groups: list[Any]) -> bool:
        initialize_ddp()
        gc.collect()
        return groups.pop()() is None

    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        groups = ex.put([])  # each worker keeps its own
        with pytest.raises(RankError):
            ex.run(fail, groups)
        assert ex.run(is_freed, groups) == [True, True]


def test_single_tasks_are_alone(own_executor2: ParallelExecutor) -> None:
    """A submitted or mapped task is rank 0 of 1, so that on_rank runs and nobody waits for anybody."""

    def alone() -> Any:
        return tuple(current_world())[:4], initialize_ddp().distributed, on_rank(0)(lambda: "ran")()

    assert own_executor2.submit(alone).result() == ((False, 0, 0, 1), False, "ran")


@pytest.mark.slow
def test_functions_and_classes_of_main_travel_by_value(tmp_path: Path) -> None:
    """A script without a guard: it runs once, its lambdas, closures and classes travel, isinstance holds both ways."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import io, sys, torch
from nn_parallel import ParallelExecutor, RankError
print("script", __name__)
class Point:
    def __init__(self, x): self.x = x
class Broken(Exception): pass
def factor(by):
    def apply(device, point):
        assert isinstance(point, Point)
        torch.save(point, io.BytesIO())
        return Point(point.x * by)
    return apply
def fail():
    raise Broken("here")
with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    points = ex.run(factor(3), Point(2))
    print([type(p) is Point and p.x for p in points])
    print(list(ex.map(lambda x: x + 1, range(3))))
    try:
        ex.submit(fail).result()
    except Broken as error:
        print("Broken", error)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.splitlines() == ["script __main__", "[6, 6]", "[1, 2, 3]", "Broken here"], done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_the_two_lines_of_the_readme(tmp_path: Path) -> None:
    """No guard, no second run of the script, no warning: neither with -W default, nor from standard input."""
    lines = (
        "from nn_parallel import ParallelExecutor\n"
        'with ParallelExecutor(num_workers=2, devices="cpu") as ex: print(ex.run(lambda device: str(device)))\n'
    )
    (tmp_path / "t.py").write_text(lines)
    for command, given in ((["-W", "default", "t.py"], None), (["-"], lines), (["-c", lines], None)):
        done = subprocess.run(
            [sys.executable, *command], input=given, capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert (done.stdout, done.stderr) == ("['cpu', 'cpu']\n", "")


def test_an_exception_is_a_rank_error_with_its_remote_traceback(own_executor2: ParallelExecutor) -> None:
    """The leaf has the type, the message and the traceback of rank 1, the others are ended, the pool stays whole."""

    def load_batch() -> None:
        if current_world().rank == 1:
            raise KeyError("labels")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"load_batch\(\) failed on rank 1 of 2: KeyError: 'labels'") as caught:
        own_executor2.run(load_batch)
    assert time.monotonic() - start < 20
    assert caught.value.rank == 1
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], KeyError)
    assert "in load_batch" in _printed(caught.value.failures[1])
    assert "rank 1 of 2 on cpu (pid " in _printed(caught.value.failures[1])
    assert len(set(_pids(own_executor2))) == 2


def test_the_cause_comes_first_also_for_a_rank_in_a_collective(own_executor2: ParallelExecutor) -> None:
    """Rank 1 raises while rank 0 sits in all_reduce: rank 1's error is the cause, and the next run makes a group."""

    def step() -> float:
        rank = initialize_ddp().rank
        if rank == 1:
            raise ValueError("bad batch")
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    for _ in range(3):
        with pytest.raises(RankError) as caught:
            own_executor2.run(step)
        assert caught.value.rank == 1
        assert str(caught.value.failures[1]) == "bad batch"

    def fine() -> float:
        initialize_ddp()
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    assert own_executor2.run(fine) == [2.0, 2.0]


def test_on_rank_failing_inside_run_names_the_rank_once(own_executor2: ParallelExecutor) -> None:
    """A RankError that every rank raises arrives as one error of the rank that failed."""

    @on_rank(0)
    def save() -> None:
        raise OSError(28, "No space left on device", "model.pt")

    with pytest.raises(RankError, match="rank 0 of 2: OSError") as caught:
        own_executor2.run(save)
    assert list(caught.value.failures) == [0]
    assert caught.value.failures[0].errno == 28  # type: ignore[attr-defined]


def test_submit_raises_the_exception_itself(own_executor2: ParallelExecutor) -> None:
    """The future of a single task raises what the function raised, with the remote traceback as its cause."""

    def divide() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        own_executor2.submit(divide).result()
    assert "in divide" in _printed(caught.value)
    assert "a single task on cpu" in _printed(caught.value)


class _KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "name"), [(lambda: _KeywordOnly(code=3), "_KeywordOnly: 3"), (_Unpicklable, "_Unpicklable: holds a lock")]
)
def test_exceptions_that_cannot_travel(own_executor2: ParallelExecutor, error: Any, name: str) -> None:
    """They arrive as RemoteError with their type's name, their message and their traceback."""

    def fail() -> None:
        raise error()

    with pytest.raises(RemoteError, match=name) as caught:
        own_executor2.submit(fail).result()
    assert "in fail" in _printed(caught.value)
    with pytest.raises(RankError, match=name):
        own_executor2.run(fail)


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_leaving_python_inside_a_task_is_an_error_not_an_exit(own_executor2: ParallelExecutor, leave: Any) -> None:
    """sys.exit in a task ends neither the worker nor the caller."""

    def fail() -> None:
        raise leave(3)

    with pytest.raises(RemoteError, match=f"{leave.__name__}: 3"):
        own_executor2.submit(fail).result()
    with pytest.raises(RankError, match=leave.__name__):
        own_executor2.run(fail)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    ],
)
def test_a_dead_worker_fails_its_own_task_and_is_replaced(own_executor2: ParallelExecutor, end: Any, how: str) -> None:
    """The error names how it ended, the pid and what it ran; other tasks go on; the pool is whole again."""
    before = _pids(own_executor2)
    other = own_executor2.submit(time.sleep, 0.1)
    with pytest.raises(WorkerDiedError, match=rf"Worker \d \(pid \d+, cpu\) {how} while running .*lambda") as caught:
        own_executor2.submit(end).result()
    assert caught.value.pid in before
    assert other.result() is None
    with pytest.raises(RankError, match=how) as together:
        own_executor2.run(lambda: end() if current_world().rank == 1 else time.sleep(60))
    assert isinstance(together.value.failures[1], WorkerDiedError)
    assert len(set(_pids(own_executor2))) == 2


def test_what_cannot_be_sent_is_named_and_nothing_starts(own_executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Arguments, closures and results that cannot be pickled: the path to the culprit, and the pool stays usable."""
    lock = threading.Lock()
    mark = tmp_path / "started"

    def closure() -> Any:
        mark.touch()
        return lock

    with pytest.raises(TransferError, match="Closure variable 'lock' of .*closure.* is a _thread.lock"):
        own_executor2.run(closure)
    with pytest.raises(TransferError, match=r"Argument 0\['a'\]\[1\] is a _thread.lock"):
        own_executor2.submit(len, {"a": [1, lock]}).result()
    with pytest.raises(TransferError, match="Argument 'key' is a _thread.lock"):
        own_executor2.run(dict, key=lock)
    assert not mark.exists()
    future = own_executor2.submit(int)
    for unsendable, text in (
        (
            lambda: own_executor2.run(int),
            r"Closure variable 'own_executor2' of .* is a .*ParallelExecutor .*: an executor belongs to the",
        ),
        (own_executor2.run, r"The function.__self__ is a .*ParallelExecutor .*: make its calls there"),
        (lambda: future.result(), r"Closure variable 'future' of .* is a .*Future .*: send its result\(\) instead"),
    ):
        with pytest.raises(TransferError, match=text):
            own_executor2.run(unsendable)

    def result() -> Any:
        return {"x": threading.Lock()}

    with pytest.raises(RankError, match=r"The result\['x'\] is a _thread.lock"):
        own_executor2.run(result)
    with pytest.raises(TransferError, match=r"The result\['x'\]"):
        own_executor2.submit(result).result()
    assert own_executor2.run(int) == [0, 0]


class _Grenade:
    """Pickles, and raises when it is unpickled, in the worker or in the parent."""

    def __init__(self, where: int) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return _go_off, (self.where,)


def _go_off(where: int) -> Any:
    if (os.getpid() == where) == bool(where):
        raise ValueError("gone off")
    return _Grenade(where)


def test_what_cannot_be_rebuilt_on_the_other_side(own_executor2: ParallelExecutor) -> None:
    """An argument that does not unpickle in the worker, a result that does not in the parent: TransferError."""
    with pytest.raises(TransferError, match="cannot be rebuilt in the worker: ValueError.*gone off"):
        own_executor2.submit(len, _Grenade(0)).result()
    parent = os.getpid()
    with pytest.raises(TransferError, match="cannot be rebuilt in the parent process: ValueError.*gone off"):
        own_executor2.submit(lambda: _Grenade(parent)).result()
    with pytest.raises(RankError, match="cannot be rebuilt in the parent"):
        own_executor2.run(lambda: _Grenade(parent))
    assert own_executor2.run(int) == [0, 0]


def test_tensors_in_any_object_come_back(own_executor2: ParallelExecutor) -> None:
    """Results hold tensors in nests, views and modules; they outlive the worker's memory and keep no file open."""

    def make(x: torch.Tensor) -> Any:
        base = torch.arange(6.0)
        return {"view": base[2:4], "base": base, "model": torch.nn.Linear(2, 2), "x": x * 2, "big": torch.ones(1 << 18)}

    results = own_executor2.run(make, torch.ones(3))
    for result in results:
        assert result["x"].tolist() == [2.0] * 3
        assert result["view"].tolist() == [2.0, 3.0]
        result["base"][2] = 9.0
        assert result["view"][0] == 9.0  # still a view of it
        assert result["model"](torch.ones(2)).shape == (2,)
        assert result["big"].sum() == 1 << 18


def test_an_argument_is_each_worker_s_own(own_executor2: ParallelExecutor) -> None:
    """A worker may write to what it was sent; neither the caller nor the others see it."""
    tensor = torch.zeros(1 << 16)

    def write(x: torch.Tensor) -> float:
        x += current_world().rank + 1
        return float(x[0])

    assert own_executor2.run(write, tensor) == [1.0, 2.0]
    assert not tensor.any()


def test_it_is_an_executor_of_the_standard_library(own_executor2: ParallelExecutor) -> None:
    """as_completed, wait, cancellation and asyncio work as with any Executor."""
    futures = [own_executor2.submit(pow, 2, n) for n in range(5)]
    assert {future.result() for future in concurrent.futures.as_completed(futures)} == {1, 2, 4, 8, 16}
    running = [own_executor2.submit(time.sleep, 0.2) for _ in range(2)]
    waiting = own_executor2.submit(abs, -1)
    assert waiting.cancel()
    assert concurrent.futures.wait(running).not_done == set()

    async def use() -> int:
        return await asyncio.get_running_loop().run_in_executor(own_executor2, abs, -3)

    assert asyncio.run(use()) == 3


def test_run_waits_for_the_tasks_before_it_and_holds_those_after(own_executor2: ParallelExecutor) -> None:
    """Jobs start in the order of their submission: run needs every worker, and gets them all at once."""
    first = own_executor2.submit(time.sleep, 0.2)
    threading.Timer(0.05, lambda: later.append(own_executor2.submit(abs, -1))).start()
    later: list[Any] = []
    assert len(own_executor2.run(current_world)) == 2
    assert first.done()
    assert later[0].result() == 1


def test_use_from_several_threads(own_executor2: ParallelExecutor) -> None:
    """run and submit from many threads at once: every caller gets its own results."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        runs = [threads.submit(own_executor2.run, lambda x: x, n) for n in range(20)]
        singles = [threads.submit(lambda n=n: own_executor2.submit(lambda x: -x, n).result()) for n in range(20)]
        assert [run.result() for run in runs] == [[n, n] for n in range(20)]
        assert [single.result() for single in singles] == [-n for n in range(20)]


def test_the_initializer_runs_in_every_worker_also_in_a_new_one() -> None:
    """Once in each worker, before its first task, and in the one that replaces a dead worker."""

    def prepare(value: str) -> None:
        os.environ["PREPARED"] = value

    with ParallelExecutor(num_workers=2, devices="cpu", initializer=prepare, initargs=("yes",)) as pool:
        assert pool.run(lambda: os.environ.get("PREPARED")) == ["yes", "yes"]
        with pytest.raises(WorkerDiedError):
            pool.submit(os._exit, 1).result()
        assert pool.run(lambda: os.environ.get("PREPARED")) == ["yes", "yes"]


def test_a_failing_initializer_is_an_error_of_every_call() -> None:
    """No endless restarts: the error of the initializer comes out, with its traceback."""

    def prepare() -> None:
        raise ValueError("no data set")

    with ParallelExecutor(num_workers=2, devices="cpu", initializer=prepare) as pool:
        with pytest.raises(ParallelError, match="The initializer failed in worker [01]: .*no data set"):
            pool.submit(int).result()
        with pytest.raises(ParallelError, match="no data set"):
            pool.run(int)


class SlowToArrive(str):
    """A text that takes two seconds to be rebuilt."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('time').sleep(2) or {str(self)!r}",)


@pytest.mark.slow
@pytest.mark.parametrize("initializer", [None, int])
def test_the_start_of_workers_has_no_limit(initializer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` is that of the calls, however slowly workers start, the first ones and those in the place of others."""
    monkeypatch.setattr(sys, "argv", [*sys.argv, SlowToArrive("last")])  # what each worker begins with
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=1, initializer=initializer) as pool:
        assert pool.run(lambda: sys.argv[-1]) == ["last"] * 2
        with pytest.raises(WorkerDiedError):
            pool.submit(os._exit, 1).result()
        assert pool.run(lambda: sys.argv[-1]) == ["last"] * 2


def test_a_start_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever for a worker that does not come."""
    monkeypatch.setattr(sys, "argv", [*sys.argv, SlowToArrive("last")])
    monkeypatch.setattr(supervisor, "START_WITHIN_S", 0.2)
    told = pytest.raises(
        RankTimeoutError, match=r"(?s)The start of workers did not end within 0.2 s.*\n\nWorker 0 \(pid"
    )
    with ParallelExecutor(num_workers=1, devices="cpu") as pool, told:
        pool.run(int)


def test_the_initializer_runs_though_nothing_else_does(tmp_path: Path) -> None:
    """Also where the pool is closed before its workers are there."""
    with ParallelExecutor(num_workers=2, devices="cpu", initializer=lambda: (tmp_path / f"{os.getpid()}").touch()):
        pass
    assert len(list(tmp_path.iterdir())) == 2


def test_an_initializer_that_takes_too_long_is_named() -> None:
    options: Any = {"timeout": 0.3, "initializer": time.sleep, "initargs": (60,)}
    told = pytest.raises(TimeoutError, match=r"^sleep\(\) did not end within timeout=0.3 s")
    with ParallelExecutor(num_workers=1, devices="cpu", **options) as pool, told:
        pool.run(int)


def test_after_shutdown() -> None:
    """Every call says that the executor is closed; closing again is harmless; what was submitted is finished."""
    pool = ParallelExecutor(num_workers=1, devices="cpu")
    last = pool.submit(abs, -1)
    pool.shutdown()
    assert last.result() == 1
    pool.shutdown()
    for call in (lambda: pool.run(int), lambda: pool.submit(int), lambda: pool.map(abs, [1])):
        with pytest.raises(ExecutorClosedError, match="shut down"):
            call()


def test_a_second_shutdown_touches_no_file_of_others() -> None:
    """Descriptors that a closed pool once had belong to others by now: closing it again writes nothing to them."""
    pool = ParallelExecutor(num_workers=1, devices="cpu")
    pool.run(int)
    pool.shutdown()
    counters = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(20)]  # these take the lowest free numbers
    pool.shutdown()
    for counter in counters:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(counter)
        os.close(counter)


def test_shutdown_can_cancel_what_waits() -> None:
    """cancel_futures=True: what runs is finished, what waits is cancelled."""
    pool = ParallelExecutor(num_workers=1, devices="cpu")
    running = pool.submit(time.sleep, 0.2)
    waiting = pool.submit(abs, -1)
    while not running.running():
        time.sleep(0.001)
    pool.shutdown(cancel_futures=True)
    assert running.result() is None
    assert waiting.cancelled()


def test_an_exception_in_the_block_ends_what_runs() -> None:
    """Nobody waits for a task of an hour when the block has failed."""
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), ParallelExecutor(num_workers=1, devices="cpu") as pool:
        future = pool.submit(time.sleep, 3600)
        while not future.running():
            time.sleep(0.001)
        raise ZeroDivisionError
    assert time.monotonic() - start < 10
    with pytest.raises(ExecutorClosedError):
        future.result()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_a_block_of_a_task_has_its_traceback(executor2: ParallelExecutor, failing: int) -> None:
    """Whichever rank answers first: the one that raised, or one that learned of it."""

    def step() -> None:
        if current_world().rank == failing:
            raise ValueError("bad batch")
        all_gather_object(0)

    def train() -> None:
        with ParallelExecutor():
            step()

    with pytest.raises(RankError) as caught:
        executor2.run(train)
    assert list(caught.value.failures) == [failing]
    cause = caught.value.failures[failing].__cause__
    assert isinstance(cause, RemoteTraceback)
    assert f"rank {failing} of 2" in str(cause)
    assert "in step" in cause.tb


def test_an_interrupted_run_leaves_a_whole_pool(own_executor2: ParallelExecutor) -> None:
    """Ctrl-C in the caller: the run is ended everywhere, and the pool can be used again."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        own_executor2.run(time.sleep, 3600)
    timer.join()
    assert own_executor2.run(int) == [0, 0]


def test_a_forgotten_executor_ends_its_workers() -> None:
    """Without with and shutdown, deleting the last reference ends the processes."""
    pool = ParallelExecutor(num_workers=1, devices="cpu")
    (pid,) = _pids(pool)
    ended = os.pidfd_open(pid)
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert alive() is None
    assert select.select([ended], [], [], 10)[0]
    os.close(ended)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_gpus": 0}, ValueError, "num_gpus=0 must be at least 1; this machine has no accelerator"),
        ({"num_gpus": -1}, ValueError, "num_gpus=-1 must be at least 1"),
        ({"num_workers": 0}, ValueError, "num_workers=0 must be at least 1"),
        ({"devices": "cuda:9"}, ValueError, "There is no cuda:9: this machine has no accelerator"),
        ({"devices": "cpu,cuda"}, ValueError, "asks for accelerators, and there is none"),
        ({"devices": "nonsense"}, ValueError, "'nonsense' names no device"),
        ({"devices": []}, ValueError, "names no device"),
        ({"devices": "all"}, ValueError, "there is none"),
        ({"num_gpus": 1, "devices": "cpu"}, TypeError, "num_gpus=1 and devices='cpu' both choose"),
        ({"num_workers": "2"}, TypeError, "num_workers='2' must be an integer, not a str"),
        ({"num_workers": 2.0}, TypeError, "num_workers=2.0 must be an integer, not a float"),
        ({"num_workers": True}, TypeError, "num_workers=True must be an integer, not a bool"),
        ({"num_gpus": "2"}, TypeError, "num_gpus='2' must be an integer, not a str"),
        ({"timeout": "60"}, TypeError, "timeout='60' must be a number of seconds, or a timedelta"),
        ({"max_workers": 2}, TypeError, "no parameter 'max_workers': perhaps num_workers"),
        ({"initializer": 123}, TypeError, "initializer=123 must be a callable"),
        ({"num_worker": 2}, TypeError, r"no parameter 'num_worker'\.$"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """What is wrong is named, with what exists, and nothing is started."""
    with pytest.raises(error, match=text):
        ParallelExecutor(**arguments)


def test_counts_may_be_integers_of_any_kind() -> None:
    """NumPy's too; what is none is named by every call that takes one."""
    with ParallelExecutor(num_workers=np.int64(1), devices="cpu") as pool:
        pool.resize(np.int32(2))
        assert pool.run(int) == [0, 0]
        assert list(pool.map(abs, [-1, -2, -3], chunksize=np.int8(2))) == [1, 2, 3]
        with pytest.raises(TypeError, match=r"num_workers=1.5 must be an integer, not a float"):
            pool.resize(1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="chunksize='2' must be an integer, not a str"):
            pool.map(abs, [-1], chunksize="2")  # type: ignore[arg-type]


def test_too_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """More accelerators than there are: what exists is named. The two here are a fake, this machine has none."""
    monkeypatch.setattr(
        nn_parallel._engine.devices, "accelerators", lambda: [torch.device("cuda", index) for index in range(2)]
    )
    with pytest.raises(ValueError, match="num_gpus=4 asks for more than there are: the accelerators are cuda:0 to"):
        ParallelExecutor(num_gpus=4)


def test_cpu_workers_where_there_is_no_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    """No accelerator is no error: num_gpus=2 gives two CPU workers and one line at INFO."""
    with caplog.at_level("INFO", "nn_parallel"), ParallelExecutor(num_gpus=2) as pool:
        assert pool.run(lambda device: str(device)) == ["cpu", "cpu"]
    assert [record.message for record in caplog.records] == [
        f"No accelerator: 2 CPU workers, {max(1, nn_parallel._engine.devices.cpu_count() // 2)} threads each."
    ]


@pytest.mark.slow
def test_run_inside_the_body_of_one_rank_is_an_error() -> None:
    """A call of all ranks where the others are not: said at once, and no rank is released early."""

    def scenario() -> Any:
        pool = ParallelExecutor()

        @on_rank(0)
        def alone() -> None:
            pool.run(int)

        with pytest.raises(RankError, match="is a call of all ranks, inside the body of a function of rank 0"):
            alone()
        return pool.run(int)

    with launched(2) as ranks:
        assert ranks.run(scenario) == [[0, 0]] * 2


def test_a_removed_directory_harms_no_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the script is gone when a worker must be replaced: the pool goes on."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.run(int)
        folder.rmdir()
        with pytest.raises(WorkerDiedError):
            pool.submit(os._exit, 1).result()
        assert pool.run(int) == [0]


def test_a_fault_of_the_supervisor_is_told(own_executor2: ParallelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pool's own thread cannot go on, whoever waits gets an error, and so does every later call."""
    own_executor2.run(int)
    monkeypatch.setattr(site, "WorkerProcess", lambda *_: 1 / 0)
    with pytest.raises(WorkerDiedError):
        own_executor2.submit(os._exit, 1).result(20)
    for _ in range(2):
        with pytest.raises(ParallelError, match="The pool cannot go on: ZeroDivisionError"):
            own_executor2.submit(int).result(20)


def test_a_worker_that_is_being_killed_gets_no_new_task(own_executor2: ParallelExecutor) -> None:
    """Failing runs and calls right behind them: never a result that nobody computed."""
    for _ in range(20):
        with pytest.raises(RankError):
            own_executor2.run(lambda: time.sleep(0.2) if current_world().rank == 0 else 1 / 0)
        assert own_executor2.run(lambda: 1) == [1, 1]


def test_what_is_shown_of_an_executor() -> None:
    """Its workers and their devices; that it is shut down."""
    with ParallelExecutor(num_workers=3, devices="cpu") as ex:
        assert repr(ex) == "<ParallelExecutor: workers: 3 on cpu>"
        ex.resize(2)
        assert repr(ex) == "<ParallelExecutor: workers: 2 on cpu>"
    assert repr(ex) == "<ParallelExecutor: shut down>"


@pytest.mark.slow
def test_a_module_that_makes_a_pool_as_it_is_imported(tmp_path: Path) -> None:
    """Workers import the module as well: the first one says so, and starts none of its own."""
    (tmp_path / "experiment.py").write_text(
        """
import os, sys
from nn_parallel import ParallelExecutor
with open("imports", "a") as file: file.write("imported\\n")
def square(x): return x * x
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    try:
        ex.submit(square, 2).result()
    except Exception as error:
        print(error)
    print(ex.submit(pow, 2, 3).result())
"""
    )
    told, power = run_script("import experiment\n", tmp_path)
    assert "Module experiment makes a ParallelExecutor as it is imported" in told
    assert "Make the executor in a function." in told
    assert power == "8"
    assert (tmp_path / "imports").read_text().split() == ["imported"] * 2
