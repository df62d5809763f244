"""Definitions live on in a worker, data comes with each call, and changes in the script are seen by the next call."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from nn_parallel import ParallelExecutor
from tests.support.notebook import run_cells
from tests.support.scripts import HEADER, run_script, values

LIVES_ON = {
    "a global that a task sets": (
        "n = 0\ndef f():\n global n\n n += 1\n return n",
        ["call(f)", "call(f)", "call(lambda: n)", "call(lambda: f())", "n"],
        "1 2 2 3 0",
    ),
    "a name that only workers have": (
        "def put(x):\n global held\n held = x\ndef get(): return held",
        ["call(put, 3)", "call(get)", "'held' in globals()"],
        "None 3 False",
    ),
    "not a list": (
        "seen = []\ndef f():\n seen.append(1)\n return len(seen)",
        ["call(f)"] * 3 + ["len(seen)"],
        "1 1 1 0",
    ),
    "a list that a task binds": (
        "seen = None\ndef f():\n global seen\n seen = [*(seen or ()), 1]\n return len(seen)",
        ["call(f)"] * 3 + ["seen"],
        "1 2 3 None",
    ),
    "a cache": (
        """
@functools.cache
def load(x):
    print("load", x)
    return [x]
def f(x): return load(x) is load(x)
""",
        ["call(f, 1)", "call(f, 1)", "call(load, 1)", "call(f, 2)"],
        "load 1 True True [1] load 2 True",
    ),
    "a cache that calls itself": (
        "@functools.lru_cache(maxsize=None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
        ["call(fib, 80)", "call(lambda: fib.cache_info().currsize)"],
        "23416728348467685 81",
    ),
    "an attribute of a class": (
        """
class Model:
    loaded = None
    @classmethod
    def get(cls):
        if cls.loaded is None:
            print("load")
            cls.loaded = [1]
        return cls.loaded
""",
        ["call(Model.get)", "call(lambda: Model.get())", "call(Model().get)", "Model.loaded"],
        "load [1] [1] [1] None",
    ),
    "an attribute of a function": (
        "def f():\n f.n = getattr(f, 'n', 0) + 1\n return f.n",
        ["call(f)", "call(f)", "call(lambda: f())"],
        "1 2 3",
    ),
    "through another name": (
        "def g(): pass\nh = g\ng.n = 0\ndef f():\n h.n += 1\n return g.n",
        ["call(f)", "call(f)", "call(lambda: (h is g, g.n))"],
        "1 2 (True, 2)",
    ),
    "the identity of a class": (
        """
class A: pass
kept = None
def keep(a):
    global kept
    kept = a
def is_kept(): return isinstance(kept, A), type(kept) is A
""",
        ["call(keep, A())", "call(is_kept)", "type(call(lambda: kept)) is A"],
        "None (True, True) True",
    ),
    "an enum": (
        "import enum\nclass E(enum.Enum):\n a = 1\n b = 2\nheld = E.a\ndef f(e): return e is E.a, held is E.a",
        ["call(f, E.a)", "call(f, E.b)", "call(lambda: E.a) is E.a"],
        "(True, True) (False, True) True",
    ),
    "what shares an object, for the time of a call": (
        """
model = torch.nn.Linear(1, 1, bias=False)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
def step():
    before = model.weight.item()
    opt.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
    return round(before - model.weight.item(), 3)
def weight(): return model.weight.item()
first = model.weight.item()
""",
        ["call(weight) == first", "call(step)", "call(step)", "round(first - call(weight), 3)"],
        "True 1.0 1.0 0.0",
    ),
    "what is shared with an argument": (
        """
model = torch.nn.Linear(1, 1, bias=False)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
def step(given):
    before = given.weight.item()
    given(torch.ones(1, 1)).sum().backward()
    opt.step()
    return round(before - given.weight.item(), 3)
""",
        ["call(step, model)", "call(step, model)"],
        "1.0 1.0",
    ),
    "two globals that are one": (
        "a = []\nb = a\ndef f():\n a.append(1)\n return b",
        ["call(f)", "call(f)", "call(lambda: b is a)"],
        "[1] [1] True",
    ),
    "not what a lambda or a nested function holds": (
        """
def make():
    seen, n = [], 0
    def f():
        nonlocal n
        n += 1
        seen.append(n)
        return n, seen
    return f
