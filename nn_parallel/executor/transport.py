"""Messages between the parent and a worker: a header of a few numbers and a packed object, over a Unix socket.

What is large goes through a memory file, whose descriptor comes along: so a message fits into the buffer of the socket,
and sending it waits for nobody, as a rule. Only where there is no memory file to be had does everything go through the
socket; and only so many descriptors may be on their way.

Descriptors have a socket of their own, where they are before their message is: with room for some, each message would
take half as long again to receive.
"""

from __future__ import annotations

import array
import errno
import functools
import itertools
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from ..errors import TransferError
from ..pickling import Packed, loads
from ..polling import Spin
from .segments import Segment, Segments, Span, map_privately, map_shared

_HEAD = "=??IQ"  # is it plain, is the pickle the first buffer; the sizes of pickle and rest; then comes the header
_COUNTS = struct.Struct("=IIIQQ")  # what the rest begins with: how many segments let go of, spans, strays, fds; segment
_NUMBER = struct.Struct("=q")
_SPAN = struct.Struct("=QQ")
_LARGE_PICKLE_BYTES = 1 << 16
_READ_BYTES = 1 << 18  # as much as the socket holds
_FDS_AT_ONCE = 250  # the kernel takes 253 with one message
_ANCILLARY = socket.CMSG_SPACE(_FDS_AT_ONCE * array.array("i").itemsize)
ROOM_WITHIN_S = 5.0
# Of descriptors that nobody has received yet all of a user's processes together may have as many as one may have open,
# and as many messages with some as the buffer of the socket holds.
_NO_ROOM = errno.ETOOMANYREFS, errno.EAGAIN

Header = Sequence[Any]
Unpack = Callable[[], Any]  # the packed object; raises whatever unpickling raises
Message = tuple[Header, Unpack]


class Parcel:
    """A packed object on its way: what is large lies in a segment, or, where there is none to be had, in copies."""

    segment: Segment | None = None
    spans: Sequence[Span] = ()
    copies: Sequence[bytes] = ()
    is_pickle_in_segment = False
    kept: tuple[Header | None, bytes] = None, b""  # of the last message that it was, if it is small: header, and all

    def __init__(self, packed: Packed, segments: Segments) -> None:
        self.pickle, buffers, self.shared, self.is_plain = packed
        if len(self.pickle) > _LARGE_PICKLE_BYTES:
            self.is_pickle_in_segment, buffers, self.pickle = True, [memoryview(self.pickle), *buffers], b""
        self.is_small = not buffers and not self.shared  # the pickle is all of it: no segment, no descriptors
        if buffers:
            self.segment = segments.fill(buffers)
            if self.segment is not None:
                self.spans = self.segment.spans
            else:
                self.copies = [bytes(buffer) for buffer in buffers]
                self.spans = [Span(0, len(copy)) for copy in self.copies]

    def holds(self, packed: Packed) -> bool:
        """Whether it would be the same if it were made of ``packed``."""
        buffers = list(packed.buffers)
        if self.is_pickle_in_segment:
            buffers.insert(0, memoryview(packed.pickle))
        elif packed.pickle != self.pickle:
            return False
        held: Sequence[bytes | memoryview] = self.segment.views() if self.segment is not None else self.copies
        if [storage._cdata for storage in packed.shared] != [storage._cdata for storage in self.shared]:
            return False
        return len(held) == len(buffers) and all(map(_is_equal, held, buffers))

    @property
    def fds(self) -> list[int]:
        """Those of the segment and of the shared memory."""
        fds = [self.segment.fd] if self.segment else []
        return fds + [storage._share_fd_cpu_()[0] for storage in self.shared]


