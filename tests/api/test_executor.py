"""`ParallelExecutor` as a pool, and under a launcher."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
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
    current_world,
    initialize_ddp,
    on_rank,
    seed_everything,
)
from nn_parallel._engine.pool import forkserver_client
from nn_parallel._engine.pool import worker_process as process
from nn_parallel._engine.pool.pool import Pool
from tests.support.ranks import launched, trim


@pytest.fixture
def executor2() -> Iterator[ParallelExecutor]:
    """A pool of two."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        yield pool


def _printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _pids(executor2: ParallelExecutor) -> list[int]:
    return executor2.run(os.getpid)


def test_run_calls_every_worker_once_and_binds_the_device(executor2: ParallelExecutor) -> None:
    """One result per worker, in rank order, from two processes; ``device`` is bound by name."""

    def describe(device: torch.device, x: int) -> Any:
        world = current_world()
        return str(device), x, tuple(world)[:4], os.getpid()

    results = executor2.run(describe, 5)
    assert [r[:3] for r in results] == [("cpu", 5, (False, rank, rank, 2)) for rank in range(2)]
    assert len({r[3] for r in results} | {os.getpid()}) == 3


def test_pass_device_false() -> None:
    """pass_device=False leaves the parameter to the caller."""
    with ParallelExecutor(num_workers=1, devices="cpu", pass_device=False) as pool:
        assert pool.run(lambda device: device, "mine") == ["mine"]


def test_ranks_of_a_run_can_make_a_group_and_keep_it(executor2: ParallelExecutor) -> None:
    """initialize_ddp() inside run connects the ranks as in a launched script, and the next run finds the group."""

    def total(device: torch.device) -> Any:
        connected = dist.is_initialized()
        world = initialize_ddp()
        value = torch.tensor([float(world.rank + 1)], device=device)
        dist.all_reduce(value)
        return connected, world.distributed, value.item()

    executor2.run(total)
    assert executor2.run(total) == [(True, True, 3.0)] * 2


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


def test_single_tasks_are_alone(executor2: ParallelExecutor) -> None:
    """A submitted or mapped task is rank 0 of 1, so that on_rank runs and nobody waits for anybody."""

    def alone() -> Any:
        return tuple(current_world())[:4], initialize_ddp().distributed, on_rank(0)(lambda: "ran")()

    assert executor2.submit(alone).result() == ((False, 0, 0, 1), False, "ran")


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


def test_an_exception_is_a_rank_error_with_its_remote_traceback(executor2: ParallelExecutor) -> None:
    """The leaf has the type, the message and the traceback of rank 1, the others are ended, the pool stays whole."""

    def load_batch() -> None:
        if current_world().rank == 1:
            raise KeyError("labels")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"load_batch\(\) failed on rank 1 of 2: KeyError: 'labels'") as caught:
        executor2.run(load_batch)
    assert time.monotonic() - start < 20
    assert caught.value.rank == 1
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], KeyError)
    assert "in load_batch" in _printed(caught.value.failures[1])
    assert "rank 1 of 2 on cpu (pid " in _printed(caught.value.failures[1])
    assert len(set(_pids(executor2))) == 2


def test_the_cause_comes_first_also_for_a_rank_in_a_collective(executor2: ParallelExecutor) -> None:
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
            executor2.run(step)
        assert caught.value.rank == 1
        assert str(caught.value.failures[1]) == "bad batch"

    def fine() -> float:
        initialize_ddp()
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    assert executor2.run(fine) == [2.0, 2.0]


def test_on_rank_failing_inside_run_names_the_rank_once(executor2: ParallelExecutor) -> None:
    """A RankError that every rank raises arrives as one error of the rank that failed."""

    @on_rank(0)
    def save() -> None:
        raise OSError(28, "No space left on device", "model.pt")

    with pytest.raises(RankError, match="rank 0 of 2: OSError") as caught:
        executor2.run(save)
    assert list(caught.value.failures) == [0]
    assert caught.value.failures[0].errno == 28  # type: ignore[attr-defined]


