"""Which samples, or batches, are those of one rank: each rank draws all of them alike, and takes its part."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler, get_worker_info

from .random_numbers import OwnRandomNumbers

logger = logging.getLogger("nn_parallel")


class Epochs:
    """How far the iterations of a loader are, alike on all ranks."""

    def __init__(self, warns: bool) -> None:
        """``warns`` where an epoch begins again that was left before."""
        self.epoch = 0  # of the next iteration, unless this one is complete
        self.begin = 0  # where in the epoch that begins
        self.left_after = 0  # so many batches of this epoch, by an iteration that may not have ended
        self._is_complete = False  # the last batch of this epoch was handed out
        self._has_warned = not warns

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; when it has ended, the next one is the epoch after it."""
        self.epoch, self.begin, self.left_after, self._is_complete = epoch, 0, 0, False

    def begin_iteration(self) -> None:
        """An iteration begins: with the next epoch, if this one is complete."""
        if self._is_complete:
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        raise NotImplementedError

    def _check_kind(self, state: dict[str, int]) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"it is not the state of a loader like this one: it has {', '.join(state) or 'nothing'}.")

    def note_taken(self, epoch: int, taken: int, count: float) -> None:
        """An iteration over ``epoch`` has handed out ``taken`` of ``count`` batches."""
        if epoch != self.epoch:
            return
        if taken == 1 and self.left_after > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Epoch %d of a loader begins again, in the same order, because it was left after %d of %d batches. If "
                "it is over, call loader.sampler.set_epoch(%d) before the next iteration.",
                *(epoch, self.left_after, count, epoch + 1),
            )
        self.left_after = taken
        self._is_complete = taken >= count

    def note_end(self, epoch: int) -> None:
        """An iteration over ``epoch`` has been asked for a batch after its last one."""
        if epoch == self.epoch:
            self.set_epoch(epoch + 1)


