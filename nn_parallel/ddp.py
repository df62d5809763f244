"""The world of this process: `initialize_ddp`, `cleanup_ddp`, `current_world`, `should_use_distributed`."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch

from ._engine.ranks import context, membership
from .world import World


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

    Works however this process was started: by torchrun, ``srun`` or ``mpirun`` (Open MPI, MPICH, Intel MPI); with the
    ``env://`` variables or explicit arguments; as a rank of `ParallelExecutor.run`; or alone, where it makes no group
    and returns the world of one rank. Call it as often as you like: it returns the same world, and makes the group
    again after a failure has closed it. A process that a rank starts with its own variables, as the workers of a
    `DataLoader` are, gets the world of that rank and joins nothing.

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
    return membership.initialize(
        membership.as_seconds(timeout),
        backend=backend,
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_addr=master_addr,
        master_port=master_port,
        fallback=fallback,
    )


def cleanup_ddp() -> None:
    """Leave the world that `initialize_ddp` joined and close its process group. Harmless when there is none.

    Runs by itself at the end of the program. Inside `ParallelExecutor.run` it closes the group; the rank stays a rank.
    """
    membership.clean_up()


def current_world() -> World:
    """Return who this process is now.

    Asks and starts nothing: in a process that a launcher started, before `initialize_ddp`, it tells what the launcher
    said, with ``distributed`` False.

    Raises:
        LaunchError: the launch environment is half set.

    Example::

        >>> current_world().is_main
        True
    """
    return context.current_world()


def should_use_distributed(flag: bool | None = None) -> bool:
    """Return whether to train distributed.

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
