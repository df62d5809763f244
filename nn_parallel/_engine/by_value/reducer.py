"""Pickles for another process of the same program: by name, by key or by value."""

from __future__ import annotations

import abc
import builtins
import contextlib
import copyreg
import datetime
import dis
import enum
import functools
import importlib
import itertools
import logging
import multiprocessing.connection
import os
import pathlib
import pickle
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import cloudpickle
import torch

from ..pickling import Pickler, make_cached, module_defining
from ..process_environment import INSTALLED, working_directory
from . import globals as receiving
from .globals import GlobalName, Namespace, keys, namespaces

# What a fresh interpreter would import


def is_importable(name: str) -> bool:
    """Return whether a fresh interpreter with this import path would import the module that is loaded under ``name``.

    A glance at `sys.modules` does not tell: modules that were made by hand, from a file that is not on the path, or by
    a test runner are there as well. So for a file that is not part of an installation the finders are asked which file
    an import of this name would load.
    """
    global _looked_up_on
    path = [*sys.path, working_directory() if "" in sys.path else ""]
    if path != _looked_up_on:
        _importable.clear()
        _looked_up_on = path
    return _is_importable(name)


def _is_importable(name: str) -> bool:
    module = sys.modules.get(name)
    if module is None or _goes_by_value(name):
        return False
    known, answer = _importable.get(name, (None, False))
    if known is not module:
        answer = _would_be_imported(name, module)
        _importable[name] = module, answer
    return answer


def _would_be_imported(name: str, module: types.ModuleType) -> bool:
    origin = getattr(module, "__file__", None) or getattr(getattr(module, "__spec__", None), "origin", None)
    if name in ("__main__", "__mp_main__"):
        return False
    if origin in ("built-in", "frozen"):
        return True
    parent, _, last = name.rpartition(".")
    is_in_package = bool(parent) and getattr(sys.modules.get(parent), last, None) is module
    stem = os.path.basename(origin or "").partition(".")[0]
    if (origin or "").startswith(INSTALLED) and (is_in_package or stem in (last, "__init__")):  # not by another name
        return True
    if parent and not _is_importable(parent):
        return False
    spec = _find_spec(name, getattr(sys.modules.get(parent), "__path__", None))
    if spec is not None:
        return spec.origin == origin or _is_same_file(spec.origin, origin)
    return is_in_package  # made by its package, as `torch.ops`


def _find_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # somebody else's finder
            continue
        if spec is not None:
            return spec
    return None


def _is_same_file(one: str | None, other: str | None) -> bool:
    try:
        return bool(one and other) and os.path.samefile(one, other)  # type: ignore[arg-type]
    except OSError:
        return False


def _goes_by_value(name: str | None) -> bool:
    registered = cloudpickle.list_registry_pickle_by_value()
    return bool(registered) and any(f"{name}.".startswith(f"{each}.") for each in registered)


def goes_by_name(obj: Any) -> bool:
    """Return whether a fresh interpreter finds this function, class or module by importing it."""
    if isinstance(obj, types.ModuleType):
        return sys.modules.get(obj.__name__) is obj and is_importable(obj.__name__)
    return module_defining(obj) is not None and is_importable(obj.__module__)


def is_users(module: types.ModuleType) -> bool:
    """Return whether a module may be edited while the program runs: it is neither installed nor part of Python."""
    file = getattr(module, "__file__", None)
    return bool(file) and not str(file).startswith(INSTALLED)


_importable: dict[str, tuple[types.ModuleType, bool]] = {}
_looked_up_on: list[str] = []


# What code refers to


class CodeNames(NamedTuple):
    """The names in the code of a function, and of the functions and classes inside it."""

    reads: Sequence[str]  # globals
    binds: Sequence[str]  # globals
    attributes: frozenset[str]
    binds_closure: bool  # it has a ``nonlocal`` variable, and binds it


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> CodeNames:
    """Return the names that ``code`` refers to."""
    reads: dict[str, None] = {}
    binds: dict[str, None] = {}
    attributes = set[str]()
    binds_closure = False
    pending = [code]
    while pending:
        inner = pending.pop()
        pending += (const for const in inner.co_consts if isinstance(const, types.CodeType))
        attributes.update(inner.co_names)
        for instruction in dis.get_instructions(inner):
            if instruction.opname in _READING:
                reads[instruction.argval] = None
            elif instruction.opname in _BINDING:
                binds[instruction.argval] = None
            elif instruction.opname in _BINDING_CLOSURE:
                binds_closure |= instruction.argval in inner.co_freevars and instruction.argval in code.co_freevars
    return CodeNames(tuple(reads), tuple(binds), frozenset(attributes), binds_closure)


