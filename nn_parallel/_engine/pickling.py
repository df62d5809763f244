"""Functions to pickle and unpickle objects, with the memory of large tensors outside of the pickle.

The problem. The memory of a large tensor should be copied once, without further copies into and out of a pickle. But a
tensor is only a view of a `torch.UntypedStorage`. Several tensors may be views of one storage, and must be so in the
other process as well. On the other hand, a small view of a large storage should not bring the whole storage.

The solution is one rule for all tensors. A tensor is pickled as a reference to its storage, together with its offset
and its strides in the storage. A storage is pickled once. If the storage is large, the pickle contains only a number,
and the parts of the storage that tensors use become buffers, which are sent beside the pickle (`Packed.buffers`). If
the storage is in shared memory, it is not copied at all (`Packed.shared`). Sparse and quantised tensors, parameters and
others are pickled by torch's own functions, which refer to storages too, so the rule holds for them as well.

If an object cannot be pickled, the error names the path to the part of the object that is the reason.
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
from .torch_private import REBUILD_TENSOR, DisableTorchFunction, set_tensor_metadata

Buffer = bytearray | memoryview | pickle.PickleBuffer
_Parts = list[tuple[int, torch.UntypedStorage]]  # the parts of a storage that have arrived, each with its offset
LARGE_BYTES = 1 << 15  # smaller buffers stay in the pickle
_ATOMS: set[type] = {type(None), bool, int, float}  # `dump_atoms` pickles all objects of these types
_ALIGNMENT = 64  # parts of a storage begin at a multiple of this number of bytes, as torch aligns storages


class Packed(NamedTuple):
    """An object as a pickle, and the memory that is not in the pickle.

    The buffers, if there are any, have this order:

    1. A table with two integers of 64 bits for each part of a large storage: the number with which the pickle refers to
       the storage, and the byte of the storage at which the part begins.
    2. These parts, in the order of the table.
    3. The memory of other objects, for example of large NumPy arrays, in the order in which the pickle refers to them.
    """

    pickle: bytes
    buffers: Sequence[memoryview] = ()  # memory to send
    shared: Sequence[torch.UntypedStorage] = ()  # shared memory, which the other process maps

    def after(self, first: Packed) -> Packed:
        """Return a pickle that consists of the pickle ``first`` and this one.

        ``first`` prepares the process that unpickles them. For example, it sets the globals that a function in this
        pickle uses. `loads` unpickles both, and returns only the object in this pickle.
        """
        assert not first.buffers
        assert not first.shared
        return self._replace(pickle=first.pickle + self.pickle)


def dumps(obj: Any, parts: Callable[[], Mapping[str, Any]] | None = None) -> Packed:
    """Pickle ``obj`` for a process that has run the same script; see `Pickler.pack`."""
    atoms = dump_atoms(obj)
    return Pickler().pack(obj, parts) if atoms is None else Packed(atoms)


def dump_atoms(obj: Any) -> bytes | None:
    """Pickle a number, a short string or the like, or a short tuple of these. For any other object return None.

    `pickle.loads` can read the pickle, in a tenth of the time that `loads` of this module takes.
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
    """Rebuild an object that `dumps` has packed.

    Args:
        packed: the pickle.
        buffers: the buffers of `Packed`. They must be writable, because they become the memory of the tensors.
        device: the device for tensors that were on an accelerator; None stands for the CPU.
        shared: the shared memory, mapped in this process. It becomes the memory of the tensors.

    Raises:
        Exception: any exception that unpickling raises.
    """
    with DisableTorchFunction():  # the user's default device must have no effect on rebuilt tensors
        return _load(packed, buffers, device, shared)


