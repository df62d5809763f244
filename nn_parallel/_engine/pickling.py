"""To bytes and back: functions and classes of ``__main__`` by value, tensors by their storage, errors with a path.

One rule serves every tensor: it names its `torch.UntypedStorage` and its place there, and what is used of a large
storage leaves the pickle as buffers, out of band (protocol 5). Views, strides, aliasing, parameters, tied weights,
sparse and quantised tensors and every dtype then come out right by torch's own pickling of the rest.
"""

from __future__ import annotations

import array
import bisect
import ctypes
import functools
import io
import linecache
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch

from ..errors import TransferError
from .diagnostics import find_unpicklable
from .failures import qualified_name

Buffer = bytearray | memoryview | pickle.PickleBuffer
_Parts = list[tuple[int, torch.UntypedStorage]]  # of a storage: where they begin, ascending, in bytes
LARGE_BYTES = 1 << 15  # what is smaller stays in the pickle
_ATOMS: set[type] = {type(None), bool, int, float}
_ALIGNMENT = 64  # of the parts of a storage: what torch gives a storage itself


class Packed(NamedTuple):
    """An object as a pickle and what left it: large buffers, and memory that is shared rather than sent.

    The first buffer, where there are any, says what the next ones are, as two integers of 64 bits each: the number of a
    storage, and the byte at which this part of it begins. The pickle asks for the rest one after another.
    """

    pickle: bytes
    buffers: Sequence[memoryview] = ()
    shared: Sequence[torch.UntypedStorage] = ()

    def after(self, first: Packed) -> Packed:
        """Return this pickle with another one before it, which is read first and whose object is dropped."""
        assert not first.buffers
        assert not first.shared
        return self._replace(pickle=first.pickle + self.pickle)


def dumps(obj: Any, parts: Callable[[], Mapping[str, Any]] | None = None) -> Packed:
    """Pickle ``obj`` for a process that has run the same script; see `Pickler.pack`."""
    atoms = dump_atoms(obj)
    return Pickler().pack(obj, parts) if atoms is None else Packed(atoms)