_READING = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}  # a class body reads by LOAD_NAME
_BINDING = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_BINDING_CLOSURE = {"STORE_DEREF", "DELETE_DEREF"}


def _annotations_of(obj: Any) -> dict[str, Any]:
    """Return the annotations of a function or class; from Python 3.14 on as texts if they cannot be evaluated yet."""
    if sys.version_info < (3, 14):
        annotations = vars(obj).get("__annotations__") if isinstance(obj, type) else obj.__annotations__
        return annotations or {}
    import annotationlib  # type: ignore[import-not-found]

    # To read the attribute `__annotations__` would evaluate them for good, in the script.
    annotate = annotationlib.get_annotate_from_class_namespace(vars(obj)) if isinstance(obj, type) else obj.__annotate__
    if annotate is None:
        own = vars(obj) if isinstance(obj, type) else {"__annotations__": obj.__annotations__}
        return dict(own.get("__annotations__") or own.get("__annotations_cache__") or {})
    for annotation_format in (annotationlib.Format.VALUE, annotationlib.Format.STRING):
        with contextlib.suppress(Exception):  # of the user's expression: a name that is not bound
            return dict(annotationlib.call_annotate_function(annotate, annotation_format, owner=obj))
    return {}


def _types_in(annotations: dict[str, Any], namespace: Namespace) -> list[str]:
    """Return the globals that annotations name in texts, if they are types: `typing.get_type_hints` looks them up.

    A word of a text may be the name of anything, such as a lock. Aliases are followed.
    """
    names = dict[str, None]()
    pending = list(annotations.values())
    while pending:
        annotation = pending.pop()
        text = "" if isinstance(annotation, type) else str(annotation)
        for name in re.findall(r"[^\W\d]\w*", text):
            value = namespace.variables.get(name)
            is_type = isinstance(value, _TYPES) or type(value).__module__ == "typing"
            if name not in names and value is not None and (is_type or is_constant(value)):
                names[name] = None
                pending.append(value)
    return list(names)


def _submodules(packages: Iterable[str], attributes: frozenset[str]) -> list[str]:
    """Return modules that code reaches by ``package.module``, and that an import of the package may not import."""
    submodules: list[str] = []
    pending = list(packages)
    while pending:
        package = pending.pop()
        inner = [name for each in attributes if (name := f"{package}.{each}") in sys.modules and is_importable(name)]
        pending += inner
        submodules += inner
    return submodules


def namespace_of(names: dict[str, Any], module: types.ModuleType | None = None) -> Namespace:
    """Return the namespace of a dict of globals. That of a module in `sys.modules` lives as long as the module."""
    with keys.lock:
        namespace = namespaces.get(id(names))
        if namespace is None:
            loaded = sys.modules.get(str(names.get("__name__")))
            if loaded is not None and vars(loaded) is names:
                namespace = _namespaces_of_modules[loaded] = Namespace(weakref.ref(loaded), names)
            else:
                namespace = Namespace(lambda: module, names)
            namespaces[id(names)] = namespace
            keys.add(namespace)
        return namespace


# What is a definition


def is_definition(obj: Any, is_global: bool = False) -> bool:
    """Return whether ``obj`` is sent once and then named by its key.

    Args:
        obj: any object that does not go by name.
        is_global: a global of the script is bound to it.
    """
    kind = type(obj)
    if issubclass(kind, type):
        return bool(obj.__flags__ & HEAP_TYPE)  # the others are made in C
    if kind in IDENTITIES:
        return True
    if kind is types.FunctionType:
        return _is_own_global(obj) and holds_no_data(obj)
    if kind is not _Cached:
        return False
    return is_global or keys.key_of(obj) is not None or global_naming(obj) is not None


