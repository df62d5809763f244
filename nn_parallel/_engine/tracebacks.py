"""Tracebacks as users see them: without frames of this package.

Whoever reads a traceback looks for a line of their own, and the last frame is always that of the function that raises,
which is one of ours. There is no way to raise without it. So the frame is left out where a traceback is shown: pytest
skips frames that have a local variable ``__tracebackhide__``; for the main thread of a script, `hide_own_frames` wraps
`sys.excepthook`. A notebook shows the frame: IPython prints exception groups as Python does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
import warnings
from types import FrameType, TracebackType

from ..errors import ParallelError
from .interrupts import IMPORT_SYSTEM

MAX_TRACEBACK_CHARS = 20_000
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def format_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without our own frames at its top, bounded in length."""
    text = "".join(traceback.format_exception(type(error), error, user_frames(error)))
    half = MAX_TRACEBACK_CHARS // 2
    return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n  [...]\n{text[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error`` from the first frame that is not ours; ours alone if there is no other."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frames = frames.tb_next
    return frames or error.__traceback__


def warn_user(message: str) -> None:
    """Warn of what the user's line has done that called into this package."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def importing_module() -> str | None:
    """Return the name of the module whose import has called this function, the innermost one; None if none has."""
    frame: FrameType | None = sys._getframe()
    module = None
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            module = module or str(frame.f_globals.get("__name__"))
        elif module is not None and frame.f_code.co_filename == IMPORT_SYSTEM:
            return module
        frame = frame.f_back
    return None


@functools.cache  # once for a process
def hide_own_frames() -> None:
    """Have `sys.excepthook` print errors of this package without frames of this package, from now on.

    The errors themselves stay whole: a debugger, and `traceback.print_exception`, show every frame.
    """
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        whole = [(own, own.__traceback__) for own in _own_errors(error)]
        try:
            for own, traceback_ in whole:
                own.__traceback__ = _without_own_frames(traceback_)
            before(kind, error, error.__traceback__)
        finally:
            for own, traceback_ in whole:
                own.__traceback__ = traceback_

    sys.excepthook = excepthook


def _own_errors(error: BaseException) -> list[BaseException]:
    """Return the errors of this package among ``error``, its causes and its contexts, each with its leaves."""
    errors = list[BaseException]()
    seen = set[int]()
    waiting = [(error, False)]
    while waiting:
        current, is_leaf = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        is_own = is_leaf or isinstance(current, ParallelError)
        if is_own:
            errors.append(current)
        if isinstance(current, BaseExceptionGroup):
            waiting += [(leaf, is_own) for leaf in current.exceptions]
        waiting += [(other, False) for other in (current.__cause__, current.__context__) if other is not None]
    return errors


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a copy of a traceback without our frames; the traceback itself if it has no others."""
    kept = list[TracebackType]()
    frame = frames
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith((PACKAGE_FOLDER, contextlib.__file__)):
            kept.append(frame)
        frame = frame.tb_next
    copy: TracebackType | None = None
    for frame in reversed(kept):
        copy = TracebackType(copy, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return copy or frames
