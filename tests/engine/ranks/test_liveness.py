"""The links to rank 0 that tell of deaths on other nodes: here between parts of one process, by real connections."""

from __future__ import annotations

import contextlib
import logging
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
from nn_parallel._engine.ranks.liveness import (
    ENDED,
    OUT_OF_REACH,
    RESET,
    STRANGERS,
    WELCOME,
    Liveness,
    Lost,
    ServerAddress,
    connect_nodes,
)
from nn_parallel._engine.ranks.store import (
    LOST_KEY,
    SERVER_KEY,
    Member,
    RankZero,
    StoreClient,
    decode,
    encode,
    member_key,
)
from nn_parallel.world import World

HOST = "127.0.0.1"


class Ranks:
    """The store of three ranks, and those that have joined."""

    def __init__(self) -> None:
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._members = list[RankContext]()

    def join(self, rank: int) -> RankContext:
        world = World(False, rank, rank, 3, torch.device("cpu"))
        context = RankContext(world, lambda: dist.PrefixStore("world", self.store), one_node=False)
        self._members.append(context)
        connect_nodes(context, HOST)
        return context

    def gone(self) -> dict[int, str]:
        """Which ranks are told to be gone, and how, once one is."""
        key, deadline = f"world/{LOST_KEY}", time.monotonic() + 10
        while not self.store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.01)  # between two looks
        return decode(Lost, key, self.store.get(key).decode()).how

    def close(self) -> None:
        for context in self._members:
            context.on_leave.close()
        self._members.clear()
        del self.store


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    three = Ranks()
    yield three
    three.close()


def _address(context: RankContext) -> tuple[int, str]:
    where = context.connection.read(SERVER_KEY, ServerAddress)
    assert where is not None
    return where


def test_rank_0_tells_whom_it_has_lost(ranks: Ranks) -> None:
    """The end of a rank's connection is known of that rank alone."""
    _, one, two = ranks.join(0), ranks.join(1), ranks.join(2)
    one.on_leave.close()
    assert ranks.gone() == {1: ENDED}
    assert two.rank_0.loss is None


def test_the_others_see_the_end_of_rank_0(ranks: Ranks) -> None:
    """It is their own connection that ends."""
    zero, one = ranks.join(0), ranks.join(1)
    assert one.rank_0.loss is None
    assert zero.rank_0.loss is None
    zero.on_leave.close()
    deadline = time.monotonic() + 10
    while (loss := one.rank_0.loss) is None and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks
    assert str(loss) == f"Rank 0 (pid {os.getpid()} on {socket.gethostname()}) ended."


@pytest.mark.parametrize(
    "hello",
    [b"", b"x" * 1000, b"{wrong} 2\n", b"{token} 7\n", b"{token} x\n", b"{token}\n", b"\xff\xfe\n", b"\x80\x04N.\n"],
)
def test_what_others_connect_is_no_death(hello: bytes, ranks: Ranks) -> None:
    """Only who has the token speaks for a rank of this world; and nothing that anybody sends disturbs the rest."""
    zero, one = ranks.join(0), ranks.join(1)
    port, token = _address(zero)
    # Who has said too much is hung up on, which this side sees as a reset, or as an end before it has shut down itself.
    with socket.create_connection((HOST, port)) as stranger, contextlib.suppress(OSError):
        stranger.sendall(hello.replace(b"{token}", token.encode()).replace(b"{wrong}", b"0" * len(token)))
        stranger.shutdown(socket.SHUT_WR)
        stranger.recv(1)  # until it is closed over there
    one.on_leave.close()
    assert ranks.gone() == {1: ENDED}


@pytest.mark.parametrize("value", ['[0, ""]', "null", "", "[]", "{}", '["x", 1]', "[1]", '[1, "", 2]', "\udc80pickle"])
def test_a_rank_without_a_link_goes_on(value: str, ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Where rank 0 awaits no links, or somebody else has written there: a warning, and nobody counts as gone."""
    ranks.store.set(f"world/{SERVER_KEY}", value.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING, "nn_parallel"):
        one = ranks.join(1)
    assert not one.rank_0.is_linked
    assert "Rank 1 cannot tell whether ranks on other nodes live" in caplog.text


def test_a_flood_of_connections_stops_no_link(ranks: Ranks) -> None:
    """Nor does half a message: who shows no token is hung up on when too many do so, the first one first."""
    zero, one = ranks.join(0), ranks.join(1)
    port, token = _address(zero)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(3 + STRANGERS + 10):
            strangers.append(stack.enter_context(socket.create_connection((HOST, port), 10)))
            with contextlib.suppress(OSError):  # it may be hung up on already
                strangers[-1].sendall(token[:5].encode())
        two = ranks.join(2)
        assert two.rank_0.is_linked
        assert [stranger.recv(1) for stranger in strangers[:10]] == [b""] * 10
        assert len(os.listdir("/proc/self/fd")) - before < len(strangers) + 3 + STRANGERS + 10  # of both ends
        assert zero.connection.get(LOST_KEY) is None
        one.on_leave.close()
        assert ranks.gone() == {1: ENDED}
        assert two.rank_0.loss is None


def test_who_is_hung_up_on_may_say_something_just_then(ranks: Ranks) -> None:
    """What a stranger sends as another one takes its place is read from no connection that is closed."""
    zero, one = ranks.join(0), ranks.join(1)
    port, _ = _address(zero)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HOST, port), 10)) for _ in range(3 + STRANGERS)]
        for stranger in strangers:
            with contextlib.suppress(OSError):  # it may be hung up on already
                stack.enter_context(socket.create_connection((HOST, port), 10))
                stranger.sendall(b"x")
        two = ranks.join(2)
        assert two.rank_0.is_linked
        assert one.rank_0.loss is None


def test_a_connection_that_is_reset_is_told_as_that(ranks: Ranks) -> None:
    """As by a firewall: nothing is said of its node."""
    port, token = _address(ranks.join(0))
    with socket.create_connection((HOST, port)) as link:
        link.sendall(f"{token} 2\n".encode())
        assert link.recv(1) == WELCOME
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ranks.gone() == {2: RESET}


def test_who_is_lost_is_asked_for_all_ranks_at_once() -> None:
    """What a waiting rank asks of the store, which has one thread, does not grow with the number of ranks."""
    store, asked = dist.HashStore(), Counter[str]()
    for rank in range(64):
        store.set(member_key(rank), encode(Member("another one", "", 1, 0, 1)))
    store.set(LOST_KEY, encode(Lost({7: ENDED, 63: OUT_OF_REACH})))
    world = World(False, 0, 0, 64, torch.device("cpu"))
    connection = StoreClient(store, 0, 64, None)
    context = RankContext(world, lambda: store, one_node=False, rank_0=RankZero(is_linked=True))
    liveness = Liveness(context, connection)

    def counted(key: str) -> str | None:
        asked[key] += 1
        return get(key)

    get, connection.get = connection.get, counted  # type: ignore[method-assign]
    for _ in range(3):
        assert [rank for rank in range(64) if liveness.is_dead(rank)] == [7, 63]
    assert asked == dict.fromkeys([member_key(rank) for rank in range(64)], 1) | {LOST_KEY: asked[LOST_KEY]}
    assert asked[LOST_KEY] <= 3
