"""What the parent's functions and classes refer to, as far as it travels by value, and when it is sent again.

A function does not take its globals along: it names them, and a class is named too. The values are *sent beside* the
calls, as `put` would send them, and kept by the workers, see `namespaces`. One rule says when they are sent again: when
the parent has bound the name to another object, or pickles the object to other bytes. What a worker makes of them
meanwhile is its own affair, and stays.

Names whose values share an object, as a model and its optimizer do, are sent together, so that they share it there; and
with the call, anew each time, if its arguments share one with them.
"""

from __future__ import annotations

import pickle
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..pickling import Packed, dumps
from . import namespaces
from .fingerprints import is_constant
from .modules import ProcessEnvironment
from .namespaces import Key, Missing, Version
from .reducer import Handle, Origin, Reducer


class _Part:
    """What a name stands for, or a class: as it is now."""

    def __init__(self, key: Key, value: Any, origin: Origin) -> None:
        self.key, self.value, self.origin = key, value, origin
        self.is_class = isinstance(origin, weakref.ref)
        self.names, self.packed = Reducer([key]), _NOT_PACKED

    def pack(self) -> None:
        self.packed = dumps((self.value,), self.paths, share=True, by_value=self.names)

    def paths(self) -> dict[str, Any]:
        """What is told of it in errors."""
        if isinstance(self.origin, weakref.ref):
            return {f"class {self.value.__qualname__!r}": self.value}
        return {f"global {self.key[1]!r} of {self.origin[1]}": self.value}


class Unit:
    """What was sent together, as it was then."""

    def __init__(self, parts: Sequence[_Part], handle: Handle) -> None:
        self.keys, self.handle = tuple(part.key for part in parts), handle
        self.origins = [part.origin for part in parts]
        # Not the classes: they would never be gone.
        self._values = [None if part.is_class else part.value for part in parts]

    def is_still(self, parts: Sequence[_Part], packed: Packed) -> bool:
        """Whether these are the same objects, and none has changed since."""
        if self.keys != tuple(part.key for part in parts):
            return False
        same = all(part.is_class or part.value is value for part, value in zip(parts, self._values, strict=True))
        return same and (packed is _NOT_PACKED or self.handle.payload.holds(packed))


class Settled(NamedTuple):
    """What a call refers to: the versions that were sent beside it, and what has to go along with it."""

    units: list[Unit]
    along: list[_Part]
    absent: list[Key]  # names that have no value, and had none when a call referred to them before

    @property
    def versions(self) -> list[Version]:
        return [(unit.keys, unit.handle.number) for unit in self.units]

    def before(self, packed: Packed, surroundings: Handle | None = None) -> Packed:
        """``packed``, which is rebuilt after what it refers to has been brought up to date."""
        if not self.units and surroundings is None:
            return packed
        # A pickle is a program for a stack machine: this calls the function, then drops what it returns. The versions
        # are a pickle of their own, as a pickle numbers the objects that it has met.
        around = [] if surroundings is None else [((SURROUNDINGS,), surroundings.number)]
        versions = pickle.dumps([*around, *self.versions])  # in this order: the path is needed to import
        name = f"{namespaces.__name__}\n{namespaces.before_call.__name__}\n".encode()
        call = pickle.PROTO + b"\x05" + pickle.GLOBAL + name + pickle.BINBYTES + struct.pack("<I", len(versions))
        begin = call + versions + pickle.TUPLE1 + pickle.REDUCE + pickle.POP
        return packed._replace(pickle=begin + packed.pickle, is_plain=False)


