"""`map` on started workers: its order, its chunks, and what is let go."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from nn_parallel import (
    ParallelExecutor,
    RemoteError,
    TransferError,
    WorkerDiedError,
)
from nn_parallel._engine.pool import memory_files as files
from tests.support.wire import memory_files


def test_a_map_that_nobody_reads_any_more_does_not_go_on(own_executor2: ParallelExecutor) -> None:
    """Closing the iterator drops the items that have not begun; what runs ends, and the pool is free."""
    results = own_executor2.map(lambda x: (time.sleep(0.02), x)[1], range(1000))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    start = time.monotonic()
    assert own_executor2.run(int) == [0, 0]
    assert time.monotonic() - start < 5


def note(item: int, folder: str) -> None:
    if item < 200:
        return
    Path(folder, str(item)).touch()
    time.sleep(0.3)


def test_what_waits_in_a_batch_is_cancelled_with_the_rest(tmp_path: Path) -> None:
    """As the worker answers a part of the batch after the end of the pool has begun."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        results = pool.map(note, range(400), [str(tmp_path)] * 400)
        while not os.listdir(tmp_path):
            time.sleep(0.001)
        pool.shutdown(cancel_futures=True)
        assert len(os.listdir(tmp_path)) == 1
        with pytest.raises(CancelledError):
            list(results)


def test_a_map_goes_on_while_its_iterable_waits(own_executor2: ParallelExecutor) -> None:
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

    assert list(own_executor2.map(mark, items())) == [None] * 50


def test_an_item_that_cannot_be_sent_fails_at_its_place(own_executor2: ParallelExecutor) -> None:
    """The results before it arrive."""
    results = own_executor2.map(str, [1, threading.Lock(), 3])
    assert next(results) == "1"
    with pytest.raises(TransferError, match="Argument 0 is a _thread.lock"):
        next(results)


def test_the_items_of_a_map_are_let_go_as_they_end(own_executor2: ParallelExecutor) -> None:
    """Results that nobody has taken yet do not hold the memory of what was sent for them."""
    results = own_executor2.map(torch.Tensor.numel, (torch.zeros(1 << 16) for _ in range(50)))
    assert own_executor2.run(int) == [0, 0]  # all are over
    files._reusable_files.clear()
    assert memory_files() == 0
    assert list(results) == [1 << 16] * 50


def test_map_keeps_the_order(own_executor2: ParallelExecutor) -> None:
    """Results in the order of the items, whatever the chunks; an exception comes out at its place."""
    expected = [(x, y, "cpu") for x, y in zip(range(20), range(20, 40), strict=True)]
    for chunksize in (None, 1, 3, 50):
        found = own_executor2.map(
            lambda x, device, y: (x, y, str(device)), range(20), range(20, 40), chunksize=chunksize
        )
        assert list(found) == expected
        first = own_executor2.map(lambda device, x: (str(device), x), range(5), chunksize=chunksize)
        assert list(first) == [("cpu", x) for x in range(5)]
        results = own_executor2.map(lambda x: 2 // x, [1, 2, 0, 1], chunksize=chunksize)
        assert [next(results), next(results)] == [2, 1]
        with pytest.raises(ZeroDivisionError) as caught:
            next(results)
        assert "a single task on cpu" in str(caught.value.__cause__)
    with pytest.raises(WorkerDiedError, match=r"while running _exit\(\)\."):
        list(own_executor2.map(functools.partial(os._exit), [1, 1], chunksize=2))
    with pytest.raises(ValueError, match="chunksize=0"):
        own_executor2.map(abs, [1], chunksize=0)
    with pytest.raises(TimeoutError):
        list(own_executor2.map(time.sleep, [1.0], timeout=0.05))


def test_a_chunk_goes_on_after_nothing_but_a_result(own_executor2: ParallelExecutor) -> None:
    """A call that has failed ends its chunk, whatever it has raised, and so does the child of one that forks."""
    for raised in (ZeroDivisionError("no"), SystemExit(3)):

        def fail_second(item: int, raised: BaseException = raised) -> int:
            if item == 1:
                raise raised
            return 10 * item

        results = own_executor2.map(fail_second, range(4), chunksize=4)
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
        assert list(own_executor2.map(fork_first, range(3), chunksize=3)) == [0, 1, 2]
        assert sorted(os.read(read, 100).decode().split()) == ["0", "1", "2", "child"]
    finally:
        os.close(read)
        os.close(write)
