"""Memory for what is large: anonymous files that a message carries by their descriptors, and maps of them.

Each receiver maps a file privately, so that it may write to what it got. Such a map shows what the sender writes later,
in pages that the receiver has not written to itself. So the sender fills a file again only when nobody else has it: it
asks the kernel, by a lease. To fill one again takes a fifth of the time, as the kernel clears the memory of a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import signal
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ..pickling import Buffer

KEPT_BYTES = 128 << 20  # of files to be filled again


class Descriptor:
    """A file descriptor that is closed with the last reference to this."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _KeptFile:
    """A memory file that is filled again once nobody else has it, as the kernel has cleared its memory already."""

    def __init__(self, size: int) -> None:
        made = Descriptor(os.memfd_create("nn_parallel", os.MFD_CLOEXEC))
        os.ftruncate(made.fd, size)
        # A lease is refused while others have the file open. The kernel does not count the open of `memfd_create`.
        self._own = self.open_again(made)
        # The kernel signals that somebody opens a leased file. By default it does so by SIGIO, which ends the process.
        fcntl.fcntl(self._own.fd, fcntl.F_SETSIG, signal.SIGURG)
        self.view = _map(self._own.fd, size, mmap.MAP_SHARED)

    def open_again(self, descriptor: Descriptor | None = None) -> Descriptor:
        """Return another descriptor of the file, for a receiver."""
        number = (descriptor or self._own).fd
        return Descriptor(os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_CLOEXEC))

    def is_free(self) -> bool:
        """Return whether nobody else has the file open, on its way or mapped: then the kernel grants a lease."""
        try:
            fcntl.fcntl(self._own.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._own.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True


def fill(buffers: Sequence[Buffer]) -> Descriptor:
    """Copy buffers into a memory file, each at the next multiple of 64 bytes.

    Raises:
        OSError: there is no descriptor, or no memory, left.
    """
    parts = [memoryview(buffer).cast("B") for buffer in buffers]
    spans = _spans([part.nbytes for part in parts])
    file = _take(spans[-1].stop) or _KeptFile(spans[-1].stop)
    for span, part in zip(spans, parts, strict=True):
        _copy(part, file.view[span])
    descriptor = file.open_again()
    _kept.append(file)
    with contextlib.suppress(IndexError):  # another thread has taken the last one
        while sum(kept.view.nbytes for kept in list(_kept)) > KEPT_BYTES:
            _kept.popleft()
    return descriptor


def _take(size: int) -> _KeptFile | None:
    """Take a kept file of about this size out, if one is free."""
    with contextlib.suppress(IndexError):  # another thread has taken the last one
        for _ in range(len(_kept)):
            file = _kept.popleft()
            if size <= file.view.nbytes <= 2 * size and file.is_free():
                return file
            _kept.append(file)
    return None


def map_private(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the buffers of these sizes in a file that `fill` has made: as this process's own, to be written to."""
    spans = _spans(sizes)
    view = _map(fd, spans[-1].stop, mmap.MAP_PRIVATE)
    return [view[span] for span in spans]


def map_shared(fd: int) -> memoryview:
    """Return all of a file, as memory that is shared with whoever else has it."""
    return _map(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)


def shared_descriptor(storage: torch.UntypedStorage) -> tuple[int, Descriptor | None]:
    """Return a descriptor of shared memory, and its owner if it is not the storage itself."""
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        return int(storage._share_fd_cpu_()[0]), None
    name: bytes = storage._share_filename_cpu_()[1]  # as `torch.multiprocessing` does
    opened = Descriptor(os.open(f"/dev/shm{name.decode()}", os.O_RDWR | os.O_CLOEXEC))
    return opened.fd, opened


def _spans(sizes: Sequence[int]) -> list[slice]:
    starts = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _copy(part: memoryview, target: memoryview) -> None:
    if part.readonly or not part.nbytes:
        target[:] = part
    else:  # by several threads, and without the interpreter's lock
        torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))


def _map(fd: int, size: int, kind: int) -> memoryview:
    """Return a map that ends with the last view of it. One of `mmap.mmap` would keep a descriptor open."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    whole = (ctypes.c_char * size).from_address(address)
    weakref.finalize(whole, _libc.munmap, address, size).atexit = False
    return memoryview(whole).cast("B")


_ALIGNMENT = 64  # what torch gives a storage
_kept = deque[_KeptFile]()  # the least recently filled first
os.register_at_fork(after_in_child=_kept.clear)  # or parent and child would fill the same memory
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
