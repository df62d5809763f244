"""The links to rank 0 that tell of deaths on other nodes: here between parts of one process, by real connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from nn_parallel._engine.ranks.context import RankContext
from nn_parallel._engine.ranks.links import HELLO, Links
from nn_parallel._engine.ranks.liveness import Liveness
from nn_parallel._engine.ranks.store import (
    ENDED,
    LOST_KEY,
    OUT_OF_REACH,
    RESET,
    Lost,
    Member,
    StoreClient,
    encode,
    member_key,
)
from nn_parallel.world import World

HOST = "127.0.0.1"
WITHIN_S = 10.0


class Ranks:
    """The links of rank 0, and of those that have connected to it."""

    def __init__(self) -> None:
        self._all: list[Links] = [Links(60.0)]
        self.zero.listen()

    @property
    def zero(self) -> Links:
        return self._all[0]

    def join(self, rank: int) -> Links:
        links = Links(60.0)
        self._all.append(links)
        links.connect(rank, HOST, self.zero.port)
        return links

    def close(self) -> None:
        for links in self._all:
            links.close()


def _look(links: Links) -> dict[int, str]:
    """Call ``look()``, and return the ranks that ``links`` then knows to be lost."""
    links.look()
    return links.lost


def _lost(links: Links) -> dict[int, str]:
    """Which ranks are gone, as ``links`` tell, once one is."""
    deadline = time.monotonic() + WITHIN_S
    while not _look(links) and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks
    return links.lost


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    all_ranks = Ranks()
    yield all_ranks
    all_ranks.close()


@pytest.mark.parametrize("is_known", [False, True], ids=["before it was seen", "known"])
def test_rank_0_tells_whom_it_has_lost(ranks: Ranks, is_known: bool) -> None:
    """The end of a rank's connection is known of that rank alone, also if it comes as soon as the connection."""
    one, two = ranks.join(1), ranks.join(2)
    if is_known:
        for _ in range(10):
            assert not _look(ranks.zero)
    one.close()
    assert _lost(ranks.zero) == {1: ENDED}
    assert not _look(two)


def test_the_others_see_the_end_of_rank_0(ranks: Ranks) -> None:
    """It is their own connection that ends."""
    one = ranks.join(1)
    for _ in range(2):
        assert not _look(ranks.zero)
    assert not _look(one)
    ranks.zero.close()
    assert _lost(one) == {0: ENDED}


@pytest.mark.parametrize("hello", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"\x80\x04N."])
def test_what_others_connect_disturbs_nobody(hello: bytes, ranks: Ranks) -> None:
    """A stranger is hung up on, and no rank that there is counts as gone."""
    one = ranks.join(1)
    with socket.create_connection((HOST, ranks.zero.port), WITHIN_S) as stranger, contextlib.suppress(OSError):
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        stranger.setblocking(False)
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            ranks.zero.look()
            with contextlib.suppress(BlockingIOError):
                assert stranger.recv(1) == b""  # it is closed over there
                break
    one.close()
    assert {rank: how for rank, how in _lost(ranks.zero).items() if rank < 1000} == {1: ENDED}


def test_many_connect_at_once(ranks: Ranks) -> None:
    """One look takes all of them."""
    for rank in range(1, 200):
        ranks.join(rank)
    assert not _look(ranks.zero)
    before = len(os.listdir("/proc/self/fd"))
    assert not _look(ranks.zero)
    assert len(os.listdir("/proc/self/fd")) == before
    ranks.join(200).close()
    assert _lost(ranks.zero) == {200: ENDED}


def test_a_connection_that_is_reset_is_told_as_that(ranks: Ranks) -> None:
    """As by a firewall: nothing is said of its node."""
    with socket.create_connection((HOST, ranks.zero.port)) as link:
        link.sendall(HELLO.pack(2))
        for _ in range(2):
            assert not _look(ranks.zero)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert _lost(ranks.zero) == {2: RESET}


def test_nobody_listens(ranks: Ranks) -> None:
    """Rank 0 has a firewall, or could not listen."""
    port = ranks.zero.port
    ranks.zero.close()
    for closed in (port, 0):
        with pytest.raises(OSError, match="refused"):
            Links(1.0).connect(1, HOST, closed)


def test_who_is_lost_is_asked_for_all_ranks_at_once() -> None:
    """What a waiting rank asks of the store, which has one thread, does not grow with the number of ranks."""
    store, asked = dist.HashStore(), Counter[str]()
    for rank in range(64):
        store.set(member_key(rank), encode(Member("another one", "", 1, 0, 1)))
    store.set(LOST_KEY, encode(Lost({7: ENDED, 63: OUT_OF_REACH})))
    world = World(False, 1, 1, 64, torch.device("cpu"))
    connection = StoreClient(store, 1, 64, None)
    context = RankContext(world, lambda: store, one_node=False, links=Links(60.0))
    liveness = Liveness(context, connection)

    def counted(key: str) -> str | None:
        asked[key] += 1
        return get(key)

    get, connection.get = connection.get, counted  # type: ignore[method-assign]
    for _ in range(3):
        assert [rank for rank in range(64) if liveness.is_dead(rank)] == [7, 63]
    assert asked == dict.fromkeys([member_key(rank) for rank in range(64)], 1) | {LOST_KEY: asked[LOST_KEY]}
    assert asked[LOST_KEY] <= 3
