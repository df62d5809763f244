"""The membership of this process in a world.

`initialize` reads rank and world size from the launcher's environment variables, connects to the store, waits until the
other ranks have connected too, and makes the process group. `clean_up` closes the group and leaves the world.
"""

from __future__ import annotations

import atexit
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
from .. import background
from ..devices import existing_device, named_device
from ..interrupts import hide_dropped_interrupts
from ..tracebacks import hide_own_frames
from . import times
from .blocks import block, blocks_of
from .context import RankContext, current_world, join, rank_context, world_of
from .environment import Launch, detect_launch, with_arguments
from .liveness import shared_accelerator
from .rendezvous import as_launch_error, join_launch
from .uncaught import share_uncaught

# The environment variable that a process sets when it joins the world of its launcher. A child process inherits this
# variable together with the launcher's variables, and recognizes from it that another process is already the rank.
TAKEN = "NN_PARALLEL_TAKEN"
logger = logging.getLogger("nn_parallel")


def initialize(
    timeout_s: float | None = None,
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
    """Join the ranks that were started together. This is the body of `nn_parallel.initialize_ddp`."""
    # `hide_own_frames` and `share_uncaught` each install an excepthook. The hook of `share_uncaught` is removed when
    # this rank leaves the world, and only the hook that was installed last can be removed. Therefore the hook of
    # `hide_own_frames`, which stays until the process ends, is installed first.
    hide_own_frames()
    hide_dropped_interrupts()
    context = rank_context()
    limit = None if timeout_s is None else timedelta(seconds=timeout_s)
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
                return current_world() if device is None else _alone(device)
            if _is_started_by_rank(launch):
                return world_of(launch, named_device(device))
            context = join_launch(launch, named_device(device), limit or times.DEFAULT_TIMEOUT)
            join(context)
            share_uncaught(context)
            os.environ[TAKEN] = f"{os.getpid()} {_place(launch)}"
            atexit.register(_leave_at_exit)
            world = context.world
            place = world.rank, world.world_size, world.device
            variables = ", ".join(launch.told_by)
            logger.info("Rank %d of %d on %s, started by %s (%s).", *place, world.launcher, variables)
        elif context.world.launcher == "none" and device is not None:
            return _alone(device)
        if context.group.cannot_end:
            raise LaunchError(
                "The previous process group could not be ended, because its work on the accelerator hangs. Start a new "
                "process."
            )
        if context.open_store is not None and not dist.is_initialized():
            _make_group(context, backend, limit or context.timeout)
        if blocks := blocks_of(context):
            blocks.watch()
    except LaunchError as error:
        if not fallback:
            raise
        clean_up()
        warnings.warn(f"Running alone, not distributed. {error}", stacklevel=3)
        return _alone(device or "cpu")
    return context.current()


def _make_group(context: RankContext, backend: str | None, timeout: timedelta) -> None:
    """Make the process group in a block of all ranks, so that all ranks raise the error if one of them fails."""
    name = "initialize_ddp()"
    with as_launch_error(name, context.world_size, timeout), block(name, timeout.total_seconds()):
        context.group.make(context.store, backend, timeout, shared_accelerator(context))


def clean_up() -> None:
    """Leave the world that `initialize` joined. This is the body of `nn_parallel.cleanup_ddp`."""
    # If an exception is being handled, this rank may have begun a collective on the accelerator that another rank never
    # enters. Such a collective never ends, so that it must be aborted.
    _leave(abort=sys.exc_info()[1] is not None)


def _leave_at_exit() -> None:
    """Leave the world at the end of the program."""
    context = rank_context()
    _leave(abort=context is not None and context.ends_by_exception, within_s=times.EXIT_WITHIN_S)


def _leave(*, abort: bool, within_s: float = math.inf) -> None:
    """Close the process group, and leave the world. A worker of a pool only closes the group, and stays in the world.

    A process group that other code has made stays open. A process that was forked by a rank does nothing.

    Args:
        abort: if true, abort the collectives that run on the accelerator instead of waiting for their end.
        within_s: how long to wait for the end of these collectives, if ``abort`` is false.
    """
    if not abort:
        background.finish()  # background work, such as the writing of a checkpoint, may need the process group
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
    """Make this process the only rank of a world, on ``device``, and return the world."""
    world = World(False, 0, 0, 1, existing_device(device))
    if named_device(device) is not None and world.device.index is not None:
        torch.accelerator.set_device_index(world.device.index)
    join(RankContext(world))
    return world


def _is_started_by_rank(launch: Launch) -> bool:
    """Return whether a rank has started this process.

    The process has then inherited the rank's environment variables, but is not a rank itself. A worker process of a
    `DataLoader` is recognized through torch's `get_worker_info`, any other child process through the variable `TAKEN`.
    """
    pid, _, place = os.environ.get(TAKEN, "").partition(" ")
    return get_worker_info() is not None or (place == _place(launch) and pid != str(os.getpid()))


def _place(launch: Launch) -> str:
    """Return a string that identifies a rank of a launch.

    A process that has joined as this rank puts the string into the environment variable `TAKEN`. Its child processes
    inherit the variable, and therefore do not join as the same rank.
    """
    return f"{launch.rank}/{launch.world_size} {launch.master_addr}:{launch.master_port}"


def join_launched_world() -> RankContext | None:
    """Return the context of this process among other ranks, or None if this process is alone.

    If a launcher started this process and `initialize_ddp` has not been called yet, this function joins the world,
    because a script may use `on_rank` without calling `initialize_ddp`. If such a script did not join the world, every
    rank would act as rank 0, and, for instance, all ranks would write the checkpoint.
    """
    context = rank_context()
    launch = detect_launch(os.environ) if context is None else None
    if launch is not None and not _is_started_by_rank(launch):
        world = initialize()
        logger.info("initialize_ddp() was called for you: rank %d of %d (%s).", *world[1:4:2], world.launcher)
        context = rank_context()
    return None if context is None or context.open_store is None or context.is_inherited else context


def as_seconds(timeout: timedelta | float | None) -> float | None:
    """Return a ``timeout`` in seconds; None means no limit.

    Raises:
        TypeError: ``timeout`` is neither a number nor a timedelta.
        ValueError: ``timeout`` is zero or negative.
    """
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if limit_s is not None and not isinstance(limit_s, numbers.Real):
        raise TypeError(f"timeout={timeout!r} must be a number of seconds, or a timedelta.")
    if limit_s is not None and limit_s <= 0:
        raise ValueError(f"timeout={timeout} must be above zero.")
    return limit_s
