"""Whether a function, and all that it refers to, can be told from an earlier one without pickling it.

To pickle a function takes ten to a hundred times as long as a call of it. So that is done again only when something in
it is another object than before; and for each call, when something in it could change and remain the same object.
"""

from __future__ import annotations

import datetime
import dis
import functools
import logging
import operator
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import torch


def fingerprint(fn: Callable[..., Any]) -> tuple[tuple[int, ...], list[object]] | None:
    """A key that is equal for two functions that do the same, and what to keep for as long as keys are compared.

    None if there can be no telling: ``fn`` refers to something mutable, or writes what it closes over, or may store an
    attribute of a function that begins anew in each call. Not seen is the first attribute of such a function, if it is
    stored by ``setattr`` or by a function that is imported.
    """
    found = _Found()
    if not _add(fn, found) or (found.stores_attributes and found.holds_functions):
        return None
    return (len(sys.modules), *map(id, found.parts)), found.parts  # cloudpickle looks which submodules are imported


def is_constant(value: Any) -> bool:
    """Whether it stays what it is as long as it is the same object."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    if type(value) in (types.FunctionType, functools.partial):
        return type(value) is types.FunctionType and _is_importable(value)
    return _add(value, _Found())


class _Found:
    """What a function is made of, in an order that its code determines, as far as it has been looked through."""

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.numbers: dict[int, int] = {}  # of functions, by their identity: the same one may come again
        self.stores_attributes = False
        self.holds_functions = False  # that have no name, so that each call of the function has them anew


def _add(value: Any, found: _Found) -> bool:
    """Add what ``value`` is made of; whether that is all there is to it."""
    kind = type(value)
    if kind is types.FunctionType:
        if _is_importable(value):
            found.parts.append(value)
            return True
        return _add_again(value, found) or _add_function(value, found)
    if kind is functools.partial:
        return _add_again(value, found) or _add_partial(value, found)
    found.parts.append(value)
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value and not goes_by_value(value.__name__)
    if kind in _IMMUTABLE:
        return True
    if kind is tuple or kind is frozenset:
        return all(_add(each, found) for each in value)
    if kind is types.BuiltinFunctionType:
        owner = value.__self__
        return isinstance(owner, types.ModuleType | None) or (isinstance(owner, type) and _is_importable(owner))
    return isinstance(value, type) and _is_importable(value)


def _add_again(value: Any, found: _Found) -> bool:
    """Add the number of ``value`` if it has one; else it gets one."""
    if id(value) in found.numbers:
        found.parts += _AGAIN, found.numbers[id(value)]
        return True
    found.numbers[id(value)] = len(found.numbers)
    return False


def _add_function(fn: types.FunctionType, found: _Found) -> bool:
    reads = _reads(fn.__code__)
    if reads is None:
        return False
    names, stores_attributes = reads
    found.stores_attributes |= stores_attributes
    parts = found.parts
    parts += _itself(fn)
    values = [fn.__globals__.get(name, _Missing) for name in names] if names else []
    held = _held_by(fn)
    if any(held):
        # What dicts and tuples hold is compared, not these: every evaluation of a `def` makes new ones.
        annotations, closure, defaults, by_name, attributes = held
        by_name = by_name or {}
        own = *map(_contents, closure or ()), *(defaults or ()), *by_name.values(), *attributes.values()
        if not _add_held(own, found):
            return False
        values += own
        parts += len(values), len(annotations), len(by_name), len(attributes), *annotations, *by_name, *attributes
        parts += annotations.values()
    else:
        parts.append(_NOTHING_HELD)
    return not values or all(_add(value, found) for value in values)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Missing


def _add_partial(fn: functools.partial[Any], found: _Found) -> bool:
    own = *fn.args, *fn.keywords.values()
    found.parts += _PARTIAL, len(fn.args), len(fn.keywords), *map(sys.intern, fn.keywords)
    return not fn.__dict__ and _add_held(own, found) and all(_add(value, found) for value in (fn.func, *own))


def _add_held(values: Iterable[Any], found: _Found) -> bool:
    """Note functions that each call has anew, as they travel by value and have no name; False if one has a state."""
    for value in values:
        kind = type(value)
        if kind is tuple or kind is frozenset:
            if not _add_held(value, found):
                return False
        elif kind is functools.partial:
            found.holds_functions = True
        elif kind is types.FunctionType and not (_has_name(value) or _is_importable(value)):
            found.holds_functions = True
            if value.__dict__.keys() - {"__wrapped__"}:
                return False
    return True


def _has_name(fn: types.FunctionType) -> bool:
    """Whether its module's globals have ``fn`` under its own name."""
    return fn.__globals__.get(fn.__qualname__) is fn


@functools.lru_cache(maxsize=1024)
def _reads(code: types.CodeType) -> tuple[tuple[str, ...], bool] | None:
    """The globals that ``code`` and the functions in it read, and whether they store attributes of anything.

    None if they write what ``code`` closes over.
    """
    names, stores_attributes, pending = dict[str, None](), False, [code]
    while pending:
        inner = pending.pop()
        pending += (const for const in inner.co_consts if isinstance(const, types.CodeType))
        for instruction in dis.get_instructions(inner):
            operation, _, what = instruction.opname.partition("_")
            if operation in ("STORE", "DELETE"):
                if what == "DEREF" and instruction.argval in code.co_freevars:
                    return None
                stores_attributes |= what == "ATTR"
            if what == "GLOBAL":
                names[instruction.argval] = None
    return tuple(names), stores_attributes


def _is_importable(obj: types.FunctionType | type) -> bool:
    """Whether another process finds ``obj`` by its name."""
    if obj.__module__ == "__main__" or goes_by_value(obj.__module__):
        return False
    found: object = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def goes_by_value(module: str | None) -> bool:
    """Whether the user has told cloudpickle so, of this module or of a package that it is in."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return bool(registered) and any(f"{module}.".startswith(f"{name}.") for name in registered)


class _Missing:
    """Stands where a name or a cell has no value."""


# These are no values that a user could have: what is made of different things is made of different parts.
_AGAIN = object()  # before the number of a function that came before
_PARTIAL = object()  # begins what a partial is made of
_NOTHING_HELD = object()  # stands for what a function is made of beside itself and the globals that it reads
_itself = operator.attrgetter("__code__", "__globals__", "__name__", "__qualname__", "__module__", "__doc__")
_held_by = operator.attrgetter("__annotations__", "__closure__", "__defaults__", "__kwdefaults__", "__dict__")
_IMMUTABLE = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, types.CodeType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(datetime.date, datetime.datetime, datetime.timedelta, pathlib.PosixPath, re.Pattern),
    logging.Logger,  # found by its name
}
