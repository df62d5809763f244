"""Ranks that do not draw alike are told, by name and with what to do; no healthy program is."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, Subset

from nn_parallel import (
    ParallelExecutor,
    RankError,
    barrier,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    on_rank,
    prepare_dataloader,
    prepare_model,
    seed_everything,
)
from nn_parallel.training._draws import SLOTS, Checksums, checksums
from tests.support.ranks import AnyRanks

N = 48


class RepeatAugSampler(Sampler[int]):
    """As those of timm and torchvision, which know their rank: they are not torch's `DistributedSampler`."""

    def __init__(self) -> None:
        world = current_world()
        self.num_replicas = world.world_size
        self.rank = world.rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, N, self.num_replicas))

    def __len__(self) -> int:
        return N // self.num_replicas


class TrainingSampler(RepeatAugSampler):
    """As that of detectron2, which keeps to itself what it knows, and never ends."""

    def __init__(self) -> None:
        world = current_world()
        self._world_size = world.world_size
        self._rank = world.rank

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(self._rank, N, self._world_size))


@pytest.mark.parametrize("kind", [RepeatAugSampler, TrainingSampler])
@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_that_knows_its_rank_is_refused(any_ranks: AnyRanks, kind: Any, batched: bool) -> None:
    """On every rank, before anything is drawn; in a batch sampler of the user's own too."""

    class Batches(Sampler[list[int]]):
        def __init__(self) -> None:
            self.sampler = kind()

        def __iter__(self) -> Iterator[list[int]]:
            return iter([list(self.sampler)])

        def __len__(self) -> int:
            return 1

    def scenario() -> str:
        initialize_ddp()
        options: Any = {"batch_sampler": Batches()} if batched else {"sampler": kind()}
        with pytest.raises(ValueError, match=f"its {kind.__name__} takes the part of rank") as raised:
            prepare_dataloader(DataLoader(range(N), **options))
        return str(raised.value)

    results = any_ranks.run(scenario)
    n = len(results)
    assert [f"takes the part of rank {rank} of {n}. Use the loader without" in results[rank] for rank in range(n)]


def test_a_sampler_that_knows_another_world_is_none_of_that() -> None:
    """Alone, a sampler for one rank draws all; so does one that only has such attributes."""
    samplers: list[Any] = [RepeatAugSampler(), DistributedSampler(range(N), 1, 0)]  # type: ignore[arg-type]
    for sampler in samplers:
        assert len(list(prepare_dataloader(DataLoader(range(N), sampler=sampler)))) == N
    with pytest.raises(ValueError, match="its DistributedSampler takes the part of rank 0 of 2"):
        prepare_dataloader(DataLoader(range(N), sampler=DistributedSampler(range(N), 2, 0)))  # type: ignore[arg-type]


class Unseeded(Sampler[int]):
    """A sampler with a generator of its own, and another seed each time."""

    def __init__(self) -> None:
        self._own = torch.Generator()
        self._own.seed()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=self._own).tolist())

    def __len__(self) -> int:
        return N


class BySet(Unseeded):
    """A sampler in the order of a set of names, which depends on the process; here it is made to, by the rank."""

    def __iter__(self) -> Iterator[int]:
        names = [f"{current_world().rank * 1000 + k}" for k in range(N)]
        return iter([int(name) % N for name in sorted(names, key=hash)] if current_world().rank else range(N))


class Shorter(Unseeded):
    """A sampler over what this rank has found in its directory."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return N - current_world().rank


class SplitByNode(IterableDataset[int]):
    """A stream that takes its rank's part: webdataset, `split_dataset_by_node` of Hugging Face."""

    def __iter__(self) -> Iterator[Any]:
        world = current_world()
        return iter(self.sample(k) for k in range(world.rank, N, world.world_size))

    def sample(self, k: int) -> Any:
        return k


