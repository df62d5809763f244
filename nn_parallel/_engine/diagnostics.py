"""Search for the part of an object that cannot be pickled, for an error message with the path to this part."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

LEVELS = 20  # the depth at which the search stops and names the object that it has reached


def find_unpicklable(parts: Mapping[str, Any], can_be_pickled: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the path to the innermost object that cannot be pickled, and this object.

    If the search finds no such object, the result is the first of ``parts``, because the error message must name an
    object. For example, each part may be picklable by itself.

    Args:
        parts: the objects to search, by their paths.
        can_be_pickled: tests a single object.
    """
    return _search(parts, can_be_pickled, set(), LEVELS) or next(iter(parts.items()))


def _search(
    parts: Mapping[str, Any], can_be_pickled: Callable[[Any], bool], seen: set[int], levels: int
) -> tuple[str, Any] | None:
    """Search ``parts`` for the innermost object that cannot be pickled.

    Args:
        parts: the objects to search, by their paths.
        can_be_pickled: tests a single object.
        seen: the ids of the objects that the search has entered already.
        levels: how much deeper the search may go.

    Returns:
        The path to the innermost object, and this object; None if the search finds no such object.
    """
    for path, part in parts.items():
        if id(part) in seen or can_be_pickled(part):
            continue
        if not levels:
            return path, part
        seen.add(id(part))
        try:
            inner = dict(_parts(part, path))
        except Exception:  # the object raises when its attributes are read, so the search cannot look into it
            inner = {}
        culprit = _search(inner, can_be_pickled, seen, levels - 1)
        # If the search finds no culprit inside this part, the part itself is the culprit. There is one exception: the
        # search may have entered one of the inner objects already, for example because the objects form a cycle. This
        # inner object may be the only reason why the part cannot be pickled. Then the part is skipped.
        if culprit or not any(id(value) in seen for value in inner.values()):
            return culprit or (path, part)
    return None


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that are pickled along with ``obj``, each with its path."""
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
    """Return whether the class of ``obj`` defines a ``__reduce__`` that raises. Then ``obj`` itself is the culprit."""
    if not any("__reduce__" in vars(kind) for kind in type(obj).__mro__[:-1]):
        return False
    try:
        obj.__reduce__()
    except Exception:
        return True
    return False


def _repr(key: Any) -> str:
    """Return the repr of a key of a mapping, bounded in length."""
    try:
        return repr(key)[:1000]
    except Exception:  # an error in a user's `__repr__` must not replace the error that is being reported
        return f"<{type(key).__name__}>"


def _listed(slots: str | Sequence[str]) -> Sequence[str]:
    """Return ``__slots__`` as a sequence; a class may define it as a single string."""
    return [slots] if isinstance(slots, str) else slots


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names that the code of a function uses and that may be globals. Inner functions are included."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))
