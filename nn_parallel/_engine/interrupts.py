"""Exceptions that another thread or a signal raises in the main thread.

The problem. The main thread of a rank runs the user's function. If another rank fails, or if the task is cancelled, the
function must end soon, wherever it is: in a loop, in a sleep, in a wait for a lock. The process must survive, because
its imports, its data and its devices are used again. So another thread must raise an exception in the main thread.

What does not work. CPython has a function for this, ``PyThreadState_SetAsyncExc``. But the exception is raised only
when the main thread next runs bytecode, so a sleep or a wait for a lock goes on to its end.

The solution is the mechanism of Ctrl-C. A signal ends sleeps and waits, and Python then runs the handler of the signal
in the main thread. If the handler raises an exception, the exception ends the function. Code in C is not interrupted:
the handler runs when the C code returns. The signal is SIGURG, because nothing else uses it, and by default it is
ignored. `CancelScope` is a block that another thread can end in this way. `raise_in_main_thread` works outside of all
blocks.

Some lines of code must not be left half done, so the handler raises nothing while they run. The signal then has no
effect. So the thread that sends the signal must send it again and again, until the exception was raised. The protected
lines are:

- lines that enter and leave blocks. A module with such lines has a global ``UNINTERRUPTED = True``.
- an import that the block has begun, because many modules cannot be imported again after they were executed in part.
- the functions that Python calls before and after a fork (`_begin_fork`), `shutil.rmtree` (`_is_rmtree`), and the
  beginning of a finalizer of `weakref`.

The exception may also be lost, because Python or user code drops it; see `CancelScope`.

`DeferredSignals` is the opposite: a block that is not interrupted. Ctrl-C and SIGURG take effect at its end.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging  # noqa: F401  # registers its functions for forks before this module does; see `_begin_fork`
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
    import _signal  # the functions of `signal` take ten times as long, because they look up each handler in an enum

UNINTERRUPTED = True  # the handler of SIGURG raises nothing in this module; see `_must_finish`
PATIENCE_S = 1.0  # how long Ctrl-C waits for the end of a `DeferredSignals` block
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"  # the file name of frames of the import system
# How long an interrupt waits for the end of an import. There is a limit, because an import may run a whole program.
IMPORT_PATIENCE_S = 30.0


class Interrupted(BaseException):
    """Raised in a block by `CancelScope.interrupt`.

    It is no subclass of `Exception`, because user code often catches `Exception`.
    """


class CancelScope:
    """A block of the main thread that other threads can end with `Interrupted`. In other threads it is a plain block.

    A sleep or a wait for a lock ends at once, a loop in Python at its next line, and a call into C when it returns.

    The exception may be dropped, and then the block would never end. If the exception is raised in ``__del__``, in the
    callback of a weak reference or in the garbage collector, Python prints it and goes on. User code drops it with
    ``except BaseException: pass``. These places cannot all be known in advance. So the thread that interrupts the block
    sends SIGURG again and again, and the handler of SIGURG raises another exception if the last one was dropped.

    The handler finds out as follows whether the last exception was dropped. While the last exception is on its way out
    of the block, the handler can run only in ``finally`` and ``except`` clauses and the like. Python is then handling
    the last exception, or an exception that has the last one in its chain of ``__context__``. If Python handles
    neither, the last exception was dropped.
    """

    def __init__(self) -> None:
        self.interrupted = False  # whether `interrupt` was called; if so, the handler of SIGURG ends the block
        # A weak reference to the exception that was last raised in the block.
        self._raised: Callable[[], Interrupted | None] = _nothing_raised
        self._before: Any = _raise_in_the_outermost  # the handler of SIGURG to restore at the end of the block
        # The number of imports that are under way when the scope is made. If the handler counts more imports, the block
        # has begun an import. `__enter__` does not count them, because it must be fast: a worker enters the same block
        # again for each task, and a small task takes only 50 us.
        self._imports_around = _imports(sys._getframe())
        # When an interrupt first came during an import in the block; None before that. The import must end within
        # IMPORT_PATIENCE_S from this time on.
        self._import_seen_at: float | None = None

    def __enter__(self) -> None:
        """Begin the block. From now on and until `__exit__` is called, `Interrupted` may be raised."""
        if threading.get_ident() != _main:
            return
        self._import_seen_at = None
        self._raised = _nothing_raised
        if not _is_handler_kept and signal.getsignal(signal.SIGURG) is not _raise_in_the_outermost:
            self._before = signal.signal(signal.SIGURG, _raise_in_the_outermost)
        _running.append(self)
        if self.interrupted:  # `interrupt` was called before the block began
            self.__exit__()
            raise Interrupted

    def __exit__(self, *_: object) -> None:
        if self in _running:
            del _running[_running.index(self) :]
        if self._before is not _raise_in_the_outermost:
            signal.signal(signal.SIGURG, self._before)

    def interrupt(self) -> None:
        """Raise `Interrupted` in the block, if the block still runs. Any thread may call this method.

        Call it again and again until the block has ended, because one call may have no effect. For example, the handler
        raises nothing in protected lines, and a signal that comes just before a wait in C code does not end the wait.
        """
        self.interrupted = True
        signal.pthread_kill(_main, signal.SIGURG)

    def is_being_left(self) -> bool:
        """Return whether the last exception that was raised in the block is still on its way out of the block.

        If so, the handler of SIGURG raises nothing. Otherwise the exception was dropped (see `CancelScope`), or none
        was raised yet, and the handler raises another one.
        """
        raised = self._raised()
        handled = sys.exc_info()[1] if raised is not None else None
        while handled is not None and handled is not raised:
            handled = handled.__context__
        return handled is not None

    def make_exception(self) -> Interrupted:
        """Return the exception to raise in the block."""
        exception = Interrupted()
        self._raised = weakref.ref(exception)  # weak, because the exception keeps local variables alive
        return exception

    def is_importing(self, frame: FrameType | None) -> bool:
        """Return whether an import that began in this block must not be interrupted yet.

        Args:
            frame: the innermost frame of the main thread.
        """
        if _imports(frame) <= self._imports_around:
            return False
        now = time.monotonic()
        if self._import_seen_at is None:
            self._import_seen_at = now
        return now - self._import_seen_at < IMPORT_PATIENCE_S


def raise_in_main_thread(error: Exception) -> None:
    """Raise ``error`` in the main thread once, even outside of all blocks. Any thread may call this function.

    The main thread must have called `stay_ready`. The first signal may have no effect, for example because the main
    thread is just entering a block. So afterwards call `raise_if_due` again and again, until it returns False.
    """
    global _due
    _due = error
    signal.pthread_kill(_main, signal.SIGURG)


def raise_nothing() -> None:
    """Withdraw the exception that was passed to `raise_in_main_thread`, if it was not raised yet."""
    global _due
    _due = None


def raise_if_due() -> bool:
    """Try again to raise the exception that was passed to `raise_in_main_thread`.

    Returns:
        False if the exception was already raised or withdrawn, so that no further call is needed.
    """
    if _due is None:
        return False
    signal.pthread_kill(_main, signal.SIGURG)
    return True


class DeferredSignals:
    """A block of the main thread that is not interrupted, because Ctrl-C and SIGURG take effect only at its end.

    When one of these signals arrives, ``due`` is set and ``on_arrival`` is called, so that the block can end soon. If
    the block runs for another second, the next Ctrl-C takes effect at once. In other threads this is a plain block.

    Example::

        with DeferredSignals(on_arrival=poller.wake) as delayed:
            while delayed.due is None:
                poller.wait()
    """

    __slots__ = ("_before", "_on_arrival", "_since", "due")

    def __init__(self, on_arrival: Callable[[], object] = lambda: None) -> None:
        self._on_arrival = on_arrival
        self._before: Any = None  # the handler of Ctrl-C to restore at the end; None if the block does not replace it
        # The handler to call at the end and the number of the signal that has arrived; None if no signal has arrived.
        self.due: tuple[Callable[..., object], int] | None = None
        self._since = 0.0  # when the first Ctrl-C arrived; 0 before that

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
        """Record the handler to call at the end of the block. Ctrl-C takes precedence over SIGURG."""
        if self.due is None or signum == _SIGINT:
            self.due = handler, signum
        self._on_arrival()

    def put_back(self) -> None:
        """Restore the handler of Ctrl-C that was installed before the block."""
        if self._before is not None:
            replaced = _signal.signal(_SIGINT, self._before)
            if replaced != self._ctrl_c:  # code in the block has installed a handler, which must stay
                _signal.signal(_SIGINT, replaced)

    def _ctrl_c(self, signum: int, frame: FrameType | None) -> None:
        # Ctrl-C is deferred only while this block is in `_delayed`. This handler is also installed for a moment before
        # `__enter__` adds the block, and after `__exit__` removes the block. It even stays installed if the handler of
        # another signal raises an exception at this moment. In these cases Ctrl-C takes effect at once.
        if self not in _delayed:
            self.put_back()
            self._before(signum, frame)
            return
        now = time.monotonic()
        self._since = self._since or now
        self.note(self._before, signum)
        if now - self._since > PATIENCE_S:
            self.due = None
            self._before(signum, frame)


class RLock(_thread.RLock):  # type: ignore[misc]  # the stubs call the base class final
    """A reentrant lock that Ctrl-C does not leave taken, if a ``with`` statement takes it.

    Since Python 3.14, KeyboardInterrupt may be raised after the ``__enter__`` of a lock has taken the lock, but before
    the block begins, so that nothing releases it. The ``__enter__`` of this class then releases the lock itself. After
    its ``return``, Python raises nothing before the block begins. The lock is released by the ``__exit__`` of the base
    class, which is written in C, and so is not interrupted either.

    The block must not contain a loop, nor a comprehension with ``if``. Those belong in a function that the block calls.
    In Python 3.12 and later, the compiler may leave the jump back to the beginning of a loop out of the block. If
    KeyboardInterrupt is raised at such a jump, nothing releases the lock.
    """

    def __enter__(self) -> bool:  # type: ignore[override]  # a `with` statement passes no arguments
        before = self._recursion_count()  # type: ignore[attr-defined]  # missing in the stubs
        try:
            return self.acquire()
        except BaseException:
            if self._recursion_count() > before:  # type: ignore[attr-defined]
                self.release()
            raise


class Condition(threading.Condition):
    """A condition that Ctrl-C does not leave locked.

    The methods of `threading.Condition` are written in Python. So KeyboardInterrupt may be raised in ``__enter__``
    after it has taken the lock and before the block begins, and then nothing releases the lock. In this class a
    ``with`` statement calls the methods of an `RLock`.
    """

    def __init__(self) -> None:
        super().__init__(RLock())

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))


def _raise_in_the_outermost(signum: int, frame: FrameType | None) -> None:
    """Handle SIGURG: raise `Interrupted` if a block is to end, otherwise the exception of `raise_in_main_thread`."""
    global _is_handling
    # Another signal may come in the handler. It must raise nothing there: not in this module, because of UNINTERRUPTED,
    # and not in an audit hook, which Python calls when `_must_finish` reads an attribute of a frame.
    if _is_handling:
        return
    try:
        _is_handling = True
        if not (_is_forking or _must_finish(frame)):
            _raise_what_is_due(signum, frame)
    finally:
        _is_handling = False


def _raise_what_is_due(signum: int, frame: FrameType | None) -> None:
    """Raise the exception for which SIGURG was sent, if it is still to be raised at this frame."""
    global _due
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
    """Return None, as a weak reference to a dead exception does.

    `CancelScope._raised` is this function until the scope raises its first exception. After that, it is a weak
    reference to the last exception.
    """


def _must_finish(frame: FrameType | None) -> bool:
    """Return whether the handler of SIGURG must raise nothing at this innermost frame of the main thread."""
    # Functions of `contextlib` enter and leave context managers that are written as generators. An exception in such a
    # function could keep the context manager from being left. Functions of `weakref` call finalizers. A finalizer is
    # called only once, so an exception before its first line would lose it.
    if frame is not None and frame.f_code.co_filename in (contextlib.__file__, weakref.__file__):
        return True
    if frame is not None and _is_rmtree(frame):
        return True
    # A function of `threading` must finish if a module with UNINTERRUPTED has called it.
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("UNINTERRUPTED", False)


def _is_rmtree(frame: FrameType) -> bool:
    """Return whether this is a frame of `shutil.rmtree`.

    It must not be interrupted while it closes a descriptor. From Python 3.13 on, the descriptor could stay open. In
    older versions, `shutil.rmtree` could close the same number twice, and the second time the number may belong to a
    file that another thread has opened meanwhile.
    """
    return frame.f_code.co_filename == shutil.__file__ and "rmtree" in frame.f_code.co_qualname.lower()


def _imports(frame: FrameType | None) -> int:
    """Return the number of frames of the import system on the stack. It grows with each nested import."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == IMPORT_SYSTEM
        frame = frame.f_back
    return count


