"""Memory files: anonymous files (memfd) through which large objects reach other processes.

The sender copies the object into a file and sends the descriptor of the file with a message. Each receiver maps the
file privately (``MAP_PRIVATE``). When a receiver writes to the object, other processes do not see the change. So one
copy serves any number of receivers.

The sender uses its files again for later objects. To fill a used file takes a fifth of the time that a new file takes,
because the kernel must clear the memory of a new file. But if the sender overwrote a file that a receiver still maps,
the receiver would see the new content in all pages to which it has not written. So the sender must know that no other
process has the file. Receivers do not report when they close a file, because messages would cost time, and a receiver
may die or fork. Instead, the sender asks the kernel for a write lease (``fcntl(2)``). The kernel grants the lease only
if nothing else has the file open. A file counts as open while a descriptor of it is in flight or a map of it exists.
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

# The maximum size of all files together that this process keeps to fill them again, also those that others still use.
# It is enough for two pickled objects of 64 MiB. A file that is dropped lives on until its last user closes it.
KEPT_BYTES = 132 << 20


class Descriptor:
    """A file descriptor that is closed when this object is deleted."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _ReusableFile:
    """A memory file of the sender. It is filled again once nothing else has it open or mapped.

    The descriptor that `fill` returns also keeps the file open. The payload of a task (`channel.Payload`)
    holds this descriptor, so the file is not filled again before the task has ended.
    """

    def __init__(self, size: int) -> None:
        first = Descriptor(os.memfd_create("nn_parallel", os.MFD_CLOEXEC))
        os.ftruncate(first.fd, size)
        # `is_free` asks the kernel for a lease through `_own`. The kernel grants the lease only if it has counted
        # exactly one use of the file, namely `_own`. The kernel counts a descriptor from `open`, but not the descriptor
        # from `memfd_create`. So the file is opened once more, and `first` is closed.
        self._own = self.open_again(first)
        # If another process opens the file during a lease, the kernel sends a signal to this process. The default,
        # SIGIO, would end this process, but SIGURG is ignored.
        fcntl.fcntl(self._own.fd, fcntl.F_SETSIG, signal.SIGURG)
        self.view = _map(self._own.fd, size, mmap.MAP_SHARED)

    def open_again(self, descriptor: Descriptor | None = None) -> Descriptor:
        """Open the file once more, and return the new descriptor.

        The kernel counts the new descriptor as a separate use of the file, as `is_free` needs. It would not count a
        duplicate from `os.dup`. A memory file has no path of its own, so the path of ``descriptor`` in ``/proc`` is
        opened, or of `_own` if ``descriptor`` is None.
        """
        number = (descriptor or self._own).fd
        return Descriptor(os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_CLOEXEC))

    def is_free(self) -> bool:
        """Return whether the file may be filled again, because nothing else uses it.

        Another process or object uses the file while it has the file open or mapped. A descriptor that is in flight
        (sent, but not received yet) also counts as a use.
        """
        try:
            fcntl.fcntl(self._own.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._own.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True


def fill(buffers: Sequence[Buffer]) -> Descriptor:
    """Copy buffers into a memory file, and return a descriptor of it. Each buffer begins at a multiple of 64 bytes.

    Raises:
        OSError: no descriptor is free, or there is not enough memory.
    """
    parts = [memoryview(buffer).cast("B") for buffer in buffers]
    spans = _spans([part.nbytes for part in parts])
    file = _take_free_file(spans[-1].stop) or _ReusableFile(spans[-1].stop)
    for span, part in zip(spans, parts, strict=True):
        _copy(part, file.view[span])
    descriptor = file.open_again()
    _reusable_files.append(file)
    with contextlib.suppress(IndexError):  # another thread may take the last file meanwhile
        while sum(kept.view.nbytes for kept in list(_reusable_files)) > KEPT_BYTES:
            _reusable_files.popleft()
    return descriptor


def _take_free_file(size: int) -> _ReusableFile | None:
    """Take a free file of this size, or up to twice as large, out of the kept files. Return None if there is none."""
    with contextlib.suppress(IndexError):  # another thread may take the last file meanwhile
        for _ in range(len(_reusable_files)):
            file = _reusable_files.popleft()
            if size <= file.view.nbytes <= 2 * size and file.is_free():
                return file
            _reusable_files.append(file)
    return None


def map_private(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the buffers of a file that `fill` has filled. Writing to them changes them in this process only.

    ``sizes`` are the sizes of the buffers.
    """
    spans = _spans(sizes)
    view = _map(fd, spans[-1].stop, mmap.MAP_PRIVATE)
    return [view[span] for span in spans]


def map_shared(fd: int) -> memoryview:
    """Return the content of a file, as memory that is shared with all processes that map the file."""
    return _map(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)


def shared_descriptor(storage: torch.UntypedStorage) -> tuple[int, Descriptor | None]:
    """Return a descriptor of a storage's shared memory, and a `Descriptor` object that closes it when deleted.

    The object is None if the storage itself closes the descriptor.
    """
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        return int(storage._share_fd_cpu_()[0]), None
    name: bytes = storage._share_filename_cpu_()[1]  # `torch.multiprocessing` uses this function, too
    opened = Descriptor(os.open(f"/dev/shm{name.decode()}", os.O_RDWR | os.O_CLOEXEC))
    return opened.fd, opened


def _spans(sizes: Sequence[int]) -> list[slice]:
    """Return the slices of a memory file in which buffers of these sizes lie."""
    starts = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _copy(part: memoryview, target: memoryview) -> None:
    """Copy the memory of ``part`` to ``target``. If possible, torch copies with several threads, without the GIL."""
    if part.readonly or not part.nbytes:  # `torch.frombuffer` takes neither read-only nor empty memory
        target[:] = part
    else:
        torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))


def _map(fd: int, size: int, kind: int) -> memoryview:
    """Map a file, and return a view of its memory. The map ends when the last view of it is deleted.

    `mmap.mmap` is not used, because it keeps a descriptor of the file open.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    whole = (ctypes.c_char * size).from_address(address)
    weakref.finalize(whole, _libc.munmap, address, size).atexit = False
    return memoryview(whole).cast("B")


_ALIGNMENT = 64  # the alignment of the storages that torch allocates
_reusable_files = deque[_ReusableFile]()  # the files to be filled again, about in the order in which they were filled
os.register_at_fork(after_in_child=_reusable_files.clear)  # otherwise parent and child would fill the same file
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
