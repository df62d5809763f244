"""What the parent holds of one worker process: its connection, its output, what it works on."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import IO

import torch

from .jobs import Run, Single
from .transport import messages


class Worker:
    """What the parent knows of one worker process."""

    def __init__(self, index: int, device: torch.device, connection: socket.socket, output: list[Output]) -> None:
        self.index, self.device, self.connection, self.output = index, device, connection, output
        self.arriving = messages(connection, socket.MSG_DONTWAIT)
        self.pid = 0  # until the fork server has told it
        self.job: Single | Run | None = None
        self.number = 0  # of the task that it works on
        self.started = False
        self.killed = False  # by us, so that its end is no failure

    @property
    def description(self) -> str:
        return f"Worker {self.index} (pid {self.pid}, {self.device})"


class Output:
    """Copies what a worker prints to this process's stream of the same name, a whole line at a time."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self._name, self._pending = fd, name, b""
        os.set_blocking(fd, False)

    def copy(self, flush: bool = False) -> bool:
        """Copy what is there now, with ``flush`` an unfinished line too; False at the end of the stream."""
        more = True
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fd, 1 << 16):
                self._pending += chunk
            more = False
        end = (
            len(self._pending) if flush or not more else max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1
        )
        text, self._pending = self._pending[:end].decode(errors="replace"), self._pending[end:]
        if text:
            stream: IO[str] = getattr(sys, self._name)  # as it is now: a notebook's cell, a redirected stream
            with contextlib.suppress(Exception):  # closed by the user: nobody to tell
                stream.write(text)
                stream.flush()
        return more
