"""`World`: a tuple of five with properties."""

from __future__ import annotations

import torch

from nn_parallel import (
    World,
)

CPU = torch.device("cpu")


def test_the_world_reads_as_one() -> None:
    """World is a tuple of five with properties, and survives copy and pickle."""
    import copy
    import pickle

    world = World(True, 3, 1, 4, CPU, node_rank=1, local_world_size=2, launcher="torchrun")
    for other in (copy.copy(world), pickle.loads(pickle.dumps(world))):
        assert other == world
        assert (other.node_rank, other.local_world_size, other.launcher) == (1, 2, "torchrun")
    assert not world.is_main
