"""Where the main thread stands, as another thread sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from time import sleep
from typing import TypeVar

import pytest

from nn_parallel._engine.ranks.main_thread import CodeLocation, location, stack

T = TypeVar("T")


def _seen_while_waiting(look: Callable[[], T], is_it: Callable[[T], bool]) -> T:
    """The first that ``look`` gives in another thread, while this one waits, for which ``is_it`` holds."""
    found, is_found = list[T](), threading.Event()

    def look_until_it_is() -> None:
        while not is_found.is_set():
            if is_it(seen := look()):
                found.append(seen)
                is_found.set()

    thread = threading.Thread(target=look_until_it_is)
    thread.start()
    _wait(is_found)
    is_found.set()
    thread.join()
    return found[0]


def _wait(event: threading.Event) -> None:
    event.wait(10)


def test_the_innermost_line_outside_torch_and_this_package_is_named() -> None:
    """In no collective, and in no `initialize_ddp`."""
    seen = _seen_while_waiting(location, lambda location: location.caller == "wait")
    assert seen.function is None
    assert "threading.py:" in seen.site
    assert str(seen).startswith("in wait() at ")


def test_the_stack_begins_at_the_outermost_line() -> None:
    """Of the program that runs: the test, the function that it calls, and where that waits."""
    text = _seen_while_waiting(stack, lambda text: "in _wait\n" in text)
    calls = ["in test_the_stack_begins_at_the_outermost_line", "in _seen_while_waiting", "in _wait\n"]
    places = [text.index(call) for call in calls]
    assert places == sorted(places)


class _Work:
    """Its `wait` is C code, as that of a collective."""

    wait = staticmethod(time.sleep)


def _wait_for_work(work: type[_Work]) -> None:
    work.wait(0.5)


def _sleep_after_work(work: type[_Work]) -> None:
    work.wait(0)
    sleep(0.5)


@pytest.mark.parametrize(("function", "waits"), [(_wait_for_work, True), (_sleep_after_work, False)])
def test_a_call_of_wait_may_wait_for_other_ranks(function: Callable[[type[_Work]], None], waits: bool) -> None:
    """A later call on the same line of code does not: the other ranks need not do anything for it to end."""
    seen = list[CodeLocation]()
    looked = threading.Timer(0.25, lambda: seen.append(location()))
    looked.start()
    function(_Work)
    looked.join()
    assert (seen[0].caller, seen[0].may_wait) == (function.__name__, waits)
