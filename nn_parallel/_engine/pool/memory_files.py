"""Buffers as one payload of bytes, and memory files for large payloads: filled once, mapped by each receiver.

Each receiver maps the file privately, so that it may write to what it got. Such a map shows what the sender writes
later, in pages that the receiver has not written to itself: so a file is filled again only once nobody holds a map of
it. It is filled again because memory that the kernel has handed out before is several times as fast as fresh memory.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

FILES_AT_ONCE = 64  # that one process fills again and again: descriptors are scarce
IDLE_BYTES = 256 << 20  # of files that wait to be filled again


def join(buffers: Sequence[memoryview], at_most: int) -> bytearray | None:
    """A payload: a table of the sizes of ``buffers``, and the buffers, each at the next multiple of 64 bytes in it.

    None if it would have more than ``at_most`` bytes.
    """
    table, spans = _layout(buffers)
    if spans[-1].stop > at_most:
        return None
    payload = bytearray(spans[-1].stop)
    for span, part in zip(spans, [table, *buffers], strict=True):
        payload[span] = part
    return payload


def split(payload: memoryview, count: int) -> list[memoryview]:
    """The ``count`` buffers of a payload."""
    return [payload[span] for span in _spans(payload[: count * _SIZE_BYTES].cast("Q"))[1:]]


class _File:
    """A memory file, and this process's map of it."""

    def __init__(self, fd: int) -> None:
        """``fd`` is that of an empty file; it is closed with this."""
        self.fd = fd
        self.view = memoryview(b"")

    def reserve(self, size: int) -> memoryview:
        """A map of at least so many bytes."""
        if self.view.nbytes < size:
            os.ftruncate(self.fd, size)
            self.view = _map(self.fd, size, mmap.MAP_SHARED)
        return self.view

    def __del__(self) -> None:
        os.close(self.fd)


def _new_file() -> _File:
    return _File(os.memfd_create("nn_parallel", os.MFD_CLOEXEC))


class FilledFile:
    """A memory file that holds a payload."""

    def __init__(
        self, file: _File, buffers: Sequence[memoryview], give_back: Callable[[_File], None] | None = None
    ) -> None:
        """Receivers map the file, and tell by its ``number`` when they have let go of it.

        When the last reference to this is gone, ``give_back`` gets the file. If None, receivers copy the payload.
        """
        self.number = next(_numbers) if give_back else 0
        self.fd, self.buffer_count, self._file = file.fd, len(buffers), file
        table, spans = _layout(buffers)
        self.size = spans[-1].stop
        view = file.reserve(self.size)
        for span, part in zip(spans, [table, *buffers], strict=True):
            _copy(part, view[span])
        self._return: weakref.finalize[..., FilledFile] | None = None
        if give_back is not None:
            self._return = weakref.finalize(self, give_back, file)
            self._return.atexit = False

    @classmethod
    def once(cls, buffers: Sequence[memoryview]) -> FilledFile:
        """Of a file that is not filled again; raises as `Files.fill`."""
        return cls(_new_file(), buffers)

    def buffers(self) -> list[memoryview]:
        return split(self._file.view[: self.size], self.buffer_count)

    def spoil(self) -> None:
        """Never fill it again: a map of it may live in a process that nobody hears of."""
        if self._return is not None:
            self._return.detach()


