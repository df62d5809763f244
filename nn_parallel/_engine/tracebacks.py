"""Tracebacks as users see them: without frames of this package.

Users look at the end of a traceback for a line of their own code. But the last frame of a traceback always belongs to
the function that raises the exception. For an error of this package that is a function of this package. Python cannot
raise an exception without this frame.

So the frame is left out when a traceback is shown. For pytest, functions of this package that raise have a local
variable ``__tracebackhide__``, which makes pytest skip their frames. For a script, `hide_own_frames` wraps
`sys.excepthook`, which prints the exception that ends the main thread. A notebook still shows the frame: IPython prints
exception groups, such as `RankError`, with Python's module `traceback`, and does not call the hook.
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

MAX_TRACEBACK_CHARS = 20_000  # `format_traceback` shortens longer texts
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def format_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` as Python prints it, with two differences.

    The outermost frames are left out if they belong to this package. The middle of a long text is cut out.
    """
    text = "".join(traceback.format_exception(type(error), error, user_frames(error)))
    half = MAX_TRACEBACK_CHARS // 2
    return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n  [...]\n{text[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error`` from the first frame outside of this package on.

    If all frames belong to this package, the whole traceback is returned.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frames = frames.tb_next
    return frames or error.__traceback__


def warn_user(message: str) -> None:
    """Issue a warning that points to the line of user code that called into this package."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def importing_module() -> str | None:
    """Return the name of the innermost module whose import has led to this call; None outside of imports."""
    frame: FrameType | None = sys._getframe()
    module = None
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            module = module or str(frame.f_globals.get("__name__"))
        elif module is not None and frame.f_code.co_filename == IMPORT_SYSTEM:
            return module
        frame = frame.f_back
    return None


@functools.cache  # because only the first call in a process must wrap the hook
def hide_own_frames() -> None:
    """Make `sys.excepthook` print errors of this package without frames of this package.

    The frames are removed only while the hook runs. A debugger and `traceback.print_exception` still show all frames.
    """
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        tracebacks = [(own, own.__traceback__) for own in _own_errors(error)]
        try:
            for own, traceback_ in tracebacks:
                own.__traceback__ = _without_own_frames(traceback_)
            before(kind, error, error.__traceback__)
        finally:
            for own, traceback_ in tracebacks:
                own.__traceback__ = traceback_

    sys.excepthook = excepthook


def _own_errors(error: BaseException) -> list[BaseException]:
    """Return the exceptions that `hide_own_frames` shows without the frames of this package.

    The search covers ``error``, its causes and contexts, and the members of all exception groups among these. Each
    error of this package is returned. If a group is an error of this package, as `RankError` is, all exceptions in the
    group are returned, even those of other types.
    """
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
    """Return a copy of a traceback without the frames of this package and of `contextlib`.

    If no other frames remain, the traceback itself is returned.
    """
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