g = make()
""",
        ["call(lambda seen=[]: seen.append(1) or seen)"] * 2 + ["call(make())", "call([g][0])", "call([g][0])"],
        "[1] [1] (1, [1]) (1, [1]) (1, [1])",
    ),
}


@pytest.mark.slow
def test_a_global_that_the_initializer_sets_is_what_functions_read(tmp_path: Path) -> None:
    """As with the standard library's executors."""
    code = """
MODEL = None
def load():
    global MODEL
    MODEL = 7
def predict(x): return MODEL and MODEL * x
with ParallelExecutor(num_workers=2, devices="cpu", initializer=load) as pool: print(list(pool.map(predict, [1, 2, 3])))
"""
    assert run_script(code, tmp_path) == ["[7, 14, 21]"]


@pytest.mark.parametrize("what", LIVES_ON)
def test_it_lives_on_in_a_worker(what: str, main: dict[str, Any]) -> None:
    """From call to call and from function to function, as the parent has not changed it."""
    definitions, lines, printed = LIVES_ON[what]
    assert values(main, definitions, lines) == printed


IS_SEEN = {
    "a number": ("x = 1\ndef f(): return x", ["call(f)", "! x = 2", "call(f)", "! x = 1", "call(f)"], "1 2 1"),
    "a number that a task has set": (
        "x = 1\ndef f(): return x\ndef put(y):\n global x\n x = y",
        ["call(put, 5)", "call(f)", "call(f)", "! x = 2", "call(f)", "call(put, 6)", "call(f)", "! x = 1", "call(f)"],
        "None 5 5 2 None 6 1",
    ),
    "a number, as often as it is another": (
        "x = 1\ndef f(): return x\ndef g(): return x",
        [
            "[call(f), call(g), call(f), call(g)]",
            "! x = 2",
            "[call(f), call(g), call(f)]",
            "! x = 1",
            "[call(f), call(g)]",
        ],
        "[1, 1, 1, 1] [2, 2, 2] [1, 1]",
    ),
    "a list, in place": (
        "x = [1]\ndef f(): return x",
        ["call(f)", "! x.append(2)", "call(f)", "! x.clear()", "call(f)"],
        "[1] [1, 2] []",
    ),
    "a list, made anew": (
        "x = []\ndef f():\n x.append(1)\n return x",
        ["call(f)", "call(f)", "! x = [0]", "call(f)"],
        "[1] [1] [0, 1]",
    ),
    "one of two": (
        "a, b = [], []\ndef f():\n b.append(1)\n return a, b",
        ["call(f)", "! a.append(0)", "call(f)"],
        "([], [1]) ([0], [1])",
    ),
    "a tensor, in place": (
        "x = torch.zeros(100_000)\ndef f():\n x.add_(1)\n return int(x.sum())",
        ["call(f)", "call(f)", "! x[0] = 1", "call(f)"],
        "100000 100000 100001",
    ),
    "an attribute of an object": (
        "class C: pass\nc = C()\nc.lr = 1\ndef f(): return c.lr",
        ["call(f)", "! c.lr = 2", "call(f)"],
        "1 2",
    ),
    "an attribute of a class": (
        "class C:\n lr = 1\ndef f(): return C.lr, hasattr(C, 'more')",
        ["call(f)", "! C.lr, C.more = 2, 0", "call(f)", "call(f)", "! del C.more", "call(f)"],
        "(1, False) (2, True) (2, True) (2, False)",
    ),
    "an attribute of a class, in place": (
        "class C:\n known = {}\n def get(self): return self.known",
        ["call(C().get)", "! C.known['a'] = [1]", "call(C().get)", "! C.known['a'].append(2)", "call(C().get)"],
        "{} {'a': [1]} {'a': [1]}",
    ),
    "a registry of subclasses": (
        "class Base:\n known = {}\n def __init_subclass__(cls): Base.known[cls.__name__] = cls\n"
        "def names(): return sorted(Base.known)",
        ["call(names)", "! exec('class Sub(Base): pass', globals())", "call(names)"],
        "[] ['Sub']",
    ),
    "a variable and a default of a method": (
        "def make(lr):\n class C:\n  def get(self, k=1): return lr, k\n  def set(new):\n   nonlocal lr\n   lr = new\n"
        " return C\nC = make([0.1])\ndef f(): return C().get()",
        [
            *("call(f)", "! C().get()[0].append(2)", "call(f)", "! C.set(5)", "call(f)"),
            *("! C.get.__defaults__ = (2,)", "call(f)"),
        ],
        "([0.1], 1) ([0.1, 2], 1) (5, 1) (5, 2)",
    ),
    "what a decorator holds": (
        "def counted(fn):\n @functools.wraps(fn)\n def wrapper(): return fn(), n.value\n n = Counter()\n"
        " wrapper.n = n\n return wrapper\nclass Counter: value = 0\n@counted\ndef f(): return 1",
        ["call(f)", "! f.n.value = 3", "call(f)"],
        "(1, 0) (1, 3)",
    ),
    "a bound method of a decorated method": (
        "class Net:\n k = 1\n @torch.no_grad()\n def predict(self): return self.k\nnet = Net()\npredict = net.predict\n"
        "def f(p=predict): return predict(), p(), net.predict()",
        ["call(f)", "! net.k = 2", "call(f)"],
        "(1, 1, 1) (2, 2, 2)",
    ),
    "a variable that functions share": (
        "def counted(fn):\n n = 0\n @functools.wraps(fn)\n def wrapper():\n  nonlocal n\n  n += 1\n  return n\n"
        " def count(): return n\n return wrapper, count\n@counted\ndef pair(): pass\nwrapper, count = pair\n"
        "wrapper.__qualname__, count.__qualname__ = 'wrapper', 'count'\ndef f(): return wrapper(), wrapper(), count()",
        ["call(f)", "! wrapper()", "call(f)"],
        "(1, 2, 2) (2, 3, 3)",
    ),
    "a late method of several types": (
        "class F:\n @functools.singledispatchmethod\n def show(self, x): return 'any'\ndef f(): return F().show('a')",
        ["call(f)", "! F.show.register(str)(lambda self, x: 'str')", "call(f)"],
        "any str",
    ),
    "an object that was empty": (
        "import argparse\nclass State: pass\nclass Slots: __slots__ = ('n',)\n"
        "a, b, c = State(), argparse.Namespace(), Slots()\n"
        "def f(): return vars(a), vars(b), getattr(c, 'n', None)\ndef g():\n a.seen = 1\n return a",
        *(["call(f)", "! a.n = []; b.n = c.n = 2", "call(f)", "! a.n.append(1)", "vars(call(g))", "call(f)"],),
        "({}, {}, None) ({'n': []}, {'n': 2}, 2) {'n': [1], 'seen': 1} ({'n': [1]}, {'n': 2}, 2)",
    ),
    "an attribute of a function": (
        "def f(): return f.n\nf.n = 1",
        ["call(f)", "call(f)", "! f.n = 2", "call(f)"],
        "1 1 2",
    ),
    "through another name": (
        "class g: n = 1\nh = g\ndef f(): return g.n",
        ["call(f)", "! h.n = 2", "call(f)"],
        "1 2",
    ),
    "a function": (
        "def g(): return 1\ndef f(): return g()",
        [
            *("call(f)", "call(f)", "! exec('def g(): return 2', globals())", "call(f)"),
            *("! g.__code__ = (lambda: 3).__code__", "call(f)", "call(g)"),
        ],
        "1 1 2 3 3",
    ),
    "a function that others hold": (
        "def f(x=1): return x\ng, held = f, [f]\ndef h(): return g(), held[0]()",
        [
            "call(h)",
            "! f.__defaults__ = (2,)",
            "call(h)",
            "! exec('def f(): return 3', globals())",
            "call(h)",
            "call(f)",
        ],
        "(1, 1) (2, 2) (2, 2) 3",
    ),
    "a default": (
        "def f(x=1): return x",
        ["call(f)", "call(f)", "! f.__defaults__ = (2,)", "call(f)", "call(f)"],
        "1 1 2 2",
    ),
    "a name that is deleted": (
        "x = 1\ndef f():\n try: return x\n except NameError: return 'unset'",
        ["call(f)", "! del x", "call(f)", "call(f)", "! x = 2", "call(f)"],
        "1 unset unset 2",
    ),
    "what a call was made with": (
        "x = 0\ndef f(): return x\nfutures = []",
        [
            "! for x in range(50): futures.append(ex.submit(f))",
            "[future.result() for future in futures] == [*range(50)]",
        ],
        "True",
    ),
    "what belongs to a cached function": (
        "x = 1\n@functools.cache\ndef f(): return x\ndef g(): return f()",
        ["call(g)", "! x = 2", "call(g)", "! f = functools.cache(lambda: x)", "call(g)"],
        "1 1 2",
    ),
}


