"""The place of the main thread in the code, read by other threads for errors about ranks that wait for each other."""

from __future__ import annotations

import dis
import os
import traceback
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..stack_dump import main_frame
from ..tracebacks import PACKAGE_FOLDER
from .group import Group
from .records import site_of


class CodeLocation(NamedTuple):
    """The place in the code at which the main thread is."""

    function: str | None  # the function of torch.distributed that user code has called, or "initialize_ddp"
    site: str  # file:line of the user's code
    caller: str  # the function of the user's code
    may_wait: bool  # the main thread may be waiting for other ranks, see `_may_wait`

    def __str__(self) -> str:
        function = self.function or self.caller
        return f"at {self.site}" if function.startswith("<") else f"in {function}() at {self.site}"


def location() -> CodeLocation:
    """Return the present place of the main thread."""
    frame = innermost = main_frame()
    function = None
    while frame is not None and _is_library(frame):
        if frame.f_code is Group.make.__code__:
            function = "initialize_ddp"
        elif frame.f_code.co_filename == dist.distributed_c10d.__file__:
            function = frame.f_code.co_name
        frame = frame.f_back
    site, caller = (site_of(frame), frame.f_code.co_name) if frame else ("an unknown place", "<unknown>")
    return CodeLocation(function, site, caller, innermost is not None and _may_wait(innermost))


def stack() -> str:
    """Return the stack of the main thread: only the frames of user code, or all frames if there are none of these."""
    frames = list(traceback.walk_stack(main_frame()))
    user_frames = [(frame, line) for frame, line in frames if not _is_library(frame)]
    return "".join(traceback.StackSummary.extract(reversed(user_frames or frames)).format())


def _is_library(frame: FrameType) -> bool:
    """Return whether ``frame`` belongs to this package or to torch."""
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _may_wait(frame: FrameType) -> bool:
    """Return whether the innermost ``frame`` may be in C code that waits for other ranks.

    This is assumed of torch's code for distributed work and for autograd, whose backward waits for DDP's collectives.
    It is also assumed of a call of any attribute named ``wait``, such as ``work.wait()``. To see such a call, the
    function looks for the last attribute that the bytecode has loaded before the present instruction.
    """
    if frame.f_code.co_filename.startswith(_WAITING):
        return True
    last_attribute = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            last_attribute = instruction.argval
    return last_attribute == "wait"


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = PACKAGE_FOLDER, _TORCH
_WAITING = tuple(os.path.join(_TORCH, *folder) for folder in (["distributed"], ["nn", "parallel"], ["autograd"]))
