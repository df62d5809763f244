"""The store of a pool's ranks."""

from __future__ import annotations

from nn_parallel import (
    ParallelExecutor,
    initialize_ddp,
)
from tests.support.processes import listening_addresses


def test_pools_listen_on_the_loopback_only(own_executor2: ParallelExecutor) -> None:
    """The store that the parent holds is not reachable from outside."""

    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    own_executor2.run(initialize_ddp)
    for addresses in [listening_addresses(), *own_executor2.run(listening_addresses)]:
        assert addresses
        assert loopback.issuperset(addresses)


def test_no_port_is_taken_before_it_is_needed() -> None:
    """A pool that never runs ranks together opens no port."""

    before = listening_addresses()
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.submit(abs, -1).result() == 1
        assert listening_addresses() == before
