"""The share of one rank: the samples, or batches, that the rank takes out of all that a loader draws.

Every rank draws all samples, in the same order, and takes every ``world_size``-th one. So the ranks need not
communicate, every sampler and every iterable dataset can be shared out, and the order does not depend on the number of
ranks. While a rank draws, the random numbers of Python, NumPy and torch come from a separate sequence, which is seeded
from the seed of the loader and the number of the epoch. Therefore the order is the same on all ranks.

The rank draws a *round* at a time: as many samples as the batches of all ranks hold together. `Share` takes the part of
the rank out of each round.

For a dataset with a length, `RankSampler` replaces the sampler of the loader, in the process of the rank. For an
iterable dataset, `Stream` replaces the dataset, and runs in each worker process of the loader. A worker may live longer
than an epoch and then holds an old copy of the `Stream`, so the worker reads the epoch and the seed from shared memory.

Both are subclasses of `Epochs`, which counts epochs and the position within an epoch. Workers draw ahead, so a sampler
cannot know how many batches the user has received. The prepared loader does know this, and calls `Epochs.note_taken`
for each batch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from .._engine.torch_private import tree_map
from ._draws import PLACES, Checksums, checksums
from ._random_numbers import OwnRandomNumbers

State = dict[str, Any]  # the state of a prepared loader: maps names to numbers, or to None if a number is not known
logger = logging.getLogger("nn_parallel")
# These samplers draw all random numbers when an iteration begins. So only the first draw needs the separate sequence of
# random numbers, `OwnRandomNumbers`.
DRAW_AT_ONCE = {SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, range, list, tuple}


@dataclass(frozen=True)
class Share:
    """The rule by which one rank takes its share: every ``world_size``-th of the samples that all ranks draw.

    Attributes:
        rank: the rank.
        world_size: the number of ranks.
        together: the number of samples in a round, that is, in the batches of all ranks together.
        pad: if True, the first samples of the epoch are repeated at its end, to give all ranks the same number of
            samples.
        drop: if True, the last samples of the epoch are left out, to give all ranks the same number of samples.
    """

    rank: int
    world_size: int
    together: int
    pad: bool
    drop: bool

    def batches(self, draw: Callable[[], list[Any]], first: list[Any]) -> Iterator[list[Any]]:
        """Yield the batches of this rank, round by round. A round is the samples of one batch for each rank.

        A round is drawn only when the caller asks for the batch. There is one exception: if every sample must be on
        exactly one rank (neither ``pad`` nor ``drop``), the next round is drawn as well. If the next round is too small
        to give each rank a sample, its samples are added to the batches of the present round, so that all ranks have
        equally many batches.

        Args:
            draw: returns the samples of the next round. The last round of the epoch may have fewer than `together`
                samples. After the last round, ``draw`` returns an empty list.
            first: the first samples of the epoch, at most ``world_size`` of them, for ``pad``, which repeats them at
                the end. They are needed only if the iteration begins in the middle of the epoch. Otherwise ``first`` is
                an empty list, because ``draw`` itself returns these samples.
        """
        looks_ahead = not self.pad and not self.drop and self.world_size > 1
        drawn = draw()
        first = (first + drawn)[: self.world_size]
        while drawn:
            is_last = len(drawn) < self.together
            following: list[Any] = []
            if looks_ahead and not is_last:
                following = draw()
                if len(following) < self.world_size:
                    drawn = drawn + following
                    following = []
            if self.drop:
                drawn = drawn[: len(drawn) // self.world_size * self.world_size]
            elif self.pad and is_last:
                drawn = [*drawn, *itertools.islice(itertools.cycle(first), -len(drawn) % self.world_size)]
            if own := drawn[self.rank :: self.world_size]:
                yield own
            drawn = following if looks_ahead or is_last else draw()


class Epochs:
    """The base class of samplers and datasets that count the epochs of a loader and the position in the epoch.

    Each rank counts for itself. An epoch is complete only after its last batch. So if one rank takes only a few batches
    and stops, its next iteration goes through the same epoch again, and the ranks stay in the same epoch.
    """

    def __init__(self, source: Any, warns: bool) -> None:
        """Begin with epoch 0.

        If ``source`` has a method ``set_epoch``, this object calls the method only when the epoch of this object
        changes, and not before each iteration. Many user loops call the method themselves before each iteration, and
        the epoch that the loop has set must not be overwritten.

        Args:
            source: the sampler, batch sampler or dataset of the user.
            warns: if True, log a warning when an epoch begins again because its last iteration ended early.
        """
        self.source = source
        self.iteration = 0  # the number of iterations that have begun on this rank
        self.epoch = 0  # the present epoch; the next iteration has the same epoch unless this epoch is complete
        self.begin = 0  # the position in the epoch at which the next iteration begins: 0, or that of a loaded state
        self.left_after = 0  # the number of batches that the last iteration over this epoch has handed out so far
        self._is_complete = False  # True after the last batch of this epoch; the next iteration begins a new one
        self._has_warned = not warns

    @property
    def name(self) -> str:
        """The name of the type of the source, for error messages."""
        return type(self.source).__name__

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which then begins at the beginning of this epoch.

        There is one exception. If `load_state_dict` has set a position in this same epoch, and the epoch has not been
        completed since, the iteration begins at that position. So a loop that continues from a checkpoint may call
        ``set_epoch`` before each epoch, as usual.
        """
        if epoch != self.epoch or self._is_complete:
            self.begin = 0
        self.epoch = epoch
        self.left_after = 0
        self._is_complete = False
        set_epoch_of(self.source, epoch)

    def begin_iteration(self) -> None:
        """Count an iteration that begins, and go to the next epoch if the present one is complete."""
        self.iteration += 1
        if self._is_complete:
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> State:
        raise NotImplementedError

    def _check_kind(self, state: State) -> None:
        """Raise ValueError if ``state`` has other keys than the states of this class."""
        keys = self.state_dict().keys()
        if state.keys() != keys:
            raise ValueError(
                f"this is not the state of a loader like this one: it has {', '.join(state) or 'nothing'}, and not "
                f"{', '.join(keys)}."
            )

    def note_taken(self, epoch: int, taken: int, count: float) -> None:
        """Record that an iteration over ``epoch`` has handed out ``taken`` of ``count`` batches."""
        if epoch != self.epoch:
            return
        if taken == 1 and self.left_after > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Epoch %d of a loader begins again, in the same order, because its last iteration ended after %d of %d "
                "batches. To go on to the next epoch instead, call loader.set_epoch(%d) before the next iteration.",
                *(epoch, self.left_after, count, epoch + 1),
            )
        self.left_after = taken
        self._is_complete = taken >= count

    def note_end(self, epoch: int) -> None:
        """Record that an iteration over ``epoch`` has ended, because the loop asked for a batch after the last batch.

        The epoch is then complete, so the next epoch becomes the present one.
        """
        if epoch == self.epoch:
            self.set_epoch(epoch + 1)


