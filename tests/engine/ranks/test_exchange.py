"""Objects go from rank to rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nn_parallel import (
    RankError,
    barrier,
    broadcast,
    current_world,
    on_rank,
)
from tests.support.ranks import AnyRanks


def test_broadcast_gives_the_result_to_all(any_ranks: AnyRanks) -> None:
    """With broadcast=True every rank gets the first named rank's result, also one that plain pickle refuses."""

    def scenario() -> Any:
        @on_rank([1, 0], broadcast=True)
        def make() -> Any:
            rank = current_world().rank
            made = {"rank": rank, "tensor": torch.full((3,), float(rank)), "fn": lambda: rank}
            return made if rank == 1 else threading.Lock()  # only the result of the first is sent

        made: Any = make()
        return made["rank"], made["tensor"].tolist(), made["fn"]()

    assert set(map(str, any_ranks.run(scenario))) == {str((1, [1.0, 1.0, 1.0], 1))}


def test_a_result_that_cannot_be_broadcast_is_an_error_everywhere(any_ranks: AnyRanks) -> None:
    """A broadcast result that cannot be pickled is a failure of the call, with its path, on every rank."""

    def scenario() -> str:
        @on_rank(0, broadcast=True)
        def make() -> Any:
            return {"lock": threading.Lock()}

        with pytest.raises(RankError) as caught:
            make()
        return str(caught.value.failures[0])

    assert all("The result['lock'] is a _thread.lock" in text for text in any_ranks.run(scenario))


def test_an_object_of_one_rank_goes_to_all(any_ranks: AnyRanks) -> None:
    """From any rank, whatever the others give; one that cannot be sent is an error on all."""

    def scenario() -> Any:
        me = current_world().rank
        try:
            broadcast(threading.Lock() if me == 0 else None)
        except RankError as error:
            told = str(error)
        return broadcast({"from": me}), broadcast(torch.tensor(me), src=-1).item(), told

    results = any_ranks.run(scenario)
    for first, last, told in results:
        assert (first, last) == ({"from": 0}, len(results) - 1)
        assert "broadcast() failed on rank 0" in told
    assert broadcast(1) == 1
    assert barrier() is None  # type: ignore[func-returns-value]
