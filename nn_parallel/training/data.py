"""`prepare_dataloader`: a `DataLoader` whose samples are shared out between the ranks.

The prepared loader is a copy of the user's loader. Its class is derived from the class of that loader, so all methods
and options of the user's loader stay. If the dataset has a length, the copy gets a `RankSampler`, which yields only the
samples for this rank. If the dataset is iterable, it is replaced with a `Stream`, which yields only the samples for
this rank. The `Stream` is in its place only while torch makes an iterator, so that the user still sees the original
dataset at any other time. `_shares` explains how samples are shared out.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from .._engine.ranks.blocks import blocks_of
from .._engine.ranks.context import current_world, rank_context
from .._engine.ranks.membership import join_launched_world
from .._engine.ranks.run_on_ranks import on_rank_0
from .._engine.torch_private import LoaderIterator
from ..world import World
from ._draws import Draws, LoaderId, check_alike, new_loader_id
from ._loader_workers import WorkerInit
from ._shares import EvenBatches, RankSampler, State, Stream, generator_of
from ._to_device import move_to_device

T = TypeVar("T")


def prepare_dataloader(
    loader: DataLoader[T], *, pad: bool = True, seed: int | None = None, to_device: bool = True
) -> PreparedLoader[T]:
    """Return a copy of ``loader`` from which each rank draws its share of the samples. Every rank calls this function.

    With one rank, its share is all samples. Everything else is as in ``loader``: the dataset, the workers, pinning and
    collation. The batch size of ``loader`` becomes the batch size of each rank.

    **Order.** All ranks draw all samples with the sampler of ``loader`` and the same random numbers. Each rank takes
    every ``world_size``-th sample. If the batch sampler is not torch's own, each rank takes every ``world_size``-th
    batch. The order depends only on the seed and the epoch, and not on the number of ranks. The sampler is asked only
    for the samples that the next batches of all ranks need. With several ranks and ``pad=False`` the sampler is also
    asked for the samples of the batches after these, because the rank must know which batches are the last ones.

    **Iterable datasets.** Each rank draws all samples of the dataset and takes every ``world_size``-th one. The random
    numbers of Python, NumPy and torch are the same on all ranks while the dataset draws. If the dataset has random
    generators of its own, it must seed them alike on all ranks. The dataset itself shares its samples out between the
    workers of the loader, as torch requires: with `get_worker_info`, with a ``worker_init_fn``, or with the
    ``sharding_filter`` of a DataPipe.

    **Check.** At the beginning of each epoch the ranks compare their first draws, without waiting for each other. For a
    dataset with a length, they compare the number of samples and the first indices. If the dataset is a `Subset`, these
    are indices into the whole dataset. For an iterable dataset, they compare the integers and the strings in the first
    samples. So it is an error if a sampler, a subset or an iterable dataset already takes the share of its rank, or is
    seeded differently on each rank. The content of a dataset with a length is not compared, but must be the same on all
    ranks.

    **Epochs.** An epoch is complete when its last batch has been handed out. The next iteration then begins the next
    epoch. For an iterable dataset without a length, the epoch is complete when the loop has asked for a batch after the
    last one. If an iteration ends earlier, the next one begins the same epoch again; so a rank that only looks at a few
    batches stays in step with the others. To choose the epoch, call ``loader.set_epoch(epoch)`` or, as loops with a
    `DistributedSampler` do, ``loader.sampler.set_epoch(epoch)``. If your sampler or iterable dataset has a
    ``set_epoch``, it is called for each new epoch. If your loop calls that method too, the value of your loop is used.

    **State.** ``save_checkpoint(..., loader=loader)`` saves the seed, the epoch and how much of the epoch was handed
    out. After `load_checkpoint` the next iteration yields the rest of that epoch, even if the loop first calls
    ``set_epoch`` with the number of that epoch. ``len(loader)`` is then the number of batches in the rest. With the
    same number of ranks, the rest has the same batches as without the interruption. With another number of ranks, it
    holds each remaining sample once. If the state was saved after the last batch of an epoch, the rest is empty. So
    ``for epoch in range(saved["epoch"], epochs)`` continues correctly after any step.

    For an iterable dataset, the batches that were handed out before the state was saved are drawn again and skipped.
    This requires the same number of workers, and the same total batch size of all ranks, as when the state was saved.
    The random numbers that workers draw themselves, for instance to augment images, are not restored. They are
    different on each rank, even if ``loader`` has a ``generator``.

    The workers of a loader ignore the signals that `stop_requested` handles, because SLURM sends these signals to every
    process.

    Args:
        loader: the loader.
        pad: True is for training: all ranks get the same number of samples, because the first samples are repeated at
            the end, or the last samples are left out if ``loader`` has ``drop_last``. False is for evaluation: each
            sample is on exactly one rank. All ranks still get the same number of batches, so that the loop may contain
            collectives, and the last batch of some ranks may hold one sample more. There are three exceptions, in which
            one rank may have a batch more than another: samples that cannot be collated (images of different sizes),
            fewer samples than ranks, and batches that your own batch sampler or the dataset makes.
        seed: the seed of the order. If None, the seed is drawn from the generator of ``loader`` if it has one, or else
            from the random numbers of torch, which `seed_everything` and ``torch.manual_seed`` set. In the second case,
            a model that is made later gets other initial weights than without this function. All ranks use the seed of
            rank 0. For a `SequentialSampler`, no seed is drawn.
        to_device: if True, the batches are moved to the device of this rank: tensors, also in mappings, sequences,
            dataclasses and namespaces, and every object that has a method ``to``. If the loader has ``pin_memory``, the
            copy goes on while the loop continues.

    Raises:
        TypeError: ``loader`` is not a `DataLoader`.
        ValueError: the loader already shares its samples out, or leaves some out (``drop_last``) with ``pad=False``. At
            the beginning of an epoch: the ranks do not draw alike.

    Example::

        loader = prepare_dataloader(DataLoader(dataset, batch_size=32, shuffle=True))
        for epoch in range(epochs):
            for x, y in loader:  # in another order in each epoch
                ...
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare_dataloader() takes a torch.utils.data.DataLoader, not {loader!r}.")
    join_launched_world()
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader, loader.dataset, pad, seed, to_device)
    return _of_samples(loader, pad, seed, to_device)


