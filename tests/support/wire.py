"""A channel of the pool with both ends in one process, and the memory files that this process has open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nn_parallel._engine.pickling import Pickler, dumps
from nn_parallel._engine.pool.channel import Channel, Payload
from nn_parallel._engine.pool.memory_files import Files


class Ends:
    """Both ends of a connection in this process, and the files of the first."""

    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sender, self.receiver = Channel(here, "I", "I"), Channel(there, "I", "I")
        self.files = Files()
        self._arriving, self._returning = self.receiver.messages(), self.sender.messages()

    def send(self, obj: Any) -> Any:
        """``obj`` as the receiver gets it."""
        self.sender.send((7,), Payload(Pickler(share=True).pack(obj), self.files))
        header, unpack = next(self._arriving)
        assert header == [7]
        return unpack()

    def answer(self) -> None:
        """Let the receiver say what it has let go of."""
        self.receiver.send((0,), Payload(dumps(None), self.files))
        next(self._returning)


def memory_files() -> int:
    return sum("memfd:nn_parallel" in os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors())


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:nn_parallel")


def descriptors() -> Iterator[str]:
    return (fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}"))
