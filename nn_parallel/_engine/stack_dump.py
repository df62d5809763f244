"""The Python stacks of the processes of a job, and a summary of them with one line for each call site.

`stacks_below` uses py-spy, which reads the stack of another process from the memory of that process. The other process
need not take part. So its stack can be read even if it is stopped, holds the GIL in C code, or does not use this
package.

A stack is a string in the form in which `faulthandler` writes it: one line for each frame, the innermost frame first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from . import devices
from .descendants import descendants_of, is_stopped
from .failures import rank_names
from .tracebacks import PACKAGE_FOLDER

MAX_FRAMES = 100  # if a stack has more frames, the outermost ones are cut off, as `faulthandler` does
PY_SPY_WITHIN_S = 30.0  # how long py-spy may take for one process


def stacks_below(pid: int) -> dict[int, str]:
    """Return the stacks of the main threads of a process and of its descendants.

    Returns:
        A dict that maps the process id of each process that runs Python to the stack of its main thread.

    Raises:
        ImportError: py-spy is not installed.
        ValueError: none of these processes runs Python, or this user may not read their memory.
    """
    program = Path(sysconfig.get_path("scripts"), "py-spy")
    if not program.exists():
        raise ImportError("Stacks are read by py-spy, which is not installed: pip install nn_parallel[debug]")
    stacks: dict[int, str] = {}
    problem = "there is no such process"
    for process in [pid, *descendants_of(pid)]:
        command = [str(program), "dump", "--json", "--pid", str(process)]
        if is_stopped(process):
            command.append("--nonblocking")  # otherwise py-spy tries to stop the process, which fails
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_WITHIN_S)
        if done.returncode == 0:
            stacks[process] = _main_thread(process, json.loads(done.stdout))
        elif process == pid and os.path.exists(f"/proc/{pid}"):
            problem = done.stderr.strip().partition("\n")[0].removeprefix("Error: ")
    if not stacks:
        raise ValueError(f"py-spy finds no Python process with the id {pid} or below it: {problem}.")
    return stacks


def name_of(pid: int, rank_in: Callable[[Mapping[str, str]], int | None]) -> str:
    """Return ``rank 3`` for a rank, and ``process 4711`` for any other process.

    A worker of a pool has set the name of its process to its rank (`take_name`). The rank of a process that a launcher
    has started is in its environment variables.

    Args:
        pid: the process id.
        rank_in: takes the environment variables of the process, and returns the rank that a launcher has written into
            them; None if there is no rank in them.
    """
    rank = None
    with contextlib.suppress(OSError):  # the process has ended
        own_name = Path(f"/proc/{pid}/comm").read_text().strip()
        if own_name.startswith("rank "):
            return own_name
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        environ = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
        rank = rank_in(environ)
    return f"process {pid}" if rank is None else f"rank {rank}"


def take_name(rank: int) -> None:
    """Name this process after its rank, as in ``rank 3``, so that `name_of` and ``ps`` show the rank."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {rank}")


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread of this process."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def main_stack() -> str:
    """Return the stack of the main thread of this process, as `faulthandler` writes it."""
    frames = list(traceback.walk_stack(main_frame()))
    lines = [f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n' for frame, line in frames]
    return "".join(lines[:MAX_FRAMES] + ["  ...\n"] * (len(lines) > MAX_FRAMES))


def is_whole(stack: str) -> bool:
    """Return whether a stack, which may arrive in several pieces, is complete.

    The last line of a complete stack is the outermost frame, or ``...`` if the stack was shortened.
    """
    return stack.endswith((" in <module>\n", "  ...\n"))


def by_call_site(stacks: Mapping[str, str]) -> str:
    """Return a summary of stacks: one line for each call site, with the processes that are at this call site.

    `by_place` has an example.

    Args:
        stacks: maps the names of processes to their stacks.
    """
    return by_place({name: call_site_of(stack) for name, stack in stacks.items()})


def by_place(places: Mapping[str, str]) -> str:
    """Return a summary with lines such as ``ranks 0, 2-7: in all_reduce(), called at train.py:41``.

    Args:
        places: maps the name of each process, such as ``rank 3``, to the place in the code where the process is.
    """
    names = dict[str, list[str]]()
    for name, place in places.items():
        names.setdefault(place, []).append(name)
    return "\n".join(f"{_together(names_there)}: {place}" for place, names_there in names.items())


def call_site_of(stack: str) -> str:
    """Return the innermost line of the user's code in a stack, as in ``in all_reduce(), called at train.py:41``.

    If the line calls a function of this package or of torch.distributed, this function is named. Otherwise the user's
    function is named.
    """
    called = ""
    for path, line, function in _FRAME.findall(stack):
        if not path.startswith(_LIBRARIES):
            site = f"{os.path.basename(path)}:{line}"
            return f"in {called}(), called at {site}" if called else f"in {_call(function)}, {site}"
        if path.startswith((PACKAGE_FOLDER, _DISTRIBUTED)) and function not in _WRAPPERS:
            called = function
    return "in C code" if _TASK in stack else f"in {called}()" if called else "not known"


def users_part(stack: str) -> str:
    """Return the part of a worker's stack that belongs to the function of its task."""
    return stack.partition(_TASK)[0].rstrip()


def _together(names: Iterable[str]) -> str:
    """Join names of processes, as in ``ranks 0, 2-7, process 4711``. Ranks come first."""
    ranks = list[int]()
    others = list[str]()
    for name in names:
        rank = re.fullmatch(r"rank (\d+)", name)
        if rank is None:
            others.append(name)
        else:
            ranks.append(int(rank[1]))
    return ", ".join(([rank_names(ranks)] if ranks else []) + others)


def _main_thread(pid: int, threads: list[dict[str, Any]]) -> str:
    """Return the stack of the main thread, in the form of `main_stack`.

    Args:
        pid: the process id, which is also the id of the main thread.
        threads: all threads of the process, in the form of py-spy.
    """
    frames: list[dict[str, Any]] = next((thread["frames"] for thread in threads if thread["os_thread_id"] == pid), [])
    lines = [(frame["filename"], frame["line"], frame["name"].rpartition(".")[2]) for frame in frames]
    return "".join(f'  File "{path}", line {line} in {name}\n' for path, line, name in lines)


def _call(function: str) -> str:
    return function if function.startswith("<") else f"{function}()"


# Matches a line of a stack. The groups are the file, the number of the line and the function.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = PACKAGE_FOLDER, _TORCH, sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
# `call_site_of` does not name these functions, because the user does not know them. For example, the user's code calls
# `all_reduce`, which torch has decorated. So in the stack the user's frame has called a function ``wrapper``.
_WRAPPERS = "wrapper", "_fn", "__enter__", "__exit__"
# The beginning of a line in the stack of a worker. `call_on_device` in the module `devices` calls the function of the
# task. Stacks list the innermost frame first, so all lines before the first such line belong to the function of the
# task, or to functions that it has called.
_TASK = f'  File "{devices.__file__}", line'