def _is_own_global(fn: types.FunctionType) -> bool:
    """Return whether a global has the function under the function's own name: no lambda, method or inner function."""
    module = sys.modules.get(fn.__module__)
    return any(names.get(fn.__qualname__) is fn for names in (fn.__globals__, getattr(module, "__dict__", {})))


def holds_no_data(fn: types.FunctionType) -> bool:
    """Return whether a function holds only constants, definitions and other such functions.

    Data in a default, an attribute or a closure variable is the same object as elsewhere in the script, and may change
    in place: a function that holds some is sent with each call, as all data is. So is one with a closure variable that
    it binds anew (``nonlocal``), or that it shares with another function, which may do so.
    """
    seen = set[int]()
    pending = [fn]
    while pending:
        inner = pending.pop()
        seen.add(id(inner))
        if names_in(inner.__code__).binds_closure or any(count > _OWN_CELL for count in _references_to_cells(inner)):
            return False
        for content in contents_of_function(inner):
            if id(content) in seen or is_constant(content):
                continue
            if type(content) is types.FunctionType:
                pending.append(content)
            elif not is_definition(content) and not isinstance(content, enum.Enum):
                return False
    return True


def _references_to_cells(fn: types.FunctionType) -> list[int]:
    return [sys.getrefcount(cell) for cell in fn.__closure__ or ()]


def _sample(variable: object) -> types.FunctionType:
    return lambda: variable  # type: ignore[return-value]


_OWN_CELL = _references_to_cells(_sample(None))[0]  # of a cell that no other function shares


def contents_of_function(fn: Any) -> list[Any]:
    """Return the defaults, closure variables and attributes of a function; of what wraps one, the attributes."""
    contents = list(getattr(fn, "__dict__", {}).values())
    if type(fn) is types.FunctionType:
        contents += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        contents += map(contents_of, fn.__closure__ or ())
    return contents


def is_constant(value: Any) -> bool:
    """Return whether ``value`` stays what it is as long as it is the same object, and is easily sent."""
    kind = type(value)
    if kind in _IMMUTABLE or value is receiving.Missing:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_constant, value))
    if issubclass(kind, type) or kind in (types.FunctionType, types.ModuleType) or kind in FOUND_BY_NAME:
        return goes_by_name(value)
    if kind is types.BuiltinFunctionType:
        owner = value.__self__
        return owner is None or isinstance(owner, types.ModuleType) or (isinstance(owner, type) and goes_by_name(owner))
    return kind is object or place_of_sentinel(value) is not None


def _is_stateless(obj: Any) -> bool:
    """Return whether ``obj`` carries no state, so that only its identity matters."""
    kind = type(obj)
    if getattr(obj, "__dict__", None) or not kind.__flags__ & HEAP_TYPE:
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce_ex__", "__reduce__")):
        return False
    try:
        return obj.__reduce_ex__(4)[1:] == ((kind,), None, None, None)  # type: ignore[no-any-return]
    except Exception:
        return False


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return receiving.Missing


TYPE_PARAMETERS = (typing.ParamSpec, typing.TypeVar, typing.TypeVarTuple)
_TypeAlias: Any = getattr(typing, "TypeAliasType", None)  # from Python 3.12 on
_TYPES = (type, types.ModuleType, types.UnionType, types.GenericAlias)
IDENTITIES: set[type] = {typing.NewType, *TYPE_PARAMETERS, *filter(None, [_TypeAlias])}
HEAP_TYPE = 1 << 9


# The pickler


class Deferred:
    """A call in a pickle. It is made as the pickle is read, and what it returns stands in the place of this object."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def module_that_holds(name: str, value: Any) -> types.ModuleType | None:
    """Return a module that holds ``value`` under ``name``, and that a fresh interpreter would import."""
    for module_name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(name) is value and is_importable(module_name) and module is not builtins:
            return module
    return None


def _library_of(method: Any) -> str | None:
    """Return the installed module of a method's class, if the method is a function there, as `random.random`."""
    module = sys.modules.get(type(method.__self__).__module__)
    if module is None or vars(module).get(method.__name__) is not method:
        return None
    return module.__name__ if is_importable(module.__name__) and not is_users(module) else None


