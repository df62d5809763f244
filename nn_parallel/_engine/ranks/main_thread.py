"""The line of code that the main thread executes.

The watchdog thread reads this line, so that errors and logs can say where each rank is when ranks wait for each other.
"""

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
    """The location in the code at which the main thread is."""

    # The function of torch.distributed that user code has called, or "initialize_ddp"; None if neither is running.
    function: str | None
    site: str  # the line of user code that runs now, or that has called torch or this package, as ``file:line``
    caller: str  # the name of the user's function that contains this line
    # Whether the main thread may be waiting for other ranks, see `_may_wait`. If not, the watchdog does not check
    # whether the main thread is in a collective that can never end.
    may_wait: bool

    def __str__(self) -> str:
        function = self.function or self.caller
        return f"at {self.site}" if function.startswith("<") else f"in {function}() at {self.site}"


def location() -> CodeLocation:
    """Return the location at which the main thread is now."""
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
    """Return the stack of the main thread, as text.

    The text shows only the frames of user code. If the stack has no such frames, the text shows all frames.
    """
    frames = list(traceback.walk_stack(main_frame()))
    user_frames = [(frame, line) for frame, line in frames if not _is_library(frame)]
    return "".join(traceback.StackSummary.extract(reversed(user_frames or frames)).format())


def _is_library(frame: FrameType) -> bool:
    """Return whether ``frame`` belongs to this package or to torch."""
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _may_wait(frame: FrameType) -> bool:
    """Return whether the main thread may be waiting for other ranks, in C code that the innermost ``frame`` has called.

    The main thread may wait in torch's code for distributed work, and in torch's code for autograd, because the
    backward pass waits for DDP's collectives. It may also wait in a call of an attribute named ``wait``, such as
    ``work.wait()``. The function recognizes such a call from the bytecode: the last attribute that is loaded before the
    present instruction is ``wait``.
    """
    if frame.f_code.co_filename.startswith(_WAITING):
        return True
    last_attribute = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            last_attribute = instruction.argval
        elif instruction.opname.startswith("CALL"):
            last_attribute = ""  # the call of this attribute has returned, because a later instruction runs now
    return last_attribute == "wait"


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = PACKAGE_FOLDER, _TORCH
_WAITING = tuple(os.path.join(_TORCH, *folder) for folder in (["distributed"], ["nn", "parallel"], ["autograd"]))
