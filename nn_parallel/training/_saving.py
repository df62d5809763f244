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
from typing import Any, NamedTuple

import torch.distributed as dist

from .._engine.ranks.blocks import block
from .._engine.ranks.context import rank_context
from ..errors import ParallelError
from ..ranks import on_rank
from ._shards import failure_of_ranks

logger = logging.getLogger("nn_parallel")


class Saving(NamedTuple):
    """What this rank does of a checkpoint that is being written."""

    shards: Future[object] | None  # its part of the sharded tensors, if there are any
    file: Future[None] | None  # on rank 0: once all shards are there
    group: dist.ProcessGroup | None  # without which the shards cannot be written

    @property
    def last(self) -> Future[Any] | None:
        """Return what ends last; None if this rank does nothing."""
        return self.file or self.shards

    def wait(self) -> BaseException | None:
        """Wait until it has come to its end; return what went wrong."""
        return None if self.last is None else self.last.exception()

    @property
    def is_cut_off(self) -> bool:
        """Return whether the process group has been closed since."""
        return self.shards is not None and dist.group.WORLD is not self.group


def save_in_background(
    shards: Future[object] | None, write_file: Callable[[], None] | None, until_written: contextlib.ExitStack
) -> None:
    """Let a checkpoint be written until the next `finish_saving`, or until this rank leaves the others.

    Args:
        shards: the writing of the sharded tensors, if there are any.
        write_file: on rank 0, puts the file in place, once the shards of all ranks are there.
        until_written: closed at the end of that.
    """
    global _running
    group = dist.group.WORLD

    def complete(write_file: Callable[[], None]) -> None:
        with until_written:
            if shards is not None:
                shards.result()
                if dist.group.WORLD is not group:  # without one, torch takes this rank for the only one
                    raise ParallelError("The process group has been closed.")
            write_file()

    file: Future[None] | None = None
    if write_file is not None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="save_checkpoint")
        file = thread.submit(complete, write_file)
        thread.shutdown(wait=False)
    _running = Saving(shards, file, group)
    if (context := rank_context()) is not None:
        context.group.background = _running.last


def finish_saving(caller: str) -> None:
    """Wait for the checkpoint that is being written, if there is one, once all ranks are in ``caller``.

    Raises:
        OSError: it could not be written.
        RankError: that, on every rank, where there are several.
        RankTimeoutError: a rank has not come.
    """
    global _running
    saving, _running = _running, None
    is_cut_off = saving is not None and saving.is_cut_off

    def save_checkpoint() -> None:
        error = None if saving is None else saving.wait()
        if error is None:
            return
        failure = failure_of_ranks(error)
        if failure is None and is_cut_off and not isinstance(error, OSError):
            logger.warning("The checkpoint before is not saved: ranks have failed while it was written.")
        else:
            raise failure or error

    with block(caller):
        if saving is not None and saving.shards is not None and not is_cut_off:
            error = saving.shards.exception()
            if error is not None and failure_of_ranks(error) is None:  # of this rank alone: others may wait for it
                raise error
    on_rank(0)(save_checkpoint)()


@atexit.register
def _tell_at_exit() -> None:
    if _running is not None and (error := _running.wait()) is not None:
        logger.error("The last checkpoint could not be saved.", exc_info=error)


def _forget_in_fork() -> None:
    global _running
    _running = None


_running: Saving | None = None
os.register_at_fork(after_in_child=_forget_in_fork)  # which has no such thread
