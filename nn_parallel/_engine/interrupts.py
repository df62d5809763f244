"""What is raised in the main thread from outside: where it is meant to be, and nowhere else.

`CancelScope` is a block that another thread can end, by a signal that raises in it. SIGURG serves because nothing
else uses it: its default action is to be ignored. Nothing is raised in the few lines that enter and leave blocks, where
it would leave them half done: a module that has such lines says so by ``UNINTERRUPTED = True``; the signal that comes
there is passed over, the next one counts. Nor is it raised in an import that the block has begun: many a module that
has run by half cannot be imported again.

`raise_in_main_thread` raises outside all blocks.

`DeferredSignals` is the opposite: a block that neither this nor Ctrl-C leaves half done.
"""

from __future__ import annotations

import contextlib
import logging  # noqa: F401  # first: what it does around a fork is then between `_begin_fork` and `_end_fork`
import operator
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # what `signal` wraps, which looks each handler up in an enum, in vain and for ten times as long

UNINTERRUPTED = True
PATIENCE_S = 1.0
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"  # the file of its frames
IMPORT_PATIENCE_S = 30.0  # a whole program may run in an import


class Interrupted(BaseException):
    """Raised in a block by `CancelScope.interrupt`. No `Exception`, which user code would swallow."""


class CancelScope:
    """A block of the main thread that other threads can end; in any other thread it is a plain block.

    Sleeps, locks and waits end at once, Python loops at their next turn; a call into C when it returns.

    Python drops an exception that is raised in ``__del__``, in the callback of a weak reference or in the garbage
    collector: it prints the exception and goes on with the block. User code drops it by ``except BaseException: pass``.
    The block would then never end. A list of such places cannot be complete, so the handler of the signal looks for the
    exception that it has raised before. While ``finally`` and ``except`` clauses run, Python has it at hand as the
    exception that is handled, or in the context of that: it is on its way out of the block, and nothing more is
    raised. Otherwise it was dropped, and the next `interrupt` raises again.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._raised: Callable[[], Interrupted | None] = _nothing_raised
        self._before: Any = _raise_in_the_outermost  # the handler to put back at the end
        self._imports_around = _imports(sys._getframe())  # here, and not on entry: a task of a pool takes 50 us
        self._import_seen_at: float | None = None  # when another one was first to be interrupted

    def __enter__(self) -> None:
        """From here on, and never after the end, `Interrupted` may be raised."""
        if threading.get_ident() != _main:
            return
        self._import_seen_at = None
        self._raised = _nothing_raised
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
        signal.pthread_kill(_main, signal.SIGURG)

    def is_being_left(self) -> bool:
        """Return, to the handler of the signal, whether what was raised in the block is on its way out."""
        raised = self._raised()
        handled = sys.exc_info()[1] if raised is not None else None
        while handled is not None and handled is not raised:
            handled = handled.__context__
        return handled is not None

    def make_exception(self) -> Interrupted:
        """Return the exception to raise in the block."""
        exception = Interrupted()
        self._raised = weakref.ref(exception)  # the exception holds all that the frames hold through which it comes
        return exception

    def is_importing(self, frame: FrameType | None) -> bool:
        """Return whether the main thread, at ``frame``, is in an import that this block has begun and may end soon."""
        if _imports(frame) <= self._imports_around:
            return False
        now = time.monotonic()
        if self._import_seen_at is None:
            self._import_seen_at = now
        return now - self._import_seen_at < IMPORT_PATIENCE_S


def raise_in_main_thread(error: Exception) -> None:
    """Have ``error`` raised in the main thread, once, also outside all blocks; `stay_ready` has been called before.

    Call `raise_if_due` until it is raised. Any thread may call this.
    """
    global _due
    _due = error
    signal.pthread_kill(_main, signal.SIGURG)


def raise_nothing() -> None:
    global _due
    _due = None


def raise_if_due() -> bool:
    """Have what is due raised again, which may have come where nothing is raised; return whether there is any."""
    if _due is None:
        return False
    signal.pthread_kill(_main, signal.SIGURG)
    return True


class DeferredSignals:
    """A block of the main thread at whose end Ctrl-C and `Interrupted` are raised: they leave nothing half done.

    When one arrives, ``due`` is no longer None, and ``on_arrival`` is called, in the signal's handler: it has the block
    end soon. Where that has not ended after a second, one more Ctrl-C is raised at once. In any other thread this is a
    plain block.

    Example::

        with DeferredSignals(on_arrival=poller.wake) as delayed:
            while delayed.due is None:
                poller.wait()
    """

    __slots__ = ("_before", "_on_arrival", "_since", "due")

    def __init__(self, on_arrival: Callable[[], object] = lambda: None) -> None:
        self._on_arrival = on_arrival
        self._before: Any = None  # the handler to put back at the end
        self.due: tuple[Callable[..., object], int] | None = None  # the handler of what has come, and its signal
        self._since = 0.0  # when the first has come

    def __enter__(self) -> Self:
        if threading.get_ident() == _main:
            before = _signal.getsignal(_SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(_SIGINT, self._ctrl_c)
            _delayed.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if _delayed and _delayed[-1] is self:
            _delayed.pop()
            self.put_back()
            if self.due is not None:
                handler, signum = self.due
                handler(signum, sys._getframe(1))

    def note(self, handler: Callable[..., object], signum: int) -> None:
        """Have ``handler`` called at the end."""
        if self.due is None or signum == _SIGINT:
            self.due = handler, signum
        self._on_arrival()

    def put_back(self) -> None:
        """Have Ctrl-C raised at once again."""
        if self._before is not None:
            replaced = _signal.signal(_SIGINT, self._before)
            if replaced != self._ctrl_c:  # the block has set one, to stay
                _signal.signal(_SIGINT, replaced)

    def _ctrl_c(self, signum: int, frame: FrameType | None) -> None:
        if self not in _delayed:  # just begun or ended; or the handler of another signal has raised just then
            self.put_back()
            self._before(signum, frame)
            return
        now = time.monotonic()
        self._since = self._since or now
        self.note(self._before, signum)
        if now - self._since > PATIENCE_S:
            self.due = None
            self._before(signum, frame)


class Condition(threading.Condition):
    """One that Ctrl-C does not leave locked: ``with`` calls the lock's own methods, with no line of Python around."""

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))


