"""The receiving side: the copies that this process has of the definitions and globals of another process.

In a worker the other process is the script, which sends calls. In the script the other process is a worker, which
sends results.

A *definition* (a class, a function with a name) has a key that is the same in every process. A call lists the
definitions that it needs, each in a certain *version*. The pickles of these versions have arrived before the call.
`prepare` creates the definitions that this process lacks, and changes a definition if this process has another version
of the definition. `find_definition` returns a definition by its key.

A *namespace* is one dict of globals. It has a key too, so functions that share their globals in the sending process
share them in this process. `bind` sets a global in a namespace.

Pickles that arrive can refer by key to objects that this process has defined itself, but they do not change these
objects. So a result, which may refer to the script's own classes and globals, changes nothing in the user's script.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import functools
import importlib
import os
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..interrupts import RLock
from ..pickling import loads

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
Unpack = Callable[[], Any]  # unpickles an object that has arrived, and returns the object


class Missing:
    """A marker for a name that is not bound. The class itself is used instead of a value."""


class Keys:
    """The keys with which processes refer to each other's objects: definitions, namespaces and plain `object()`s.

    This table maps each such object to its key, and each key to its object. It keeps no object alive, except objects
    that take no weak references, such as `object()`.
    """

    def __init__(self) -> None:
        # Maps a key to a function that returns the object. The function returns None if the object was deleted.
        self._objects: dict[str, Callable[[], Any]] = {}
        self._keys: dict[int, str] = {}  # maps the `id` of an object to its key
        self._own = set[str]()  # the keys of objects that originate in this process
        # Reentrant, because garbage collection may call `_remove` in the thread that has the lock.
        self.lock = RLock()

    def add(self, obj: Any, key: str | None = None) -> str:
        """Give ``obj`` a key, and return the key.

        ``key`` is the key with which ``obj`` has arrived from another process. If it is None, ``obj`` originates in
        this process and gets a new key.
        """
        if key is None:
            key = uuid.uuid4().hex
            self._own.add(key)
        try:
            self._objects[key] = weakref.ref(obj)
            weakref.finalize(obj, self._remove, key, id(obj)).atexit = False
        except TypeError:  # ``obj`` takes no weak references
            self._objects[key] = lambda: obj
        self._keys[id(obj)] = key
        return key

    def key_of_or_add(self, obj: Any) -> str:
        """Return the key of ``obj``. If ``obj`` has none, it gets a new key."""
        with self.lock:
            return self._keys.get(id(obj)) or self.add(obj)

    def key_of(self, obj: Any) -> str | None:
        """Return the key of ``obj``, or None."""
        return self._keys.get(id(obj))

    def find(self, key: str | None) -> Any:
        """Return the object with this key, or None."""
        get_object = self._objects.get(key) if key else None
        return get_object and get_object()

    def originates_here(self, obj: Any) -> bool:
        """Return whether ``obj`` got its key in this process, and did not arrive from another process.

        Pickles that arrive do not change an object that got its key in this process.
        """
        return self._keys.get(id(obj)) in self._own

    def _remove(self, key: str, identity: int) -> None:
        """Remove the entries of a deleted object, whose `id` was ``identity``.

        By now an entry may belong to a newer object, because Python may have given the `id` to another object, and
        because an object that arrives again gets the same key. Such an entry stays.
        """
        with self.lock:
            if self._keys.get(identity) == key:
                del self._keys[identity]
            if self.find(key) is None:
                self._objects.pop(key, None)
                self._own.discard(key)
                _versions.pop(key, None)
                _attribute_names.pop(key, None)
                _values_of_aliases.pop(key, None)


class Namespace:
    """A dict of globals, and a record of the values that this process has sent and received for these globals.

    In a receiving process the dict belongs to a module, so that `pickle` and `typing.get_type_hints` find the same
    names in this module as in the module of the sending process.

    To bind a global means to assign an object to its name. Each binding has a number. When the sending process binds
    the name to another object, the new binding has another number.
    """

    def __init__(self, find_module: Callable[[], types.ModuleType | None], variables: dict[str, Any]) -> None:
        """Make a namespace.

        Args:
            find_module: returns the module whose dict of globals is ``variables``. It returns None if there is no such
                module, or if the module was deleted.
            variables: the dict of globals.
        """
        self._find_module = find_module
        self.variables = variables
        # Maps a name to the last binding that this process has sent: the number of the binding, and the value or a weak
        # reference to the value.
        self.sent: dict[str, tuple[int, Any]] = {}
        # The cache of `_CallReducer._import_of`. Maps the name of a global to a pair: the number of the binding for
        # which the entry was made; and the name of the module from which a worker imports the value, or None if the
        # value is sent as data.
        self.imports: dict[str, tuple[int, str | None]] = {}
        # Maps a name to the last binding that this process has received: the number of the binding and the value.
        self.received: dict[str, tuple[int, Any]] = {}

    @property
    def module(self) -> types.ModuleType | None:
        """The module that has these globals, or None."""
        return self._find_module()


class GlobalName(NamedTuple):
    """A global that a pickled function or class needs: the dict of globals, and the name of the global in this dict."""

    namespace: Namespace
    name: str
    # Whether the function assigns or deletes the global. If so, and if the script has not bound the name, a call tells
    # the worker that the name is not bound.
    is_bound_by_code: bool = False


class Needed(NamedTuple):
    """A definition that a call needs, in a certain version.

    Each call is sent with a list of these, from which `prepare` creates or updates the definitions in the worker.
    """

    key: str
    version: int  # also the number under which `store_object` has stored the pickle of this version
    made_before: Sequence[str]  # the keys of definitions to create first: the bases and the metaclass of a class
    # The globals whose value is the definition: for each its namespace, its name, and the number of its binding.
    bindings: Sequence[tuple[Namespace, str, int]]


class Stored:
    """An object that has arrived before the calls that need it. The first of these calls unpickles it."""

    def __init__(self, unpack: Unpack) -> None:
        self.unpack = unpack
        # The definition that `find_definition` has unpickled, or None. This reference keeps it alive; `keys` does not.
        self.definition: Any = None

    @functools.cached_property
    def object(self) -> Any:
        """The object, which the first access unpickles. Every later access returns the same object."""
        rebuilt = self.unpack()
        del self.unpack  # otherwise this function would keep the memory of the message alive
        return rebuilt


class CachedFunction:
    """A function that a worker keeps, so that a call of the function is sent only with its arguments."""

    def __init__(self, environment: int, preparation: bytes, function: bytes) -> None:
        """Keep the function as a pickle, which the first call of the method `function` unpickles.

        Args:
            environment: the number of the script's environment; see `adopt_environment`.
            preparation: the pickled arguments of `prepare`, which updates the definitions and globals that the function
                needs.
            function: the pickled function.
        """
        self._environment = environment
        self._pickled_preparation = preparation
        self._pickled_function = function
        self._preparation: tuple[Any, ...] = ()
        self._function: Callable[..., Any] | None = None

    def function(self) -> Callable[..., Any]:
        """Update all definitions and globals to which the function refers, and return the function."""
        adopt_environment(self._environment)
        self._preparation = self._preparation or loads(self._pickled_preparation, ())
        prepare(*self._preparation)
        if self._function is None:
            self._function = loads(self._pickled_function, ())
        return self._function


# Stored objects, and the preparation of a call


def store_object(number: int, unpack: Unpack) -> None:
    """Store an object that has arrived, until `forget` is called.

    Args:
        number: the number of the handle that the script keeps for the object.
        unpack: unpickles the object. It is called when the object is first needed.
    """
    stored[number] = Stored(unpack)


def forget(number: int) -> None:
    """Delete a stored object, because the handle of the object no longer exists in the script."""
    stored.pop(number, None)


def stored_object(number: int) -> Any:
    """Return a stored object. In the pickle of a call, a handle is written as ``stored_object(number)``."""
    return stored[number].object


def adopt_environment(number: int) -> None:
    """Apply the script's environment variables, working directory and import path to this process.

    ``number`` is the number of the stored object that contains all three. If the script has not changed any of them
    since the pool was made, ``number`` is 0 and nothing is applied, because the worker has started in this environment.
    """
    global _environment
    if number != _environment:
        stored[number].unpack()
        _environment = number


def prepare(constants: Iterable[tuple[Namespace, str, int, Any]], needed: Sequence[Needed]) -> None:
    """Bring globals and definitions into the state that they had in the script when the call was made.

    This function runs before the call itself is unpickled. It is called by a pickle that precedes the call, or by
    `CachedFunction.function`. By then `store_object` has stored every version that this process does not have yet.
    Constants are bound before the definitions are created, because creating a definition may run user code that reads
    constants.

    Args:
        constants: the globals that are constants, each as the arguments of `bind`.
        needed: all definitions that the call needs.
    """
    for constant in constants:
        bind(*constant)
    _awaited.clear()
    _awaited.update((each.key, each) for each in needed if _versions.get(each.key) != each.version)
    for definition in needed:
        _bind_definition(definition, find_definition(definition.key))


def find_definition(key: str) -> Any:
    """Return the definition with this key, in the version that the present call needs.

    If this process does not have this version yet, the version is unpickled first. The bases of a class are unpickled
    before the class. But the pickle of a base may refer to the class, for example if the base keeps a list of its
    subclasses. Then the class is created while the base is unpickled.

    Raises:
        LookupError: this process has no definition with this key.
    """
    if key in _awaited:
        for earlier in _awaited[key].made_before:
            find_definition(earlier)
    # The entry is removed only after the loop. During the loop, the pickle of a base may call this function with the
    # same key. That call creates the definition and removes the entry, so the definition is not created again.
    needed = _awaited.pop(key, None)
    if needed is not None:
        store = stored[needed.version]
        store.definition = made = store.unpack()
        if keys.key_of(made) is None:
            keys.add(made, key)
        _versions[key] = needed.version
        _bind_definition(needed, made)
    definition = keys.find(key)
    if definition is None:
        raise LookupError(
            "the pickle refers to a class or function that was deleted in this process: keep it in a variable"
        )
    return definition


def _bind_definition(needed: Needed, made: Any) -> None:
    """Bind the globals whose value is this definition."""
    for namespace, name, number in needed.bindings:
        bind(namespace, name, number, made)


def is_known_to_sender(key: str | None) -> bool:
    """Return whether the definition with this key has come from the process that sends the calls.

    If so, a result contains only the key of the definition. The process that sent the definition finds it by this key.
    """
    return key in _versions


def mark(key: str) -> object:
    """Return the mark with this key. If this process does not have the mark yet, create it.

    A mark is a plain `object()` that code compares by identity, such as ``MISSING = object()``. If workers cannot
    import a mark, it is pickled as ``mark(key)``. So all calls in a worker use the same object.
    """
    known: object = keys.find(key)
    if known is None:
        known = object()
        keys.add(known, key)
    return known


# Functions


def make_function(
    key: str | None, code: types.CodeType, namespace: Namespace, name: str, cells: Sequence[types.CellType | None]
) -> types.FunctionType:
    """Return the function with this key.

    A function that originates in this process is returned unchanged. A function that this process has received before
    gets the new code. If there is no such function, it is created. `complete_function` sets the rest of the function.

    Args:
        key: the key; None for a function without a key. Only definitions have keys, lambdas for example have none.
        code: the code.
        namespace: the globals.
        name: the name.
        cells: one item for each closure variable. If an earlier function in the pickle has the same variable, the item
            is the cell of that function. Otherwise the item is None, and this function gets a new cell.
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
    """Fill a function that `make_function` has returned, and import the submodules that the function uses.

    The last item of ``state`` needs no work here. It may contain calls of `bind` for the globals that the function
    reads, and unpickling the item has already made these calls.
    """
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
    """Return a cell (a closure variable) of a function, for the pickle of another function that shares the cell."""
    return fn.__closure__[index]  # type: ignore[index]


