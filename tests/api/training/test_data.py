"""`prepare_dataloader`: each sample on one rank, alike for any number of ranks, with every option of the loader."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from nn_parallel import (
    all_gather_tensor,
    cleanup_ddp,
    initialize_ddp,
    prepare_dataloader,
    prepare_model,
    seed_everything,
)
from nn_parallel.training._shares import EvenBatches, RankSampler, Stream
from tests.support.ranks import AnyRanks


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def drawn(loader: DataLoader[Any]) -> list[list[int]]:
    """The batches of one epoch."""
    return [x.tolist() for (x,) in loader]


def parts(source: Any, world_size: int, **options: Any) -> list[list[Any]]:
    """What the samplers of all ranks draw in one epoch, which is as much as they say."""
    samplers = [RankSampler(source, rank, world_size, batch_size=world_size, **options) for rank in range(world_size)]
    shares = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    return shares


class Shuffled(Sampler[int]):
    """A sampler of the user's own, with random numbers from everywhere."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._n))
        random.shuffle(order)
        np.random.shuffle(order)
        return iter([order[i] for i in torch.randperm(self._n)])

    def __len__(self) -> int:
        return self._n


SAMPLERS: list[Callable[[int], Any]] = [
    lambda n: range(n),
    Shuffled,
    lambda n: torch.utils.data.RandomSampler(range(n), generator=torch.Generator()),
]


@given(n=st.integers(0, 40), world_size=st.integers(1, 9), kind=st.sampled_from(SAMPLERS), seed=st.integers(0, 3))
def test_without_padding_each_sample_is_drawn_exactly_once(
    n: int, world_size: int, kind: Callable[[int], Any], seed: int
) -> None:
    """At any world size, whatever the sampler draws its random numbers from."""
    shares = parts(kind(n) if n else range(0), world_size, seed=seed, pad=False, drop=False)
    assert sorted(itertools.chain(*shares)) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(n=st.integers(0, 40), world_size=st.integers(1, 9), drop=st.booleans())
def test_with_padding_all_ranks_draw_equally_many(n: int, world_size: int, drop: bool) -> None:
    """As few samples as possible come twice, or are left out."""
    shares = parts(range(n), world_size, seed=0, pad=not drop, drop=drop)
    assert len(set(map(len, shares))) == 1
    everything = list(itertools.chain(*shares))
    if drop:
        assert len(everything) == len(set(everything)) == n // world_size * world_size
    else:
        assert set(everything) == set(range(n))
        assert len(everything) - n < world_size