def set_epoch_of(source: Any, epoch: int) -> None:
    """Call ``source.set_epoch`` if ``source`` has this method."""
    if set_epoch := getattr(source, "set_epoch", None):
        set_epoch(epoch)


class RankSampler(Epochs, Sampler[Any]):
    """A sampler that takes the share of one rank out of all samples, or batches, that another sampler draws.

    The attributes of the other sampler can be read and set on this object.
    """

    def __init__(
        self,
        source: Any,
        rank: int,
        world_size: int,
        *,
        seed: int,
        pad: bool,
        drop: bool,
        batch_size: int,
        subset_indices: Sequence[int] | None = None,
    ) -> None:
        """Share out the indices, or batches of indices, that ``source`` draws.

        Args:
            source: the sampler or batch sampler that this sampler wraps.
            rank: the rank that takes the share.
            world_size: the number of ranks.
            seed: the seed for the order of the samples.
            pad: see `Share`.
            drop: see `Share`.
            batch_size: the number of items that ``source`` must draw so that every rank gets one batch. For example,
                64 for two ranks that take batches of 32 each.
            subset_indices: the indices of the samples in the whole dataset, if the dataset of the loader is a `Subset`.
        """
        self._seed = seed
        self._share = Share(rank, world_size, batch_size, pad, drop)
        self._subset_indices = subset_indices
        self._checksums = Checksums()
        super().__init__(source, warns=type(source) is not SequentialSampler)

    def __getattr__(self, name: str) -> Any:
        # While this object is made, copied or unpickled, it may lack even ``source``. To look up ``source`` would then
        # call this method again, without end.
        if name.startswith("_") or name in OWN_ATTRIBUTES:
            raise AttributeError(name)
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            setattr(self.source, name, value)

    def state_dict(self) -> State:
        """Return the state after the last batch that was handed out: the epoch, the seed and the position."""
        length = self.source_length
        position = self.begin + self.left_after * self._share.together
        if length is not None:
            position = length if self._is_complete else min(position, length)
        return {"epoch": self.epoch, "seed": self._seed, "position": position, "length": length}

    def load_state_dict(self, state: State) -> None:
        """Make the next iteration begin at the position of ``state``.

        Raises:
            ValueError: ``state`` is the state of a different loader.
        """
        self._check_kind(state)
        position = state["position"]
        length = state["length"]
        if not 0 <= position <= (math.inf if length is None else length):
            raise ValueError(f"the state begins at {position} of an epoch of {length}, so it is damaged.")
        epoch_before = self.epoch
        begin_before = self.begin
        self.set_epoch(state["epoch"])  # before `source_length` is read, because epochs may differ in length
        own = self.source_length
        if position == length:  # the epoch is complete, even if the source has another length now
            position = position if own is None else own
        elif position > 0 and length != own:
            self.set_epoch(epoch_before)
            self.begin = begin_before
            raise ValueError(
                f"the state is of the middle of an epoch in which the loader drew {length} times, but this loader "
                f"draws {own} times. Give this loader the same dataset and the same sampler."
            )
        self.begin = position
        self._seed = state["seed"]

    def batches(self) -> Iterator[list[Any]]:
        """Yield one list for each round: this rank's samples of the round.

        A round consists of the samples of one batch for each rank; see `Share.batches`.
        """
        source = self.source
        generator = generator_of(source)
        random_numbers = OwnRandomNumbers(self._seed + self.epoch, [generator] if generator else [])
        with random_numbers.used():
            drawn = iter(source)
            first = list(itertools.islice(drawn, min(self.begin, self._share.world_size)))
            for _ in itertools.islice(drawn, self.begin - len(first)):
                pass
        is_first = True
        draws_at_once = _draws_at_once(source) and generator is None

        def draw() -> list[Any]:
            nonlocal is_first
            with random_numbers.used() if is_first or not draws_at_once else contextlib.nullcontext():
                samples = list(itertools.islice(drawn, self._share.together))
            if is_first and self._share.world_size > 1:
                self._checksums = checksums(self._in_dataset(samples))
            is_first = False
            return samples

        yield from self._share.batches(draw, first)

    @property
    def name(self) -> str:
        """The name of the type of the source, for error messages.

        If the dataset is a `Subset`, the name says so, because different subsets on the ranks may cause the error.
        """
        return super().name if self._subset_indices is None else f"{super().name} over a Subset"

    def _in_dataset(self, samples: list[Any]) -> list[Any]:
        """Return ``samples`` with each index into a `Subset` replaced by the index into the whole dataset."""
        if self._subset_indices is None:
            return samples
        indices: Any = self._subset_indices
        whole: list[Any] = tree_map(lambda index: indices[index] if isinstance(index, int) else index, samples)
        return whole

    def first_checksums(self) -> Checksums:
        """Return the checksums of the first samples of this iteration, for `check_alike`."""
        return self._checksums

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch

    @property
    def source_length(self) -> int | None:
        """The number of samples, or batches, that the source draws in an epoch; None if the source has no length."""
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def fewest(self) -> int:
        """The number of samples, without padding, of the rank that has the fewest."""
        return (len(self.source) - self.begin) // self._share.world_size

    def __len__(self) -> int:
        share = self._share
        count, over = divmod(len(self.source) - self.begin, share.world_size)
        if share.drop:
            return count
        return count + (over > 0 if share.pad else share.rank < over)