@pytest.mark.parametrize("what", IS_SEEN)
def test_a_change_in_the_parent_is_seen_by_the_next_call(what: str, main: dict[str, Any]) -> None:
    """Whether it is bound anew or changed in place; and nothing else is set back by that."""
    definitions, lines, printed = IS_SEEN[what]
    assert values(main, definitions, lines) == printed


TRAVELS = {
    "recursion between functions": (
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)",
        ["call(even, 10)", "call(odd, 10)", "call(even, 10)"],
        "True False True",
    ),
    "functions that hold each other": (
        "def a(): return a.b.__name__\ndef b(): return b.a.__name__\na.b, b.a = b, a",
        ["call(a)", "call(b)", "call(a)"],
        "b a b",
    ),
    "decorated functions": (
        """
def twice(fn):
    @functools.wraps(fn)
    def wrapper(*args): return 2 * fn(*args)
    return wrapper
k = 3
@twice
def f(x): return k * x
@torch.no_grad()
def g(x): return torch.is_grad_enabled(), f(x)
""",
        ["call(f, 1)", "call(g, 1)", "! k = 4", "call(f, 1)", "call(g, 1)", "call(g, 1)"],
        "6 (False, 6) 8 (False, 8) (False, 8)",
    ),
    "functions for one rank": (
        "from nn_parallel import on_rank\nk = 1\n@on_rank(0)\ndef f(): return k\ndef g(): return f()",
        ["call(f)", "call(g)", "! k = 2", "call(f)", "call(g)", "call(g)"],
        "1 1 2 2 2",
    ),
    "a base that knows its subclasses": (
        """
class Base:
    known = {}
    def __init_subclass__(cls): Base.known[cls.__name__] = cls
class Sub(Base): pass
class Other(Base):
    def names(self): return sorted(Base.known), Base.known['Other'] is type(self), super().__init__()
""",
        ["call(Other().names)", "call(lambda: Sub.known['Sub'] is Sub)", "call(Other().names)"],
        "(['Other', 'Sub'], True, None) True (['Other', 'Sub'], True, None)",
    ),
    "a metaclass, an abstract class and a dataclass": (
        """
import abc, dataclasses
class Meta(type):
    def __call__(cls, *args): return [super().__call__(*args)]
class M(metaclass=Meta): pass
class A(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
@dataclasses.dataclass
class D(A):
    x: int = 1
    def f(self): return self.x
class V: pass
A.register(V)
def f(): return len(M()), D(2).f(), isinstance(V(), A), D(1) == D()
""",
        ["call(f)", "call(f)", "call(D) == D()"],
        "(1, 2, True, True) (1, 2, True, True) True",
    ),
    "a class of a function's body": (
        """
def make():
    class Local:
        def __init__(self, x): self.x = x
    return lambda x: Local(x)
""",
        ["call(make(), 3).x", "ex.submit(make(), 4).result().x"],
        "3 4",
    ),
    "an object that was put": (
        "k = 1\nclass C:\n def f(self): return k\n",
        [
            *("! handle = ex.put(C())", "call(lambda c: c.f(), handle)", "! k = 2", "call(lambda c: c.f(), handle)"),
            *("call(lambda c: isinstance(c, C), handle)", "! C.f = lambda self: 5", "call(lambda c: c.f(), handle)"),
        ],
        "1 2 True 5",
    ),
    "a function as an argument": (
        "k = 1\ndef f(): return k\ndef g(h): return h(), h is f",
        ["call(g, f)", "! k = 2", "call(g, f)", "call(g, f)"],
        "(1, True) (2, True) (2, True)",
    ),
    "exceptions of the script": (
        "class E(Exception):\n n = 0\ndef f():\n E.n += 1\n raise E(E.n)",
        ["! for _ in range(2):\n     try: ex.submit(f).result()\n     except E as error: print(error, E.n)"],
        "1 0 2 0",
    ),
}