class Reducer(Pickler):
    """Pickles functions, classes and modules: by name what an import finds, by key a definition, by value the rest.

    A subclass says what is to become of a definition, and of the globals that functions read: `AnswerReducer`, and in
    `packer` that of a call and that of a definition.
    """

    is_call = True  # it goes to a worker

    def __init__(self, share: bool = True) -> None:
        super().__init__(share)
        self.by_value = set[int]()  # the classes and functions that this pickle defines, by their identity
        self.users_modules: dict[str, types.ModuleType] = {}  # of the user's own, of what goes by name
        self.namespaces = list[Namespace]()
        self.parameters: dict[int, weakref.ref[torch.nn.Parameter]] = {}  # in this pickle, by their identity
        self._cell_owners: dict[int, tuple[types.FunctionType, int]] = {}

    def refer_to(self, obj: Any) -> Any:
        """Reduce a definition that is not made in this pickle; None: it goes by value."""
        raise NotImplementedError

    def reduce_mark(self, mark: object) -> Any:
        """Reduce an `object()`, of which only the identity matters."""
        return receiving.mark, (keys.key_of_or_add(mark),)

    def note_globals(self, names: Sequence[GlobalName]) -> Any:
        """Note globals to which code in this pickle refers; return what is to be pickled with the code."""
        raise NotImplementedError

    def reducer_override(self, obj: Any) -> Any:
        """Reduce one object; see `pickle.Pickler.reducer_override`."""
        kind = type(obj)
        if kind is torch.Tensor or kind is types.CodeType:
            return super().reducer_override(obj)
        if issubclass(kind, type):  # not `isinstance`, which a mock may deceive
            return self._reduce_class(obj)
        reduce = self.REDUCERS.get(kind)
        if reduce is not None:
            return reduce(self, obj)
        if kind is torch.nn.Parameter:
            self.parameters[id(obj)] = weakref.ref(obj)
            return super().reducer_override(obj)
        if issubclass(kind, enum.Enum):
            return self._reduce_member(obj)
        if id(obj) not in self.by_value:
            if kind in FOUND_BY_NAME and goes_by_name(obj):
                return NotImplemented
            if (place := place_of_sentinel(obj)) is not None:
                return receiving.imported_sentinel, (*place, kind if goes_by_name(kind) else None)
            if kind is object:
                return self.reduce_mark(obj)
            if is_definition(obj):
                return self.refer_to(obj) or self._reduce_other(obj)
        return self._reduce_other(obj)

    def _reduce_other(self, obj: Any) -> Any:
        kind = type(obj)
        if id(kind) in self.by_value and isinstance(kind.__new__, types.FunctionType):
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if reduced[:2] == (copyreg.__newobj__, (kind,)):  # type: ignore[attr-defined]
                return receiving.make_instance, (kind,), *reduced[2:]
        if issubclass(kind, property) and kind is not property:
            functions = obj.fget, obj.fset, obj.fdel
            return receiving.make_property, (kind, *functions, obj.__doc__), getattr(obj, "__dict__", None)
        if kind is _Cached:
            return make_cached, (obj.__wrapped__, obj.cache_parameters(), obj.__dict__)
        if kind is typing.NewType:
            return typing.NewType, (obj.__name__, obj.__supertype__), {"__module__": obj.__module__}
        if kind in TYPE_PARAMETERS:
            return _reduce_type_parameter(obj)
        if kind is _TypeAlias:
            return self._reduce_type_alias(obj)
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(obj)
        if isinstance(obj, types.FunctionType):  # a proxy that calls itself one: cloudpickle would send what is in it
            return NotImplemented
        return super().reducer_override(obj)

    # Functions

    def _reduce_function(self, fn: types.FunctionType) -> Any:
        module = module_defining(fn)
        if module is not None and is_importable(fn.__module__):
            self.note_module(module)
            return NotImplemented
        if id(fn) in self.by_value:
            return self._reduce_function_by_value(fn, keys.key_of_or_add(fn))
        method = None if self.by_value else self._method_of_class(fn)  # a class that is being made may lack it yet
        if method is not None:
            return receiving.method_of, method
        if is_definition(fn):
            reduced = self.refer_to(fn)
            if reduced is not None:
                return reduced
        return self._reduce_function_by_value(fn, None)

    def _reduce_function_by_value(self, fn: types.FunctionType, key: str | None) -> Any:
        cells: list[types.CellType | None] = []
        contents: dict[int, Any] = {}
        for index, cell in enumerate(fn.__closure__ or ()):
            owner = self._cell_owners.setdefault(id(cell), (fn, index))
            if owner[0] is fn:
                cells.append(None)
                if (value := contents_of(cell)) is not receiving.Missing:
                    contents[index] = value
            else:
                cells.append(cell)
        attributes = {name: value for name in _ATTRIBUTES if (value := getattr(fn, name, None)) is not None}
        attributes["__annotations__"] = annotations = _annotations_of(fn)
        names, submodules = self._refers_to(fn, annotations)
        state = attributes, dict(vars(fn)), contents, submodules, self.note_globals(names)
        args = key, fn.__code__, namespace_of(fn.__globals__), fn.__name__, cells
        return receiving.make_function, args, state, None, None, receiving.complete_function

    def _refers_to(self, fn: types.FunctionType, annotations: dict[str, Any]) -> tuple[list[GlobalName], list[str]]:
        """Return the globals that a function refers to, and the submodules that it reaches through them."""
        namespace = namespace_of(fn.__globals__)
        reads, binds, attributes, _ = names_in(fn.__code__)
        types_in_annotations = _types_in(annotations, namespace)
        values = (namespace.variables.get(name) for name in reads)
        modules = {id(value): value for value in values if isinstance(value, types.ModuleType)}
        imported = [module.__name__ for module in modules.values() if goes_by_name(module)]
        submodules = _submodules(imported, attributes)
        if _is_imported(namespace):
            return [], submodules
        all_names = dict.fromkeys([*reads, *binds, *types_in_annotations])
        names = [GlobalName(namespace, name, name in binds) for name in all_names]
        for module in modules.values():
            if not goes_by_name(module):
                names += _names_of_module(module, attributes)
        return names, submodules

    def _reduce_cell(self, cell: types.CellType) -> Any:
        owner = self._cell_owners.get(id(cell))
        return super().reducer_override(cell) if owner is None else (receiving.cell_of, owner)

    def _method_of_class(self, fn: types.FunctionType) -> tuple[type, str] | None:
        """Return the class of the script whose method ``fn`` is, and the method's name there."""
        *path, name = fn.__qualname__.split(".")
        owner: Any = sys.modules.get(fn.__module__)
        for part in path:
            owner = getattr(owner, part, None)
        if not path or not issubclass(type(owner), type) or goes_by_name(owner):
            return None
        held = vars(owner).get(name)
        return (owner, name) if fn is held or fn is getattr(held, "__func__", None) else None

    def _reduce_method(self, method: types.MethodType) -> Any:
        """Look it up by its name as usual, but where that would find another one, or none yet."""
        owner = method.__self__
        if (module := _library_of(method)) is not None:
            return receiving.imported, (module, method.__name__)
        fn = method.__func__
        if id(owner) not in self.by_value and getattr(owner, fn.__name__, None) == method:
            return NotImplemented
        return types.MethodType, (fn, owner)

    def _reduce_builtin(self, function: types.BuiltinFunctionType) -> Any:
        module = None if isinstance(function.__self__, types.ModuleType | type) else _library_of(function)
        return NotImplemented if module is None else (receiving.imported, (module, function.__name__))

    # Classes

    def _reduce_class(self, cls: type) -> Any:
        module = module_defining(cls)
        if module is not None and is_importable(cls.__module__):
            self.note_module(module)
            return NotImplemented
        if not cls.__flags__ & HEAP_TYPE:  # made in C, and in no module
            return super().reducer_override(cls)
        if id(cls) not in self.by_value:
            reduced = self.refer_to(cls)
            if reduced is not None:
                return reduced
        return self._reduce_class_by_value(cls)

    def _reduce_class_by_value(self, cls: type) -> Any:
        self.by_value.add(id(cls))
        own = dict(vars(cls))
        slots = [name for name, value in own.items() if _is_slot(value, cls)]
        attributes = {name: value for name, value in own.items() if name not in (*NOT_COPIED, *slots)}
        fixed = {name for name in attributes if _is_fixed(type(cls), name)}
        body = {name: value for name, value in attributes.items() if name in fixed or type(value) in _PLAIN}
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if "__slots__" in own:
            body["__slots__"] = slots
        annotations = _annotations_of(cls)
        module = sys.modules.get(cls.__module__)
        if annotations:
            attributes["__annotations__"] = annotations
        if annotations and module is not None and not is_importable(cls.__module__):
            namespace = namespace_of(vars(module))
            self.note_globals([GlobalName(namespace, name) for name in _types_in(annotations, namespace)])
        # Set functions first: to unpickle another attribute may make an instance of the class, which calls them.
        later = {name: value for name, value in attributes.items() if name not in fixed}
        functions = {name: value for name, value in later.items() if isinstance(value, _FUNCTION_KINDS)}
        others = {name: value for name, value in later.items() if name not in functions}
        virtual = virtual_subclasses(cls) if isinstance(cls, abc.ABCMeta) else []
        parts = [Deferred(receiving.set_attributes, cls, part) for part in (functions, others)]
        state = parts, list(attributes), virtual
        args = keys.key_of_or_add(cls), type(cls), cls.__name__, cls.__bases__, body
        return receiving.make_class, args, state, None, None, receiving.complete_class

    def _reduce_member(self, member: enum.Enum) -> Any:
        """Reduce a member of an enum: by its name, but within its class by what it is made of."""
        cls: Any = type(member)
        if id(cls) not in self.by_value:
            name = member._name_
            if goes_by_name(cls) or name is None or cls._member_map_.get(name) is not member:
                return NotImplemented
            return receiving.member_of, (cls, name)
        data_type = cls._member_type_
        args = () if data_type is object else _arguments_of(member, data_type)
        return receiving.make_member, (cls, member._name_, data_type, args), dict(vars(member))

    # Modules

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if goes_by_name(module):
            self.note_module(module)
            return importlib.import_module, (module.__name__,)
        namespace = namespace_of(vars(module), module)
        state = self.note_globals(_names_of_module(module, vars(module).keys()))
        return receiving.module_of, (namespace,), state, None, None, ignore_state

    def note_module(self, module: types.ModuleType) -> None:
        """Note a module by which something goes by name, if it is the user's: it may be reloaded."""
        if is_users(module):
            self.users_modules[module.__name__] = module

    # The rest

    def _reduce_namespace(self, namespace: Namespace) -> Any:
        if _is_imported(namespace):
            return receiving.namespace_of_module, (namespace.variables["__name__"],)
        self.namespaces.append(namespace)
        name = str(namespace.variables.get("__name__", "globals"))
        is_module = namespace.module is not None and sys.modules.get(name) is namespace.module
        goes_into_sys_modules = self.is_call and is_module and not _goes_by_value(name)
        values = {attribute: namespace.variables.get(attribute) for attribute in _MODULE_ATTRIBUTES}
        module_attributes = {attribute: value for attribute, value in values.items() if isinstance(value, str | list)}
        return receiving.namespace_of, (keys.key_of(namespace), name, goes_into_sys_modules, module_attributes)

    def _reduce_cached_property(self, obj: Any) -> Any:
        """Reduce a `functools.cached_property`, without the lock that it holds before Python 3.12."""
        return type(obj), (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}

    def _reduce_partialmethod(self, obj: Any) -> Any:
        """Reduce a `functools.partialmethod`: that of Python 3.14 cannot be pickled."""
        return functools.partial(functools.partialmethod, **obj.keywords), (obj.func, *obj.args)

    def _reduce_type_alias(self, alias: Any) -> Any:
        """Reduce a statement ``type X = ...``: the value comes later, as it may refer to the alias."""
        if alias.__type_params__:
            return functools.partial(_TypeAlias, type_params=alias.__type_params__), (alias.__name__, alias.__value__)
        args = keys.key_of_or_add(alias), alias.__name__, alias.__module__
        return receiving.make_type_alias, args, alias.__value__, None, None, receiving.complete_type_alias

    def _reduce_forward_reference(self, reference: Any) -> Any:
        """Reduce a `typing.ForwardRef` without the globals that it holds from Python 3.14 on."""
        return type(reference), (reference.__forward_arg__,)

    def _reduce_weak_reference(self, reference: weakref.ref[Any]) -> Any:
        """Reduce a `weakref.ref` without a callback: what it refers to is held by something else that is sent."""
        if reference.__callback__ is not None:
            return NotImplemented
        referent = reference()
        return (receiving.dead_reference, ()) if referent is None else (weakref.ref, (referent,))

    def _reduce_weak_dict(self, obj: Any) -> Any:
        return type(obj), (dict(obj),)

    def _refuse_connection(self, obj: Any) -> NoReturn:
        raise TypeError("it belongs to the process that opened it; a queue of a multiprocessing.Manager() can be sent")

    REDUCERS: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        types.FunctionType: _reduce_function,
        types.MethodType: _reduce_method,
        types.BuiltinFunctionType: _reduce_builtin,
        types.ModuleType: _reduce_module,
        types.CellType: _reduce_cell,
        Namespace: _reduce_namespace,
        functools.cached_property: _reduce_cached_property,
        functools.partialmethod: _reduce_partialmethod,
        typing.ForwardRef: _reduce_forward_reference,
        weakref.ref: _reduce_weak_reference,
        weakref.WeakKeyDictionary: _reduce_weak_dict,
        weakref.WeakValueDictionary: _reduce_weak_dict,
        multiprocessing.connection.Connection: _refuse_connection,
    }