class WebDataset(SplitByNode):
    """One whose samples are dicts, with a key, and a shard that is the same for many."""

    def sample(self, k: int) -> Any:
        return {"__key__": f"{k:06d}", "__url__": "shard-0.tar", "x": torch.rand(2), "y": k // 4}


class Tokens(SplitByNode):
    def sample(self, k: int) -> Any:
        return torch.tensor([1, k, k + 1])


def subset_of_this_rank() -> Subset[int]:
    world = current_world()
    return Subset(range(N), range(world.rank, N, world.world_size))  # type: ignore[arg-type]


WRONG: dict[str, Callable[[], DataLoader[Any]]] = {
    "Unseeded": lambda: DataLoader(range(N), sampler=Unseeded(), batch_size=2),
    "BySet": lambda: DataLoader(range(N), sampler=BySet(), batch_size=2),
    "Shorter": lambda: DataLoader(range(N), sampler=Shorter(), batch_size=2),
    "SequentialSampler": lambda: DataLoader(range(N - current_world().rank), batch_size=2),
    "RandomSampler over a Subset": lambda: DataLoader(subset_of_this_rank(), batch_size=2, shuffle=True),
    "SplitByNode": lambda: DataLoader(SplitByNode(), batch_size=2),
    "WebDataset": lambda: DataLoader(WebDataset(), batch_size=2),
    "Tokens": lambda: DataLoader(Tokens(), batch_size=2, num_workers=2, multiprocessing_context="fork"),
}


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_draw_other_samples_are_told(any_ranks: AnyRanks, name: str) -> None:
    """By the rank that sees it, at its first batch; in a block each rank knows, and they go on."""
    make = WRONG[name]

    def scenario() -> str:
        initialize_ddp()
        try:
            with ParallelExecutor():
                for _ in prepare_dataloader(make(), pad=False):
                    barrier()
        except RankError as error:
            assert all(isinstance(leaf, ValueError) for leaf in error.failures.values())
            initialize_ddp()
            return str(next(iter(error.failures.values())))
        return ""

    for told in any_ranks.run(scenario):
        assert told.startswith(f"{name} does not draw alike on all ranks: in epoch 0 rank ")
        assert ("draws 4" in told) is (name in ("Shorter", "SequentialSampler"))
        assert "use the loader without prepare_dataloader()" in told


class Augmented(IterableDataset[Any]):
    """A stream whose samples each rank augments in its own way, by a generator that nobody has seeded."""

    def __init__(self, sample: Callable[[int, Any], Any]) -> None:
        self._sample = sample
        self._random = random.Random()
        self._numpy = np.random.default_rng()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sample(k, self) for k in range(N))


def recommended(k: int, own: Any) -> Any:
    return k, own._random.randrange(10**6)  # an item, and one that was not bought


def cropped(k: int, own: Any) -> Any:
    return own._numpy.random((2, 2)), k // 10


def regression(k: int, own: Any) -> Any:
    return torch.tensor(own._numpy.random(3)), float(k)


def labels_in_order(k: int, own: Any) -> Any:
    return torch.rand(2), 0


@pytest.mark.parametrize("sample", [recommended, cropped, regression, labels_in_order])
def test_a_stream_that_is_augmented_is_drawn_alike(any_ranks: AnyRanks, sample: Any) -> None:
    """Numbers that are not integers tell nothing, and of the others it is enough that some agree."""

    def scenario() -> int:
        initialize_ddp()
        seed_everything(current_world().rank)
        return sum(1 for _ in range(2) for _ in prepare_dataloader(DataLoader(Augmented(sample), batch_size=4)))

    assert len(set(any_ranks.run(scenario))) == 1


class Adaptive(Sampler[int]):
    """A sampler whose order changes with the training, alike on all ranks."""

    def __init__(self) -> None:
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        return iter([(self.first + k) % N for k in range(N)])

    def __len__(self) -> int:
        return N