def keep_handler() -> None:
    """Install the handler of SIGURG for good.

    A worker calls this function, so that the blocks of its tasks need not check for the handler.
    """
    global _is_handler_kept
    hide_dropped_interrupts()
    _is_handler_kept = True
    signal.signal(signal.SIGURG, _raise_in_the_outermost)


@functools.cache  # because only the first call in a process must wrap the hook
def hide_dropped_interrupts() -> None:
    """Keep Python from printing an `Interrupted` that was dropped, for instance in ``__del__``.

    The message would only confuse users, because another `Interrupted` is raised; see `CancelScope`. For example, the
    iterator of a `DataLoader` waits for its workers in ``__del__``, and the interrupt that ends this wait is dropped.
    """
    former_hook = sys.unraisablehook

    def unraisablehook(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, Interrupted):
            former_hook(dropped)

    sys.unraisablehook = unraisablehook


def stay_ready(until: contextlib.ExitStack) -> bool:
    """Install the handler of SIGURG, so that other threads can call `raise_in_main_thread`.

    When the `ExitStack` ``until`` is closed, it restores the former handler.

    Returns:
        False if this is not the main thread, because only the main thread may install handlers of signals.
    """
    if threading.get_ident() != _main:
        return False
    before = signal.signal(signal.SIGURG, _raise_in_the_outermost)
    raise_nothing()

    def put_back() -> None:
        raise_nothing()
        if threading.get_ident() == _main and not _running:  # a running block still needs the handler
            signal.signal(signal.SIGURG, before)

    until.callback(put_back)
    return True