def dump_atoms(obj: Any) -> bytes | None:
    """Pickle numbers, short texts and the like, and short tuples of them; None for all else.

    ``pickle.loads`` reads the pickle, which takes a tenth of the time that `loads` takes.
    """
    if not _is_atomic(obj):
        return None
    pickled = pickle.dumps(obj, protocol=5)
    return pickled if len(pickled) < LARGE_BYTES else None


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
        table, *others = buffers or [bytearray()]
        places = memoryview(table).cast("B").cast("Q")
        parts: dict[int, list[tuple[int, Buffer]]] = {}
        for number, start, part in zip(places[::2], places[1::2], others, strict=False):
            parts.setdefault(number, []).append((start, part))
        file = io.BytesIO(packed)
        inline = iter(others[len(places) // 2 :])
        while True:  # several pickles may follow one another: the last one is the object
            unpickler = _Unpickler(file, buffers=inline)
            unpickler._device = device
            unpickler._shared = shared
            unpickler._parts = parts
            result = unpickler.load()
            if file.tell() == file.getbuffer().nbytes:
                return result


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles one object for a process that has run the same script.

    Functions and classes go by name where their module has them, ``__main__`` too; else cloudpickle takes them apart.
    """

    def __init__(self, share: bool = False) -> None:
        """``share``: tensors in shared memory stay shared, so this is for another process of this machine."""
        self.file = io.BytesIO()
        self._share = share
        self._storages: dict[int, _Storage] = {}
        self.shared: list[torch.UntypedStorage] = []  # memory that is to be the same in the other process
        self.large: list[_Storage] = []  # by the numbers by which the pickle names them
        buffers: list[memoryview] = []
        self.buffers = buffers

        def stays(buffer: pickle.PickleBuffer) -> bool:  # no method: all that is pickled would live on in a cycle
            raw = buffer.raw()
            if raw.nbytes < LARGE_BYTES:
                return True
            buffers.append(raw)
            return False

        super().__init__(self.file, protocol=5, buffer_callback=stays)

    def pack(self, obj: Any, parts: Callable[[], Mapping[str, Any]] | None = None) -> Packed:
        """Pickle ``obj``. A pickler does so once.

        Args:
            obj: the object. The buffers are views of its memory: use them before anything writes to it.
            parts: returns what ``obj`` is made of, by names for the error; None: ``{"the object": obj}``.

        Raises:
            TransferError: it cannot be pickled; the message gives the path to the part that cannot.
        """
        try:
            return self._pack(obj)
        except TransferError:
            raise
        except Exception as error:
            path, part = find_unpicklable(parts() if parts else {"the object": obj}, self._can_pickle)
            raise TransferError(
                f"{path[0].upper()}{path[1:]} is a {qualified_name(type(part))} and cannot be sent to another process: "
                f"{error}"
            ) from error

    def another(self) -> Pickler:
        """Return a new pickler like this one."""
        return Pickler()

    def _pack(self, obj: Any) -> Packed:
        self.dump(obj)
        parts = [(number, *part) for number, storage in enumerate(self.large) for part in storage.parts()]
        buffers = [memoryview(self.large[number].bytes(start, end)).cast("B") for number, start, end in parts]
        buffers += self.buffers
        if buffers:
            places = array.array("Q", (each for number, start, _ in parts for each in (number, start)))
            buffers.insert(0, memoryview(places).cast("B"))
        return Packed(self.file.getvalue(), buffers, self.shared)

    def _can_pickle(self, obj: Any) -> bool:
        try:
            self.another()._pack(obj)
        except Exception:
            return False
        return True

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor and _is_plain(obj):
            storage = self._noted(obj.untyped_storage())
            storage.use(obj)
            offset = int(obj.storage_offset())
            return _plain_tensor, (storage, obj.dtype, offset, tuple(obj.size()), obj.stride(), obj.requires_grad)
        if kind is _Storage:
            if obj.is_shared:
                self.shared.append(obj.storage)
                return _shared_storage, (len(self.shared) - 1, obj.size)
            if obj.size >= LARGE_BYTES:
                self.large.append(obj)
                return _large_storage, (len(self.large) - 1, obj.on_accelerator)
            return _small_storage, (pickle.PickleBuffer(obj.bytes(0, obj.size)), obj.on_accelerator)
        if kind is torch.storage.TypedStorage:  # what torch's own reduction of other tensors refers to
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is torch.UntypedStorage and obj.device.type != "meta":
            storage = self._noted(obj)
            storage.used.append((0, storage.size))
            return _only_part, (storage,)
        if kind is types.CodeType:  # cloudpickle from 3.1.3 on leaves the name of the file out, and tracebacks need it
            make, args, *_ = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (make, args, obj.co_filename, _lines_of(obj.co_filename))
        if kind in _NAMED or issubclass(kind, type):
            if module_defining(obj) is not None:
                return NotImplemented
            if kind is functools._lru_cache_wrapper:
                return make_cached, (obj.__wrapped__, obj.cache_parameters(), obj.__dict__)
        return super().reducer_override(obj)

    def _noted(self, storage: torch.UntypedStorage) -> _Storage:
        """Return the same for every tensor in it."""
        if storage._cdata not in self._storages:
            # The memory of `torch.from_file` is shared as well, but torch keeps no descriptor of it.
            can_be_shared = storage.device.type == "cpu" and storage.is_shared() and storage.filename is None
            stays_shared = self._share and can_be_shared
            self._storages[storage._cdata] = _Storage(storage, stays_shared)
        return self._storages[storage._cdata]


class _Unpickler(pickle.Unpickler):
    _device: torch.device | None
    _shared: Sequence[Buffer]
    _parts: dict[int, list[tuple[int, Buffer]]]

    def find_class(self, module: str, name: str) -> Any:
        obj = super().find_class(module, name)
        # What is returned must not refer to the unpickler, whose memo holds it: all that was unpickled would live on
        # in a cycle.
        device = self._device
        shared = self._shared
        parts = self._parts
        if obj is _small_storage:
            return lambda buffer, on_accelerator: _rebuild_storage([(0, buffer)], on_accelerator, device)
        if obj is _large_storage:
            return lambda number, on_accelerator: _rebuild_storage(
                parts.get(number, _NONE_USED), on_accelerator, device
            )
        if obj is _shared_storage:
            return lambda index, size: _rebuild_storage([(0, _last(memoryview(shared[index]), size))])
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return _rebuild_tensor_of_any_dtype
        return obj


class _Storage:
    """A storage that is pickled, and what is used of it."""

    def __init__(self, storage: torch.UntypedStorage, is_shared: bool) -> None:
        self.storage = storage
        self.is_shared = is_shared
        self.size = storage.nbytes()
        self.on_accelerator = storage.device.type != "cpu"
        self.used: list[tuple[int, int]] = []  # from, to, in bytes

    def use(self, tensor: torch.Tensor) -> None:
        """Note the bytes that ``tensor`` uses."""
        if tensor.numel():
            length: int = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
            start = int(tensor.storage_offset()) * tensor.dtype.itemsize
            self.used.append((start, start + length * tensor.dtype.itemsize))

    def parts(self) -> list[tuple[int, int]]:
        """Return the parts of the storage to send: all of it, or what views use if that is less than half.

        Parts that overlap are one.
        """
        parts: list[tuple[int, int]] = []
        for start, end in sorted((start - start % _ALIGNMENT, end) for start, end in self.used):
            if parts and start < parts[-1][1]:
                parts[-1] = parts[-1][0], max(end, parts[-1][1])
            else:
                parts.append((start, end))
        return parts if 2 * sum(end - start for start, end in parts) <= self.size else [(0, self.size)]

    def bytes(self, start: int, end: int) -> Any:
        """Return an object with the buffer interface that keeps the memory alive; a copy if that is an accelerator's.

        Not a memoryview: when the collector clears one that a `PickleBuffer` exports, Python before 3.13 crashes.
        """
        if start == end:
            return bytearray()
        storage = self.storage
        if self.on_accelerator:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (end - start,), (1,))
            storage = there.cpu().untyped_storage()
            end -= start
            start = 0
        return memory_of(storage, start, end)


def memory_of(storage: torch.UntypedStorage, start: int = 0, end: int | None = None) -> Any:
    """Return an object with the buffer interface for the bytes of a storage on the CPU; it keeps them alive."""
    array = (ctypes.c_char * ((storage.nbytes() if end is None else end) - start)).from_address(
        storage.data_ptr() + start
    )
    array.storage = storage  # type: ignore[attr-defined]
    return array


def _is_atomic(obj: Any) -> bool:
    """Return whether this is a number, a text or the like, or a short tuple of such."""
    kind = type(obj)
    if kind in _ATOMS:
        return True
    if kind is tuple:
        return len(obj) <= _FEW and all(map(_is_atomic, obj))
    if kind is str or kind is bytes:
        return len(obj) < LARGE_BYTES
    return kind is dict and not obj


def module_defining(obj: Any) -> types.ModuleType | None:
    """Return the module that has ``obj`` under the names in ``__module__`` and ``__qualname__``, or None."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    value: Any = module
    for name in (getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or "").split("."):
        value = getattr(value, name, None)
    return module if value is obj else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether storage, dtype, shape, strides and ``requires_grad`` are all that the tensor has."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor._backward_hooks
        and not tensor.__dict__
    )


def _plain_tensor(
    parts: _Parts,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
) -> torch.Tensor:
    storage, offset = _part_with(parts, offset, dtype.itemsize)
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
    """Rebuild a tensor of a dtype that no typed storage has (float8, uint16, ...), as torch's `_rebuild_tensor_v3`."""
    tensor = _plain_tensor([(0, storage)], dtype, offset, tuple(size), tuple(stride), requires_grad)
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    tensor._backward_hooks = hooks
    return tensor


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _small_storage(buffer: Buffer, on_accelerator: bool) -> Any:
    """Stands in a pickle for `_Unpickler`'s own, as the next ones do."""


def _large_storage(number: int, on_accelerator: bool) -> Any: ...


def _shared_storage(index: int, size: int) -> Any: ...


def _last(memory: memoryview, size: int) -> memoryview:
    """Return the memory of a shared storage: with the strategy ``file_system``, torch has a header before it."""
    return memory[memory.nbytes - size :]


def _rebuild_storage(
    buffers: Iterable[tuple[int, Buffer]], on_accelerator: bool = False, device: torch.device | None = None
) -> _Parts:
    where = device if on_accelerator and device is not None else torch.device("cpu")
    parts: _Parts = []
    for start, buffer in buffers:
        size = memoryview(buffer).nbytes
        memory = (
            torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        parts.append((start, memory.to(where).untyped_storage()))
    return parts


def _part_with(parts: _Parts, offset: int, itemsize: int) -> tuple[torch.UntypedStorage, int]:
    """Return the part that holds a tensor, and its offset there, in elements; an empty one may lie before the first."""
    index = bisect.bisect_right(parts, offset * itemsize, key=operator.itemgetter(0)) - 1
    start, storage = parts[max(index, 0)]
    return storage, max(offset - start // itemsize, 0)


def _only_part(parts: _Parts) -> torch.UntypedStorage:
    """Return a storage that was sent whole."""
    return parts[0][1]


def _code_of_file(
    make: Callable[..., types.CodeType], args: tuple[Any, ...], file_name: str, lines: list[str] | None
) -> types.CodeType:
    """Return the code that ``make`` makes of ``args``, as that of a file; ``lines``: the source, if no file has it."""
    if lines is not None:
        linecache.cache[file_name] = len("".join(lines)), None, lines, file_name
    return make(*args).replace(co_filename=file_name)


def _lines_of(file_name: str) -> list[str] | None:
    """Return the source that only this process has, such as that of the cell of a notebook."""
    entry = linecache.cache.get(file_name, ())
    return entry[2] if len(entry) == 4 and not os.path.exists(file_name) else None


def make_cached(fn: Callable[..., Any], parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return what `functools.cache` makes of ``fn``, with an empty cache."""
    made: Any = functools.lru_cache(**parameters)(fn)
    made.__dict__.update(attributes)
    return made


_NAMED = {types.FunctionType, functools._lru_cache_wrapper}
_FEW = 8
_NONE_USED: list[tuple[int, Buffer]] = [(0, bytearray())]