def _of_samples(loader: DataLoader[T], pad: bool, seed: int | None, to_device: bool) -> PreparedLoader[T]:
    world = current_world()
    batches, is_endless = _batch_sampler(loader)
    is_torchs = type(batches) is BatchSampler
    source: Any = batches.sampler if is_torchs else batches or loader.sampler
    _check_whole(source, world)
    drops = bool(getattr(batches, "drop_last", False))
    _check_drop_last(drops and is_torchs, pad)
    agreed_seed, loader_id = _agree(source, seed)
    dataset = loader.dataset
    sampler = RankSampler(
        source,
        world.rank,
        world.world_size,
        seed=agreed_seed,
        pad=pad and not drops,
        drop=pad and drops,
        batch_size=(batches.batch_size if is_torchs else 1) * world.world_size,
        subset_indices=dataset.indices if isinstance(dataset, Subset) else None,
    )
    replaced: dict[str, Any] = {}
    if is_torchs and pad:
        batches = BatchSampler(sampler, batches.batch_size, drops)
    elif is_torchs:
        replaced["collate_fn"] = EvenCollate(loader.collate_fn, batches.batch_size)
        batches = EvenBatches(sampler, batches.batch_size)
    elif batches is not None:
        batches = sampler
    prepared = _prepared(loader, sampler, loader_id, to_device, replaced)
    vars(prepared).update(sampler=sampler, batch_sampler=batches, _is_plain=is_endless)
    return prepared


def _of_stream(
    loader: DataLoader[T], dataset: IterableDataset[T], pad: bool, seed: int | None, to_device: bool
) -> PreparedLoader[T]:
    if isinstance(loader, PreparedLoader):
        raise ValueError("The loader is prepared already: pass the loader from before prepare_dataloader().")
    _check_drop_last(loader.drop_last, pad)
    world = current_world()
    agreed_seed, loader_id = _agree(dataset, seed)
    stream = Stream(
        dataset,
        world.rank,
        world.world_size,
        seed=agreed_seed,
        pad=pad and not loader.drop_last,
        drop=loader.drop_last,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
    )
    replaced: dict[str, Any] = {"dataset": stream, "batch_sampler": None}  # the stream makes the batches
    if not pad and loader.batch_size is not None:
        replaced["collate_fn"] = EvenCollate(loader.collate_fn, loader.batch_size)
    return _prepared(loader, stream, loader_id, to_device, replaced)


