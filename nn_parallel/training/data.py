"""A `DataLoader` whose samples are shared out between the ranks."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from ..calls.blocks import blocks_of
from ..ddp import join_launched_world
from ..launch.context import current_world, rank_context
from ..on_rank import on_rank

T = TypeVar("T")
logger = logging.getLogger("nn_parallel")


def prepare_dataloader(loader: DataLoader[T], *, pad: bool = True, seed: int | None = None) -> DataLoader[T]:
    """A loader like this one, of which each rank draws its part; with one rank, all of it. Every rank calls it.

    Everything else is as in ``loader``: the batch size, now that of each rank, workers, pinning, collation. All ranks
    draw what its sampler gives, with the same random numbers, and each takes every ``world_size``-th sample; of a batch
    sampler that is not torch's own, every ``world_size``-th batch. The order depends on the seed and the epoch alone,
    not on the number of ranks.

    An epoch ends when its last batch is handed out, and the next iteration is the next epoch. An epoch that is left
    before is drawn again, so a rank that looks at a few batches stays in step with the others. To go to an
    epoch, call ``loader.sampler.set_epoch(epoch)``.

    The loader has a state, for ``save_checkpoint(..., loader=loader)``: the seed, the epoch, and how much of it was
    handed out. After `load_checkpoint` the next iteration draws the rest of that epoch, and ``len(loader)`` is how many
    batches it has: the same ones that would have come, where there are as many ranks; else each remaining sample once.
    What workers of the loader draw at random themselves, to augment images for instance, begins anew.

    Args:
        pad: give every rank the same number of samples, for training: the first ones are repeated, or the last ones
            left out if ``loader`` has ``drop_last``. False, for evaluation: each sample is on exactly one rank, and
            there are as many batches on every rank, so that there can be collectives in the loop. The last batch of
            some ranks may therefore hold one sample more. Only where that cannot be, one rank has a batch more than
            another: the samples cannot be collated (images of several sizes), there are fewer than ranks, or the
            loader has a batch sampler of your own.
        seed: of the order. If None: that of the loader's generator, else the one that `seed_everything` or
            ``torch.manual_seed`` has set; on several ranks that of rank 0.

    Raises:
        TypeError: it is no loader. The dataset is iterable and there are several ranks: only it can say which samples
            are whose. The sampler has no length.
        ValueError: the loader shares its samples out already, or leaves some out (``drop_last``) with ``pad=False``.

    Example::

        loader = prepare_dataloader(DataLoader(dataset, batch_size=32, shuffle=True))
        for epoch in range(epochs):
            for x, y in loader:  # in another order each time
                ...
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare_dataloader() takes a torch.utils.data.DataLoader, not {loader!r}.")
    join_launched_world()
    world = current_world()
    if isinstance(loader.dataset, IterableDataset):
        if world.world_size == 1:
            return loader
        raise TypeError(
            f"{type(loader.dataset).__name__} is an IterableDataset, which nobody but itself can share out between "
            f"{world.world_size} ranks: have its __iter__ yield the samples of current_world().rank, and leave "
            "prepare_dataloader out."
        )
    batches: Any = loader.batch_sampler
    is_torchs = type(batches) in (BatchSampler, EvenBatches)
    source: Any = batches.sampler if is_torchs else batches or loader.sampler
    if isinstance(source, DistributedSampler | RankSampler):
        raise ValueError(f"The loader shares its samples out already, by a {type(source).__name__}: pass one without.")
    if not isinstance(source, Sized):
        raise TypeError(f"{type(source).__name__} has no length, so it cannot be shared out evenly: give it a __len__.")
    collate = loader.collate_fn
    drops = bool(getattr(batches, "drop_last", False))
    if drops and is_torchs and not pad:
        raise ValueError("drop_last=True leaves samples out, and pad=False none: give the loader drop_last=False.")
    sampler = RankSampler(
        source,
        world.rank,
        world.world_size,
        seed=_agreed_seed(source) if seed is None else seed,
        pad=pad and not drops,
        drop=pad and drops,
        batch_size=(batches.batch_size if is_torchs else 1) * world.world_size,
    )
    if is_torchs and pad:
        batches = BatchSampler(sampler, batches.batch_size, drops)
    elif is_torchs:
        collate = EvenCollate(collate, batches.batch_size)
        batches = EvenBatches(sampler, batches.batch_size)
    elif batches is not None:
        batches = sampler
    prepared = copy.copy(loader)
    kind = type(loader)
    counting = CountingLoader if kind is DataLoader else type(kind.__name__, (CountingLoader, kind), {})
    # Past the setter, which forbids it for a loader that has been made.
    object.__setattr__(prepared, "__class__", counting)
    vars(prepared).update(sampler=sampler, batch_sampler=batches, collate_fn=collate, _iterator=None)
    return prepared


