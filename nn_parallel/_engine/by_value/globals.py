"""The receiving side: the definitions and the globals of another process, as they live in this one.

A *definition* (a class, a function with a name) has a key, the same in every process. A call lists the definitions that
it needs and the version of each. `prepare` makes what is missing and changes what is old, and `find_definition` finds
it. A *namespace* is one dict of globals. It has a key, too: functions that share their globals there share them here,
and `bind` is how a value gets into them.

What this process has defined itself is found by its key and never changed by what arrives. So nothing is ever written
into the user's script: what comes back to it refers to the script's own classes and globals.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import functools
import importlib
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..pickling import loads

Unpack = Callable[[], Any]  # the object that has arrived; raises whatever unpickling raises


class Missing:
    """Stands for the value of a name that is not bound."""


class Keys:
    """The keys of definitions and namespaces, in both directions, as long as these live."""

    def __init__(self) -> None:
        self._objects: dict[str, Callable[[], Any]] = {}
        self._keys: dict[int, str] = {}  # by the identity of the object
        self._own = set[str]()
        self.lock = threading.RLock()  # the collector may run `_remove` in any thread

    def add(self, obj: Any, key: str | None = None) -> str:
        """Give ``obj`` a key: a new one, which makes it an object of this process, or the one that it came with."""
        if key is None:
            key = uuid.uuid4().hex
            self._own.add(key)
        try:
            self._objects[key] = weakref.ref(obj)
            weakref.finalize(obj, self._remove, key, id(obj)).atexit = False
        except TypeError:  # it takes no weak references, as `object()`
            self._objects[key] = lambda: obj
        self._keys[id(obj)] = key
        return key

    def key_of_or_add(self, obj: Any) -> str:
        """Return the key of ``obj``; give it one if it has none."""
        with self.lock:
            return self._keys.get(id(obj)) or self.add(obj)

    def key_of(self, obj: Any) -> str | None:
        """Return the key of ``obj``, or None."""
        return self._keys.get(id(obj))

    def find(self, key: str | None) -> Any:
        """Return the object of this key, or None."""
        find = self._objects.get(key) if key else None
        return find and find()

    def originates_here(self, obj: Any) -> bool:
        """Return whether ``obj`` got its key in this process."""
        return self._keys.get(id(obj)) in self._own

    def _remove(self, key: str, identity: int) -> None:
        with self.lock:
            if self._keys.get(identity) == key:
                del self._keys[identity]
            if self.find(key) is None:  # else another object of this process has it now
                self._objects.pop(key, None)
                self._own.discard(key)
                _versions.pop(key, None)
                _attribute_names.pop(key, None)
                _values_of_aliases.pop(key, None)


class Namespace:
    """One dict of globals.

    In a receiving process it is that of a module, so that `pickle` and `typing.get_type_hints` find there what they
    find in the script.
    """

    def __init__(self, find_module: Callable[[], types.ModuleType | None], variables: dict[str, Any]) -> None:
        """``find_module``: returns the module whose dict it is, if any. The namespace may outlive the module."""
        self._find_module = find_module
        self.variables = variables
        self.sent: dict[str, tuple[int, Any]] = {}  # the last binding of each name: its number, and the value
        self.imports: dict[str, tuple[int, str | None]] = {}  # see `_CallReducer._import_of`
        self.received: dict[str, tuple[int, Any]] = {}

    @property
    def module(self) -> types.ModuleType | None:
        """The module whose globals these are, or None."""
        return self._find_module()


class GlobalName(NamedTuple):
    """A name in a namespace, to which code refers."""

    namespace: Namespace
    name: str
    is_bound_by_code: bool = False


class Needed(NamedTuple):
    """A definition that a call needs."""

    key: str
    version: int  # the number of the handle whose pickle makes it
    made_before: Sequence[str]  # the keys of what must be there before it can be made, such as the bases of a class
    bindings: Sequence[tuple[Namespace, str, int]]  # the globals that are bound to it, and the numbers of the bindings


class Stored:
    """An object that was sent beside the calls. It is rebuilt for the first call that needs it."""

    def __init__(self, unpack: Unpack) -> None:
        self.unpack = unpack
        self.definition: Any = None  # kept alive as long as this is stored

    @functools.cached_property
    def object(self) -> Any:
        """The object of a handle."""
        rebuilt = self.unpack()
        del self.unpack  # it holds the memory of the message
        return rebuilt


class CachedFunction:
    """A function that stays in the worker, for calls that bring their arguments only."""

    def __init__(self, environment: int, globals_before: bytes, function: bytes) -> None:
        """``environment`` is for `adopt_environment`; the others are pickles: arguments of `prepare`, the function."""
        self._environment = environment
        self._globals_before = globals_before
        self._pickled = function
        self._prepare: tuple[Any, ...] = ()
        self._function: Callable[..., Any] | None = None

    def function(self) -> Callable[..., Any]:
        """Return the function, once all that it refers to is as this call needs it."""
        adopt_environment(self._environment)
        self._prepare = self._prepare or loads(self._globals_before, ())
        prepare(*self._prepare)
        if self._function is None:
            self._function = loads(self._pickled, ())
        return self._function


# What arrives beside the calls, and what each call begins with


def store_object(number: int, unpack: Unpack) -> None:
    """Store the object that has arrived under ``number``."""
    stored[number] = Stored(unpack)


def forget(number: int) -> None:
    """Let go of a stored object."""
    stored.pop(number, None)


def stored_object(number: int) -> Any:
    """Return the object that a handle stands for. The pickle of a call refers to it by this function."""
    return stored[number].object


def adopt_environment(number: int) -> None:
    """Have the environment of the script that was sent under ``number``; 0: that which the worker began with."""
    global _environment
    if number != _environment:
        stored[number].unpack()
        _environment = number


def prepare(constants: Iterable[tuple[Namespace, str, int, Any]], needed: Sequence[Needed]) -> None:
    """Bring the globals and definitions to the state that a call was made with.

    The first pickle of a call calls this as it is read, before the arguments are; for a `CachedFunction` it is
    called before the function is. `store_object` has stored all definitions of which the worker lacks the version.
    Constants come first: to rebuild a definition may run code of the user's, which reads them.
    """
    for constant in constants:
        bind(*constant)
    _awaited.clear()
    _awaited.update((each.key, each) for each in needed if _versions.get(each.key) != each.version)
    for one in needed:
        _bind_definition(one, find_definition(one.key))


def find_definition(key: str) -> Any:
    """Return the definition of this key. If the call has brought a new version, make that first.

    The bases of a class are made before its own pickle is read. They may refer to it, as a base does that keeps a list
    of its subclasses: then they have made it, and it is no longer awaited.
    """
    if key in _awaited:
        for earlier in _awaited[key].made_before:
            find_definition(earlier)
    needed = _awaited.pop(key, None)
    if needed is not None:  # what must be there first may have made this one, too
        store = stored[needed.version]
        store.definition = made = store.unpack()
        if keys.key_of(made) is None:
            keys.add(made, key)
        _versions[key] = needed.version
        _bind_definition(needed, made)
    definition = keys.find(key)
    if definition is None:
        raise LookupError("a class or function of the other process is gone in this one")
    return definition


def _bind_definition(needed: Needed, made: Any) -> None:
    for namespace, name, number in needed.bindings:
        bind(namespace, name, number, made)


def is_known_to_sender(key: str | None) -> bool:
    """Return whether the process that sends the calls has sent this definition."""
    return key in _versions


def mark(key: str) -> object:
    """Return the `object()` of this key."""
    known: object = keys.find(key)
    if known is None:
        known = object()
        keys.add(known, key)
    return known


# Functions


def make_function(
    key: str | None, code: types.CodeType, namespace: Namespace, name: str, cells: Sequence[types.CellType | None]
) -> types.FunctionType:
    """Return the function of this key with this code. `complete_function` adds the rest.

    ``cells`` has a cell where another function has brought it, and None where it is the function's own.
    """
    known: types.FunctionType | None = keys.find(key)
    if known is not None:
        if not keys.originates_here(known):
            known.__code__ = code
        return known
    closure = tuple(types.CellType() if cell is None else cell for cell in cells)
    made = types.FunctionType(code, namespace.variables, name, None, closure or None)
    if key is not None:
        keys.add(made, key)
    return made


def complete_function(
    fn: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any], dict[int, Any], Sequence[str], Any]
) -> None:
    """Set attributes of the function, its own dict and the contents of cells; import the submodules that it names."""
    if keys.originates_here(fn):
        return
    attributes, own_dict, contents, submodules, _ = state
    for submodule in submodules:
        importlib.import_module(submodule)
    for name, value in attributes.items():
        setattr(fn, name, value)
    vars(fn).clear()
    vars(fn).update(own_dict)
    for index, value in contents.items():
        cell_of(fn, index).cell_contents = value


def cell_of(fn: types.FunctionType, index: int) -> types.CellType:
    """Return a cell of a function, for another function that shares it."""
    return fn.__closure__[index]  # type: ignore[index]


def method_of(cls: type, name: str) -> Any:
    """Return the function of a method."""
    held = vars(cls)[name]
    return getattr(held, "__func__", held)


# Classes
#
# A class statement runs code: the body, the metaclass, `__set_name__` of what is in the body, `__init_subclass__` of
# the bases. All that has run in the script, and what it has done to the class is in the class. To run it again would
# need the body as it was, and keyword arguments that nobody knows any more; and it would do a second time what hooks do
# elsewhere, such as to enter the class into a registry. So a class is copied: a bare type of the same layout is made,
# and its attributes are set past the metaclass. The bare type comes first, as the attributes may refer to it.


def make_class(key: str, metaclass: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """Return the class of this key, without its attributes. `set_attributes` and `complete_class` add these."""
    known: type | None = keys.find(key)
    if known is not None:
        if known.__bases__ != bases and not keys.originates_here(known):
            _native(metaclass, "__setattr__")(known, "__bases__", bases)
        return known
    owners = {base for each in bases for base in each.__mro__} - {object}
    with _without_hook("__init_subclass__", owners):
        made: type = _native(metaclass, "__new__")(metaclass, name, bases, body)
    keys.add(made, key)
    return made


def set_attributes(cls: type, attributes: dict[str, Any]) -> None:
    """Set attributes of a class, past a metaclass that guards or interprets them."""
    if not keys.originates_here(cls):
        set_natively = _native(type(cls), "__setattr__")
        for name, value in attributes.items():
            set_natively(cls, name, value)


def complete_class(cls: type, state: tuple[Any, Sequence[str], Sequence[type]]) -> None:
    """Remove attributes that the class has no more, and register the virtual subclasses of an abstract class."""
    if keys.originates_here(cls):
        return
    _, names, virtual_subclasses = state
    key = keys.key_of(cls) or ""
    for name in _attribute_names.get(key, set()).difference(names):
        if name in vars(cls):
            type.__delattr__(cls, name)
    _attribute_names[key] = set(names)
    owners = cls.__mro__[:-1] if virtual_subclasses else ()
    with _without_hook("__subclasshook__", owners):  # it may read globals that are bound later
        for subclass in virtual_subclasses:
            abc.ABCMeta.register(cls, subclass)  # type: ignore[arg-type]


def make_member(cls: type, name: str, data_type: type, args: tuple[Any, ...]) -> Any:
    """Return a member of an enum that is being made, or made anew; its attributes are the state of its pickle."""
    known = (vars(cls).get("_member_map_") or {}).get(name)
    return data_type.__new__(cls, *args) if known is None else known


def member_of(cls: Any, name: str) -> Any:
    """Return a member of an enum."""
    return cls._member_map_[name]


def make_type_alias(key: str, name: str, module: str) -> Any:
    """Return a type alias whose value `complete_type_alias` sets: Python asks for it when it is first used."""
    names: dict[str, Any] = {"__name__": module, "value": functools.partial(_values_of_aliases.get, key)}
    exec(f"type {name} = value()", names)
    keys.add(names[name], key)
    return names[name]


def complete_type_alias(alias: Any, value: Any) -> None:
    """Set the value of a type alias."""
    _values_of_aliases[keys.key_of(alias) or ""] = value


def _native(metaclass: type, method: str) -> Callable[..., Any]:
    """Return ``__new__`` or ``__setattr__`` of a metaclass, past what is written in Python but for `abc.ABCMeta`."""
    for base in metaclass.__mro__:
        function = vars(base).get(method)
        if isinstance(function, types.BuiltinFunctionType | types.WrapperDescriptorType):
            return function
        if function is not None and base is abc.ABCMeta:
            return getattr(base, method)  # type: ignore[no-any-return]
    raise AssertionError("`type` has both")


def make_instance(cls: type) -> Any:
    """Return an instance of a class that is being made and holds it: its own ``__new__`` may read what comes later."""
    return _native(cls, "__new__")(cls)


def dead_reference() -> weakref.ref[Any]:
    """Return a weak reference to what is gone."""
    return weakref.ref(Missing())


def make_property(kind: type[property], *functions_and_doc: Any) -> property:
    """Return an instance of a subclass of `property`, past an ``__init__`` that takes something else."""
    made = property.__new__(kind)
    property.__init__(made, *functions_and_doc)
    return made


@contextlib.contextmanager
def _without_hook(name: str, classes: Iterable[type]) -> Iterator[None]:
    """Keep a hook of these classes, such as ``__init_subclass__``, from running in this thread.

    Python has no way to make or register a type without calling its hooks. So each class gets another one meanwhile.
    """
    thread = threading.get_ident()
    with _making_classes:
        originals = {owner: vars(owner)[name] for owner in classes if name in vars(owner)}
        try:
            for owner, original in originals.items():

                def hook(cls: type, original: Any = original, /, *args: Any, **kwargs: Any) -> Any:
                    if threading.get_ident() != thread:
                        return original.__get__(None, cls)(*args, **kwargs)
                    return NotImplemented

                type.__setattr__(owner, name, classmethod(hook))
            yield
        finally:
            for owner, original in originals.items():
                type.__setattr__(owner, name, original)


# Globals


def namespace_of(key: str, name: str, goes_into_sys_modules: bool, module_attributes: dict[str, Any]) -> Namespace:
    """Return the namespace of this key.

    Args:
        key: the key.
        name: the name of the module.
        goes_into_sys_modules: the module is in `sys.modules` of the sending process, and no import finds it: so it is
            put into `sys.modules` of this process. The globals of ``__main__`` become those of this ``__main__``.
        module_attributes: ``__package__``, ``__file__`` and the like.
    """
    namespace: Namespace | None = keys.find(key)
    if namespace is None:
        module = sys.modules.get(name) if name == "__main__" else None
        was_received = module is not None and id(vars(module)) in namespaces  # it is of a module that this one replaces
        if module is None or was_received or not goes_into_sys_modules:
            module = types.ModuleType(name)
        if goes_into_sys_modules:
            sys.modules[name] = module
        namespace = Namespace(lambda: module, vars(module))
        namespace.variables.update(module_attributes, __builtins__=builtins)
        _received_namespaces.append(namespace)
        keys.add(namespace, key)
        namespaces[id(namespace.variables)] = namespace
    return namespace


def namespace_of_module(name: str) -> Namespace:
    """Return the globals of a module that each process imports by itself."""
    module = importlib.import_module(name)
    return Namespace(lambda: module, vars(module))


def module_of(namespace: Namespace) -> types.ModuleType | None:
    """Return the module whose globals these are."""
    return namespace.module


def imported(module: str, name: str) -> Any:
    """Return what a module holds under a name."""
    return getattr(importlib.import_module(module), name)


def imported_sentinel(module: str, name: str, kind: type | None) -> Any:
    """Return the object without a state that a module holds under a name.

    If the script has bound the name in the module anew, this process has another object there: then make a new one.
    ``kind``: its class, if an import finds that.
    """
    sentinel = getattr(importlib.import_module(module), name, None)
    return sentinel if kind is None or type(sentinel) is kind else object.__new__(kind)


def bind(namespace: Namespace, name: str, number: int, value: Any) -> None:
    """Bind a name in a namespace, unless a task has bound it since the script did.

    Args:
        namespace: the globals.
        name: the name.
        number: of the binding in the script. It is another one after the script has bound the name anew.
        value: a copy of the script's value, or `Missing`.
    """
    if keys.originates_here(namespace):
        return
    variables = namespace.variables
    last_number, last_value = namespace.received.get(name, (None, Missing))
    if last_number == number and variables.get(name, Missing) is not last_value:
        return
    if last_number is None and name in variables and not name.startswith("__"):
        # A task has bound it, by `globals()` or `setattr`: a ``global`` statement is known to the script. The value
        # that is noted as received differs from any other, so the name counts as bound by a task from now on.
        value = object()
    elif value is Missing:
        variables.pop(name, None)
    else:
        variables[name] = value
    namespace.received[name] = number, value


keys = Keys()
namespaces = weakref.WeakValueDictionary[int, Namespace]()  # by the identity of their dicts, which they keep alive
stored: dict[int, Stored] = {}  # by the numbers of handles
_received_namespaces: list[Namespace] = []  # kept alive: functions refer to the dict only
_versions: dict[str, int] = {}  # by the keys of definitions: the number of the version that is here
_awaited: dict[str, Needed] = {}  # what is to be made before the call begins
_values_of_aliases: dict[str, Any] = {}  # by the keys of type aliases
_attribute_names: dict[str, set[str]] = {}  # by the keys of classes: those that came with the class
_making_classes = threading.RLock()
_environment = 0  # the number of the environment that this process has adopted