def test_submit_raises_the_exception_itself(executor2: ParallelExecutor) -> None:
    """The future of a single task raises what the function raised, with the remote traceback as its cause."""

    def divide() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        executor2.submit(divide).result()
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
def test_exceptions_that_cannot_travel(executor2: ParallelExecutor, error: Any, name: str) -> None:
    """They arrive as RemoteError with their type's name, their message and their traceback."""

    def fail() -> None:
        raise error()

    with pytest.raises(RemoteError, match=name) as caught:
        executor2.submit(fail).result()
    assert "in fail" in _printed(caught.value)
    with pytest.raises(RankError, match=name):
        executor2.run(fail)


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_leaving_python_inside_a_task_is_an_error_not_an_exit(executor2: ParallelExecutor, leave: Any) -> None:
    """sys.exit in a task ends neither the worker nor the caller."""

    def fail() -> None:
        raise leave(3)

    with pytest.raises(RemoteError, match=f"{leave.__name__}: 3"):
        executor2.submit(fail).result()
    with pytest.raises(RankError, match=leave.__name__):
        executor2.run(fail)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    ],
)
def test_a_dead_worker_fails_its_own_task_and_is_replaced(executor2: ParallelExecutor, end: Any, how: str) -> None:
    """The error names how it ended, the pid and what it ran; other tasks go on; the pool is whole again."""
    before = _pids(executor2)
    other = executor2.submit(time.sleep, 0.1)
    with pytest.raises(WorkerDiedError, match=rf"Worker \d \(pid \d+, cpu\) {how} while running .*lambda") as caught:
        executor2.submit(end).result()
    assert caught.value.pid in before
    assert other.result() is None
    with pytest.raises(RankError, match=how) as together:
        executor2.run(lambda: end() if current_world().rank == 1 else time.sleep(60))
    assert isinstance(together.value.failures[1], WorkerDiedError)
    assert len(set(_pids(executor2))) == 2


