"""Where the processes of a job stand, as another process sees it, told in a line for each call site.

Each process that takes part *offers* its stack: a thread of its own writes it into a memory file, when it is asked by a
byte in a pipe. Who may look into ``/proc`` of such a process finds both there, by the name of the file.

Where C code holds the GIL, that thread cannot run. Then a signal makes Python's `faulthandler` write the stack. That is
kept for then: of Python code that runs it now and again reads a frame that is just being made, and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple

import torch

from . import devices
from .descendants import descendants_of
from .failures import rank_names
from .tracebacks import PACKAGE_FOLDER

SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2
WITHIN_S = 0.5  # for a process to write its stack, which takes milliseconds where it gets a core
MAX_FRAMES = 100
_NAME = "stack of nn_parallel "


class Process(NamedTuple):
    """A process that offers its stack."""

    pid: int
    name: str  # as it has said: ``rank 3``, ``the script``
    file: str  # the path of its memory file
    pipe: str  # of the pipe by which it is asked


def offer_stack(name: str | None = None) -> None:
    """Let others see where the main thread of this process stands from now on, under ``name``.

    Without one a process offers it as ``the script``, unless it does already.
    """
    global _offered
    if not hasattr(os, "memfd_create"):  # only Linux has it
        return
    pid, (owner, *before) = os.getpid(), _offered
    if name is None and owner == pid:
        return
    asked, ask = os.pipe()
    file = os.memfd_create(f"{_NAME}{pid} {ask} {name or 'the script'}", os.MFD_CLOEXEC)
    _offered = pid, ask, asked, file
    faulthandler.register(SIGNAL, file, all_threads=False)
    threading.Thread(target=_tell, args=[asked, file], name="nn_parallel stack", daemon=True).start()
    for fd in before[:1] if owner == pid else before:  # with the first one ends the thread, which closes the others
        os.close(fd)


def processes_of(pid: int) -> list[Process]:
    """Those that offer their stacks, of a process and all that descends from it."""
    return [found for each in [pid, *descendants_of(pid)] for found in _found(each)]


def stacks_of(processes: Iterable[Process]) -> dict[Process, str]:
    """The stack of each, innermost frame first; empty for a process that has not written it in time."""
    begins = {process: _size(process) for process in processes}
    stacks = dict.fromkeys(begins, "")
    for ask in (_ask_thread, _ask_faulthandler):
        for process, stack in stacks.items():
            if not is_whole(stack):
                with contextlib.suppress(OSError):  # it has ended
                    ask(process)
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline and not all(map(is_whole, stacks.values())):
            for process, begin in begins.items():
                with contextlib.suppress(OSError), open(process.file, "rb") as file:
                    file.seek(begin)
                    stacks[process] = file.read().decode(errors="replace")
            time.sleep(0.002)  # nobody tells when a memory file has grown
    return stacks


def main_frame() -> FrameType | None:
    """Where the main thread of this process stands."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def main_stack() -> str:
    """The stack of the main thread of this process, as `faulthandler` writes it."""
    frames = list(traceback.walk_stack(main_frame()))
    lines = [f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n' for frame, line in frames]
    return "".join(lines[:MAX_FRAMES] + ["  ...\n"] * (len(lines) > MAX_FRAMES))


def is_whole(stack: str) -> bool:
    """Whether it goes to the outermost frame, or to where faulthandler stops."""
    return stack.endswith((" in <module>\n", "  ...\n"))


def by_call_site(stacks: Mapping[str, str]) -> str:
    """`by_place`, of stacks as `faulthandler` writes them, the innermost frame first."""
    return by_place({name: call_site_of(stack) for name, stack in stacks.items()})


def by_place(places: Mapping[str, str]) -> str:
    """A line for each place, with who is there: ``ranks 0, 2-7: in all_reduce(), called at train.py:41``.

    The keys are names, as ``rank 3``.
    """
    names = dict[str, list[str]]()
    for name, place in places.items():
        names.setdefault(place, []).append(name)
    return "\n".join(f"{_together(some)}: {place}" for place, some in names.items())


def call_site_of(stack: str) -> str:
    """The innermost line of the user's code, and the function of ours or of torch.distributed that it has called."""
    called = ""
    for path, line, function in _FRAME.findall(stack):
        if not path.startswith(_LIBRARIES):
            site = f"{os.path.basename(path)}:{line}"
            return f"in {called}(), called at {site}" if called else f"in {_call(function)}, {site}"
        if path.startswith((PACKAGE_FOLDER, _DISTRIBUTED)) and function not in _WRAPPERS:
            called = function
    return "in C code" if _TASK in stack else f"in {called}()" if called else "not known"


def users_part(stack: str) -> str:
    """What of the stack of a pool's worker lies in the function of its task."""
    return stack.partition(_TASK)[0].rstrip()


def _together(names: Iterable[str]) -> str:
    """``ranks 0, 2-7``, and other names after them."""
    ranks, others = list[int](), list[str]()
    for name in names:
        rank = re.fullmatch(r"rank (\d+)", name)
        if rank is None:
            others.append(name)
        else:
            ranks.append(int(rank[1]))
    return ", ".join(([rank_names(ranks)] if ranks else []) + others)


def _found(pid: int) -> Iterator[Process]:
    if not _catches_signal(pid):  # the signal would end it
        return
    for path in glob.glob(f"/proc/{pid}/fd/*"):
        with contextlib.suppress(OSError):
            _, found, rest = os.readlink(path).removesuffix(" (deleted)").partition(_NAME)
            owner, ask, name = rest.split(" ", 2) if found else ("", "", "")
            if owner == str(pid):  # else it is a fork of the owner
                yield Process(pid, name, path, f"/proc/{pid}/fd/{ask}")


def _catches_signal(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (SIGNAL - 1) & 1)
    return False


def _tell(asked: int, file: int) -> None:
    """Write the stack whenever a byte arrives, until the pipe is closed."""
    while os.read(asked, 1):
        os.write(file, main_stack().encode(errors="backslashreplace"))
    os.close(asked)
    os.close(file)


def _size(process: Process) -> int:
    with contextlib.suppress(OSError):  # it has ended
        return os.stat(process.file).st_size
    return 0


def _ask_thread(process: Process) -> None:
    pipe = os.open(process.pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, b"?")
    finally:
        os.close(pipe)


def _ask_faulthandler(process: Process) -> None:
    os.kill(process.pid, SIGNAL)


def _call(function: str) -> str:
    return function if function.startswith("<") else f"{function}()"


_offered: tuple[int, ...] = (0,)  # by this process, asked by this pipe, of which it reads this end, in this file
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = PACKAGE_FOLDER, _TORCH, sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_WRAPPERS = "wrapper", "_fn", "__enter__", "__exit__"
_TASK = f'  File "{devices.__file__}", line'.encode("ascii", "backslashreplace").decode()  # calls it
