"""The pickler of calls and results, which sends each object by name, by key or by value.

The problem. A worker has not run the script, and it cannot import the script. But it can import most of the modules
that the script uses. `pickle` sends a function or class as the name of its module and its own name, if `sys.modules`
has a module of that name. This is not enough: a module in `sys.modules` may be ``__main__``, or made by hand, or loaded
from a file that no import finds. cloudpickle copies the functions and globals of ``__main__`` again for each call. It
sends objects of all other modules in `sys.modules` as `pickle` does.

The solution. `Reducer` is a pickler. To *reduce* an object means to replace it in the pickle by a function and
arguments. The worker calls the function with these arguments to rebuild the object. `Reducer` decides for each
function, class and module, and for some other objects, in this order:

1. *By name*, if a fresh interpreter would get the object by an import (`is_importable`). This rule includes
   sentinels: objects without state that are globals of an importable module, for example `dataclasses.MISSING`.
2. *By key*, if the object is a *definition*, such as a class or named function of the script (`is_definition`). The
   definition itself is sent once, in a pickle of its own. All other pickles contain only the key of the definition,
   with which the worker looks up its copy. A *mark*, which is a plain ``object()``, also has a key, because only its
   identity matters.
3. *By value* otherwise. A lambda, for example, is pickled with its code, and is a new object in each call. Code refers
   to globals by their names, so these names are read from the bytecode (`names_in`) and passed to `note_globals`, where
   a subclass decides whether the values of the globals are sent, and in which pickle. A dict of globals is a
   *namespace*.

A class and its methods refer to each other, and a function may refer to itself. So the pickle of a class or function
contains two steps. The first step creates an empty class or function (`globals.make_class`, `globals.make_function`),
to which the rest of the pickle can refer. The second step fills it (`globals.complete_class`,
`globals.complete_function`). Between these steps nothing can be looked up in the class, because its attributes are not
set yet. So in the pickle that creates a class, some objects are written differently than in all other pickles. For
example, a method is written with its code there, and as its class and its name elsewhere. `Reducer.by_value` has the
ids of the classes and functions that the present pickle creates.
"""

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

# Modules that a fresh interpreter would import


def is_importable(name: str) -> bool:
    """Return whether a fresh interpreter with the same import path would import the module loaded as ``name``.

    `sys.modules` does not answer this question: it also has modules that were made by hand, by a test runner, or from a
    file that is not on the import path. So unless the file of the module is part of an installation, the finders of
    `sys.meta_path` are asked which file an import of this name would load.
    """
    global _path_of_answers
    path = [*sys.path, working_directory() if "" in sys.path else ""]
    if path != _path_of_answers:
        _importable.clear()
        _path_of_answers = path
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
    # The name is compared too, because an installed file may have been loaded under another name, with which a worker
    # could not import it.
    if (origin or "").startswith(INSTALLED) and (is_in_package or stem in (last, "__init__")):
        return True
    if parent and not _is_importable(parent):
        return False
    spec = _find_spec(name, getattr(sys.modules.get(parent), "__path__", None))
    if spec is not None:
        return spec.origin == origin or _is_same_file(spec.origin, origin)
    # A package may create a submodule that has no file, such as `torch.ops`. No finder knows this submodule, but every
    # import of the package creates it.
    return is_in_package


def _find_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # other libraries install finders, which may raise anything
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
    return bool(registered) and any(f"{name}.".startswith(f"{module}.") for module in registered)


def goes_by_name(obj: Any) -> bool:
    """Return whether a fresh interpreter gets this function, class or module by an import."""
    if isinstance(obj, types.ModuleType):
        return sys.modules.get(obj.__name__) is obj and is_importable(obj.__name__)
    return module_defining(obj) is not None and is_importable(obj.__module__)


def is_users(module: types.ModuleType) -> bool:
    """Return whether a module is the user's own: neither installed nor part of Python.

    The user may edit and reload such a module while the program runs, so workers may have an older version of it.
    """
    file = getattr(module, "__file__", None)
    return bool(file) and not str(file).startswith(INSTALLED)


# The cache of `is_importable`. Maps a name to a pair: the module that is loaded under this name, and whether the module
# is importable.
_importable: dict[str, tuple[types.ModuleType, bool]] = {}
# The import path for which `_importable` is valid. When the import path has changed, `is_importable` empties
# `_importable`.
_path_of_answers: list[str] = []


