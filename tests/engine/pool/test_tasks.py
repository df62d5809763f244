"""Tasks: futures, their callbacks, and results that are rebuilt when they are asked for."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from nn_parallel import (
    ExecutorClosedError,
    ParallelExecutor,
    WorkerDiedError,
)


def test_an_answer_is_rebuilt_by_whoever_asks_for_it(executor2: ParallelExecutor) -> None:
    """And by no thread that merely reads it. Ctrl-C meanwhile is raised there, and it can be asked for again."""
    rebuilt_by.clear()
    future = executor2.submit(Rebuilt)
    wait([future])
    assert executor2.run(int) == [0, 0]
    assert rebuilt_by == []
    with pytest.raises(KeyboardInterrupt):
        future.result()
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda _: future.result(), range(4))) == ["whole"] * 4
    assert len(rebuilt_by) == 2
    assert rebuilt_by[0] == "MainThread"


def test_a_result_may_be_of_a_class_that_only_its_call_knew(executor2: ParallelExecutor) -> None:
    """Until it is rebuilt, however late; and so may an exception."""

    def calls() -> tuple[Future[Any], Future[Any], Iterator[Any]]:
        class Local(Exception):
            pass

        def fail() -> None:
            raise Local

        return executor2.submit(lambda: Local()), executor2.submit(fail), executor2.map(lambda _: Local(), range(2))

    made, failed, mapped = calls()
    wait([made, failed])
    gc.collect()
    assert type(made.result()).__name__ == "Local"
    assert type(failed.exception()).__name__ == "Local"
    assert [type(each).__name__ for each in mapped] == ["Local", "Local"]


def test_a_future_that_has_raised_is_gone_with_its_last_reference(executor2: ParallelExecutor) -> None:
    """As the standard library's: its exception is in no cycle with it."""
    future = executor2.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        future.result()
    gone = weakref.ref(future)
    del future
    assert gone() is None


rebuilt_by: list[str] = []


class Rebuilt:
    """A text, as it arrives; the first time, Ctrl-C comes meanwhile."""

    def __reduce__(self) -> Any:
        return rebuild, ()


def rebuild() -> str:
    rebuilt_by.append(threading.current_thread().name)
    if len(rebuilt_by) == 1:
        signal.raise_signal(signal.SIGINT)
    return "whole"


def test_a_callback_may_wait_for_its_pool(executor2: ParallelExecutor) -> None:
    """It is called in no thread that has to read answers, or to look after workers, as here after a death."""

    def callback(future: Future[int]) -> None:
        called.append(future.result())
        called.append(executor2.run(abs, -2))
        called.append(list(executor2.map(abs, range(-3, 0))))
        with contextlib.suppress(WorkerDiedError):
            executor2.submit(os._exit, 1).result()
        executor2.resize(1)
        called.append(executor2.submit(len, "abc").result())
        executor2.resize(2)
        is_over.set()

    called, is_over = list[Any](), threading.Event()
    future = executor2.submit(lambda: time.sleep(0.1) or 1)
    future.add_done_callback(lambda _: called.append("first"))
    future.add_done_callback(callback)
    assert list(executor2.map(time.sleep, [0.3, 0.3])) == [None, None]  # which reads the answer of the other task, too
    assert is_over.wait(20)
    assert called == ["first", 1, [2, 2], [3, 2, 1], 3]


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
    assert executor2.run(int) == [0, 0]  # while it still runs
    go_on.set()
    assert is_over.wait(20)
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


def test_a_callback_that_takes_longer_than_the_timeout_harms_nobody() -> None:
    """The task itself was in time, and so was the one beside it."""
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=0.5) as pool:
        pool.run(int)
        pids = pool.run(os.getpid)
        quick = pool.submit(time.sleep, 0.1)
        quick.add_done_callback(lambda _: time.sleep(1.5))
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
