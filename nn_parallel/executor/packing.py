"""What a pool sends: calls, and the objects that workers keep because many calls need them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..calls.records import call_name
from ..pickling import ATOMS, Packed, dumps
from . import namespaces
from .connection import Parcel
from .fingerprints import fingerprint
from .memfd import Files
from .modules import Modules, Watched
from .names import Handle, Names, met
from .script import Along, Script, Settled

FUNCTIONS_KEPT = 128


ATOMS.add(Handle)


class _Kept(NamedTuple):
    """A function that the workers keep, and what they need for that."""

    number: int  # under which they keep it
    handles: list[Handle]
    settled: Settled
    version: int  # of all that had been sent then


@dataclass
class _Known:
    """A function that has been called before: what it is made of, as `fingerprint` found it."""

    parts: list[object]
    watched: list[Watched]
    kept: _Kept | None = None


class Functions:
    """The functions that workers keep: those that have been called before, and cannot have changed since."""

    def __init__(self, script: Script, keep: Callable[[Packed, str], Handle]) -> None:
        self._script, self._keep, self._modules = script, keep, Modules()
        self._known = OrderedDict[tuple[int, ...], _Known]()  # the one used last at the end
        self._lock = threading.RLock()  # the collector may run code that calls functions, too

    def kept(self, fn: Callable[..., Any]) -> _Kept | None:
        """For the second and later calls of such a function; None if it must be sent with the call."""
        found = fingerprint(fn)
        if found is None:
            self._modules.warn_of_changes(self._modules.watched(fn))
            return None
        key, parts = found
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Known(parts, self._modules.watched(fn))
                if len(self._known) > FUNCTIONS_KEPT:
                    self._known.popitem(last=False)
                is_new = True
            else:
                self._known.move_to_end(key)
                is_new = False
        if known.watched:
            self._modules.warn_of_changes(known.watched)
        if is_new:
            return None
        kept = known.kept
        if kept is None or kept.version != self._script.version:
            known.kept = kept = self._kept_now(fn, kept)
        return kept

    def _kept_now(self, fn: Callable[..., Any], before: _Kept | None) -> _Kept:
        if before is not None and self._script.is_current(before.settled):
            return before._replace(version=self._script.version)
        names = Names()
        packed = dumps(fn, lambda: {"the function": fn}, by_value=names)
        settled = self._script.settle(names)
        kept = namespaces.Kept(settled.versions, packed.pickle)
        handle = self._keep(dumps(kept), "function")
        handles = [*(unit.handle for unit in settled.units), handle]
        return _Kept(handle.number, handles, settled, self._script.version)

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
        name: str,
        options: CallOptions,
        parcel: Parcel,
        handles: list[Handle],
        function: int = 0,
        classes: Iterable[type] = (),
    ) -> None:
        """``function`` is the number under which the workers keep it, ``classes`` what results may be instances of."""
        self.name, self.options, self.parcel, self.handles = name, options, parcel, handles
        self.function, self._classes = function, classes

    @classmethod
    def unsent(cls, name: str, options: CallOptions) -> PackedCall:
        """Stands for one that could not be packed."""
        return cls(name, options, _NOTHING, [])

    def let_go(self) -> None:
        """It is over: what was sent with it is not needed any more, but for the classes of a result not yet rebuilt."""
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
        self.files = Files()
        self.forgotten = deque[int]()  # the numbers of handles that are gone: workers may forget their objects
        self._on_forgotten = on_forgotten
        self._script = Script(self._keep)
        self._functions = Functions(self._script, self._keep)

    def pack(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        name: str = "",
    ) -> PackedCall:
        """The call as it is sent: the function by a handle, if the workers can keep it; ``name`` is told in errors."""
        name = name or call_name(fn)
        kept, surroundings = self._functions.kept(fn), self._script.surroundings()
        if kept and not args and not kwargs and surroundings is None:
            return PackedCall(name, options, _NO_ARGUMENTS, kept.handles, kept.number)
        names, sent = Names(), (None if kept else fn, args, kwargs)
        parts = functools.partial(_parts, fn, args, kwargs)
        handles: list[Handle] = []
        met.owner, met.handles = self, handles
        try:
            packed = dumps(sent, parts, share=True, by_value=names)
            for handle in handles:
                names.update(handle.names)
            if names or surroundings is not None:
                settled = self._script.settle(names)
                if settled.along:
                    along = Names(part.key for part in settled.along)
                    packed = dumps((Along(settled.along), *sent), parts, share=True, by_value=along)
                packed = settled.before(packed, surroundings)
                handles += [] if surroundings is None else [surroundings]
                handles += (unit.handle for unit in settled.units)
        finally:
            met.owner = met.handles = None
        parcel, classes = Parcel(packed, self.files), list(names.classes)
        if kept is None:
            return PackedCall(name, options, parcel, handles, classes=classes)
        return PackedCall(
            name, options, parcel, [*kept.handles, *handles] if handles else kept.handles, kept.number, classes
        )

    def put(self, obj: Any) -> Handle:
        """Pack ``obj`` for the workers to keep as long as its handle lives."""
        names = Names()
        handle = self._keep(dumps(obj, share=True, by_value=names), type(obj).__qualname__)
        handle.names.update(names)
        return handle

    def close(self) -> None:
        """The pool has ended."""
        self.files.close()
        self._functions.clear()
        self._script.clear()

    def _keep(self, packed: Packed, what: str) -> Handle:
        handle = Handle(Parcel(packed, self.files), what, self)
        weakref.finalize(handle, self._forget, handle.number).atexit = False
        return handle

    def _forget(self, number: int) -> None:
        self.forgotten.append(number)
        self._on_forgotten()


_NOTHING, _NO_ARGUMENTS = Parcel(Packed(b""), Files()), Parcel(dumps((None, (), {})), Files())
