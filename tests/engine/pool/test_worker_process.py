"""One worker, as the parent sees it: its time limit, its cancellation, its end."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nn_parallel import (
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    WorkerDiedError,
    current_world,
)
from nn_parallel._engine.by_value.globals import stored, stored_object
from tests.support.scripts import run_script


@pytest.mark.slow
def test_a_timeout_holds_the_stack_of_the_silent_worker_only() -> None:
    """Rank 1 hangs, rank 0 has answered: the error names rank 1 and where it stands, and nobody is killed."""
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=2) as pool:
        pids = pool.run(lambda: os.getpid())  # the workers import this module

        def hang() -> None:
            if current_world().rank == 1:
                time.sleep(3600)

        with pytest.raises(RankTimeoutError) as caught:
            pool.run(hang)
        assert caught.value.ranks == [1]
        assert re.findall(r"line \d+ in (\w+)", caught.value.stacks[1]) == ["hang"]
        assert f"Worker 1 (pid {pids[1]}, cpu):" in str(caught.value)
        assert pool.run(os.getpid) == pids
        with pytest.raises(TimeoutError, match=r"hang\(\) did not end within timeout=2 s"):
            pool.run(hang)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.run(time.sleep, 60),
        lambda pool: list(pool.map(time.sleep, [60])),
    ],
    ids=["run", "map"],
)
def test_who_answers_a_cancellation_at_once_has_run_out_of_time(call: Callable[[ParallelExecutor], object]) -> None:
    """By the time that the task is cancelled it is settled what the call ends with."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=1) as pool:
        for _ in range(3):
            with pytest.raises(RankTimeoutError, match="did not end within timeout=1 s"):
                call(pool)
        assert pool.run(int) == [0]


def test_the_item_that_takes_too_long_is_the_one_that_fails() -> None:
    """Not those beside it in its batch."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=2) as pool:
        results = pool.map(lambda item: time.sleep(60 if item == 100 else 0), range(200))
        for index in range(200):
            if index == 100:
                with pytest.raises(RankTimeoutError):
                    next(results)
                results = iter(pool.map(int, range(99)))
                break
            next(results)
        assert list(results) == list(range(99))


@pytest.mark.slow
def test_code_that_holds_the_gil_cannot_tell_its_stack() -> None:
    """The error says so, and the worker is killed."""
    imports = {"initializer": importlib.import_module, "initargs": (__name__,)}  # before the timeout can come
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=1, **imports) as pool:  # type: ignore[arg-type]
        pids = pool.run(os.getpid)
        with pytest.raises(RankTimeoutError, match="C code holds the GIL"):
            pool.run(lambda: current_world().rank or ctypes.PyDLL(None).sleep(60))
        after = pool.run(os.getpid)
        assert after[0] != pids[0]
        assert after[1] == pids[1]


@pytest.mark.slow
def test_an_interrupt_that_a_destructor_drops_is_not_printed(tmp_path: Path) -> None:
    """The iterator of a `DataLoader` waits in its destructor for its workers."""
    code = """
import time
from nn_parallel import RankError, current_world

class Iterator:
    def __del__(self):
        time.sleep(60)

def train():
    if current_world().rank == 1:
        raise ValueError
    Iterator()
    time.sleep(60)

with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    pids = ex.run(os.getpid)
    try:
        ex.run(train)
    except RankError as error:
        print(list(error.failures))
    print(ex.run(os.getpid) == pids)
