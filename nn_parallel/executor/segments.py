"""Large buffers in memory files: copied once by the sender, mapped by as many receivers as there are.

Each receiver maps the file privately, so that it may write to what it got. Such a map shows what the sender writes
later, in pages that the receiver has not written to itself: so a file is filled again only once nobody holds a map of
it. It is filled again because memory that the kernel has handed out before is several times as fast as fresh memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

FILES_AT_ONCE = 64  # what is sent while so many are in use goes through the socket: descriptors are scarce
IDLE_BYTES = 256 << 20  # of files that wait to be filled again


class Span(NamedTuple):
    """Where in a file a buffer lies."""

    offset: int
    size: int


class _File:
    """A memory file and this process's map of it."""

    def __init__(self, fd: int) -> None:
        """``fd`` is the file's, which is empty; it is closed with this."""
        self.fd = fd
        self.memory = memoryview(b"")

    def reserve(self, size: int) -> memoryview:
        if self.memory.nbytes < size:
            os.ftruncate(self.fd, size)
            self.memory = _map(self.fd, size, mmap.MAP_SHARED)
        return self.memory

    def __del__(self) -> None:
        os.close(self.fd)


class Segment:
    """A file filled with buffers; it is filled anew once the last reference to this is gone."""

    def __init__(self, file: _File, spans: list[Span], give_back: Callable[[_File], None]) -> None:
        self.number, self.fd, self.spans, self._file = next(_numbers), file.fd, spans, file
        self._return = weakref.finalize(self, give_back, file)
        self._return.atexit = False

    def views(self) -> list[memoryview]:
        """What it was filled with."""
        return [self._file.memory[span.offset : span.offset + span.size] for span in self.spans]

    def spoil(self) -> None:
        """Never fill the file again: a map of it may live in a process that nobody hears of."""
        self._return.detach()


class Segments:
    """The files that one process fills for the others of a pool."""

    def __init__(self) -> None:
        self._idle = deque[_File]()  # the least recently used first
        self._idle_bytes = IDLE_BYTES
        self._in_use = weakref.WeakSet[Segment]()

    def fill(self, buffers: Sequence[memoryview]) -> Segment | None:
        """Copy ``buffers`` into a file; None where there is none to be had."""
        if len(self._in_use) >= FILES_AT_ONCE:
            return None
        ends = list(itertools.accumulate(_page_up(buffer.nbytes) for buffer in buffers))
        spans = [Span(end - _page_up(buffer.nbytes), buffer.nbytes) for end, buffer in zip(ends, buffers, strict=True)]
        with contextlib.suppress(OSError):  # no descriptor, or no memory, left
            file = self._take()
            memory = file.reserve(ends[-1])
            for span, buffer in zip(spans, buffers, strict=True):
                _copy(buffer, memory, span)
            segment = Segment(file, spans, self._give_back)
            self._in_use.add(segment)
            return segment
        return None

    def close(self) -> None:
        """Keep no file to be filled again."""
        self._idle_bytes = 0
        self.trim(0)

    def trim(self, idle_bytes: int) -> None:
        """Let go of files that wait to be filled again, the least recently used first, down to so many bytes."""
        with contextlib.suppress(IndexError):  # none left: other threads take some too
            while sum(file.memory.nbytes for file in list(self._idle)) > idle_bytes:
                self._idle.popleft()

    def _take(self) -> _File:
        try:
            return self._idle.pop()
        except IndexError:
            return _File(os.memfd_create("nn_parallel", os.MFD_CLOEXEC))

    def _give_back(self, file: _File) -> None:  # called by the collector, in any thread
        self._idle.append(file)
        self.trim(self._idle_bytes)


def map_privately(fd: int, spans: Sequence[Span], returned: deque[int], number: int) -> list[memoryview]:
    """The buffers in the file ``fd``, which is closed.

    When all of them are gone, ``number`` is put into ``returned``; as a negative number if this process has forked
    meanwhile, so that the child may have the map for longer.
    """
    held = _Held(number, returned)
    _held.add(held)  # before there is a map: a fork in between would not be noticed
    try:
        view = _map(fd, spans[-1].offset + spans[-1].size, mmap.MAP_PRIVATE, held.let_go)
    except OSError:
        held.let_go()
        raise
    finally:
        os.close(fd)
    return [view[span.offset : span.offset + span.size] for span in spans]


def map_shared(fd: int) -> memoryview:
    """All of the file ``fd``, which is closed."""
    try:
        return _map(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
    finally:
        os.close(fd)


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


def _copy(buffer: memoryview, memory: memoryview, span: Span) -> None:
    if buffer.readonly:
        memory[span.offset : span.offset + span.size] = buffer
        return
    target = torch.frombuffer(memory, dtype=torch.uint8, count=span.size, offset=span.offset)
    target.copy_(torch.frombuffer(buffer, dtype=torch.uint8))  # by several threads, and without the interpreter's lock


def _page_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _mark_forked() -> None:
    for held in list(_held):
        held.number = -abs(held.number)


_numbers = itertools.count(1)
_held = set[_Held]()
os.register_at_fork(after_in_parent=_mark_forked)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
