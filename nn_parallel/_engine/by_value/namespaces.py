"""The parent's modules in a worker: what functions and classes that travel by value find there under their names.

A function or class that no import finds (of ``__main__``, of a notebook, of a function's body, or of a module that
cloudpickle is told to send) travels by value. Its module has one life in each worker:

- A global is an entry of one dict for each module, for functions of ``__main__`` of the worker's ``__main__``. What
  the parent sends replaces the entry; what a task binds there stays until the parent's value has changed.
- A class is one class, however often it is sent: what the parent sends replaces its attributes.

Both have *keys*: ``(module, name)``, and the number by which cloudpickle knows the class. Each call says which keys it
refers to, and in which version: the number under which that was sent. `bring_up_to_date` takes over what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cloudpickle import cloudpickle

from ..pickling import loads
from ..pool.channel import Unpack

Key = tuple[str, str] | str  # of a global: its module and its name; of a class: its number for cloudpickle
Version = tuple[tuple[Key, ...], int]  # what was sent together, and under which number


class Missing:
    """Stands for the value of a name that the parent has deleted."""


class Kept:
    """A function that stays in the worker, and in which version it finds what it refers to."""

    def __init__(self, versions: list[Version], pickled: bytes) -> None:
        self._versions, self._pickled = versions, pickled
        self._function: Callable[..., Any] | None = None

    def function(self) -> Callable[..., Any]:
        """Itself, once what it refers to is up to date."""
        bring_up_to_date(self._versions)
        if self._function is None:
            self._function = loads(self._pickled, ())
        return self._function


class Answered:
    """Pickles in a worker what goes back: a class that the parent has sent by its key, which is all that it needs."""

    def reduce(self, obj: Any, pickler: cloudpickle.Pickler) -> Any:
        """As `pickle.Pickler.reducer_override`; None: in the usual way."""
        if isinstance(obj, type) and (key := _key_of_present(obj)) is not None:
            return class_of, (key,)
        return None

    def saw(self, pickler: cloudpickle.Pickler, storages: Sequence[Any]) -> None:
        """All is pickled."""


class Stored:
    """What was sent beside the tasks: rebuilt for the first of them that needs it, or, where that fails, the next."""

    def __init__(self, unpack: Unpack) -> None:
        self.unpack = unpack
        self.classes: list[type] = []  # cloudpickle knows classes as long as somebody refers to them

    @functools.cached_property
    def object(self) -> Any:
        rebuilt = self.unpack()
        del self.unpack  # it holds the memory of the message
        return rebuilt


def use_main(main: types.ModuleType) -> None:
    """From now on ``main`` is where functions of ``__main__`` find their globals."""
    _spaces["__main__"] = vars(main)


def before_call(versions: bytes) -> None:
    """`bring_up_to_date`, as the pickle of a call begins."""
    bring_up_to_date(pickle.loads(versions))


def bring_up_to_date(versions: Iterable[Version]) -> None:
    """Take over what the parent has changed: what is rebuilt next refers to it."""
    _awaited.clear()
    for version in versions:
        for key in version[0]:
            if _present.get(key) != version[1]:
                _awaited[key] = version
    while _awaited:
        _take_over(next(iter(_awaited)))


def keep(number: int, unpack: Unpack) -> None:
    """Store the object that has arrived under ``number``."""
    stored[number] = Stored(unpack)
    if number in _forgotten_before:
        forget(number)


def forget(number: int) -> None:
    """Let go of an object, also of one on its way: what orders this has a connection of its own."""
    _forgotten_before.add(number)
    if stored.pop(number, None) is not None:
        _forgotten_before.discard(number)


def stored_object(number: int) -> Any:
    """The object that a handle stands for; called as a task is unpickled."""
    return stored[number].object


def space_of(module: str, basics: dict[str, Any]) -> dict[str, Any]:
    """The globals of functions of ``module``, which begin with ``basics``: its name, package and file."""
    space = _spaces.setdefault(module, {})
    for name, value in basics.items():
        space.setdefault(name, value)
    return space


def global_of(module: str, name: str) -> Any:
    """What ``name`` stands for now."""
    if (module, name) in _awaited:
        _take_over((module, name))
    return _spaces[module][name]


def class_of(key: str) -> type:
    """The class that the parent, or in the parent a worker, means."""
    if key in _awaited:
        _take_over(key)
    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[key]  # type: ignore[no-any-return]


def function_of(cls: type, name: str) -> Any:
    """The function of a method."""
    held = vars(cls)[name]
    return getattr(held, "__func__", held)


def define_function(key: tuple[str, str], which: int, code: types.CodeType, *args: Any) -> types.FunctionType:
    """The function of that name, bound to it before what it holds is rebuilt: that may refer to it.

    If it is ``which`` it was, it stays the object that it is here, as it did in the parent: others may hold it.
    """
    before, made = _functions.get(key, (0, None))
    if made is None or before != which:
        made = cloudpickle._make_function(code, *args)
        _functions[key] = which, made
    else:
        made.__code__ = code
        vars(made).clear()
    _bind(key, made)
    _awaited.pop(key, None)
    return made


def define_class(make: Callable[..., type], *args: Any) -> type:
    """The class of that number, made if this process does not have it yet; `set_class` fills it."""
    key: str = args[-2]
    found = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(key)
    if found is None:
        found = make(*args)
    _awaited.pop(key, None)
    return found  # type: ignore[no-any-return]


def set_class(cls: type, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give ``cls`` the attributes that it has in the parent, and no other that it had there before."""
    for name in _attributes.get(cls, set()) - state[0].keys():
        if name in vars(cls):
            delattr(cls, name)
    _attributes[cls] = set(state[0])
    cloudpickle._class_setstate(cls, state)


