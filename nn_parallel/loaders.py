"""A `DataLoader` whose samples are shared out between the ranks."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from .ddp import join_launched_world
from .world import current_world

T = TypeVar("T")


def prepare_dataloader(loader: DataLoader[T], *, pad: bool = True, seed: int = 0) -> DataLoader[T]:
    """A loader like this one, of which each rank draws its part. Alone, that is all.

    Everything else is as in ``loader``: the batch size, now that of each rank, workers, pinning, collation. All ranks
    draw what its sampler gives, with the same random numbers, and each takes every ``world_size``-th sample; of a batch
    sampler that is not torch's own, every ``world_size``-th batch. The order depends on ``seed`` and the epoch alone,
    not on the number of ranks, and every time that the loader is iterated over is a new epoch.

    To go on in a later epoch, call ``loader.sampler.set_epoch(epoch)`` before, or pass ``loader.sampler`` to
    `save_checkpoint` and `load_checkpoint`.

    Args:
        pad: give every rank the same number of samples, for training: the first ones are repeated, or the last ones
            left out if ``loader`` has ``drop_last``. False, for evaluation: each sample is on exactly one rank, and one
            rank may have a sample, or a batch, more than another.
        seed: of the order, the same on all ranks.

    Raises:
        TypeError: the dataset is iterable and there are several ranks: only it can say which samples are whose. The
            sampler has no length.
        ValueError: the loader shares its samples out already.

    Example::

        loader = prepare_dataloader(DataLoader(dataset, batch_size=32, shuffle=True))
        for epoch in range(epochs):
            for x, y in loader:  # in another order each time
                ...
    """
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
    batches = loader.batch_sampler
    source: Any = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    if isinstance(source, DistributedSampler | RankSampler):
        raise ValueError(f"The loader shares its samples out already, by a {type(source).__name__}: pass one without.")
    if not isinstance(source, Sized):
        raise TypeError(f"{type(source).__name__} has no length, so it cannot be shared out evenly: give it a __len__.")
    drops = pad and bool(getattr(batches, "drop_last", False))
    sampler = RankSampler(source, world.rank, world.world_size, seed=seed, pad=pad and not drops, drop=drops)
    if type(batches) is BatchSampler:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    elif batches is not None:
        batches = sampler
    prepared = copy.copy(loader)
    # Past the setter, which forbids it for a loader that has been made.
    vars(prepared).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return prepared


class RankSampler(Sampler[Any]):
    """One rank's part of what another sampler, or a batch sampler, draws: each rank draws all of it alike."""

    def __init__(self, source: Any, rank: int, world_size: int, *, seed: int, pad: bool, drop: bool) -> None:
        self._source, self._rank, self._world_size, self._seed = source, rank, world_size, seed
        self._pad, self._drop = pad, drop
        self.epoch = 0  # the next one

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, the one after it the next."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if set_epoch := getattr(self._source, "set_epoch", None):
            set_epoch(epoch)
        with _random_numbers_of(self._seed + epoch, self._source):
            drawn = list(self._source)
        over = len(drawn) % self._world_size
        if over and self._drop:
            del drawn[-over:]
        elif over and self._pad:
            drawn += [drawn[index % len(drawn)] for index in range(self._world_size - over)]
        return iter(drawn[self._rank :: self._world_size])

    def __len__(self) -> int:
        count, over = divmod(len(self._source), self._world_size)
        if self._drop:
            return count
        return count + (over > 0 if self._pad else self._rank < over)


@contextlib.contextmanager
def _random_numbers_of(seed: int, source: Iterable[Any]) -> Iterator[None]:
    """Whatever generator ``source`` draws from gives the numbers of ``seed``, and then goes on as if it had not."""
    own = getattr(source, "generator", None) or getattr(getattr(source, "sampler", None), "generator", None)
    generators = [torch.default_generator, *([own] if isinstance(own, torch.Generator) else [])]
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
