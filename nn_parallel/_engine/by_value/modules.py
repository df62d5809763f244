"""What workers import, or have had since their start, and the parent has changed since.

A worker imports a module by itself, so it does not see what the parent does to it later: the script is told, once for
each module. The environment, the working directory and the import path are brought up to date instead.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cloudpickle import cloudpickle

from . import namespaces
from .fingerprints import goes_by_value


class Modules:
    """The user's modules, as they were when this was made, or when a function first called something of them."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, Any]] = {}
        self._told = set[str]()
        for name in list(sys.modules):
            self._as_before(name)

    def watched(self, fn: Callable[..., Any]) -> list[Watched]:
        """The modules, and the names in them, that ``fn`` and what it calls read."""
        names: dict[str, set[str]] = {}
        pending, seen = [fn], set[int]()
        while pending:
            value: Any = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) is functools.partial:
                pending.append(value.func)
            elif type(value) is types.FunctionType:
                read = cloudpickle._extract_code_globals(value.__code__).keys() & value.__globals__.keys()
                pending += (value.__globals__[name] for name in read)
                modules = [each for name in read if _is_users(each := value.__globals__[name])]
                home = sys.modules.get(value.__module__, _GONE)
                if _is_users(home) and vars(home) is value.__globals__:
                    names.setdefault(home.__name__, set()).update(read, [value.__name__])
                for module in modules:
                    reached = set(value.__code__.co_names) & vars(module).keys()
                    names.setdefault(module.__name__, set()).update(reached)
                    pending += (vars(module)[name] for name in reached)
        by_module = ((name, self._as_before(name), read) for name, read in names.items())
        return [Watched(name, before, read & before.keys()) for name, before, read in by_module]

    def warn_of_changes(self, watched: Iterable[Watched]) -> None:
        """Tell of the modules of which something that is read is not what workers find there."""
        for name, before, names in watched:
            now = vars(sys.modules.get(name, _GONE))
            changed = [each for each in names if _what(now.get(each)) != before[each]]
            if changed and name not in self._told and (told := set(changed) - _assigned_in(now)):
                self._told.add(name)
                warnings.warn(_message(name, sorted(told)), RuntimeWarning, stacklevel=2)

    def _as_before(self, name: str) -> dict[str, Any]:
        if name not in self._before:
            module = sys.modules.get(name)
            names = vars(module).items() if module is not None and _is_users(module) else ()
            self._before[name] = {each: _what(value) for each, value in names}
        return self._before[name]


class Watched(NamedTuple):
    """Names that a function reads in a module, and what they stood for before."""

    module: str
    before: dict[str, Any]
    names: set[str]


class ProcessEnvironment:
    """The environment, the working directory and the import path of this process."""

    def __init__(self, is_elsewhere: bool = False) -> None:
        """``is_elsewhere``: the workers are on other machines, which have import paths of their own."""
        self._is_elsewhere = is_elsewhere
        self._environ, self._directory, self._path = _environ().copy(), _directory(), list(sys.path)
        self._changes: dict[bytes, bytes | None] = {}  # since this was made

    def changed(self) -> bool:
        """Whether they are other than the last time."""
        directory = _directory()
        if _environ() == self._environ and directory == self._directory and sys.path == self._path:
            return False
        environ = _environ().copy()
        for name in environ.keys() | self._environ.keys():
            if environ.get(name) != self._environ.get(name):
                self._changes[name] = environ.get(name)
        self._environ, self._directory, self._path = environ, directory, list(sys.path)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        path = user_sys_path() if self._is_elsewhere else self._path
        return namespaces.set_process_environment, (self._changes, self._directory, path, self._is_elsewhere)


def user_sys_path() -> list[str]:
    """The import path without what is installed with Python, which another machine may have elsewhere."""
    return [each for each in sys.path if not f"{each}{os.sep}".startswith(_INSTALLED)]


def _environ() -> dict[bytes, bytes]:
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # a copy takes twenty times as long
    return data


def _directory() -> str:
    with contextlib.suppress(OSError):  # it was removed
        return os.getcwd()
    return ""


def _is_users(value: Any) -> bool:
    """Whether it is a module that may be edited while a program runs: neither installed nor part of Python."""
    if not isinstance(value, types.ModuleType) or value.__name__.partition(".")[0] in _NOT_WATCHED:
        return False
    file = getattr(value, "__file__", None) or ""
    return bool(file) and not file.startswith(_INSTALLED) and not goes_by_value(value.__name__)


def _what(value: Any) -> Any:
    """What is compared: of a function its code, as IPython gives the same object another; else which object it is."""
    return value.__code__ if type(value) is types.FunctionType else id(value)


def _assigned_in(names: dict[str, Any]) -> set[str]:
    """The globals that functions of a module set themselves, such as a cache: that they change is no news."""
    classes = [value for value in names.values() if isinstance(value, type)]
    held = [*names.values(), *(value for cls in classes for value in vars(cls).values())]
    pending = [value.__code__ for value in held if type(value) is types.FunctionType]
    assigned = set[str]()
    while pending:
        code = pending.pop()
        pending += (const for const in code.co_consts if isinstance(const, types.CodeType))
        assigned.update(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")
    return assigned


def _message(name: str, changed: list[str]) -> str:
    return (
        f"{', '.join(changed)} of module {name} changed in this process (reloaded, or set from outside), but workers "
        f"import {name} by themselves and do not see it. Make a new executor after a reload, pass what changes as an "
        f"argument, or send the module by value: cloudpickle.register_pickle_by_value({name})."
    )


_GONE = types.ModuleType("gone")
_NOT_WATCHED = {"__main__", "__mp_main__", "nn_parallel"}
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
