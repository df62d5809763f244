"""Classes, functions and globals of a script, as they are in a worker."""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from nn_parallel._engine.by_value.globals import make_class
from nn_parallel._engine.interrupts import CancelScope, Interrupted
from tests.support.scripts import run_script, values

# Each: definitions; a function ``look`` of no arguments gives the same here and there.
CLASSES = {
    "a hook with an argument": """
class Base:
    def __init_subclass__(cls, /, arg, **kw): cls.arg = arg
class Child(Base, arg="hello"): pass
def look(): return Child.arg
""",
    "a hook that reads the body": """
class Base:
    def __init_subclass__(cls):
        if not hasattr(cls, "lr"): raise TypeError("lr is missing")
class Fast(Base): lr = 1.0
def look(): return Fast.lr, isinstance(Fast(), Base)
""",
    "a registry that takes each class once": """
class Base:
    known = {}
    def __init_subclass__(cls):
        if cls.__name__ in Base.known: raise ValueError("twice")
        Base.known[cls.__name__] = cls
class A(Base): pass
class B(A): pass
def look(): return sorted(Base.known), Base.known["B"] is B, Base.known["A"] is A
""",
    "a hook of an imported class, with an argument": """
import typing
class Proto(typing.Protocol):
    def f(self): ...
class Impl(Proto):
    def f(self): return 1
T = typing.TypeVar("T")
class Box(typing.Generic[T]):
    def __init__(self, x: T): self.x = x
class IntBox(Box[int]): pass
def look(): return Impl().f(), IntBox(3).x, typing.get_args(IntBox.__orig_bases__[0]), Box.__parameters__ == (T,)
""",
    "a metaclass that reads the body": """
class Meta(type):
    def __new__(mcs, name, bases, ns, **kw):
        if bases and "table" not in ns: raise TypeError("table is missing")
        return super().__new__(mcs, name, bases, ns)
    def __setattr__(cls, name, value): raise TypeError("frozen")
class Model(metaclass=Meta): pass
class User(Model): table = "users"
def look(): return User.table, type(User).__name__, type(User()) is User
""",
    "a metaclass with attributes": """
class Meta(type):
    kinds = ["a"]
    def __len__(cls): return len(cls.kinds)
class A(metaclass=Meta): pass
def look(): return len(A), Meta.kinds, A.kinds
""",
    "an enum whose members have attributes": """
import enum
class Planet(enum.Enum):
    EARTH = (5.9, 6.3)
    MARS = (0.6, 3.3)
    def __init__(self, mass, radius): self.mass, self.radius = mass, radius
    @property
    def density(self): return self.mass / self.radius
def look(): return Planet.EARTH.mass, Planet((0.6, 3.3)).name, [each.name for each in Planet], Planet.MARS.density
""",
    "enums of all kinds": """
import enum
class Alias(enum.Enum): A = 1; B = 1
class Level(enum.IntEnum): LOW = 1; HIGH = 10
class Color(enum.Flag): RED = enum.auto(); GREEN = enum.auto(); BOTH = RED | GREEN
class Name(enum.StrEnum): X = "x"
class Odd(enum.Enum): A = object(); B = float("nan")
def look():
    both = Color.RED | Color.GREEN
    return Alias.B.name, Level.HIGH > Level.LOW, Level(1) is Level.LOW, both is Color.BOTH, str(Name.X), len(Odd)
""",
    "slots": """
import dataclasses
class A:
    __slots__ = ("x",)
    def __init__(self, x): self.x = x
class B(A): __slots__ = ("y", "__weakref__")
class C(A): pass
class Empty: __slots__ = ()
class Names:
    __slots__ = {"x": "documented"}
class Private: __slots__ = ("__hidden", "__dict__")
@dataclasses.dataclass(slots=True, frozen=True)
class D: x: int = 1
def look():
    objects = A(1), B(1), C(1), Empty(), Names(), Private(), D()
    return [hasattr(each, "__dict__") for each in objects], D(3), A(2).x, Names.__slots__, sorted(vars(Private))
""",
    "super() and a class's own name": """
class A:
    def f(self): return "A"
class B(A):
    def f(self): return super().f() + "B"
    def new(self): return __class__
def look(): return B().f(), B().new() is B
""",
    "a class method in a dict of its class": """
class Shape:
    makers = {}
    @classmethod
    def circle(cls): return cls
Shape.makers["circle"] = Shape.circle
def look(): return Shape.makers["circle"]() is Shape
""",
    "instances in their own class": """
import collections, typing
class Point(typing.NamedTuple):
    x: int
    y: int = 0
    def norm(self): return abs(self.x) + abs(self.y)
Point.ORIGIN = Point(0)
class Node:
    def __init__(self, *inner): self.inner = inner
Node.ROOT = Node(Node(), Node())
Pair = collections.namedtuple("Pair", "a b")
def look(): return Point.ORIGIN, Point(1, -2).norm(), type(Node.ROOT.inner[0]) is Node, Pair(1, b=2)
""",
    "descriptors": """
class Typed:
    def __set_name__(self, owner, name):
        owner.fields = [*getattr(owner, "fields", []), name]
        self.name = "_" + name
    def __get__(self, obj, owner=None): return self if obj is None else getattr(obj, self.name)
    def __set__(self, obj, value): setattr(obj, self.name, int(value))
class A:
    x = Typed()
    @functools.cached_property
    def big(self): return self.x * 10
    @property
    def half(self): return self.x / 2
    @half.setter
    def half(self, value): self.x = 2 * value
def look():
    a = A()
    a.half = 4
    return A.fields, a.x, a.big, a.half, vars(a)
""",
    "abstract classes": """
import abc
class A(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class B(A):
    def f(self): return 1
class V: pass
A.register(V)
def look():
    try: A()
    except TypeError: return B().f(), isinstance(V(), A), isinstance(3, A), sorted(A.__abstractmethods__)
""",
    "dataclasses": """
import dataclasses
class Lists:
    @dataclasses.dataclass(order=True)
    class Inner:
        x: int
        y: list = dataclasses.field(default_factory=list, compare=False)
        z: dataclasses.KW_ONLY = None
@dataclasses.dataclass
class Conf:
    lr: float
    inner: "Lists.Inner" = None
    def __post_init__(self): self.inner = self.inner or Lists.Inner(1)
def look():
    import typing
    missing = [field.name for field in dataclasses.fields(Conf) if field.default is dataclasses.MISSING]
    return missing, Conf(1.0), dataclasses.asdict(Conf(2.0)), typing.get_type_hints(Conf)["inner"] is Lists.Inner
""",
    "methods that hold each other": """
def with_hook(hook):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(self, *args): return hook(self), fn(self, *args)
        return wrapper
    return decorate
class Net(torch.nn.Module):
    def __init__(self): super().__init__()
    def check(self): return "checked"
    @with_hook(check)
    def forward(self, x, other=check): return x, other(self)
class Sub(Net):
    def forward(self, x): return super().forward(x)
def look(): return Net()(1), Sub()(2), Net.check(Net())
""",
    "constants that its instances need as they are rebuilt": """
class A:
    SEED = 3
    names = {}
    def __init__(self, x): self.x = x
    def __hash__(self): return hash((self.x, self.SEED))
    def __eq__(self, other): return type(other) is A and other.x == self.x
    def __setstate__(self, state): self.x = state["x"] + 0 * self.SEED
A.names[A(1)] = "one"
def look(): return A.names.get(A(1)), A.names.get(A(2))
""",
    "attributes that cannot be set later": """
class Meta(type):
    @property
    def count(cls): return 5
class A(metaclass=Meta): count = 3
class B:
    @property
    def __dict__(self): return {"x": 1}
def look(): return A.count, A().count, vars(B())
""",
    "attributes that have no truth value": """
class A:
    rows = torch.arange(3)
    class Odd:
        def __bool__(self): raise TypeError("neither")
        def __eq__(self, other): raise TypeError("nor")
        __hash__ = None
    odd = Odd()
def f(x=A.odd): return type(x) is A.Odd
def look(): return A.rows.tolist(), type(A.odd) is A.Odd, f()
""",
    "a class in a class": """
import pickle
class Outer:
    class Inner:
        def __init__(self, x): self.x = x
def look(): return Outer.Inner.__qualname__, pickle.loads(pickle.dumps(Outer.Inner(5))).x
""",
    "two classes of one name": """
def make(k):
    class Config: kind = k
    return Config
A, B = make("a"), make("b")
class Config: kind = "the script's"
class Outer:
    class Config: kind = "nested"
def look(): return A.kind, B.kind, Config.kind, Outer.Config.kind, A().kind, A is B
""",
    "an exception, a typed dict, a class of torch": """
import typing
class Bad(Exception):
    def __init__(self, code, text): super().__init__(text); self.code = code
class Options(typing.TypedDict, total=False): lr: float
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, grad): return 2 * grad
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, i): return i
def look():
    x = torch.ones(1, requires_grad=True)
    Double.apply(x).backward()
    try: raise Bad(3, "bad")
    except Bad as error: return error.code, str(error), Options(lr=1.0), x.grad.item(), len(Rows())
""",
    "an instance in its own class": """
class Single:
    _instance = None
    def __new__(cls):
        if cls._instance is None: cls._instance = super().__new__(cls)
        return cls._instance
    def __init__(self): self.x = 1
import collections
class Pair(collections.namedtuple("Pair", "a b")): pass
Pair.ORIGIN = Pair(0, 0)
first = Single()
def look(): return Single() is Single(), Single().x, Pair.ORIGIN
""",
    "an abstract class that asks for itself": """
import abc
class Shape(abc.ABC):
    @classmethod
    def __subclasshook__(cls, C): return True if cls is Shape and "quack" in vars(C) else NotImplemented
class Duck:
    def quack(self): pass
class Virtual: pass
Shape.register(Virtual)
def look(): return isinstance(Duck(), Shape), isinstance(Virtual(), Shape), isinstance(3, Shape)
""",
    "a property of a kind of its own": """
class lazy(property):
    def __init__(self, fget, unit): super().__init__(fget); self.unit = unit
class A: x = lazy(lambda self: 3, "m")
def look(): return A().x, A.x.unit, type(A.x).__name__
""",
    "typing's own objects": """
import typing
T, P, Ts = typing.TypeVar("T", bound=int), typing.ParamSpec("P"), typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)
def keep(fn: typing.Callable[P, T]) -> typing.Callable[P, T]:
    @functools.wraps(fn)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T: return fn(*args, **kwargs)
    return inner
@keep
def next_id(x: UserId) -> UserId: return UserId(x + 1)
def look(): return next_id(3), typing.get_type_hints(next_id)["x"] is UserId, T.__bound__, P.__name__
""",
}


