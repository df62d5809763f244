"""`initialize_ddp` and `cleanup_ddp`: from a launch to a store, from the store to a process group, and back."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import numbers
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from ...errors import LaunchError
from ...world import World
from ..devices import named_device, resolve_device
from .blocks import blocks_of
from .context import DEFAULT_TIMEOUT, RankContext, current_world, join, rank_context, world_of
from .environment import Launch, detect_launch, with_arguments
from .platforms import started_with_others
from .rendezvous import join_launch
from .uncaught import share_uncaught

TAKEN = "NN_PARALLEL_TAKEN"  # tells child processes who has taken the place that the launcher's variables describe
EXIT_WITHIN_S = 60.0  # for what is under way on accelerators to end
logger = logging.getLogger("nn_parallel")


def initialize_ddp(
    timeout: timedelta | float | None = None,
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    fallback: bool = False,
) -> World:
    """Join the ranks that were started together, and connect them by a process group.

    Works however this process was started: by torchrun, ``srun``, ``mpirun`` (Open MPI, MPICH, Intel MPI, MVAPICH2) or
    ``jsrun``; with the ``env://`` variables or explicit arguments; as a rank of `ParallelExecutor.run`; or alone, where
    it makes no group and returns the world of one rank. Call it as often as you like: it returns the same world, and
    makes the group again after a failure has closed it. A process that a rank starts with its own variables, as the
    workers of a `DataLoader` are, gets the world of that rank and joins nothing.

    Args:
        timeout: seconds (or a timedelta) for the ranks to find each other and for each collective; 60 minutes if None.
        backend: of torch.distributed. If None: ``"gloo"`` on CPU, gloo for CPU tensors and the accelerator's own
            backend for its tensors otherwise.
        device: of this rank. If None or ``"cuda"``: the accelerator of the local rank, or the CPU where there is none;
            no two ranks then get the same one. With a number they may share one: NCCL refuses that, so all collectives
            then go by gloo, unless ``backend`` says otherwise. It becomes the current device.
        rank: of this process; it wins over the environment, as the next four do.
        world_size: how many ranks there are.
        local_rank: of this process among those of its node.
        master_addr: the host of rank 0.
        master_port: the port where rank 0 listens.
        fallback: where the environment is broken, warn and go on alone instead of raising.

    Returns:
        `World`, which unpacks as ``distributed, rank, local_rank, world_size, device``.

    Raises:
        LaunchError: the environment is half set or contradicts itself, the port is in use, a rank did not come within
            ``timeout``, or there are fewer accelerators than ranks. The message says what to set.

    Example::

        distributed, rank, local_rank, world_size, device = initialize_ddp()
        model = MyModel().to(device)
        if distributed:
            model = DistributedDataParallel(model)
    """
    limit_s, context = as_seconds(timeout), rank_context()
    limit = None if limit_s is None else timedelta(seconds=limit_s)
    try:
        if context is None:
            environ = with_arguments(
                os.environ,
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                master_addr=master_addr,
                master_port=master_port,
            )
            launch = detect_launch(environ)
            if launch is None:
                _warn_of_others()
                return current_world() if device is None else _alone(device)
            if _is_started_by_rank(launch):
                return world_of(launch, named_device(device))
            context = join_launch(launch, named_device(device), limit or DEFAULT_TIMEOUT)
            join(context)
            share_uncaught(context)
            os.environ[TAKEN] = f"{os.getpid()} {_place(launch)}"
            atexit.register(_leave_at_exit)
            world, told_by = context.world, ", ".join(launch.told_by)
            place = world.rank, world.world_size, world.device
            logger.info("Rank %d of %d on %s, started by %s (%s).", *place, world.launcher, told_by)
        elif context.world.launcher == "none" and device is not None:
            return _alone(device)
        if context.group.cannot_end:
            raise LaunchError("The process group before could not be ended, on the accelerator: start a new process.")
        if context.open_store is not None and not dist.is_initialized():
            context.group.make(context.store, backend, limit or context.timeout)
        if here := blocks_of(context):
            here.watch()
    except LaunchError as error:
        if not fallback:
            raise
        cleanup_ddp()
        warnings.warn(f"Running alone, not distributed. {error}", stacklevel=2)
        return _alone(device or "cpu")
    return context.current()


def cleanup_ddp() -> None:
    """Leave the world that `initialize_ddp` joined and close its process group. Harmless when there is none.

    Runs by itself at the end of the program. Inside `ParallelExecutor.run` it closes the group; the rank stays a rank.
    """
    _leave(abort=sys.exc_info()[1] is not None)  # then what is under way may never end


def _leave_at_exit() -> None:
    """Leave the world at the end of the program."""
    context = rank_context()
    _leave(abort=context is not None and context.ends_by_exception, within_s=EXIT_WITHIN_S)


def _leave(*, abort: bool, within_s: float = math.inf) -> None:
    context = rank_context()
    if context is None or context.is_inherited or context.world.launcher == "external":
        return
    if context.world.launcher == "executor":
        context.group.close(abort=abort, within_s=within_s)
    else:
        context.leave(abort=abort, within_s=within_s)
        join(None)
        os.environ.pop(TAKEN, None)


def _alone(device: torch.device | str) -> World:
    """The world of one rank from now on, with this device."""
    world = World(False, 0, 0, 1, resolve_device(device))
    if named_device(device) is not None and world.device.index is not None:
        torch.accelerator.set_device_index(world.device.index)
    join(RankContext(world))
    return world


@functools.cache
def _warn_of_others() -> None:
    """Once: this process takes itself for the only rank, and something says that it is not."""
    if told := started_with_others(os.environ):
        logger.warning("Running alone, as rank 0 of 1, though %s", told)


def _is_started_by_rank(launch: Launch) -> bool:
    """Whether this process is no rank, but has inherited the variables of the rank that started it."""
    pid, _, place = os.environ.get(TAKEN, "").partition(" ")
    return get_worker_info() is not None or (place == _place(launch) and pid != str(os.getpid()))


def _place(launch: Launch) -> str:
    return f"{launch.rank}/{launch.world_size} {launch.master_addr}:{launch.master_port}"


def join_launched_world() -> RankContext | None:
    """The place of this process among other ranks, or None if it is alone.

    It is taken now if a launcher started this process and `initialize_ddp` has not been called.
    Without this, every rank of a script that forgot to call it would take itself for rank 0 and write the checkpoint.
    """
    context = rank_context()
    launch = detect_launch(os.environ) if context is None else None
    if context is None and launch is None:
        _warn_of_others()
    if launch is not None and not _is_started_by_rank(launch):
        world = initialize_ddp()
        logger.info("initialize_ddp() was called for you: rank %d of %d (%s).", *world[1:4:2], world.launcher)
        context = rank_context()
    return None if context is None or context.open_store is None or context.is_inherited else context


def should_use_distributed(flag: bool | None = None) -> bool:
    """Whether to train distributed.

    Args:
        flag: False: no. None: what the environment says, yes if several ranks were started together. True: yes if it is
            possible at all, also with a single launched rank; if it is not, a warning says so.

    Example::

        >>> should_use_distributed(False)
        False
    """
    if flag is False:
        return False
    world = current_world()
    if flag is None:
        return world.world_size > 1
    possible = world.launcher != "none"
    if not possible:
        warnings.warn("No launcher started this process, so it runs alone: start it with torchrun.", stacklevel=2)
    return possible


def as_seconds(timeout: timedelta | float | None) -> float | None:
    """Seconds or a timedelta, as seconds.

    Raises:
        TypeError: it is neither. ValueError: it is not above zero.
    """
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if limit_s is not None and not isinstance(limit_s, numbers.Real):
        raise TypeError(f"timeout={timeout!r} must be a number of seconds, or a timedelta.")
    if limit_s is not None and limit_s <= 0:
        raise ValueError(f"timeout={timeout} must be above zero.")
    return limit_s
