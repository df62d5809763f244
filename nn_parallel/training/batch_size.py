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

# A RuntimeError reports a lack of memory if its message contains one of these texts. Torch raises its own
# OutOfMemoryError only for accelerators, and not for the memory that libraries such as cuDNN allocate on them.
MARKS = ("can't allocate memory", "not enough memory", "ALLOC_FAILED", "out of memory", "nable to find an engine")
logger = logging.getLogger("nn_parallel")


def find_batch_size(fn: Callable[[int], object], start: int) -> int:
    """Find a batch size with which no rank runs out of memory. Every rank calls this function.

    The function tries ``start``, then half of it, then a quarter, and so on. If one rank runs out of memory, the other
    ranks are freed from their collectives, the memory of the failed try is released, and all ranks try the next size in
    a new process group.

    Args:
        fn: a function that runs one training step. Its argument is the batch size of one rank. ``fn`` itself must make
            everything that depends on a process group, above all DDP models, because each try may have a new group.
            Objects that ``fn`` stores in variables outside of ``fn`` stay allocated.
        start: the first size to try.

    Returns:
        The batch size of one rank, the same on all ranks.

    Raises:
        ValueError: ``start`` is not a whole number, or is less than 1.
        MemoryError: on every rank: a batch of one sample does not fit. The message says what could not be allocated.
        RankError: one of several ranks failed in ``fn``, and not because its memory was full. Every rank raises this
            error. In a world of one rank, the exception of ``fn`` itself is raised.

    Example::

        def step(batch_size):
            model = prepare_model(Net())
            model(torch.randn(batch_size, 3, 224, 224, device=current_world().device)).sum().backward()

        loader = DataLoader(dataset, batch_size=find_batch_size(step, start=256))
    """
    if not isinstance(start, int) or start < 1:
        raise ValueError(f"start={start!r} must be a whole number of at least 1.")
    size = start
    while (reason := _why_too_large(fn, size)) is not None:
        if size == 1:
            raise MemoryError(f"{call_name(fn)} does not fit into memory with one sample: {reason}")
        logger.info("A batch of %d does not fit: %s", size, reason)
        size //= 2
    return size


def _why_too_large(fn: Callable[[int], object], size: int) -> str | None:
    """Try one step. Return the reason why ``size`` is too large, or None if the step fits into memory.

    The reason is a string and not an exception, because an exception keeps its frames alive, and with them the memory
    of the step. This function releases the memory before it returns.
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
            synchronize(world.device)  # some failures of kernels are raised only now
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
