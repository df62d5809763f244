"""A checkpoint that is written while training goes on, by a thread of each rank.

What goes wrong is raised where the ranks next save or load a checkpoint, on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .._engine import background
from .._engine.ranks.blocks import block
from .._engine.ranks.context import rank_context
from ..errors import ParallelError
from ..ranks import on_rank
from ._shards import Shards, write_shards

logger = logging.getLogger("nn_parallel")


class Saving(NamedTuple):
    """A checkpoint that is being written."""

    end: Future[Exception | None]  # of this rank's thread, with what rank 0 has to tell of what went wrong
    group: dist.ProcessGroup | None  # the default one, if the threads speak with each other
    writes_file: bool  # as rank 0 does

    @property
    def is_given_up(self) -> bool:
        """Return whether the process groups have been closed since, so that the shards cannot be written."""
        return self.group is not None and self.group is not dist.group.WORLD


def save_in_background(
    shards: Shards, folder: Path | None, write_file: Callable[[], None] | None, until_written: contextlib.ExitStack
) -> None:
    """Let a checkpoint be written until the next `finish_saving`, or until this rank leaves the others.

    All ranks call it.

    Args:
        shards: what the tensors hold now is written.
        folder: where to; None if there are none.
        write_file: on rank 0, puts the file in place, once the shards of all ranks are there.
        until_written: closed at the end, if it can begin.
    """
    global _running
    group: dist.ProcessGroup | None = None
    default = None if folder is None else dist.group.WORLD

    def write(until_written: contextlib.ExitStack) -> Exception | None:
        with until_written:
            failure: Exception | None = None
            if folder is not None:
                failure = write_shards(shards, folder, group)
                if default is not dist.group.WORLD:  # without a group, torch takes this rank for the only one
                    raise ParallelError("The process group has been closed.")
            if failure is None and write_file is not None:
                try:
                    write_file()
                except Exception as error:
                    failure = error
            return failure

    with block("save_checkpoint()"):
        if folder is not None:
            shards.copy()
            context = rank_context()
            if context is not None and dist.get_world_size() > 1:
                group = context.group.for_thread(context.store, context.timeout)
        from_now_on = until_written.pop_all()
        try:
            end = background.start(functools.partial(write, from_now_on), "nn_parallel save_checkpoint")
        except BaseException:
            from_now_on.close()
            raise
        _running = Saving(end, default, write_file is not None)


def finish_saving(caller: str) -> None:
    """Wait for the checkpoint that is being written, if there is one, once all ranks are in ``caller``.

    Raises:
        OSError: it could not be written.
        RankError: that, on every rank, where there are several.
        RankTimeoutError: a rank has not come.
    """
    global _running
    saving = _running
    failure: Exception | None = None
    is_given_up = False

    with block(caller):
        if saving is not None:
            error = saving.end.exception()
            is_given_up = error is not None and saving.is_given_up
            if error is None:
                failure = saving.end.result()
            elif not is_given_up:  # of this rank alone, for whom the threads of the others wait
                _running = None
                raise error
    _running = None

    def save_checkpoint() -> None:
        if failure is not None:
            raise failure
        if is_given_up:
            logger.warning("The checkpoint before is not saved: ranks have failed while it was written.")

    on_rank(0)(save_checkpoint)()


@atexit.register
def _tell_at_exit() -> None:
    if _running is None:
        return
    if _running.is_given_up and not _running.end.done():
        error: BaseException | None = ParallelError("The process group was closed before its shards were written.")
    else:
        error = _running.end.exception() or _running.end.result()
    if error is not None and _running.writes_file:
        logger.error("The last checkpoint could not be saved.", exc_info=error)


def _forget_in_fork() -> None:
    global _running
    _running = None


_running: Saving | None = None
os.register_at_fork(after_in_child=_forget_in_fork)  # which has no such thread