# Names to which code refers


class CodeNames(NamedTuple):
    """The names in the code of a function, and in the code of functions and classes inside it.

    They show which globals a worker needs to run the function.
    """

    reads: Sequence[str]  # the globals that the code reads
    binds: Sequence[str]  # the globals that the code sets or deletes
    attributes: frozenset[str]  # the names of all globals and of all attributes in the code
    # Whether the code sets or deletes a ``nonlocal``. If so, the workers do not keep the function, and each call sends
    # the function again.
    binds_closure: bool


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> CodeNames:
    """Return the names to which ``code`` refers."""
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


_READING = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}  # the body of a class reads with LOAD_NAME
_BINDING = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_BINDING_CLOSURE = {"STORE_DEREF", "DELETE_DEREF"}


def _annotations_of(obj: Any) -> dict[str, Any]:
    """Return the annotations of a function or class.

    From Python 3.14 on, annotations are evaluated when they are first read. If this fails, strings are returned.
    """
    if sys.version_info < (3, 14):
        annotations = vars(obj).get("__annotations__") if isinstance(obj, type) else obj.__annotations__
        return annotations or {}
    import annotationlib  # type: ignore[import-not-found]

    # The attribute `__annotations__` is not read, because this would store the annotations in the script's object.
    annotate = annotationlib.get_annotate_from_class_namespace(vars(obj)) if isinstance(obj, type) else obj.__annotate__
    if annotate is None:
        own = vars(obj) if isinstance(obj, type) else {"__annotations__": obj.__annotations__}
        return dict(own.get("__annotations__") or own.get("__annotations_cache__") or {})
    for annotation_format in (annotationlib.Format.VALUE, annotationlib.Format.STRING):
        with contextlib.suppress(Exception):  # the user's expression may raise anything, such as a NameError
            return dict(annotationlib.call_annotate_function(annotate, annotation_format, owner=obj))
    return {}


def _types_in(annotations: dict[str, Any], namespace: Namespace) -> list[str]:
    """Return the names in annotations that `typing.get_type_hints` would look up among the globals.

    An annotation may be a string, and any word in it may be a name. Only globals that are types or constants count,
    because a word may by chance be the name of another global, which perhaps cannot be sent, such as a lock. If a name
    is an alias of a type, the names in this type are included.
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
    """Return the loaded submodules of these packages to which code may refer as ``package.module``.

    A worker must import them by name, because an import of the package does not always import its submodules.

    Args:
        packages: the names of the packages.
        attributes: the names of all attributes in the code.
    """
    submodules: list[str] = []
    pending = list(packages)
    while pending:
        package = pending.pop()
        inner = [name for last in attributes if (name := f"{package}.{last}") in sys.modules and is_importable(name)]
        pending += inner
        submodules += inner
    return submodules


def namespace_of(names: dict[str, Any], module: types.ModuleType | None = None) -> Namespace:
    """Return the `Namespace` that describes a dict of globals. If there is none yet, create one.

    A `Namespace` of a module in `sys.modules` lives as long as the module. Any other one lives only as long as
    something refers to it.

    Args:
        names: the dict of globals.
        module: the module that has this dict, if the module is known. If this module is not in `sys.modules`, the
            `Namespace` keeps the module alive.
    """
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


# Definitions and constants


def is_definition(obj: Any, is_global: bool = False) -> bool:
    """Return whether ``obj`` is a definition, which is sent once, and then only by its key.

    Args:
        obj: any object that is not sent by name.
        is_global: whether a global of the script is bound to ``obj``. If so, a function decorated with
            `functools.cache` is a definition too.
    """
    kind = type(obj)
    if issubclass(kind, type):
        return bool(obj.__flags__ & HEAP_TYPE)  # other types are static variables of C code
    if kind in IDENTITIES:
        return True
    if kind is types.FunctionType:
        return _is_own_global(obj) and holds_no_data(obj)
    if kind is not _Cached:
        return False
    return is_global or keys.key_of(obj) is not None or global_naming(obj) is not None


def _is_own_global(fn: types.FunctionType) -> bool:
    """Return whether the function is the value of a global with the function's name.

    This is not so for a lambda, a method or an inner function.
    """
    module = sys.modules.get(fn.__module__)
    return any(names.get(fn.__qualname__) is fn for names in (fn.__globals__, getattr(module, "__dict__", {})))


def holds_no_data(fn: types.FunctionType) -> bool:
    """Return whether a function holds no data, so that it need not be sent again with each call.

    A default, an attribute or a closure variable holds no data if it is a constant, a definition, or a function that
    itself holds no data. Anything else is data, because other code of the script may change it in place. A closure
    variable is also data if the function assigns it (``nonlocal``), or shares it with a function that may assign it.
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


