"""End what the main thread does from another thread, by a signal that raises, and only in what it was meant for.

SIGURG serves because nothing else uses it: its default action is to be ignored.

Nothing is raised in the few lines that enter and leave blocks, where it would leave them half done: a module that has
such lines says so by ``UNINTERRUPTED = True``; the signal that comes there is passed over, the next one counts.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

UNINTERRUPTED = True


class Interrupted(BaseException):
    """Raised in a block by `Interruptible.interrupt`. No `Exception`, which user code would swallow."""


class Interruptible:
    """A block of the main thread that other threads can end; in any other thread it is a plain block.

    Sleeps, locks and waits end at once, Python loops at their next turn; a call into C when it returns.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._before: Any = _raise_in_the_outermost  # the handler to put back at the end

    def __enter__(self) -> None:
        """From here on, and never after the end, `Interrupted` may be raised, at most once."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not _is_handler_kept and signal.getsignal(signal.SIGURG) is not _raise_in_the_outermost:
            self._before = signal.signal(signal.SIGURG, _raise_in_the_outermost)
        _running.append(self)
        if self.interrupted:  # before it began
            self.__exit__()
            raise Interrupted

    def __exit__(self, *_: object) -> None:
        if self in _running:
            del _running[_running.index(self) :]
        if self._before is not _raise_in_the_outermost:
            signal.signal(signal.SIGURG, self._before)

    def interrupt(self) -> None:
        """End the block, if it still runs. Any thread may call this.

        Call it again until the block has ended: a signal that comes just before a wait in C begins does not end that.
        """
        self.interrupted = True
        if main := threading.main_thread().ident:
            signal.pthread_kill(main, signal.SIGURG)


def _raise_in_the_outermost(signum: int, frame: FrameType | None) -> None:
    if _must_finish(frame):
        return
    for index, block in enumerate(_running):
        if block.interrupted:
            del _running[index:]  # first: nothing is raised twice
            raise Interrupted


def _must_finish(frame: FrameType | None) -> bool:
    if frame is not None and frame.f_code.co_filename == contextlib.__file__:  # between a block and its `with`
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("UNINTERRUPTED", False)


def keep_handler() -> None:
    """Have no block look for the handler and install it: for a process that does nothing but run blocks."""
    global _is_handler_kept
    _is_handler_kept = True
    signal.signal(signal.SIGURG, _raise_in_the_outermost)


_is_handler_kept = False
_running: list[Interruptible] = []