def test_the_order_is_that_of_one_rank_shared_out(any_ranks: AnyRanks) -> None:
    """Batch k of all ranks together is batch k of one rank with the whole batch, and each epoch has another order."""

    def scenario() -> Any:
        n = initialize_ddp().world_size
        seed_everything(5)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        loader = prepare_dataloader(DataLoader(numbers(24), batch_size=12 // n, shuffle=True), seed=1)
        next(iter(loader.sampler))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
        assert torch.equal(torch.get_rng_state(), before[0])  # what the ranks draw for themselves is not disturbed
        loader.sampler.set_epoch(0)
        return [drawn(loader) for _ in range(2)], len(loader)

    results = any_ranks.run(scenario)
    alone = prepare_dataloader(DataLoader(numbers(24), batch_size=12, shuffle=True), seed=1)
    epochs = [[sorted(batch) for batch in drawn(alone)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in range(2):
        together = [sorted(itertools.chain(*(r[0][epoch][k] for r in results))) for k in range(2)]
        assert together == epochs[epoch]
    assert {length for _, length in results} == {2}


def look(loader: DataLoader[Any], batches: int = 1) -> None:
    for _ in zip(range(batches), loader, strict=False):
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_that_looks_at_some_batches_stays_in_step(any_ranks: AnyRanks, workers: int) -> None:
    """It alone begins an iteration, and leaves it: then all draw the same epoch, each sample once, and the next one.

    Also where the workers of the loader had drawn all of the epoch ahead.
    """

    def scenario(how_many: int) -> Any:
        rank = initialize_ddp().rank
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        loader = prepare_dataloader(DataLoader(numbers(24), batch_size=2, shuffle=True, **options))
        if rank == 0:
            look(loader, how_many)
        return [list(itertools.chain(*drawn(loader))) for _ in range(2)], loader.sampler.state_dict()["epoch"]

    for how_many in (1, 3):
        results = any_ranks.run(scenario, how_many)
        epochs = [sorted(itertools.chain(*(shares[epoch] for shares, _ in results))) for epoch in range(2)]
        assert epochs == [list(range(24))] * 2
        assert {epoch for _, epoch in results} == {2}
        assert results[0][0][0] != results[0][0][1]


def test_the_last_batch_ends_an_epoch() -> None:
    """Also where nobody asks for one more; several iterations at a time over one epoch end it once."""
    loader = prepare_dataloader(DataLoader(numbers(6), batch_size=2, shuffle=True))
    look(loader, 2)
    look(loader, 3)
    assert loader.sampler.epoch == 0
    look(loader, 3)
    assert loader.sampler.epoch == 1
    for _ in zip(loader, loader, strict=True):
        pass
    assert loader.sampler.epoch == 3
    loader.sampler.set_epoch(7)
    assert len(drawn(loader)) == 3
    assert loader.sampler.epoch == 8
    empty = prepare_dataloader(DataLoader(numbers(0), batch_size=2))
    assert (drawn(empty), empty.sampler.epoch) == ([], 1)


def test_an_epoch_that_begins_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Who leaves each epoch early would draw the same samples for ever; a look at one batch is not worth a word."""
    loader = prepare_dataloader(DataLoader(numbers(10), batch_size=2, shuffle=True))
    for batches in (1, 3, 3, 3):
        look(loader, batches)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "Epoch 0 of a loader begins again, in the same order, because its last iteration ended after 3 of 5 batches. "
        "To go on to the next epoch instead, call loader.set_epoch(1) before the next iteration."
    ]
    caplog.clear()
    in_order = prepare_dataloader(DataLoader(numbers(10), batch_size=2))
    goes_on = prepare_dataloader(DataLoader(numbers(10), batch_size=2, shuffle=True))
    for epoch in range(3):
        goes_on.sampler.set_epoch(epoch)
        look(in_order, 3)
        look(goes_on, 3)
    assert caplog.records == []


@pytest.mark.parametrize("how", ["seed_everything", "manual_seed", "generator", "seed"])
def test_the_order_follows_the_seed_of_rank_0(any_ranks: AnyRanks, how: str) -> None:
    """Whichever way it is set: another one gives another order, the same one the same, and the ranks agree on it."""

    def scenario(seed: int) -> Any:
        rank = initialize_ddp().rank
        seed_everything(seed if how == "seed_everything" else 5)
        if how == "manual_seed":
            torch.manual_seed(seed + 100 * rank)
        generator = torch.Generator().manual_seed(seed + 100 * rank) if how == "generator" else None
        options: dict[str, Any] = {"seed": seed} if how == "seed" else {}
        loader = prepare_dataloader(DataLoader(numbers(24), shuffle=True, generator=generator), **options)
        return [list(itertools.chain(*drawn(loader))) for _ in range(2)]

    one, two, again = (any_ranks.run(scenario, seed) for seed in (1, 2, 1))
    assert one == again
    assert one[0][0] != two[0][0]
    for epoch in range(2):
        assert sorted(itertools.chain(*(shares[epoch] for shares in one))) == list(range(24))


def test_the_state_of_the_sampler_holds_the_seed() -> None:
    """Training that was not seeded goes on in its own order; part of a state, or that of another kind, is refused."""
    torch.manual_seed(1)
    loader = prepare_dataloader(DataLoader(numbers(20), shuffle=True))
    state, order = loader.sampler.state_dict(), drawn(loader)
    torch.manual_seed(2)
    again = prepare_dataloader(DataLoader(numbers(20), shuffle=True))
    assert drawn(again) != order
    stream: Any = prepare_dataloader(DataLoader(Shards(20)))
    for wrong in ({"epoch": 0}, stream.state_dict()):
        with pytest.raises(ValueError, match="not the state of a loader like this one: it has epoch"):
            again.sampler.load_state_dict(wrong)
    with pytest.raises(
        ValueError, match="not the state of a loader like this one: it has epoch, seed, position, length"
    ):
        stream.load_state_dict(state)
    again.sampler.load_state_dict(state)
    assert drawn(again) == order


@given(n=st.integers(0, 60), world_size=st.integers(1, 9), batch_size=st.integers(1, 8))
def test_without_padding_all_ranks_draw_equally_many_batches(n: int, world_size: int, batch_size: int) -> None:
    """Each sample is in one of them, and none has more than one sample beyond the batch size."""
    loaders, whole = [], batch_size * world_size
    for rank in range(world_size):
        sampler = RankSampler(range(n), rank, world_size, seed=0, pad=False, drop=False, batch_size=whole)
        loaders.append(EvenBatches(sampler, batch_size))
    batches = [list(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(each) for each in batches]
    assert sorted(x for each in batches for batch in each for x in batch) == list(range(n))
    assert all(0 < len(batch) <= batch_size + 1 for each in batches for batch in each)
    assert n < world_size or len(set(map(len, batches))) == 1


@pytest.mark.parametrize("n", [9, 16, 17, 31])
def test_collectives_in_a_loop_without_padding_come_to_an_end(any_ranks: AnyRanks, n: int) -> None:
    """A gather, and the forward of a sharded model, in which every rank must take part."""

    def scenario() -> Any:
        initialize_ddp()
        blocks = [torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()) for _ in range(2)]
        model = prepare_model(torch.nn.Sequential(*blocks), strategy="fsdp").eval()
        gathered = []
        with torch.no_grad():
            for (x,) in prepare_dataloader(DataLoader(numbers(n), batch_size=4), pad=False):
                model(x[:, None].float())
                gathered += all_gather_tensor(x).tolist()
        return sorted(gathered)

    assert any_ranks.run(scenario) == [list(range(n))] * len(any_ranks.run(int))


class Growing(torch.utils.data.Dataset[torch.Tensor]):
    """Samples no two of which can be collated."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_cannot_be_collated_stay_batches_of_their_own(any_ranks: AnyRanks, workers: int) -> None:
    """One at a time they are no less a batch than before, each on one rank."""

    def scenario() -> list[list[list[int]]]:
        initialize_ddp()
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        loader = prepare_dataloader(DataLoader(Growing(), batch_size=1, **options), pad=False)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    results = any_ranks.run(scenario)
    for epoch in range(2):
        batches = [batch for epochs in results for batch in epochs[epoch]]
        assert sorted(batches) == [[[index] * (index + 1)] for index in range(9)]


def resumed(make: Callable[[], Any], position: int, batch_size: int, world_size: int, **options: Any) -> list[Any]:
    """What is drawn, batch by batch of all ranks together, by samplers that begin at ``position``."""
    samplers = [
        RankSampler(make(), rank, world_size, seed=3, batch_size=batch_size * world_size, **options)
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.load_state_dict(sampler.state_dict() | {"epoch": 2, "position": position})
    shares = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == list(map(len, shares))
    return [
        [share[start : start + batch_size] for share in shares] for start in range(0, max(map(len, shares)), batch_size)
    ]


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_the_order_is_that_of_torchs_own_sampler(generator: torch.Generator | None) -> None:
    """Which is drawn all at once here, and number after number there."""
    source = RandomSampler(range(30), generator=generator)
    mine = list(RankSampler(source, 0, 1, seed=7, pad=True, drop=False, batch_size=1))
    torch.manual_seed(7)
    if generator is not None:
        generator.manual_seed(7)
    assert mine == list(source)
    assert mine != sorted(mine)


@given(
    n=st.integers(1, 40),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch_size=st.integers(1, 4),
    steps=st.integers(0, 8),
    make=st.sampled_from(SAMPLERS),
)
def test_the_rest_of_an_epoch(
    n: int, ranks: tuple[int, int], batch_size: int, steps: int, make: Callable[[int], Any]
) -> None:
    """At the same number of ranks the batches that would have come; at another, each remaining sample once."""
    before, after = ranks
    options = {"pad": True, "drop": False}
    whole = resumed(lambda: make(n), 0, batch_size, before, **options)
    position = min(steps * batch_size * before, n)
    assert resumed(lambda: make(n), position, batch_size, before, **options) == whole[steps:]
    seen = [sample for batch in whole[:steps] for share in batch for sample in share]
    rest = resumed(lambda: make(n), position, batch_size, after, pad=False, drop=False)
    left = [sample for batch in rest for share in batch for sample in share]
    if steps < len(whole):  # else some were repeated to fill the last batch
        assert sorted([*seen, *left]) == list(range(n))


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("batching", ["batches", "samples", "batch sampler"])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(any_ranks: AnyRanks, batching: str, pad: bool) -> None:
    """With the next batch, and its length is what is left; then come whole epochs."""

    def scenario() -> Any:
        initialize_ddp()
        torch.manual_seed(5)

        def make() -> DataLoader[Any]:
            data = numbers(61)
            if batching == "samples":
                loader: DataLoader[Any] = DataLoader(data, batch_size=None, shuffle=True)
            elif batching == "batch sampler":
                loader = DataLoader(data, batch_sampler=[list(range(i, min(i + 4, 61))) for i in range(0, 61, 4)])
            else:
                loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=pad)
            return prepare_dataloader(loader, seed=1, pad=pad)

        whole = make()
        epochs = [drawn(whole) for _ in range(3)]
        for steps in (1, len(whole) - 1):
            loader = make()
            loader.sampler.set_epoch(1)
            batches = iter(loader)
            taken = [next(batches)[0].tolist() for _ in range(steps)]
            again = make()
            again.load_state_dict(loader.state_dict())
            left = len(again)
            rest = drawn(again)
            assert taken + rest == epochs[1]
            assert len(rest) == left
            assert drawn(again) == epochs[2]
        return True

    assert all(any_ranks.run(scenario))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"length": 9, "position": 4},
            "of the middle of an epoch in which the loader drew 9 times, but this loader draws 10 times",
        ),
        ({"position": 11}, "the state begins at 11 of an epoch of 10"),
        ({"position": -1}, "the state begins at -1 of an epoch of 10"),
    ],
)
def test_a_state_of_another_loader(state: dict[str, int], words: str) -> None:
    """It is refused, and the loader is as it was."""
    loader = prepare_dataloader(DataLoader(numbers(10), batch_size=2))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(before | {"epoch": 3} | state)
    assert loader.state_dict() == before