def _function_with_cell(variable: object) -> types.FunctionType:
    return lambda: variable  # type: ignore[return-value]


# The number of references that `_references_to_cells` counts for a cell that no other function shares.
_OWN_CELL = _references_to_cells(_function_with_cell(None))[0]


def contents_of_function(fn: Any) -> list[Any]:
    """Return the defaults, closure variables and attributes of a function.

    For any other object, such as the wrapper that `functools.cache` makes, only the attributes are returned.
    """
    contents = list(getattr(fn, "__dict__", {}).values())
    if type(fn) is types.FunctionType:
        contents += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        contents += map(contents_of, fn.__closure__ or ())
    return contents


def is_constant(value: Any) -> bool:
    """Return whether ``value`` cannot change in place, or is an object that a worker finds by name or by key.

    A global with such a value is sent again only after the script has bound the global to another object.
    """
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


def _is_module(obj: Any) -> typing.TypeGuard[types.ModuleType]:
    """Return whether ``obj`` is a module, without reading its ``__class__``, which may run code of a proxy."""
    return issubclass(type(obj), types.ModuleType)


def _is_stateless(obj: Any) -> bool:
    """Return whether ``obj`` has no state, so that only its identity and its class matter."""
    kind = type(obj)
    if not kind.__flags__ & HEAP_TYPE:
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce_ex__", "__reduce__")):
        return False
    try:  # reading attributes of a proxy may raise: for example, flask's `request` raises an error outside of a request
        return not getattr(obj, "__dict__", None) and obj.__reduce_ex__(4)[1:] == ((kind,), None, None, None)
    except Exception:
        return False


def contents_of(cell: types.CellType) -> Any:
    """Return the value of a closure variable, or `Missing` if the variable is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return receiving.Missing


TYPE_PARAMETERS = (typing.ParamSpec, typing.TypeVar, typing.TypeVarTuple)
_TypeAlias: Any = getattr(typing, "TypeAliasType", None)  # from Python 3.12 on
_TYPES = (type, types.ModuleType, types.UnionType, types.GenericAlias)
# Instances of these types are definitions too: a worker creates each instance only once, because code compares them by
# identity.
IDENTITIES: set[type] = {typing.NewType, *TYPE_PARAMETERS, *filter(None, [_TypeAlias])}
HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: the class was made at run time, for example by a class statement


# The pickler


class Deferred:
    """A function call that is made when this object is unpickled. The result of the call replaces this object."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def module_that_holds(name: str, value: Any) -> types.ModuleType | None:
    """Return an importable module (see `is_importable`) in which the global ``name`` is ``value``, or None."""
    for module_name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(name) is value and is_importable(module_name) and module is not builtins:
            return module
    return None


def _library_of(method: Any) -> str | None:
    """Return the name of the installed module that has this bound method as a global, or None.

    For example, the global `random.random` is a method of a hidden instance of the class `random.Random`. Only the
    module that defines the class is searched.
    """
    module = sys.modules.get(type(method.__self__).__module__)
    if module is None or vars(module).get(method.__name__) is not method:
        return None
    return module.__name__ if is_importable(module.__name__) and not is_users(module) else None


