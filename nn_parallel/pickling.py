"""To bytes and back: functions and classes of ``__main__`` by value, tensors by their storage, errors with a path.

One rule serves every tensor: what is used of its `torch.UntypedStorage` leaves the pickle as a buffer (pickle protocol
5, out of band). Views, strides, aliasing, parameters, tied weights, sparse and quantised tensors and every dtype then
come out right by torch's own pickling of the rest.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import io
import operator
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import cloudpickle
import torch

from .culprits import find_culprit
from .errors import TransferError, qualified_name

Buffer = bytearray | memoryview | pickle.PickleBuffer
LARGE_BYTES = 1 << 15  # what is smaller stays in the pickle
ATOMS: set[type] = {type(None), bool, int, float}  # and what reduces itself to such
_ALIGNMENT = 64  # of the parts of a storage: what torch gives a storage itself


class Packed(NamedTuple):
    """An object as a pickle and what left it: large buffers, and memory that is shared rather than sent."""

    pickle: bytes
    buffers: Sequence[memoryview] = ()
    shared: Sequence[torch.UntypedStorage] = ()
    is_plain: bool = False  # nothing in it needs `loads`: ``pickle.loads`` does, in a tenth of the time


class ByValue(Protocol):
    """How functions and classes are pickled that no import finds."""

    def reduce(self, obj: Any, pickler: cloudpickle.Pickler) -> Any:
        """As `pickle.Pickler.reducer_override`; None: in the usual way."""

    def saw(self, pickler: cloudpickle.Pickler, storages: Sequence[torch.UntypedStorage]) -> None:
        """All is pickled: the memo of ``pickler``, and these, are what was met on the way."""


def dumps(
    obj: Any,
    parts: Callable[[], Mapping[str, Any]] | None = None,
    *,
    share: bool = False,
    by_value: ByValue | None = None,
) -> Packed:
    """Pickle ``obj``.

    The buffers are views of the memory of ``obj``: use them before anything writes to it. ``parts()`` names what
    ``obj`` is made of, for the error; ``{"the object": obj}`` if None. With ``share`` tensors in shared memory stay
    shared: for another process of this machine. Without ``by_value`` functions take their globals along.

    Raises:
        TransferError: it cannot be pickled; the message gives the path to the part that cannot.
    """
    try:
        if _is_atomic(obj):
            return Packed(pickle.dumps(obj, protocol=5), is_plain=True)
        return _dumps(obj, share, by_value)
    except Exception as error:
        path, culprit = find_culprit(parts() if parts else {"the object": obj}, _can_be_pickled)
        raise TransferError(
            f"{path[0].upper()}{path[1:]} is a {qualified_name(type(culprit))} and cannot be sent to another process: "
            f"{error}"
        ) from error


def loads(
    packed: bytes | Buffer,
    buffers: Sequence[Buffer],
    device: torch.device | None = None,
    shared: Sequence[Buffer] = (),
) -> Any:
    """Rebuild what `dumps` packed. ``buffers`` must be writable and become the memory of the tensors, as ``shared`` do.

    Accelerator tensors land on ``device``, or on the CPU if that is None. Raises whatever unpickling raises.
    """
    with torch._C.DisableTorchFunction():  # a user's default device must not move what is rebuilt
        unpickler = _Unpickler(io.BytesIO(packed), buffers=buffers)
        unpickler._device, unpickler._shared = device, shared
        return unpickler.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, memory: _Memory, by_value: ByValue | None) -> None:
        self.file, self._memory, self._by_value = io.BytesIO(), memory, by_value
        buffers: list[memoryview] = []
        self.buffers = buffers

        def stays(buffer: pickle.PickleBuffer) -> bool:  # no method: all that is pickled would live on in a cycle
            raw = buffer.raw()
            if raw.nbytes < LARGE_BYTES:
                return True
            buffers.append(raw)
            return False

        super().__init__(self.file, protocol=5, buffer_callback=stays)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor and _is_plain(obj):
            part, offset = self._memory.part_of(obj)
            return _plain_tensor, (part, obj.dtype, offset, tuple(obj.size()), obj.stride(), obj.requires_grad)
        if kind is _Part:
            if obj.is_shared:
                return _shared_storage, (self._memory.share(obj.storage), obj.end)
            return _untyped_storage, (pickle.PickleBuffer(obj.bytes()), obj.on_accelerator)
        if kind is torch.storage.TypedStorage:  # what torch's own reduction of other tensors refers to
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is torch.UntypedStorage and obj.device.type != "meta":
            return _itself, (self._memory.whole(obj),)
        if kind is types.FunctionType and obj.__module__ == __name__:  # by name, without any looking
            return NotImplemented
        if self._by_value is not None and (reduced := self._by_value.reduce(obj, self)) is not None:
            return reduced
        if kind is functools._lru_cache_wrapper and cloudpickle.cloudpickle._lookup_module_and_qualname(obj) is None:
            return _cached, (obj.__wrapped__, obj.cache_parameters(), obj.__dict__)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    _device: torch.device | None
    _shared: Sequence[Buffer]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        # What is returned must not refer to the unpickler, whose memo holds it: all that was unpickled would live on
        # in a cycle.
        device, shared = self._device, self._shared
        if found is _untyped_storage:
            return lambda buffer, on_accelerator: _untyped_storage(buffer, on_accelerator, device)
        if found is _shared_storage:
            return lambda index, size: _untyped_storage(memoryview(shared[index])[:size], False)
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return _rebuild_tensor_of_any_dtype
        if module == "cloudpickle.cloudpickle" and name == "_make_skeleton_class":
            return lambda *args: _adopt(found(*args))
        return found


class _Part:
    """The bytes of a storage from ``start`` to ``end``, as one buffer."""

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int, is_shared: bool = False) -> None:
        self.storage, self.start, self.end, self.is_shared = storage, start, end, is_shared
        self.on_accelerator = storage.device.type != "cpu"

    def bytes(self) -> Any:
        """An object with the buffer interface that keeps the memory alive; a copy if that is an accelerator's.

        Not a memoryview: when the collector clears one that a `PickleBuffer` exports, Python before 3.13 crashes.
        """
        size = self.end - self.start
        if size == 0:
            return bytearray()
        storage, start = self.storage, self.start
        if self.on_accelerator:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))
            storage, start = there.cpu().untyped_storage(), 0
        array = (ctypes.c_char * size).from_address(storage.data_ptr() + start)
        array.storage = storage  # type: ignore[attr-defined]
        return array


class _Memory:
    """Which bytes of which storages the tensors of one object use.

    Not known before all of them have been seen: where it turns out to be little, the object is pickled once more, with
    only those parts. Tensors whose bytes overlap find themselves in the same part.
    """

    def __init__(self, share: bool) -> None:
        self.shared: list[torch.UntypedStorage] = []  # memory that is to be the same in the other process
        self._share = share
        self._parts: dict[int, list[_Part]] = {}  # by storage, ascending
        self._used: dict[int, list[tuple[int, int]]] = {}  # from, to; of storages that may be sent in parts

    def part_of(self, tensor: torch.Tensor) -> tuple[_Part, int]:
        """The part that ``tensor`` lies in, and its offset there, in elements."""
        storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
        parts = self._parts_of(storage)
        offset = int(tensor.storage_offset())
        if (used := self._used.get(storage._cdata)) is None:
            if not tensor.numel():  # it lies nowhere, perhaps before the first part
                return parts[0], 0
            part = parts[bisect.bisect_right(parts, offset * size, key=operator.attrgetter("start")) - 1]
            return part, offset - part.start // size
        if tensor.numel():
            length: int = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
            used.append((offset * size, (offset + length) * size))
        return parts[0], offset

    def whole(self, storage: torch.UntypedStorage) -> _Part:
        """All of ``storage``."""
        part = self._parts_of(storage)[0]
        self._used.pop(storage._cdata, None)
        return part if part.end - part.start == storage.nbytes() else _Part(storage, 0, storage.nbytes())

    def storages(self) -> list[torch.UntypedStorage]:
        """Those in which the tensors lie."""
        return [parts[0].storage for parts in self._parts.values()]

    def share(self, storage: torch.UntypedStorage) -> int:
        """The number under which the receiver finds the same memory."""
        self.shared.append(storage)
        return len(self.shared) - 1

    def narrow(self) -> bool:
        """From now on hand out only the used parts; False if nothing would be won."""
        narrowed = False
        for key, used in self._used.items():
            storage = self._parts[key][0].storage
            spans: list[tuple[int, int]] = []
            for start, end in sorted((start - start % _ALIGNMENT, end) for start, end in used):
                if spans and start < spans[-1][1]:
                    spans[-1] = spans[-1][0], max(end, spans[-1][1])
                else:
                    spans.append((start, end))
            if 2 * sum(end - start for start, end in spans) <= storage.nbytes():
                self._parts[key] = [_Part(storage, start, end) for start, end in spans or [(0, 0)]]
                narrowed = True
        self._used.clear()
        if narrowed:
            self.shared.clear()
        return narrowed

    def _parts_of(self, storage: torch.UntypedStorage) -> list[_Part]:
        key = storage._cdata
        if key not in self._parts:
            is_shared = self._share and _has_descriptor(storage)
            self._parts[key] = [_Part(storage, 0, storage.nbytes(), is_shared)]
            if storage.nbytes() >= LARGE_BYTES and not is_shared:
                self._used[key] = []
        return self._parts[key]


def _is_atomic(obj: Any) -> bool:
    """Whether this is a number, a text or the like, or a short tuple of such."""
    kind = type(obj)
    if kind in ATOMS:
        return True
    if kind is tuple:
        return len(obj) <= _FEW and all(map(_is_atomic, obj))
    if kind is str or kind is bytes:
        return len(obj) < LARGE_BYTES
    return kind is dict and not obj


def _dumps(obj: Any, share: bool, by_value: ByValue | None = None) -> Packed:
    memory = _Memory(share)
    pickler = _Pickler(memory, by_value)
    pickler.dump(obj)
    if by_value is not None:
        by_value.saw(pickler, memory.storages())
    first = pickler
    if memory.narrow():
        pickler = _Pickler(memory, by_value)
        pickler.dump(obj)
    first._by_value = pickler._by_value = None  # which may refer to the pickler: all that it met would live in a cycle
    return Packed(pickler.file.getvalue(), pickler.buffers, memory.shared)


def _can_be_pickled(obj: Any) -> bool:
    try:
        _dumps(obj, share=False)
    except Exception:
        return False
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether storage, dtype, shape, strides and ``requires_grad`` are all there is to it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor._backward_hooks
        and not tensor.__dict__
    )


def _plain_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_tensor_of_any_dtype(
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> torch.Tensor:
    """torch's `_rebuild_tensor_v3`, for the dtypes that no typed storage has (float8, uint16, complex32, ...)."""
    tensor = _plain_tensor(storage, dtype, offset, tuple(size), tuple(stride), requires_grad)
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    tensor._backward_hooks = hooks
    return tensor


