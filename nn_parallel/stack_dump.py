"""Where the processes of a job stand, as another process sees it, told in a line for each call site.

Each process that takes part *offers* its stack: a signal makes Python's `faulthandler` write it into a memory file,
also while C code holds the GIL. Who may look into ``/proc`` of such a process finds the file there by its name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from . import devices
from .descendants import descendants_of
from .errors import PACKAGE_FOLDER, rank_names

SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2
WITHIN_S = 0.5  # for a process to write its stack, which takes a millisecond where it gets a core
_NAME = "stack of nn_parallel "


class Process(NamedTuple):
    """A process that offers its stack."""

    pid: int
    name: str  # as it has said: ``rank 3``, ``the script``
    path: str  # of its memory file


def offer_stack(name: str | None = None) -> None:
    """Let others see where the main thread of this process stands from now on, under ``name``.

    Without one a process offers it as ``the script``, unless it does already.
    """
    global _offered
    if not hasattr(os, "memfd_create"):  # only Linux has it
        return
    pid, (owner, before) = os.getpid(), _offered
    if name is None and owner == pid:
        return
    _offered = pid, os.memfd_create(f"{_NAME}{pid} {name or 'the script'}", os.MFD_CLOEXEC)
    faulthandler.register(SIGNAL, _offered[1], all_threads=False)
    if before is not None:
        os.close(before)


def processes_of(pid: int) -> list[Process]:
    """Those that offer their stacks, of a process and all that descends from it."""
    return [found for each in [pid, *descendants_of(pid)] for found in _found(each)]


def stacks_of(processes: Iterable[Process]) -> dict[Process, str]:
    """The stack of each, innermost frame first; empty for a process that has not written it in time."""
    asked = {process: _ask(process) for process in processes}
    deadline = time.monotonic() + WITHIN_S
    stacks = dict.fromkeys(asked, "")
    while time.monotonic() < deadline and not all(map(is_whole, stacks.values())):
        for process, before in asked.items():
            with contextlib.suppress(OSError), open(process.path, "rb") as file:  # it has ended
                file.seek(before)
                stacks[process] = file.read().decode(errors="replace")
        time.sleep(0.002)  # nobody tells when a memory file has grown
    return stacks


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
            owner, _, name = rest.partition(" ")
            if found and owner == str(pid):  # else it is a fork of the owner
                yield Process(pid, name, path)


def _catches_signal(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (SIGNAL - 1) & 1)
    return False


def _ask(process: Process) -> int:
    """Have it write its stack: from this byte of its file on."""
    with contextlib.suppress(OSError):
        size = os.stat(process.path).st_size
        os.kill(process.pid, SIGNAL)
        return size
    return 0


def _call(function: str) -> str:
    return function if function.startswith("<") else f"{function}()"


_offered: tuple[int, int | None] = 0, None  # by this process, in this file
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = PACKAGE_FOLDER, _TORCH, sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_WRAPPERS = "wrapper", "_fn", "__enter__", "__exit__"
_TASK = f'  File "{devices.__file__}", line'.encode("ascii", "backslashreplace").decode()  # calls it
