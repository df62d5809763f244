"""Messages between the pool and a worker, over a Unix socket of packets (``SOCK_SEQPACKET``).

A message consists of a header, which is one of the named tuples in `messages`, and of a payload, which is a packed
object: a pickle and buffers. A small payload is part of the packet. A large one is copied into a memory file, and the
packet carries the descriptor of the file. So every packet fits into the buffer of the socket, and the sender need not
wait until a large message has been read.

Descriptors cause three problems:

- A packet can carry at most 253 of them. If a message has more, packets with only descriptors are sent before it.
- They are scarce, because the kernel limits the open files of a process. So at most `MAX_PAYLOAD_FILES`
  payloads have a memory file. Further large payloads wait as copies in memory, and are copied into a file when their
  message is put into the outbox.
- The kernel also limits the descriptors that were sent and not received yet, for all processes of the user together.
  At this limit it refuses to send more (ETOOMANYREFS). So the sender tries again, and gives up after `ROOM_WITHIN_S`.
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

ROOM_WITHIN_S = 5.0  # how long to try again to send descriptors that the kernel has refused
SMALL_BYTES = 1 << 16  # the largest payload that is part of a packet
MAX_PAYLOAD_FILES = 64  # the maximum number of payloads that have a memory file at the same time
_PACKET_BYTES = 1 << 17  # the largest packet
_FDS_AT_ONCE = 250  # the maximum number of descriptors in one packet; the kernel accepts 253
_ANCILLARY = socket.CMSG_SPACE(_FDS_AT_ONCE * array.array("i").itemsize)  # the buffer size for received descriptors
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class Payload:
    """The content of a message: a packed object (a pickle and buffers), copied.

    The user may change the object before the message is sent, because the message carries the copy.
    """

    def __init__(self, packed: Packed) -> None:
        """Copy the pickle and the buffers of ``packed`` into this object, or into a memory file if they are large.

        Memory that the script shares with its workers (``packed.shared``) is not copied.

        Raises:
            TransferError: no memory file can be made.
        """
        buffers = [memoryview(packed.pickle), *packed.buffers]
        self.sizes = [buffer.nbytes for buffer in buffers]
        self.shared = packed.shared
        # Only one of these three holds the object: `inline` if the object is small, `_file` if it is large,
        # or `_copies` if it is large and there are too many memory files.
        self.inline: list[bytes] = []
        self._file: Descriptor | None = None
        self._copies: list[memoryview] = []
        if sum(self.sizes) <= SMALL_BYTES:
            self.inline = [bytes(buffer) for buffer in buffers]
        elif len(_payload_files) < MAX_PAYLOAD_FILES:
            self._file = _fill_file(buffers)
            _payload_files.add(self._file)
        else:
            self._copies = [memoryview(bytes(buffer)) for buffer in buffers]

    def open_file(self) -> Descriptor | None:
        """Return the memory file with the object, or None if the object is small.

        A large object that is held as copies in memory is copied into a new file in each call, so once for each worker.
        The file is not kept here, because only a few payloads may have files for a long time (`MAX_PAYLOAD_FILES`).

        Raises:
            TransferError: no memory file can be made.
        """
        return _fill_file(self._copies) if self._copies else self._file


@dataclass(slots=True)
class Received:
    """The payload of a message that has arrived, still pickled."""

    pickle: Buffer | bytes
    buffers: Sequence[Buffer] = ()
    shared: Sequence[Buffer] = ()  # memory that stays shared with the sender
    error: OSError | None = None  # set if the payload could not be received; `load` raises this error

    def load(self, device: torch.device | None = None) -> Any:
        """Unpickle the object, and put tensors of accelerators on ``device``. Any exception of unpickling is raised."""
        if self.error is not None:
            # Raise a copy of the error. If `self.error` itself were raised, its traceback would refer to all frames of
            # the callers, and keep the objects in these frames alive.
            raise OSError(*self.error.args)
        return loads(self.pickle, self.buffers, device, self.shared)


class _Packet(NamedTuple):
    data: bytes
    fds: Sequence[int] = ()
    owners: Sequence[object] = ()  # objects that keep the descriptors open until the packet has been sent


@dataclass
class Channel:
    """One end of the connection between a pool and a worker."""

    sock: socket.socket
    _outbox: deque[_Packet] = field(default_factory=deque)  # the packets that have not been sent yet

    def __post_init__(self) -> None:
        # The kernel refuses a packet that is larger than the buffer of the socket.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PACKET_BYTES)
        # The buffer for received packets. It is a memory map, whose pages take no memory until they are used.
        self._packet = memoryview(mmap.mmap(-1, _PACKET_BYTES, mmap.MAP_PRIVATE))
        self._fds: list[int] = []  # descriptors that have arrived before the message to which they belong
        self._has_all_fds = True  # False if descriptors are missing, because this process has too many open files
        self._spin = Spin()
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)

    def enqueue(self, header: Any, payload: Payload | None = None) -> None:
        """Put a message into the outbox, which `flush` sends.

        Raises:
            TransferError: no memory file can be made, or no descriptor is free.
        """
        self._outbox += _make_packets(header, payload)

    def flush(self) -> bool:
        """Send packets from the outbox until it is empty or the socket is full. Return whether the outbox is empty.

        Raises:
            OSError: the other side has closed its end, or the kernel accepts no more descriptors (ETOOMANYREFS).
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
        """Send a message. If the socket is full, wait.

        Raises:
            OSError: the other side has closed its end.
            TransferError: the kernel has refused the descriptors of this message for too long. Other messages can
                still be sent.
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
                    raise no_room_error(error) from error
                time.sleep(0.001)  # the kernel does not report when it accepts descriptors again

    def receive(self, *, wait: bool = True) -> tuple[Any, Received] | None:
        """Return the next message.

        If no complete message has arrived, wait for one, or return None if ``wait`` is false.

        Raises:
            EOFError: the other side has closed its end.
            ConnectionResetError: the other side has closed its end without reading all messages that this side has
                sent. This is raised once. The next calls return the messages that the other side had sent before.
        """
        flags = _CLOEXEC if wait else _CLOEXEC | socket.MSG_DONTWAIT
        while True:
            try:
                size, fds, has_all_fds = receive_fds(self.sock, self._packet, flags)
            except BlockingIOError:
                return None
            if not size:
                raise EOFError
            self._fds += fds
            self._has_all_fds &= has_all_fds
            if size == len(_ONLY_FDS):
                continue
            header, sizes, descriptor_count, inline = pickle.loads(self._packet[:size])
            if not (self._fds or descriptor_count):
                return header, Received(inline[0] if inline else b"", list(map(bytearray, inline[1:])))
            fds = self._fds
            has_all_fds = self._has_all_fds
            self._fds = []
            self._has_all_fds = True
            return header, _map_payload(fds, has_all_fds, descriptor_count, sizes, inline)

    def wait_for_more(self) -> None:
        """Wait a moment for a message without sleeping, because the next task often comes at once. See `Spin`."""
        self._spin.until(self.has_more)

    def has_more(self) -> bool:
        """Return whether there is something to read: a packet, an error, or the end of the connection."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close this end."""
        self._outbox.clear()
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())