class Files:
    """The files that one process fills for the others of a pool."""

    def __init__(self) -> None:
        self._idle = deque[_File]()  # the least recently used first
        self._idle_bytes = IDLE_BYTES
        self._in_use = weakref.WeakSet[FilledFile]()

    def fill(self, buffers: Sequence[memoryview]) -> FilledFile | None:
        """Copy ``buffers`` into a file; None while too many are in use.

        Raises:
            OSError: there is no descriptor, or no memory, left.
        """
        if len(self._in_use) >= FILES_AT_ONCE:
            return None
        filled = FilledFile(self._take(), buffers, self._give_back)
        self._in_use.add(filled)
        return filled

    def close(self) -> None:
        """Keep no file to be filled again."""
        self._idle_bytes = 0
        self.trim(0)

    def trim(self, idle_bytes: int) -> None:
        """Let go of files that wait to be filled again, the least recently used first, down to so many bytes."""
        with contextlib.suppress(IndexError):  # none left: other threads take some too
            while sum(file.view.nbytes for file in list(self._idle)) > idle_bytes:
                self._idle.popleft()

    def _take(self) -> _File:
        try:
            return self._idle.pop()
        except IndexError:
            return _new_file()

    def _give_back(self, file: _File) -> None:  # called by the collector, in any thread
        self._idle.append(file)
        self.trim(self._idle_bytes)


def read_file(fd: int, number: int, size: int, returned: deque[int]) -> memoryview:
    """The payload in the file ``fd``, which is closed: mapped privately, or copied if its ``number`` is 0.

    When the last view of it is gone, the number is put into ``returned``; as a negative number if this process has
    forked meanwhile, so that the child may have the map for longer.
    """
    try:
        if number:
            held = _Held(number, returned)
            _held.add(held)  # before there is a map: a fork in between would not be noticed
            try:
                return _map(fd, size, mmap.MAP_PRIVATE, held.release)
            except OSError:
                held.release()
                raise
        return memoryview(bytearray(_map(fd, size, mmap.MAP_SHARED)))
    finally:
        os.close(fd)


def shared_descriptor(storage: torch.UntypedStorage, opened: list[int]) -> int:
    """Return a descriptor of shared memory. It is the storage's, or a new one, which is added to ``opened``."""
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        return int(storage._share_fd_cpu_()[0])
    name: bytes = storage._share_filename_cpu_()[1]  # as `torch.multiprocessing` does
    opened.append(os.open(f"/dev/shm{name.decode()}", os.O_RDWR | os.O_CLOEXEC))
    return opened[-1]


def map_shared(fd: int) -> memoryview:
    """All of the file ``fd``, which is closed."""
    try:
        return _map(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
    finally:
        os.close(fd)


def _layout(buffers: Sequence[memoryview]) -> tuple[memoryview, list[slice]]:
    """The table of a payload, and where in the payload the table and the buffers lie."""
    table = memoryview(array.array("Q", [buffer.nbytes for buffer in buffers]))
    return table.cast("B"), _spans(table)


def _spans(sizes: memoryview) -> list[slice]:
    sizes_of_all = [sizes.nbytes, *sizes]
    starts = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes_of_all), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes_of_all, strict=False)]


def _copy(part: memoryview, target: memoryview) -> None:
    if part.readonly or not part.nbytes:
        target[:] = part
    else:  # by several threads, and without the interpreter's lock
        torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))


def _map(fd: int, size: int, kind: int, when_gone: Callable[[], None] | None = None) -> memoryview:
    """A map that ends with the last view of it. Python's own keep a descriptor each, and there are not so many."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    whole = (ctypes.c_char * size).from_address(address)
    weakref.finalize(whole, _unmap, address, size, when_gone).atexit = False
    return memoryview(whole).cast("B")


def _unmap(address: int, size: int, when_gone: Callable[[], None] | None) -> None:
    _libc.munmap(address, size)
    if when_gone is not None:
        when_gone()


class _Held:
    """A map of a file that another process fills."""

    def __init__(self, number: int, returned: deque[int]) -> None:
        self.number, self._returned = number, returned

    def release(self) -> None:
        _held.discard(self)
        self._returned.append(self.number)


def _mark_forked() -> None:
    for held in list(_held):
        held.number = -abs(held.number)


_SIZE_BYTES, _ALIGNMENT = array.array("Q").itemsize, 64
_numbers = itertools.count(1)
_held = set[_Held]()
os.register_at_fork(after_in_parent=_mark_forked)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