class Reducer(Pickler):
    """The pickler that sends each object by name, by key or by value; see the docstring of this module.

    A subclass decides how the pickle refers to a definition. If a function reads globals, the subclass also decides
    whether their values are sent, and in which pickle: the one with the function, or one that precedes it.
    `AnswerReducer` pickles results. The two subclasses in `packer` pickle calls and definitions.
    """

    # Whether the pickle goes from the script to a worker. If so, the worker may put a module of the script into its
    # `sys.modules`; see `_reduce_namespace`.
    is_call = True

    def __init__(self, share: bool = True) -> None:
        super().__init__(share)
        self.by_value = set[int]()  # the `id` of each class and function that this pickle creates
        # Maps the name of each of the user's own modules in this pickle to the module; see `note_module`.
        self.users_modules: dict[str, types.ModuleType] = {}
        self.namespaces = list[Namespace]()  # the namespaces to which the pickle refers
        # Maps the `id` of each `torch.nn.Parameter` in this pickle to a reference to this parameter.
        self.parameters: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        # Maps the `id` of a cell (a closure variable) to a pair: the first function in this pickle that has the cell,
        # and the index of the cell in the ``__closure__`` of this function.
        self._cell_owners: dict[int, tuple[types.FunctionType, int]] = {}

    def refer_to(self, obj: Any) -> Any:
        """Reduce a definition to a reference, or return None to pickle it by value.

        This method is not called for classes and functions that are in the attribute ``by_value`` already, because the
        pickle creates them in any case.
        """
        raise NotImplementedError

    def reduce_mark(self, mark: object) -> Any:
        """Reduce a mark (a plain `object()`, such as ``MISSING = object()``) to its key.

        Only the identity of a mark matters, and the key keeps it: the receiver finds the same mark for the same key.
        """
        return receiving.mark, (keys.key_of_or_add(mark),)

    def note_globals(self, names: Sequence[GlobalName]) -> Any:
        """Record globals to which code in this pickle refers.

        The returned object is pickled with the code. It may contain `Deferred` calls that bind these globals.
        """
        raise NotImplementedError

    def reducer_override(self, obj: Any) -> Any:
        """Reduce one object; see `pickle.Pickler.reducer_override`."""
        kind = type(obj)
        if kind is torch.Tensor or kind is types.CodeType:
            return super().reducer_override(obj)
        if issubclass(kind, type):  # not `isinstance`: a mock may have ``type`` as its ``__class__``
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
        """Reduce an object by value, if no other method of this class reduces objects of its type."""
        kind = type(obj)
        # If this pickle creates the class of the object, an attribute of the class may refer to the object. Then the
        # receiver creates the object before the attributes of the class are set. So the receiver does not call the
        # ``__new__`` of the class, which may read these attributes.
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
        # A proxy, such as an object of wrapt, may have the ``__class__`` of a function. It is pickled as any other
        # object, because cloudpickle would pickle only the function inside the proxy.
        if isinstance(obj, types.FunctionType):
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
        # In a pickle that creates classes or functions, a method is pickled with its code. The receiver could not look
        # the method up in its class, because the class may have no methods yet when the receiver reads such a pickle.
        method = None if self.by_value else self._method_of_class(fn)
        if method is not None:
            return receiving.method_of, method
        if is_definition(fn):
            reduced = self.refer_to(fn)
            if reduced is not None:
                return reduced
        return self._reduce_function_by_value(fn, None)

    def _reduce_function_by_value(self, fn: types.FunctionType, key: str | None) -> Any:
        """Reduce a function to its code, its globals, and its defaults, attributes and closure variables.

        Args:
            fn: the function.
            key: the key of the function, or None if the function is not a definition.
        """
        # One item for each closure variable: its cell if an earlier function in this pickle has the cell too, or None.
        cells: list[types.CellType | None] = []
        contents: dict[int, Any] = {}  # the values of the closure variables that are None in ``cells``, by index
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
        """Return the globals to which a function refers, and the submodules that it may use as attributes of modules.

        If the function has the globals of a module that the worker imports, no globals are returned.
        """
        namespace = namespace_of(fn.__globals__)
        reads, binds, attributes, _ = names_in(fn.__code__)
        types_in_annotations = _types_in(annotations, namespace)
        values = (namespace.variables.get(name) for name in reads)
        modules = {id(value): value for value in values if _is_module(value)}
        in_closure = [value for value in map(contents_of, fn.__closure__ or ()) if _is_module(value)]
        imported = [module.__name__ for module in (*modules.values(), *in_closure) if goes_by_name(module)]
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
        """Return the class that has ``fn`` as a method, and the name of the method, if it is a class of the script.

        None is returned if ``fn`` is not a method, if workers can import the class, or if the class cannot be looked up
        through a global.
        """
        *path, name = fn.__qualname__.split(".")
        owner: Any = sys.modules.get(fn.__module__)
        for part in path:
            owner = getattr(owner, part, None)
        if not path or not issubclass(type(owner), type) or goes_by_name(owner):
            return None
        attribute = vars(owner).get(name)
        return (owner, name) if fn is attribute or fn is getattr(attribute, "__func__", None) else None

    def _reduce_method(self, method: types.MethodType) -> Any:
        """Reduce a bound method.

        If a library has the method as a global function, such as `random.random`, the worker imports the method.
        Otherwise `pickle` sends the object and the name of the method, and the worker gets the method with `getattr`.
        This would fail in two cases: the object has another attribute of this name; or the object is a class that this
        pickle creates, and the worker has not set the attributes of the class yet. In these cases, the object and the
        plain function of the method are sent.
        """
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
        if not cls.__flags__ & HEAP_TYPE:  # a type of C code that is in no module, such as the type of None
            return super().reducer_override(cls)
        if id(cls) not in self.by_value:
            reduced = self.refer_to(cls)
            if reduced is not None:
                return reduced
        return self._reduce_class_by_value(cls)

    def _reduce_class_by_value(self, cls: type) -> Any:
        """Reduce a class to its attributes.

        The class is created with the attributes in ``body``. All other attributes are set later, because they may refer
        to the class.
        """
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
        # Functions are set first, because unpickling another attribute may create an instance of the class, and Python
        # then calls methods of the class.
        later = {name: value for name, value in attributes.items() if name not in fixed}
        functions = {name: value for name, value in later.items() if isinstance(value, _FUNCTION_KINDS)}
        others = {name: value for name, value in later.items() if name not in functions}
        virtual = virtual_subclasses(cls) if isinstance(cls, abc.ABCMeta) else []
        parts = [Deferred(receiving.set_attributes, cls, part) for part in (functions, others)]
        state = parts, list(attributes), virtual
        args = keys.key_of_or_add(cls), type(cls), cls.__name__, cls.__bases__, body
        return receiving.make_class, args, state, None, None, receiving.complete_class

    def _reduce_member(self, member: enum.Enum) -> Any:
        """Reduce a member of an enum to its class and name, or to its value if this pickle creates the class."""
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
        """Record that the pickle refers to ``module`` by name, if it is the user's own module.

        The packer warns when such a module was reloaded, because the workers then have an older version of the module.
        """
        if is_users(module):
            self.users_modules[module.__name__] = module

    # Other types

    def _reduce_namespace(self, namespace: Namespace) -> Any:
        """Reduce a dict of globals to its key and to a few of the globals, such as ``__name__`` and ``__file__``.

        A worker creates a module to hold the globals, and sets these few first. But if workers can import the module of
        the globals, the dict is reduced to the name of this module.
        """
        if _is_imported(namespace):
            of_pytest = {name: module for name, module in _PYTEST_GLOBALS.items() if name in namespace.variables}
            return receiving.namespace_of_module, (namespace.variables["__name__"], of_pytest)
        self.namespaces.append(namespace)
        name = str(namespace.variables.get("__name__", "globals"))
        is_module = namespace.module is not None and sys.modules.get(name) is namespace.module
        goes_into_sys_modules = self.is_call and is_module and not _goes_by_value(name)
        values = {attribute: namespace.variables.get(attribute) for attribute in _MODULE_ATTRIBUTES}
        module_attributes = {attribute: value for attribute, value in values.items() if isinstance(value, str | list)}
        return receiving.namespace_of, (keys.key_of(namespace), name, goes_into_sys_modules, module_attributes)

    def _reduce_cached_property(self, obj: Any) -> Any:
        """Reduce a `functools.cached_property`, without the lock that it has in Python before 3.12."""
        return type(obj), (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}

    def _reduce_partialmethod(self, obj: Any) -> Any:
        """Reduce a `functools.partialmethod`, which `pickle` cannot do from Python 3.14 on."""
        return functools.partial(functools.partialmethod, **obj.keywords), (obj.func, *obj.args)

    def _reduce_type_alias(self, alias: Any) -> Any:
        """Reduce the alias of a statement ``type X = ...``.

        The worker creates the alias first and sets its value later, because the value may refer to the alias. But if
        the alias has type parameters, the worker creates it with its value.
        """
        if alias.__type_params__:
            return functools.partial(_TypeAlias, type_params=alias.__type_params__), (alias.__name__, alias.__value__)
        args = keys.key_of_or_add(alias), alias.__name__, alias.__module__
        return receiving.make_type_alias, args, alias.__value__, None, None, receiving.complete_type_alias

    def _reduce_forward_reference(self, reference: Any) -> Any:
        """Reduce a `typing.ForwardRef` without the globals that it holds from Python 3.14 on."""
        return type(reference), (reference.__forward_arg__,)

    def _reduce_weak_reference(self, reference: weakref.ref[Any]) -> Any:
        """Reduce a `weakref.ref` without a callback.

        In the worker, the copy of the referent lives only if a strong reference to the referent is sent as well.
        """
        if reference.__callback__ is not None:
            return NotImplemented
        referent = reference()
        return (receiving.dead_reference, ()) if referent is None else (weakref.ref, (referent,))

    def _reduce_weak_dict(self, obj: Any) -> Any:
        return type(obj), (dict(obj),)

    def _refuse_connection(self, obj: Any) -> NoReturn:
        raise TypeError(
            "the connection belongs to the process that opened it. Send a queue of a multiprocessing.Manager() instead"
        )

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
    """The pickler of results, which go back to the process that sent the call.

    That process has the definitions and globals that it has sent, so the pickle refers to these by their keys.
    """

    is_call = False

    def __init__(self) -> None:
        super().__init__()
        self._bound = set[tuple[Namespace, str]]()  # the globals whose bindings are in this pickle already

    def another(self) -> AnswerReducer:
        """Return a new pickler like this one."""
        return AnswerReducer()

    def reduce_mark(self, mark: object) -> Any:
        """Reduce a mark (a plain `object()`) to its key, which every mark from the script has.

        A mark without a key was made by a task. It is pickled by value, so the script gets a new `object()`.
        """
        return NotImplemented if keys.key_of(mark) is None else super().reduce_mark(mark)

    def refer_to(self, obj: Any) -> Any:
        """Reduce a definition to its key if the receiver knows the key. Other definitions are pickled by value."""
        key = keys.key_of(obj)
        return (receiving.find_definition, (key,)) if receiving.is_known_to_sender(key) else None

    def note_globals(self, names: Sequence[GlobalName]) -> list[Deferred]:
        """Return the bindings of those globals in ``names`` that the receiver of this pickle lacks.

        A global of a namespace that has come from the receiver is left out, because the receiver has this global. A
        binding that is in this pickle already is left out too.
        """
        own = [(namespace, name) for namespace, name, _ in names if keys.originates_here(namespace)]
        unsent = [key for key in dict.fromkeys(own) if key not in self._bound and key[1] in key[0].variables]
        self._bound.update(unsent)
        return [
            Deferred(receiving.bind, namespace, name, next(_numbers), namespace.variables[name])
            for namespace, name in unsent
        ]


