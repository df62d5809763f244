"""Where the main thread stands, as another thread sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from nn_parallel._engine.ranks.main_thread import location, stack

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