"""
    assert run_script(code, tmp_path) == ["[1]", "True"]


def test_cancelled_tasks_leave_the_workers_as_they_were(executor2: ParallelExecutor) -> None:
    """A run that fails on one rank ends the others by an interruption: sleeps, loops and locks; same processes."""

    def body(how: str) -> None:
        if current_world().rank == 1:
            raise ValueError
        if how == "sleep":
            time.sleep(3600)
        if how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        while True:
            pass

    pids = executor2.run(os.getpid)
    for how in ("sleep", "lock", "loop"):
        with pytest.raises(RankError) as caught:
            executor2.run(body, how)
        assert list(caught.value.failures) == [1]
    assert executor2.run(os.getpid) == pids


def test_a_task_that_swallows_its_interruption_is_killed(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """`except BaseException` does not keep a worker."""
    swallows = tmp_path / "swallows"

    def body() -> None:
        while current_world().rank == 0:
            with contextlib.suppress(BaseException):
                swallows.touch()
                while True:  # within the other loop, in which an interruption may hit what is not guarded
                    with contextlib.suppress(BaseException):
                        time.sleep(3600)
        while not swallows.exists():
            time.sleep(0.001)
        raise ValueError

    pids = executor2.run(os.getpid)
    with pytest.raises(RankError, match="rank 1 of 2: ValueError"):
        executor2.run(body)
    after = executor2.run(os.getpid)
    assert after[1] == pids[1]
    assert after[0] != pids[0]


def test_interruptions_race_with_the_ends_of_tasks(executor2: ParallelExecutor) -> None:
    """A failure at a random moment around the end of the other rank's task: never a wrong answer, never a lost one."""

    def body(failing: int, delay: float) -> int:
        end = time.perf_counter() + (delay if current_world().rank == failing else 0.0005)
        while time.perf_counter() < end:
            pass
        if current_world().rank == failing:
            raise ValueError(failing)
        return 7

    pids, rng = executor2.run(os.getpid), random.Random(0)
    for _ in range(300):
        failing = rng.randrange(2)
        with pytest.raises(RankError) as caught:
            executor2.run(body, failing, rng.random() * 0.002)
        assert {rank: str(error) for rank, error in caught.value.failures.items()} == {failing: str(failing)}
        assert executor2.run(abs, -3) == [3, 3]
    assert executor2.run(os.getpid) == pids


def test_a_timeout_of_years_is_no_error() -> None:
    """The kernel waits for some days at most; the pool, for as long as it is told."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=1e9) as pool:
        assert pool.run(lambda: time.sleep(0.1)) == [None]
        assert list(pool.map(abs, [-1], timeout=1e9)) == [1]


def kept_numbers() -> int:
    """How many numbers this worker keeps for handles."""
    return sum(isinstance(stored_object(number), int) for number in stored)


def test_a_worker_that_dies_in_a_call_was_running_it_whatever_it_was_sent_since(tmp_path: Path) -> None:
    """That a handle is gone, which it reads only after its call."""
    begun = tmp_path / "begun"

    def wait_for_ever() -> None:
        begun.touch()
        time.sleep(3600)

    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        handle = pool.put([1])
        assert pool.run(sum, handle) == [1]
        (pid,) = pool.run(os.getpid)
        future = pool.submit(wait_for_ever)
        while not begun.exists():
            time.sleep(0.001)
        del handle
        pool.submit(int).cancel()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL while running .*wait_for_ever"):
            future.result(20)


def test_workers_forget_all_handles_that_are_gone(executor2: ParallelExecutor) -> None:
    """Also those that go while the pool is busy with others."""
    handles = [executor2.put(number) for number in range(300)]
    assert executor2.run(sum, handles) == [44850] * 2
    assert executor2.run(kept_numbers) == [300] * 2

    def keep_busy() -> None:
        while handles:
            executor2.submit(int).result()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    while handles:
        handles.pop()
    busy.join()
    executor2.run(int)
    assert executor2.run(kept_numbers) == [0] * 2


def test_the_memory_of_a_file_is_copied(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Torch has no descriptor of it that could be sent."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(400))
    mapped = torch.from_file(str(path), shared=True, size=100)
    mapped.fill_(2)
    assert executor2.run(torch.sum, mapped) == [200, 200]
    assert executor2.submit(torch.sum, executor2.put(mapped)).result(20) == 200
    assert torch.equal(executor2.submit(torch.from_file, str(path), shared=True, size=100).result(20), mapped)


@pytest.mark.slow
def test_a_script_may_have_many_arguments(tmp_path: Path) -> None:
    """More than fit into one message."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
from nn_parallel import ParallelExecutor
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    assert ex.run(lambda: len(sys.argv)) == [len(sys.argv)] == [10001]
"""
    )
    names = [f"a name of thirty letters {number:06}" for number in range(10000)]
    done = subprocess.run([sys.executable, script, *names], capture_output=True, text=True, timeout=100)
    assert done.stderr == ""


@pytest.mark.slow
def test_a_child_of_the_script_may_end_as_any(tmp_path: Path) -> None:
    """Its functions registered with `atexit` run, and wait for no pool, which is the script's."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, sys
from nn_parallel import ParallelExecutor
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    ex.run(int)
    child = os.fork()
    if not child:
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ex.run(int))
"""
    )
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("3 [0]\n", "")