def _is_imported(namespace: Namespace) -> bool:
    """Return whether a namespace belongs to a module that each process imports by itself."""
    module = namespace.module
    return module is not None and vars(module) is namespace.variables and goes_by_name(module)


def _names_of_module(module: types.ModuleType, attributes: Iterable[str]) -> list[GlobalName]:
    """Return the globals of a module whose names are in ``attributes``, without special ones such as ``__name__``."""
    namespace = namespace_of(vars(module), module)
    names = (name for name in attributes if name in namespace.variables)
    return [GlobalName(namespace, name) for name in names if not name.startswith("__")]


def place_of_sentinel(obj: Any) -> tuple[str, str] | None:
    """Return the module and the name under which a worker imports a sentinel, such as `dataclasses.MISSING`.

    None is returned if ``obj`` has a state, or if no module that a worker can import has ``obj`` as a global.
    """
    kind = type(obj)
    if kind is object:
        return _place_of_mark(obj)
    if not is_importable(kind.__module__) or not _is_stateless(obj):
        return None
    name = _name_in(sys.modules[kind.__module__], obj)
    return None if name is None else (kind.__module__, name)


def _place_of_mark(mark: object) -> tuple[str, str] | None:
    """Return the module and the name from which a worker imports a sentinel (a plain `object()`), or None.

    The first call collects the sentinels of all loaded modules. A later call does so only if modules have been imported
    since then.
    """
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
    """Return the global through which `pickle` looks up a class or function, or None.

    The qualified name begins with the name of this global. For example, a class inside of another class is looked up
    through the global of the outer class. The global must be bound in the worker as well, so that `pickle` finds
    the class or function there too.
    """
    module = module_defining(obj)
    name = str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", ""))
    if module is not None:
        return GlobalName(namespace_of(vars(module)), name.partition(".")[0])
    # A function whose module is not in `sys.modules` may still be a global of its module.
    own = getattr(getattr(obj, "__wrapped__", obj), "__globals__", {})
    return GlobalName(namespace_of(own), name) if own.get(name) is obj else None