class Buckets(Sampler[list[int]]):
    """Batches of another number in each epoch, as those of so many tokens each."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index] for index in range(len(self))])

    def __len__(self) -> int:
        return 8 + 4 * self.epoch


def test_an_epoch_may_have_a_length_of_its_own() -> None:
    """The loader goes on in it at any step, as the sampler knows its epoch first; also where it was over."""

    def make() -> Any:
        return prepare_dataloader(DataLoader(numbers(20), batch_sampler=Buckets()))

    straight = make()
    steps = []
    for epoch in range(3):
        for batch in straight:
            steps.append((epoch, str(batch), straight.state_dict()))
    for step, (_, _, state) in enumerate(steps):
        loader = make()
        loader.load_state_dict(state)
        rest = [str(batch) for _ in range(state["epoch"], 3) for batch in loader]
        assert rest == [batch for _, batch, _ in steps[step + 1 :]]


def test_a_dataset_may_have_grown_between_epochs() -> None:
    """Only in the middle of an epoch its length is that of the order."""
    loader: Any = prepare_dataloader(DataLoader(numbers(24), batch_size=2, shuffle=True), seed=1)
    for batches in (12, 13):  # at the last batch, and after it
        look(loader, batches)
        again: Any = prepare_dataloader(DataLoader(numbers(30), batch_size=2, shuffle=True), seed=1)
        again.load_state_dict(loader.state_dict())
        assert len(drawn(again)) == (0 if batches == 12 else 15)
        assert len(drawn(again)) == 15
        loader.set_epoch(0)


def test_an_epoch_can_be_gone_back_to() -> None:
    """`set_epoch` and the sampler's state give the order of that epoch again; the next one follows by itself."""
    loader = prepare_dataloader(DataLoader(numbers(20), batch_size=5, shuffle=True))
    first, second, state, third = drawn(loader), drawn(loader), loader.sampler.state_dict(), drawn(loader)
    loader.sampler.set_epoch(0)
    assert [drawn(loader), drawn(loader)] == [first, second]
    again = prepare_dataloader(DataLoader(numbers(20), batch_size=5, shuffle=True))
    again.sampler.load_state_dict(state)
    assert drawn(again) == third


