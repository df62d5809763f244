"""Messages between the parent and a worker: one packet each, over a Unix socket that keeps their bounds.

A message is a header of a few numbers and a packed object. A small object lies in the packet itself, any other one in a
memory file whose descriptor comes along. So a message is sent whole or not at all, and it fits into the buffer of the
socket: sending it waits for nobody, as a rule.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ...errors import TransferError
from ..pickling import Buffer, Packed, loads
from ..polling import Spin
from .memory_files import Files, FilledFile, join, map_shared, read_file, shared_descriptor, split

# Before the header: is it plain; how many files are given back; how many descriptors come along; how many buffers the
# payload holds, 0 if it is a pickle alone; number and size of the file that holds the payload. After the header: the
# numbers of the files given back, and the payload where there is no file.
_HEAD = "=?HIIQQ"
_NUMBER = struct.Struct("=q")
_SMALL_BYTES = 1 << 16
_PACKET_BYTES = 1 << 17  # at most
_FDS_AT_ONCE = 250  # the kernel takes 253 with one packet
_ONLY_FDS = b" "  # a packet of descriptors that belong to the message after it
_ANCILLARY = socket.CMSG_SPACE(_FDS_AT_ONCE * array.array("i").itemsize)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # an integer, as it takes 0.5 us to combine members of an enum
_AT_ONCE = _CLOEXEC | int(socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_CTRUNC)
ROOM_WITHIN_S = 5.0

Header = Sequence[Any]
Unpack = Callable[[], Any]  # the packed object; raises whatever unpickling raises
Message = tuple[Header, Unpack]


@dataclass(slots=True)
class Received:
    """An object as it has arrived: called, it unpickles that."""

    pickle: bytes | memoryview
    buffers: Sequence[Buffer] | None = None  # None: ``pickle.loads`` does
    device: torch.device | None = None
    shared: Sequence[Buffer] = ()

    def __call__(self) -> Any:
        """The object. Raises whatever unpickling raises."""
        if self.buffers is None:
            return pickle.loads(self.pickle)
        return loads(self.pickle, self.buffers, self.device, self.shared)


class Payload:
    """A packed object as messages carry it: bytes if it is small, else a memory file, or copies to be put into one."""

    def __init__(self, packed: Packed, files: Files) -> None:
        """Copy what is large.

        Raises:
            TransferError: there is no memory file to be had.
        """
        self.shared, self.is_plain = packed.shared, packed.is_plain
        self.inline, self.buffer_count = _small_payload(packed)
        self._file: FilledFile | None = None
        self._copies: list[memoryview] = []
        if self.inline is None:
            buffers = _buffers(packed)
            self.buffer_count, self._file = len(buffers), _filled(files.fill, buffers)
            if self._file is None:  # too many are in use: one is filled when this is sent
                self._copies = [memoryview(bytes(buffer)) for buffer in buffers]

    def packed(self) -> Packed:
        """What it was made of."""
        if self.inline is None:
            pickled, *buffers = self._file.buffers() if self._file is not None else self._copies
        elif self.buffer_count:
            pickled, *buffers = split(memoryview(self.inline), self.buffer_count)
        else:
            pickled, buffers = memoryview(self.inline), []
        return Packed(bytes(pickled), buffers, self.shared, self.is_plain)

    def file(self) -> FilledFile | None:
        """The memory file; None if the object is small. Raises as the constructor."""
        return self._file or (_filled(FilledFile.once, self._copies) if self._copies else None)


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket, sends: str, receives: str) -> None:
        """``sends`` and ``receives`` are the formats of the headers, as for `struct`."""
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PACKET_BYTES)  # a larger packet is refused
        self.device: torch.device | None = None  # where accelerator tensors of what arrives land; None: on the CPU
        self._sends, self._receives = struct.Struct(_HEAD + sends), struct.Struct(_HEAD + receives)
        self._lent: dict[int, FilledFile] = {}  # what the other side may have a map of
        self._returned = deque[int]()  # what this side has let go of, and the other has not heard of
        self._packet = memoryview(mmap.mmap(-1, _PACKET_BYTES, mmap.MAP_PRIVATE))  # takes memory as it is used
        self._fds = list[int]()  # of the message that arrives; some come before it
        self._has_all_fds = True  # fewer arrive where this process may not open more
        self.has_strays = False  # descriptors were sent, and their message could not be
        self.spins = False  # before it waits for a message
        self._spin = Spin()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, header: Header, payload: Payload) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone.
            TransferError: there is no room for its descriptors, or no memory file; others can be sent.
        """
        if payload.inline is not None and not payload.shared and not self._returned:
            head = self._sends.pack(payload.is_plain, 0, 0, payload.buffer_count, 0, 0, *header)
            self.sock.send(head + payload.inline)
            return
        file, number, size = payload.file(), 0, 0
        opened: list[int] = []
        fds = [shared_descriptor(storage, opened) for storage in payload.shared]
        if file is not None:
            number, size = file.number, file.size
            fds.append(file.fd)
            if number:
                self._lent[number] = file
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        head = self._sends.pack(payload.is_plain, len(returned), len(fds), payload.buffer_count, number, size, *header)
        packet = b"".join((head, *map(_NUMBER.pack, returned), payload.inline or b""))
        try:
            while len(fds) > _FDS_AT_ONCE:
                send_fds(self.sock, _ONLY_FDS, fds[:_FDS_AT_ONCE])
                self.has_strays = True
                del fds[:_FDS_AT_ONCE]
            send_fds(self.sock, packet, fds)
            self.has_strays = False
        except BaseException:
            self._lent.pop(number, None)
            self._returned.extend(returned)
            raise
        finally:
            for fd in opened:
                os.close(fd)

    def receive(self, *, wait: bool = True) -> Message | None:
        """The next message; None if there is none yet and this need not ``wait`` for it.

        Raises:
            EOFError: the other side has closed.
            ConnectionResetError: the other side has closed, and had not read what it was sent last.
        """
        head, packet = self._receives, self._packet
        while True:
            try:
                size, fds, is_whole = receive_fds(self.sock, packet, _CLOEXEC if wait else _AT_ONCE)
            except BlockingIOError:
                return None
            if not size:
                raise EOFError
            self._fds += fds
            self._has_all_fds &= is_whole
            if size >= head.size:
                break
        fds, is_whole, self._fds, self._has_all_fds = self._fds, self._has_all_fds, [], True
        is_plain, returns, fd_count, buffer_count, number, file_size, *header = head.unpack_from(packet)
        start = head.size
        if returns:
            start += returns * _NUMBER.size
            self._take_back(packet[head.size : start])
        inline = packet[start:size]
        if is_plain and not (fds or fd_count):
            return header, Received(bytes(inline))
        payload, shared = None, list[memoryview]()
        if fd_count or fds:
            try:
                payload, shared = self._map(deque(fds), is_whole, fd_count, number, file_size)
            except OSError as error:
                if error.errno is None:  # of a signal's handler
                    raise
                return header, functools.partial(_raise, *error.args)
        if not buffer_count:
            return header, Received(bytes(inline), [], self.device, shared)
        pickled, *buffers = split(payload or memoryview(bytearray(inline)), buffer_count)
        return header, Received(pickled, buffers, self.device, shared)

    def messages(self) -> Iterator[Message]:
        """The messages that arrive, one after another, until the other side closes."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                yield self.receive()  # type: ignore[misc]  # it waits; and through no variable, which would keep memory
                if self.spins:
                    self._spin.until(self.has_more)

    def has_more(self) -> bool:
        """Whether there is something to read, be it the end."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """The other side is gone, and its maps with it."""
        self._lent.clear()
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def _take_back(self, numbers: memoryview) -> None:
        """The other side has let go of these files; a negative number says that a fork of it may still have the map."""
        for (number,) in _NUMBER.iter_unpack(numbers):
            filled = self._lent.pop(abs(number), None)
            if filled is not None and number < 0:
                filled.spoil()

    def _map(
        self, fds: deque[int], is_whole: bool, count: int, number: int, size: int
    ) -> tuple[memoryview | None, list[memoryview]]:
        """The payload in the memory file, if one came, and the memory that is shared; closes ``fds``."""
        try:
            while len(fds) > count:  # of a message that was not sent after them
                os.close(fds.popleft())
            if not is_whole and count:
                if number:
                    self._returned.append(number)
                raise OSError(errno.EMFILE, "no free file descriptor for what came with the message")
            payload = read_file(fds.pop(), number, size, self._returned) if size else None
            return payload, [map_shared(fds.popleft()) for _ in range(len(fds))]
        finally:
            for fd in fds:
                os.close(fd)


def send_fds(sock: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Send a packet with descriptors; if the kernel takes no more of these, wait a while for others to receive theirs.

    Raises:
        OSError: the other side is gone.
        TransferError: there was no room in time.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    deadline = time.monotonic() + ROOM_WITHIN_S
    while True:
        try:
            sock.sendmsg([message], ancillary)
        except OSError as error:
            # Of descriptors that nobody has received yet all of a user's processes together may have as many as one
            # may have open.
            if error.errno != errno.ETOOMANYREFS:
                raise
            if time.monotonic() > deadline:
                told = f"for {ROOM_WITHIN_S:g} s too many have been on their way to processes that do not receive them"
                raise TransferError(f"No room for the descriptors of shared tensors: {told} ({error}).") from error
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
    return size, fds, not received & _TRUNCATED


def _buffers(packed: Packed) -> list[memoryview]:
    return [memoryview(packed.pickle), *packed.buffers]


def _small_payload(packed: Packed) -> tuple[bytes | bytearray | None, int]:
    """What a packet holds of the object, or None if that is not small; and how many buffers it is made of."""
    if not packed.buffers:
        return packed.pickle if len(packed.pickle) <= _SMALL_BYTES else None, 0
    buffers = _buffers(packed)
    return join(buffers, _SMALL_BYTES), len(buffers)


def _filled(
    fill: Callable[[Sequence[memoryview]], FilledFile | None], buffers: Sequence[memoryview]
) -> FilledFile | None:
    try:
        return fill(buffers)
    except OSError as error:
        why = str(error)  # and no more of it: its traceback would keep the file
    raise TransferError(f"There is no memory file to be had for what is large: {why}.")


def _raise(*args: Any) -> NoReturn:
    raise OSError(*args)  # a new one each time: with its traceback it would refer to whoever catches it