def _batch_sampler(loader: DataLoader[Any]) -> tuple[Any, bool]:
    """Return the batch sampler that makes the batches of one epoch, and True if ``loader`` has an endless iterator.

    Some loaders keep their workers alive with one iterator that never ends: timm's MultiEpochsDataLoader, ultralytics'
    InfiniteDataLoader, DomainBed's FastDataLoader. The batch sampler of such a loader repeats another batch sampler,
    which makes the batches of one epoch. This function returns that other batch sampler, and the prepared loader then
    iterates as torch's own class does.
    """
    batches: Any = loader.batch_sampler
    repeated = getattr(batches, "sampler", None)
    iterates_itself = type(loader).__iter__ is not DataLoader.__iter__
    is_endless = iterates_itself and bool(_iterators_in(loader)) and isinstance(repeated, BatchSampler)
    return (repeated, True) if is_endless else (batches, False)


def _iterators_in(loader: DataLoader[Any]) -> list[str]:
    """Return the names of the attributes of ``loader`` that hold one of torch's iterators, except ``_iterator``.

    `DataLoader` itself keeps an iterator only in ``_iterator``. So a subclass has set the other attributes.
    """
    attributes = vars(loader).items()
    return [name for name, value in attributes if isinstance(value, LoaderIterator) and name != "_iterator"]


def _check_whole(source: Any, world: World) -> None:
    """Raise ValueError if ``source``, a sampler or batch sampler, already takes the share of a rank."""
    for sampler in (source, getattr(source, "sampler", None)):
        if isinstance(sampler, RankSampler):
            raise ValueError("The loader is prepared already: pass the loader from before prepare_dataloader().")
        parts = _first_attribute(sampler, "num_replicas", "world_size", "_world_size")
        rank = _first_attribute(sampler, "rank", "_rank")
        takes_share = isinstance(sampler, DistributedSampler) or (parts, rank) == (world.world_size, world.rank)
        if takes_share and parts != 1:
            name = type(sampler).__name__
            raise ValueError(
                f"The loader already shares its samples out: its {name} takes the part of rank {rank} of {parts}. Use "
                "the loader without prepare_dataloader(), or give it a sampler that draws the samples of all ranks."
            )


def _first_attribute(sampler: Any, *names: str) -> Any:
    return next((getattr(sampler, name) for name in names if hasattr(sampler, name)), None)


def _check_drop_last(drops: bool, pad: bool) -> None:
    if drops and not pad:
        raise ValueError("drop_last=True leaves samples out, but pad=False must not: give the loader drop_last=False.")


def _agree(source: Any, given: int | None) -> tuple[int, LoaderId | None]:
    """Return the seed for the order of the samples, and the identity of the loader. All ranks call this function.

    The seed is ``given``, or a random number if ``given`` is None. Rank 0 chooses the seed for all ranks, because the
    random numbers of the ranks differ after `seed_everything`. Rank 0 also chooses the identity. If this rank is alone,
    or runs a function that only some ranks run, it uses its own seed, and the identity is None.
    """
    blocks = blocks_of(rank_context())
    # Every rank draws a seed, so that the random numbers of all ranks advance alike, although only rank 0's is used.
    seed = _seed_of(source) if given is None else given
    if blocks is None or blocks.nested_in:  # this rank is alone, or runs a function that only some ranks run
        return seed, None
    agreed = on_rank_0("prepare_dataloader()", lambda: (seed, new_loader_id()), broadcast=True)
    assert agreed is not None
    return agreed


def _seed_of(source: Any) -> int:
    """Return a seed for the order, drawn from the generator of ``source`` or else from torch's default generator.

    The seed is random, so that two loaders have different orders. For a `SequentialSampler`, which draws no random
    numbers, the seed is 0.
    """
    if type(source) is SequentialSampler:
        return 0
    generator = generator_of(source) or torch.default_generator
    # The limit is not 2**63, so that the sum of the seed and the number of an epoch also fits into 64 bits.
    return int(torch.randint(2**62, (), generator=generator))