class Unmeasured(IterableDataset[int]):
    """The numbers up to 12, as a stream that does not say how many these are."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(12), 12))


class Measured(Unmeasured):
    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("dataset", [numbers(12), Measured(), Unmeasured()])
@pytest.mark.parametrize("pad", [True, False])
def test_a_loop_over_epochs_goes_on_after_any_step(dataset: Any, pad: bool) -> None:
    """By the epoch that the loop has counted; after the last batch of an epoch, too."""

    def make() -> Any:
        shuffle = None if isinstance(dataset, IterableDataset) else True
        return prepare_dataloader(DataLoader(dataset, batch_size=5, shuffle=shuffle), seed=5, pad=pad)

    def steps(loader: Any, first: int) -> Iterator[tuple[list[int], int, Any]]:
        for epoch in range(first, 3):
            for batch in loader:
                yield (
                    torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist(),
                    epoch,
                    loader.state_dict(),
                )

    straight = list(steps(make(), 0))
    assert len(straight) == 9
    for step, (_, epoch, state) in enumerate(straight):
        loader = make()
        loader.load_state_dict(state)
        assert list(steps(loader, epoch)) == straight[step + 1 :]


@pytest.mark.parametrize("dataset", [numbers(12), Measured()])
def test_so_many_batches_as_the_loader_has_are_an_epoch(dataset: Any) -> None:
    """Though nobody has asked for one more, the next iteration is the next epoch; of streams too that have a length."""
    loader: Any = prepare_dataloader(DataLoader(dataset, batch_size=5))
    for _ in range(2):
        look(loader, len(loader))
    look(loader)
    assert loader._share.epoch == 2


class Tuned(DataLoader[Any]):
    """A loader of somebody's own."""


@pytest.mark.parametrize("kind", [DataLoader, Tuned])
def test_a_prepared_loader_can_be_pickled(kind: Any) -> None:
    """As the one that was given could be; it goes on as the other would have."""
    loader = prepare_dataloader(kind(numbers(6), batch_size=2, shuffle=True))
    drawn(loader)
    sent = pickle.loads(pickle.dumps(loader))
    assert isinstance(sent, kind)
    assert [drawn(sent), drawn(sent)] == [drawn(loader), drawn(loader)]


def test_every_option_of_the_loader_is_kept() -> None:
    """Those that torch has now and those of a subclass; the loader that was given is as before."""

    class Mine(DataLoader[Any]):
        def __init__(self, *args: Any, flavour: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.flavour = flavour

    options: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": lambda items: torch.stack([x for (x,) in items]).neg(),
        "drop_last": True,
        "timeout": 20.0,
        "worker_init_fn": print,
        "multiprocessing_context": "fork",
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": False,
        "in_order": False,
    }
    loader = Mine(numbers(8), **options, flavour="strange")
    sampler = loader.sampler
    prepared = prepare_dataloader(loader)
    assert isinstance(prepared, Mine)
    changed = {name for name, value in vars(loader).items() if vars(prepared)[name] is not value}
    assert changed == {"sampler", "batch_sampler"}
    assert loader.sampler is sampler
    prepared = prepare_dataloader(Mine(numbers(8), **options | {"worker_init_fn": None}, flavour="strange"))
    assert sorted(x for batch in prepared for x in batch.tolist()) == [-5, -4, -3, -2, -1, 0]


def test_drop_last_leaves_the_same_number_on_every_rank(any_ranks: AnyRanks) -> None:
    """A loader that drops its last batch never repeats a sample."""

    def scenario() -> Any:
        initialize_ddp()
        return drawn(prepare_dataloader(DataLoader(numbers(31), batch_size=4, drop_last=True)))

    results = any_ranks.run(scenario)
    everything = [x for batches in results for batch in batches for x in batch]
    assert len(everything) == len(set(everything))
    assert len({len(batches) for batches in results}) == 1
    assert all(len(batch) == 4 for batches in results for batch in batches)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SubsetRandomSampler([3, 5, 7, 9, 11]),
        lambda: WeightedRandomSampler([1.0] * 5 + [0.0] * 20, 10),
        lambda: Shuffled(9),
    ],
    ids=["subset", "weighted", "own"],
)
def test_a_sampler_is_drawn_alike_on_all_ranks(any_ranks: AnyRanks, make: Callable[[], Any]) -> None:
    """Its samples are shared out as one rank would have drawn them, though the ranks' own random numbers differ."""

    def scenario() -> Any:
        initialize_ddp()
        seed_everything(0)
        return drawn(prepare_dataloader(DataLoader(numbers(25), sampler=make()), pad=False))

    results = any_ranks.run(scenario)
    seed_everything(0)
    alone = drawn(prepare_dataloader(DataLoader(numbers(25), sampler=make()), pad=False))
    assert sorted(x for batches in results for batch in batches for x in batch) == sorted(
        x for batch in alone for x in batch
    )


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * k, 2 * k + 1] for k in torch.randperm(5).tolist()])

    def __len__(self) -> int:
        return 5