class RankSampler(Epochs, Sampler[Any]):
    """One rank's part of what another sampler, or a batch sampler, draws: each rank draws all of it alike."""

    def __init__(
        self, source: Any, rank: int, world_size: int, *, seed: int, pad: bool, drop: bool, batch_size: int
    ) -> None:
        """``batch_size``: how much of the source the batches of all ranks hold together."""
        self._source, self._rank, self._world_size, self._seed = source, rank, world_size, seed
        self._pad, self._drop, self._batch_size = pad, drop, batch_size
        super().__init__(warns=type(source) is not SequentialSampler)

    def state_dict(self) -> dict[str, int]:
        """What follows the last batch that was handed out: nothing of this epoch, if that is complete."""
        length = len(self._source)
        position = length if self._is_complete else min(self.begin + self.left_after * self._batch_size, length)
        return {"epoch": self.epoch, "seed": self._seed, "position": position, "length": length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there.

        Raises:
            ValueError: that is a state of another loader.
        """
        self._check_kind(state)
        position, length = state["position"], state["length"]
        if length != len(self._source):
            raise ValueError(f"it is of a loader that draws {length} times an epoch, and this one {len(self._source)}.")
        if not 0 <= position <= length:
            raise ValueError(f"it begins at {position} of an epoch of {length}.")
        self.set_epoch(state["epoch"])
        self.begin, self._seed = position, state["seed"]

    def draw(self) -> tuple[list[Any], int]:
        """The samples of this rank, and how many the rank with the fewest has, if nothing is repeated."""
        if set_epoch := getattr(self._source, "set_epoch", None):
            set_epoch(self.epoch)
        with _random_numbers_of(self._seed + self.epoch, self._source):
            drawn = _drawn_by(self._source)
        rest = drawn[self.begin :]
        fewest, over = divmod(len(rest), self._world_size)
        mine = _as_list(rest[self._rank :: self._world_size])
        if self._drop:
            del mine[fewest:]
        elif self._pad and 0 < over <= self._rank:
            again = (self._rank - over) % len(drawn)
            mine += _as_list(drawn[again : again + 1])
        return mine, fewest

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
        last = (even_batches(fewest, self.batch_size, len(samples) > 0) - 1) * self.batch_size
        for start in range(0, last + 1, self.batch_size):
            yield samples[start : start + self.batch_size if start < last else None]

    def __len__(self) -> int:
        return even_batches(self.sampler.fewest, self.batch_size, len(self.sampler) > 0)


def even_batches(fewest: int, batch_size: int, has_any: bool) -> int:
    """How many batches a rank has, where the rank with the ``fewest`` samples has so many; none without a sample."""
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
        self.source, self._rank, self._world_size, self._seed = source, rank, world_size, seed
        self._pad, self._drop = pad, drop
        self._batch_size, self._num_workers = loader["batch_size"], loader["num_workers"]
        self._together = (self._batch_size or 1) * world_size
        # Epoch and seed for workers too, which may live longer than an epoch.
        self._drawn_by = torch.tensor([0, seed % 2**63]).share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(warns=False)  # many a stream has no end

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._drawn_by[0] = epoch

    def state_dict(self) -> dict[str, int]:
        """What follows the last batch that was handed out: nothing of this epoch, if that is complete."""
        position = self.begin + self.left_after
        loader = {"together": self._together, "num_workers": self._num_workers}
        return {"epoch": self.epoch, "seed": self._seed, "position": position} | loader

    def load_state_dict(self, state: dict[str, int]) -> None:
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
        self.begin, self._seed = state["position"], state["seed"]
        self._drawn_by[1] = self._seed % 2**63

    def __iter__(self) -> Iterator[Any]:
        worker, (epoch, seed) = get_worker_info(), self._drawn_by.tolist()
        if set_epoch := getattr(self.source, "set_epoch", None):
            set_epoch(epoch)
        of_this_worker = f"{seed} {epoch} {worker.id if worker else 0}"
        numbers = OwnRandomNumbers(random.Random(of_this_worker).getrandbits(62))
        with numbers.used():
            stream = iter(self.source)

        def draw() -> list[Any]:
            with numbers.used():
                return list(itertools.islice(stream, self._together))

        together = draw()
        first = together[: self._world_size]
        while together:
            following = draw() if len(together) == self._together else []
            if len(following) < self._world_size and self._batch_size and not self._pad and not self._drop:
                together += following  # or some ranks would have a batch more
                following = []
            if len(together) < self._together and self._drop:
                return
            if self._pad:
                together += itertools.islice(itertools.cycle(first), -len(together) % self._world_size)
            mine = together[self._rank :: self._world_size]
            yield from [mine] if self._batch_size and mine else mine
            together = following

    def __len__(self) -> int:
        """How many batches it has, if the dataset knows its length."""
        samples = len(self.source)  # type: ignore[arg-type]  # Python says what has no length
        full, rest = divmod(samples, self._together)
        if self._pad or self._drop:
            batches = full + (rest > 0 and self._pad)
        elif self._batch_size is None:
            batches = full + (self._rank < rest)
        else:
            batches = even_batches(samples // self._world_size, self._batch_size, self._rank < samples)
        return max(batches - self.begin, 0)


def _drawn_by(source: Any) -> list[Any] | torch.Tensor:
    """What ``source`` draws: of torch's own `RandomSampler`, which yields number after number, all at once."""
    if type(source) is not RandomSampler or source.replacement or source.num_samples != len(source.data_source):
        return list(source)
    generator = source.generator
    if generator is None:  # as it does itself
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return torch.randperm(source.num_samples, generator=generator)


def _as_list(drawn: list[Any] | torch.Tensor) -> list[Any]:
    numbers: list[Any] = drawn.tolist() if isinstance(drawn, torch.Tensor) else drawn
    return numbers


def generator_of(source: Any) -> torch.Generator | None:
    """The generator of a sampler, or of the sampler in a batch sampler, if it has one of its own."""
    own = getattr(source, "generator", None) or getattr(getattr(source, "sampler", None), "generator", None)
    return own if isinstance(own, torch.Generator) else None


@contextlib.contextmanager
def _random_numbers_of(seed: int, source: Iterable[Any]) -> Iterator[None]:
    """Seed every generator that ``source`` may draw from; afterwards each is as it was."""
    own = generator_of(source) or torch.Generator()
    state = own.get_state()
    try:
        own.manual_seed(seed)
        with OwnRandomNumbers(seed).used():
            yield
    finally:
        own.set_state(state)