def _begin_fork() -> None:
    """Keep the handler of SIGURG from raising in the functions that Python calls before and after a fork.

    If such a function raises, Python prints the exception and goes on. For example, a function of `logging` releases a
    lock after the fork. If this function were interrupted, `logging` would hold the lock for ever.

    Functions that were registered earlier than `_begin_fork` and `_end_fork` are protected. Before a fork, Python calls
    the registered functions in reverse order, so they run after `_begin_fork`. After the fork, Python calls them in
    order, so they run before `_end_fork`. To protect the functions of `logging`, this module imports `logging` before
    it registers its own functions.
    """
    global _is_forking
    _is_forking = True


def _end_fork() -> None:
    global _is_forking
    _is_forking = False


def _begin_anew() -> None:
    """Reset the state of this module in the child of a fork.

    The thread that has forked is the main thread of the child. The child leaves the `DeferredSignals` blocks in which
    the parent's main thread was.
    """
    global _main, _is_handling
    _end_fork()
    _main = threading.get_ident()
    _is_handling = False  # if the parent's main thread was in the handler, the child has no frame of the handler
    while _delayed:
        _delayed.pop().put_back()


_main = threading.main_thread().ident or 0  # the thread in which Python runs handlers of signals
_is_handling = False  # True while the handler of SIGURG runs
_is_handler_kept = False  # whether `keep_handler` was called; if so, blocks do not install the handler of SIGURG
_due: Exception | None = None  # set by `raise_in_main_thread`; None again once it was raised or withdrawn
_SIGINT = int(signal.SIGINT)
_running: list[CancelScope] = []  # the scopes that the main thread is in, the outermost first
_delayed: list[DeferredSignals] = []  # the blocks with deferred signals that the main thread is in, the innermost last
# Whether a thread runs the functions that Python calls before and after a fork. If so, the handler raises nothing.
_is_forking = False
os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_begin_anew)