class CountingLoader(DataLoader[T]):
    """A loader that tells its sampler how many batches of the epoch were handed out."""

    sampler: RankSampler

    def __iter__(self) -> Any:  # torch says: its own class
        if self.sampler.begin == 0:
            return _Batches(super().__iter__(), self.sampler, len(self))
        numbers = torch.get_rng_state()  # torch draws a seed for workers: before, that was at the begin of the epoch
        batches = super().__iter__()
        torch.set_rng_state(numbers)
        return _Batches(batches, self.sampler, len(self))

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.load_state_dict(state)


class _Batches(Iterator[T]):
    """The batches of one iteration. Only here is it known which were handed out: workers draw ahead."""

    def __init__(self, batches: Iterator[T], sampler: RankSampler, count: int) -> None:
        self._batches, self._sampler, self._count = batches, sampler, count
        self._taken = self._epoch = 0
        self._rest: list[T] = []  # of a batch that came in parts

    def __next__(self) -> T:
        if self._rest:
            return self._rest.pop()
        if self._taken == 0:
            self._epoch = self._sampler.epoch
        try:
            batch = next(self._batches)
        except StopIteration:
            self._sampler.note_taken(self._epoch, self._count, self._count)
            raise
        self._taken += 1
        self._sampler.note_taken(self._epoch, self._taken, self._count)
        if isinstance(batch, Parts):
            self._rest, batch = [batch.last], batch.first
        return batch


