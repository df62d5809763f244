"""`prepare_dataloader`: each sample on one rank, alike for any number of ranks, with every option of the loader."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from nn_parallel import (
    all_gather_tensor,
    current_world,
    initialize_ddp,
    prepare_dataloader,
    prepare_model,
    seed_everything,
)
from nn_parallel.training.data import EvenBatches, RankSampler


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


FIRST_USE_OF_NUMPY = """
import sys
from nn_parallel.training.data import RankSampler

class Shuffled:
    def __iter__(self):
        import numpy
        return iter(numpy.random.permutation(100).tolist())

assert "numpy" in sys.modules and "numpy.random" not in sys.modules
first, again = (list(RankSampler(Shuffled(), 0, 1, seed=0, pad=True, drop=False, batch_size=1)) for _ in range(2))
assert first == again
"""


def test_the_first_use_of_numpy_is_seeded_too() -> None:
    """NumPy loads its random numbers when they are first used: by the sampler, in a new process."""
    subprocess.run([sys.executable, "-c", FIRST_USE_OF_NUMPY], check=True)


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


def test_the_order_is_that_of_one_rank_shared_out(world: World) -> None:
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

    results = world.run(scenario)
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
def test_a_rank_that_looks_at_some_batches_stays_in_step(world: World, workers: int) -> None:
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
        results = world.run(scenario, how_many)
        epochs = [sorted(itertools.chain(*(shares[epoch] for shares, _ in results))) for epoch in range(2)]
        assert epochs == [list(range(24))] * 2
        assert {epoch for _, epoch in results} == {2}
        assert results[0][0][0] != results[0][0][1]


def test_the_last_batch_ends_an_epoch() -> None:
    """Also where nobody asks for one more; several iterations at a time over one epoch end it once."""
    loader = prepare_dataloader(DataLoader(numbers(6), batch_size=2, shuffle=True))
    look(loader, 2)
    assert loader.sampler.epoch == 0
    look(loader, 3)
    assert loader.sampler.epoch == 1
    for _ in zip(loader, loader, strict=True):
        pass
    assert loader.sampler.epoch == 2
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
        "Epoch 0 of a loader begins again, in the same order, because it was left after 3 of 5 batches. If it is over, "
        "call loader.sampler.set_epoch(1) before the next iteration."
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
def test_the_order_follows_the_seed_of_rank_0(world: World, how: str) -> None:
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

    one, two, again = (world.run(scenario, seed) for seed in (1, 2, 1))
    assert one == again
    assert one[0][0] != two[0][0]
    for epoch in range(2):
        assert sorted(itertools.chain(*(shares[epoch] for shares in one))) == list(range(24))


def test_the_state_of_the_sampler_holds_the_seed() -> None:
    """Training that was not seeded goes on in its own order; a state without a seed leaves it as it is."""
    torch.manual_seed(1)
    loader = prepare_dataloader(DataLoader(numbers(20), shuffle=True))
    state, order = loader.sampler.state_dict(), drawn(loader)
    torch.manual_seed(2)
    again = prepare_dataloader(DataLoader(numbers(20), shuffle=True))
    assert drawn(again) != order
    again.sampler.load_state_dict({"epoch": 0})
    assert drawn(again) != order
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
def test_collectives_in_a_loop_without_padding_come_to_an_end(world: World, n: int) -> None:
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

    assert world.run(scenario) == [list(range(n))] * len(world.run(int))


class Growing(torch.utils.data.Dataset[torch.Tensor]):
    """Samples no two of which can be collated."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_cannot_be_collated_stay_batches_of_their_own(world: World, workers: int) -> None:
    """One at a time they are no less a batch than before, each on one rank."""

    def scenario() -> list[list[list[int]]]:
        initialize_ddp()
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        loader = prepare_dataloader(DataLoader(Growing(), batch_size=1, **options), pad=False)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    results = world.run(scenario)
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
def test_a_loader_goes_on_in_the_middle_of_an_epoch(world: World, batching: str, pad: bool) -> None:
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

    assert all(world.run(scenario))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"length": 9}, "it is of a loader that draws 9 times an epoch, and this one 10"),
        ({"position": 11}, "it begins at 11 of an epoch of 10"),
        ({"position": -1}, "it begins at -1 of an epoch of 10"),
    ],
)
def test_a_state_of_another_loader(state: dict[str, int], words: str) -> None:
    """It is refused, and the loader is as it was."""
    loader = prepare_dataloader(DataLoader(numbers(10), batch_size=2))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(before | {"epoch": 3} | state)
    assert loader.state_dict() == before