def _prepared(
    loader: DataLoader[T],
    share: RankSampler | Stream,
    loader_id: LoaderId | None,
    to_device: bool,
    replaced: dict[str, Any],
) -> PreparedLoader[T]:
    """Return a copy of ``loader`` that hands out the share of this rank.

    Args:
        loader: the user's loader.
        share: the sampler or dataset that takes the share of this rank out of all samples.
        loader_id: identifies the loader when the ranks compare the samples that they have drawn; None if they do not
            compare them.
        to_device: if True, the prepared loader moves the batches to the device of this rank.
        replaced: values for attributes of the copy, such as ``collate_fn``. The copy has these values only while torch
            makes an iterator, because torch reads the attributes then. At any other time the user sees the values of
            ``loader``.
    """
    world = current_world()
    prepared: Any = copy.copy(loader)
    # `DataLoader.__setattr__` refuses some attributes after the loader has been made, so this method is bypassed.
    object.__setattr__(prepared, "__class__", _prepared_class(type(loader)))
    # The copy must not use the iterators of ``loader``, so the attributes that hold iterators become None.
    vars(prepared).update(dict.fromkeys([*_iterators_in(loader), "_iterator"]))
    # In each iteration, torch draws a seed for the loader's workers from ``loader.generator``. Each rank needs other
    # seeds. Otherwise the workers of all ranks would, for instance, augment images with the same random numbers.
    if loader.generator is not None and world.world_size > 1:
        replaced["generator"] = torch.Generator().manual_seed(loader.generator.initial_seed() + world.rank)
    vars(prepared).update(
        _share=share,
        _loader_id=loader_id,
        _device=world.device if to_device else None,
        _replaced=replaced,
        _is_plain=False,
    )
    return prepared  # type: ignore[no-any-return]


