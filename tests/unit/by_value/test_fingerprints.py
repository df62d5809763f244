"""A function is sent again whenever something in it may be another than before, and otherwise not."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nn_parallel._engine.by_value import namespaces
from nn_parallel._engine.by_value.fingerprints import fingerprint
from nn_parallel._engine.by_value.function_cache import FUNCTIONS_KEPT
from nn_parallel._engine.by_value.namespaces import Stored
from nn_parallel._engine.by_value.packer import CallOptions, Packer
from nn_parallel._engine.pickling import loads

OPTIONS = CallOptions(pass_device=False, timeout_s=None)
PROGRAM = """
import math
x, listed, constant = 1, [0], (1, "a", 2.0)

def told(value):
    return repr(value() if callable(value) else value)

def helper(a=1, *, k=2):
    return told(a), told(k), told(x)

def other(a=1, *, k=2):
    return "another", told(a), told(k), told(x)

def make(held):
    def f(d=1, *, kd=2):
        def inner():
            return told(y), held
        try:
            unset = told(y)
        except NameError:
            unset = "unset"
        seen = told(x), told(held), told(d), told(kd), helper(), unset, told(constant), math.pi
        return seen, told(getattr(f, "note", None)), read_list()
    return f

def read_list():
    return None
"""
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.text(max_size=2),
    st.tuples(st.integers(0, 3), st.text(max_size=1)),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([int, math.pi, torch.float16, torch.Size([2]), functools.partial(int, "3"), str, dict]),
)
CHANGES = st.sampled_from(
    [
        *("x", "y", "del y", "constant", "held", "default", "keyword default", "note", "append", "read the list"),
        *("helper", "helper's default", "helper's code", "nothing"),
    ]
)


class Pool:
    """What a pool's parent and one worker do with a function, in this process."""

    def __init__(self) -> None:
        self.packer = Packer(lambda: None)
        for kept in (namespaces._spaces, namespaces._present, namespaces._functions):
            kept.clear()  # a new worker
        self.sent = 0  # how often a function went with a call, or to be kept

    def call(self, fn: Callable[..., Any]) -> Any:
        call = self.packer.pack(fn, (), {}, OPTIONS)
        for handle in call.handles:
            if handle.number not in namespaces.stored:
                namespaces.stored[handle.number] = Stored(functools.partial(loads, handle.payload.inline or b"", []))
                self.sent += handle.number == call.function
        *_, received, args, kwargs = loads(call.payload.inline or b"", [])
        self.sent += received is not None
        return (namespaces.stored_object(call.function).function() if call.function else received)(*args, **kwargs)