class AnswerReducer(Reducer):
    """Pickles what goes back to the process that sent the call: it has the definitions and the globals that it sent."""

    is_call = False

    def __init__(self) -> None:
        super().__init__()
        self._bound = set[tuple[Namespace, str]]()

    def another(self) -> AnswerReducer:
        """Return a new one."""
        return AnswerReducer()

    def reduce_mark(self, mark: object) -> Any:
        """Refer to a mark that came from there by its key; what a task has made goes by value."""
        return NotImplemented if keys.key_of(mark) is None else super().reduce_mark(mark)

    def refer_to(self, obj: Any) -> Any:
        """Refer to what came from there by its key; what a task has made goes by value."""
        key = keys.key_of(obj)
        return (receiving.find_definition, (key,)) if receiving.is_known_to_sender(key) else None

    def note_globals(self, names: Sequence[GlobalName]) -> list[Deferred]:
        """Send the values of globals in a dict that a task has made."""
        own = [(namespace, name) for namespace, name, _ in names if keys.originates_here(namespace)]
        unsent = [key for key in dict.fromkeys(own) if key not in self._bound and key[1] in key[0].variables]
        self._bound.update(unsent)
        return [
            Deferred(receiving.bind, namespace, name, next(_numbers), namespace.variables[name])
            for namespace, name in unsent
        ]


