"""Scripts made at random: after each change of the script, a worker gives what the script itself gives.

``python -m tests.support.random_scripts 1 3600`` tries seeds from 1 on for an hour.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
import types
from typing import Any

from nn_parallel import ParallelExecutor

BEGIN = '''
import collections, dataclasses, enum, functools, math, typing
import torch
depth = 0
def show(v):
    if isinstance(v, torch.Tensor): return "tensor", v.tolist()
    if isinstance(v, (list, tuple)): return type(v)(map(show, v))
    return sorted(map(repr, v)) if isinstance(v, set) else repr(v)
def shallow(fn):
    """Functions call each other at random: not for ever."""
    @functools.wraps(fn)
    def wrapper(*args):
        global depth
        depth += 1
        try: return args if depth > 6 else fn(*args)
        finally: depth -= 1
    return wrapper
'''
FUNCTIONS = (
    "@shallow\ndef {name}(x): return x, {a}, {b}\n",
    "@shallow\ndef {name}(x, y={value}): return x, show(y), {a}\n",
    "{name} = shallow(lambda x: (x, {a}))\n",
    "def outer(k):\n    def inner(x): return x, k, {a}\n    return shallow(inner)\n{name} = outer({n})\n",
    "@functools.lru_cache(maxsize=None)\ndef {name}(x): return {n} * x\n",
    "@functools.singledispatch\ndef {name}(x): return 'any'\n@{name}.register\ndef _(x: int): return 'int', x\n",
    "{name} = functools.partial(lambda a, x: (a, x), {n})\n",
    "@shallow\ndef {name}(x):\n    class Local:\n        k = x\n"
    "        def f(self): return self.k, __class__.__name__, {a}\n    return Local().f()\n",
)
CLASSES = (
    "class {name}:\n    attr = {value}\n    def __init__(self, x): self.x = x\n"
    "    @shallow\n    def f(self): return {a}\n"
    "    def __eq__(self, other): return type(self) is type(other) and self.x == other.x\n",
    "class {name}:\n    __slots__ = ('x',)\n    attr = {value}\n    def __init__(self, x): self.x = x\n"
    "    def f(self): return self.x\n    def __eq__(self, other): return type(self) is type(other)\n",
    "@dataclasses.dataclass(slots=True)\nclass {name}:\n    x: int\n    attr: typing.ClassVar = {value}\n"
    "    more: list = dataclasses.field(default_factory=list)\n    @shallow\n    def f(self): return {a}\n",
    "class {name}({base}):\n    attr = {value}\n    def f(self): return 'sub', super().f()\n",
    "class {name}({base}): pass\n",
)
VALUES = (
    *(
        "1",
        "2.5",
        "'s'",
        "[1, 2]",
        "{'a': 1}",
        "(1, [2])",
        "None",
        "{3, 4}",
        "math.pi",
        "b'x'",
        "True",
        "frozenset([1])",
    ),
    *("torch.arange(3.)", "collections.OrderedDict(a=1)", "[[]]"),
)
ENUM = "class {name}(enum.Enum):\n    A = 1\n    B = {n} + 2\n    def twice(self): return 2 * self.value\n"
IN_PLACE = (
    "if isinstance({name}, list): {name}.append({n})\n"
    "elif isinstance({name}, dict): {name}['k'] = {n}\n"
    "elif isinstance({name}, torch.Tensor): {name}.add_(1)\n"
)


class Script:
    """A script that grows and changes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.module = types.ModuleType("__main__")
        self.source = ""
        self._names: dict[str, list[str]] = {"d": [], "f": [], "C": [], "E": []}
        self.run(BEGIN)

    def run(self, code: str) -> None:
        """Execute more of the script."""
        self.source += code
        exec(code, vars(self.module))

    def define(self, name: str | None = None) -> str:
        """Return a definition: of a new name, or of one that is there."""
        kind = name[0] if name else self.random.choice("dffCCE")
        known = self._names[kind]
        name = name or f"{kind}{len(known)}"
        pattern = {
            "d": self.random.choice(("{name} = {value}\n", "{name} = {other}\n")),
            "f": self.random.choice(FUNCTIONS),
            "C": self.random.choice(CLASSES),
            "E": ENUM,
        }[kind]
        if known and kind in "fC" and self.random.random() < 0.1:
            pattern = f"{{name}} = {self.random.choice(known)}\n"
        code = self._filled(pattern, name)
        if name not in known:
            known.append(name)
        return code

    def change(self) -> str:
        """Return a line that changes something."""
        names = [name for kind in "dfC" for name in self._names[kind]]
        if not names or self.random.random() < 0.3:
            return self.define()
        name = self.random.choice(names)
        if name[0] == "d" and self.random.random() < 0.6:
            return self._filled(IN_PLACE, name)
        if name[0] == "C" and self.random.random() < 0.6:
            return self._filled("{name}.attr = {value}\n", name)
        return self.define(name)

    def expression(self) -> str:
        """Return an expression over what is there."""
        kinds = [kind for kind, names in self._names.items() if names]
        if not kinds or self.random.random() < 0.15:
            return self.random.choice(VALUES)
        name = self.random.choice(self._names[kind := self.random.choice(kinds)])
        n = self.random.randint(0, 3)
        other = self.random.choice(self._names["d"] or ["None"])
        choices = {
            "d": (f"show({name})", f"(isinstance({name}, (list, dict)) and {name} is {other})"),
            "f": (f"{name}({n})",),
            "C": (f"{name}({n}).f()", f"show({name}.attr)", f"isinstance({name}(1), {name})"),
            "E": (f"({name}.A.value, {name}.B.twice(), {name}(1) is {name}.A)",),
        }
        return self.random.choice(choices[kind])

    def call(self) -> tuple[Any, tuple[Any, ...]]:
        """Return a function and arguments."""
        way = self.random.choice(("task", "lambda", "function", "echo", "make"))
        if way == "function" and self._names["f"]:
            return vars(self.module)[self.random.choice(self._names["f"])], (self.random.randint(0, 3),)
        if way in ("echo", "make") and self._names["C"]:
            cls = vars(self.module)[self.random.choice(self._names["C"])]
            self.run("def echo(x): return x\ndef make(cls): return cls(2)\n" if "echo" not in vars(self.module) else "")
            return (self.module.echo, (cls(2),)) if way == "echo" else (self.module.make, (cls,))
        body = f"{self.expression()}, {self.expression()}"
        self.run(f"task = lambda: ({body})\n" if way == "lambda" else f"def task(): return {body}\n")
        return self.module.task, ()

    def _filled(self, pattern: str, name: str) -> str:
        return (
            pattern.replace("{name}", name)
            .replace("{a}", self.expression())
            .replace("{b}", self.expression())
            .replace("{other}", self.random.choice(self._names["d"] or VALUES))
            .replace("{value}", self.random.choice(VALUES))
            .replace("{base}", self.random.choice([each for each in self._names["C"] if each != name] or ["object"]))
            .replace("{n}", str(self.random.randint(0, 9)))
        )