def _reduce_type_parameter(parameter: Any) -> tuple[Any, ...]:
    """Reduce a type variable, with the options that newer versions of Python have added."""
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
    return [subclass for subclass in subclasses if subclass is not None]


def _is_slot(value: Any, cls: type) -> bool:
    """Return whether a value in a class is a descriptor that `type` has created for a slot.

    Such descriptors, which also exist for ``__dict__`` and ``__weakref__``, are not copied, because `type` creates them
    anew for the copy of the class.
    """
    return type(value) in (types.MemberDescriptorType, types.GetSetDescriptorType) and value.__objclass__ is cls


def _is_fixed(metaclass: type, name: str) -> bool:
    """Return whether an attribute of a class can be set only when the class is created.

    This is so if the metaclass has a descriptor with this name, because the descriptor would intercept a later
    assignment.
    """
    bases = metaclass.__mro__[: metaclass.__mro__.index(type)]
    own = next((vars(base)[name] for base in bases if name in vars(base)), None)
    return name == "__dict__" or hasattr(type(own), "__set__")


def _arguments_of(member: Any, data_type: Any) -> tuple[Any, ...]:
    """Return the arguments with which ``data_type.__new__`` creates a value that is equal to the enum's ``member``."""
    make, args, *_ = data_type.__reduce_ex__(member, 2)
    return tuple(args[1:] if make.__name__ == "__newobj__" else args)


