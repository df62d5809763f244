"""The path to what cannot be pickled."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nn_parallel._engine.pickling import dumps
from nn_parallel.errors import TransferError

LOCK = threading.Lock()


class Holder:
    child: Any

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None:
        pass


@dataclass(slots=True)
class Slotted:
    guard: Any


def _closing_over(guard: Any) -> Callable[[], Any]:
    def fn() -> Any:
        return guard

    return fn


def _recursive(guard: Any) -> Callable[[int], Any]:
    def fn(n: int) -> Any:
        return fn(n - 1) if n else guard

    return fn


def _with_an_empty_cell(guard: Any) -> Callable[[], Any]:
    def fn() -> Any:
        return later, guard

    if guard is None:
        later = 1
    return fn


def _using_a_global() -> Callable[[], Any]:
    return lambda: LOCK.locked()


def _using_a_global_inside_a_comprehension() -> Callable[[], Any]:
    return lambda: [LOCK.locked() for _ in range(3)]


def _with_a_default(guard: Any) -> Callable[..., Any]:
    def fn(guard: Any = guard) -> Any:
        return guard

    return fn


def _with_a_keyword_default(guard: Any) -> Callable[..., Any]:
    def fn(*, guard: Any = guard) -> Any:
        return guard

    return fn


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (LOCK, "The object is a _thread.lock"),
        ({"a": 1, "b": LOCK}, "The object['b'] is a _thread.lock"),
        ([1, (2, LOCK)], "The object[1][1] is a _thread.lock"),
        (Holder(a=1, inner=Holder(guard=LOCK)), "The object.inner.guard is a _thread.lock"),
        (Holder(items={"x": [Holder(guard=LOCK)]}), "The object.items['x'][0].guard is a _thread.lock"),
        (Holder(guard=LOCK).method, "The object.__self__.guard is a _thread.lock"),
        (Slotted(LOCK), "The object.guard is a _thread.lock"),
        (functools.partial(print, LOCK), "The object.args[0] is a _thread.lock"),
        (collections.deque([LOCK]), "The object[0] is a _thread.lock"),
        (_closing_over(LOCK), "Closure variable 'guard' of _closing_over.<locals>.fn() is a _thread.lock"),
        (_closing_over([LOCK]), "Closure variable 'guard' of _closing_over.<locals>.fn()[0] is a _thread.lock"),
        ([_recursive(LOCK)], "Closure variable 'guard' of _recursive.<locals>.fn() is a _thread.lock"),
        (_with_an_empty_cell(LOCK), "Closure variable 'guard' of _with_an_empty_cell.<locals>.fn() is a _thread.lock"),
        (_using_a_global(), "Global 'LOCK' of _using_a_global.<locals>.<lambda>() is a _thread.lock"),
        (_using_a_global_inside_a_comprehension(), "Global 'LOCK' of _using_a_global_inside_a_comprehension"),
        (_with_a_default(LOCK), "'guard' of _with_a_default.<locals>.fn() is a _thread.lock"),
        (_with_a_keyword_default(LOCK), "'guard' of _with_a_keyword_default.<locals>.fn() is a _thread.lock"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_path(obj: Any, path: str) -> None:
    """The error gives the way to the innermost culprit, its type, and pickle's own words as the cause."""
    with pytest.raises(TransferError) as caught:
        dumps(obj)
    assert path in str(caught.value)
    assert str(caught.value).endswith("cannot be sent to another process: cannot pickle '_thread.lock' object")
    assert isinstance(caught.value.__cause__, TypeError)


class Odd:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def test_a_repr_that_raises_does_not_hide_the_error() -> None:
    """The error for the user is the TransferError, whatever else is wrong with the object."""

    def fn(odd: Any = Odd(), guard: Any = LOCK) -> Any:  # noqa: B008
        return odd, guard

    with pytest.raises(TransferError, match=r"is a _thread\.lock"):
        dumps(fn)


class Closed:
    """As a proxy whose connection is closed: it raises whatever is read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("the connection is closed")


class Endless:
    def __getattribute__(self, name: str) -> Any:
        return getattr(self, name)


@pytest.mark.parametrize(("kind", "words"), [(Closed, "the connection is closed"), (Endless, "recursion")])
def test_an_object_whose_attributes_cannot_be_read(kind: type, words: str) -> None:
    """The search for the part that cannot be pickled reads attributes, and does not fail by them."""
    with pytest.raises(TransferError, match=words):
        dumps([kind()])


def test_named_parts_begin_the_path() -> None:
    """The caller of `dumps` names what the user passed."""
    parts = {"the function": print, "argument 1": [0], "argument 'x'": {"k": LOCK}}
    with pytest.raises(TransferError, match=r"^Argument 'x'\['k'\] is a _thread\.lock and cannot be sent"):
        dumps(tuple(parts.values()), lambda: parts)


def test_a_cycle_does_not_hide_the_culprit() -> None:
    """A child that refers to its parent is not the culprit, only on the way to it."""
    parent = Holder(child=Holder(), guard=LOCK)
    parent.child.parent = parent
    with pytest.raises(TransferError, match=r"guard is a _thread\.lock"):
        dumps(parent)


@given(
    steps=st.lists(
        st.tuples(st.just("dict"), st.text() | st.integers() | st.tuples(st.text(), st.booleans()))
        | st.tuples(st.sampled_from(["list", "tuple"]), st.integers(0, 3))
        | st.tuples(st.just("attribute"), st.sampled_from(["weights", "_private", "x1"])),
        max_size=6,
    )
)
def test_the_path_leads_to_the_culprit_in_any_nest(steps: list[tuple[str, Any]]) -> None:
    """However deep and among whatever else, the path is what the user would write to get at it."""
    obj: Any = LOCK
    path = ""
    for kind, key in reversed(steps):
        if kind == "dict":
            obj, path = {"before": [1], key: obj, 0.5: torch.ones(1)}, f"[{key!r}]{path}"
        elif kind == "attribute":
            obj, path = Holder(before={"a": None}, **{key: obj}), f".{key}{path}"
        else:
            obj, path = [*range(key), obj, "after"], f"[{key}]{path}"
            obj = tuple(obj) if kind == "tuple" else obj
    with pytest.raises(TransferError) as caught:
        dumps(obj)
    assert str(caught.value).startswith(f"The object{path} is a _thread.lock and cannot be sent")
