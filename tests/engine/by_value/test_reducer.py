"""Objects that an import finds go by name; objects that cannot be sent are named in the error."""

from __future__ import annotations

import importlib.util
import linecache
import multiprocessing
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import cloudpickle
import pytest
import torch

from nn_parallel import ParallelExecutor, TransferError
from nn_parallel._engine.by_value import reducer
from nn_parallel._engine.by_value.reducer import is_importable
from tests.support.scripts import run_script, values


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; its modules are gone after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def _load(name: str, file: Path) -> types.ModuleType:
    """Import a file under a name, as Python's documentation says."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["os", "os.path", "posixpath", "builtins", "_thread", "torch", "torch.nn.functional", "torch.ops", "torch._C"],
)
def test_modules_of_python_and_torch_are_importable(name: str) -> None:
    """Frozen, built in, with a file, or made by their package."""
    importlib.import_module(name)
    module = sys.modules[name]
    assert is_importable(name) or is_importable(module.__name__)


def test_modules_are_importable_from_the_path(files: Path) -> None:
    """Packages, folders without an ``__init__``, and no longer once the path has changed."""
    for folder in ("package", "namespace"):
        (files / folder).mkdir()
        (files / folder / "inner.py").touch()
    (files / "package" / "__init__.py").touch()
    for name in ("package", "package.inner", "namespace", "namespace.inner"):
        importlib.import_module(name)
        assert is_importable(name)
    sys.path.remove(str(files))
    assert not any(map(is_importable, ("package", "package.inner", "namespace", "namespace.inner")))
    for name in ("namespace", "namespace.inner"):
        del sys.modules[name]


def test_modules_that_no_import_finds(files: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In `sys.modules` they are all the same."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "plug.py"
    elsewhere.touch()
    (files / "taken.py").touch()
    made = types.ModuleType("made_by_hand")
    sys.modules["made_by_hand"] = made
    try:
        _load("plug_of_test", elsewhere)
        _load("taken", elsewhere)  # an import would find another file
        assert not any(map(is_importable, ("made_by_hand", "plug_of_test", "taken", "__main__", "not_there")))
    finally:
        for name in ("made_by_hand", "plug_of_test", "taken"):
            sys.modules.pop(name, None)


def test_a_module_loaded_from_a_file(main: dict[str, Any], tmp_path: Path) -> None:
    """Its functions and classes go by value, by themselves and as attributes of the module."""
    (tmp_path / "plug.py").write_text(
        "K = 2\ndef apply(x): return x * K\nclass Item:\n def __init__(self, x): self.x = apply(x)\n"
    )
    main["plug"] = _load("plug_of_test", tmp_path / "plug.py")
    lines = [
        *("call(plug.apply, 3)", "call(lambda: plug.apply(4))", "call(plug.Item, 1).x", "call(lambda: plug.Item(5).x)"),
        *("! plug.K = 3", "call(plug.apply, 3)", "call(lambda m: m.apply(2), plug)", "call(lambda: plug) is plug"),
    ]
    try:
        assert values(main, "", lines) == "6 8 2 10 9 6 True"
    finally:
        del sys.modules["plug_of_test"]


def test_a_module_loaded_anew_under_the_same_name(main: dict[str, Any], tmp_path: Path) -> None:
    """Its globals are another dict, and nothing of the earlier one is left in them."""
    results = []
    main["plugs"] = plugs = []
    try:
        for k in (1, 2):
            (tmp_path / f"plug{k}.py").write_text(f"K = {k}\ndef apply(): return help()\ndef help(): return K\n")
            plugs.append(_load("plug_of_test", tmp_path / f"plug{k}.py"))
        with ParallelExecutor(num_workers=1, devices="cpu") as ex:
            for plug in (*plugs, *plugs):
                sys.modules["plug_of_test"] = plug
                results.append(ex.submit(plug.apply).result())
    finally:
        del sys.modules["plug_of_test"]
    assert results == [1, 2, 1, 2]


@pytest.mark.slow
def test_a_script_that_runpy_runs(tmp_path: Path) -> None:
    """Its names are a dict that belongs to no module afterwards."""
    (tmp_path / "other.py").write_text("K = 2\ndef apply(x): return x * K\ndef twice(x): return apply(apply(x))\n")
    code = """