class Script:
    """What has been sent to the workers of one pool beside the calls."""

    def __init__(self, keep: Callable[[Packed, str], Handle], is_elsewhere: bool = False) -> None:
        """``keep`` has an object kept by workers; ``is_elsewhere``: see `ProcessEnvironment`."""
        self.version = 0  # counts what is sent
        self._keep = keep
        self._units: dict[Key, Unit] = {}
        self._environment = ProcessEnvironment(is_elsewhere)
        self._handle: Handle | None = None  # of the surroundings, if they have changed
        self._lock = threading.RLock()  # the collector may run code that calls functions, too

    def is_current(self, settled: Settled) -> bool:
        """Whether none of it has been sent again."""
        sent = self._units
        still = all(sent.get(key) is unit for unit in settled.units for key in unit.keys)
        return still and not any(key in sent for key in settled.absent)

    def surroundings(self) -> Handle | None:
        """The environment, directory and import path, once they are other than when the pool was made."""
        if self._environment.changed():
            self._handle = self._keep(dumps((self._environment,)), "part of the script")
        return self._handle

    def clear(self) -> None:
        """The pool has ended."""
        self._units.clear()

    def settle(self, call: Reducer) -> Settled:
        """Find all that ``call`` refers to, and have what has changed kept by the workers that get the call.

        Raises:
            TransferError: it cannot be pickled.
        """
        with self._lock:
            parts, absent = self._reachable(call)
            alone, along = _groups(parts, call)
            return Settled([self._unit(parts) for parts in alone], along, absent)

    def _reachable(self, call: Reducer) -> tuple[list[_Part], list[Key]]:
        parts: dict[Key, _Part] = {}
        absent: list[Key] = []
        pending: list[tuple[Key, Origin]] = list(call.origins())
        while pending:
            key, origin = pending.pop()
            unit = self._units.get(key)
            if key in parts or (part := _part(key, origin)) is None:
                continue
            if part.value is Missing and unit is None:
                absent.append(key)
                continue
            parts[key] = part
            if part.is_class or not is_constant(part.value):
                part.pack()
                pending += part.names.origins()
                if unit is not None:  # what it was sent together with
                    pending += zip(unit.keys, unit.origins, strict=True)
        return list(parts.values()), absent

    def _unit(self, parts: list[_Part]) -> Unit:
        known = self._units.get(parts[0].key)
        packed = parts[0].packed
        if len(parts) > 1:
            packed = _pack_together(parts)
        if known is not None and known.is_still(parts, packed):
            return known
        if packed is _NOT_PACKED:
            parts[0].pack()
            packed = parts[0].packed
        unit = Unit(parts, self._keep(packed, "part of the script"))
        self.version += 1
        for part in parts:
            if part.is_class and part.key not in self._units:
                weakref.finalize(part.value, self._units.pop, part.key, None).atexit = False
            self._units[part.key] = unit
        return unit


class Along:
    """Pickled with a call, it sets ``parts`` before that."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return namespaces.set_globals, (tuple(part.key for part in self.parts), [part.value for part in self.parts])


def _pack_together(parts: Sequence[_Part]) -> Packed:
    names = Reducer(part.key for part in parts)
    return dumps(
        tuple(part.value for part in parts),
        lambda: {path: value for part in parts for path, value in part.paths().items()},
        share=True,
        by_value=names,
    )


def _groups(parts: Sequence[_Part], call: Reducer) -> tuple[list[list[_Part]], list[_Part]]:
    """The parts, those together that share objects; and those that have to go along with ``call``.

    These share objects with it, or refer to such, which are not there before.
    """
    along: list[_Part] = []
    in_call = set(call.objects) if any(part.names.objects for part in parts) else set[int]()
    groups: list[tuple[list[_Part], set[int]]] = [(along, in_call)]
    for part in sorted(parts, key=lambda part: str(part.key)):
        objects = part.names.objects
        sharing = [group for group in groups if not group[1].isdisjoint(objects)] or [([], set())]
        first, *others = sharing
        first[0].append(part)
        first[1].update(objects)
        for other in others:
            first[0].extend(other[0])
            first[1].update(other[1])
            groups.remove(other)
        if first not in groups:
            groups.append(first)
    alone = [group for group, _ in groups if group is not along]
    while along:  # and what refers to it
        keys = {part.key for part in along}
        refer = [group for group in alone if any(part.names.refers_to(keys) for part in group)]
        if not refer:
            break
        for group in refer:
            alone.remove(group)
            along.extend(group)
    return [sorted(group, key=lambda part: str(part.key)) for group in alone], along


def _part(key: Key, origin: Origin) -> _Part | None:
    if isinstance(origin, weakref.ref):
        cls = origin()
        return None if cls is None else _Part(key, cls, origin)
    return _Part(key, origin[0].get(key[1], Missing), origin)


SURROUNDINGS = "surroundings"  # their key
_NOT_PACKED = Packed(b"")