class PreparedLoader(DataLoader[T]):
    """A loader that hands out the share of one rank, on the device of this rank, and counts the batches.

    The attributes are those of the user's loader. But if the dataset has a length, ``sampler`` and ``batch_sampler``
    are replaced, so that they draw only the share of this rank.
    """

    _share: RankSampler | Stream
    _loader_id: LoaderId | None
    _device: torch.device | None
    _replaced: dict[str, Any]
    # True if the class of the user's loader has an ``__iter__`` of its own, which reads an endless iterator (see
    # `_batch_sampler`). If so, the prepared loader uses ``__iter__`` and ``__len__`` of `DataLoader` instead.
    _is_plain: bool

    def __iter__(self) -> Any:  # `Any`, because `DataLoader` declares a private class as the return type
        self._share.begin_iteration()
        # When an iteration begins, torch draws a seed for the workers from the program's random numbers. If this
        # iteration continues an interrupted one, the random states in the checkpoint were saved after the interrupted
        # iteration had drawn its seed. So the draw in this iteration must leave the random states unchanged.
        with torch.random.fork_rng(devices=[], enabled=self._share.begin > 0):
            batches: Iterator[T] = DataLoader.__iter__(self) if self._is_plain else super().__iter__()
        if isinstance(self._share, Stream):
            batches = itertools.islice(batches, self._share.begin, None)
        count: float = math.inf
        with contextlib.suppress(TypeError, NotImplementedError):  # many iterable datasets have no length
            count = len(self)
        return _Batches(batches, self._share, self._loader_id, count, self._device)

    def __len__(self) -> int:
        if isinstance(self._share, Stream):
            return len(self._share)
        return DataLoader.__len__(self) if self._is_plain else super().__len__()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The order of the samples depends on the epoch."""
        self._share.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the seed, the epoch and the position in the epoch, for `load_state_dict`."""
        return self._share.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Make the next iteration continue at the epoch and the position of ``state``."""
        self._share.load_state_dict(state)

    def _get_iterator(self) -> Any:
        """Return a new iterator of torch.

        Torch and classes derived from `DataLoader` call this method for each iterator. The attributes in ``_replaced``
        are set only during this call, because torch reads them when it makes an iterator.
        """
        replaced = dict(self._replaced)
        init = WorkerInit(self.worker_init_fn, is_stream=isinstance(self._share, Stream)) if self.num_workers else None
        if init is not None:
            replaced["worker_init_fn"] = init
        own = {name: vars(self)[name] for name in replaced}
        vars(self).update(replaced)  # bypasses `DataLoader.__setattr__`, which would refuse these attributes
        try:
            iterator = super()._get_iterator()
        finally:
            vars(self).update(own)
        if init is not None:
            init.guard(getattr(iterator, "_workers", []))
        return iterator

    def __reduce__(self) -> tuple[Any, ...]:
        # The class may have been made by `_prepared_class`, so pickle cannot find it by its name.
        return _unmade, (type(self).__bases__[-1],), self.__getstate__()


def _prepared_class(kind: type[DataLoader[T]]) -> type[PreparedLoader[T]]:
    """Return the class of the prepared loader for a loader of the class ``kind``."""
    return PreparedLoader if kind is DataLoader else type(kind.__name__, (PreparedLoader, kind), {})


def _unmade(kind: type[DataLoader[T]]) -> PreparedLoader[T]:
    """Return a prepared loader without attributes. Unpickling calls this function, and then sets the attributes."""
    return object.__new__(_prepared_class(kind))


class _Batches(Iterator[T]):
    """The iterator of one iteration over a prepared loader.

    It counts the batches that the user has received. The sampler cannot count them, because workers draw ahead.
    """

    def __init__(
        self,
        batches: Iterator[T],
        share: RankSampler | Stream,
        loader_id: LoaderId | None,
        count: float,
        device: torch.device | None,
    ) -> None:
        """Hand out ``batches``.

        Args:
            batches: the iterator of torch.
            share: the sampler or dataset that takes the share of this rank out of all samples.
            loader_id: identifies the loader when the ranks compare the samples that they have drawn; None if they do
                not compare them.
            count: the number of batches; infinity if it is not known.
            device: the device to which the batches are moved; None if they are not moved.
        """
        self._batches = batches
        self._share = share
        self._loader_id = loader_id
        self._count = count
        self._device = device
        self._taken = 0
        self._epoch = 0
        self._is_checked = loader_id is None
        self._rest: list[T] = []  # if the last batch was divided into `Parts`: its second part, for the next call

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
        if not self._is_checked:
            self._check_alike()
        self._taken += 1
        self._share.note_taken(self._epoch, self._taken, self._count)
        if self._device is not None:
            batch = move_to_device(batch, self._device)
        if isinstance(batch, Parts):
            self._rest = [batch.last]
            batch = batch.first
        return batch

    def _check_alike(self) -> None:
        share = self._share
        first = share.first_checksums()
        if not first.samples:  # the loader's first worker has not drawn its samples yet, so check at the next batch
            return
        self._is_checked = True
        assert self._loader_id is not None
        draws = Draws(
            loader=self._loader_id.name,
            iteration=share.iteration,
            epoch=self._epoch,
            position=share.begin,
            rank=current_world().rank,
            length=share.source_length if isinstance(share, RankSampler) else None,
            first=first,
        )
        check_alike(self._loader_id, share.name, draws)


class Parts(NamedTuple):
    """Two batches that are handed out instead of one, because their samples could not be collated together."""

    first: Any  # all samples but the last
    last: Any  # the last sample


@dataclass
class EvenCollate:
    """The ``collate_fn`` of a loader with ``pad=False``, whose last batch may have one sample more than the others."""

    collate: Callable[[list[Any]], Any]
    batch_size: int

    def __call__(self, samples: list[Any]) -> Any:
        """Return ``samples`` as a batch.

        If there is one sample more than ``batch_size``, and it cannot be collated with the others, return `Parts`.
        """
        if len(samples) > self.batch_size:
            try:
                return self.collate(samples)
            except Exception:
                # The user's `collate` may raise any type of exception because the samples do not fit together. If the
                # reason is one faulty sample, `collate` raises again in one of the two calls below.
                return Parts(self.collate(samples[:-1]), self.collate(samples[-1:]))
        return self.collate(samples)
