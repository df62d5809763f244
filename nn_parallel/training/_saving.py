"""A checkpoint that is written while training goes on: by a thread of each rank, without a word between the ranks.

What goes wrong is raised where the ranks next save or load a checkpoint, on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .._engine.failures import rank_names
from .._engine.ranks.blocks import block
from ..ranks import on_rank
from ._shards import Part

logger = logging.getLogger("nn_parallel")


class Saving:
    """The thread of one rank, which writes its part, if there are any; on rank 0 then the file."""

    def __init__(
        self, part: Part | None, write_checkpoint: Callable[[], None] | None, until_written: contextlib.ExitStack
    ) -> None:
        """``write_checkpoint``, of rank 0, comes last; ``until_written`` is closed after it."""
        self.no_more = threading.Event()  # parts will come
        thread = ThreadPoolExecutor(1, thread_name_prefix="save_checkpoint")
        self.written = thread.submit(part.write if part else lambda: None)
        self.in_place = thread.submit(self._complete, part, write_checkpoint, until_written)
        thread.shutdown(wait=False)

    def _complete(
        self, part: Part | None, write_checkpoint: Callable[[], None] | None, until_written: contextlib.ExitStack
    ) -> None:
        with until_written:
            if write_checkpoint is None or self.written.exception():  # others may still write
                return
            if part is not None:
                if missing := part.missing(self.no_more):
                    logger.warning("A checkpoint is not saved, without the parts of %s.", rank_names(missing))
                    return
                part.write_index()
            write_checkpoint()


def save_in_background(saving: Saving) -> None:
    """Let it go on until the next `finish_saving`, or the end of the process."""
    global _running
    _running = saving


def finish_saving(caller: str) -> None:
    """Wait for the checkpoint that is being written, if there is one, once all ranks are in ``caller``.

    Raises:
        OSError: it could not be written.
        RankError: that, on every rank, where there are several.
        RankTimeoutError: a rank has not come.
    """
    global _running
    saving, _running = _running, None

    def save_checkpoint() -> None:
        if saving is not None:
            saving.in_place.result()

    try:
        with block(caller):
            if saving is not None:
                saving.written.result()
    finally:
        if saving is not None:
            saving.no_more.set()
    on_rank(0)(save_checkpoint)()


@atexit.register
def _finish_at_exit() -> None:
    if _running is not None and (error := _running.written.exception() or _running.in_place.exception()):
        logger.error("The last checkpoint could not be saved.", exc_info=error)


def _forget_in_fork() -> None:
    global _running
    _running = None


_running: Saving | None = None
os.register_at_fork(after_in_child=_forget_in_fork)  # which has no such thread
