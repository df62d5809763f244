"""To bytes and back: functions and classes of ``__main__`` by value, tensors by their storage, errors with a path.

One rule serves every tensor: its `torch.UntypedStorage` leaves the pickle as a buffer of its own (pickle protocol 5,
out of band). Views, strides, aliasing, parameters, tied weights, sparse and quantised tensors and every dtype then come
out right by torch's own pickling of the rest.
"""

from __future__ import annotations

import ctypes
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
    with torch.device("cpu"):  # a user's default device must not move the storages
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


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    size = storage.nbytes()
    if size == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * size).from_address(storage.data_ptr())
    array.storage = storage  # type: ignore[attr-defined]  # the address alone would not keep the memory alive
    return memoryview(array).cast("B")


def _adopt(cls: Any) -> Any:
    """Make a class that came by value findable where it says it lives, so that `torch.save` of one works."""
    main = sys.modules["__main__"]
    if cls.__module__ == "__main__" and "." not in cls.__qualname__ and not hasattr(main, cls.__name__):
        setattr(main, cls.__name__, cls)
    return cls


def _find_unpicklable(parts: Mapping[str, Any]) -> tuple[str, Any]:
    """The path to the innermost thing that cannot be pickled, and that thing."""
    path, culprit = next(iter(parts.items()))
    seen: set[int] = set()
    while True:
        for name, part in parts.items():
            if id(part) in seen:
                continue
            try:
                _dumps(part)
            except Exception:
                path, culprit = name, part
                break
        else:
            return path, culprit
        seen.add(id(culprit))
        parts = dict(_parts(culprit, path))


def _parts(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What ``obj`` is made of, as far as pickling it goes, each part with its path."""
    if isinstance(obj, types.MethodType):
        yield f"{name}.__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        try:
            inside = {"closure variable": {k: c.cell_contents for k, c in _closure(obj)}, "global": _globals(obj)}
        except ValueError:  # an empty cell
            return
        for what, variables in inside.items():
            for variable, value in variables.items():
                yield f"{what} {variable!r} of {obj.__qualname__}()", value
        yield from ((f"default {value!r} of {obj.__qualname__}()", value) for value in obj.__defaults__ or ())
    elif isinstance(obj, Mapping):
        yield from ((f"{name}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"{name}[{index}]", value) for index, value in enumerate(obj))
    elif not isinstance(obj, type | types.ModuleType):
        yield from ((f"{name}.{key}", value) for key, value in getattr(obj, "__dict__", {}).items())


def _closure(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)


def _globals(fn: types.FunctionType) -> dict[str, Any]:
    return {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
