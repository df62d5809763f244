"""The futures of a pool, and the thread that calls their done-callbacks."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn

from ..signals import Condition

logger = logging.getLogger("concurrent.futures")  # where the standard library tells of callbacks that raise
Callback = Callable[[concurrent.futures.Future[Any]], object]


class Callbacks:
    """Calls the done-callbacks of one pool's futures, one after another, in a thread of its own.

    So a callback may wait for its own pool, whose answers other threads read. And what it raises is logged, whatever it
    is: no signal is handled in this thread, so that SystemExit and KeyboardInterrupt are the callback's own.
    """

    def __init__(self) -> None:
        self._due = SimpleQueue[tuple[Callback, concurrent.futures.Future[Any]] | None]()
        self.thread = threading.Thread(target=self._loop, name="nn_parallel callbacks", daemon=True)

    def call(self, fn: Callback, future: concurrent.futures.Future[Any]) -> None:
        """Have ``fn(future)`` called after those that came before."""
        self._due.put((fn, future))

    def end(self) -> None:
        """Wait for the last call, and end the thread."""
        self._due.put(None)
        self.thread.join()

    def _loop(self) -> None:
        while (due := self._due.get()) is not None:
            fn, future = due
            try:
                fn(future)
            except BaseException:
                logger.exception("exception calling callback for %r", future)
            del due, fn, future  # nothing of it lives on while this waits for the next


class Future(concurrent.futures.Future[Any]):
    """What a pool will have done."""

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._condition = Condition()  # left locked by Ctrl-C in who waits, it would stop whoever ends this

    def add_done_callback(self, fn: Callback) -> None:
        """Call ``fn(self)`` once this is over: in this thread if it is over now, else in the pool's for callbacks."""
        super().add_done_callback(fn if self.done() else functools.partial(self._callbacks.call, fn))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a future belongs to the process that made it: send its result() instead")
