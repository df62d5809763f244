"""`World`: the ranks that work together, and the position of this process among them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class _WorldTuple(NamedTuple):
    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


class World(_WorldTuple):
    """The ranks that work together, and the position of this process among them.

    A world unpacks as ``distributed, rank, local_rank, world_size, device``.

    Attributes:
        distributed: True if a process group connects the ranks, so that collectives can be called.
        rank: the number of this process, 0 to ``world_size - 1``.
        local_rank: the number of this process among the ranks of its node.
        world_size: the number of ranks that work together.
        device: the device of this rank.
        node_rank: the number of this node.
        local_world_size: the number of ranks on this node.
        launcher: ``"torchrun"``, ``"env"`` (variables or arguments set by hand), ``"slurm"``, ``"openmpi"``,
            ``"hydra"`` (MPICH, Intel MPI), ``"executor"``, ``"external"`` (other code has initialised
            torch.distributed) or ``"none"``.

    Example::

        >>> from nn_parallel import current_world
        >>> distributed, rank, local_rank, world_size, device = current_world()
        >>> rank, world_size
        (0, 1)
    """

    node_rank: int
    local_world_size: int
    launcher: str

    def __new__(
        cls,
        distributed: bool,
        rank: int,
        local_rank: int,
        world_size: int,
        device: torch.device,
        node_rank: int = 0,
        local_world_size: int = 1,
        launcher: str = "none",
    ) -> World:
        """Make a world. The parameters are the attributes of the class."""
        self = super().__new__(cls, distributed, rank, local_rank, world_size, device)
        self.node_rank = node_rank
        self.local_world_size = local_world_size
        self.launcher = launcher
        return self

    @property
    def is_main(self) -> bool:
        """True on rank 0, which by convention logs and writes files."""
        return self.rank == 0
