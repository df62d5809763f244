"""Where what comes from outside is raised in the main thread: at the end of some blocks, and never in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nn_parallel._engine import interrupts as signals
from nn_parallel._engine.interrupts import CancelScope, Condition, DeferredSignals, Interrupted


@pytest.fixture(autouse=True)
def _same_handler() -> Iterator[None]:
    """Whatever happens in a block, Ctrl-C does afterwards what it did before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert not signals._delayed


@contextlib.contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    """A block in which ``handler`` is the signal's."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_ctrl_c_comes_at_the_end() -> None:
    """All of the block is done, and it has been told."""
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals(lambda: done.append("told")):
        signal.raise_signal(signal.SIGINT)
        done.append("done")
    assert done == ["told", "done"]


def test_an_inner_block_leaves_it_to_the_outer_one() -> None:
    """The outer one is not cut short at the end of the inner one."""
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals(lambda: done.append("outer")):
        with DeferredSignals(lambda: done.append("inner")):
            signal.raise_signal(signal.SIGINT)
        done.append("done")
    assert done == ["inner", "outer", "done"]


def test_one_more_is_raised_at_once_where_the_block_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second: whoever sees no effect presses it again."""
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals(lambda: None):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("done")
        monkeypatch.setattr(signals, "PATIENCE_S", 0.0)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["done"]


def test_a_block_that_another_signal_has_ended_holds_nothing_back() -> None:
    """Whatever the handler of that has raised, in the middle of the end."""
    delayed = DeferredSignals(pytest.fail)
    delayed.__enter__()
    signals._delayed.clear()  # as if it had been raised in the next step
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    """Nothing is raised that would not be raised otherwise."""
    with _handled(signal.SIGINT, signal.SIG_IGN), DeferredSignals(pytest.fail):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_set_in_the_block_stays() -> None:
    """Only what the block has put there is taken away."""
    with _handled(signal.SIGINT, signal.default_int_handler):
        with DeferredSignals(pytest.fail):
            signal.signal(signal.SIGINT, _mine)
        assert signal.getsignal(signal.SIGINT) is _mine


def _mine(*_: object) -> None:
    """A handler of the user's."""


def test_other_threads_are_not_concerned() -> None:
    """There it is a plain block, also while the main thread is in one."""
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def block() -> None:
        with DeferredSignals(pytest.fail):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_fork_by_another_thread_is_not_in_the_block() -> None:
    """What the main thread does here, nobody does in the child: nothing is held back there."""
    before = signal.getsignal(signal.SIGINT)
    codes = []

    def fork() -> None:
        if not (pid := os.fork()):
            os._exit(3 if signal.getsignal(signal.SIGINT) is before else 4)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with DeferredSignals(pytest.fail):
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [3]


def test_what_ends_a_block_around_it_waits_as_well() -> None:
    """`Interrupted` comes at the end too, though its handler is never replaced."""
    done = []
    block = CancelScope()
    with pytest.raises(Interrupted), block, DeferredSignals(lambda: done.append("told")):
        thread = threading.Thread(target=block.interrupt)
        thread.start()
        thread.join()
        done.append("done")
    assert done == ["told", "done"]


def test_ctrl_c_is_not_forgotten_for_what_comes_later() -> None:
    """A late signal of `CancelScope`, which has nothing to end, must not take its place."""
    late = _handled(signal.SIGURG, signals._raise_in_the_outermost)
    with late, pytest.raises(KeyboardInterrupt), DeferredSignals(lambda: None):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGURG)


def test_no_interrupt_leaves_a_condition_locked() -> None:
    """Signals that raise come at any step of a `with`; another thread can lock it each time."""

    def is_free() -> None:
        free.append(condition.acquire(timeout=5))
        condition.release()

    def interrupted(*_: object) -> None:
        handled.append(True)
        raise KeyboardInterrupt

    def lock_until_handled() -> None:  # not in the loop below, because `suppress` may not see what is raised at a jump
        while not handled:  # a destructor may have dropped what the handler has raised
            with condition:
                pass

    condition, free, handled = Condition(), list[bool](), list[bool]()
    with _handled(signal.SIGALRM, interrupted):
        for step in range(1000):
            handled.clear()
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + step * 1e-8)
                lock_until_handled()
            thread = threading.Thread(target=is_free)
            thread.start()
            thread.join()
            assert free.pop()


