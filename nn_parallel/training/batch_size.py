"""The largest batch that fits into memory on every rank."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from .._engine.devices import synchronize
from .._engine.failures import summary
from .._engine.ranks.blocks import block
from .._engine.ranks.context import current_world
from .._engine.ranks.records import call_name
from ..ddp import initialize_ddp
from ..errors import RankError

# Torch has an exception of its own only for accelerators, and not for what their libraries allocate.
MARKS = ("can't allocate memory", "not enough memory", "ALLOC_FAILED", "out of memory", "nable to find an engine")
logger = logging.getLogger("nn_parallel")


def find_batch_size(fn: Callable[[int], object], start: int) -> int:
    """Return the first of ``start``, half of it, a quarter, ... with which no rank runs out of memory. All call it.

    Where one rank does, the others leave their collectives, what the failed try has allocated is given back, and all
    ranks try the next size, in a new process group.

    Args:
        fn: makes a training step on the batch size that it is given, that of one rank. What belongs to a process group
            it makes itself, DDP models above all; what it keeps in variables outside stays allocated.
        start: the first size.

    Returns:
        The size, the same on all ranks.

    Raises:
        ValueError: ``start`` is no whole number, or below one.
        MemoryError: on every rank: a batch of one sample does not fit; the message tells what could not be allocated.
        RankError: on every rank, where there are several: ``fn`` raised something else on one. Alone: that itself.

    Example::

        def step(batch_size):
            model = prepare_model(Net())
            model(torch.randn(batch_size, 3, 224, 224, device=current_world().device)).sum().backward()

        loader = DataLoader(dataset, batch_size=find_batch_size(step, start=256))
    """
    if not isinstance(start, int) or start < 1:
        raise ValueError(f"start={start!r} must be a whole number, at least 1.")
    size = start
    while (reason := _why_too_large(fn, size)) is not None:
        if size == 1:
            raise MemoryError(f"{call_name(fn)} does not fit into memory with one sample: {reason}")
        logger.info("A batch of %d does not fit: %s", size, reason)
        size //= 2
    return size


def _why_too_large(fn: Callable[[int], object], size: int) -> str | None:
    """Return None, if it is not; what the try has allocated is given back.

    No more than text leaves this: an exception keeps what its frames have allocated.
    """
    try:
        return _try(fn, size)
    finally:
        gc.collect()
        if current_world().device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def _try(fn: Callable[[int], object], size: int) -> str | None:
    world = initialize_ddp()
    try:
        with block(f"find_batch_size() with {size}"):
            fn(size)
            synchronize(world.device)  # of its kernels' failures some come only now
    except RankError as error:
        if not _is_out_of_memory(error.failures[error.rank]):
            raise
        return f"on rank {error.rank} of {world.world_size}, {summary(error.failures[error.rank])}"
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return summary(error)
    return None


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in MARKS)
    return isinstance(error, MemoryError)
