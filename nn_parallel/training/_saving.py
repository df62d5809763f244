"""A checkpoint that is written while training goes on, by a thread of each rank.

What goes wrong is raised where the ranks next save or load a checkpoint, on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from .._engine.failures import lost_connection, rank_error
from .._engine.ranks.blocks import block
from .._engine.ranks.context import current_world, rank_context
from ..ranks import on_rank
from ._shards import failures_of

logger = logging.getLogger("nn_parallel")


def save_in_background(
    shards: Future[object] | None, write_checkpoint: Callable[[], None] | None, until_written: contextlib.ExitStack
) -> None:
    """Let a checkpoint be written until the next `finish_saving`, or until this rank leaves the others.

    Args:
        shards: the writing of the sharded tensors, if there are any.
        write_checkpoint: puts the file in place, on rank 0, once the shards of all ranks are there.
        until_written: closed at the end.
    """
    global _running

    def complete() -> None:
        with until_written:
            if shards is not None:
                shards.result()
            if write_checkpoint is not None:
                write_checkpoint()

    thread = ThreadPoolExecutor(1, thread_name_prefix="save_checkpoint")
    _running = thread.submit(complete)
    thread.shutdown(wait=False)
    if (context := rank_context()) is not None:
        context.before_close = _wait


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
        if saving is not None and (error := saving.exception()) is not None:
            if failures := failures_of(error):
                raise rank_error("save_checkpoint()", current_world().world_size, failures)
            if not lost_connection(error):
                raise error
            logger.warning("The checkpoint before is not saved: ranks have failed while it was written.")

    with block(caller):
        if saving is not None:
            saving.exception()
    on_rank(0)(save_checkpoint)()


def _wait() -> None:
    """Before this rank leaves the others: the threads need their process group."""
    if _running is not None:
        _running.exception()


@atexit.register
def _tell_at_exit() -> None:
    if _running is not None and (error := _running.exception()) is not None:
        logger.error("The last checkpoint could not be saved.", exc_info=error)


def _forget_in_fork() -> None:
    global _running
    _running = None


_running: Future[None] | None = None
os.register_at_fork(after_in_child=_forget_in_fork)  # which has no such thread
