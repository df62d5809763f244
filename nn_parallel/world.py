"""Who am I among the ranks that work together?

There are four ways to be in a world: a launcher started this process and `initialize_ddp` read it; this is a rank of
`ParallelExecutor.run`; some other code has initialised torch.distributed; or alone, as rank 0 of 1. The first two
*join* a `RankContext`; the last two are seen each time from the state of torch.distributed.
"""

from __future__ import annotations

import contextlib
import itertools
import os

import torch
import torch.distributed as dist

from .devices import accelerators
from .errors import LaunchError
from .launch.context import RankContext, World, world_of
from .launch.environment import detect_launch


def current_world() -> World:
    """Who this process is now.

    Asks and starts nothing: in a process that a launcher started, before `initialize_ddp`, it tells what the launcher
    said, with ``distributed`` False.

    Raises:
        LaunchError: the launch environment is half set.

    Example::

        >>> current_world().is_main
        True
    """
    if context := rank_context():
        return context.current()
    if launch := detect_launch(os.environ):
        return world_of(launch)
    return World(False, 0, 0, 1, _current_device())


def rank_context() -> RankContext | None:
    """What this process has joined, or the process group that other code has made, or None."""
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        return _external_context()
    return _external if _external is not None and _external.group is None else None  # closed by us


def join(context: RankContext | None) -> None:
    """Enter a world in the place of the present one; None leaves it. The caller closes what belonged to the old one."""
    global _joined
    _joined = context


def _external_context() -> RankContext:
    """The rank context of the default group that other code made, the same one until other code makes another group."""
    global _external
    if _external is None or _external.group is not dist.group.WORLD:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank, node_rank, local_world_size, one_node = rank, 0, world_size, False
        with contextlib.suppress(LaunchError):  # other code may have its own ways to find what it needs
            launch = detect_launch(os.environ)
            if launch is not None and (launch.rank, launch.world_size) == (rank, world_size):
                local_rank, node_rank, local_world_size = launch.local_rank, launch.node_rank, launch.local_world_size
                one_node = launch.one_node
        device = _current_device()
        world = World(True, rank, local_rank, world_size, device, node_rank, local_world_size, "external")
        # torch offers no public way to the store of a group; without it ranks cannot talk beside the collectives.
        store = dist.distributed_c10d._get_default_store()
        if _external is not None:
            _external.on_leave.close()
        # The store may outlive the group: what was told in the life of an earlier one is under another prefix.
        _external = RankContext(
            world,
            lambda: dist.PrefixStore(f"nn_parallel/{next(_externals)}", store),
            one_node=one_node,
            group=dist.group.WORLD,
        )
    return _external


def _current_device() -> torch.device:
    found = accelerators()
    return found[torch.accelerator.current_device_index()] if found else torch.device("cpu")


_joined: RankContext | None = None
_external: RankContext | None = None
_externals = itertools.count(1)  # counted on first use, which is a call that all ranks make