@pytest.mark.parametrize("what", TRAVELS)
def test_it_travels(what: str, main: dict[str, Any]) -> None:
    definitions, lines, printed = TRAVELS[what]
    assert values(main, definitions, lines) == printed


CHANGES = {
    "an attribute of a cached function": (
        "@functools.cache\ndef f(): return 1",
        ["call(f)", "! f.note = 1", "call(f)", "call(f)", "! f.note = 2", "call(lambda: (f(), f.note))"],
        "1 1 1 (1, 2)",
    ),
    "defaults of a lambda that was called before": (
        "f = lambda k=2: k",
        ["call(f)", "call(f)", "call(f)", "! f.__defaults__ = (7,)", "call(f)", "call(f)"],
        "2 2 2 7 7",
    ),
    "a global that only an inner function binds": (
        "state = None\ndef make():\n def put():\n  global state\n  state = 5\n return put\n",
        ["call(make())", "call(lambda: state)", "call(lambda: state)"],
        "None 5 5",
    ),
    "names that each module has": (
        '"""Say it."""\ndef f(): return __doc__, __name__',
        ["! __doc__ = 'Say it.'", "call(f)"],
        "('Say it.', '__main__')",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_it_is_followed(what: str, main: dict[str, Any]) -> None:
    definitions, lines, printed = CHANGES[what]
    assert values(main, definitions, lines) == printed


def test_an_import_path_that_grows_is_there_before_what_needs_it(main: dict[str, Any], tmp_path: Path) -> None:
    """A function that reads a module which was found on the new part of the path, from its first call on."""
    (tmp_path / "found_late_of_test.py").write_text("K = 1\n")
    main["folder"] = str(tmp_path)
    before = [*sys.path]
    lines = [
        *("call(len, 'a')", "! sys.path.append(folder)", "! import found_late_of_test"),
        *["call(lambda: found_late_of_test.K)"] * 3,
    ]
    try:
        assert values(main, "", lines) == "1 1 1 1"
    finally:
        sys.path[:] = before
        sys.modules.pop("found_late_of_test", None)


def test_calls_leave_nothing_in_a_worker(main: dict[str, Any]) -> None:
    """Neither arguments, nor the data that lambdas read."""
    definitions = """
from nn_parallel._engine.by_value import globals as received
data = bytes(1000)
def count(): return len(received.stored), len(received.keys._objects), len(received._received_namespaces)
"""
    lines = [
        "! for _ in range(3): call(count)",
        "! first = call(count)",
        "! for number in range(50): call(lambda x: len(data), [number])",
        "! after = call(count)",
        "[b - a < 10 for a, b in zip(first, after)]",
    ]
    assert values(main, definitions, lines) == "[True, True, True]"


@pytest.mark.slow
def test_workers_that_come_later_get_all_they_need(tmp_path: Path) -> None:
    """Of a resize, in the place of a dead one, of another pool: first the initializer, then what the parent has now."""
    code = """
x, held = 1, None
def load():
    global held
    held = [x]
def f(): return x, held
def die(): os._exit(3)
with ParallelExecutor(num_workers=1, devices="cpu", initializer=load) as ex:
    print(ex.run(f))
    x = 2
    print(ex.run(f))
    ex.resize(2)
    print(ex.run(f))
    try: ex.submit(die).result()
    except RuntimeError as error: print(type(error).__name__)
    print(ex.run(f))
    with ParallelExecutor(num_workers=1, devices="cpu", initializer=load) as other: print(other.run(f))
    x = 3
    print(ex.run(f))
"""
    assert run_script(code, tmp_path) == [
        "[(1, [1])]",
        "[(2, [1])]",
        "[(2, [1]), (2, [1])]",
        "WorkerDiedError",
        "[(2, [1]), (2, [1])]",
        "[(2, [2])]",
        "[(3, [1]), (3, [1])]",
    ]


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    """With the way to it, from the function that reads it, however many there are in between."""
    code = """
class Config: guard = threading.Lock()
class Holder: pass
holder = Holder()
holder.items = {"x": [threading.Lock()]}
LOCK = threading.Lock()
def f(): return LOCK
def g(): return f()
def h(): return holder
def k(): return Config
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    for fn in (f, g, h, k):
        for _ in range(2):
            try: ex.run(fn)
            except RuntimeError as error: print(error)
    print(ex.run(len, "abc"))
"""
    said = "is a _thread.lock and cannot be sent to another process: cannot pickle '_thread.lock' object"
    expected = (
        ["Global 'LOCK' of f()"] * 4 + ["Global 'holder' of h().items['x'][0]"] * 2 + ["Class 'Config'.guard"] * 2
    )
    assert run_script(code, tmp_path) == [*(f"{path} {said}" for path in expected), "[3]"]


@pytest.mark.slow
def test_a_notebook_s_newest_definition_counts() -> None:
    """Functions and classes are defined anew cell after cell."""
    cells = [
        f"{HEADER}\nex = ParallelExecutor(num_workers=1, devices='cpu')\nseen = []",
        "class A:\n def f(self): return 1\ndef g(): return A().f()\ndef f():\n seen.append(1)\n return g(), len(seen)",
        "print(ex.run(f), ex.run(f))",
        "class A:\n def f(self): return 2",
        "print(ex.run(f), ex.run(lambda a: isinstance(a, A), A()))",
        "def g(): return 3",
        "print(ex.run(f))",
        "seen = [0]",
        "print(ex.run(f))",
        "ex.shutdown()",
    ]
    printed = [text.strip() for text, error in run_cells(*cells) if error is None]
    assert printed == ["", "", "[(1, 1)] [(1, 1)]", "", "[(2, 1)] [True]", "", "[(3, 1)]", "", "[(3, 2)]", ""]


def test_a_module_that_is_sent_by_value(main: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cloudpickle is told to send has a life of its own in each worker, too."""
    (tmp_path / "mine.py").write_text("n = 0\nk = 1\ndef count():\n global n\n n += k\n return n\n")
    lines = ["call(mine.count)", "call(mine.count)", "! mine.k = 5", "call(mine.count)", "call(mine.count)"]
    monkeypatch.syspath_prepend(tmp_path)
    definitions = "import cloudpickle, mine\ncloudpickle.register_pickle_by_value(mine)"
    try:
        assert values(main, definitions, lines) == "1 2 7 12"
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules.pop("mine"))


def test_a_worker_keeps_the_classes_that_it_has(
    main: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing else in the worker refers to it."""
    (tmp_path / "mine.py").write_text(
        "class Found:\n def get(self): return type(self)\ndef make():\n class Local(Found): pass\n return Local\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    definitions = """
import cloudpickle, gc, mine
cloudpickle.register_pickle_by_value(mine)
Local = mine.make()
def alive():
    gc.collect()
    return [cls.__name__ for cls in mine.Found.__subclasses__()]
"""
    lines = ["call(Local().get) is Local", "! call(gc.collect)", "call(Local().get) is Local", "call(alive)"]
    try:
        assert values(main, definitions, lines) == "True True ['Local']"
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules.pop("mine"))


def test_classes_of_a_loop_are_forgotten(main: dict[str, Any]) -> None:
    """Neither the parent nor its pool keeps more than the last ones alive."""
    definitions = """
import gc, weakref
def make():
    class Local: pass
    return Local
def use(local): return isinstance(local(), local)
alive = weakref.WeakSet()
"""
    lines = [
        "! for _ in range(400): cls = make(); alive.add(cls); call(use, cls)",
        "! del cls",
        "! gc.collect()",
        "len(alive) <= 256",
    ]
    assert values(main, definitions, lines) == "True"


def test_an_assert_that_pytest_has_rewritten(executor2: ParallelExecutor) -> None:
    """A nested function of this module reads globals of pytest, which a worker's import of the module does not make."""

    def check(x: int) -> None:
        assert x == 2

    with pytest.raises(AssertionError, match=r"^assert 1 == 2$"):
        executor2.submit(check, 1).result()


def test_a_module_that_was_reloaded_is_told_once(
    main: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker imports it by itself: what the parent does to it afterwards is not seen there."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "changing.py").write_text("def f(): return 1\n")
    main["reload"] = importlib.reload
    three = ["call(changing.f)"] * 3
    lines = [*three, "! reload(changing)", *three, "call(lambda: changing.f())", "! changing.K = 2", *three]
    try:
        with pytest.warns(RuntimeWarning, match="^Module changing was reloaded in this process") as told:
            assert values(main, "import changing", lines) == " ".join("1" * 10)
        assert len(told) == 1
    finally:
        del sys.modules["changing"]
