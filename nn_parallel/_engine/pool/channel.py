"""Messages between the pool and a worker, over a Unix socket that keeps their bounds.

A message is a header, a tuple of its kind, and the payload: an object as a pickle and buffers. What is small lies in
the packet itself; anything else in a memory file whose descriptor comes along. So a message fits into the buffer of
the socket.
"""

from __future__ import annotations

import array
import errno
import mmap
import os
import pickle
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...errors import TransferError
from ..pickling import Buffer, Packed, loads
from ..polling import Spin
from .memory_files import Descriptor, fill, map_private, map_shared, shared_descriptor

ROOM_WITHIN_S = 5.0
SMALL_BYTES = 1 << 16  # of the payload in a packet
FILES_AT_ONCE = 64  # that wait to be sent: descriptors are scarce
_PACKET_BYTES = 1 << 17  # at most
_FDS_AT_ONCE = 250  # the kernel takes 253 with one packet
_ANCILLARY = socket.CMSG_SPACE(_FDS_AT_ONCE * array.array("i").itemsize)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class Payload:
    """A packed object as messages carry it. What is large is copied, since its owner may change it."""

    def __init__(self, packed: Packed) -> None:
        """Copy what is large.

        Raises:
            TransferError: there is no memory file to be had.
        """
        buffers = [memoryview(packed.pickle), *packed.buffers]
        self.sizes = [buffer.nbytes for buffer in buffers]
        self.shared = packed.shared
        self.inline: list[bytes] = []
        self._file: Descriptor | None = None
        self._copies: list[memoryview] = []
        if sum(self.sizes) <= SMALL_BYTES:
            self.inline = [bytes(buffer) for buffer in buffers]
        elif len(_files) < FILES_AT_ONCE:
            self._file = _filled(buffers)
            _files.add(self._file)
        else:
            self._copies = [memoryview(bytes(buffer)) for buffer in buffers]

    def file(self) -> Descriptor | None:
        """Return the memory file, or None if the object is small. Raises as the constructor."""
        return _filled(self._copies) if self._copies else self._file


@dataclass(slots=True)
class Received:
    """The payload of a message as it has arrived."""

    pickle: Buffer | bytes
    buffers: Sequence[Buffer] = ()
    shared: Sequence[Buffer] = ()
    error: OSError | None = None  # why it could not be received

    def load(self, device: torch.device | None = None) -> Any:
        """Unpickle the object; accelerator tensors land on ``device``. Raises whatever unpickling raises."""
        if self.error is not None:
            raise OSError(*self.error.args)  # a new one: with its traceback it would refer to whoever catches it
        return loads(self.pickle, self.buffers, device, self.shared)


class _Packet(NamedTuple):
    data: bytes
    fds: Sequence[int] = ()
    owners: Sequence[object] = ()  # of the descriptors, which stay open until the packet is sent


@dataclass
class Channel:
    """One end of a connection."""

    sock: socket.socket
    _outbox: deque[_Packet] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PACKET_BYTES)  # a larger packet is refused
        self._packet = memoryview(mmap.mmap(-1, _PACKET_BYTES, mmap.MAP_PRIVATE))  # takes memory as it is used
        self._fds: list[int] = []  # of the message that arrives; some come before it
        self._has_all_fds = True  # fewer arrive where this process may not open more
        self._spin = Spin()
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)

    def enqueue(self, header: Any, payload: Payload | None = None) -> None:
        """Have a message sent by `flush`.

        Raises:
            TransferError: there is no memory file, or no descriptor, to be had.
        """
        self._outbox += _packets(header, payload)

    def flush(self) -> bool:
        """Send what is enqueued, as far as there is room without waiting; return whether that was all.

        Raises:
            OSError: the other side is gone, or the kernel takes no more descriptors (ETOOMANYREFS).
        """
        while self._outbox:
            packet = self._outbox[0]
            try:
                if packet.fds:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", packet.fds))]
                    self.sock.sendmsg([packet.data], ancillary, socket.MSG_DONTWAIT)
                else:
                    self.sock.send(packet.data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._outbox.popleft()
        return True

    def send(self, header: Any, payload: Payload | None = None) -> None:
        """Send a message; wait for room if there is none.

        Raises:
            OSError: the other side is gone.
            TransferError: it could not be sent in time; others can.
        """
        self.enqueue(header, payload)
        deadline = time.monotonic() + ROOM_WITHIN_S
        while True:
            try:
                if self.flush():
                    return
                select.select([], [self.sock], [])
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                if time.monotonic() > deadline:
                    self._outbox.clear()
                    raise no_room(error) from error
                time.sleep(0.001)  # nobody tells when there is room

    def receive(self, *, wait: bool = True) -> tuple[Any, Received] | None:
        """Return the next message; None if there is none yet and this need not ``wait`` for it.

        Raises:
            EOFError: the other side has closed.
            ConnectionResetError: the other side has closed, and had not read what it was sent last.
        """
        flags = _CLOEXEC if wait else _CLOEXEC | socket.MSG_DONTWAIT
        while True:
            try:
                size, fds, is_whole = receive_fds(self.sock, self._packet, flags)
            except BlockingIOError:
                return None
            if not size:
                raise EOFError
            self._fds += fds
            self._has_all_fds &= is_whole
            if size == len(_ONLY_FDS):
                continue
            header, sizes, descriptor_count, inline = pickle.loads(self._packet[:size])
            if not (self._fds or descriptor_count):
                return header, Received(inline[0] if inline else b"", list(map(bytearray, inline[1:])))
            fds = self._fds
            is_whole = self._has_all_fds
            self._fds = []
            self._has_all_fds = True
            return header, _mapped(fds, is_whole, descriptor_count, sizes, inline)

    def wait_for_more(self) -> None:
        """Look for a message for a moment, which is sooner than to be put to sleep and woken."""
        self._spin.until(self.has_more)

    def has_more(self) -> bool:
        """Return whether there is something to read, be it the end."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close this end."""
        self._outbox.clear()
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())