# Public attributes of a `RankSampler` itself. All other public attributes are those of its source.
OWN_ATTRIBUTES = {"source", "iteration", "epoch", "begin", "left_after"}


class EvenBatches(BatchSampler):
    """A batch sampler for samples that are not padded: all ranks have equally many batches.

    Some ranks have one sample more than others. On these ranks the last batch may hold one sample more than
    ``batch_size``. Otherwise the additional sample would be a batch of its own, which other ranks would not have.
    """

    sampler: RankSampler

    def __init__(self, sampler: RankSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return even_batches(self.sampler.fewest, self.batch_size, len(self.sampler) > 0)


def even_batches(fewest: int, batch_size: int, has_any: bool) -> int:
    """Return the number of batches of this rank if samples are not padded.

    Args:
        fewest: the number of samples of the rank that has the fewest.
        batch_size: the batch size of one rank.
        has_any: True if this rank has at least one sample, and therefore at least one batch.
    """
    return max(math.ceil(fewest / batch_size), int(has_any))


class Stream(Epochs, IterableDataset[Any]):
    """An iterable dataset that wraps another one, and yields only the samples for one rank, batch by batch.

    Each worker process of the loader has a copy of this object. The copy draws the samples for all ranks from the
    wrapped dataset, in rounds of one batch for each rank. Of each round, the copy yields only the samples for its rank.
    """

    def __init__(
        self,
        source: IterableDataset[Any],
        rank: int,
        world_size: int,
        *,
        seed: int,
        pad: bool,
        drop: bool,
        **loader: Any,
    ) -> None:
        """Share out the samples of ``source``.

        Args:
            source: the dataset to wrap.
            rank: the rank that takes the share.
            world_size: the number of ranks.
            seed: the seed of the random numbers with which ``source`` draws.
            pad: see `Share`.
            drop: see `Share`.
            loader: the options ``batch_size`` and ``num_workers`` of the loader. ``batch_size`` is None if ``source``
                makes the batches itself.
        """
        self._seed = seed
        self._batch_size = loader["batch_size"]
        self._num_workers = loader["num_workers"]
        self._share = Share(rank, world_size, (self._batch_size or 1) * world_size, pad, drop)
        # This process shares the memory of this tensor with the workers. The tensor holds the epoch and the seed, which
        # the workers read, and then the `Checksums`, which the first worker writes.
        numbers = [0, seed % 2**63, 0, *[0] * (2 * PLACES)]
        self._shared = torch.tensor(numbers).share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(source, warns=False)  # many streams have no end, so leaving an epoch early is no mistake

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._shared[0] = epoch

    def begin_iteration(self) -> None:
        super().begin_iteration()
        self._shared[2:] = 0

    def first_checksums(self) -> Checksums:
        """Return the checksums of the first samples of this iteration, for `check_alike`.

        The loader's first worker process draws these samples. Until then, all checksums are 0.
        """
        count, *sums = self._shared[2:].tolist()
        return Checksums(count, sums[:PLACES], sums[PLACES:])

    def state_dict(self) -> State:
        """Return the state after the last batch that was handed out: the epoch, the seed and the position."""
        position = self.begin + self.left_after
        loader = {"together": self._share.together, "num_workers": self._num_workers}
        return {"epoch": self.epoch, "seed": self._seed, "position": position} | loader

    def load_state_dict(self, state: State) -> None:
        """Make the next iteration begin at the position of ``state``.

        Raises:
            ValueError: ``state`` is the state of a different loader.
        """
        self._check_kind(state)
        own = self.state_dict()
        words = {"together": "samples in the batches of all ranks together", "num_workers": "workers"}
        for name, what in words.items():
            if state[name] != own[name]:
                raise ValueError(
                    f"the state is of a loader with {state[name]} {what}, but this one has {own[name]}. Make this "
                    "loader with the same number."
                )
        self.set_epoch(state["epoch"])
        self.begin = state["position"]
        self._seed = state["seed"]
        self._shared[1] = self._seed % 2**63

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        epoch, seed, *_ = self._shared.tolist()
        if epoch != self.epoch:  # this is an old copy, in a worker that has lived longer than an epoch
            self.epoch = epoch
            set_epoch_of(self.source, epoch)
        if isinstance(self.source, IterDataPipe):
            _prepare_pipe(self.source, seed + epoch)
        random_numbers = OwnRandomNumbers(random.Random(f"{seed} {epoch} {number}").getrandbits(62))
        with random_numbers.used():
            stream = iter(self.source)
        is_first = True

        def draw() -> list[Any]:
            nonlocal is_first
            with random_numbers.used():
                samples = list(itertools.islice(stream, self._share.together))
            if is_first and number == 0 and self._share.world_size > 1:
                first = checksums(samples)
                self._shared[3:] = torch.tensor(first.of_keys + first.of_others)
                # This number is written last, because the rank uses the checksums as soon as the number is not 0.
                self._shared[2] = first.samples
            is_first = False
            return samples

        for batch in self._share.batches(draw, []):
            if self._batch_size is None:
                yield from batch
            elif not self._share.drop or len(batch) == self._batch_size:
                yield batch

    def __len__(self) -> int:
        """Return the number of batches, if the dataset knows its length."""
        samples = len(self.source)  # raises the usual TypeError if the dataset has no length
        share = self._share
        full, rest = divmod(samples, share.together)
        if share.pad or share.drop:
            batches = full + (rest > 0 and share.pad)
        elif self._batch_size is None:
            batches = full + (share.rank < rest)
        else:
            batches = even_batches(samples // share.world_size, self._batch_size, share.rank < samples)
        return max(batches - self.begin, 0)


def _prepare_pipe(pipe: IterDataPipe[Any], seed: int) -> None:
    """Give a DataPipe in a worker the seed for shuffling, and the part of the samples that this worker draws.

    Torch's loader does this only if its dataset is a DataPipe, but the dataset of a prepared loader is the `Stream`.
    """
    from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

    worker = get_worker_info()
    apply_random_seed(pipe, torch.Generator().manual_seed(seed % 2**63))
    apply_sharding(pipe, worker.num_workers if worker else 1, worker.id if worker else 0)


def _draws_at_once(source: Any) -> bool:
    """Return whether ``source`` draws all its random numbers before it yields its first sample."""
    if type(source) is RandomSampler:
        return not source.replacement and source.num_samples == len(source.data_source)
    return type(source) in DRAW_AT_ONCE


def generator_of(source: Any) -> torch.Generator | None:
    """Return the random generator of a sampler, or of the sampler in a batch sampler, or None if there is none."""
    own = getattr(source, "generator", None) or getattr(getattr(source, "sampler", None), "generator", None)
    return own if isinstance(own, torch.Generator) else None
