"""Futures and their callbacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nn_parallel import (
    ExecutorClosedError,
    ParallelError,
    ParallelExecutor,
)
from nn_parallel._engine.pool import futures as pool_futures


def test_a_future_that_has_raised_is_gone_with_its_last_reference(executor2: ParallelExecutor) -> None:
    """As the standard library's: its exception is in no cycle with it."""
    future = executor2.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        future.result()
    gone = weakref.ref(future)
    del future
    assert gone() is None


def test_a_callback_that_waits_for_its_pool_is_told(executor2: ParallelExecutor) -> None:
    """The answers arrive in the thread that runs it. What is there already it gets, and it may submit."""

    def callback(future: Future[int]) -> None:
        try:
            outcomes.append(future.result())
            for call in (
                executor2.submit(abs, -1).result,
                executor2.submit(abs, -1).exception,
                lambda: executor2.run(int),
                lambda: list(executor2.map(abs, [1])),
                lambda: executor2.resize(3),
            ):
                with pytest.raises(ParallelError, match="A done-callback cannot wait for another call"):
                    call()
            later.append(executor2.submit(abs, -5))
        finally:
            is_over.set()

    outcomes: list[int] = []
    later: list[Future[int]] = []
    is_over = threading.Event()
    future = executor2.submit(lambda: time.sleep(0.1) or 1)
    future.add_done_callback(callback)
    assert is_over.wait(20)
    assert outcomes == [1]
    assert later[0].result(20) == 5
    assert executor2.run(int) == [0, 0]  # two, as before


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("reader", ["nobody", "map"])
def test_what_a_callback_raises_is_logged(
    executor2: ParallelExecutor, caplog: pytest.LogCaptureFixture, kind: type[BaseException], reader: str
) -> None:
    """As the standard library does, also what would end the thread; it is not the error of whoever reads answers."""

    def callback(_: Future[None]) -> None:
        raise kind("of a callback")

    future, is_over = executor2.submit(time.sleep, 0.1), threading.Event()
    future.add_done_callback(callback)
    future.add_done_callback(lambda _: is_over.set())
    if reader == "map":
        assert list(executor2.map(time.sleep, [0.3, 0.3])) == [None, None]
    assert is_over.wait(20)
    assert future.result() is None
    [record] = caplog.records
    assert (record.name, record.getMessage()) == ("concurrent.futures", f"exception calling callback for {future!r}")
    assert record.exc_info
    assert isinstance(record.exc_info[1], kind)
    assert executor2.run(int) == [0, 0]


def test_ctrl_c_is_raised_while_a_callback_runs(executor2: ParallelExecutor, caplog: pytest.LogCaptureFixture) -> None:
    """It is the main thread's, however long a callback takes, and no callback's."""
    begun, go_on, is_over = threading.Event(), threading.Event(), threading.Event()
    future = executor2.submit(time.sleep, 0.1)
    future.add_done_callback(lambda _: (begun.set(), go_on.wait(20), is_over.set()))

    def interrupt() -> None:
        begun.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupting.start()
        executor2.run(time.sleep, 3600)
    interrupting.join()
    assert not is_over.is_set()
    go_on.set()
    assert is_over.wait(20)
    assert executor2.run(int) == [0, 0]
    assert not caplog.records


def test_the_end_of_a_pool_waits_for_its_callbacks() -> None:
    """However long after the last task they end; what they submit is refused."""
    refused = list[bool]()

    def callback(_: Future[None]) -> None:
        pool.shutdown(wait=False)
        time.sleep(0.1)
        with pytest.raises(ExecutorClosedError):
            pool.submit(int)
        refused.append(True)

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        for _ in range(3):
            pool.submit(time.sleep, 0.1).add_done_callback(callback)
    assert refused == [True] * 3


@pytest.mark.slow
def test_a_callback_that_takes_longer_than_the_timeout_harms_nobody() -> None:
    """The task itself was in time, and so was the one beside it."""
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=2) as pool:
        pool.run(int)
        pids = pool.run(os.getpid)
        quick = pool.submit(time.sleep, 0.1)
        quick.add_done_callback(lambda _: time.sleep(3))
        assert list(pool.map(time.sleep, [0.3])) == [None]
        assert quick.result() is None
        assert pool.run(os.getpid) == pids


def test_a_pool_can_be_shut_down_in_a_callback() -> None:
    """While another thread reads its answers; in the callback it does not wait for the end, which waits for that."""
    pool = ParallelExecutor(num_workers=2, devices="cpu")
    pool.run(int)
    quick = pool.submit(time.sleep, 0.1)
    quick.add_done_callback(lambda _: pool.shutdown())
    assert list(pool.map(time.sleep, [0.3])) == [None]
    pool.shutdown()
    with pytest.raises(ExecutorClosedError):
        pool.run(int)


@pytest.mark.slow
def test_who_waits_for_a_cancelled_future_hears_of_it_as_the_pool_breaks(tmp_path: Path) -> None:
    """`wait` ends when each future is over."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal, time
from concurrent.futures import wait
from nn_parallel import ParallelExecutor
from nn_parallel._engine.pool import forkserver_client
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    ex.run(int)
    running, waiting = ex.submit(time.sleep, 600), ex.submit(int)
    waiting.cancel()
    os.kill(forkserver_client.fork_server_pid(), signal.SIGKILL)
    done, _ = wait([running, waiting], timeout=20)
    print(len(done))
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.slow
def test_only_one_thread_takes_over_the_lock_of_a_future(executor2: ParallelExecutor) -> None:
    """Ctrl-C in `concurrent.futures.wait` may leave the lock taken, and several threads may then wait for it."""
    futures = [executor2.submit(abs, -1) for _ in range(10)]
    for future in futures:
        future.result()
        future._condition.acquire()
    owners = dict.fromkeys(futures, 0)
    most_owners = dict.fromkeys(futures, 0)

    def wait_for_lock(future: Future[int]) -> None:
        with future._condition:
            owners[future] += 1
            time.sleep(0.01)  # the other threads wait meanwhile
            most_owners[future] = max(most_owners[future], owners[future])
            owners[future] -= 1

    def pause_at_each_line(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != pool_futures.__file__:
            return None
        time.sleep(0.001)  # lets another thread run between two lines of the lock
        return pause_at_each_line

    threads = [threading.Thread(target=wait_for_lock, args=[future]) for future in futures for _ in range(5)]
    threading.settrace(pause_at_each_line)
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.settrace(None)
    for thread in threads:
        thread.join()
    assert set(most_owners.values()) == {1}


def test_a_thread_may_take_the_lock_of_a_future_twice() -> None:
    """`concurrent.futures.wait` does so, to ask finished futures for their exceptions."""
    future = pool_futures.Future(None)
    lock: Any = future._condition._lock  # type: ignore[attr-defined]
    with future._condition:
        with future._condition:
            pass
        assert lock.locked()
    assert not lock.locked()


def test_a_thread_that_has_left_the_lock_taken_takes_it_over_from_itself() -> None:
    """Ctrl-C may leave the lock taken. The future is completed, however often the same thread looks at it."""
    future = pool_futures.Future(None)
    future._condition.acquire()
    completing = threading.Thread(target=future.complete, args=[5], daemon=True)
    completing.start()
    deadline = time.monotonic() + 20
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.1)  # between two looks
    completing.join(20)
    assert future.result(0) == 5
