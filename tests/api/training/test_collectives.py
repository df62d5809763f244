"""Metrics, flags, objects and tensors of all ranks: exact, in one message, an error on every rank where they differ."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ParallelExecutor,
    RankError,
    TransferError,
    all_gather_object,
    all_gather_tensor,
    all_ranks,
    any_rank,
    average_parameters,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    reduce_metrics,
)
from nn_parallel.training.collectives import can_gather
from tests.support.ranks import AnyRanks


def rank_and_size() -> tuple[int, int]:
    world = initialize_ddp()
    return world.rank, world.world_size


def alike(results: list[Any]) -> Any:
    """What every rank gave, which must be the same."""
    assert all(result == results[0] for result in results), results
    return results[0]


def test_metrics_over_an_uneven_split_equal_those_of_one_process(any_ranks: AnyRanks) -> None:
    """Weighted by real counts, the means are those of all samples to 1e-12; counts are exact."""
    samples = torch.randn(37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def scenario() -> Any:
        rank, n = rank_and_size()
        bounds = [0, 30, 37] if n == 2 else [0, 3, 30, 37]
        mine = samples[bounds[rank] : bounds[rank + 1]]
        means = {"loss": mine.mean(), "square": mine.square().mean().item()}
        return (
            reduce_metrics(means, weight=len(mine)),
            reduce_metrics({"positive": (mine > 0).sum(), "of": len(mine)}, op="sum"),
            reduce_metrics({"largest": mine.max(), "least": -mine.min()}, op="max"),
            reduce_metrics({"least": mine.min(), "count": len(mine)}, op="min"),
        )

    means, counts, largest, least = alike(any_ranks.run(scenario))
    assert list(means) == ["loss", "square"]
    assert means["loss"] == pytest.approx(samples.mean().item(), abs=1e-12)
    assert means["square"] == pytest.approx(samples.square().mean().item(), abs=1e-12)
    assert counts == {"positive": int((samples > 0).sum()), "of": 37}
    assert all(type(count) is int for count in counts.values())
    assert largest == {"largest": samples.max().item(), "least": -samples.min().item()}
    assert least["least"] == samples.min().item()
    assert least["count"] in (3, 7)
    assert type(least["count"]) is int


def test_metrics_are_one_gather(any_ranks: AnyRanks) -> None:
    """However many there are."""

    def scenario() -> Any:
        rank_and_size()
        gathered = []
        all_gather_object = dist.all_gather_object
        dist.all_gather_object = lambda *args, **kwargs: gathered.append(0) or all_gather_object(*args, **kwargs)
        try:
            return reduce_metrics({f"m{i}": i for i in range(300)}, op="sum"), len(gathered)
        finally:
            dist.all_gather_object = all_gather_object

    many, count = alike(any_ranks.run(scenario))
    n = len(any_ranks.run(rank_and_size))
    assert many == {f"m{i}": i * n for i in range(300)}
    assert count == 1


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_a_metric_is_of_one_type_on_all_ranks(any_ranks: AnyRanks, op: str) -> None:
    """Of integers if it is one everywhere, then exact however large; else a float."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        reduced = [
            reduce_metrics({"count": count, "mixed": count if rank == n - 1 else float(count)}, op=op)
            for count in (3, 2**53)
        ]
        reduced.append(reduce_metrics({"exact": 2**70 + 1}, op=op))
        return [{name: (type(value), value) for name, value in metrics.items()} for metrics in reduced]

    told = alike(any_ranks.run(scenario))
    ranks = len(any_ranks.run(rank_and_size)) if op == "sum" else 1
    for metrics, count in zip(told, (3, 2**53), strict=False):
        assert metrics == {"count": (int, count * ranks), "mixed": (float, float(count * ranks))}
    assert told[-1] == {"exact": (int, (2**70 + 1) * ranks)}


