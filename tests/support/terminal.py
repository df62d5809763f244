"""A command on a terminal of its own, which a test reads and answers."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import termios
from collections.abc import Callable, Sequence
from typing import Any


def run_on_terminal(
    command: Sequence[str], answer: Callable[[str], bytes] = lambda shown: b"", **options: Any
) -> tuple[int, str]:
    """The exit status, and all that was shown; ``answer`` is asked what to type, after each piece of that."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    shown = ""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **options) as process:
        os.close(theirs)
        try:
            with contextlib.suppress(OSError):  # nobody has the other end any more
                while piece := os.read(ours, 1 << 16):
                    shown += piece.decode().replace("\r\n", "\n")
                    if typed := answer(shown):  # nothing would be the end of its input
                        os.write(ours, typed)
        except BaseException:  # such as that of a test that takes too long
            process.kill()
            raise
    os.close(ours)
    return process.returncode, shown