def send_fds(sock: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Send a packet with descriptors; if the kernel takes no more of these, wait until others have received theirs.

    Raises:
        OSError: the other side is gone.
        TransferError: there was no room in time.
    """
    deadline = time.monotonic() + ROOM_WITHIN_S
    while True:
        try:
            sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            if time.monotonic() > deadline:
                raise no_room(error) from error
            time.sleep(0.001)  # nobody tells when there is room
        else:
            return


def receive_fds(
    sock: socket.socket, packet: bytearray | memoryview, flags: int = _CLOEXEC
) -> tuple[int, list[int], bool]:
    """Receive into ``packet``: its size, its descriptors, and whether this process could open as many as were sent.

    No child inherits them, while those of `socket.recv_fds` are inherited by whatever a worker starts.
    """
    size, ancillary, received, _ = sock.recvmsg_into([packet], _ANCILLARY, flags)
    fds = [fd for _, _, some in ancillary for fd in array.array("i", some)] if ancillary else []
    return size, fds, not received & socket.MSG_CTRUNC


def no_room(error: OSError) -> TransferError:
    """Return the error of a message whose descriptors the kernel does not take.

    The kernel limits the descriptors in flight per user to RLIMIT_NOFILE, and then fails with ETOOMANYREFS (unix(7)).
    """
    why = f"for {ROOM_WITHIN_S:g} s too many have been on their way to processes that do not receive them"
    return TransferError(f"No room for the descriptors of shared tensors: {why} ({error}).")


def _packets(header: Any, payload: Payload | None) -> list[_Packet]:
    if payload is None:
        return [_Packet(pickle.dumps((header, (), 0, ())))]
    fds: list[int] = []
    owners: list[object] = [payload]
    try:
        for storage in payload.shared:
            fd, owner = shared_descriptor(storage)
            fds.append(fd)
            owners.append(owner)
        if (file := payload.file()) is not None:
            fds.append(file.fd)
            owners.append(file)
    except OSError as error:
        raise TransferError(f"Cannot open shared memory: {error}. Raise `ulimit -n`.") from error
    sizes = payload.sizes if file is not None else ()
    packets = []
    rest = fds[:]
    while len(rest) > _FDS_AT_ONCE:
        packets.append(_Packet(_ONLY_FDS, rest[:_FDS_AT_ONCE], owners))
        del rest[:_FDS_AT_ONCE]
    data = pickle.dumps((header, sizes, len(fds), payload.inline))
    return [*packets, _Packet(data, rest, owners)]


def _mapped(fds: list[int], is_whole: bool, count: int, sizes: Sequence[int], inline: Sequence[bytes]) -> Received:
    """Map the memory that came with a message. Descriptors before the last ``count`` belong to an unsent message."""
    owned = [Descriptor(fd) for fd in fds]
    del owned[: max(0, len(fds) - count)]
    if count and not (is_whole and len(owned) == count):
        return Received(b"", error=OSError(errno.EMFILE, "no free file descriptor for what came with the message"))
    try:
        if sizes:
            file = owned.pop()
            first, *buffers = map_private(file.fd, sizes)
        else:
            first = memoryview(inline[0])
            buffers = [memoryview(bytearray(buffer)) for buffer in inline[1:]]
        return Received(first, buffers, [map_shared(descriptor.fd) for descriptor in owned])
    except OSError as error:
        return Received(b"", error=OSError(*error.args))


def _filled(buffers: Sequence[memoryview]) -> Descriptor:
    try:
        return fill(buffers)
    except OSError as error:
        why = str(error)  # and no more of it: its traceback would keep the file
    raise TransferError(f"Cannot allocate shared memory for a large object: {why}.")


_ONLY_FDS = b" "  # a packet of descriptors that belong to the message after it
_files = weakref.WeakSet[Descriptor]()  # filled and waiting to be sent, or kept to be sent again