def _is_imported(namespace: Namespace) -> bool:
    """Return whether the globals are those of a module that each process imports by itself."""
    module = namespace.module
    return module is not None and vars(module) is namespace.variables and goes_by_name(module)


def _names_of_module(module: types.ModuleType, attributes: Iterable[str]) -> list[GlobalName]:
    namespace = namespace_of(vars(module), module)
    names = (name for name in attributes if name in namespace.variables)
    return [GlobalName(namespace, name) for name in names if not name.startswith("__")]


def place_of_sentinel(obj: Any) -> tuple[str, str] | None:
    """Return the module and the name by which an import finds an object without a state, as `dataclasses.MISSING`."""
    kind = type(obj)
    if kind is object:
        return _place_of_mark(obj)
    if not is_importable(kind.__module__) or not _is_stateless(obj):
        return None
    name = _name_in(sys.modules[kind.__module__], obj)
    return None if name is None else (kind.__module__, name)


def _place_of_mark(mark: object) -> tuple[str, str] | None:
    """Return the module that has made an `object()`, and its name there. All modules are searched at once."""
    global _modules_searched
    if _modules_searched != len(sys.modules):
        _modules_searched = len(sys.modules)
        _places_of_marks.clear()
        for module_name, module in list(sys.modules.items()):
            names = list(getattr(module, "__dict__", {}).items())
            _places_of_marks.update((id(value), (module_name, name)) for name, value in names if type(value) is object)
    place = _places_of_marks.get(id(mark))
    if place is None or getattr(sys.modules.get(place[0]), place[1], None) is not mark or not is_importable(place[0]):
        return None
    return place


