"""Work in a thread that goes on after a call."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest

from nn_parallel._engine import background


def test_it_goes_on_and_is_waited_for() -> None:
    """Until its end, or for some time."""
    go_on = threading.Event()
    end = background.start(lambda: go_on.wait() and 7, "waits")
    background.finish(within_s=0.05)
    assert not end.done()
    threading.Timer(0.05, go_on.set).start()
    background.finish()
    assert end.result() == 7


def test_its_error_holds_nothing_for_long() -> None:
    """The memory of the work, such as a model's tensors, is freed at its end, without Python's collector."""

    class Large: ...

    large = Large()
    is_there = weakref.ref(large)

    def work(large: Large) -> None:
        raise ValueError("is told")

    gc.disable()
    try:
        end = background.start(lambda held=large: work(held), "fails")  # type: ignore[misc]
        del large
        with pytest.raises(ValueError, match="is told"):
            end.result()
        background.finish()
        del end
        deadline = time.monotonic() + 5
        while is_there() is not None and time.monotonic() < deadline:  # the thread may just be ending
            time.sleep(0.001)
        assert is_there() is None
    finally:
        gc.enable()


def test_what_it_refers_to_is_released_before_its_end() -> None:
    """Otherwise a process group could be deleted in this thread while the process ends, which C++ ends by SIGABRT."""

    class Group: ...

    group, go_on = Group(), threading.Event()
    is_there = weakref.ref(group)
    end = background.start(lambda held=group: held and go_on.wait(), "holds")  # type: ignore[misc]
    del group
    seen = list[Group | None]()
    end.add_done_callback(lambda _: seen.append(is_there()))
    go_on.set()
    background.finish()
    assert end.result()
    assert seen == [None]


def test_a_fork_waits_for_nothing() -> None:
    """It has no such thread."""
    go_on = threading.Event()
    background.start(go_on.wait, "waits")
    if (child := os.fork()) == 0:
        background.finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    background.finish()
