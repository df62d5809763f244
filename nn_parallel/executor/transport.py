"""Messages between the parent and a worker: a small header and a packed object, over a Unix socket.

On the wire: the lengths of the header, of the pickle and of each buffer, then these themselves. Buffers are received
into fresh memory, which then is the memory of the tensors.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from ..pickling import Packed

_HEAD = struct.Struct("=IQI")
_SIZE = struct.Struct("=Q")
_JOIN_BELOW_BYTES = 1 << 16

EMPTY = Packed(b"", [])


class Message(NamedTuple):
    header: Any
    pickle: bytearray
    buffers: list[bytearray]


def send(sock: socket.socket, header: Any, packed: Packed = EMPTY) -> None:
    """Send one message; blocks until the other side has taken it."""
    head = pickle.dumps(header, protocol=5)
    sizes = [_SIZE.pack(buffer.nbytes) for buffer in packed.buffers]
    front = b"".join([_HEAD.pack(len(head), len(packed.pickle), len(sizes)), *sizes, head])
    if len(packed.pickle) < _JOIN_BELOW_BYTES:
        sock.sendall(front + packed.pickle)
    else:
        sock.sendall(front)
        sock.sendall(packed.pickle)
    for buffer in packed.buffers:
        sock.sendall(buffer)


def messages(sock: socket.socket, flags: int = 0) -> Iterator[Message | None]:
    """The messages that arrive, until the other side closes.

    With ``socket.MSG_DONTWAIT`` in ``flags`` it yields None whenever a message is not complete yet, so that a reader of
    many sockets waits for none of them.
    """
    while True:
        head = yield from _receive(sock, _HEAD.size, flags)
        if head is None:
            return
        header_size, pickle_size, count = _HEAD.unpack(head)
        parts = []
        sizes = yield from _receive(sock, count * _SIZE.size, flags)
        if sizes is None:
            return
        for size in (header_size, pickle_size, *(size for (size,) in _SIZE.iter_unpack(sizes))):
            part = yield from _receive(sock, size, flags)
            if part is None:
                return
            parts.append(part)
        yield Message(pickle.loads(parts[0]), parts[1], parts[2:])


def _receive(sock: socket.socket, size: int, flags: int) -> Generator[None, None, bytearray | None]:
    """Exactly ``size`` bytes, or None at the end of the connection."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = sock.recv_into(view, 0, flags)
        except BlockingIOError:
            yield None
            continue
        except ConnectionError:
            return None
        if count == 0:
            return None
        view = view[count:]
    return data