def _raise_in_the_outermost(signum: int, frame: FrameType | None) -> None:
    global _due
    if _is_forking or _must_finish(frame):
        return
    if _delayed:
        _delayed[-1].note(_raise_in_the_outermost, signum)
        return
    for scope in _running:
        if scope.interrupted:
            if scope.is_being_left() or scope.is_importing(frame):
                return
            raise scope.make_exception()
    if _due is not None:
        error = _due
        _due = None
        raise error


def _nothing_raised() -> None:
    """Stand in for the weak reference of a scope in which nothing has been raised."""


def _must_finish(frame: FrameType | None) -> bool:
    if frame is not None and frame.f_code.co_filename == contextlib.__file__:  # between a block and its `with`
        return True
    if frame is not None and _is_rmtree(frame):
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("UNINTERRUPTED", False)


def _is_rmtree(frame: FrameType) -> bool:
    """Return whether this is `shutil.rmtree`, which leaves a descriptor open if it is interrupted as it closes it.

    Before Python 3.13 it closes it once more instead. By then another thread may have opened one of that number.
    """
    return frame.f_code.co_filename == shutil.__file__ and "rmtree" in frame.f_code.co_qualname.lower()


def _imports(frame: FrameType | None) -> int:
    """Return how many frames on the stack are those of the import system."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == IMPORT_SYSTEM
        frame = frame.f_back
    return count


def keep_handler() -> None:
    """Have no block look for the handler and install it: for a process that does nothing but run blocks."""
    global _is_handler_kept
    _is_handler_kept = True
    signal.signal(signal.SIGURG, _raise_in_the_outermost)


def stay_ready(until: contextlib.ExitStack) -> bool:
    """Have the handler stay, for `raise_in_main_thread`; return whether this is the main thread, where it can."""
    if threading.get_ident() != _main:
        return False
    before = signal.signal(signal.SIGURG, _raise_in_the_outermost)
    raise_nothing()

    def put_back() -> None:
        raise_nothing()
        if threading.get_ident() == _main and not _running:  # else the handler stays, and raises nothing
            signal.signal(signal.SIGURG, before)

    until.callback(put_back)
    return True


def _begin_fork() -> None:
    """Let nothing be raised in the functions that Python calls around a fork, as `logging` releases its lock in one.

    Python would print the exception and go on, and the lock would be held for ever.
    """
    global _is_forking
    _is_forking = True


def _end_fork() -> None:
    global _is_forking
    _is_forking = False


def _begin_anew() -> None:
    """In a fork: its only thread is the main one now, whichever it was, and in no block that the main thread was in."""
    global _main
    _end_fork()
    _main = threading.get_ident()
    while _delayed:
        _delayed.pop().put_back()


_main = threading.main_thread().ident or 0  # the thread that runs signals' handlers
_is_handler_kept = False
_due: Exception | None = None  # to be raised outside all blocks
_SIGINT = int(signal.SIGINT)
_running: list[CancelScope] = []
_delayed: list[DeferredSignals] = []  # the innermost last
_is_forking = False
os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_begin_anew)