def test_batches_of_a_batch_sampler_are_shared_out_whole(any_ranks: AnyRanks) -> None:
    """One that is not torch's own keeps its batches together; torch's own is as ``batch_size``."""

    def scenario() -> Any:
        initialize_ddp()
        seed_everything(0)
        own = prepare_dataloader(DataLoader(numbers(10), batch_sampler=Pairs()), pad=False)
        plain = prepare_dataloader(DataLoader(numbers(12), batch_sampler=BatchSampler(range(12), 2, False)))
        return drawn(own), len(own), drawn(plain)

    results = any_ranks.run(scenario)
    batches = [batch for own, _, _ in results for batch in own]
    assert sorted(batches) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [count for _, count, _ in results] == [len(own) for own, _, _ in results]
    assert sorted(x for _, _, plain in results for batch in plain for x in batch) == list(range(12))
    assert all(len(batch) == 2 for _, _, plain in results for batch in plain)


def test_what_cannot_be_shared_out_is_rejected_by_name(any_ranks: AnyRanks) -> None:
    """On every rank alike, with what to do instead."""

    def scenario() -> Any:
        initialize_ddp()
        told = []
        for loader in (
            prepare_dataloader(DataLoader(Shards(4))),
            DataLoader(numbers(4), sampler=DistributedSampler(numbers(4), 2, 0)),
            prepare_dataloader(DataLoader(numbers(4))),
            DataLoader(numbers(4), drop_last=True),
        ):
            try:
                prepare_dataloader(loader, pad=not loader.drop_last)
            except (TypeError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
        return told

    for stream, sharded, twice, dropping in any_ranks.run(scenario):
        assert stream == twice
        assert twice == (
            "ValueError: The loader is prepared already: pass the loader from before prepare_dataloader()."
        )
        assert sharded == (
            "ValueError: The loader already shares its samples out: its DistributedSampler takes the part of rank 0 of "
            "2. Use the loader without prepare_dataloader(), or give it a sampler that draws the samples of all ranks."
        )
        assert dropping == (
            "ValueError: drop_last=True leaves samples out, but pad=False must not: give the loader drop_last=False."
        )


class Shards(IterableDataset[int]):
    """The numbers up to ``n`` in a random order; each worker draws its own, as torch's documentation does it."""

    def __init__(self, n: int, shuffles: bool = True) -> None:
        self.n, self.shuffles, self.begin, self.end = n, shuffles, 0, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        count, own = (info.num_workers, info.id) if info else (1, 0)
        mine = list(range(self.begin, self.end))[own::count]
        if self.shuffles:
            random.shuffle(mine)
        for index in range(len(mine)):
            if self.shuffles:  # draws as it goes, too
                other = torch.randint(index, len(mine), ()).item()
                mine[index], mine[other] = mine[other], mine[index]
            yield mine[index]


def stream_shares(n: int, world_size: int, batch_size: int | None, **options: Any) -> list[list[Any]]:
    """The batches of each rank of the numbers up to ``n``."""
    loader = {"batch_size": batch_size, "num_workers": 0}
    streams = [Stream(Shards(n, False), rank, world_size, seed=0, **options, **loader) for rank in range(world_size)]
    assert [len(stream) for stream in streams] == [len(list(stream)) for stream in streams]
    return [list(stream) for stream in streams]


@pytest.mark.slow
@given(n=st.integers(0, 40), world_size=st.integers(1, 4), batch_size=st.integers(1, 4))
def test_a_stream_is_shared_out_batch_by_batch(n: int, world_size: int, batch_size: int) -> None:
    """Each sample once, equally many batches: together those that one rank would draw; padded, or cut, at the end."""
    whole = [list(range(n))[start : start + batch_size * world_size] for start in range(0, n, batch_size * world_size)]
    ranks = stream_shares(n, world_size, batch_size, pad=False, drop=False)
    assert sorted(sample for rank in ranks for batch in rank for sample in batch) == list(range(n))
    if n >= world_size:
        assert len({len(rank) for rank in ranks}) == 1
        assert all(
            len(batch) <= batch_size + (step == len(rank) - 1) for rank in ranks for step, batch in enumerate(rank)
        )
    ranks = stream_shares(n, world_size, batch_size, pad=True, drop=False)
    assert len({str([len(batch) for batch in rank]) for rank in ranks}) == 1
    together = [sorted(itertools.chain(*batches)) for batches in zip(*ranks, strict=True)]
    assert together[:-1] == whole[:-1]
    assert {sample for batch in together for sample in batch} == set(range(n))
    ranks = stream_shares(n, world_size, batch_size, pad=False, drop=True)
    assert [sorted(itertools.chain(*batches)) for batches in zip(*ranks, strict=True)] == [
        batch for batch in whole if len(batch) == batch_size * world_size
    ]


@given(n=st.integers(0, 20), world_size=st.integers(1, 4))
def test_ready_batches_of_a_stream_are_shared_out_whole(n: int, world_size: int) -> None:
    """What the dataset makes goes to one rank each, in turn; padded, all have as many."""
    assert (
        stream_shares(n, world_size, None, pad=False, drop=False)
        == [list(range(n))[rank::world_size] for rank in range(world_size)]
        if n % world_size == 0
        else True
    )
    padded = stream_shares(n, world_size, None, pad=True, drop=False)
    assert len({len(rank) for rank in padded}) == 1
    assert {sample for rank in padded for sample in rank} == set(range(n))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_in_random_order_is_the_same_on_all_ranks(any_ranks: AnyRanks, workers: int) -> None:
    """Whatever the seeds of the ranks: no sample twice, other orders in each epoch, and it goes on in the middle."""

    def scenario() -> Any:
        seed_everything(3)  # another one on each rank
        own = random.Random(1)

        def make() -> Any:
            loader = DataLoader(
                Shards(47), batch_size=3, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            return prepare_dataloader(loader, pad=False)

        random.seed(own.random())
        before = random.getstate()
        loader = make()
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        if not workers:
            assert random.getstate() == before
        loader.set_epoch(1)
        batches = iter(loader)
        taken = [next(batches).tolist() for _ in range(2)]
        other = make()
        other.load_state_dict(loader.state_dict())
        left = len(other)
        return epochs, taken + [batch.tolist() for batch in other], left, [batch.tolist() for batch in other]

    results = any_ranks.run(scenario)
    for epoch in range(2):
        drawn = [sample for epochs, *_ in results for batch in epochs[epoch] for sample in batch]
        assert sorted(drawn) == list(range(47))
    assert all(epochs[0] != epochs[1] for epochs, *_ in results)
    for epochs, continued, left, third in results:
        assert continued == epochs[1]
        assert third not in epochs
        assert left == len(epochs[1]) - 2 or workers
    assert len({len(epochs[0]) for epochs, *_ in results}) == 1


def test_workers_that_outlive_an_epoch_know_the_next_one() -> None:
    """With ``persistent_workers`` the dataset in them is a copy, made before the first epoch."""
    options: Any = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader: Any = prepare_dataloader(DataLoader(Shards(20), batch_size=4, **options))
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == epochs[1]
    loader.load_state_dict(loader.state_dict() | {"seed": 5, "epoch": 1})
    other: Any = prepare_dataloader(DataLoader(Shards(20), batch_size=4, **options), seed=5)
    other.set_epoch(1)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in other] != epochs[1]
    for each in (loader, other):
        each._iterator._shutdown_workers()


def own_part(worker: int) -> None:
    """As torch's documentation has a ``worker_init_fn`` share out the samples."""
    info: Any = get_worker_info()
    per_worker = -(-info.dataset.n // info.num_workers)
    info.dataset.begin, info.dataset.end = worker * per_worker, min((worker + 1) * per_worker, info.dataset.n)
    info.dataset.__class__ = Whole


class Whole(Shards):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, self.end))


