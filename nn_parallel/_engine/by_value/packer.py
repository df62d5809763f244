"""What a pool sends: calls, and the objects that workers keep because many calls need them."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..pickling import ATOMS, Packed, dumps
from ..pool.channel import Payload
from ..pool.memory_files import Files
from ..ranks.records import call_name
from .function_cache import FunctionCache
from .reducer import Handle, Reducer, met
from .script import Along, Script

ATOMS.add(Handle)


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
        payload: Payload,
        handles: list[Handle],
        function: int = 0,
        classes: Iterable[type] = (),
    ) -> None:
        """``function`` is the number under which the workers keep it, ``classes`` what results may be instances of."""
        self.name, self.options, self.payload, self.handles = name, options, payload, handles
        self.function, self._classes = function, classes

    @classmethod
    def unsent(cls, name: str, options: CallOptions) -> PackedCall:
        """Stands for one that could not be packed."""
        return cls(name, options, _NOTHING, [])

    def release(self) -> None:
        """It is over: what was sent with it is not needed any more, but for the classes of a result not yet rebuilt."""
        self.handles, self.payload = [], _NOTHING


def _parts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call is made of, by name."""
    named = {"the function": fn}
    named |= {f"argument {index}": value for index, value in enumerate(args)}
    return named | {f"argument {name!r}": value for name, value in kwargs.items()}


class Packer:
    """Packs what one pool sends."""

    def __init__(self, on_forgotten: Callable[[], object], is_elsewhere: bool = False) -> None:
        """``on_forgotten`` is called when there is something new in ``forgotten``, by the collector, in any thread.

        ``is_elsewhere``: the workers are on other machines.
        """
        self.files = Files()
        self.forgotten = deque[int]()  # the numbers of handles that are gone: workers may forget their objects
        self._on_forgotten = on_forgotten
        self._script = Script(self._keep, is_elsewhere)
        self._functions = FunctionCache(self._script, self._keep)

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
        names, sent = Reducer(), (None if kept else fn, args, kwargs)
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
                    along = Reducer(part.key for part in settled.along)
                    packed = dumps((Along(settled.along), *sent), parts, share=True, by_value=along)
                packed = settled.before(packed, surroundings)
                handles += [] if surroundings is None else [surroundings]
                handles += (unit.handle for unit in settled.units)
        finally:
            met.owner = met.handles = None
        payload, classes = Payload(packed, self.files), list(names.classes)
        if kept is None:
            return PackedCall(name, options, payload, handles, classes=classes)
        return PackedCall(
            name, options, payload, [*kept.handles, *handles] if handles else kept.handles, kept.number, classes
        )

    def put(self, obj: Any) -> Handle:
        """Pack ``obj`` for the workers to keep as long as its handle lives."""
        names = Reducer()
        handle = self._keep(dumps(obj, share=True, by_value=names), type(obj).__qualname__)
        handle.names.update(names)
        return handle

    def close(self) -> None:
        """The pool has ended."""
        self.files.close()
        self._functions.clear()
        self._script.clear()

    def _keep(self, packed: Packed, what: str) -> Handle:
        handle = Handle(Payload(packed, self.files), what, self)
        weakref.finalize(handle, self.forget, handle.number).atexit = False
        return handle

    def forget(self, number: int) -> None:
        """The handle of this number is gone."""
        self.forgotten.append(number)
        self._on_forgotten()


_NOTHING, _NO_ARGUMENTS = Payload(Packed(b""), Files()), Payload(dumps((None, (), {})), Files())