def _name_in(module: Any, obj: Any) -> str | None:
    names = getattr(module, "__dict__", {})
    return next((name for name, value in list(names.items()) if value is obj), None)


def global_naming(obj: Any) -> GlobalName | None:
    """Return the global through which `pickle` finds a class or function by its name, if it does."""
    module = module_defining(obj)
    name = str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", ""))
    if module is not None:
        return GlobalName(namespace_of(vars(module)), name.partition(".")[0])
    own = getattr(getattr(obj, "__wrapped__", obj), "__globals__", {})  # of a module that is not in `sys.modules`
    return GlobalName(namespace_of(own), name) if own.get(name) is obj else None


def _reduce_type_parameter(parameter: Any) -> tuple[Any, ...]:
    """Reduce a type variable, with what newer versions of Python have added to it."""
    kind: Any = type(parameter)
    constraints = getattr(parameter, "__constraints__", ())
    names = ("bound", "covariant", "contravariant", "infer_variance")
    options = {name: getattr(parameter, f"__{name}__") for name in names if hasattr(parameter, f"__{name}__")}
    if kind is typing.TypeVarTuple:
        options = {}
    if sys.version_info >= (3, 13) and parameter.has_default():
        options["default"] = parameter.__default__
    return functools.partial(kind, **options), (parameter.__name__, *constraints)


