"""The store of a pool's ranks."""

from __future__ import annotations

from nn_parallel import (
    ParallelExecutor,
    initialize_ddp,
)


def test_pools_listen_on_the_loopback_only(own_executor2: ParallelExecutor) -> None:
    """The store that the parent holds is not reachable from outside."""
    from tests.api.test_ddp import _listening_addresses

    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    own_executor2.run(initialize_ddp)
    for addresses in [_listening_addresses(), *own_executor2.run(_listening_addresses)]:
        assert addresses
        assert loopback.issuperset(addresses)


def test_no_port_is_taken_before_it_is_needed() -> None:
    """A pool that never runs ranks together opens no port."""
    from tests.api.test_ddp import _listening_addresses

    before = _listening_addresses()
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.submit(abs, -1).result() == 1
        assert _listening_addresses() == before
