"""An asynchronous checkpoint: a thread of each rank writes it while training goes on.

`save_checkpoint` copies the state first, so that training may change the original. Then each rank begins a thread. If
the checkpoint is sharded, the threads of all ranks write the shards together, with collectives in a process group of
their own. After that the thread of rank 0 writes the file of the checkpoint.

An error in a thread cannot be raised at once, because the main thread is in the user's code. `finish_saving` raises the
error on all ranks, and the next `save_checkpoint` or `load_checkpoint` calls this function. If the program ends without
such a call, the error is logged.

If a rank fails in a block while the threads run, all ranks raise the failure and close their process groups. The
threads can then no longer write the shards, and the checkpoint is given up: the previous checkpoint stays at its path,
and the next `save_checkpoint` or `load_checkpoint` only logs a warning.
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
from .._engine.ranks.run_on_ranks import on_rank_0
from ..errors import ParallelError
from ._shards import Shards, write_shards

logger = logging.getLogger("nn_parallel")


class Saving(NamedTuple):
    """A checkpoint that is being written."""

    # The future of the thread that writes on this rank. It is done when the thread has ended, in one of three ways:
    # - The result is None: the thread has written everything.
    # - The result is an error: writing failed, but no other rank waits in a collective. `finish_saving` raises this
    #   error on all ranks, and the process groups stay open.
    # - The future has an exception: writing failed, and other ranks may wait for this rank in a collective, or the
    #   process groups were closed. In the first case `finish_saving` raises the exception in a block, which frees the
    #   other ranks. In the second case the checkpoint is given up, and `finish_saving` logs a warning.
    end: Future[Exception | None]
    group: dist.ProcessGroup | None  # the default group when saving began; None if there are no shards
    writes_file: bool  # True on rank 0, which writes the file of the checkpoint and logs failures at exit

    @property
    def is_given_up(self) -> bool:
        """Return whether the process groups were closed since saving began, so that no more shards can be written."""
        return self.group is not None and self.group is not dist.group.WORLD


def save_in_background(
    shards: Shards, folder: Path | None, write_file: Callable[[], None] | None, until_written: contextlib.ExitStack
) -> None:
    """Begin to write a checkpoint in a thread. All ranks call this function.

    The next `finish_saving` waits until the thread has ended. If this rank leaves its world before that call, it first
    waits for the thread as well.

    Args:
        shards: the sharded tensors. Their present values are written.
        folder: the folder for the shards; None if there are no shards.
        write_file: a function that writes the file of the checkpoint, after all ranks have written their shards. None
            on ranks other than 0.
        until_written: a stack whose callbacks are called when the thread ends, or if the thread cannot begin.
    """
    global _running
    group: dist.ProcessGroup | None = None
    default = None if folder is None else dist.group.WORLD

    def write(until_written: contextlib.ExitStack) -> Exception | None:
        with until_written:
            failure: Exception | None = None
            if folder is not None:
                failure = write_shards(shards, folder, group)
                # If the group is closed during the write, torch writes the shards as if this rank were the only rank.
                if default is not dist.group.WORLD:
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
        until_thread_ends = until_written.pop_all()
        try:
            end = background.start(functools.partial(write, until_thread_ends), "nn_parallel save_checkpoint")
        except BaseException:
            until_thread_ends.close()
            raise
        _running = Saving(end, default, write_file is not None)


def finish_saving(caller: str) -> None:
    """Wait until the checkpoint that is being written, if any, is complete. All ranks call this function.

    Args:
        caller: the name of the public function that the user has called, for error messages.

    Raises:
        OSError: the checkpoint could not be written, and this is the only rank.
        RankError: the checkpoint could not be written, and there are several ranks. Every rank raises this error.
        RankTimeoutError: a rank has not called this function.
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
            elif not is_given_up:
                _running = None
                # Only this rank knows that writing has failed. On the other ranks, the threads that write may wait in
                # collectives for the thread of this rank. The error is raised in the block of `finish_saving`, so all
                # ranks close their process groups, which frees these threads.
                raise error
    _running = None

    def report() -> None:
        if failure is not None:
            raise failure
        if is_given_up:
            logger.warning("The previous checkpoint was not saved, because ranks failed while it was being written.")

    on_rank_0("save_checkpoint()", report)


@atexit.register
def _log_failure_at_exit() -> None:
    """Log the failure of the last checkpoint, if the program ends without a call that raises the failure."""
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


_running: Saving | None = None  # the checkpoint that is being written; None after `finish_saving`
os.register_at_fork(after_in_child=_forget_in_fork)  # the thread does not exist in a forked process
