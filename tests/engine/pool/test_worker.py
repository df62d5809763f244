"""A worker is what a new process of the script would be."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nn_parallel._engine.devices
from nn_parallel import (
    ParallelError,
    ParallelExecutor,
    RankError,
    current_world,
    initialize_ddp,
    seed_everything,
)
from nn_parallel._engine.pool.channel import Received
from nn_parallel._engine.pool.messages import Answer, TaskHeader
from nn_parallel._engine.pool.worker import TaskRunner
from nn_parallel._engine.ranks.context import RankContext, rank_context


def _pids(executor: ParallelExecutor) -> list[int]:
    return executor.run(os.getpid)


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


def _blas_threads() -> dict[str, int]:
    """Of each library that is loaded; scipy has one of its own, which is loaded only now."""
    import scipy.linalg  # type: ignore[import-untyped]
    import threadpoolctl

    assert scipy.linalg
    found = threadpoolctl.threadpool_info()
    return {library["filepath"]: library["num_threads"] for library in found if library["user_api"] == "blas"}


def test_the_threads_of_other_libraries_are_shared_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on two cores use one thread each in numpy's and scipy's products, and not two."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = nn_parallel._engine.devices.cpu_count()
    with ParallelExecutor(num_workers=cores, devices="cpu") as pool:
        threads = pool.run(_blas_threads)
        assert threads[0]
        assert {n for each in threads for n in each.values()} == {1}
        pool.resize(1)
        (threads_of_one,) = pool.run(_blas_threads)
        assert set(threads_of_one.values()) == {cores}
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.run(os.environ.get, "OPENBLAS_NUM_THREADS") == ["7"]


def _draw() -> tuple[float, ...]:
    """A number of each generator; numpy's is made here, and so is not in what the workers were forked from."""
    import random

    import numpy

    return random.random(), float(numpy.random.random()), torch.rand(1).item()


@pytest.mark.slow
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


def test_seeded_random_numbers_are_the_same_again(own_executor2: ParallelExecutor) -> None:
    """`seed_everything` decides them, another seed on every rank."""

    def draw() -> Any:
        return seed_everything(3), _draw()

    first, second = own_executor2.run(draw)
    assert (first[0], second[0]) == (3, 4)
    assert all(one != other for one, other in zip(first[1], second[1], strict=True))
    assert own_executor2.run(draw) == [first, second]


def test_the_key_of_multiprocessing_is_the_script_s(own_executor2: ParallelExecutor) -> None:
    """A worker can use the proxies of a manager, and whatever else asks for the key."""

    def connect(address: Any) -> None:
        with Client(address, authkey=multiprocessing.current_process().authkey) as there:
            there.send("hello")

    with Listener(("127.0.0.1", 0), authkey=multiprocessing.current_process().authkey) as listener:
        future = own_executor2.submit(connect, listener.address)
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
    own_executor2: ParallelExecutor, capfd: pytest.CaptureFixture[str], body: Any, status: int, told: str
) -> None:
    """As a script would when it comes out of the task. It is not the worker, and answers nobody."""
    pids = _pids(own_executor2)
    assert own_executor2.run(_fork, body) == [status] * 2
    assert own_executor2.submit(_fork, body).result() == status
    assert list(own_executor2.map(_fork, [body] * 4)) == [status] * 4
    assert _pids(own_executor2) == pids
    err = capfd.readouterr().err
    assert err.count(told) == 7 if told else not err


def test_a_forked_child_that_fails_harms_no_group(own_executor2: ParallelExecutor) -> None:
    """The connections of its rank, which it has too, are not closed."""

    def body() -> float:
        initialize_ddp()
        assert _fork(lambda: sys.exit(7)) == 7
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert own_executor2.run(body) == [2.0, 2.0]
    assert own_executor2.run(body) == [2.0, 2.0]


def test_an_initializer_may_fork() -> None:
    """Its child does not tell that the worker is set up."""
    with ParallelExecutor(num_workers=2, devices="cpu", initializer=_fork, initargs=(int,)) as pool:
        assert pool.run(lambda: os.getpid() == os.getpgid(0)) == [True, True]  # as a worker is, and no child of it


def test_tasks_may_use_processes_of_multiprocessing(own_executor2: ParallelExecutor) -> None:
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

    assert own_executor2.run(body) == [([1, 2], 3, 4)] * 2
    assert own_executor2.run(int) == [0, 0]


def test_a_batch_is_handed_back_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order arrives when the next call is about to begin: what has ended is answered, and nothing fails."""
    answers = list[Answer]()
    runner = TaskRunner(0, torch.device("cpu"), {}, answers.append)

    class Calls(deque[bytes | Received]):
        def popleft(self) -> bytes | Received:
            if len(self) == 1:
                runner.hand_back()  # as the other thread of a worker does
            return super().popleft()

    monkeypatch.setattr(runner, "_task", 1)
    monkeypatch.setattr(runner, "_is_batch", True)
    monkeypatch.setattr(runner, "_calls", Calls([b"1", b"2", b"3"]))
    monkeypatch.setattr(runner, "_call", lambda task, arguments: int(arguments))
    assert runner._do_calls(TaskHeader(1, seconds=60.0)) is None
    assert [pickle.loads(result) for answer in answers for result in answer.results] == [1, 2]
    assert runner._results == []


def _report_deadlock(context: RankContext, generation: int) -> None:
    """Do what the watchdog does when the collective of this generation can never end."""
    assert context.on_deadlock is not None
    context.on_deadlock(ParallelError("It can never end."), generation)


def test_a_deadlock_in_one_run_ends_no_later_task(own_executor2: ParallelExecutor) -> None:
    """The run may end just after its watchdog has found the deadlock, and the next task may have begun by then."""

    def remember() -> None:
        context = rank_context()
        sys.deadlock = context, context.generation  # type: ignore[attr-defined, union-attr]

    def report_and_go_on() -> str:
        thread = threading.Thread(target=_report_deadlock, args=sys.deadlock)  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        return "not interrupted"

    own_executor2.run(remember)
    assert own_executor2.submit(report_and_go_on).result() == "not interrupted"
    assert own_executor2.run(report_and_go_on) == ["not interrupted"] * 2


def test_a_deadlock_ends_a_task_that_drops_the_first_interrupt(own_executor2: ParallelExecutor) -> None:
    def drop() -> None:
        context = rank_context()
        if context is not None and context.rank == 0:
            drops = threading.Event()
            thread = threading.Thread(target=lambda: drops.wait() and _report_deadlock(context, context.generation))
            thread.start()
            with contextlib.suppress(BaseException):
                drops.set()
                time.sleep(100)
            time.sleep(100)

    with pytest.raises(ParallelError, match=r"It can never end\."):
        own_executor2.run(drop)
    assert own_executor2.run(int) == [0, 0]
