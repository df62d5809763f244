"""Which part of an object cannot be pickled, and the path to it."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

LEVELS = 20  # The search goes no deeper, and names the object at this depth.


def find_unpicklable(parts: Mapping[str, Any], can_be_pickled: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the path to the innermost thing that cannot be pickled, and that thing.

    ``parts`` are objects by their paths. If every part can be pickled by itself, it is the first.
    """
    return _search(parts, can_be_pickled, set(), LEVELS) or next(iter(parts.items()))


def _search(
    parts: Mapping[str, Any], can_be_pickled: Callable[[Any], bool], seen: set[int], levels: int
) -> tuple[str, Any] | None:
    for path, part in parts.items():
        if id(part) in seen or can_be_pickled(part):
            continue
        if not levels:
            return path, part
        seen.add(id(part))
        inner = dict(_parts(part, path))
        culprit = _search(inner, can_be_pickled, seen, levels - 1)
        # Where all inner parts that fail lead back to where we came from, it is not a part of this one that fails.
        if culprit or not any(id(value) in seen for value in inner.values()):
            return culprit or (path, part)
    return None


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of ``obj`` that pickling it would pickle, each with its path."""
    if isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
        yield f"{path}.__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield f"{path}.func", obj.func
        yield from ((f"{path}.args[{index}]", value) for index, value in enumerate(obj.args))
        yield from ((f"{path}.keywords[{key!r}]", value) for key, value in obj.keywords.items())
    elif isinstance(obj, types.FunctionType):
        name = f"{obj.__qualname__}()"
        for variable, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"closure variable {variable!r} of {name}", cell.cell_contents
        for variable in _global_names(obj.__code__) & obj.__globals__.keys():
            yield f"global {variable!r} of {name}", obj.__globals__[variable]
        defaults = obj.__defaults__ or ()
        with_default = obj.__code__.co_varnames[: obj.__code__.co_argcount][-len(defaults) :] if defaults else ()
        for parameter, value in [*zip(with_default, defaults, strict=True), *(obj.__kwdefaults__ or {}).items()]:
            yield f"default of parameter {parameter!r} of {name}", value
    elif isinstance(obj, Mapping):
        yield from ((f"{path}[{_repr(key)}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple | set | frozenset | collections.deque):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, type):
        yield from ((f"{path}.{name}", value) for name, value in vars(obj).items() if not name.startswith("__"))
    elif not isinstance(obj, types.ModuleType) and not _refuses(obj):
        slots = [name for kind in type(obj).__mro__ for name in _listed(getattr(kind, "__slots__", ()))]
        values = {name: getattr(obj, name) for name in slots if hasattr(obj, name)} | getattr(obj, "__dict__", {})
        yield from ((f"{path}.{name}", value) for name, value in values.items())
        yield f"class {type(obj).__qualname__!r}", type(obj)


def _refuses(obj: Any) -> bool:
    """Return whether the own ``__reduce__`` of ``obj`` raises, and not one of its parts."""
    if not any("__reduce__" in vars(kind) for kind in type(obj).__mro__[:-1]):
        return False
    try:
        obj.__reduce__()
    except Exception:
        return True
    return False


def _repr(key: Any) -> str:
    try:
        return repr(key)[:1000]
    except Exception:  # it must not hide the error that is being told
        return f"<{type(key).__name__}>"


def _listed(slots: str | Sequence[str]) -> Sequence[str]:
    return [slots] if isinstance(slots, str) else slots


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names that a function and the functions inside it look up."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))