def test_a_worker_init_fn_finds_its_dataset() -> None:
    """What it sets there, each worker draws."""
    loader: Any = DataLoader(
        Shards(10), num_workers=2, worker_init_fn=own_part, multiprocessing_context="fork", batch_size=2
    )
    batches = [batch.tolist() for batch in prepare_dataloader(loader)]
    assert sorted(sample for batch in batches for sample in batch) == list(range(10))
    assert [0, 1] in batches


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"together": 8}, "of a loader with 8 samples in the batches of all ranks together, but this one has 4"),
        ({"num_workers": 2}, "of a loader with 2 workers, but this one has 0"),
        ({"together": None}, "of a loader with None samples"),
    ],
)
def test_a_state_of_another_stream(state: dict[str, int], words: str) -> None:
    """It is refused, with what differs."""
    loader: Any = prepare_dataloader(DataLoader(Shards(9), batch_size=4))
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(loader.state_dict() | state)


def test_batches_come_on_the_device_of_the_rank() -> None:
    """With ``to_device=False`` they stay where they are."""
    initialize_ddp(device="meta")
    try:
        for to_device in (True, False):
            loaders = [DataLoader(numbers(4)), DataLoader(Shards(4))]
            for loader in [prepare_dataloader(each, to_device=to_device) for each in loaders]:
                first: Any = next(iter(loader))
                assert (first[0] if isinstance(first, list) else first).is_meta is to_device
    finally:
        cleanup_ddp()


@pytest.mark.parametrize("generator", [None, 0])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_other_numbers_on_each_rank(any_ranks: AnyRanks, generator: int | None, persistent: bool) -> None:
    """`seed_everything` reaches NumPy, Python and torch in the loader's processes; so does its generator."""

    class Noise(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1).item(), random.random(), np.random.rand()

    def scenario() -> Any:
        initialize_ddp()

        def draws() -> list[Any]:
            seed_everything(3)
            own = None if generator is None else torch.Generator().manual_seed(generator)
            options: Any = {"multiprocessing_context": "fork", "persistent_workers": persistent, "generator": own}
            loader = prepare_dataloader(DataLoader(Noise(), batch_size=None, num_workers=2, **options))
            assert loader.generator is own
            return [sample for _ in range(2) for sample in loader]

        return draws(), draws()

    results = any_ranks.run(scenario)
    assert all(first == again for first, again in results)
    drawn_numbers = [number for first, _ in results for sample in first for number in sample]
    assert len(set(drawn_numbers)) == len(drawn_numbers)


