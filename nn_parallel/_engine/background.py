"""Work in a thread that continues after the call that began it, such as the writing of a checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

R = TypeVar("R")


def start(work: Callable[[], R], name: str) -> Future[R]:
    """Begin work that must be done before the process ends, in a thread called ``name``.

    Before a process ends, this package calls `finish`, which waits for such work.
    """
    end = in_thread(work, name)
    _under_way.add(end)
    end.add_done_callback(_under_way.discard)
    return end


def in_thread(work: Callable[[], R], name: str) -> Future[R]:
    """Begin ``work`` in a thread called ``name``. When the process ends, the work may be left unfinished.

    What ``work`` refers to is released before the returned future is done. Otherwise the process could end while the
    thread deletes a process group, and C++ would then end the process by SIGABRT.
    """
    end = Future[R]()
    works = [work]  # the thread takes it out, so that nothing else in the thread refers to it

    def run(end: Future[R] | None) -> None:
        assert end is not None
        try:
            end.set_result(works.pop()())
        except BaseException as error:
            end.set_exception(error)
            # Break a reference cycle: the future refers to the error, the error's traceback refers to this frame, and
            # this frame to the future. The cycle would keep all objects alive that the work has used.
            end = None

    threading.Thread(target=run, args=[end], name=name, daemon=True).start()
    return end


def finish(within_s: float | None = None) -> None:
    """Wait for the end of all work begun by `start`, for at most ``within_s`` seconds; without a limit if None."""
    if _under_way:  # a `wait` for nothing takes 25 us, and each task of a pool calls this function
        wait(set(_under_way), within_s)


_under_way = set[Future[Any]]()  # the futures of all unfinished work that `start` has begun
os.register_at_fork(after_in_child=_under_way.clear)  # a forked child has none of the threads
