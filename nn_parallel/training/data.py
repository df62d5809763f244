"""A `DataLoader` whose samples are shared out between the ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from ..calls.blocks import blocks_of
from ..ddp import join_launched_world
from ..launch.context import current_world, rank_context
from ..on_rank import on_rank
from .shares import EvenBatches, RankSampler, Stream, generator_of

T = TypeVar("T")


def prepare_dataloader(
    loader: DataLoader[T], *, pad: bool = True, seed: int | None = None, to_device: bool = True
) -> DataLoader[T]:
    """A loader like this one, of which each rank draws its part; with one rank, all of it. Every rank calls it.

    Everything else is as in ``loader``: the batch size, now that of each rank, workers, pinning, collation. All ranks
    draw what its sampler gives, with the same random numbers, and each takes every ``world_size``-th sample; of a batch
    sampler that is not torch's own, every ``world_size``-th batch. The order depends on the seed and the epoch alone,
    not on the number of ranks.

    Of an iterable dataset each rank draws all samples, and takes every ``world_size``-th one. The random numbers of
    Python, NumPy and torch are the same on all ranks meanwhile; generators of its own the dataset seeds alike. Between
    the workers of a loader it shares out its samples itself, as torch wants it, by `get_worker_info` or a
    ``worker_init_fn``. If it has a ``set_epoch``, that is called before each epoch.

    After an epoch whose last batch was handed out, the next iteration is the next epoch; of an iterable dataset without
    a length, after one that was asked for more. An epoch that is left before is drawn again, so a rank that looks at a
    few batches stays in step with the others. To go to an epoch, call ``loader.sampler.set_epoch(epoch)``, or
    ``loader.dataset.set_epoch(epoch)`` of an iterable dataset.

    The loader has a state, for ``save_checkpoint(..., loader=loader)``: the seed, the epoch, and how much of it was
    handed out. After `load_checkpoint` the next iteration draws the rest of that epoch, and ``len(loader)`` is how many
    batches it has: the same ones that would have come, where there are as many ranks; else each remaining sample once.
    Saved in the loop with its last batch, the rest is empty: ``for epoch in range(saved["epoch"], epochs)`` goes on
    where it was at any step.
    Of an iterable dataset the batches that were handed out are drawn again and passed over, which needs as many samples
    in the batches of all ranks together as before. What the workers of a loader draw at random themselves, to augment
    images for instance, begins anew.

    Args:
        pad: give every rank the same number of samples, for training: the first ones are repeated, or the last ones
            left out if ``loader`` has ``drop_last``. False, for evaluation: each sample is on exactly one rank, and
            there are as many batches on every rank, so that there can be collectives in the loop. The last batch of
            some ranks may therefore hold one sample more. Only where that cannot be, one rank has a batch more than
            another: the samples cannot be collated (images of several sizes), there are fewer than ranks, or the
            batches are made by a batch sampler of your own or by the dataset.
        seed: of the order. If None: that of the loader's generator, else the one that `seed_everything` or
            ``torch.manual_seed`` has set; on several ranks that of rank 0.
        to_device: move the batches to the device of this rank, whatever nests of tensors they are; without waiting,
            where the loader has ``pin_memory``.

    Raises:
        TypeError: it is no loader. The sampler has no length.
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
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader, loader.dataset, pad, seed, to_device)
    world = current_world()
    batches: Any = loader.batch_sampler
    is_torchs = type(batches) in (BatchSampler, EvenBatches)
    source: Any = batches.sampler if is_torchs else batches or loader.sampler
    if isinstance(source, DistributedSampler | RankSampler):
        raise ValueError(f"The loader shares its samples out already, by a {type(source).__name__}: pass one without.")
    if not isinstance(source, Sized):
        raise TypeError(f"{type(source).__name__} has no length, so it cannot be shared out evenly: give it a __len__.")
    collate = loader.collate_fn
    drops = bool(getattr(batches, "drop_last", False))
    _check_drop_last(drops and is_torchs, pad)
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
    return _sharing(loader, sampler, to_device, sampler=sampler, batch_sampler=batches, collate_fn=collate)