def test_two_loaders_have_two_orders(any_ranks: AnyRanks) -> None:
    """Zipped, as for two unpaired sets of images, they do not give the same pairs each time; nor with one generator."""

    def scenario() -> Any:
        initialize_ddp()
        torch.manual_seed(3)
        one = torch.Generator().manual_seed(0)
        loaders = [
            prepare_dataloader(DataLoader(numbers(24), shuffle=True, generator=generator))
            for generator in (None, None, one, one)
        ]
        alike_afterwards = torch.rand(1).item(), torch.rand(1, generator=one).item()
        return [str(drawn(loader)) for loader in loaders], alike_afterwards

    results = any_ranks.run(scenario)
    assert all(len(set(orders)) == 4 for orders, _ in results)
    assert len({numbers for _, numbers in results}) == 1


class Counted(Sampler[int]):
    """The numbers up to ``n``, drawn one by one: it says how many were."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.drawn = 0
        self.difficulty = 1

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return self.n


class Queue(IterableDataset[int]):
    """A stream of what is put into a queue, as the rollouts of a policy: asking for more than is there is an error."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.items.pop(0)  # an IndexError instead of waiting


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_is_drawn_ahead_of_need(drop_last: bool, world_size: int) -> None:
    """So a sampler may follow the training, and a loop may fill the queue that it reads from."""
    source = Counted(1000)
    options = {"seed": 0, "pad": not drop_last, "drop": drop_last}
    sampler = RankSampler(source, 0, world_size, batch_size=4 * world_size, **options)  # type: ignore[arg-type]
    batches = iter(BatchSampler(sampler, 4, drop_last))
    for step in range(1, 4):
        assert len(next(batches)) == 4
        assert source.drawn == 4 * world_size * step
    queue = Queue()
    alone = Stream(queue, 0, 1, batch_size=4, num_workers=0, seed=0, pad=False, drop=False)
    queue.items += range(4)
    assert next(iter(alone)) == [0, 1, 2, 3]  # each sample on one rank: no need to know what follows
    stream = Stream(queue, 0, world_size, batch_size=4, num_workers=0, **options)  # type: ignore[arg-type]
    batches = iter(stream)
    for step in range(3):
        queue.items += [step] * 4 * world_size
        assert next(batches) == [step] * 4


def test_a_sampler_that_follows_the_training_is_drawn_as_by_torch() -> None:
    """Each index depends on what was made of the ones before it."""

    class Hardest(Sampler[int]):
        def __init__(self) -> None:
            self.loss = torch.zeros(6)

        def __iter__(self) -> Iterator[int]:
            for _ in range(6):
                yield int(self.loss.argmax())

        def __len__(self) -> int:
            return 6

    def indices(prepare: Callable[[Any], Any]) -> list[int]:
        sampler = Hardest()
        sampler.loss[2] = 5.0
        drawn = []
        for (x,) in prepare(DataLoader(numbers(6), batch_size=1, sampler=sampler)):
            drawn.append(int(x))
            sampler.loss[x] -= 3.0
            sampler.loss[(x + 1) % 6] += 2.5
        return drawn

    assert indices(prepare_dataloader) == indices(lambda loader: loader) == [2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("pad", [True, False])
def test_a_sampler_without_a_length_is_shared_out(any_ranks: AnyRanks, pad: bool) -> None:
    """Torch does not ask for one either. One without an end goes on for as long as it is asked."""

    class Endless(Sampler[int]):
        def __init__(self, n: int | None = None) -> None:
            self.n = n

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.n)) if self.n else itertools.cycle(range(24))

    def scenario() -> Any:
        initialize_ddp()
        loader: Any = prepare_dataloader(DataLoader(numbers(24), batch_size=2, sampler=Endless(11)), pad=True)
        state = loader.state_dict()
        endless = prepare_dataloader(DataLoader(numbers(24), batch_size=2, sampler=Endless()), pad=pad)
        return drawn(loader), state["length"], [x.tolist() for (x,) in itertools.islice(endless, 20)]

    results = any_ranks.run(scenario)
    assert sorted({x for batches, *_ in results for batch in batches for x in batch}) == list(range(11))
    assert len({len(batches) for batches, *_ in results}) == 1
    assert [length for _, length, _ in results] == [None] * len(results)
    together = [sorted(itertools.chain(*(r[2][step] for r in results))) for step in range(20)]
    per_step = 2 * len(results)
    assert together == [sorted((step * per_step + k) % 24 for k in range(per_step)) for step in range(20)]


def test_what_the_user_has_given_is_found_in_the_loader(any_ranks: AnyRanks) -> None:
    """The dataset itself, with its length and attributes; the sampler's attributes, to read and to set."""

    def scenario() -> bool:
        initialize_ddp()
        samples, stream, sampler = numbers(24), Shards(24), Counted(24)
        loader: Any = prepare_dataloader(DataLoader(samples, batch_size=4, sampler=sampler))
        assert loader.dataset is samples
        assert loader.sampler.difficulty == 1
        loader.sampler.difficulty = 2
        assert sampler.difficulty == 2
        with pytest.raises(AttributeError, match="'Counted' object has no attribute 'weights'"):
            _ = loader.sampler.weights
        collate = torch.stack
        initialize = print
        given: Any = DataLoader(stream, batch_size=4, collate_fn=collate, num_workers=2, worker_init_fn=initialize)
        loader = prepare_dataloader(given, pad=False)
        assert (loader.dataset is stream, len(loader.dataset), loader.dataset.shuffles) == (True, 24, True)
        changed = {name for name, value in vars(given).items() if vars(loader)[name] is not value}
        return not changed

    assert all(any_ranks.run(scenario))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_datapipe_is_shared_out_once(any_ranks: AnyRanks, workers: int, shuffle: bool) -> None:
    """Its sharding filter is for the workers of the loader, which shuffle alike; the ranks share what they draw."""

    def scenario() -> Any:
        from torch.utils.data.datapipes.iter import IterableWrapper

        seed_everything(0)
        pipe = IterableWrapper(range(24)).shuffle().sharding_filter() if shuffle else IterableWrapper(range(24))
        pipe = pipe if shuffle else pipe.sharding_filter()
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        loader = prepare_dataloader(DataLoader(pipe, batch_size=2, shuffle=shuffle, **options), pad=False)
        return [[x.tolist() for x in loader] for _ in range(2)]

    results = any_ranks.run(scenario)
    for epoch in range(2):
        assert sorted(x for epochs in results for batch in epochs[epoch] for x in batch) == list(range(24))
    assert (results[0][0] == results[0][1]) is not shuffle


