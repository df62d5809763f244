"""How functions and classes are pickled that no import finds: by what they are, without what they refer to by names."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from cloudpickle import cloudpickle

from ..pool.channel import Payload
from . import namespaces
from .namespaces import Key

Globals = dict[str, Any]
Origin = tuple[Globals, str] | weakref.ref[type]  # the globals in which a name is found, and who reads it; or a class


class Reducer:
    """Pickles by value what no import finds, and collects what that refers to: the globals by names, the classes."""

    def __init__(self, defined: Iterable[Key] = ()) -> None:
        """Of what is ``defined`` here the definition is pickled, and not the name."""
        self.globals: dict[tuple[str, str], tuple[Globals, str]] = {}  # where to find each, and who reads it
        self.classes: dict[type, None] = {}  # in this order
        self._pickler: cloudpickle.Pickler | None = None
        self._storages: Sequence[torch.UntypedStorage] = ()
        self._defined = set(defined)
        self._spaces: dict[int, _Space] = {}
        self._by_value: list[Any] = []

    def __bool__(self) -> bool:
        """Whether it refers to anything."""
        return bool(self.globals or self.classes)

    def update(self, other: Reducer) -> None:
        """Refer to what ``other`` refers to as well."""
        self.globals.update(other.globals)
        self.classes.update(other.classes)

    def origins(self) -> Iterable[tuple[Key, Origin]]:
        """What it refers to, and where to find that."""
        yield from self.globals.items()
        yield from ((cloudpickle._get_or_create_tracker_id(cls), weakref.ref(cls)) for cls in self.classes)

    def refers_to(self, keys: set[Key]) -> bool:
        """Whether it refers to one of these."""
        return any(key in keys for key, _ in self.origins())

    def reduce(self, obj: Any, pickler: cloudpickle.Pickler) -> Any:
        """As `pickle.Pickler.reducer_override`; None: in the usual way."""
        if isinstance(obj, type):
            return self._reduce_class(obj) if _is_sent(obj) else None
        kind = type(obj)
        if kind is types.MethodType:
            return _reduce_method(obj)
        if kind is types.FunctionType:
            if cloudpickle._should_pickle_by_reference(obj):
                return None
            cls = _class_with(obj)
            if cls is not None and cloudpickle._get_or_create_tracker_id(cls) not in self._defined:
                return namespaces.function_of, (cls, obj.__name__)
        elif kind is not _Cached or cloudpickle._lookup_module_and_qualname(obj) is not None:
            return None
        key, space = _name_of(obj)
        if key is not None and key not in self._defined:
            self.globals.setdefault(key, (space, key[1]))
            return namespaces.global_of, key
        return self._reduce_function(obj, key, pickler) if kind is types.FunctionType else None

    def saw(self, pickler: cloudpickle.Pickler, storages: Sequence[torch.UntypedStorage]) -> None:
        """All is pickled: the memo of ``pickler``, and these, are what was met on the way."""
        self._pickler, self._storages = pickler, storages

    @functools.cached_property
    def objects(self) -> set[int]:
        """What was pickled, as far as it could change, by its identity: good as long as this lives."""
        if self._pickler is None:
            return set()
        memo: dict[int, tuple[int, Any]] = self._pickler.memo.copy()
        met = {key for key, (_, obj) in memo.items() if _has_identity(obj)}
        return met.union(map(id, self._by_value), (-storage._cdata for storage in self._storages))

    def _reduce_class(self, cls: type) -> Any:
        key = cloudpickle._get_or_create_tracker_id(cls)
        if key not in self._defined:
            self.classes[cls] = None
            return namespaces.class_of, (key,)
        make, args, state, *_ = cloudpickle._dynamic_class_reduce(cls)
        return namespaces.define_class, (make, *args), state, None, None, namespaces.set_class

    def _reduce_function(
        self, fn: types.FunctionType, key: tuple[str, str] | None, pickler: cloudpickle.Pickler
    ) -> Any:
        self._by_value.append(fn)
        make, (code, basics, *rest), (attributes, held), *how = pickler._dynamic_function_reduce(fn)
        space = self._spaces.setdefault(id(fn.__globals__), _Space(_module_of(fn.__globals__), basics))
        for name in cloudpickle._extract_code_globals(code):
            self.globals.setdefault((space.module, name), (fn.__globals__, f"{fn.__qualname__}()"))
        args = (code, space, *rest)
        if key is not None:
            which = _functions.setdefault(fn, next(_numbers))
            make, args = namespaces.define_function, (key, which, *args)
        return make, args, (attributes, held | {"__globals__": {}}), *how


def _reduce_method(method: types.MethodType) -> Any:
    """By its name, where its function would be pickled by value: that is its class's."""
    owner, name = method.__self__, method.__func__.__name__
    cls = owner if isinstance(owner, type) else type(owner)
    if _is_sent(cls) and getattr(owner, name, None) == method:
        return getattr, (owner, name)
    return None