def _load(
    packed: bytes | Buffer, buffers: Sequence[Buffer], device: torch.device | None, shared: Sequence[Buffer]
) -> Any:
    """Do the work of `loads`. Its loops are not in a ``with`` block there; `RLock` (interrupts) says why."""
    table, *others = buffers or [bytearray()]
    places = memoryview(table).cast("B").cast("Q")
    parts: dict[int, list[tuple[int, Buffer]]] = {}
    for number, start, part in zip(places[::2], places[1::2], others, strict=False):
        parts.setdefault(number, []).append((start, part))
    file = io.BytesIO(packed)
    inline = iter(others[len(places) // 2 :])
    # ``packed`` may consist of several pickles. The last one holds the object. Those before it prepare this process,
    # for example by setting the globals that a function uses (see `Packed.after`).
    while True:
        unpickler = _Unpickler(file, buffers=inline)
        unpickler._device = device
        unpickler._shared = shared
        unpickler._parts = parts
        result = unpickler.load()
        if file.tell() == file.getbuffer().nbytes:
            return result


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """The pickler of one object, for a process that has run the same script.

    A function or class is pickled by name if its module has it under its name, even if the module is ``__main__``.
    Otherwise cloudpickle pickles its code or its attributes.
    """

    def __init__(self, share: bool = False) -> None:
        """Make a pickler.

        Args:
            share: if True, tensors in shared memory are not copied, so that both processes use this memory. The other
                process must then be on this machine.
        """
        self.file = io.BytesIO()
        self._share = share
        self._storages: dict[int, _Storage] = {}  # maps the address of a storage to its `_Storage`
        # The pickle refers to these storages by their indices in these lists.
        self.shared: list[torch.UntypedStorage] = []  # the storages in shared memory, which the other process maps
        self.large: list[_Storage] = []  # the storages that are sent beside the pickle
        buffers: list[memoryview] = []
        self.buffers = buffers  # the buffers of objects that are not tensors

        # `stays` is a plain function without ``self``. A method would form a reference cycle with the pickler, so that
        # everything that was pickled would live until the garbage collector runs.
        def stays(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < LARGE_BYTES:
                return True
            buffers.append(raw)
            return False

        super().__init__(self.file, protocol=5, buffer_callback=stays)

    def pack(self, obj: Any, parts: Callable[[], Mapping[str, Any]] | None = None) -> Packed:
        """Pickle ``obj``. Call this only once.

        Args:
            obj: the object. The returned buffers are views of its memory: use them before anything writes to it.
            parts: returns the objects of which ``obj`` consists, under the names that an error message gives them. If
                None, the message calls ``obj`` "the object".

        Raises:
            TransferError: ``obj`` cannot be pickled. The message has the path to the part that cannot be pickled.
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
        """Return a new pickler of this class, with which `_can_pickle` tests a single object."""
        return Pickler()

    def _pack(self, obj: Any) -> Packed:
        self.dump(obj)
        parts = [(number, *part) for number, storage in enumerate(self.large) for part in storage.parts()]
        buffers = [memoryview(self.large[number].bytes(start, end)).cast("B") for number, start, end in parts]
        buffers += self.buffers
        if buffers:
            places = array.array("Q", (value for number, start, _ in parts for value in (number, start)))
            buffers.insert(0, memoryview(places).cast("B"))
        return Packed(self.file.getvalue(), buffers, self.shared)

    def _can_pickle(self, obj: Any) -> bool:
        try:
            self.another()._pack(obj)
        except Exception:
            return False
        return True

    def reducer_override(self, obj: Any) -> Any:
        """Reduce one object; see `pickle.Pickler.reducer_override`."""
        kind = type(obj)
        if kind is torch.Tensor and _is_plain(obj):
            storage = self._record_of(obj.untyped_storage())
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
        if kind is torch.storage.TypedStorage:  # torch's own functions reduce some tensors to such storages
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is torch.UntypedStorage and obj.device.type != "meta":
            storage = self._record_of(obj)
            storage.used.append((0, storage.size))
            return _only_part, (storage,)
        if kind is types.CodeType:  # tracebacks need the name of the file, which cloudpickle omits from 3.1.3 on
            make, args, *_ = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (make, args, obj.co_filename, _lines_of(obj.co_filename))
        if kind in _NAMED or issubclass(kind, type):
            if module_defining(obj) is not None:
                return NotImplemented
            if kind is functools._lru_cache_wrapper:
                return make_cached, (obj.__wrapped__, obj.cache_parameters(), obj.__dict__)
        return super().reducer_override(obj)

    def _record_of(self, storage: torch.UntypedStorage) -> _Storage:
        """Return the `_Storage` of a storage. All tensors with this storage have the same `_Storage`."""
        if storage._cdata not in self._storages:
            # Memory is shared through its descriptor. A storage that `torch.from_file` has made has a file name, and
            # torch keeps no descriptor for it, so such a storage is copied.
            can_be_shared = storage.device.type == "cpu" and storage.is_shared() and storage.filename is None
            stays_shared = self._share and can_be_shared
            self._storages[storage._cdata] = _Storage(storage, stays_shared)
        return self._storages[storage._cdata]


class _Unpickler(pickle.Unpickler):
    """The unpickler of one pickle. `loads` sets its attributes."""

    _device: torch.device | None
    _shared: Sequence[Buffer]
    _parts: dict[int, list[tuple[int, Buffer]]]

    def find_class(self, module: str, name: str) -> Any:
        """Return the object to which a pickle refers by name.

        A pickle refers to `_small_storage`, `_large_storage` or `_shared_storage` where a storage must be rebuilt. For
        these names, return a function that rebuilds the storage for this unpickler.
        """
        obj = super().find_class(module, name)
        # A returned function must not refer to the unpickler. The memo of the unpickler refers to the function, so the
        # two would form a reference cycle, and everything that was unpickled would live until the garbage collector
        # runs.
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
        if (module, name) == REBUILD_TENSOR:
            return _rebuild_tensor_of_any_dtype
        return obj


class _Storage:
    """A storage that a `Pickler` has come across, and the parts of it that the pickled tensors use."""

    def __init__(self, storage: torch.UntypedStorage, is_shared: bool) -> None:
        self.storage = storage
        self.is_shared = is_shared  # whether the other process maps the memory, so that nothing is copied
        self.size = storage.nbytes()
        self.on_accelerator = storage.device.type != "cpu"
        self.used: list[tuple[int, int]] = []  # the begin and the end, in bytes, of parts that tensors use

    def use(self, tensor: torch.Tensor) -> None:
        """Record the bytes that ``tensor`` uses."""
        if tensor.numel():
            length: int = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
            start = int(tensor.storage_offset()) * tensor.dtype.itemsize
            self.used.append((start, start + length * tensor.dtype.itemsize))

    def parts(self) -> list[tuple[int, int]]:
        """Return the begin and the end of each part to send.

        If tensors use more than half of the storage, the whole storage is the only part. Otherwise the parts are those
        that tensors use, and parts that overlap are joined.
        """
        parts: list[tuple[int, int]] = []
        for start, end in sorted((start - start % _ALIGNMENT, end) for start, end in self.used):
            if parts and start < parts[-1][1]:
                parts[-1] = parts[-1][0], max(end, parts[-1][1])
            else:
                parts.append((start, end))
        return parts if 2 * sum(end - start for start, end in parts) <= self.size else [(0, self.size)]

    def bytes(self, start: int, end: int) -> Any:
        """Return a part of the memory as an object with the buffer interface, which keeps the memory alive.

        Memory of an accelerator is first copied to the CPU. The object is not a memoryview, because Python before 3.13
        crashes when the garbage collector clears a memoryview that a `PickleBuffer` exports.
        """
        if start == end:
            return bytearray()
        storage = self.storage
        if self.on_accelerator:
            part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (end - start,), (1,))
            storage = part.cpu().untyped_storage()
            end -= start
            start = 0
        return memory_of(storage, start, end)


def memory_of(storage: torch.UntypedStorage, start: int = 0, end: int | None = None) -> Any:
    """Return a part of a storage on the CPU as an object with the buffer interface, which keeps the memory alive."""
    array = (ctypes.c_char * ((storage.nbytes() if end is None else end) - start)).from_address(
        storage.data_ptr() + start
    )
    array.storage = storage  # type: ignore[attr-defined]
    return array


def _is_atomic(obj: Any) -> bool:
    """Return whether ``obj`` is a number, a short string or the like, or a short tuple of these."""
    kind = type(obj)
    if kind in _ATOMS:
        return True
    if kind is tuple:
        return len(obj) <= _MAX_ELEMENTS and all(map(_is_atomic, obj))
    if kind is str or kind is bytes:
        return len(obj) < LARGE_BYTES
    return kind is dict and not obj


def module_defining(obj: Any) -> types.ModuleType | None:
    """Return the module in which a look-up of the ``__qualname__`` of ``obj`` gives ``obj``, or None."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    value: Any = module
    for name in (getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or "").split("."):
        value = getattr(value, name, None)
    return module if value is obj else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of storage, dtype, shape, strides and ``requires_grad``, and of nothing else."""
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
    """Rebuild a tensor of a dtype that torch's typed storages do not support, such as float8.

    Unpickling calls this function in the place of torch's function `_rebuild_tensor_v3`.
    """
    tensor = _plain_tensor([(0, storage)], dtype, offset, tuple(size), tuple(stride), requires_grad)
    if metadata:
        set_tensor_metadata(tensor, metadata)
    tensor._backward_hooks = hooks
    return tensor


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _small_storage(buffer: Buffer, on_accelerator: bool) -> Any:
    """Stand for the function that rebuilds a storage from memory in the pickle.

    A pickle contains the name of this placeholder, but the placeholder is never called. When the pickle is read,
    `_Unpickler.find_class` returns another function for this name: a function that also knows the device of the new
    storage.
    """


def _large_storage(number: int, on_accelerator: bool) -> Any:
    """Stand for the function that rebuilds a storage from memory that is sent beside the pickle.

    The placeholder is never called; see `_small_storage`.
    """


def _shared_storage(index: int, size: int) -> Any:
    """Stand for the function that makes a storage from memory that the two processes share.

    The placeholder is never called; see `_small_storage`.
    """


def _last(memory: memoryview, size: int) -> memoryview:
    """Return the last ``size`` bytes. With torch's sharing strategy ``file_system``, a header precedes the storage."""
    return memory[memory.nbytes - size :]


def _rebuild_storage(
    buffers: Iterable[tuple[int, Buffer]], on_accelerator: bool = False, device: torch.device | None = None
) -> _Parts:
    """Make the parts of a storage from buffers, each with the position at which the part begins in the storage.

    A part on the CPU uses the memory of its buffer, without a copy, and keeps the buffer alive. For a part on an
    accelerator, the memory is copied to the accelerator.
    """
    target = device if on_accelerator and device is not None else torch.device("cpu")
    parts: _Parts = []
    for start, buffer in buffers:
        size = memoryview(buffer).nbytes
        memory = (
            torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        parts.append((start, memory.to(target).untyped_storage()))
    return parts


def _part_with(parts: _Parts, offset: int, itemsize: int) -> tuple[torch.UntypedStorage, int]:
    """Return the part of a storage in which a tensor lies, and the tensor's offset in this part, in elements.

    An empty tensor uses no memory, so it may lie in no part. Then the nearest part before its offset is returned, or
    the first part.

    Args:
        parts: the parts of the storage that were sent.
        offset: the offset of the tensor in the whole storage, in elements.
        itemsize: the size of an element, in bytes.
    """
    index = bisect.bisect_right(parts, offset * itemsize, key=operator.itemgetter(0)) - 1
    start, storage = parts[max(index, 0)]
    return storage, max(offset - start // itemsize, 0)


def _only_part(parts: _Parts) -> torch.UntypedStorage:
    """Return a storage that was sent as a whole, and so has a single part."""
    return parts[0][1]


def _code_of_file(
    make: Callable[..., types.CodeType], args: tuple[Any, ...], file_name: str, lines: list[str] | None
) -> types.CodeType:
    """Make a code object when it is unpickled, and set the name of its file, which cloudpickle may omit.

    Args:
        make: makes the code object.
        args: the arguments of ``make``.
        file_name: the name of the file.
        lines: if the file does not exist, the lines of the source, so that tracebacks can show them; otherwise None.
    """
    if lines is not None:
        linecache.cache[file_name] = len("".join(lines)), None, lines, file_name
    return make(*args).replace(co_filename=file_name)


def _lines_of(file_name: str) -> list[str] | None:
    """Return the lines of code that is not in a file, such as code in a notebook cell. For a file return None."""
    entry = linecache.cache.get(file_name, ())
    return entry[2] if len(entry) == 4 and not os.path.exists(file_name) else None


def make_cached(fn: Callable[..., Any], parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return ``fn`` decorated with `functools.lru_cache`, with an empty cache and with these attributes."""
    made: Any = functools.lru_cache(**parameters)(fn)
    made.__dict__.update(attributes)
    return made


# Objects of these types are pickled by name if they can be found in a module by their name (`module_defining`).
_NAMED = {types.FunctionType, functools._lru_cache_wrapper}
_MAX_ELEMENTS = 8  # the length up to which `dump_atoms` pickles a tuple
# The parts of a large storage that only empty tensors use. No memory was sent for this storage, so `loads` takes one
# empty part at the beginning of the storage.
_NONE_USED: list[tuple[int, Buffer]] = [(0, bytearray())]