def virtual_subclasses(cls: abc.ABCMeta) -> list[type]:
    """Return the classes that were registered with an abstract class."""
    subclasses = (ref() for ref in abc._get_dump(cls)[0])  # type: ignore[attr-defined]
    return [each for each in subclasses if each is not None]


def _is_slot(value: Any, cls: type) -> bool:
    """Return whether an attribute is what `type` makes of a slot, ``__dict__`` and ``__weakref__`` included."""
    return type(value) in (types.MemberDescriptorType, types.GetSetDescriptorType) and value.__objclass__ is cls


def _is_fixed(metaclass: type, name: str) -> bool:
    """Return whether an attribute of a class can only be set as the class is made."""
    bases = metaclass.__mro__[: metaclass.__mro__.index(type)]
    own = next((vars(base)[name] for base in bases if name in vars(base)), None)
    return name == "__dict__" or hasattr(type(own), "__set__")


def _arguments_of(member: Any, data_type: Any) -> tuple[Any, ...]:
    """Return the arguments of ``data_type.__new__`` for an equal value."""
    make, args, *_ = data_type.__reduce_ex__(member, 2)
    return tuple(args[1:] if make.__name__ == "__newobj__" else args)


def ignore_state(obj: Any, state: Any) -> None:
    """Let the state of a pickle do its work by being read."""


_Cached = functools._lru_cache_wrapper
FOUND_BY_NAME = {_Cached, *IDENTITIES}
_IMMUTABLE = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, types.CodeType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(datetime.date, datetime.timedelta, pathlib.PosixPath, re.Pattern),
    logging.Logger,  # found by its name
}
_ATTRIBUTES = (
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__type_params__",
)
_MODULE_ATTRIBUTES = ("__name__", "__package__", "__file__", "__path__")
# Of a class: what `type` makes, and what Python adds by itself as the class is used.
NOT_COPIED = {"__module__", "_abc_impl", "__slotnames__", "__annotations_cache__", "__annotate_func__", "__annotate__"}
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_FUNCTION_KINDS = (types.FunctionType, classmethod, staticmethod, property)
_numbers = itertools.count(1)
_places_of_marks: dict[int, tuple[str, str]] = {}  # by the identity of an `object()`: its module, and its name there
_modules_searched = 0
_namespaces_of_modules = weakref.WeakKeyDictionary[types.ModuleType, Namespace]()