def _has_descriptor(storage: torch.UntypedStorage) -> bool:
    """Whether it is memory that other processes can map as well."""
    by_descriptor = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    return by_descriptor and storage.device.type == "cpu" and storage.is_shared()


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _untyped_storage(buffer: Buffer, on_accelerator: bool, device: torch.device | None = None) -> torch.UntypedStorage:
    size = memoryview(buffer).nbytes
    if size == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    return tensor.to(device).untyped_storage() if on_accelerator and device is not None else tensor.untyped_storage()


def _shared_storage(index: int, size: int) -> None:
    """Stands in a pickle for `_Unpickler`'s own."""


def _itself(obj: Any) -> Any:
    return obj


def _cached(fn: Callable[..., Any], parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """What `functools.cache` makes of ``fn``; it has cached nothing yet."""
    made: Any = functools.lru_cache(**parameters)(fn)
    made.__dict__.update(attributes)
    return made


def _adopt(cls: Any) -> Any:
    """Make a class that came by value findable where it says it lives, so that `torch.save` of one works."""
    main = sys.modules["__main__"]
    if cls.__module__ == "__main__" and "." not in cls.__qualname__:
        there = getattr(main, cls.__name__, None)
        if there is None or (isinstance(there, type) and there.__module__ == "__main__"):  # an earlier definition
            setattr(main, cls.__name__, cls)
    return cls


_FEW = 8
