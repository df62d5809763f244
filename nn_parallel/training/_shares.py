"""Which samples, or batches, are those of one rank: each rank draws all of them alike, and takes its part."""

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
from torch.utils._pytree import tree_map
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

from ._draws import PLACES, Checksums, checksums
from ._random_numbers import OwnRandomNumbers

State = dict[str, Any]  # numbers by their names; None for what is not known
logger = logging.getLogger("nn_parallel")
# What these draw at random they draw as they begin. So the random numbers of the program need not be changed later.
DRAW_AT_ONCE = {SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, range, list, tuple}


@dataclass(frozen=True)
class Share:
    """The part that one rank takes of what all ranks draw alike.

    Attributes:
        together: how much the batches of all ranks hold together: so much is drawn at a time.
        pad: repeat the first samples at the end, so that each rank has as many as the others.
        drop: leave the last ones out for that.
    """

    rank: int
    world_size: int
    together: int
    pad: bool
    drop: bool

    def batches(self, draw: Callable[[], list[Any]], first: list[Any]) -> Iterator[list[Any]]:
        """Yield this rank's part of each `draw`, which returns less than `together` at the end, and then nothing.

        Nothing is drawn before its batch is asked for. Only where each sample is to be on exactly one rank, the next
        draw is looked at: if it is too small to give each rank a sample, it becomes part of the batch before it, so
        that all ranks have equally many batches.

        Args:
            first: the first samples of the epoch, if it began before: what to pad with.
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
            if mine := drawn[self.rank :: self.world_size]:
                yield mine
            drawn = following if looks_ahead or is_last else draw()


class Epochs:
    """The epoch of a loader, and the position in it, alike on all ranks."""

    def __init__(self, source: Any, warns: bool) -> None:
        """``warns`` where an epoch begins again that was left before.

        A ``set_epoch`` of ``source`` is called when the epoch here changes, and not before each iteration. So where a
        loop calls it as well, as many do, the loop has the last word.
        """
        self.source = source
        self.iteration = 0  # so many have begun on this rank
        self.epoch = 0  # of the next iteration, unless this one is complete
        self.begin = 0  # where in the epoch that begins
        self.left_after = 0  # so many batches of this epoch, by an iteration that may not have ended
        self._is_complete = False  # the last batch of this epoch was handed out
        self._has_warned = not warns

    @property
    def name(self) -> str:
        """The kind of the source, for errors."""
        return type(self.source).__name__

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be this epoch; when it has ended, the one after it be the next epoch.

        If this epoch was loaded with its position, it goes on there.
        """
        if epoch != self.epoch or self._is_complete:
            self.begin = 0
        self.epoch = epoch
        self.left_after = 0
        self._is_complete = False
        tell_epoch(self.source, epoch)

    def begin_iteration(self) -> None:
        """Begin an iteration: of the next epoch, if this one is complete."""
        self.iteration += 1
        if self._is_complete:
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> State:
        raise NotImplementedError

    def _check_kind(self, state: State) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"it is not the state of a loader like this one: it has {', '.join(state) or 'nothing'}.")

    def note_taken(self, epoch: int, taken: int, count: float) -> None:
        """Note that an iteration over ``epoch`` has handed out ``taken`` of ``count`` batches."""
        if epoch != self.epoch:
            return
        if taken == 1 and self.left_after > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Epoch %d of a loader begins again, in the same order, because it was left after %d of %d batches. If "
                "it is over, call loader.set_epoch(%d) before the next iteration.",
                *(epoch, self.left_after, count, epoch + 1),
            )
        self.left_after = taken
        self._is_complete = taken >= count

    def note_end(self, epoch: int) -> None:
        """Note that an iteration over ``epoch`` has been asked for a batch after its last one."""
        if epoch == self.epoch:
            self.set_epoch(epoch + 1)


def tell_epoch(source: Any, epoch: int) -> None:
    """Call ``source.set_epoch``, if it has that."""
    if set_epoch := getattr(source, "set_epoch", None):
        set_epoch(epoch)