def ignore_state(obj: Any, state: Any) -> None:
    """Do nothing. For some objects, `pickle` calls this function instead of setting their state as attributes.

    The state of these objects is a list of `Deferred` calls, for example of `globals.bind`. Unpickling the list has
    already made the calls, so nothing is left to do.
    """


_Cached = functools._lru_cache_wrapper
FOUND_BY_NAME = {_Cached, *IDENTITIES}  # types whose instances `pickle` sends by name if `goes_by_name` is true
_IMMUTABLE = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, types.CodeType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(datetime.date, datetime.timedelta, pathlib.PosixPath, re.Pattern),
    logging.Logger,  # not immutable, but pickled by its name
}
_ATTRIBUTES = (  # the attributes of a function that are copied
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__type_params__",
)
# Globals that Python sets when it imports a module. A worker cannot import a module of the script, and creates a new
# module instead. So the values of these globals are sent.
_MODULE_ATTRIBUTES = ("__name__", "__package__", "__file__", "__path__")
# The globals that pytest adds to a test module, because the asserts that it has rewritten read them, and the names of
# the modules that are their values. A worker imports the test module without pytest, so a nested function of the module
# would lack these globals there.
_PYTEST_GLOBALS = {"@py_builtins": "builtins", "@pytest_ar": "_pytest.assertion.rewrite"}
# Attributes of a class that Python itself sets, or that are copied separately, as annotations are.
NOT_COPIED = {"__module__", "_abc_impl", "__slotnames__", "__annotations_cache__", "__annotate_func__", "__annotate__"}
_PLAIN = {type(None), bool, int, float, complex, str, bytes}  # an attribute of these types cannot refer to its class
_FUNCTION_KINDS = (types.FunctionType, classmethod, staticmethod, property)
_numbers = itertools.count(1)  # the numbers of the bindings that `AnswerReducer` sends with the results of tasks
# The cache of `_place_of_mark`. Maps the `id` of each plain `object()` that is a global of a loaded module to a pair:
# the name of the module and the name of the global.
_places_of_marks: dict[int, tuple[str, str]] = {}
# The number of loaded modules when `_places_of_marks` was filled. While `sys.modules` has this size, `_places_of_marks`
# is not filled again.
_modules_searched = 0
# Keeps the namespace of a module in `sys.modules` alive as long as the module.
_namespaces_of_modules = weakref.WeakKeyDictionary[types.ModuleType, Namespace]()
