"""The collectives that a process has entered, as torch's flight recorder has them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from nn_parallel import initialize_ddp
from nn_parallel._engine.ranks.flight_recorder import collectives, entered, next_group_id
from tests.support.ranks import AnyRanks


def test_the_collectives_of_a_group_are_counted(any_ranks: AnyRanks) -> None:
    """In order, and only those of groups that are as young as asked for."""

    def record() -> tuple[list[int], int]:
        world = initialize_ddp()
        number, group = torch.ones(1), dist.new_group(list(range(world.world_size)))
        dist.all_reduce(number, group=group)  # its first one makes the group known to the recorder
        own = next_group_id() - 1
        dist.broadcast(number, 0, group=group)
        dist.all_reduce(number, group=group)
        mine = [each for each in collectives(own) if each.group == group.group_name]
        counted, later = entered(mine)[group.group_name], collectives(next_group_id())
        assert [each.number for each in mine] == sorted(each.number for each in mine)
        assert later == []
        return [each.number for each in mine], counted

    for numbers, counted in any_ranks.run(record):
        assert numbers[-3:] == [counted - 2, counted - 1, counted]
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ  # else it records fewer