class Link:
    """One end of a connection."""

    def __init__(self, sock: socket.socket, descriptors: socket.socket, sends: str, receives: str) -> None:
        """``sends`` and ``receives`` are the formats of the headers, as for `struct`."""
        self.sock, self._descriptors = sock, descriptors
        self.device: torch.device | None = None  # where accelerator tensors of what arrives land; None: on the CPU
        self._sends, self._receives = struct.Struct(_HEAD + sends), struct.Struct(_HEAD + receives)
        self._lent: dict[int, Segment] = {}  # what the other side may have a map of
        self._is_sending_fds = False
        self._strays = 0  # how many times descriptors were sent for a message that was not
        self._returned = deque[int]()  # what this side has let go of, and the other has not heard of
        self._chunk = memoryview(mmap.mmap(-1, _READ_BYTES, mmap.MAP_PRIVATE))  # takes memory as it is used
        self._data = bytearray()  # what has been read and not used yet
        self.spins = False  # before it waits for a message
        self._spin = Spin()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, header: Header, parcel: Parcel) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone.
            TransferError: there is no room for its descriptors; others can be sent.
        """
        if parcel.is_small and not self._returned:
            kept_for, message = parcel.kept
            if kept_for is not header:  # else the receiver before got the same
                head = self._sends.pack(parcel.is_plain, False, len(parcel.pickle), 0, *header)
                parcel.kept = header, message = header, head + parcel.pickle
            self.sock.sendall(message)
            return
        fds, strays, which = parcel.fds, 0, 0
        if fds:
            self._is_sending_fds, strays = True, self._strays
            for first in range(0, len(fds), _FDS_AT_ONCE):
                send_fds(self._descriptors, b" ", fds[first : first + _FDS_AT_ONCE], socket.MSG_DONTWAIT)
                self._strays += 1
            self._is_sending_fds, self._strays = False, 0
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if parcel.segment is not None:
            which = parcel.segment.number
            self._lent[which] = parcel.segment
        counts = _COUNTS.pack(len(returned), len(parcel.spans), strays, len(fds), which)
        rest = b"".join((counts, *map(_NUMBER.pack, returned), *(_SPAN.pack(*span) for span in parcel.spans)))
        size = len(rest) + sum(map(len, parcel.copies))
        head = self._sends.pack(parcel.is_plain, parcel.is_pickle_in_segment, len(parcel.pickle), size, *header)
        self.sock.sendall(head + parcel.pickle + rest)
        for copy in parcel.copies:
            self.sock.sendall(copy)

    def receive(self, flags: int = 0) -> Iterable[Message] | None:
        """Read once: the messages that are complete now, if any; None when the other side has closed."""
        chunk, head = self._chunk, self._receives
        try:
            count = self.sock.recv_into(chunk, _READ_BYTES, flags)
        except BlockingIOError:
            return ()
        except ConnectionError:
            return None
        if count >= head.size and not self._data:
            is_plain, _, pickle_size, rest_size, *header = head.unpack_from(chunk)
            end = head.size + pickle_size
            if end == count and is_plain and not rest_size:  # as a rule: one message, all of it
                return ((header, functools.partial(pickle.loads, bytes(chunk[head.size : end]))),)
        self._data += chunk[:count]
        return self._taken_apart() if count else None

    def messages(self) -> Iterator[Message]:
        """The messages that arrive, one after another, until the other side closes."""
        while (arrived := self.receive()) is not None:
            yield from arrived  # through no variable, which would keep their memory
            if self.spins:
                self._spin.until(self.has_more)

    def is_stuck(self) -> bool:
        """Whether the thread that is sending may be waiting for the other side."""
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        return self._is_sending_fds or not poll.poll(0)

    def has_more(self) -> bool:
        """Whether there is something to read, be it the end."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """The other side is gone, and its maps with it."""
        self._lent.clear()
        self.sock.close()
        self._descriptors.close()

    def _taken_apart(self) -> Iterator[Message]:
        """The messages that are complete in what was read."""
        data, head = self._data, self._receives
        while len(data) >= head.size:
            is_plain, is_pickle_in_rest, pickle_size, rest_size, *header = head.unpack_from(data)
            end = head.size + pickle_size
            if len(data) < end + rest_size:
                return
            pickled = data[head.size : end]
            yield header, self._unpacks(pickled, _taken(data, end, end + rest_size), is_plain, is_pickle_in_rest)

    def _unpacks(self, pickled: bytearray, rest: bytearray, is_plain: bool, is_pickle_in_rest: bool) -> Unpack:
        """What unpacks a message of which more may have come than its pickle."""
        if is_plain and not rest:
            return functools.partial(pickle.loads, pickled)
        if not rest:
            return functools.partial(loads, pickled, (), self.device)
        returns, count, strays, fds, segment = _COUNTS.unpack_from(rest)
        first_span = _COUNTS.size + returns * _NUMBER.size
        end = first_span + count * _SPAN.size
        parts = memoryview(rest)
        for (number,) in _NUMBER.iter_unpack(parts[_COUNTS.size : first_span]):
            returned = self._lent.pop(abs(number), None)
            if returned is not None and number < 0:
                returned.spoil()
        spans = [Span(*span) for span in _SPAN.iter_unpack(parts[first_span:end])]
        buffers: list[memoryview] = []
        shared: list[memoryview] = []
        if not segment:
            starts = itertools.accumulate((span.size for span in spans), initial=end)
            buffers = [parts[start : start + span.size] for start, span in zip(starts, spans, strict=False)]
        if fds:
            try:
                self._drop(strays)
                mapped, shared = self._map(segment, spans, fds)
                buffers += mapped
            except OSError as error:  # this process has no descriptor or memory left
                return functools.partial(_raise, error)
        return functools.partial(loads, buffers.pop(0) if is_pickle_in_rest else pickled, buffers, self.device, shared)

    def _drop(self, strays: int) -> None:
        for _ in range(strays):
            for fd in receive_fds(self._descriptors, 1)[1]:
                os.close(fd)

    def _map(self, number: int, spans: Sequence[Span], count: int) -> tuple[list[memoryview], list[memoryview]]:
        """The buffers in segment ``number``, if any, and what is shared: mapped by ``count`` descriptors."""
        fds = deque[int]()
        try:
            for _ in range(0, count, _FDS_AT_ONCE):
                fds += receive_fds(self._descriptors, 1)[1]
            if len(fds) < count:
                if number:
                    self._returned.append(number)
                raise OSError(errno.EMFILE, "no free file descriptor for what came with the message")
            buffers = map_privately(fds.popleft(), spans, self._returned, number) if number else []
            return buffers, [map_shared(fds.popleft()) for _ in range(len(fds))]
        finally:
            for fd in fds:
                os.close(fd)


def send_fds(sock: socket.socket, message: bytes, fds: list[int], flags: int = 0) -> None:
    """Send a few bytes with descriptors; if the kernel takes no more, wait for a while for others to receive theirs.

    Raises:
        OSError: the other side is gone.
        TransferError: there was no room in time.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]  # `socket.send_fds` ignores flags
    deadline = time.monotonic() + ROOM_WITHIN_S
    while True:
        try:
            sock.sendmsg([message], ancillary, flags)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if time.monotonic() > deadline:
                told = f"for {ROOM_WITHIN_S:g} s too many have been on their way to processes that do not receive them"
                raise TransferError(f"No room for the descriptors of shared tensors: {told} ({error}).") from error
            time.sleep(0.001)  # nobody tells when there is room
        else:
            return


def receive_fds(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Up to ``size`` bytes and what came with them: fewer descriptors than were sent if this process may not open more.

    No child inherits them, while what `socket.recv_fds` returns is inherited by whatever a worker starts.
    """
    message, ancillary, _, _ = sock.recvmsg(size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    return message, [fd for _, _, fds in ancillary for fd in array.array("i", fds)]


def _is_equal(held: bytes | memoryview, buffer: memoryview) -> bool:
    held = memoryview(held)
    if held.readonly or buffer.readonly or not held.nbytes:
        return held == buffer
    here, there = (torch.frombuffer(each, dtype=torch.uint8) for each in (held, buffer))
    return torch.equal(here, there)  # in a tenth of the time


def _raise(error: OSError) -> NoReturn:
    raise error


def _taken(data: bytearray, start: int, end: int) -> bytearray:
    """What ``data`` holds from ``start`` to ``end``; all up to there is used."""
    taken = data[start:end]
    del data[:end]
    return taken
