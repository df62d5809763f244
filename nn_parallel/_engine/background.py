"""Work that goes on in a thread after the call that has begun it, as the writing of a checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

R = TypeVar("R")


def start(work: Callable[[], R], name: str) -> Future[R]:
    """Begin ``work`` in a thread, as `in_thread` does. Who ends the process waits for it before: see `finish`."""
    end = in_thread(work, name)
    _under_way.add(end)
    end.add_done_callback(_under_way.discard)
    return end


def in_thread(work: Callable[[], R], name: str) -> Future[R]:
    """Begin ``work`` in a thread called ``name``, which ends with the process: nobody has to wait for it."""
    end = Future[R]()

    def run(end: Future[R] | None) -> None:
        assert end is not None
        try:
            end.set_result(work())
        except BaseException as error:
            end.set_exception(error)
            end = None  # the error holds this frame: they would live in a cycle, with all that the work holds

    threading.Thread(target=run, args=[end], name=name, daemon=True).start()
    return end


def finish(within_s: float | None = None) -> None:
    """Return when all that was begun by `start` has come to its end, or after ``within_s``."""
    if _under_way:  # to wait for nothing takes 25 us, which each task of a pool would pay
        wait(set(_under_way), within_s)


_under_way = set[Future[Any]]()
os.register_at_fork(after_in_child=_under_way.clear)  # there is no such thread