def test_names_and_weights_of_every_kind(any_ranks: AnyRanks) -> None:
    """Classes have numbers for names, and the number of samples is a tensor where it was counted by torch."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        weight = torch.tensor(1 + 2 * (rank == n - 1))
        return reduce_metrics({1: np.ones(1), 0: float(rank == n - 1), "all": np.float32(2)}, weight=weight)

    results = any_ranks.run(scenario)
    assert alike(results) == {1: 1.0, 0: 3 / (len(results) + 2), "all": 2.0}
    assert list(results[0]) == [1, 0, "all"]


FIRST = {
    "reduce_metrics": lambda: reduce_metrics({"x": 1.0}, weight=3) == {"x": 1.0},
    "any_rank": lambda: any_rank(True),
    "all_ranks": lambda: all_ranks(True),
    "average_parameters": lambda: average_parameters(torch.nn.Linear(1, 1)) is None,
    "all_gather_tensor": lambda: len(all_gather_tensor(torch.ones(2))) >= 4,
}


@pytest.mark.parametrize("call", FIRST)
def test_any_of_them_may_be_the_first_collective(any_ranks: AnyRanks, call: str) -> None:
    """It makes the process group itself: in each `run` of a pool, in a script, after a block that has failed."""
    fn = FIRST[call]

    def scenario() -> bool:
        cleanup_ddp()
        return bool(fn())

    def after_a_failure() -> bool:
        with contextlib.suppress(RankError), ParallelExecutor():
            if initialize_ddp().is_main:
                raise OSError
            torch.distributed.all_reduce(torch.ones(1))
        return bool(fn())

    for first in (scenario, after_a_failure):
        assert all(any_ranks.run(first))


def test_nan_on_one_rank_is_nan_on_all_but_for_a_rank_that_counts_nothing(any_ranks: AnyRanks) -> None:
    """NaN is not lost, whichever way the metrics are reduced; a rank without samples has no mean, and spoils none."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        value = math.nan if rank == n - 1 else 1.0
        nans = [reduce_metrics({"x": value, "y": 2.0}, op=op) for op in ("mean", "sum", "max", "min")]
        return [(math.isnan(m["x"]), m["y"]) for m in nans], reduce_metrics({"x": value}, weight=int(rank < n - 1))

    results = any_ranks.run(scenario)
    n = len(results)
    told, spared = alike(results)
    assert told == [(True, 2.0), (True, 2.0 * n), (True, 2.0), (True, 2.0)]
    assert spared == {"x": 1.0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: ({"loss" if rank else "accuracy": 1.0}, {}), "rank 1: reduce_metrics(op='mean') of 'loss'"),
        (lambda rank: ({"0" if rank else 0: 1.0}, {}), "rank 1: reduce_metrics(op='mean') of '0'"),
        (lambda rank: ({"loss": 1.0}, {"weight": torch.ones(2)}), "weight=tensor([1., 1.]) is not a number of"),
        (lambda rank: ({f"m{i}": 1 for i in range(3 + 90 * rank)}, {}), "The calls of the ranks do not match"),
        (lambda rank: ({"loss": "high" if rank else 1.0}, {}), "the metric 'loss' is 'high', not one number on rank 1"),
        (lambda rank: ({"loss": torch.ones(1 + rank)}, {}), "a tensor of shape (2,), not one number on rank 1"),
        (lambda rank: ({"loss": 1.0}, {"weight": -rank}), "weight=-1 is not a number of at least 0 on rank 1"),
        (lambda rank: ({"loss": 1.0}, {"weight": math.nan if rank else 1}), "weight=nan is not a number"),
        (lambda rank: ({"loss": 1.0}, {"weight": 0}), "the weights of all ranks are 0"),
        (lambda rank: ({"loss": 1.0}, {"op": "median"}), "op='median' must be one of mean, sum, max, min"),
        (lambda rank: ({"loss": 1.0}, {"op": "sum", "weight": 2}), "weight=2 is for op='mean'"),
        (lambda rank: ({"loss": 1.0}, {"op": ("mean", "max")[rank]} if rank < 2 else {}), "do not match"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.ranks(2)
def test_metrics_that_cannot_be_reduced_are_an_error_on_every_rank(make: Any, words: str) -> None:
    """Whatever is wrong on one rank, all of them raise, with the cause and the rank, and can go on."""
    rank, _ = rank_and_size()
    metrics, options = make(rank)
    with pytest.raises(ValueError, match=re.escape(words)):
        reduce_metrics(metrics, **options)
    assert reduce_metrics({"x": rank}) == {"x": 0.5}


def test_flags_are_decided_together(any_ranks: AnyRanks) -> None:
    """One rank is enough for `any_rank`, and one is enough against `all_ranks`."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        return any_rank(rank == n - 1), any_rank(False), all_ranks(rank > 0), all_ranks("yes")

    assert alike(any_ranks.run(scenario)) == (True, False, False, True)


def test_objects_are_gathered_in_rank_order(any_ranks: AnyRanks) -> None:
    """Whatever can be sent, lambdas and large tensors too."""

    def scenario() -> Any:
        rank, _ = rank_and_size()
        gathered = all_gather_object({"rank": rank, "f": lambda: rank, "x": torch.full((20_000,), rank)})
        return [(each["rank"], each["f"](), int(each["x"].sum())) for each in gathered]

    results = any_ranks.run(scenario)
    assert alike(results) == [(rank, rank, 20_000 * rank) for rank in range(len(results))]


def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank(any_ranks: AnyRanks) -> None:
    """The ranks whose objects are good do not wait for the one whose is not."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        try:
            all_gather_object({"lock": threading.Lock()} if rank == n - 1 else {})
        except TransferError as error:
            return str(error), all_gather_object(rank)
        return None

    results = any_ranks.run(scenario)
    told, after = alike(results)
    assert f"Rank {len(results) - 1}: " in told
    assert "'lock'" in told
    assert after == list(range(len(results)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_tensors_of_uneven_length_are_concatenated(any_ranks: AnyRanks, dtype: torch.dtype) -> None:
    """Each row once and nothing padded, also where a rank has none, for every kind of number."""

    def scenario() -> Any:
        rank, _ = rank_and_size()
        mine = torch.full((3 * rank, 2), rank).to(dtype)
        gathered = all_gather_tensor(mine.requires_grad_(dtype.is_floating_point))
        return gathered.dtype, gathered.requires_grad, gathered.to(torch.complex64).real.int().tolist()

    results = any_ranks.run(scenario)
    kind, needs_grad, rows = alike(results)
    assert (kind, needs_grad) == (dtype, False)
    wanted = torch.cat([torch.full((3 * rank, 2), rank).to(dtype) for rank in range(len(results))])
    assert rows == wanted.to(torch.complex64).real.int().tolist()


def test_numbers_and_strided_tensors_are_gathered(any_ranks: AnyRanks) -> None:
    """A tensor without dimensions is one row; a transposed one comes out as it reads."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        assert all_gather_tensor(torch.ones(rank, 0, 2)).shape == (sum(range(n)), 0, 2)
        return all_gather_tensor(torch.tensor(rank)).tolist(), all_gather_tensor(torch.arange(6).view(2, 3).T).tolist()

    results = any_ranks.run(scenario)
    numbers, rows = alike(results)
    assert numbers == list(range(len(results)))
    assert rows == torch.arange(6).view(2, 3).T.tolist() * len(results)


def test_views_that_are_only_flags_are_gathered_by_their_numbers(any_ranks: AnyRanks) -> None:
    """A conjugate, and the negative that is its imaginary part, share the memory of what they are views of."""

    def scenario() -> Any:
        rank, _ = rank_and_size()
        number = torch.tensor([complex(rank, 1 + rank)])
        views = number.conj(), number.conj().imag, number[None].mH
        return [all_gather_tensor(view).flatten().tolist() for view in views]

    results = any_ranks.run(scenario)
    wanted = [complex(rank, -1 - rank) for rank in range(len(results))]
    assert alike(results) == [wanted, [number.imag for number in wanted], wanted]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda rank: torch.ones(2, 2 + rank),
            "rank 0: all_gather_tensor of rows of shape (2,) and dtype torch.float32\n"
            "  rank 1: all_gather_tensor of rows of shape (3,)",
        ),
        (lambda rank: torch.ones(2, dtype=(torch.int32, torch.float32)[rank > 0]), "() and dtype torch.int32"),
        (lambda rank: torch.ones(1) if rank else [1.0], "got a list, not a tensor on rank 0"),
        (lambda rank: torch.eye(2) if rank else torch.eye(2).to_sparse(), "got a sparse tensor, which has no rows"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error_on_every_rank(any_ranks: AnyRanks, make: Any, words: str) -> None:
    """Their shapes are compared first; the message shows them."""

    def scenario() -> Any:
        rank, _ = rank_and_size()
        try:
            all_gather_tensor(make(rank))
        except ValueError as error:
            return str(error), any_rank(rank)
        return None

    told, after = alike(any_ranks.run(scenario))
    assert words in told
    assert after


def test_groups_take_part_alone(any_ranks: AnyRanks) -> None:
    """With ``group`` only its ranks call, and only theirs is what comes out."""

    def scenario() -> Any:
        rank, n = rank_and_size()
        group = dist.new_group([n - 2, n - 1])
        try:
            if rank < n - 2:
                return None
            return (
                reduce_metrics({"x": rank}, op="sum", group=group),
                all_gather_object(rank, group),
                all_gather_tensor(torch.tensor([rank]), group).tolist(),
            )
        finally:
            dist.destroy_process_group(group)

    results = [result for result in any_ranks.run(scenario) if result is not None]
    n = len(any_ranks.run(rank_and_size))
    assert alike(results) == ({"x": 2 * n - 3}, [n - 2, n - 1], [n - 2, n - 1])


def test_alone_they_are_the_plain_thing() -> None:
    """No group is made, and the answers are those of a world of one."""
    assert reduce_metrics({"loss": torch.tensor(0.5), "n": 3}, weight=7) == {"loss": 0.5, "n": 3.0}
    assert reduce_metrics({"n": 3}, op="sum") == {"n": 3}
    assert any_rank(1) is True
    assert all_ranks(0) is False
    sent = object()
    assert all_gather_object(sent) == [sent]
    assert all_gather_tensor(torch.tensor(2.0)).tolist() == [2.0]
    assert not dist.is_initialized()
    assert current_world().world_size == 1
    with pytest.raises(ValueError, match="the metric 'x' is None"):
        reduce_metrics({"x": None})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("device_types", "backends", "where_they_lie"),
    [
        ({"cuda"}, "cpu:gloo,cuda:nccl", True),
        ({"cpu"}, "cpu:gloo,cuda:nccl", False),  # there it is the same
        ({"cuda"}, "cpu:gloo,cuda:gloo", False),
        ({"cpu", "cuda"}, "cpu:gloo,cuda:nccl", False),
        ({"xpu"}, "cpu:gloo,cuda:nccl", False),
        ({"cuda"}, "cuda:nccl", True),
    ],
)
def test_tensors_are_gathered_where_they_lie(device_types: set[str], backends: str, where_they_lie: bool) -> None:
    """By the accelerator's own backend, where all of them are on accelerators."""
    assert can_gather(device_types, backends) is where_they_lie