@pytest.mark.parametrize("what", CLASSES)
def test_a_class_is_in_a_worker_what_it_is_in_the_script(what: str, main: dict[str, Any]) -> None:
    """Twice, as the second call finds it there."""
    exec(CLASSES[what], main)
    here = str(main["look"]())
    assert values(main, "", ["call(look)", "call(lambda: look())", "look()"]) == f"{here} {here} {here}"


FUNCTIONS = {
    "two dicts of globals that have one name": """
def make(k):
    names = {"k": k, "__name__": "generated"}
    exec("def f(): return k", names)
    return names["f"]
a, b = make(1), make(2)
def look(): return a(), b()
""",
    "two dicts of globals without a name": """
import collections
def make(k):
    names = {"k": k}
    exec("def f(): return k", names)
    return names["f"]
fns = [make(i) for i in range(3)]
def look(): return [f() for f in fns]
""",
    "names that only the body of a class reads": """
RATE = 3
def look():
    class Net: rate = RATE
    return Net.rate
""",
    "closures that share a variable": """
def make():
    n = 0
    def inc():
        nonlocal n
        n += 1
        return n
    def get(): return n
    return inc, get
def look():
    inc, get = make()
    return inc(), get()
held = make()
def other(): return held[0](), held[1]()
def twice(): return other()
""",
    "a function of several types": """
@functools.singledispatch
def show(x): return "any"
@show.register
def _(x: int): return "int"
@show.register(str)
def _(x): return "str"
def look(): return show(1), show("a"), show(1.0), sorted(each.__name__ for each in show.registry)
""",
    "submodules that are reached by attribute": """
import xml, xml.etree.ElementTree, concurrent.futures
def look(): return xml.etree.ElementTree.fromstring("<a/>").tag, concurrent.futures.ThreadPoolExecutor.__name__
""",
    "submodules of a package in a closure": """
def outer():
    import curses.textpad
    return lambda: curses.textpad.Textbox.__name__
look = outer()
""",
    "operators of torch": """
def look(): return torch.ops.aten.relu(torch.ones(1)).item()
""",
    "a compiled function": """
@functools.partial(torch.compile, backend="eager")
def step(x): return x + 1
def look(): return step(torch.ones(1)).item()
""",
    "keyword defaults, annotations and a docstring": '''
def f(x: "int", *, scale=3) -> "Conf":
    """Say it."""
    return x * scale
f.mark = [1]
class Conf: pass
def look():
    import typing
    return f(2), f.__doc__, f.mark, f.__kwdefaults__, typing.get_type_hints(f)["return"] is Conf
''',
    "a mark of the script": """
MISSING = object()
class _Mark: pass
MARK = _Mark()
def f(x=MISSING, y=MARK): return x is MISSING, y is MARK
def look(): return f(), f(1)
""",
    "a weak reference": """
import weakref
class Node: pass
def track(fn):
    holder = []
    @functools.wraps(fn)
    def inner(x): return fn(x), holder[0]() is inner
    holder.append(weakref.ref(inner))
    return inner
@track
def f(x): return x
node = Node()
node.itself = weakref.ref(node)
gone = weakref.ref(Node())
def look(): return f(1), node.itself() is node, gone()
""",
    "methods as keys": """
class Service:
    def handle(self): return 1
HOOKS = {Service.handle: "handle"}
def look(): return HOOKS[Service.handle]
""",
    "generators, coroutines and comprehensions": """
import asyncio
K = 2
def numbers(n): yield from (K * i for i in range(n))
async def later(): return [K async for _ in aiter_of()]
async def aiter_of():
    yield 1
def look(): return list(numbers(3)), asyncio.run(later()), {K: [K for _ in range(2)]}
""",
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_function_does_in_a_worker_what_it_does_in_the_script(what: str, main: dict[str, Any]) -> None:
    """Twice, as the second call finds it there."""
    exec(FUNCTIONS[what], main)
    here = str(main["look"]())
    assert values(main, "", ["call(look)", "call(lambda: look())"]) == f"{here} {here}"


RETURNS = {
    "a class and a function of the script": (
        "class A: pass\ndef f(): return 1\ndef look(): return A, f, A()",
        ["call(look)[0] is A, call(look)[1] is f, type(call(look)[2]) is A"],
        "True True True",
    ),
    "an instance with slots": (
        "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A: x: int\ndef look(): return A(3)",
        ["call(look)", "call(lambda a: a, A(4)) == A(4)", "call(lambda cls: cls(5), A)"],
        "A(x=3) True A(x=5)",
    ),
    "a class of the task's own, which is one in both": (
        "def make():\n class A:\n  known = {}\n  def f(self): return type(self)\n return A()\n",
        ["! a = call(make)", "call(lambda x: x.f(), a) is type(a)", "a.f() is type(a), type(call(make)) is type(a)"],
        "True True False",
    ),
    "nothing is written into the script": (
        "class A: kind = 1\ndef make():\n class A: kind = 2\n return A()\ndef change():\n A.kind = 3\n return A",
        ["call(make).kind, A.kind", "call(change) is A, A.kind, call(lambda: A.kind)"],
        "2 1 True 1 3",
    ),
    "a hook does not run again": (
        "ran = []\nclass B:\n def __init_subclass__(cls): ran.append(cls.__name__)\n"
        "class C(B): pass\ndef look(): return C()",
        ["type(call(look)) is C, ran", "call(lambda: ran)"],
        "True ['C'] ['C']",
    ),
    "a function refers to the globals of the script": (
        "k = 1\ndef look(): return lambda: k",
        ["! g = call(look)", "g()", "! k = 2", "g(), g.__globals__ is globals()"],
        "1 2 True",
    ),
    "functions of a module that is in no list of modules": (
        "import types\nm = types.ModuleType('by_hand_of_test')\n"
        "exec('import functools\\ndef a(): return 1\\n@functools.cache\\ndef c(x): return x\\nclass K: pass', "
        "vars(m))\ndef echo(x): return x",
        ["[call(echo, each) is each for each in (m.a, m.c, m.K)]"],
        "[True, True, True]",
    ),
    "a function of a dict that the task made": (
        "def look():\n names = {'k': 5}\n exec('def f(): return g() + k\\ndef g(): return k', names)\n"
        " return names['f']",
        ["call(look)()", "call(call(look))"],
        "10 10",
    ),
}


@pytest.mark.parametrize("what", RETURNS)
def test_what_comes_back(what: str, main: dict[str, Any]) -> None:
    """It refers to what the script has, and changes nothing there."""
    definitions, lines, printed = RETURNS[what]
    assert values(main, definitions, lines) == printed


def test_an_answer_replaces_no_module_of_the_script(main: dict[str, Any]) -> None:
    """A task makes a module of a name that the script has, too."""
    definitions = """
import types
plugin_of_test = types.ModuleType("plugin_of_test")
sys.modules["plugin_of_test"] = plugin_of_test
def make():
    module = types.ModuleType("plugin_of_test")
    sys.modules["plugin_of_test"] = module
    exec("class Item: pass\\ndef f(): return Item()", vars(module))
    return module.f
"""
    lines = ["type(call(make)()).__name__", "sys.modules['plugin_of_test'] is plugin_of_test"]
    try:
        assert values(main, definitions, lines) == "Item True"
    finally:
        del sys.modules["plugin_of_test"]


def test_classes_of_packages(main: dict[str, Any]) -> None:
    """Attrs writes an ``__init__`` with globals of its own for each class; others have metaclasses and descriptors."""
    pytest.importorskip("attrs")
    definitions = """
import attrs
@attrs.define
class Cart: items: list = attrs.field(factory=list)
@attrs.define
class Index: items: dict = attrs.field(factory=dict)
@attrs.frozen
class Point:
    x: int = attrs.field(converter=int, validator=attrs.validators.ge(0))
    def moved(self): return attrs.evolve(self, x=self.x + 1)
def look(): return Cart(), Index(), Point("3").moved(), attrs.asdict(Cart([1]))
"""
    exec(definitions, main)
    here = str(main["look"]())
    assert values(main, "", ["call(look)", "call(look)", "call(lambda p: p.moved(), Point(1)) == Point(2)"]) == (
        f"{here} {here} True"
    )


@pytest.mark.slow
def test_a_script_that_is_a_module(tmp_path: Path) -> None:
    """``python -m package.module``: an import that is relative to the package works in a function."""
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text("def scale(x): return 5 * x\n")
    (package / "script.py").write_text(
        """
from nn_parallel import ParallelExecutor
def late():
    from . import helpers
    return helpers.scale(1)
with ParallelExecutor(num_workers=1, devices="cpu") as ex: print(ex.run(late))
"""
    )
    code = "import runpy, sys\nsys.argv = ['script']\nrunpy.run_module('package_of_test.script', run_name='__main__')\n"
    assert run_script(code, tmp_path) == ["[5]"]


@pytest.mark.slow
def test_a_pool_in_a_process_of_multiprocessing(tmp_path: Path) -> None:
    """There the script is called ``__mp_main__``."""
    code = """
import multiprocessing
def square(x): return x * x
def experiment():
    with ParallelExecutor(num_workers=1, devices="cpu") as ex: print(list(ex.map(square, range(3))), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=experiment)
    process.start()
    process.join()
"""
    assert run_script(code, tmp_path) == ["[0, 1, 4]"]


class WithHook:
    def __init_subclass__(cls) -> None: ...


class WithAnotherHook:
    def __init_subclass__(cls) -> None: ...


@pytest.mark.slow
def test_an_interrupt_leaves_no_class_without_its_hook() -> None:
    """The hooks of bases are replaced while a worker makes a class, and a task may be cancelled at any line of this."""
    hooks = vars(WithHook)["__init_subclass__"], vars(WithAnotherHook)["__init_subclass__"]
    block = CancelScope()
    is_over = threading.Event()

    def interrupt_often() -> None:
        while not is_over.is_set():
            block.interrupt()

    thread = threading.Thread(target=interrupt_often)
    thread.start()
    try:
        for _ in range(100):
            block.interrupted = False
            with contextlib.suppress(Interrupted), block:
                while True:
                    make_class(uuid.uuid4().hex, type, "Child", (WithHook, WithAnotherHook), {})
            assert (vars(WithHook)["__init_subclass__"], vars(WithAnotherHook)["__init_subclass__"]) == hooks
    finally:
        is_over.set()
        thread.join()