def _class_with(fn: types.FunctionType) -> type | None:
    """The class whose method ``fn`` is, if it is found by its name and is sent."""
    path, _, name = fn.__qualname__.rpartition(".")
    found: Any = fn.__globals__.get(path)
    if not isinstance(found, type) or not _is_sent(found):
        return None
    held = vars(found).get(name)
    return found if fn in (held, getattr(held, "__func__", None)) else None


class _Space(NamedTuple):
    """Stands in a pickle for the globals of a module."""

    module: str
    basics: Globals

    def __reduce__(self) -> tuple[Any, ...]:
        return namespaces.space_of, tuple(self)


class Handle:
    """Stands for an object that `ParallelExecutor.put` keeps in the workers; a task receives the object itself.

    The workers let go of the object when the last reference to its handle is gone.
    """

    def __init__(self, payload: Payload, what: str, owner: object, number: int | None = None) -> None:
        """``number``: that of the handle in another process which this one stands for."""
        self.number = next(_numbers) if number is None else number
        self.payload, self._what, self._owner = payload, what, owner
        self.names = Reducer()  # what the object refers to: it is brought up to date by each call that this goes with

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(met, "owner", None) is not self._owner:
            raise TypeError("a handle is good for the calls of the executor that made it, and for nothing else")
        met.handles.append(self)
        return namespaces.stored_object, (self.number,)

    def __repr__(self) -> str:
        return f"<Handle of a {self._what}>"


def _name_of(obj: Any) -> tuple[tuple[str, str] | None, Globals]:
    """The module and the name under which a function that is sent is found, and in which globals; None if it is not."""
    module, name = obj.__module__, obj.__qualname__
    space: Globals = getattr(obj, "__globals__", {})
    if _module_of(space) != module:  # a decorator's: what it returns goes for what was decorated
        space = getattr(sys.modules.get(module), "__dict__", {})
    return ((module, name), space) if space.get(name) is obj else (None, space)


def _module_of(space: Globals) -> str:
    return str(space.get("__name__", ""))


def _is_sent(cls: type) -> bool:
    """Whether no import finds it."""
    if cls in cloudpickle._BUILTIN_TYPE_NAMES or cls in (type(None), type(...), type(NotImplemented)):
        return False
    return not cloudpickle._should_pickle_by_reference(cls)


def _has_identity(obj: Any) -> bool:
    """Whether it matters which of several equal objects this is: it can change."""
    kind: Any = type(obj)
    return kind.__hash__ in (None, object.__hash__) and kind not in _WITHOUT_IDENTITY and not isinstance(obj, type)


met = threading.local()  # while something is packed in a thread: for whom, and the handles that are met
_numbers = itertools.count(1)
_functions = weakref.WeakKeyDictionary[types.FunctionType, int]()  # those that were sent by a name, numbered
_Cached = functools._lru_cache_wrapper
_WITHOUT_IDENTITY = {types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger, Handle, _Cached}