class RankSampler(Sampler[Any]):
    """One rank's part of what another sampler, or a batch sampler, draws: each rank draws all of it alike."""

    def __init__(
        self, source: Any, rank: int, world_size: int, *, seed: int, pad: bool, drop: bool, batch_size: int
    ) -> None:
        """``batch_size``: how much of the source the batches of all ranks hold together."""
        self._source, self._rank, self._world_size, self._seed = source, rank, world_size, seed
        self._pad, self._drop, self._batch_size = pad, drop, batch_size
        self.epoch = 0  # of the next iteration
        self.begin = 0  # where in the epoch that begins, in what the source draws
        self._left_after = 0  # so many batches of this epoch, by an iteration that may not have ended
        self._has_warned = type(source) is SequentialSampler  # there is nothing to warn of

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; when it has ended, the next one is the epoch after it."""
        self.epoch, self.begin, self._left_after = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The next batch of the last iteration, if that has not come to the end of the epoch."""
        position = min(self.begin + self._left_after * self._batch_size, len(self._source))
        return {"epoch": self.epoch, "seed": self._seed, "position": position, "length": len(self._source)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there.

        Raises:
            ValueError: that is a state of another loader.
        """
        position, length = state.get("position", 0), state.get("length", len(self._source))
        if length != len(self._source):
            raise ValueError(f"it is of a loader that draws {length} times an epoch, and this one {len(self._source)}.")
        if not 0 <= position <= length:
            raise ValueError(f"it begins at {position} of an epoch of {length}.")
        self.set_epoch(state["epoch"])
        self.begin, self._seed = position, state.get("seed", self._seed)

    def note_taken(self, epoch: int, taken: int, count: int) -> None:
        """An iteration over ``epoch`` has handed out ``taken`` of ``count`` batches; with the last one it ends."""
        if epoch != self.epoch:
            return
        if taken == 1 and self._left_after > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Epoch %d of a loader begins again, in the same order, because it was left after %d of %d batches. If "
                "it is over, call loader.sampler.set_epoch(%d) before the next iteration.",
                *(epoch, self._left_after, count, epoch + 1),
            )
        self._left_after = taken
        if taken >= count:
            self.set_epoch(epoch + 1)

    def draw(self) -> tuple[list[Any], int]:
        """The samples of this rank, and how many the rank with the fewest has."""
        if set_epoch := getattr(self._source, "set_epoch", None):
            set_epoch(self.epoch)
        with _random_numbers_of(self._seed + self.epoch, self._source):
            drawn = list(self._source)
        rest = drawn[self.begin :]
        over = len(rest) % self._world_size
        if over and self._drop:
            del rest[-over:]
        elif over and self._pad:
            rest += [drawn[index % len(drawn)] for index in range(self._world_size - over)]
        return rest[self._rank :: self._world_size], len(rest) // self._world_size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw()[0])

    @property
    def fewest(self) -> int:
        """How many samples the rank with the fewest has, if nothing is repeated."""
        return (len(self._source) - self.begin) // self._world_size

    def __len__(self) -> int:
        count, over = divmod(len(self._source) - self.begin, self._world_size)
        if self._drop:
            return count
        return count + (over > 0 if self._pad else self._rank < over)


class EvenBatches(BatchSampler):
    """As many batches as each other rank has, of samples that are not shared out evenly.

    One sample too many goes into the last batch, instead of being a batch alone.
    """

    sampler: RankSampler

    def __init__(self, sampler: RankSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[Any]]:
        samples, fewest = self.sampler.draw()
        last = (self._count(len(samples), fewest) - 1) * self.batch_size
        for start in range(0, last + 1, self.batch_size):
            yield samples[start : start + self.batch_size if start < last else None]

    def __len__(self) -> int:
        return self._count(len(self.sampler), self.sampler.fewest)

    def _count(self, samples: int, fewest: int) -> int:
        return max(math.ceil(fewest / self.batch_size), min(samples, 1))


class Parts(NamedTuple):
    """A batch that could not be collated as one."""

    first: Any
    last: Any


@dataclass
class EvenCollate:
    """The ``collate`` of a loader, for batches of which the last may have one sample too many."""

    collate: Callable[[list[Any]], Any]
    batch_size: int

    def __call__(self, samples: list[Any]) -> Any:
        if len(samples) > self.batch_size:
            try:
                return self.collate(samples)
            except Exception:  # of whatever does not go together; a sample that is bad by itself raises again
                return Parts(self.collate(samples[:-1]), self.collate(samples[-1:]))
        return self.collate(samples)


def _agreed_seed(source: Any) -> int:
    """The seed that ``source`` would draw with on rank 0; the ranks' own ones differ after `seed_everything`."""
    here = blocks_of(rank_context())
    draws_none = type(source) is SequentialSampler
    if draws_none or (here is not None and here.nested_in):  # where not all ranks are here to agree
        return 0
    return on_rank(0, broadcast=True)(_seed_of)(source)


def _seed_of(source: Any) -> int:
    return (_generator_of(source) or torch.default_generator).initial_seed() % 2**62  # the epoch is added to it


def _generator_of(source: Any) -> torch.Generator | None:
    """The generator of a sampler, or of the sampler in a batch sampler, if it has one of its own."""
    own = getattr(source, "generator", None) or getattr(getattr(source, "sampler", None), "generator", None)
    return own if isinstance(own, torch.Generator) else None


@contextlib.contextmanager
def _random_numbers_of(seed: int, source: Iterable[Any]) -> Iterator[None]:
    """Seed every generator that ``source`` may draw from; afterwards each is as it was."""
    own = _generator_of(source)
    generators = [torch.default_generator, *([own] if own else [])]
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None  # loaded now: ``source`` may be the first to use it
    try:
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpy_state)