import runpy
one, two = runpy.run_path("other.py"), runpy.run_path("other.py")
two["K"] = two["apply"].__globals__["K"] = 5
with ParallelExecutor(num_workers=1, devices="cpu") as ex: print(ex.run(one["twice"], 3), ex.run(two["twice"], 3))
"""
    assert run_script(code, tmp_path) == ["[12] [75]"]


SHARED = """
import threading
REGISTRY, CONFIG, LOCK, UNSET = {}, {"lr": 1}, threading.Lock(), object()
class Registry:
    def __init__(self): self.known = {}
    def add(self, x): self.known[x] = x
registry = Registry()
add = registry.add
MISSING = type("Missing", (), {"__module__": __name__})()
def look_up(x): return REGISTRY.get(x), registry.known.get(x)
"""


def test_objects_of_an_imported_module(main: dict[str, Any], files: Path) -> None:
    """Objects of the user's modules are data, but a lock and a mark cannot be copied: they are the module's own."""
    (files / "shared_of_test.py").write_text(SHARED)
    definitions = """
import shared_of_test
from shared_of_test import *
shared_of_test.cfg = cfg = {"put": "there"}
def put(x):
    REGISTRY[x] = x
    return look_up(x)
def same(): return LOCK is shared_of_test.LOCK, add.__self__ is registry, UNSET is shared_of_test.UNSET
def lr(): return CONFIG["lr"], cfg
def mark(x=MISSING): return x is shared_of_test.MISSING is MISSING
def unset(xs): return xs[0] is shared_of_test.UNSET
"""
    lines = [
        *("call(put, 'a')", "REGISTRY", "call(same)", "call(mark)", "call(mark, MISSING)", "call(unset, [UNSET])"),
        *("call(lambda: UNSET) is UNSET", "call(lr)", "! CONFIG['lr'] = 2", "call(lr)"),
    ]
    assert values(main, definitions, lines) == (
        "(None, None) {} (True, True, True) True True True True (1, {'put': 'there'}) (2, {'put': 'there'})"
    )


def test_objects_of_a_library(main: dict[str, Any]) -> None:
    """They are the library's own in a worker, also those with a state, and their methods."""
    definitions = """
import copyreg, os, random as library
from copyreg import dispatch_table
from os import environ
from random import random
def same(): return dispatch_table is copyreg.dispatch_table, environ is os.environ, random.__self__ is library._inst
"""
    lines = ["call(same)", "call(same)", "call(lambda: [random(), random()]) == call(lambda: [random(), random()])"]
    assert values(main, definitions, lines) == "(True, True, True) (True, True, True) False"


PROXY = """
class Proxy:
    @property
    def __dict__(self): raise RuntimeError("working outside of request context")
    @property
    def __class__(self): raise RuntimeError("working outside of request context")
request = Proxy()
"""


