"""Large buffers in memory files: copied once by the sender, mapped by as many receivers as there are.

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


class _Memory:
    """The memory of a file, and this process's map of it."""

    def __init__(self, fd: int) -> None:
        """``fd`` is that of the file, which is empty; it is closed with this."""
        self.fd = fd
        self.view = memoryview(b"")

    def reserve(self, size: int) -> memoryview:
        if self.view.nbytes < size:
            os.ftruncate(self.fd, size)
            self.view = _map(self.fd, size, mmap.MAP_SHARED)
        return self.view

    def __del__(self) -> None:
        os.close(self.fd)


def _new_memory() -> _Memory:
    return _Memory(os.memfd_create("nn_parallel", os.MFD_CLOEXEC))


class File:
    """A file filled with buffers, each at the beginning of a page; before them stands a table of their sizes."""

    def __init__(
        self, memory: _Memory, buffers: Sequence[memoryview], give_back: Callable[[_Memory], None] | None = None
    ) -> None:
        """Receivers map the file, and tell by its ``number`` when they have let go of it.

        When the last reference to this is gone, ``give_back`` gets its memory. If None, receivers copy the buffers.
        """
        self.number = next(_numbers) if give_back else 0
        self.fd, self.buffer_count, self._memory = memory.fd, len(buffers), memory
        table = memoryview(array.array("Q", [buffer.nbytes for buffer in buffers]))
        self._spans = _spans(table)
        self.size = self._spans[-1].stop
        view = memory.reserve(self.size)
        for span, buffer in zip(self._spans, [table.cast("B"), *buffers], strict=True):
            _copy(buffer, view[span])
        self._return: weakref.finalize[..., File] | None = None
        if give_back is not None:
            self._return = weakref.finalize(self, give_back, memory)
            self._return.atexit = False

    @classmethod
    def once(cls, buffers: Sequence[memoryview]) -> File:
        """One that is not filled again; raises as `Files.fill`."""
        return cls(_new_memory(), buffers)

    def buffers(self) -> list[memoryview]:
        """What it was filled with."""
        return [self._memory.view[span] for span in self._spans[1:]]

    def spoil(self) -> None:
        """Never fill it again: a map of it may live in a process that nobody hears of."""
        if self._return is not None:
            self._return.detach()


class Files:
    """The files that one process fills for the others of a pool."""

    def __init__(self) -> None:
        self._idle = deque[_Memory]()  # the least recently used first
        self._idle_bytes = IDLE_BYTES
        self._in_use = weakref.WeakSet[File]()

    def fill(self, buffers: Sequence[memoryview]) -> File | None:
        """Copy ``buffers`` into a file; None while too many are in use.

        Raises:
            OSError: there is no descriptor, or no memory, left.
        """
        if len(self._in_use) >= FILES_AT_ONCE:
            return None
        file = File(self._take(), buffers, self._give_back)
        self._in_use.add(file)
        return file

    def close(self) -> None:
        """Keep no file to be filled again."""
        self._idle_bytes = 0
        self.trim(0)

    def trim(self, idle_bytes: int) -> None:
        """Let go of files that wait to be filled again, the least recently used first, down to so many bytes."""
        with contextlib.suppress(IndexError):  # none left: other threads take some too
            while sum(memory.view.nbytes for memory in list(self._idle)) > idle_bytes:
                self._idle.popleft()

    def _take(self) -> _Memory:
        try:
            return self._idle.pop()
        except IndexError:
            return _new_memory()

    def _give_back(self, memory: _Memory) -> None:  # called by the collector, in any thread
        self._idle.append(memory)
        self.trim(self._idle_bytes)


def read_file(fd: int, number: int, buffer_count: int, size: int, returned: deque[int]) -> list[memoryview]:
    """The buffers in the file ``fd``, which is closed: mapped privately, or copied if its ``number`` is 0.

    When all of them are gone, the number is put into ``returned``; as a negative number if this process has forked
    meanwhile, so that the child may have the map for longer.
    """
    try:
        if number:
            held = _Held(number, returned)
            _held.add(held)  # before there is a map: a fork in between would not be noticed
            try:
                view = _map(fd, size, mmap.MAP_PRIVATE, held.let_go)
            except OSError:
                held.let_go()
                raise
        else:
            view = memoryview(bytearray(_map(fd, size, mmap.MAP_SHARED)))
    finally:
        os.close(fd)
    sizes = view[: buffer_count * _SIZE_BYTES].cast("Q")
    return [view[span] for span in _spans(sizes)[1:]]


def map_shared(fd: int) -> memoryview:
    """All of the file ``fd``, which is closed."""
    try:
        return _map(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
    finally:
        os.close(fd)


def _spans(sizes: Sequence[int] | memoryview) -> list[slice]:
    """Where in a file the table of these sizes lies, and then buffers of them."""
    sizes = [len(sizes) * _SIZE_BYTES, *sizes]
    starts = itertools.accumulate(map(_page_up, sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


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

    def let_go(self) -> None:
        _held.discard(self)
        self._returned.append(self.number)


def _copy(buffer: memoryview, target: memoryview) -> None:
    if buffer.readonly or not buffer.nbytes:
        target[:] = buffer
    else:  # by several threads, and without the interpreter's lock
        torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(buffer, dtype=torch.uint8))


def _page_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _mark_forked() -> None:
    for held in list(_held):
        held.number = -abs(held.number)


_SIZE_BYTES = array.array("Q").itemsize
_numbers = itertools.count(1)
_held = set[_Held]()
os.register_at_fork(after_in_parent=_mark_forked)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
