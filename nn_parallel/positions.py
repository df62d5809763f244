"""Where the main thread stands, as another thread sees it: for the errors of ranks that wait for each other."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from .rendezvous import meet
from .reports import place_of


class Position(NamedTuple):
    """Where the main thread stands."""

    collective: str | None  # the function of torch.distributed that it waits in with all ranks of the default group
    place: str  # file:line of the user's code
    stack: str

    def __str__(self) -> str:
        return f"in {self.collective}() at {self.place}" if self.collective else f"at {self.place}"


def position() -> Position:
    """Where the main thread stands now."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    collective, works = None, False
    while frame is not None and _is_library(frame):
        works = works or frame.f_code.co_name in ("_object_to_tensor", "_tensor_to_object")  # no waiting in these
        if frame.f_code is meet.__code__:
            collective = "initialize_ddp"
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:
            group = frame.f_locals.get("group")
            everyone = "group" in frame.f_locals and (group is None or group is dist.group.WORLD)
            collective = frame.f_code.co_name if everyone and frame.f_code.co_name in COLLECTIVES else None
        frame = frame.f_back
    stack = "".join(traceback.format_stack(frame or innermost)) if innermost else ""
    return Position(None if works else collective, place_of(frame) if frame else "an unknown place", stack)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)


# Those that end on no rank before all have entered them, or soon after: no point-to-point operations.
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
}
_LIBRARIES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(dist.__file__))) + os.sep,
)