def test_an_epoch_can_be_gone_back_to() -> None:
    """`set_epoch` and the sampler's state give the order of that epoch again; the next one follows by itself."""
    loader = prepare_dataloader(DataLoader(numbers(20), batch_size=5, shuffle=True))
    first, second, state, third = drawn(loader), drawn(loader), loader.sampler.state_dict(), drawn(loader)
    loader.sampler.set_epoch(0)
    assert [drawn(loader), drawn(loader)] == [first, second]
    again = prepare_dataloader(DataLoader(numbers(20), batch_size=5, shuffle=True))
    again.sampler.load_state_dict(state)
    assert drawn(again) == third


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


def test_drop_last_leaves_the_same_number_on_every_rank(world: World) -> None:
    """A loader that drops its last batch never repeats a sample."""

    def scenario() -> Any:
        initialize_ddp()
        return drawn(prepare_dataloader(DataLoader(numbers(31), batch_size=4, drop_last=True)))

    results = world.run(scenario)
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
def test_a_sampler_is_drawn_alike_on_all_ranks(world: World, make: Callable[[], Any]) -> None:
    """Its samples are shared out as one rank would have drawn them, though the ranks' own random numbers differ."""

    def scenario() -> Any:
        initialize_ddp()
        seed_everything(0)
        return drawn(prepare_dataloader(DataLoader(numbers(25), sampler=make()), pad=False))

    results = world.run(scenario)
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


def test_batches_of_a_batch_sampler_are_shared_out_whole(world: World) -> None:
    """One that is not torch's own keeps its batches together; torch's own is as ``batch_size``."""

    def scenario() -> Any:
        initialize_ddp()
        seed_everything(0)
        own = prepare_dataloader(DataLoader(numbers(10), batch_sampler=Pairs()), pad=False)
        plain = prepare_dataloader(DataLoader(numbers(12), batch_sampler=BatchSampler(range(12), 2, False)))
        return drawn(own), len(own), drawn(plain)

    results = world.run(scenario)
    batches = [batch for own, _, _ in results for batch in own]
    assert sorted(batches) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [count for _, count, _ in results] == [len(own) for own, _, _ in results]
    assert sorted(x for _, _, plain in results for batch in plain for x in batch) == list(range(12))
    assert all(len(batch) == 2 for _, _, plain in results for batch in plain)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_what_cannot_be_shared_out_is_rejected_by_name(world: World) -> None:
    """On every rank alike, with what to do instead."""

    def scenario() -> Any:
        initialize_ddp()
        told = []
        for loader in (
            DataLoader(Endless()),
            DataLoader(numbers(4), sampler=iter([1, 2])),  # type: ignore[arg-type]
            DataLoader(numbers(4), sampler=DistributedSampler(numbers(4), 2, 0)),
            prepare_dataloader(DataLoader(numbers(4))),
            DataLoader(numbers(4), drop_last=True),
        ):
            try:
                prepare_dataloader(loader, pad=not loader.drop_last)
            except (TypeError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
        return told

    for endless, lengthless, sharded, twice, dropping in world.run(scenario):
        assert endless.startswith("TypeError: Endless is an IterableDataset")
        assert "current_world().rank" in endless
        assert (
            lengthless
            == "TypeError: list_iterator has no length, so it cannot be shared out evenly: give it a __len__."
        )
        assert (
            sharded
            == "ValueError: The loader shares its samples out already, by a DistributedSampler: pass one without."
        )
        assert "by a RankSampler" in twice
        assert dropping == (
            "ValueError: drop_last=True leaves samples out, and pad=False none: give the loader drop_last=False."
        )


def test_alone_an_iterable_dataset_is_as_it_was() -> None:
    """There is nothing to share out."""
    assert current_world().world_size == 1
    loader = DataLoader(Endless())
    assert prepare_dataloader(loader) is loader


def test_workers_draw_other_numbers_on_each_rank(world: World) -> None:
    """`seed_everything` reaches NumPy, Python and torch in the loader's processes."""

    class Noise(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1).item(), random.random(), np.random.rand()

    def scenario() -> Any:
        initialize_ddp()
        seed_everything(3)
        loader = prepare_dataloader(DataLoader(Noise(), batch_size=None, num_workers=2, multiprocessing_context="fork"))
        first = list(loader)
        seed_everything(3)
        loader.sampler.set_epoch(0)
        return first, list(loader)

    results = world.run(scenario)
    assert all(first == again for first, again in results)
    drawn_numbers = [number for first, _ in results for sample in first for number in sample]
    assert len(set(drawn_numbers)) == len(drawn_numbers)