def _change(space: dict[str, Any], f: Any, kind: str, value: Any) -> None:
    helper = space["helper"]
    if kind in ("x", "y", "constant"):
        space[kind] = value
    elif kind == "del y":
        space.pop("y", None)
    elif kind == "held":
        f.__closure__[f.__code__.co_freevars.index("held")].cell_contents = value
    elif kind == "default":
        f.__defaults__ = (value,)
    elif kind == "keyword default":
        f.__kwdefaults__ = {"kd": value}
    elif kind == "note":
        f.note = value
    elif kind == "helper":
        space["helper"] = space["other"]
    elif kind == "helper's default":
        helper.__defaults__ = (value,)
    elif kind == "helper's code":
        helper.__code__ = space["other"].__code__
    elif kind == "append":
        space["listed"].append(1)
    elif kind == "read the list":
        exec("def read_list(): return repr(listed)", space)


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(CHANGES, VALUES), min_size=1, max_size=6))
def test_no_change_is_missed(steps: list[tuple[str, Any]]) -> None:
    """Whatever changes between two calls: workers run what a call here would run."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(PROGRAM, space)
    f, pool = space["make"](5), Pool()
    for kind, value in [("nothing", None), *steps]:
        _change(space, f, kind, value)
        for _ in range(3):
            assert pool.call(f) == f()


def _main(source: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch, "math": math}
    exec(source, space)
    return space


@pytest.mark.parametrize(
    "source",
    [
        "def f(): return torch.ones(2).sum().item()",
        "f = lambda: math.sin(0)",
        "limit = 1000\ndef g(x): return min(x, limit)\ndef f(): return g(2000)",
        "def f(n=3): return n and f(n - 1)",
        "from functools import partial\nf = partial(lambda a, b: a + b, 1, b=2)",
        "def outer(k):\n def f(): return [k for _ in range(3)]\n return f\nf = outer((1, 'a'))",
        "import logging\nlogger = logging.getLogger('x')\ndef f(): return logger.name",
        "class A:\n pass\nf = int",
    ],
)
def test_a_function_that_cannot_have_changed_is_sent_twice(source: str) -> None:
    """With the first call, and to be kept with the second: a function that is called once is not kept."""
    f, pool = _main(source)["f"], Pool()
    assert [pool.call(f) for _ in range(10)] == [f()] * 10
    assert pool.sent == 2


def test_a_new_function_of_the_same_code_is_not_sent_again() -> None:
    """A lambda in a loop is another object in each round, and the same function."""
    pool = Pool()
    for _ in range(10):
        assert pool.call(_main("f = lambda: 3")["f"]) == 3
    assert pool.sent == 10  # of another module each time
    space = _main("def make(k):\n return lambda: k")
    pool = Pool()
    assert [pool.call(space["make"](7)) for _ in range(10)] == [7] * 10
    assert pool.sent == 2


@pytest.mark.parametrize(
    "source",
    [
        "def make():\n n = 0\n def f():\n  nonlocal n\n  n += 1\n  return n\n return f\nf = make()",
        "def make(n):\n def f():\n  def g():\n   nonlocal n\n   n += 1\n  g()\n  return n\n return f\nf = make(0)",
        "f = lambda seen=[]: seen.append(1) or len(seen)",
        "def make():\n def g(): pass\n g.n = 0\n def f():\n  g.n += 1\n  return g.n\n return f\nf = make()",
        "def make():\n def g(): pass\n g.n = 0\n def f():\n  h = g\n  h.n += 1\n  return g.n\n return f\nf = make()",
        "def make():\n def g(): pass\n g.n = 0\n def f(h=(g, 1)):\n  h[0].n += 1\n  return g.n\n return f\nf = make()",
        "def add(h):\n h.n += 1\n return h.n\ndef make():\n def g(): pass\n g.n = 0\n return lambda: add(g)\n"
        "f = make()",
        "import functools\ndef add(h):\n h.n += 1\n return h.n\ndef make():\n def g(): pass\n g.n = 0\n"
        " return functools.partial(add, g)\nf = make()",
        "def make():\n def g(): pass\n g.n = 0\n def f():\n  setattr(g, 'n', g.n + 1)\n  return g.n\n return f\n"
        "f = make()",
        "def make():\n def f():\n  h = f\n  h.n = getattr(h, 'n', 0) + 1\n  return h.n\n return f\nf = make()",
    ],
)
def test_what_a_function_holds_itself_begins_anew_in_each_call(source: str) -> None:
    """What it changes in a worker does not depend on how often it was called there: no name leads to it."""
    f, pool = _main(source)["f"], Pool()
    assert [pool.call(f) for _ in range(4)] == [1] * 4


@pytest.mark.parametrize(
    "source",
    [
        "n = 0\ndef f():\n global n\n n += 1\n return n",
        "def f(seen=[]):\n seen.append(1)\n return len(seen)",
        "seen = []\ndef f():\n seen.append(1)\n return len(seen)",
        "def f():\n f.n = getattr(f, 'n', 0) + 1\n return f.n",
        "def g(): pass\ng.n = 0\ndef f():\n g.n += 1\n return g.n",
        "def g(): pass\nh = g\nh.n = 0\ndef f():\n h.n += 1\n return g.n",
    ],
)
def test_what_has_a_name_lives_on(source: str) -> None:
    """It is the same in each call, whether the function is sent each time or kept."""
    f, pool = _main(source)["f"], Pool()
    assert [pool.call(f) for _ in range(4)] == [1, 2, 3, 4]


def test_a_function_that_reads_itself_is_told_from_one_that_reads_a_number() -> None:
    """Where a function comes again in what it is made of, a number stands for it: for nothing else."""
    names, pool = _main("def f():\n return type(f).__name__"), Pool()
    f = names["f"]
    assert [pool.call(f) for _ in range(3)] == ["function"] * 3
    for names["f"] in (0, 1):
        assert pool.call(f) == "int"


def test_a_name_without_a_value_is_told_from_one_with_any() -> None:
    names, pool = _main("def f():\n try:\n  return str(x)\n except NameError:\n  return 'unset'"), Pool()
    f = names["f"]
    assert [pool.call(f) for _ in range(3)] == ["unset"] * 3
    for names["x"] in (None, 0, inspect.Parameter.empty):
        assert pool.call(f) == str(names["x"])


def test_a_method_in_c_of_a_class_of_the_script_is_one_that_can_change() -> None:
    """The class travels by value, and may be given another attribute at any time."""
    assert fingerprint(_main("class D(dict): pass\nmake = D.fromkeys\ndef f(): return make('a')")["f"]) is None
    assert fingerprint(_main("make = dict.fromkeys\ndef f(): return make('a')")["f"]) is not None


def test_a_partial_is_told_from_what_it_is_made_of() -> None:
    names, pool = _main("def f():\n return a, b, c, d, e"), Pool()
    f, made = names["f"], functools.partial(int)
    for values in ((made, functools.partial, 0, 0, int), (functools.partial, 0, 0, int, made)):
        names.update(zip("abcde", values, strict=True))
        for _ in range(3):
            assert repr(pool.call(f)) == repr(values)


def test_annotations_are_told_from_defaults() -> None:
    names, pool = _main("def f():\n return x"), Pool()
    f, names["x"], names["f"].__annotations__ = names["f"], "v", {"return": 1}
    assert [pool.call(f) for _ in range(3)] == ["v"] * 3
    f.__annotations__, f.__defaults__, names["x"] = {}, ("v",), 0
    assert pool.call(f) == 0


def test_methods_and_objects_are_never_kept() -> None:
    """There is no telling what a method of an object, or a callable object, will do."""
    assert fingerprint([].append) is None
    assert fingerprint(Pool().call) is None
    assert fingerprint(torch.nn.ReLU()) is None
    assert fingerprint(_main("class A:\n pass\nf = A")["f"]) is None
    assert fingerprint(types.FunctionType((lambda: [listed]).__code__, {"listed": [1]})) is None  # noqa: F821


def test_the_workers_forget_what_has_not_been_called_for_long() -> None:
    """The least recently used function goes."""
    packer = Packer(lambda: None)
    make = _main("def make(k):\n return lambda: k")["make"]
    functions = [make(str(k)) for k in range(FUNCTIONS_KEPT + 1)]
    for fn in functions:
        for _ in range(2):
            packer.pack(fn, (), {}, OPTIONS)
        packer.pack(functions[0], (), {}, OPTIONS)
    assert len(packer.forgotten) == 1
    assert packer.pack(functions[0], (), {}, OPTIONS).function
    assert not packer.pack(functions[1], (), {}, OPTIONS).function


def test_no_more_are_kept_where_another_thread_calls_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    packer = Packer(lambda: None)
    kept, keep = packer._functions, packer._keep
    make = _main("def make(k):\n return lambda: k")["make"]
    functions = [make(str(k)) for k in range(FUNCTIONS_KEPT)]
    for fn in functions:
        packer.pack(fn, (), {}, OPTIONS)

    def keep_as_another_calls(*args: Any) -> Any:
        packer.pack(make("another"), (), {}, OPTIONS)
        return keep(*args)

    monkeypatch.setattr(kept, "_keep", keep_as_another_calls)
    assert packer.pack(functions[-1], (), {}, OPTIONS).function
    for k in range(10):
        packer.pack(make(f"later {k}"), (), {}, OPTIONS)
    assert len(kept._known) == FUNCTIONS_KEPT


listed: list[int]
