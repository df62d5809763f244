"""Work that goes on in a thread after the call that has begun it, as the writing of a checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

R = TypeVar("R")


def start(work: Callable[[], R], name: str) -> Future[R]:
    """Begin ``work`` in a thread called ``name``. The thread ends with the process, which may wait: see `finish`."""
    end = Future[R]()

    def run(end: Future[R] | None) -> None:
        assert end is not None
        try:
            end.set_result(work())
        except BaseException as error:
            end.set_exception(error)
            end = None  # the error holds this frame: they would live in a cycle, with all that the work holds

    _under_way.add(end)
    end.add_done_callback(_under_way.discard)
    try:
        threading.Thread(target=run, args=[end], name=name, daemon=True).start()
    except BaseException:  # there can be no further thread, for instance
        _under_way.discard(end)
        raise
    return end


def finish(within_s: float | None = None) -> None:
    """Return when all of it has come to its end, or after ``within_s``."""
    wait(set(_under_way), within_s)


_under_way = set[Future[Any]]()
os.register_at_fork(after_in_child=_under_way.clear)  # there is no such thread
