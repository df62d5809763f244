"""Tracebacks as users see them: without frames of this package."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

MAX_TRACEBACK_CHARS = 20_000
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def format_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without our own frames at its top, bounded in length."""
    text = "".join(traceback.format_exception(type(error), error, user_frames(error)))
    half = MAX_TRACEBACK_CHARS // 2
    return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n  [...]\n{text[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` from the first frame that is not ours; ours alone if there is no other."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frames = frames.tb_next
    return frames or error.__traceback__
