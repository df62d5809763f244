"""The process group: its backend, its addresses, its end."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nn_parallel import initialize_ddp
from nn_parallel._engine.ranks import nccl
from nn_parallel._engine.ranks.context import RankContext, world_of
from nn_parallel._engine.ranks.environment import detect_launch
from nn_parallel._engine.ranks.group import Group
from nn_parallel._engine.ranks.liveness import shared_accelerator
from nn_parallel._engine.ranks.rendezvous import join_launch
from tests.support.processes import listening_addresses
from tests.support.ranks import launched


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 3])
def test_ranks_that_share_a_gpu_talk_by_gloo(gpus: int) -> None:
    """NCCL would refuse it: rank 0 says so, in one line. With a GPU for each rank they talk by NCCL.

    The GPUs are made up, behind `hardware_id`: this machine may have none. The choice is made before torch is asked.
    """

    def body() -> tuple[str, str]:
        rank = int(os.environ["RANK"])
        context = join_launch(detect_launch(os.environ), None, timedelta(seconds=20))
        world = world_of(detect_launch(os.environ), torch.device("cuda", rank))
        with mock.patch("nn_parallel._engine.ranks.context.hardware_id", return_value=f"0000:00:0{rank % gpus}"):
            on_gpu = RankContext(world, lambda: dist.PrefixStore("on GPUs", context.store))
            shared = shared_accelerator(on_gpu)
        group = Group(world, None)
        with (
            mock.patch("torch.distributed.init_process_group", side_effect=ValueError("no GPU")) as init,
            mock.patch("nn_parallel._engine.ranks.group.logger.warning") as warn,
            contextlib.suppress(ValueError),
        ):
            group.make(context.store, None, timedelta(seconds=20), shared)
        settings = {name: os.environ.get(name) for name in nccl.SETTINGS}
        group.release()
        context.leave()
        assert settings == nccl.SETTINGS
        assert not nccl.SETTINGS.keys() & os.environ.keys()
        return init.call_args.args[0], str(warn.call_args and warn.call_args.args[1])

    with launched(3) as ranks:
        (backend, told), *others = ranks.run(body)
        assert others == [(backend, "None")] * 2
        if gpus == 2:
            assert (backend, told) == ("gloo", "Ranks 0, 2 share the accelerator at 0000:00:00")
        else:
            assert (backend, told) == ("cpu:gloo,cuda:nccl", "None")


@pytest.mark.slow
@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": socket.gethostname(), "GROUP_WORLD_SIZE": "1"}])
def test_groups_of_one_node_listen_on_the_loopback_only(environ: dict[str, str]) -> None:
    """The store and gloo of ranks on one node, whatever its name: no socket of ours listens outside the loopback."""

    def scenario() -> list[str]:
        initialize_ddp()
        return listening_addresses()

    with launched(2, **environ) as ranks:
        for addresses in ranks.run(scenario):
            assert addresses
            assert all(address in ("0100007F", "0000000000000000FFFF00000100007F") for address in addresses)