def set_process_environment(
    environ: dict[bytes, bytes | None], directory: str, path: list[str], is_elsewhere: bool = False
) -> None:
    """Change the environment, the working directory and the import path as the parent has changed its own.

    ``is_elsewhere``: the parent is on another machine, and the rest of the import path is that of this one.
    """
    for name, value in environ.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
    with contextlib.suppress(OSError):  # it was removed
        os.chdir(directory)
    sys.path[:] = [*path, *(each for each in sys.path if is_elsewhere and each not in path)]


def set_globals(keys: Sequence[Key], values: Iterable[Any]) -> None:
    """Take over what came with a call because it shares objects with its arguments."""
    for key, value in zip(keys, values, strict=True):
        _bind(key, value)
        _present[key] = _WITH_A_CALL


def _key_of_present(cls: type) -> str | None:
    key: str | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    return key if key in _present else None


def _bind(key: Key, value: Any) -> None:
    if isinstance(key, tuple):
        module, name = key
        space = _spaces.setdefault(module, {})
        if value is Missing:
            space.pop(name, None)
        else:
            space[name] = value


def _take_over(key: Key) -> None:
    keys, number = _awaited[key]  # until it is there: what it is made of may refer to it
    values = stored[number].unpack()  # anew: an older version may come again
    stored[number].classes = [value for value in values if isinstance(value, type)]
    for each, value in zip(keys, values, strict=True):
        _bind(each, value)
        _awaited.pop(each, None)
    for each in keys:
        _present[each] = number


stored: dict[int, Stored] = {}  # by the numbers of handles
_forgotten_before = set[int]()  # the numbers of objects that were to be forgotten before they had arrived
_spaces: dict[str, dict[str, Any]] = {}  # the globals of each module
_present: dict[Key, int] = {}  # which version is here
_functions: dict[Key, tuple[int, types.FunctionType]] = {}  # those that have a name
_awaited: dict[Key, Version] = {}  # what is to be taken over before the call begins
_WITH_A_CALL = 0  # instead of a number of a version: of any other the call after that brings one
_attributes = weakref.WeakKeyDictionary[type, set[str]]()  # what the parent has set
