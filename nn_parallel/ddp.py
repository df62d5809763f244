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
    """Join the ranks that were started together, and connect them through a process group.

    The function works for every way in which this process may have been started:

    - by torchrun, ``srun`` or ``mpirun`` (Open MPI, MPICH, Intel MPI);
    - with the ``env://`` variables, or with explicit arguments;
    - as a rank of `ParallelExecutor.run`;
    - alone: the function then makes no process group and returns a world of one rank.

    The function may be called any number of times and returns the same world each time. If a failure has closed the
    process group, the next call makes the group again. A child process that has inherited the environment variables of
    a rank, such as a worker of a `DataLoader`, gets the world of this rank, but does not join it.

    Args:
        timeout: how long the ranks wait for each other to join, and how long each collective may take, in seconds or as
            a timedelta; 60 minutes if None.
        backend: the backend of torch.distributed. If None, gloo is used for CPU tensors, and the accelerator's own
            backend for tensors on an accelerator.
        device: the device of this rank, which becomes the current device. If ``device`` is None, or has no number as in
            ``"cuda"``, the rank gets the accelerator of its local rank, or the CPU if there is no accelerator. No two
            ranks then get the same accelerator. With a number, as in ``"cuda:0"``, ranks may share an accelerator.
            Because NCCL refuses this, all collectives then use gloo, unless ``backend`` is given.
        rank: the rank of this process. This argument and the next four take precedence over the environment.
        world_size: the number of ranks.
        local_rank: the number of this process among the ranks of its node.
        master_addr: the host of rank 0.
        master_port: the port on which rank 0 listens.
        fallback: if True, warn and go on alone instead of raising `LaunchError`.

    Returns:
        The `World`, which unpacks as ``distributed, rank, local_rank, world_size, device``.

    Raises:
        LaunchError: the environment is incomplete or contradicts itself, the port is in use, a rank did not join within
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
    """Leave the world that `initialize_ddp` joined, and close its process group. If there is no world, do nothing.

    The function is called automatically at the end of the program. Inside `ParallelExecutor.run` it closes only the
    process group, and the process remains a rank.
    """
    membership.clean_up()


def current_world() -> World:
    """Return the world that this process is in now.

    The function does not join a world, and does not communicate with other processes. If a launcher started this
    process and `initialize_ddp` has not been called yet, the world holds the values that the launcher has set, and its
    ``distributed`` is False.

    Raises:
        LaunchError: the launch environment is incomplete or contradicts itself.

    Example::

        >>> current_world().is_main
        True
    """
    return context.current_world()


def should_use_distributed(flag: bool | None = None) -> bool:
    """Return whether this process should train as one of several ranks.

    Args:
        flag: if False, return False. If None, return True if several ranks were started together. If True, return True
            if a launcher started this process, even as the only rank; if no launcher did, warn and return False.

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