class Timetable(IterableDataset[int]):
    """Samples that depend on the epoch alone, as far as the dataset knows it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([10 * self.epoch, 10 * self.epoch + 1])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_is_told_the_epoch(workers: int, persistent: bool) -> None:
    """The next one when one has ended, the one that is gone to, the one that was loaded; workers that live on, too."""
    options: Any = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    options["multiprocessing_context"] = "fork" if workers else None
    loader: Any = prepare_dataloader(DataLoader(Timetable(), batch_size=2, **options))
    epochs = [drawn_stream(loader), drawn_stream(loader)]
    state = loader.state_dict()
    loader.set_epoch(5)
    assert loader.dataset.epoch == 5
    epochs += [drawn_stream(loader), drawn_stream(loader)]
    loader.load_state_dict(state)
    epochs += [drawn_stream(loader)]
    assert epochs == [[0, 1], [10, 11], [50, 51], [60, 61], [20, 21]]
    if options["persistent_workers"]:  # torch cannot pickle them
        loader._iterator._shutdown_workers()
    else:
        assert drawn_stream(pickle.loads(pickle.dumps(loader))) == drawn_stream(loader) == [30, 31]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_tells_its_dataset_the_epoch_has_the_last_word(workers: int) -> None:
    """Also if it begins with another one than the loader, which knows of no epochs before."""
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    dataset, sampler = Timetable(), ShuffledByEpoch()
    stream: Any = prepare_dataloader(DataLoader(dataset, batch_size=2, **options))
    loader: Any = prepare_dataloader(DataLoader(numbers(5), sampler=sampler))
    epochs = []
    for epoch in range(7, 10):
        dataset.set_epoch(epoch)
        sampler.set_epoch(epoch)
        epochs.append(drawn_stream(stream))
        assert drawn(loader)[0] == [epoch % 5]
    assert epochs == [[70, 71], [80, 81], [90, 91]]


class ShuffledByEpoch(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + k) % 5 for k in range(5)])

    def __len__(self) -> int:
        return 5


def drawn_stream(loader: Any) -> list[int]:
    return [x for batch in loader for x in batch.tolist()]


@pytest.mark.parametrize("dataset", [numbers(24), Measured()])
def test_a_resumed_loop_may_set_the_epoch_that_it_is_in(dataset: Any) -> None:
    """The loops of all tutorials do, at the top of each epoch: the position that was loaded stays."""

    def make() -> Any:
        shuffle = None if isinstance(dataset, IterableDataset) else True
        return prepare_dataloader(DataLoader(dataset, batch_size=2, shuffle=shuffle), seed=1)

    def epoch_of(loader: Any, epoch: int) -> list[Any]:
        loader.set_epoch(epoch)
        return [str(batch) for batch in loader]

    whole = [epoch_of(make(), 0), epoch_of(make(), 1)]
    for steps in range(1, len(whole[0]) + 1):
        loader = make()
        loader.set_epoch(0)
        taken = [str(batch) for _, batch in zip(range(steps), loader, strict=False)]
        again = make()
        again.load_state_dict(loader.state_dict())
        assert taken + epoch_of(again, 0) == whole[0]
        assert epoch_of(again, 1) == whole[1]
        assert epoch_of(again, 1) == whole[1]  # another time: from its beginning


class Repeat:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader[Any]):
    """As those of timm, ultralytics and DomainBed: it keeps its workers by a batch sampler without an end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_never_ends_is_prepared_as_the_one_in_it(any_ranks: AnyRanks, workers: int) -> None:
    """With the same epochs, in each its own order; the one that was given is as before."""

    def scenario() -> Any:
        initialize_ddp()
        torch.manual_seed(0)
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        given = Endless(numbers(12), batch_size=2, shuffle=True, **options)
        plain = prepare_dataloader(DataLoader(numbers(12), batch_size=2, shuffle=True), seed=4)
        loader = prepare_dataloader(given, seed=4)
        epochs = [drawn(loader) for _ in range(2)]
        assert isinstance(loader, Endless)
        assert len(loader) == len(epochs[0])
        return epochs == [drawn(plain) for _ in range(2)], len(drawn(given))

    assert any_ranks.run(scenario) == [(True, 6)] * len(any_ranks.run(int))


def test_an_iterator_that_a_program_keeps_is_no_loader_without_an_end() -> None:
    """Persistent workers, and an attribute of a class that iterates as torch does."""

    class Keeping(DataLoader[Any]):
        pass

    loader: Any = Keeping(numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
    loader.current = iter(loader)
    assert drawn(prepare_dataloader(loader)) == [[0, 1], [2, 3], [4, 5]]
    loader.current._shutdown_workers()
