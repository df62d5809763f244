"""What a pool is asked to do: one task for one worker, or one for all of them."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any

from ..errors import ExecutorClosedError, RankError, lost_connection, rank_error
from ..pickling import Packed

RUN_GRACE_S = 0.2  # after one rank has failed, for the others to end by themselves


class Single:
    """One task for whichever worker is free first."""

    def __init__(self, packed: Packed, name: str) -> None:
        self.packed, self.name = packed, name
        self.future: Future[Any] = Future()

    def fail(self, rank: int, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):  # the user has set it
            self.future.set_exception(error)

    def succeed(self, rank: int, result: Any) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result)

    def cancel(self) -> None:
        """It has not begun, and will not."""
        if self.future.cancel():
            self.future.set_running_or_notify_cancel()


class Run:
    """One task for every worker; over when each has answered or is gone."""

    def __init__(self, packed: Packed, name: str, world_size: int) -> None:
        self.packed, self.name = packed, name
        self.results: list[Any] = [None] * world_size
        self.failures: dict[int, Exception] = {}
        self.missing = set(range(world_size))
        self.kill_at: float | None = None  # when those that have not answered are killed
        self._over = threading.Lock()
        self._over.acquire()

    def fail(self, rank: int, error: Exception) -> None:
        if isinstance(error, RankError):  # what a rank knows of others' failures is theirs
            for other, failure in error.failures.items():
                self.failures.setdefault(other, failure)
        elif rank not in self.failures or lost_connection(self.failures[rank]):
            self.failures[rank] = error
        if self.kill_at is None:
            self.kill_at = time.monotonic() + RUN_GRACE_S
        self.done_with(rank)

    def succeed(self, rank: int, result: Any) -> None:
        self.results[rank] = result
        self.done_with(rank)

    def done_with(self, rank: int) -> None:
        if rank in self.missing:
            self.missing.remove(rank)
            if not self.missing:
                self._over.release()

    def cancel(self) -> None:
        """It has not begun, and will not."""
        for rank in list(self.missing):
            self.fail(rank, ExecutorClosedError("The executor was shut down before the call began."))

    def result(self) -> list[Any]:
        """Wait for the end; the results in rank order, or the `RankError`."""
        self._over.acquire()
        if not self.failures:
            return self.results
        order = sorted(self.failures, key=lambda rank: lost_connection(self.failures[rank]))  # stable: by arrival
        raise rank_error(self.name, len(self.results), {rank: self.failures[rank] for rank in order})