def send_fds(sock: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Send a packet with descriptors. While the kernel refuses descriptors, try again, but for `ROOM_WITHIN_S` at most.

    Raises:
        OSError: the other side has closed its end.
        TransferError: the kernel has refused the descriptors all this time.
    """
    deadline = time.monotonic() + ROOM_WITHIN_S
    while True:
        try:
            sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            if time.monotonic() > deadline:
                raise no_room_error(error) from error
            time.sleep(0.001)  # the kernel does not report when it accepts descriptors again
        else:
            return


def receive_fds(
    sock: socket.socket, packet: bytearray | memoryview, flags: int = _CLOEXEC
) -> tuple[int, list[int], bool]:
    """Receive a packet into the buffer ``packet``.

    `socket.recv_fds` is not used, because it cannot mark the descriptors as close-on-exec. Programs that a worker
    starts would then inherit them.

    Returns:
        The size of the packet; its descriptors; and True, or False if descriptors are missing, because this process has
        too many open files.
    """
    size, ancillary, flags_received, _ = sock.recvmsg_into([packet], _ANCILLARY, flags)
    fds = [fd for _, _, data in ancillary for fd in array.array("i", data)] if ancillary else []
    return size, fds, not flags_received & socket.MSG_CTRUNC


def no_room_error(error: OSError) -> TransferError:
    """Return the error of a message whose descriptors the kernel has refused for too long.

    The kernel limits the descriptors in flight per user to RLIMIT_NOFILE, and then fails with ETOOMANYREFS (unix(7)).
    """
    return TransferError(
        f"No room for the descriptors of shared memory: the kernel has refused them for {ROOM_WITHIN_S:g} s ({error}), "
        "because other processes have not received earlier ones. Raise `ulimit -n`, or send fewer objects at a time."
    )


def _make_packets(header: Any, payload: Payload | None) -> list[_Packet]:
    """Return the packets of a message. If it has many descriptors, the first packets carry only descriptors."""
    if payload is None:
        return [_Packet(pickle.dumps((header, (), 0, ())))]
    fds: list[int] = []
    owners: list[object] = [payload]
    try:
        for storage in payload.shared:
            fd, owner = shared_descriptor(storage)
            fds.append(fd)
            owners.append(owner)
        if (file := payload.open_file()) is not None:
            fds.append(file.fd)  # always the last one; see `_map_payload`
            owners.append(file)
    except OSError as error:
        raise TransferError(f"Cannot open shared memory: {error}. Raise `ulimit -n`.") from error
    sizes = payload.sizes if file is not None else ()
    packets = []
    remaining = fds[:]
    while len(remaining) > _FDS_AT_ONCE:
        packets.append(_Packet(_ONLY_FDS, remaining[:_FDS_AT_ONCE], owners))
        del remaining[:_FDS_AT_ONCE]
    data = pickle.dumps((header, sizes, len(fds), payload.inline))
    return [*packets, _Packet(data, remaining, owners)]


def _map_payload(
    fds: list[int], has_all_fds: bool, count: int, sizes: Sequence[int], inline: Sequence[bytes]
) -> Received:
    """Map the memory of a message that has arrived, and return its payload.

    Args:
        fds: the descriptors that have arrived since the last message. This function closes them. Only the last
            ``count`` belong to this message. The others belong to a message that the sender has given up after a part
            of its descriptors was sent.
        has_all_fds: False if descriptors are missing, because this process has too many open files.
        count: the number of descriptors of the message.
        sizes: the sizes of the pickle and the buffers in the memory file, whose descriptor is the last one; empty if
            the message has no memory file.
        inline: the pickle and the buffers themselves, if the message has no memory file.
    """
    owned = [Descriptor(fd) for fd in fds]
    del owned[: max(0, len(fds) - count)]
    if count and not (has_all_fds and len(owned) == count):
        reason = "no file descriptor is free for the shared memory of a message: raise `ulimit -n`"
        return Received(b"", error=OSError(errno.EMFILE, reason))
    try:
        if sizes:
            file = owned.pop()
            pickled, *buffers = map_private(file.fd, sizes)
        else:
            pickled = memoryview(inline[0])
            buffers = [memoryview(bytearray(buffer)) for buffer in inline[1:]]
        return Received(pickled, buffers, [map_shared(descriptor.fd) for descriptor in owned])
    except OSError as error:
        return Received(b"", error=OSError(*error.args))


def _fill_file(buffers: Sequence[memoryview]) -> Descriptor:
    """Return a memory file with a copy of these buffers."""
    try:
        return fill(buffers)
    except OSError as error:
        reason = str(error)  # only the text, because the traceback of the error would keep the file open
    raise TransferError(
        f"Cannot allocate shared memory for a large object: {reason}. Check the free memory, `ulimit -n`, `ulimit -f`."
    )


# A message with more than `_FDS_AT_ONCE` descriptors is sent as several packets. The packets before the last one carry
# only descriptors, and their data is this one byte. The data of the last packet is always longer, so the receiver
# recognizes the other packets by their size.
_ONLY_FDS = b" "
_payload_files = weakref.WeakSet[Descriptor]()  # the memory files of all payloads of this process