def test_programs_in_which_ranks_are_not_in_step_are_left_alone(any_ranks: AnyRanks) -> None:
    """A look at a batch, evaluation on one rank, other batch sizes, epochs left early, ranks that are late."""

    def scenario() -> bool:
        rank = initialize_ddp().rank
        shuffled = prepare_dataloader(DataLoader(range(N), batch_size=2, shuffle=True))
        if rank == 0:
            next(iter(shuffled))
        for _ in range(3):
            list(shuffled)  # at each rank's own pace
        shuffled.set_epoch(rank)  # type: ignore[attr-defined]
        list(shuffled)
        barrier()
        list(prepare_dataloader(DataLoader(range(N), batch_size=2 + rank, shuffle=True)))
        sampler = Adaptive()
        adaptive = prepare_dataloader(DataLoader(range(N), sampler=sampler))
        for _ in range(3):
            for _ in zip(range(4), adaptive, strict=False):
                barrier()
            sampler.first += 1
            barrier()
        on_rank(0)(lambda: list(prepare_dataloader(DataLoader(range(N), shuffle=True))))()
        many = [prepare_dataloader(DataLoader(range(N - k % 5), shuffle=True)) for k in range(2 * SLOTS)]
        for loader in [*many, *reversed(many)]:
            next(iter(loader))
        return True

    assert all(any_ranks.run(scenario))


def test_a_loop_goes_on_without_a_store(any_ranks: AnyRanks) -> None:
    """After `cleanup_ddp`, and in a fork, as a process that serves the model."""

    def scenario() -> int:
        initialize_ddp()
        loader = prepare_dataloader(DataLoader(range(N), shuffle=True, batch_size=2))
        cleanup_ddp()
        if not (pid := os.fork()):
            os._exit(3 if list(loader) else 4)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        list(loader)
        return code

    assert set(any_ranks.run(scenario)) == {3}


@pytest.mark.slow
def test_keys_do_not_grow_with_the_number_of_loaders(any_ranks: AnyRanks) -> None:
    """A job of many small experiments leaves no more in the store than one of a few."""

    def scenario() -> int:
        from nn_parallel._engine.ranks.blocks import blocks_of
        from nn_parallel._engine.ranks.context import rank_context

        initialize_ddp()
        counts = []
        for _ in range(3):
            for _ in range(SLOTS):
                next(iter(prepare_dataloader(DataLoader(range(N), shuffle=True))))
            barrier()
            blocks = blocks_of(rank_context())
            assert blocks is not None
            counts.append(blocks.context.connection.store.num_keys())
            barrier()
        return counts[-1] - counts[0]

    assert all(growth <= 0 for growth in any_ranks.run(scenario))


def test_what_identifies_a_sample() -> None:
    """Integers and text, of every library, at the same place in each sample."""
    array = np.arange(3, dtype=np.int16)
    samples = [
        (k, f"name{k}", {"x": torch.ones(1) * k, "id": np.int64(k)}, array + k, torch.tensor(k), True, None, 1.5 * k)
        for k in range(4)
    ]
    sums = checksums(samples)
    assert [bool(number) for number in sums.of_keys] == [True] * 5 + [False] * 3
    assert not any(sums.of_others)  # True is the same in all of them
    backwards = checksums(samples[::-1])
    assert all(one != another for one, another in zip(sums.of_keys[:5], backwards.of_keys, strict=False))
    ragged = checksums([[1, 2], [1], []])
    assert (ragged.samples, [bool(number) for number in ragged.of_others[:3]]) == (3, [True, True, False])
    assert checksums([]) == Checksums()
    assert checksums([1.5, 2.5]) == Checksums(2)


def test_training_is_bit_for_bit_what_it_was(any_ranks: AnyRanks) -> None:
    """Comparing draws no random numbers: the model of a loop is that of one rank that draws the same batches."""

    def scenario() -> list[float]:
        n = initialize_ddp().world_size
        torch.manual_seed(0)
        model = prepare_model(torch.nn.Linear(1, 1, bias=False))
        before = torch.get_rng_state()
        loader = prepare_dataloader(DataLoader(range(N), batch_size=12 // n, sampler=Adaptive()), seed=0)
        drawn = [x.tolist() for x in loader]
        assert torch.equal(torch.get_rng_state(), before) or current_world().world_size > 1
        del model
        return drawn

    results = any_ranks.run(scenario)
    together = [sorted(itertools.chain(*step)) for step in zip(*results, strict=True)]
    assert together == [list(range(start, start + 12)) for start in range(0, N, 12)]
