"""To bytes and back: functions and classes of ``__main__`` by value, tensors by their storage, errors with a path.

One rule serves every tensor: its `torch.UntypedStorage` leaves the pickle as a buffer of its own (pickle protocol 5,
out of band). Views, strides, aliasing, parameters, tied weights, sparse and quantised tensors and every dtype then come
out right by torch's own pickling of the rest.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch

from .errors import TransferError, qualified_name

Buffer = bytearray | memoryview | pickle.PickleBuffer


class Packed(NamedTuple):
    """An object as a pickle and the large buffers that left it."""

    pickle: bytes
    buffers: list[memoryview]


def dumps(obj: Any, parts: Mapping[str, Any] | None = None) -> Packed:
    """Pickle ``obj``.

    The buffers are views of the memory of ``obj``: use them before anything writes to it. ``parts`` names what ``obj``
    is made of, for the error; ``{"the object": obj}`` if None.

    Raises:
        TransferError: it cannot be pickled; the message gives the path to the part that cannot.
    """
    try:
        return _dumps(obj)
    except Exception as error:
        path, culprit = _find_unpicklable(parts or {"the object": obj})
        raise TransferError(
            f"{path[0].upper()}{path[1:]} is a {qualified_name(type(culprit))} and cannot be sent to another process: "
            f"{error}"
        ) from error


def loads(packed: bytes | bytearray, buffers: Sequence[Buffer], device: torch.device | None = None) -> Any:
    """Rebuild what `dumps` packed. ``buffers`` must be writable and become the memory of the tensors.

    Accelerator tensors land on ``device``, or on the CPU if that is None. Raises whatever unpickling raises.
    """
    with torch._C.DisableTorchFunction():  # a user's default device must not move what is rebuilt
        return _Unpickler(io.BytesIO(packed), buffers, device).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.storage.TypedStorage:  # what torch's own reduction of a tensor refers to
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is torch.UntypedStorage and obj.device.type != "meta":
            on_accelerator = obj.device.type != "cpu"
            storage = obj.cpu() if on_accelerator else obj
            return _untyped_storage, (pickle.PickleBuffer(_memory_of(storage)), on_accelerator)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[Buffer], device: torch.device | None) -> None:
        super().__init__(file, buffers=buffers)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is _untyped_storage:
            return lambda buffer, on_accelerator: _untyped_storage(buffer, on_accelerator, self._device)
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return _rebuild_tensor_of_any_dtype
        if module == "cloudpickle.cloudpickle" and name == "_make_skeleton_class":
            return lambda *args: _adopt(found(*args))
        return found


def _dumps(obj: Any) -> Packed:
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
    return Packed(file.getvalue(), [buffer.raw() for buffer in buffers])


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _untyped_storage(buffer: Buffer, on_accelerator: bool, device: torch.device | None = None) -> torch.UntypedStorage:
    size = memoryview(buffer).nbytes
    if size == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    return tensor.to(device).untyped_storage() if on_accelerator and device is not None else tensor.untyped_storage()


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
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, tuple(size), tuple(stride))
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    tensor.requires_grad = requires_grad
    tensor._backward_hooks = hooks
    return tensor


def _memory_of(storage: torch.UntypedStorage) -> Any:
    """The bytes of a storage, without a copy: an object with the buffer interface that keeps the storage alive.

    Not a memoryview: when the collector clears one that a `PickleBuffer` exports, Python before 3.13 crashes.
    """
    size = storage.nbytes()
    if size == 0:
        return bytearray()
    array = (ctypes.c_char * size).from_address(storage.data_ptr())
    array.storage = storage  # type: ignore[attr-defined]
    return array


def _adopt(cls: Any) -> Any:
    """Make a class that came by value findable where it says it lives, so that `torch.save` of one works."""
    main = sys.modules["__main__"]
    if cls.__module__ == "__main__" and "." not in cls.__qualname__ and not hasattr(main, cls.__name__):
        setattr(main, cls.__name__, cls)
    return cls


def _find_unpicklable(parts: Mapping[str, Any]) -> tuple[str, Any]:
    """The path to the innermost thing that cannot be pickled, and that thing."""
    return _search(parts, set()) or next(iter(parts.items()))


def _search(parts: Mapping[str, Any], seen: set[int]) -> tuple[str, Any] | None:
    for path, part in parts.items():
        if id(part) in seen:
            continue
        try:
            _dumps(part)
        except Exception:
            seen.add(id(part))
            inner = dict(_parts(part, path))
            found = _search(inner, seen)
            # Where all inner parts that fail lead back to where we came from, this part holds no culprit of its own.
            if found or not any(id(value) in seen for value in inner.values()):
                return found or (path, part)
    return None


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What ``obj`` is made of, as far as pickling it goes, each part with its path."""
    if isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
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
    elif not isinstance(obj, type | types.ModuleType) and not _refuses(obj):
        slots = [name for kind in type(obj).__mro__ for name in _listed(getattr(kind, "__slots__", ()))]
        values = {name: getattr(obj, name) for name in slots if hasattr(obj, name)} | getattr(obj, "__dict__", {})
        yield from ((f"{path}.{name}", value) for name, value in values.items())


def _refuses(obj: Any) -> bool:
    """Whether it is its own ``__reduce__`` that raises, and nothing in it."""
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
    """The names that a function and the functions inside it look up."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))