def _of_stream(
    loader: DataLoader[T], dataset: IterableDataset[T], pad: bool, seed: int | None, to_device: bool
) -> DataLoader[T]:
    if isinstance(dataset, Stream):
        raise ValueError("The loader shares its samples out already: pass one without.")
    _check_drop_last(loader.drop_last, pad)
    world = current_world()
    stream = Stream(
        dataset,
        world.rank,
        world.world_size,
        seed=_agreed_seed(dataset) if seed is None else seed,
        pad=pad and not loader.drop_last,
        drop=loader.drop_last,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
    )
    collate, initialize = loader.collate_fn, loader.worker_init_fn
    return _sharing(
        loader,
        stream,
        to_device,
        dataset=stream,
        batch_sampler=None,  # the stream makes the batches
        collate_fn=collate if pad or loader.batch_size is None else EvenCollate(collate, loader.batch_size),
        worker_init_fn=initialize and InitializeWorker(initialize),
    )


def _check_drop_last(drops: bool, pad: bool) -> None:
    if drops and not pad:
        raise ValueError("drop_last=True leaves samples out, and pad=False none: give the loader drop_last=False.")


def _sharing(loader: DataLoader[T], share: RankSampler | Stream, to_device: bool, **replaced: Any) -> DataLoader[T]:
    """A copy of ``loader`` that counts for ``share`` which batches were handed out."""
    device = current_world().device
    prepared = copy.copy(loader)
    # Past the setter, which forbids it for a loader that has been made.
    object.__setattr__(prepared, "__class__", _counting(type(loader)))
    vars(prepared).update(replaced, share=share, device=device if to_device else None, _iterator=None)
    return prepared


class CountingLoader(DataLoader[T]):
    """A loader that tells its sampler, or stream, how many batches of the epoch were handed out.

    It moves them to ``device``, unless that is None.
    """

    share: RankSampler | Stream
    device: torch.device | None

    def __iter__(self) -> Any:  # torch says: its own class
        self.share.begin_iteration()
        # Torch draws a seed for workers, which has been drawn already where the epoch has begun before.
        with torch.random.fork_rng(devices=[], enabled=self.share.begin > 0):
            batches: Iterator[T] = super().__iter__()
        if isinstance(self.share, Stream):
            batches = itertools.islice(batches, self.share.begin, None)
        count: float = math.inf
        with contextlib.suppress(TypeError, NotImplementedError):  # many an iterable dataset has no length
            count = len(self)
        return _Batches(batches, self.share, count, self.device)

    def __len__(self) -> int:
        return len(self.share) if isinstance(self.share, Stream) else super().__len__()

    def state_dict(self) -> dict[str, int]:
        return self.share.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.share.load_state_dict(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unmade, (type(self).__bases__[-1],), self.__getstate__()


def _counting(kind: type[DataLoader[T]]) -> type[CountingLoader[T]]:
    """The class of loaders of this ``kind`` that count."""
    return CountingLoader if kind is DataLoader else type(kind.__name__, (CountingLoader, kind), {})


def _unmade(kind: type[DataLoader[T]]) -> CountingLoader[T]:
    """A loader to be unpickled into."""
    return object.__new__(_counting(kind))


class _Batches(Iterator[T]):
    """The batches of one iteration. Only here is it known which were handed out: workers draw ahead."""

    def __init__(
        self, batches: Iterator[T], share: RankSampler | Stream, count: float, device: torch.device | None
    ) -> None:
        """``count``: of the batches; infinity if it is not known."""
        self._batches, self._share, self._count, self._device = batches, share, count, device
        self._taken = self._epoch = 0
        self._rest: list[T] = []  # of a batch that came in parts

    def __next__(self) -> T:
        if self._rest:
            return self._rest.pop()
        if self._taken == 0:
            self._epoch = self._share.epoch
        try:
            batch = next(self._batches)
        except StopIteration:
            self._share.note_end(self._epoch)
            raise
        self._taken += 1
        self._share.note_taken(self._epoch, self._taken, self._count)
        if self._device is not None:
            batch = on_device(batch, self._device)
        if isinstance(batch, Parts):
            self._rest, batch = [batch.last], batch.first
        return batch


def on_device(batch: T, device: torch.device) -> T:
    """``batch``, a nest of anything, with what has a method ``to`` moved, without waiting where memory is pinned."""
    if device.type == "cpu":
        return batch

    def is_movable(part: Any) -> bool:
        return hasattr(part, "to")

    moved: T = tree_map(
        lambda part: part.to(device, non_blocking=True) if is_movable(part) else part, batch, is_leaf=is_movable
    )
    return moved


@dataclass
class InitializeWorker:
    """The ``worker_init_fn`` of a loader, which finds the dataset that it knows in `get_worker_info`."""

    initialize: Callable[[int], None]

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.source)  # past its own setter
        self.initialize(worker)


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
    return (generator_of(source) or torch.default_generator).initial_seed() % 2**62  # the epoch is added to it
