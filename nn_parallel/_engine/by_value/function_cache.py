"""The functions that the workers of a pool keep, so that their later calls are sent without them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..pickling import Packed, dumps
from . import namespaces
from .fingerprints import fingerprint
from .modules import Modules, Watched
from .reducer import Handle, Reducer
from .script import Script, Settled

FUNCTIONS_KEPT = 128


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


class FunctionCache:
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
        names = Reducer()
        packed = dumps(fn, lambda: {"the function": fn}, by_value=names)
        settled = self._script.settle(names)
        kept = namespaces.Kept(settled.versions, packed.pickle)
        handle = self._keep(dumps(kept), "function")
        handles = [*(unit.handle for unit in settled.units), handle]
        return _Kept(handle.number, handles, settled, self._script.version)

    def clear(self) -> None:
        self._known.clear()