class RankSampler(Epochs, Sampler[Any]):
    """One rank's part of what another sampler, or a batch sampler, draws: each rank draws all of it alike.

    The attributes of that sampler can be read and set here.
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
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Share out what ``source`` draws.

        Args:
            batch_size: how much of the source the batches of all ranks hold together.
            numbers: those of the samples in the whole dataset, if they are a subset of one.
        """
        self._seed = seed
        self._share = Share(rank, world_size, batch_size, pad, drop)
        self._numbers = numbers
        self._checksums = Checksums()
        super().__init__(source, warns=type(source) is not SequentialSampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in OWN_ATTRIBUTES:  # while this is made, copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            setattr(self.source, name, value)

    def state_dict(self) -> State:
        """Return what follows the last batch that was handed out: nothing of this epoch, if that is complete."""
        length = self.source_length
        position = self.begin + self.left_after * self._share.together
        if length is not None:
            position = length if self._is_complete else min(position, length)
        return {"epoch": self.epoch, "seed": self._seed, "position": position, "length": length}

    def load_state_dict(self, state: State) -> None:
        """Go on there.

        Raises:
            ValueError: that is a state of another loader.
        """
        self._check_kind(state)
        position = state["position"]
        length = state["length"]
        if not 0 <= position <= (math.inf if length is None else length):
            raise ValueError(f"it begins at {position} of an epoch of {length}.")
        epoch_before = self.epoch
        begin_before = self.begin
        self.set_epoch(state["epoch"])  # first: the length of the source may be that of its epoch
        own = self.source_length
        if position == length:  # that epoch is over, however long it would be now
            position = position if own is None else own
        elif position > 0 and length != own:
            self.set_epoch(epoch_before)
            self.begin = begin_before
            raise ValueError(
                f"it is of the middle of an epoch in which the loader drew {length} times, and this one draws {own} "
                "times."
            )
        self.begin = position
        self._seed = state["seed"]

    def batches(self) -> Iterator[list[Any]]:
        """Yield the samples of this rank, as many at a time as it takes of what the batches of all ranks hold."""
        source = self.source
        generator = generator_of(source)
        numbers = OwnRandomNumbers(self._seed + self.epoch, [generator] if generator else [])
        with numbers.used():
            drawn = iter(source)
            first = list(itertools.islice(drawn, min(self.begin, self._share.world_size)))
            for _ in itertools.islice(drawn, self.begin - len(first)):
                pass
        is_first = True
        draws_at_once = _draws_at_once(source) and generator is None

        def draw() -> list[Any]:
            nonlocal is_first
            with numbers.used() if is_first or not draws_at_once else contextlib.nullcontext():
                samples = list(itertools.islice(drawn, self._share.together))
            if is_first and self._share.world_size > 1:
                self._checksums = checksums(samples if self._numbers is None else self._numbered(samples))
            is_first = False
            return samples

        yield from self._share.batches(draw, first)

    @property
    def name(self) -> str:
        """The kind of the source, for errors; with a subset, which may be what differs."""
        return super().name if self._numbers is None else f"{super().name} over a Subset"

    def _numbered(self, samples: list[Any]) -> list[Any]:
        numbers: Any = self._numbers
        whole: list[Any] = tree_map(lambda index: numbers[index] if isinstance(index, int) else index, samples)
        return whole

    def drawn(self) -> Checksums:
        """Return the checksums of what this iteration began with."""
        return self._checksums

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch

    @property
    def source_length(self) -> int | None:
        """The number of times that the source draws in an epoch; None if it does not say."""
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def fewest(self) -> int:
        """Return the number of samples of the rank with the fewest, if nothing is repeated."""
        return (len(self.source) - self.begin) // self._share.world_size

    def __len__(self) -> int:
        share = self._share
        count, over = divmod(len(self.source) - self.begin, share.world_size)
        if share.drop:
            return count
        return count + (over > 0 if share.pad else share.rank < over)


OWN_ATTRIBUTES = {"source", "iteration", "epoch", "begin", "left_after"}  # of `RankSampler`, by which it counts


class EvenBatches(BatchSampler):
    """As many batches as each other rank has, of samples that are not shared out evenly.

    One sample too many goes into the last batch, instead of being a batch alone.
    """

    sampler: RankSampler

    def __init__(self, sampler: RankSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return even_batches(self.sampler.fewest, self.batch_size, len(self.sampler) > 0)


def even_batches(fewest: int, batch_size: int, has_any: bool) -> int:
    """Return how many batches a rank has, where the rank with the ``fewest`` samples has so many; none without any."""
    return max(math.ceil(fewest / batch_size), int(has_any))


class Stream(Epochs, IterableDataset[Any]):
    """One rank's part of an iterable dataset, batch by batch: each rank draws all of it alike.

    Of what each worker of the loader draws, as many samples as the batches of all ranks hold together are shared out at
    a time, to the end.
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
        """``loader``: its ``batch_size``, None where ``source`` makes the batches, and ``num_workers``."""
        self._seed = seed
        self._batch_size = loader["batch_size"]
        self._num_workers = loader["num_workers"]
        self._share = Share(rank, world_size, (self._batch_size or 1) * world_size, pad, drop)
        # The epoch and the seed for workers, which may live longer than an epoch; `Checksums`, from the first worker.
        numbers = [0, seed % 2**63, 0, *[0] * (2 * PLACES)]
        self._shared = torch.tensor(numbers).share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(source, warns=False)  # many a stream has no end

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._shared[0] = epoch

    def begin_iteration(self) -> None:
        super().begin_iteration()
        self._shared[2:] = 0

    def drawn(self) -> Checksums:
        """Return the checksums of what this iteration began with; empty, as long as the first worker has not drawn."""
        count, *sums = self._shared[2:].tolist()
        return Checksums(count, sums[:PLACES], sums[PLACES:])

    def state_dict(self) -> State:
        """Return what follows the last batch that was handed out: nothing of this epoch, if that is complete."""
        position = self.begin + self.left_after
        loader = {"together": self._share.together, "num_workers": self._num_workers}
        return {"epoch": self.epoch, "seed": self._seed, "position": position} | loader

    def load_state_dict(self, state: State) -> None:
        """Go on there.

        Raises:
            ValueError: that is a state of another loader.
        """
        self._check_kind(state)
        own = self.state_dict()
        words = {"together": "samples in the batches of all ranks together", "num_workers": "workers"}
        for name, what in words.items():
            if state[name] != own[name]:
                raise ValueError(f"it is of a loader with {state[name]} {what}, and this one has {own[name]}.")
        self.set_epoch(state["epoch"])
        self.begin = state["position"]
        self._seed = state["seed"]
        self._shared[1] = self._seed % 2**63

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        epoch, seed, *_ = self._shared.tolist()
        if epoch != self.epoch:  # in a worker that has outlived an epoch: here is a copy of before
            self.epoch = epoch
            tell_epoch(self.source, epoch)
        if isinstance(self.source, IterDataPipe):
            _prepare_pipe(self.source, seed + epoch)
        numbers = OwnRandomNumbers(random.Random(f"{seed} {epoch} {number}").getrandbits(62))
        with numbers.used():
            stream = iter(self.source)
        is_first = True

        def draw() -> list[Any]:
            nonlocal is_first
            with numbers.used():
                samples = list(itertools.islice(stream, self._share.together))
            if is_first and number == 0 and self._share.world_size > 1:
                first = checksums(samples)
                self._shared[3:] = torch.tensor(first.of_keys + first.of_others)
                self._shared[2] = first.samples  # last: from here on they are read
            is_first = False
            return samples

        for batch in self._share.batches(draw, []):
            if self._batch_size is None:
                yield from batch
            elif not self._share.drop or len(batch) == self._batch_size:
                yield batch

    def __len__(self) -> int:
        """Return the number of batches, if the dataset knows its length."""
        samples = len(self.source)  # Python says what has no length
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
    """Do what torch's loader does for a pipe: the workers shuffle alike and share out what a sharding filter marks."""
    from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

    worker = get_worker_info()
    apply_random_seed(pipe, torch.Generator().manual_seed(seed % 2**63))
    apply_sharding(pipe, worker.num_workers if worker else 1, worker.id if worker else 0)


def _draws_at_once(source: Any) -> bool:
    """Return whether ``source`` draws no more random numbers once it has given its first sample."""
    if type(source) is RandomSampler:
        return not source.replacement and source.num_samples == len(source.data_source)
    return type(source) in DRAW_AT_ONCE


def generator_of(source: Any) -> torch.Generator | None:
    """Return the generator of a sampler, or of the sampler in a batch sampler, if it has one of its own."""
    own = getattr(source, "generator", None) or getattr(getattr(source, "sampler", None), "generator", None)
    return own if isinstance(own, torch.Generator) else None