def test_no_interrupt_closes_a_descriptor_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shutil.rmtree` would: another thread may have opened one of the same number by then, and loses it."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own keeps the exception alive
    folder = tmp_path / "folder"
    with _handled(signal.SIGALRM, signals._raise_in_the_outermost):
        for step in range(500):
            block = CancelScope()
            with pytest.raises(Interrupted), block:
                block.interrupted = True
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + step * 1e-7, 1e-4)
                while True:
                    folder.mkdir(exist_ok=True)
                    shutil.rmtree(folder)
            signal.setitimer(signal.ITIMER_REAL, 0)


AUDITED = """
import signal, sys
from nn_parallel._engine.interrupts import CancelScope, Interrupted, keep_handler

signals = []

def hook(event, args):
    if event == "object.__getattr__" and args[1] == "f_code" and signals:
        signal.raise_signal(signals.pop())

protected = {"UNINTERRUPTED": True, "signal": signal}
exec("def finish(): signal.raise_signal(signal.SIGURG); print('finished')", protected)
keep_handler()
sys.addaudithook(hook)
scope = CancelScope()
try:
    with scope:
        scope.interrupted = True
        signals.append(signal.SIGURG)
        protected["finish"]()
        assert not signals
        signal.raise_signal(signal.SIGURG)
except Interrupted:
    print("interrupted")
"""


def test_an_audit_hook_does_not_make_the_handler_raise_where_it_must_not() -> None:
    """The handler looks at a frame, so Python calls the hook, as filelock has one. Another signal comes in the hook."""
    done = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("finished\ninterrupted\n", "")


FORKED = """
import os, signal, sys, threading
from nn_parallel._engine.interrupts import CancelScope, Interrupted, keep_handler

signals = []
in_the_handler = threading.Event()
forked = threading.Event()

def hook(event, args):
    if event == "object.__getattr__" and args[1] == "f_code" and signals and not in_the_handler.is_set():
        in_the_handler.set()
        forked.wait()

def fork():
    in_the_handler.wait()
    if child := os.fork():
        forked.set()
        os.waitpid(child, 0)
        return
    scope = CancelScope()
    try:
        with scope:
            scope.interrupted = True
            signal.raise_signal(signal.SIGURG)
    except Interrupted:
        print("interrupted", flush=True)
    os._exit(0)

keep_handler()
thread = threading.Thread(target=fork)
thread.start()
sys.addaudithook(hook)
signals.append(signal.SIGURG)
signal.raise_signal(signal.SIGURG)
thread.join()
"""


def test_a_child_that_another_thread_forks_while_the_handler_runs_can_be_interrupted() -> None:
    """The child has no frame of the handler."""
    done = subprocess.run([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "interrupted\n"


class Destroyed:
    """An object in whose destructor the block around it is interrupted."""

    def __init__(self, block: CancelScope) -> None:
        self._block = block

    def __del__(self) -> None:
        _interrupt(self._block)


def _interrupt(block: CancelScope, *_: object) -> None:
    """Interrupt ``block`` as another thread would, while the main thread is here."""
    block.interrupted = True
    signal.raise_signal(signal.SIGURG)


def _in_a_destructor(block: CancelScope) -> None:
    Destroyed(block)


def _in_a_weak_callback(block: CancelScope) -> None:
    weakref.finalize(contextlib.ExitStack(), _interrupt, block)  # an object that is gone at once


def _in_the_collector(block: CancelScope) -> None:
    one, two = Destroyed(block), Destroyed(block)
    one.other = two  # type: ignore[attr-defined]
    two.other = one  # type: ignore[attr-defined]
    del one, two
    gc.collect()


def _in_a_try_that_takes_all(block: CancelScope) -> None:
    with contextlib.suppress(BaseException):
        _interrupt(block)


kept: list[BaseException] = []


def _in_a_try_that_keeps_it(block: CancelScope) -> None:
    try:
        _interrupt(block)
    except BaseException as error:
        kept.append(error)


def _in_a_task_of_asyncio(block: CancelScope) -> None:
    async def work() -> None:
        _interrupt(block)

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.wait([task])
        kept.append(task.exception() or AssertionError())

    asyncio.run(main())


@pytest.mark.parametrize(
    "swallow",
    [
        _in_a_destructor,
        _in_a_weak_callback,
        _in_the_collector,
        _in_a_try_that_takes_all,
        _in_a_try_that_keeps_it,
        _in_a_task_of_asyncio,
    ],
)
def test_an_interrupt_that_python_swallows_comes_again(
    swallow: Callable[[CancelScope], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block ends at the next `interrupt`, though the exception of the first one was dropped."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own keeps the exception alive
    block = CancelScope()
    went_on = False
    with pytest.raises(Interrupted), block:
        swallow(block)
        went_on = True
        _interrupt(block)
    assert went_on


def test_an_interrupt_on_its_way_out_is_not_raised_twice() -> None:
    """A ``finally`` and what it calls run to their end, however often the block is interrupted meanwhile."""
    block = CancelScope()
    cleaned_up = 0
    with pytest.raises(Interrupted), block:
        try:
            _interrupt(block)
        finally:
            for _ in range(100):
                _interrupt(block)
                cleaned_up += 1
            with contextlib.suppress(KeyError):
                try:
                    raise KeyError  # in its context is what is on its way
                finally:
                    _interrupt(block)
                    cleaned_up += 1
    assert cleaned_up == 101
    _interrupt(block)  # after its end: nothing


def test_what_an_inner_block_has_raised_does_not_shield_the_outer_one() -> None:
    """While user code handles the error of the inner block, the outer one can be interrupted."""
    outer, inner = CancelScope(), CancelScope()
    with pytest.raises(Interrupted), outer:
        try:
            with inner:
                _interrupt(inner)
        except Interrupted:
            _interrupt(outer)
            pytest.fail("the outer block went on")


def test_a_scope_can_be_entered_again() -> None:
    """An exception that was raised in it before is of no account, wherever that is kept."""
    block = CancelScope()
    for _ in range(2):
        try:
            with block:
                _interrupt(block)
        except Interrupted as error:
            kept.append(error)
        else:
            pytest.fail("nothing was raised")
        block.interrupted = False


FORKING = """
import os, signal, threading, time
def release():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGURG})  # the signal arrives here
    released.append(True)
released = []
os.register_at_fork(after_in_parent=release)
from nn_parallel._engine.interrupts import CancelScope, Interrupted
scope = CancelScope()
try:
    with scope:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
        scope.interrupt()
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        print(released)
        threading.Thread(target=scope.interrupt).start()
        time.sleep(60)
except Interrupted:
    print("interrupted")
"""


def test_nothing_is_raised_in_what_python_calls_around_a_fork() -> None:
    """Python would go on without the rest of it: `logging` would never release its lock."""
    ended = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("[True]\ninterrupted\n", "")