def method_of(cls: type, name: str) -> Any:
    """Return the plain function of a method, without a `classmethod` or `staticmethod` around it.

    A method of a class of the script is pickled as ``method_of(cls, name)``, except in the pickle of a definition,
    because the class may have no methods yet when that pickle is read.
    """
    attribute = vars(cls)[name]
    return getattr(attribute, "__func__", attribute)


# Classes
#
# A class statement runs code: the body, the metaclass, `__set_name__` of the objects in the body, and
# `__init_subclass__` of the bases. This code has run in the script, and its effects on the class are in the class. The
# code cannot run again in this process, because Python keeps neither the body as it was nor the keyword arguments of
# the statement. The code also must not run again, because it may have effects outside of the class. For example, a
# metaclass may add the class to a registry.
#
# So a class is copied. First an empty class of the same layout is created, because the attributes may refer to the
# class. Then its attributes are set, without calling a method of the metaclass that is written in Python.


def make_class(key: str, metaclass: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """Create the class with this key. If this process already has the class, replace its bases.

    `set_attributes` sets the attributes of the class that are not in ``body``. A class that originates in this process
    is returned unchanged.
    """
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
    """Set attributes of a class. A ``__setattr__`` of the metaclass may refuse to set them, so it is not called."""
    if not keys.originates_here(cls):
        set_natively = _native(type(cls), "__setattr__")
        for name, value in attributes.items():
            set_natively(cls, name, value)


def complete_class(cls: type, state: tuple[Any, Sequence[str], Sequence[type]]) -> None:
    """Complete ``cls``, which is the copy of a class of the process that has sent the pickle.

    Attributes that the original class no longer has are deleted from the copy. The virtual subclasses of the original
    become virtual subclasses of the copy (`abc.ABCMeta.register`).

    The first item of ``state`` needs no work here: unpickling it has already set the attributes of the copy. The other
    items are the names of all attributes, and the virtual subclasses, which only an abstract class has.
    """
    if keys.originates_here(cls):
        return
    _, names, virtual_subclasses = state
    key = keys.key_of(cls) or ""
    for name in _attribute_names.get(key, set()).difference(names):
        if name in vars(cls):
            type.__delattr__(cls, name)
    _attribute_names[key] = set(names)
    owners = cls.__mro__[:-1] if virtual_subclasses else ()
    with _without_hook("__subclasshook__", owners):  # the hook may read globals that are not bound yet
        for subclass in virtual_subclasses:
            abc.ABCMeta.register(cls, subclass)  # type: ignore[arg-type]


def make_member(cls: type, name: str, data_type: type, args: tuple[Any, ...]) -> Any:
    """Return a member of an enum, or create it. Only the pickle of the enum itself calls this function.

    The pickle then sets the attributes of the member.
    """
    known = (vars(cls).get("_member_map_") or {}).get(name)
    return data_type.__new__(cls, *args) if known is None else known


def member_of(cls: Any, name: str) -> Any:
    """Return the member of an enum with this name.

    A member of an enum of the script is pickled as ``member_of(cls, name)``, except in the pickle of the enum itself.
    """
    return cls._member_map_[name]


def make_type_alias(key: str, name: str, module: str) -> Any:
    """Create a type alias without its value, which `complete_type_alias` stores later.

    The alias looks its value up in `_values_of_aliases` when the value is first used, because Python evaluates the
    expression after ``=`` only then.
    """
    names: dict[str, Any] = {"__name__": module, "value": functools.partial(_values_of_aliases.get, key)}
    exec(f"type {name} = value()", names)
    keys.add(names[name], key)
    return names[name]


def complete_type_alias(alias: Any, value: Any) -> None:
    """Store the value of a type alias, which the alias looks up when its ``__value__`` is first read."""
    _values_of_aliases[keys.key_of(alias) or ""] = value


def _native(metaclass: type, method: str) -> Callable[..., Any]:
    """Return the ``__new__`` or ``__setattr__`` that a class inherits from a base written in C, or from `abc.ABCMeta`.

    A class is copied with these methods, because user code must not run. So methods that are written in Python are
    skipped. Those of `abc.ABCMeta` are written in Python too, but an abstract class does not work without them.
    """
    for base in metaclass.__mro__:
        function = vars(base).get(method)
        if isinstance(function, types.BuiltinFunctionType | types.WrapperDescriptorType):
            return function
        if function is not None and base is abc.ABCMeta:
            return getattr(base, method)  # type: ignore[no-any-return]
    raise AssertionError("every class inherits both methods from `type` or `object`")


def make_instance(cls: type) -> Any:
    """Return an instance of ``cls`` before the attributes of ``cls`` itself have been set.

    This is needed if an attribute of the class refers to an instance of the class. A ``__new__`` that the class defines
    is not called, because it may read attributes of the class, or globals, that are not set yet.
    """
    return _native(cls, "__new__")(cls)


def dead_reference() -> weakref.ref[Any]:
    """Return a dead weak reference: the copy of a weak reference whose object was deleted in the sending process."""
    return weakref.ref(Missing())


def make_property(kind: type[property], *functions_and_doc: Any) -> property:
    """Return an instance of a subclass of `property`.

    The ``__init__`` of the subclass is not called, because its parameters may differ from those of `property`.
    """
    made = property.__new__(kind)
    property.__init__(made, *functions_and_doc)
    return made


@contextlib.contextmanager
def _without_hook(name: str, classes: Iterable[type]) -> Iterator[None]:
    """Keep a hook of these classes, such as ``__init_subclass__``, from running in this thread.

    The hook has run in the script, and must not run again when the class is copied. But Python always calls the hook
    when a class is created or registered. So during this block the hook of each class is replaced with a function that
    does nothing in this thread, and that calls the original hook in all other threads.
    """
    with _making_classes:
        originals = _own_hooks(name, classes)
        try:
            _set_hooks(name, {owner: _silenced(hook) for owner, hook in originals.items()})
            yield
        finally:
            _set_hooks(name, originals)


def _own_hooks(name: str, classes: Iterable[type]) -> dict[type, Any]:
    return {owner: vars(owner)[name] for owner in classes if name in vars(owner)}


def _set_hooks(name: str, hooks: Mapping[type, Any]) -> None:
    for owner, hook in hooks.items():
        type.__setattr__(owner, name, hook)


def _silenced(original: Any) -> Any:
    """Return a hook that does nothing in the thread that calls this function, and calls ``original`` in all others."""
    thread = threading.get_ident()

    def hook(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original.__get__(None, cls)(*args, **kwargs)
        return NotImplemented

    return classmethod(hook)


# Globals


def namespace_of(key: str, name: str, goes_into_sys_modules: bool, module_attributes: dict[str, Any]) -> Namespace:
    """Return the namespace with this key. If this process does not have it yet, create it, and a module for it.

    Args:
        key: the key.
        name: the name of the module.
        goes_into_sys_modules: whether to put the module into `sys.modules` of this process. This is needed if the
            script has the module in its `sys.modules`, but no import finds the module. If the name is ``__main__``, the
            module that this process already has under this name is used.
        module_attributes: globals that Python sets in every module: ``__package__``, ``__file__`` and others.
    """
    namespace: Namespace | None = keys.find(key)
    if namespace is None:
        module = sys.modules.get(name) if name == "__main__" else None
        # If the script has replaced its ``__main__`` by another module, the ``__main__`` of this process is the copy of
        # the former ``__main__``. A new module is then created for the present ``__main__`` of the script.
        is_taken = module is not None and id(vars(module)) in namespaces
        if module is None or is_taken or not goes_into_sys_modules:
            module = types.ModuleType(name)
        if goes_into_sys_modules:
            sys.modules[name] = module
        namespace = Namespace(lambda: module, vars(module))
        namespace.variables.update(module_attributes, __builtins__=builtins)
        _received_namespaces.append(namespace)
        keys.add(namespace, key)
        namespaces[id(namespace.variables)] = namespace
    return namespace


def namespace_of_module(name: str, of_pytest: Mapping[str, str]) -> Namespace:
    """Return a namespace with the globals of a module that each process imports by itself.

    ``of_pytest`` names the globals that pytest has added to the module in the sending process, and the modules that are
    their values. They are added here as well, unless the module has them already, or pytest is not installed here.
    """
    module = importlib.import_module(name)
    for added, value in of_pytest.items():
        if added not in vars(module):
            with contextlib.suppress(ImportError):
                vars(module)[added] = importlib.import_module(value)
    return Namespace(lambda: module, vars(module))


def module_of(namespace: Namespace) -> types.ModuleType | None:
    """Return the module that has these globals, or None.

    A module that workers cannot import is pickled as ``module_of(namespace)``.
    """
    return namespace.module


def imported(module: str, name: str) -> Any:
    """Return an attribute of a module that each process imports by itself."""
    return getattr(importlib.import_module(module), name)


def imported_sentinel(module: str, name: str, kind: type | None) -> Any:
    """Return a sentinel (an object without state) that is a global of a module that each process imports.

    ``kind`` is the class of the sentinel, or None if workers cannot import the class. In this process the global may
    have another value. For example, the script may have assigned the sentinel to the global of the module, and a worker
    does not run the script. If the value is no object of the class ``kind``, a new object of this class is returned.
    """
    sentinel = getattr(importlib.import_module(module), name, None)
    return sentinel if kind is None or type(sentinel) is kind else object.__new__(kind)


def bind(namespace: Namespace, name: str, number: int, value: Any) -> None:
    """Assign the script's value to a global, unless a task has assigned another value since the script's last change.

    Args:
        namespace: the globals.
        name: the name.
        number: the number of the binding. It changes when the script binds the name to another object.
        value: a copy of the script's value, or `Missing` if the name is not bound in the script.
    """
    if keys.originates_here(namespace):
        return
    variables = namespace.variables
    last_number, last_value = namespace.received.get(name, (None, Missing))
    if last_number == number and variables.get(name, Missing) is not last_value:
        return
    if last_number is None and name in variables and not name.startswith("__"):
        # A task has bound the name through `globals()` or `setattr`, so the task's value stays. It must also stay in
        # later calls with the same number. The test above then compares the present value with the value recorded in
        # ``namespace.received``, and keeps the present value if they differ. So a new object is recorded, because no
        # global has this object as its value. (This branch is not reached if a function binds the name with a
        # ``global`` statement: the script sends a binding of the name with such a function.)
        value = object()
    elif value is Missing:
        variables.pop(name, None)
    else:
        variables[name] = value
    namespace.received[name] = number, value


keys = Keys()
namespaces = weakref.WeakValueDictionary[int, Namespace]()  # maps the `id` of a dict of globals to its namespace
stored: dict[int, Stored] = {}  # maps the number of a handle to its object
# Keeps the received namespaces alive, because functions refer only to the dicts of namespaces.
_received_namespaces: list[Namespace] = []
# Maps the key of a received definition to the number of the version that this process has; see `Needed.version`.
_versions: dict[str, int] = {}
_awaited: dict[str, Needed] = {}  # maps keys to definitions that must be unpickled for the present call
_values_of_aliases: dict[str, Any] = {}  # maps the key of a type alias to its value
_attribute_names: dict[str, set[str]] = {}  # maps the key of a class to the attributes that were last received
_making_classes = RLock()  # held by `_without_hook`, so that two threads do not replace a hook at once
_environment = 0  # the number with which `adopt_environment` was last called; 0 before the first call


def _renew_locks() -> None:
    """Replace the locks in the child of a fork.

    Another thread of the parent may have held the locks. The child has no such thread that could release them.
    """
    global _making_classes
    _making_classes = RLock()
    keys.lock = RLock()


os.register_at_fork(after_in_child=_renew_locks)