def disagreement(seed: int, executor: ParallelExecutor, calls: int = 12) -> str | None:
    """Run one script, and return where script and worker give different values; None: nowhere."""
    script = Script(seed)
    sys.modules["__main__"] = script.module
    for _ in range(calls):
        for change in (script.define, script.change):
            with contextlib.suppress(Exception):  # a line that this script cannot have, such as a base without `f`
                script.run(change())
        try:
            fn, args = script.call()
            here = fn(*args)
        except Exception as error:
            script.source += f"# {error!r}\n"
            continue
        there = executor.submit(fn, *args).result()
        if type(here) is not type(there) or _without_addresses(here) != _without_addresses(there):
            return f"{script.source}\n# {fn} of {args}\n# script: {here!r}\n# worker: {there!r}\n"
    return None


def _without_addresses(value: Any) -> str:
    return re.sub("0x[0-9a-f]+", "", repr(value))


def main() -> None:
    """Try seeds until the time is over."""
    seed, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    first = seed
    while time.monotonic() < until:
        with ParallelExecutor(num_workers=1, devices="cpu") as executor:
            for _ in range(100):
                found = disagreement(seed, executor)
                if found is not None:
                    print(f"seed {seed}:\n{found}")
                seed += 1
    print(f"{seed - first} scripts")


if __name__ == "__main__":
    main()
