"""The order of the calls that several threads make of one executor."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator

from ..errors import ExecutorClosedError


class Turns:
    """A run begins once all calls before it are over, and what comes after it begins once it is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._calls = dict[int, bool]()  # those that are not over, by number: whether each is a run
        self._used_at, self._pid, self._is_closed = time.monotonic(), os.getpid(), False

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one whose calls these are."""
        return self._pid != os.getpid()

    @property
    def are_over(self) -> bool:
        """Whether no more are taken, at least of this process."""
        return self._is_closed or self.is_inherited

    @property
    def idle_s(self) -> float:
        """How long there has been no call."""
        return 0.0 if self._calls else time.monotonic() - self._used_at

    def take(self, is_run: bool = False) -> int:
        """The number of a new call.

        Raises:
            ExecutorClosedError: no more are taken.
        """
        if self.is_inherited:
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")
        with self._changed:
            if self._is_closed:
                raise ExecutorClosedError
            self._calls[number := next(self._numbers)] = is_run
            return number

    def wait(self, number: int) -> None:
        """Wait for the turn of this call."""
        with self._changed:
            mine, calls = self._calls[number], self._calls
            self._changed.wait_for(lambda: not any(each < number and (mine or calls[each]) for each in calls))

    def end(self, number: int) -> None:
        """It is over."""
        with self._changed:
            del self._calls[number]
            self._used_at = time.monotonic()
            self._changed.notify_all()

    @contextlib.contextmanager
    def run(self) -> Iterator[int]:
        """The turn of a run, and its number."""
        number = self.take(is_run=True)
        try:
            self.wait(number)
            yield number
        finally:
            self.end(number)

    def close(self) -> bool:
        """Take no more calls; whether any were taken until now."""
        with self._changed:
            were_over, self._is_closed = self.are_over, True
            return not were_over

    def wait_for_all(self) -> None:
        """Return once all calls are over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._calls)