def test_what_cannot_be_sent_is_named_and_nothing_starts(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Arguments, closures and results that cannot be pickled: the path to the culprit, and the pool stays usable."""
    lock = threading.Lock()
    mark = tmp_path / "started"

    def closure() -> Any:
        mark.touch()
        return lock

    with pytest.raises(TransferError, match="Closure variable 'lock' of .*closure.* is a _thread.lock"):
        executor2.run(closure)
    with pytest.raises(TransferError, match=r"Argument 0\['a'\]\[1\] is a _thread.lock"):
        executor2.submit(len, {"a": [1, lock]}).result()
    with pytest.raises(TransferError, match="Argument 'key' is a _thread.lock"):
        executor2.run(dict, key=lock)
    assert not mark.exists()
    future = executor2.submit(int)
    for unsendable, text in (
        (
            lambda: executor2.run(int),
            r"Closure variable 'executor2' of .* is a .*ParallelExecutor .*: an executor belongs to the",
        ),
        (executor2.run, r"The function.__self__ is a .*ParallelExecutor .*: make its calls there"),
        (lambda: future.result(), r"Closure variable 'future' of .* is a .*Future .*: send its result\(\) instead"),
    ):
        with pytest.raises(TransferError, match=text):
            executor2.run(unsendable)

    def result() -> Any:
        return {"x": threading.Lock()}

    with pytest.raises(RankError, match=r"The result\['x'\] is a _thread.lock"):
        executor2.run(result)
    with pytest.raises(TransferError, match=r"The result\['x'\]"):
        executor2.submit(result).result()
    assert executor2.run(int) == [0, 0]


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


def test_what_cannot_be_rebuilt_on_the_other_side(executor2: ParallelExecutor) -> None:
    """An argument that does not unpickle in the worker, a result that does not in the parent: TransferError."""
    with pytest.raises(TransferError, match="cannot be rebuilt in the worker: ValueError.*gone off"):
        executor2.submit(len, _Grenade(0)).result()
    parent = os.getpid()
    with pytest.raises(TransferError, match="cannot be rebuilt in the parent process: ValueError.*gone off"):
        executor2.submit(lambda: _Grenade(parent)).result()
    with pytest.raises(RankError, match="cannot be rebuilt in the parent"):
        executor2.run(lambda: _Grenade(parent))
    assert executor2.run(int) == [0, 0]


def test_tensors_in_any_object_come_back(executor2: ParallelExecutor) -> None:
    """Results hold tensors in nests, views and modules; they outlive the worker's memory and keep no file open."""

    def make(x: torch.Tensor) -> Any:
        base = torch.arange(6.0)
        return {"view": base[2:4], "base": base, "model": torch.nn.Linear(2, 2), "x": x * 2, "big": torch.ones(1 << 18)}

    results = executor2.run(make, torch.ones(3))
    for result in results:
        assert result["x"].tolist() == [2.0] * 3
        assert result["view"].tolist() == [2.0, 3.0]
        result["base"][2] = 9.0
        assert result["view"][0] == 9.0  # still a view of it
        assert result["model"](torch.ones(2)).shape == (2,)
        assert result["big"].sum() == 1 << 18


def test_an_argument_is_each_worker_s_own(executor2: ParallelExecutor) -> None:
    """A worker may write to what it was sent; neither the caller nor the others see it."""
    tensor = torch.zeros(1 << 16)

    def write(x: torch.Tensor) -> float:
        x += current_world().rank + 1
        return float(x[0])

    assert executor2.run(write, tensor) == [1.0, 2.0]
    assert not tensor.any()


def test_a_map_that_nobody_reads_any_more_does_not_go_on(executor2: ParallelExecutor) -> None:
    """Closing the iterator drops the items that have not begun; what runs ends, and the pool is free."""
    results = executor2.map(lambda x: (time.sleep(0.02), x)[1], range(1000))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    start = time.monotonic()
    assert executor2.run(int) == [0, 0]
    assert time.monotonic() - start < 5


def test_a_map_goes_on_while_its_iterable_waits(executor2: ParallelExecutor) -> None:
    """Its items are done, however long the thread that submits them is in the user's iterator."""
    done = torch.zeros(50).share_memory_()

    def items() -> Iterator[int]:
        deadline = time.monotonic() + 20
        yield from range(50)
        while done.sum() < 50:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def mark(index: int) -> None:
        done[index] = 1

    assert list(executor2.map(mark, items())) == [None] * 50


def test_an_item_that_cannot_be_sent_fails_at_its_place(executor2: ParallelExecutor) -> None:
    """The results before it arrive."""
    results = executor2.map(str, [1, threading.Lock(), 3])
    assert next(results) == "1"
    with pytest.raises(TransferError, match="Argument 0 is a _thread.lock"):
        next(results)


def test_the_items_of_a_map_are_let_go_as_they_end(executor2: ParallelExecutor) -> None:
    """Results that nobody has taken yet do not hold the memory of what was sent for them."""
    results = executor2.map(torch.Tensor.numel, (torch.zeros(1 << 16) for _ in range(50)))
    assert executor2.run(int) == [0, 0]  # all are over
    trim(executor2)
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not [file for file in files if "memfd:nn_parallel" in file]
    assert list(results) == [1 << 16] * 50


def test_map_keeps_the_order(executor2: ParallelExecutor) -> None:
    """Results in the order of the items, whatever the chunks; an exception comes out at its place."""
    expected = [(x, y, "cpu") for x, y in zip(range(20), range(20, 40), strict=True)]
    for chunksize in (1, 3, 50):
        found = executor2.map(lambda x, device, y: (x, y, str(device)), range(20), range(20, 40), chunksize=chunksize)
        assert list(found) == expected
        first = executor2.map(lambda device, x: (str(device), x), range(5), chunksize=chunksize)
        assert list(first) == [("cpu", x) for x in range(5)]
        results = executor2.map(lambda x: 2 // x, [1, 2, 0, 1], chunksize=chunksize)
        assert [next(results), next(results)] == [2, 1]
        with pytest.raises(ZeroDivisionError) as caught:
            next(results)
        assert "a single task on cpu" in str(caught.value.__cause__)
    with pytest.raises(WorkerDiedError, match=r"while running _exit\(\)\."):
        list(executor2.map(functools.partial(os._exit), [1, 1], chunksize=2))
    with pytest.raises(ValueError, match="chunksize=0"):
        executor2.map(abs, [1], chunksize=0)
    with pytest.raises(TimeoutError):
        list(executor2.map(time.sleep, [1.0], timeout=0.05))


def test_a_chunk_goes_on_after_nothing_but_a_result(executor2: ParallelExecutor) -> None:
    """A call that has failed ends its chunk, whatever it has raised, and so does the child of one that forks."""
    for raised in (ZeroDivisionError("no"), SystemExit(3)):

        def fail_second(item: int, raised: BaseException = raised) -> int:
            if item == 1:
                raise raised
            return 10 * item

        results = executor2.map(fail_second, range(4), chunksize=4)
        assert next(results) == 0
        with pytest.raises((ZeroDivisionError, RemoteError), match="no|SystemExit: 3"):
            next(results)
        assert list(results) == []
    read, write = os.pipe()

    def fork_first(item: int) -> int:
        here = os.fork() if item == 0 else 1
        with open(path, "a") as file:
            file.write(f"{item if here else 'child'}\n")
        return os.waitpid(here, 0)[1] if item == 0 and here else item

    path = f"/proc/{os.getpid()}/fd/{write}"
    try:
        assert list(executor2.map(fork_first, range(3), chunksize=3)) == [0, 1, 2]
        assert sorted(os.read(read, 100).decode().split()) == ["0", "1", "2", "child"]
    finally:
        os.close(read)
        os.close(write)


def test_it_is_an_executor_of_the_standard_library(executor2: ParallelExecutor) -> None:
    """as_completed, wait, cancellation and asyncio work as with any Executor."""
    futures = [executor2.submit(pow, 2, n) for n in range(5)]
    assert {future.result() for future in concurrent.futures.as_completed(futures)} == {1, 2, 4, 8, 16}
    running = [executor2.submit(time.sleep, 0.2) for _ in range(2)]
    waiting = executor2.submit(abs, -1)
    assert waiting.cancel()
    assert concurrent.futures.wait(running).not_done == set()

    async def use() -> int:
        return await asyncio.get_running_loop().run_in_executor(executor2, abs, -3)

    assert asyncio.run(use()) == 3


def test_run_waits_for_the_tasks_before_it_and_holds_those_after(executor2: ParallelExecutor) -> None:
    """Jobs start in the order of their submission: run needs every worker, and gets them all at once."""
    first = executor2.submit(time.sleep, 0.2)
    threading.Timer(0.05, lambda: later.append(executor2.submit(abs, -1))).start()
    later: list[Any] = []
    assert len(executor2.run(current_world)) == 2
    assert first.done()
    assert later[0].result() == 1


def test_use_from_several_threads(executor2: ParallelExecutor) -> None:
    """run and submit from many threads at once: every caller gets its own results."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        runs = [threads.submit(executor2.run, lambda x: x, n) for n in range(20)]
        singles = [threads.submit(lambda n=n: executor2.submit(lambda x: -x, n).result()) for n in range(20)]
        assert [run.result() for run in runs] == [[n, n] for n in range(20)]
        assert [single.result() for single in singles] == [-n for n in range(20)]


def test_what_workers_print_appears_here(executor2: ParallelExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines, in sys.stdout and sys.stderr as they are now, before the call returns."""

    def talk() -> None:
        rank = current_world().rank
        print("out", rank)
        print("err", rank, file=sys.stderr)
        print("no newline", end="")

    executor2.run(talk)
    captured = capsys.readouterr()
    assert captured.out.count("no newline") == 2
    assert {"out 0", "out 1"} <= set(captured.out.replace("no newline", "").splitlines())
    assert set(captured.err.splitlines()) == {"err 0", "err 1"}


def test_the_environment_and_the_directory_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new pool has the environment, directory, import path and arguments of the moment, not the fork server's."""
    (tmp_path / "local_module.py").write_text("VALUE = 7\ndef value(): return VALUE\n")
    monkeypatch.setenv("SOME_VARIABLE", "here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import local_module  # type: ignore[import-not-found]

    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.run(local_module.value) == [7]
        assert pool.run(lambda: os.environ.get("SOME_VARIABLE")) == ["here"]
        assert pool.run(os.getcwd) == [str(tmp_path)]
        assert pool.run(lambda: sys.argv) == [sys.argv]


def test_threads_are_shared_out() -> None:
    """Each CPU worker computes with its share of the cores, and matrix products work in a forked worker."""
    cores = nn_parallel._engine.devices.cpu_count()
    with ParallelExecutor(num_workers=2 * cores, devices="cpu") as pool:
        assert set(pool.run(torch.get_num_threads)) == {1}
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.run(torch.get_num_threads) == [cores]
        assert pool.run(lambda: float((torch.ones(500, 500) @ torch.ones(500, 500)).sum())) == [500.0**3]


def _draw() -> tuple[float, ...]:
    """A number of each generator; numpy's is made here, and so is not in what the workers were forked from."""
    import random

    import numpy

    return random.random(), float(numpy.random.random()), torch.rand(1).item()


def test_random_numbers_differ_between_workers() -> None:
    """As ranks, in tasks, in a worker that replaces another one, and in pools one after another."""
    draws = list[tuple[float, ...]]()
    for _ in range(2):
        with ParallelExecutor(num_workers=3, devices="cpu") as pool:
            draws += [*pool.run(_draw), *pool.map(lambda _: _draw(), range(3)), pool.submit(_draw).result()]
            with pytest.raises(RankError):
                pool.run(lambda: current_world().rank or os._exit(1))
            draws += pool.run(_draw)
    for numbers in zip(*draws, strict=True):
        assert len(set(numbers)) == 2 * (3 + 3 + 1 + 3)


def test_seeded_random_numbers_are_the_same_again(executor2: ParallelExecutor) -> None:
    """`seed_everything` decides them, another seed on every rank."""

    def draw() -> Any:
        return seed_everything(3), _draw()

    first, second = executor2.run(draw)
    assert (first[0], second[0]) == (3, 4)
    assert all(one != other for one, other in zip(first[1], second[1], strict=True))
    assert executor2.run(draw) == [first, second]


def test_the_key_of_multiprocessing_is_the_script_s(executor2: ParallelExecutor) -> None:
    """A worker can use the proxies of a manager, and whatever else asks for the key."""

    def connect(address: Any) -> None:
        with Client(address, authkey=multiprocessing.current_process().authkey) as there:
            there.send("hello")

    with Listener(("127.0.0.1", 0), authkey=multiprocessing.current_process().authkey) as listener:
        future = executor2.submit(connect, listener.address)
        with listener.accept() as here:
            assert here.recv() == "hello"
        assert future.result() is None


def _fork(body: Any) -> int:
    """The exit status of a child that has come out of the task with ``body()``."""
    if (pid := os.fork()) == 0:
        return body()  # type: ignore[no-any-return]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (int, 0, ""),
        (threading.Lock, 0, ""),  # a result that could not be sent
        (lambda: sys.exit(), 0, ""),
        (lambda: sys.exit(3), 3, ""),
        (lambda: sys.exit("too late"), 1, "too late\n"),
        (lambda: 1 / 0, 1, "ZeroDivisionError: division by zero\n"),
        (lambda: os._exit(5), 5, ""),
        (lambda: print("printed", end="", file=sys.stderr), 0, "printed"),
    ],
)
def test_a_child_that_a_task_forks_ends_by_itself(
    executor2: ParallelExecutor, capfd: pytest.CaptureFixture[str], body: Any, status: int, told: str
) -> None:
    """As a script would when it comes out of the task. It is not the worker, and answers nobody."""
    pids = _pids(executor2)
    assert executor2.run(_fork, body) == [status] * 2
    assert executor2.submit(_fork, body).result() == status
    assert list(executor2.map(_fork, [body] * 4)) == [status] * 4
    assert _pids(executor2) == pids
    err = capfd.readouterr().err
    assert err.count(told) == 7 if told else not err


def test_a_forked_child_that_fails_harms_no_group(executor2: ParallelExecutor) -> None:
    """The connections of its rank, which it has too, are not closed."""

    def body() -> float:
        initialize_ddp()
        assert _fork(lambda: sys.exit(7)) == 7
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert executor2.run(body) == [2.0, 2.0]
    assert executor2.run(body) == [2.0, 2.0]


@pytest.mark.slow
def test_a_child_that_a_launched_rank_forks_ends_by_itself() -> None:
    """In `run` it takes no part in what the ranks do together, and does not go on with the script."""

    def scenario() -> Any:
        with ParallelExecutor() as pool:
            return pool.run(_fork, int), pool.run(_fork, lambda: 1 / 0), pool.run(int)

    with launched(2, "torchrun") as ranks:
        assert ranks.run(scenario) == [([0, 0], [1, 1], [0, 0])] * 2


def test_an_initializer_may_fork() -> None:
    """Its child does not tell that the worker is set up."""
    with ParallelExecutor(num_workers=2, devices="cpu", initializer=_fork, initargs=(int,)) as pool:
        assert pool.run(lambda: os.getpid() == os.getpgid(0)) == [True, True]  # as a worker is, and no child of it


def test_tasks_may_use_processes_of_multiprocessing(executor2: ParallelExecutor) -> None:
    """Those that it forks end as it has them end."""

    def body() -> Any:
        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool:
            mapped = pool.map(abs, [-1, -2])
        process = fork.Process(target=sys.exit, args=(3,))
        process.start()
        process.join()
        with concurrent.futures.ProcessPoolExecutor(1, fork) as executor:
            return mapped, process.exitcode, executor.submit(abs, -4).result()

    assert executor2.run(body) == [([1, 2], 3, 4)] * 2
    assert executor2.run(int) == [0, 0]


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
        with pytest.raises(ParallelError, match="The initializer failed in Worker .*no data set"):
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
    monkeypatch.setattr(process, "START_WITHIN_S", 0.2)
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


def test_an_interrupted_run_leaves_a_whole_pool(executor2: ParallelExecutor) -> None:
    """Ctrl-C in the caller: the run is ended everywhere, and the pool can be used again."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        executor2.run(time.sleep, 3600)
    timer.join()
    assert executor2.run(int) == [0, 0]


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


def test_the_workers_of_a_killed_parent_end(tmp_path: Path) -> None:
    """SIGKILL of the script: no worker, no child of a worker and no fork server is left."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, subprocess, sys, time
from nn_parallel import ParallelExecutor
from nn_parallel._engine.pool import forkserver_client
def busy():
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    ex.run(int)
    print(forkserver_client.fork_server_pid(), flush=True)
    ex.run(busy)
"""
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for _ in range(3) for pid in parent.stdout.readline().split()]
        assert len(pids) == 5
        handles = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    deadline = time.monotonic() + 5
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        os.close(handle)
        assert ended


def test_a_killed_fork_server_is_a_clear_error_and_the_next_pool_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool that it held is broken and says so; a new executor works."""
    monkeypatch.setattr(forkserver_client, "_fork_server", None)  # not the one that the other tests share
    try:
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            pool.run(int)
            future = pool.submit(time.sleep, 3600)
            os.kill(forkserver_client.fork_server_pid() or 0, signal.SIGKILL)
            with pytest.raises(ParallelError, match="fork server has ended"):
                future.result()
            with pytest.raises(ParallelError, match="fork server has ended"):
                pool.run(int)
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            assert pool.run(int) == [0]
    finally:
        forkserver_client.stop_fork_server()


def test_a_fork_of_the_parent_may_not_use_its_pool(executor2: ParallelExecutor) -> None:
    """In a child that user code forked, the executor says whose it is, and its end harms nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            executor2.run(int)
        except ExecutorClosedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert f"belongs to process {os.getpid()}" in file.read()
    assert executor2.run(int) == [0, 0]


def test_a_fork_leaves_alone_what_its_parent_sends() -> None:
    """The files for tensors that a pool fills again and again are the fork's, too."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.put(torch.ones(100_000))  # its file is free again at once
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(reader, 1)
            for call in (pool.put, functools.partial(pool.run, len), functools.partial(pool.submit, len)):
                with contextlib.suppress(ExecutorClosedError):
                    call(bytes(400_000))
            os._exit(0)
        handle = pool.put(torch.ones(100_000))
        os.write(writer, b" ")
        assert os.waitpid(pid, 0)[1] == 0
        assert pool.run(torch.sum, handle) == [100_000.0]
        os.close(reader)
        os.close(writer)


def test_pools_listen_on_the_loopback_only(executor2: ParallelExecutor) -> None:
    """The store that the parent holds is not reachable from outside."""
    from tests.api.test_ddp import _listening_addresses

    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    executor2.run(initialize_ddp)
    for addresses in [_listening_addresses(), *executor2.run(_listening_addresses)]:
        assert addresses
        assert loopback.issuperset(addresses)


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
@pytest.mark.parametrize("launcher", ["torchrun", "env"])
def test_under_a_launcher_the_ranks_are_the_workers(launcher: str) -> None:
    """run and map are collective calls, the same results on every rank; another choice of workers is an error."""

    def scenario() -> Any:
        with ParallelExecutor() as pool:
            world = initialize_ddp()

            def work(device: torch.device, x: int) -> Any:
                @on_rank(0, broadcast=True)
                def number() -> int:
                    return 7

                total = torch.ones(1, device=device)
                dist.all_reduce(total)
                return world.rank, x, number(), total.item(), lambda: x

            results = [(*r[:4], r[4]()) for r in pool.run(work, 5)]
            mapped = list(pool.map(lambda x, device, /: (x, str(device)), range(5)))
            with pytest.raises(ParallelError, match="every rank makes every call"):
                pool.submit(int)
        with pytest.raises(ExecutorClosedError):
            pool.run(int)
        for arguments in ({"num_gpus": 2}, {"num_workers": 2, "devices": "cpu"}):
            assert ParallelExecutor(**arguments).run(lambda: world.rank) == [0, 1]  # type: ignore[arg-type]
        for arguments in ({"num_gpus": 3}, {"num_workers": 1}):
            (name,) = arguments
            with pytest.raises(ValueError, match=f"{name}=. does not apply here: the workers are the 2 ranks"):
                ParallelExecutor(**arguments)  # type: ignore[arg-type]
        return results, mapped

    with launched(2, launcher) as ranks:
        for results, mapped in ranks.run(scenario):
            assert results == [(0, 5, 7, 2.0, 5), (1, 5, 7, 2.0, 5)]
            assert mapped == [(x, "cpu") for x in range(5)]


@pytest.mark.slow
def test_a_launched_run_fails_on_all_ranks_with_the_cause() -> None:
    """Rank 1 raises while rank 0 is in all_reduce, in on_rank or done: RankError everywhere, and the ranks go on."""

    def scenario(kind: str) -> Any:
        pool = ParallelExecutor()

        def work() -> None:
            rank = initialize_ddp().rank
            if rank == 1:
                raise ValueError("bad batch")
            if kind == "collective":
                dist.all_reduce(torch.ones(1))
            elif kind == "waiting":
                on_rank(1)(int)()

        with pytest.raises(RankError) as caught:
            pool.run(work)
        closed = not dist.is_initialized()
        return caught.value.rank, str(caught.value.failures[1]), closed, pool.run(lambda: initialize_ddp().rank)

    with launched(2, "torchrun") as ranks:
        for kind in ("collective", "waiting", "done", "collective"):
            assert ranks.run(scenario, kind) == [(1, "bad batch", True, [0, 1])] * 2


@pytest.mark.slow
def test_a_launched_world_of_one_rank_is_the_worker() -> None:
    """torchrun with one rank: no process is started, and errors are RankErrors as with more."""

    def scenario() -> Any:
        pool = ParallelExecutor()
        with pytest.raises(RankError, match="rank 0 of 1"):
            pool.run(int, "x")
        return pool.run(os.getpid) == [os.getpid()], list(pool.map(abs, [-1, -2]))

    with launched(1, "torchrun") as ranks:
        assert ranks.run(scenario) == [(True, [1, 2])]


def test_no_port_is_taken_before_it_is_needed() -> None:
    """A pool that never runs ranks together opens no port."""
    from tests.api.test_ddp import _listening_addresses

    before = _listening_addresses()
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.submit(abs, -1).result() == 1
        assert _listening_addresses() == before


def test_a_launched_rank_that_waits_to_make_the_group_is_freed() -> None:
    """Rank 1 raises before initialize_ddp(), rank 0 waits there for it: told at once, the cause first, every time."""

    def scenario() -> Any:
        pool = ParallelExecutor()

        def work(fail: bool) -> float:
            if fail and current_world().rank == 1:
                raise ValueError("before the group")
            initialize_ddp()
            total = torch.ones(1)
            dist.all_reduce(total)
            return total.item()

        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(RankError) as caught:
                pool.run(work, True)
            assert (caught.value.rank, str(caught.value.failures[1])) == (1, "before the group")
            assert time.monotonic() - start < 5
        return pool.run(work, False)

    with launched(2) as ranks:
        assert ranks.run(scenario) == [[2.0, 2.0]] * 2


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


def test_a_fork_that_lives_on_does_not_keep_the_program(tmp_path: Path) -> None:
    """A child that user code forked holds copies of our sockets: the program ends all the same, and its workers too."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, sys
from nn_parallel import ParallelExecutor
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    (worker,) = ex.run(os.getpid)
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
print(worker)
"""
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        assert program.wait(20) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


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


def test_a_fault_of_the_supervisor_is_told(executor2: ParallelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pool's own thread cannot go on, whoever waits gets an error, and so does every later call."""
    executor2.run(int)
    monkeypatch.setattr(Pool, "_start", lambda pool, index: 1 / 0)
    with pytest.raises(WorkerDiedError):
        executor2.submit(os._exit, 1).result(20)
    for _ in range(2):
        with pytest.raises(ParallelError, match="The pool cannot go on: ZeroDivisionError"):
            executor2.submit(int).result(20)


def test_an_endless_writer_does_not_hold_up_the_others(
    executor2: ParallelExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child of one worker floods its output: the other worker's answers still come."""
    started = executor2.submit(lambda: subprocess.Popen(["yes", "x" * 1000]).pid).result()
    assert [executor2.submit(len, [1]).result(10) for _ in range(20)] == [1] * 20
    executor2.submit(os.kill, started, signal.SIGKILL).result(10)
    capsys.readouterr()


def test_a_worker_that_is_being_killed_gets_no_new_task(executor2: ParallelExecutor) -> None:
    """Failing runs and calls right behind them: never a result that nobody computed."""
    for _ in range(20):
        with pytest.raises(RankError):
            executor2.run(lambda: time.sleep(0.2) if current_world().rank == 0 else 1 / 0)
        assert executor2.run(lambda: 1) == [1, 1]


def test_what_is_shown_of_an_executor() -> None:
    """Its workers and their devices; that it is shut down."""
    with ParallelExecutor(num_workers=3, devices="cpu") as ex:
        assert repr(ex) == "<ParallelExecutor: workers: 3 on cpu>"
        ex.resize(2)
        assert repr(ex) == "<ParallelExecutor: workers: 2 on cpu>"
    assert repr(ex) == "<ParallelExecutor: shut down>"