def test_a_proxy_of_a_library(main: dict[str, Any], files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flask's `request` raises at each access outside of a request. It is the library's own object in a worker."""
    (files / "proxy_of_test.py").write_text(PROXY)
    monkeypatch.setattr(reducer, "INSTALLED", (*reducer.INSTALLED, str(files)))
    definitions = """
import proxy_of_test
from proxy_of_test import request
def f(): return request is proxy_of_test.request
"""
    assert values(main, definitions, ["call(f)"]) == "True"


def test_an_object_that_the_script_puts_into_a_module(main: dict[str, Any], files: Path) -> None:
    """Another instance without a state, under the name of one that an import would make: not mistaken for it."""
    (files / "backend_of_test.py").write_text("class Slow: pass\nclass Fast: pass\nBACKEND = Slow()\n")
    definitions = """
import backend_of_test
backend_of_test.BACKEND = backend = backend_of_test.Fast()
def f(b): return type(b).__name__, type(backend).__name__
"""
    assert values(main, definitions, ["call(f, backend)"]) == "('Fast', 'Fast')"


def test_many_marks_stay_the_same_objects(main: dict[str, Any]) -> None:
    """In a default, a class, an argument and a result, however many others come after them."""
    definitions = """
MISSING = object()
class State: START = object(); NAMES = {START: "start"}
def f(x, default=MISSING): return default is MISSING, State.NAMES[State.START], len(x)
"""
    lines = [
        "call(f, [])",
        "! for _ in range(300): call(f, [object()])",
        "call(f, [])",
        "call(lambda: MISSING) is MISSING",
    ]
    assert values(main, definitions, lines) == "(True, 'start', 0) (True, 'start', 0) True"


def test_a_mark_that_only_a_method_reads(main: dict[str, Any]) -> None:
    """It is one object in the arguments and there, from the first call on."""
    definitions = (
        "MISSING = object()\nclass A:\n def check(self, x): return x is MISSING\ndef f(xs): return xs[1].check(xs[0])"
    )
    assert values(main, definitions, ["call(f, [MISSING, A()])", "call(f, [MISSING, A()])"]) == "True True"


def test_a_module_of_an_installation_under_another_name(main: dict[str, Any]) -> None:
    """No import finds it under that name."""
    definitions = """
import importlib.util, colorsys
spec = importlib.util.spec_from_file_location("colors_of_test", colorsys.__file__)
colors = sys.modules["colors_of_test"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(colors)
"""
    try:
        assert values(main, definitions, ["call(colors.rgb_to_yiq, 0, 0, 0)"]) == "(0.0, 0.0, 0.0)"
    finally:
        sys.modules.pop("colors_of_test", None)


def test_a_date_with_a_time_zone_of_the_script(main: dict[str, Any]) -> None:
    """It is no constant: its class is a definition."""
    definitions = """
import datetime
class Zone(datetime.tzinfo):
    def utcoffset(self, when): return datetime.timedelta(hours=2)
noon = datetime.datetime(2026, 1, 1, 12, tzinfo=Zone())
def f(): return noon.utcoffset().seconds
"""
    assert values(main, definitions, ["call(f)", "call(f)"]) == "7200 7200"


def test_what_a_library_makes_uses_the_library_s_own_globals(main: dict[str, Any], files: Path) -> None:
    """A closure of an imported module: its globals are not copied."""
    (files / "maker_of_test.py").write_text(
        "import threading\nLOCK, COUNT = threading.Lock(), [0]\ndef count(): return COUNT[0]\n"
        "def make(k):\n def f(x):\n  with LOCK: COUNT[0] += 1\n  return k * x\n return f\n"
    )
    lines = ["call(f, 3)", "call(lambda: (f(4), maker_of_test.count()))"]
    assert values(main, "import maker_of_test\nf = maker_of_test.make(2)", lines) == "6 (8, 2)"


def test_a_module_registered_with_cloudpickle(main: dict[str, Any], files: Path) -> None:
    """It goes by value, and an import of it in a worker is still that of the file."""
    (files / "mine_of_test.py").write_text(
        "K = 1\ndef f(): return K\ndef g():\n import mine_of_test\n return mine_of_test.K\n"
    )
    definitions = "import cloudpickle, mine_of_test\ncloudpickle.register_pickle_by_value(mine_of_test)"
    try:
        lines = ["call(mine_of_test.f)", "! mine_of_test.K = 2", "call(mine_of_test.f)", "call(mine_of_test.g)"]
        assert values(main, definitions, lines) == "1 2 1"
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules["mine_of_test"])


def test_the_source_of_a_notebook_s_cell(main: dict[str, Any]) -> None:
    """`inspect.getsource` and tracebacks show it in a worker, which has no such file."""
    source = "def cell(x):\n    return x + 1  # here\n"
    linecache.cache["<cell 1>"] = len(source), None, source.splitlines(True), "<cell 1>"
    try:
        exec(compile(source, "<cell 1>", "exec"), main)
        definitions = "import inspect\ndef look(): return inspect.getsource(cell)"
        assert values(main, definitions, ["call(look) == inspect.getsource(cell)"]) == "True"
    finally:
        del linecache.cache["<cell 1>"]


class _Node:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def _chain(length: int) -> Any:
    chain = None
    for _ in range(length):
        chain = _Node(chain)
    return chain


def test_what_is_nested_too_deeply_is_told(executor2: ParallelExecutor) -> None:
    """Instead of a RecursionError from somewhere."""
    with pytest.raises(TransferError, match=r"^Argument 0(\.inner){20} is a .*_Node and cannot .*deep recursion"):
        executor2.run(type, _chain(100_000))


def test_a_mock_travels(executor2: ParallelExecutor) -> None:
    """It has every attribute that one asks for."""
    mock = MagicMock(return_value=3)
    assert executor2.submit(lambda m: m(), mock).result() == 3


def test_a_connection_is_refused(executor2: ParallelExecutor) -> None:
    """As a bare number it would be another file in the worker."""
    here, there = multiprocessing.Pipe()
    with (
        here,
        there,
        pytest.raises(TransferError, match="Argument 0 is a multiprocessing.connection.Connection .*Manager"),
    ):
        executor2.submit(print, there).result()


@pytest.mark.slow
def test_shared_memory_under_the_other_strategy(tmp_path: Path) -> None:
    """``file_system``, which is what one sets against too many open files."""
    code = """
torch.multiprocessing.set_sharing_strategy("file_system")
t = torch.zeros(1000).share_memory_()
def bump(t): t += 1
with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    ex.run(bump, t)
    ex.submit(bump, t[5:7]).result()
print(t[4].item(), t[6].item())
"""
    assert run_script(code, tmp_path) == ["2.0 3.0"]


def test_a_model_that_was_put_and_its_optimizer_are_told(executor2: ParallelExecutor) -> None:
    """They are not tied in a worker, and steps would change nothing."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = executor2.put(model)
    with pytest.warns(RuntimeWarning, match="parameters of <Handle of a Linear> also in another object") as told:
        executor2.submit(lambda model, optimizer: None, handle, optimizer).result()
    assert told[0].filename == __file__
    both = executor2.put((model, optimizer))

    def is_tied(both: Any) -> bool:
        return both[1].param_groups[0]["params"][0] is both[0].weight

    assert executor2.submit(is_tied, both).result()


def test_annotations_send_types_only(main: dict[str, Any]) -> None:
    """A word in a text may be the name of anything: a lock, which cannot be sent, or a name that is not there."""
    definitions = """
import threading, typing
lock, Alias, LIMIT, Text = threading.Lock(), list[int], 3, "tuple[Inner]"
class Later: pass
class Inner: pass
def f(x: "how often the lock is taken", y: typing.Annotated[int, "guarded by lock"], z: "Undefined" = 1): return x
def g(x: "Later | Alias", y: "typing.Annotated[int, LIMIT]" = 1, z: "Text" = 1):
    hints = typing.get_type_hints(g, include_extras=True)
    return hints["x"] == Later | Alias, hints["y"].__metadata__, hints["z"] == tuple[Inner]
"""
    assert values(main, definitions, ["call(f, 1, 2)", "call(g, 1)"]) == "1 (True, (3,), True)"


ANNOTATED = """
import abc, dataclasses
class A(abc.ABC):
    x: int = 3
    def go(self, x: int): return x
@dataclasses.dataclass
class Node:
    v: int
    next: Node | None = None
def f(x: Undefined) -> int: return x
class Late: pass
def g(x: Late): return g.__annotations__["x"] is Late
"""
NEW_TYPES = {
    "an alias": (
        "type A = list[int] | str\ndef f(x: A): return A, str(A.__value__)",
        ["call(f, 1)[1]", "call(f, 1)[0] is A"],
        "list[int] | str True",
    ),
    "an alias that refers to itself": (
        "type Json = dict[str, Json] | str\ndef f(): return Json.__value__.__args__[0].__args__[1] is Json",
        ["call(f)"],
        "True",
    ),
    "an alias with a parameter": ("type G[T] = list[T] | None\ndef f(): return str(G[int])", ["call(f)"], "G[int]"),
    "a parameter with constraints": (
        "class B[T: (int, str)]: pass\ndef f(t=B.__type_params__[0]): return t.__constraints__, t.__infer_variance__",
        ["call(f)"],
        "((<class 'int'>, <class 'str'>), True)",
    ),
}


if sys.version_info >= (3, 12):

    @pytest.mark.parametrize("case", NEW_TYPES)
    def test_types_of_python_3_12(main: dict[str, Any], case: str) -> None:
        """They are the same objects in all calls, with all their parts."""
        definitions, lines, printed = NEW_TYPES[case]
        assert values(main, definitions, lines) == printed


if sys.version_info >= (3, 13):

    def test_a_default_of_a_type_parameter(main: dict[str, Any]) -> None:
        """It arrives."""
        definitions = "class B[T = int]: pass\ndef f(): return B.__type_params__[0].__default__"
        assert values(main, definitions, ["call(f)"]) == "<class 'int'>"


if sys.version_info >= (3, 14):

    def test_annotations_of_python_3_14(main: dict[str, Any]) -> None:
        """A call does not evaluate them for good, and needs none that cannot be evaluated."""
        lines = ["call(lambda: (A().go(2), Node(1).v))", "call(f, 1)", "call(g, 1)"]
        lines += ["! exec('class Late: pass', globals())", "g.__annotations__['x'] is Late"]
        assert values(main, ANNOTATED, lines) == "(2, 1) 1 True True"
