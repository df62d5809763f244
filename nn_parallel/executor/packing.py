"""What a pool sends: calls, and the objects that workers keep because many calls need them."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..pickling import ATOMS, Packed, dumps
from ..reports import call_name
from .fingerprints import fingerprint
from .segments import Segments
from .transport import Parcel
from .worker import stored_object

FUNCTIONS_KEPT = 128


class Handle:
    """Stands for an object that `ParallelExecutor.put` keeps in the workers; a task receives the object itself.

    The workers let go of the object when the last reference to its handle is gone.
    """

    def __init__(self, parcel: Parcel, what: str, owner: object) -> None:
        self.number, self.parcel, self._what, self._owner = next(_numbers), parcel, what, owner

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(_packing, "owner", None) is not self._owner:
            raise TypeError("a handle is good for the calls of the executor that made it, and for nothing else")
        _packing.handles.append(self)
        return stored_object, (self.number,)

    def __repr__(self) -> str:
        return f"<Handle of a {self._what}>"


ATOMS.add(Handle)


@dataclass
class _Known:
    """A function that has been called before: what it is made of, as `fingerprint` found it."""

    parts: list[object]
    handle: Handle | None = None


class Functions:
    """The functions that workers keep: those that have been called before, and cannot have changed since."""

    def __init__(self, put: Callable[[Any, Callable[[], dict[str, Any]]], Handle]) -> None:
        self._put = put
        self._known = OrderedDict[tuple[int, ...], _Known]()  # the one used last at the end
        self._lock = threading.RLock()  # the collector may run code that calls functions, too

    def handle_of(self, fn: Callable[..., Any]) -> Handle | None:
        """For the second and later calls of such a function; None if it must be sent with the call."""
        found = fingerprint(fn)
        if found is None:
            return None
        key, parts = found
        with self._lock:
            known = self._known.get(key)
            if known is None:
                self._known[key] = _Known(parts)
                if len(self._known) > FUNCTIONS_KEPT:
                    self._known.popitem(last=False)
                return None
            self._known.move_to_end(key)
        if known.handle is None:
            known.handle = self._put(fn, lambda: {"the function": fn})
        return known.handle

    def clear(self) -> None:
        self._known.clear()


class CallOptions(NamedTuple):
    """How calls are made, whatever they are."""

    pass_device: bool
    timeout_s: float | None  # that one may take on a worker, from when it begins there


class PackedCall:
    """A function and its arguments, packed, and the handles of what workers keep of it; they live as long as it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        segments: Segments,
        owner: object = None,
        function: Handle | None = None,
        name: str = "",
    ) -> None:
        self.name, self.function, self.options = name or call_name(fn), 0, options
        self.handles: list[Handle] = []
        if function is not None:
            self.function, self.handles = function.number, [function]
            if not args and not kwargs:
                self.parcel = _NO_ARGUMENTS
                return
        _packing.owner, _packing.handles = owner, self.handles
        try:
            packed = dumps(
                (None if function else fn, args, kwargs), functools.partial(_parts, fn, args, kwargs), share=True
            )
        finally:
            _packing.owner = _packing.handles = None
        self.parcel = Parcel(packed, segments)

    def let_go(self) -> None:
        """It is over: what was sent with it is not needed any more."""
        self.handles, self.parcel = [], _NOTHING


def _parts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call is made of, by name."""
    named = {"the function": fn}
    named |= {f"argument {index}": value for index, value in enumerate(args)}
    return named | {f"argument {name!r}": value for name, value in kwargs.items()}


class Packer:
    """Packs what one pool sends."""

    def __init__(self, on_forgotten: Callable[[], object]) -> None:
        """``on_forgotten`` is called when there is something new in ``forgotten``, by the collector, in any thread."""
        self.segments = Segments()
        self.forgotten = deque[int]()  # the numbers of handles that are gone: workers may forget their objects
        self._on_forgotten = on_forgotten
        self._functions = Functions(self.put)

    def pack(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        name: str = "",
    ) -> PackedCall:
        """The call as it is sent: the function by a handle, if the workers can keep it; ``name`` is told in errors."""
        return PackedCall(fn, args, kwargs, options, self.segments, self, self._functions.handle_of(fn), name)

    def put(self, obj: Any, parts: Callable[[], dict[str, Any]] | None = None) -> Handle:
        """Pack ``obj`` for the workers to keep as long as its handle lives; ``parts`` as in `dumps`."""
        handle = Handle(Parcel(dumps(obj, parts, share=True), self.segments), type(obj).__qualname__, self)
        weakref.finalize(handle, self._forget, handle.number).atexit = False
        return handle

    def close(self) -> None:
        """The pool has ended."""
        self.segments.close()
        self._functions.clear()

    def _forget(self, number: int) -> None:
        self.forgotten.append(number)
        self._on_forgotten()


_packing = threading.local()  # while a call is packed in a thread: its owner, and the handles that are met
_numbers = itertools.count(1)
_NOTHING, _NO_ARGUMENTS = Parcel(Packed(b""), Segments()), Parcel(dumps((None, (), {})), Segments())
