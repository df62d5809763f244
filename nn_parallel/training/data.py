"""A `DataLoader` whose samples are shared out between the ranks."""

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
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .._engine.ranks.blocks import blocks_of
from .._engine.ranks.context import current_world, rank_context
from .._engine.ranks.membership import join_launched_world
from ..ranks import on_rank
from ..world import World
from ._draws import Draws, LoaderId, check_alike, new_loader_id
from ._loader_workers import WorkerInit
from ._shares import EvenBatches, RankSampler, State, Stream, generator_of
from ._to_device import move_to_device

T = TypeVar("T")


def prepare_dataloader(
    loader: DataLoader[T], *, pad: bool = True, seed: int | None = None, to_device: bool = True
) -> PreparedLoader[T]:
    """Return a loader like this one, of which each rank draws its part; with one rank, all of it. Every rank calls it.

    Everything else is as in ``loader``: the dataset, workers, pinning, collation, and the batch size, now of each rank.
    All ranks draw what its sampler gives, with the same random numbers, and each takes every ``world_size``-th sample;
    of a batch sampler that is not torch's own, every ``world_size``-th batch. The order depends on the seed and the
    epoch alone, not on the number of ranks. A sampler is asked for no more than the next batches of all ranks need; on
    several ranks with ``pad=False`` for the batches after them too, to know which is the last.

    Of an iterable dataset each rank draws all samples, and takes every ``world_size``-th one. The random numbers of
    Python, NumPy and torch are the same on all ranks meanwhile; generators of its own the dataset seeds alike. Between
    the workers of a loader it shares out its samples itself, as torch wants it, by `get_worker_info`, a
    ``worker_init_fn`` or the ``sharding_filter`` of a DataPipe.

    The ranks compare what they draw first in each epoch, without waiting for each other: the number of samples, the
    indices, those of a `Subset` in its dataset, and the integers and text in the samples of an iterable dataset. So a
    sampler, a subset or an iterable dataset that takes its rank's part already, or that is seeded differently, is an
    error. What other datasets with a length hold is not looked at: it must be the same on all ranks.

    After an epoch whose last batch was handed out, the next iteration is the next epoch; of an iterable dataset without
    a length, after one that was asked for more. An epoch that is left before is drawn again, so a rank that looks at a
    few batches stays in step with the others. To go to an epoch, call ``loader.set_epoch(epoch)``, or, as loops for
    `DistributedSampler` do, ``loader.sampler.set_epoch(epoch)``. A ``set_epoch`` of your sampler, or of an iterable
    dataset, is called with each new epoch; where your loop calls it too, that counts.

    The loader has a state, for ``save_checkpoint(..., loader=loader)``: the seed, the epoch, and how much of it was
    handed out. After `load_checkpoint` the next iteration draws the rest of that epoch, also if the loop calls
    ``set_epoch`` with its number first, and ``len(loader)`` is how many batches it has: the same ones that would have
    come, where there are as many ranks; else each remaining sample once. Saved in the loop with its last batch, the
    rest is empty: ``for epoch in range(saved["epoch"], epochs)`` goes on where it was at any step.
    Of an iterable dataset the batches that were handed out are drawn again and passed over, which needs as many samples
    in the batches of all ranks together as before. What the workers of a loader draw at random themselves, to augment
    images for instance, begins anew; it differs between the ranks, also if ``loader`` has a ``generator``.

    The workers of a loader ignore the signals that `stop_requested` handles: SLURM sends them to every process.

    Args:
        pad: give every rank the same number of samples, for training: the first ones are repeated, or the last ones
            left out if ``loader`` has ``drop_last``. False, for evaluation: each sample is on exactly one rank, and
            there are as many batches on every rank, so that there can be collectives in the loop. The last batch of
            some ranks may therefore hold one sample more. Only where that cannot be, one rank has a batch more than
            another: the samples cannot be collated (images of several sizes), there are fewer than ranks, or the
            batches are made by a batch sampler of your own or by the dataset.
        seed: of the order. If None, it is drawn from the loader's generator, else from the random numbers of torch,
            which `seed_everything` and ``torch.manual_seed`` set; on several ranks from those of rank 0.
        to_device: move the batches to the device of this rank: tensors in mappings, sequences, dataclasses and
            namespaces, and anything that has a method ``to``; without waiting, where the loader has ``pin_memory``.

    Raises:
        TypeError: it is no loader.
        ValueError: the loader shares its samples out already, or leaves some out (``drop_last``) with ``pad=False``. As
            an epoch begins: the ranks do not draw alike.

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
    return _of_samples(loader, pad, seed, to_device)


def _of_samples(loader: DataLoader[T], pad: bool, seed: int | None, to_device: bool) -> PreparedLoader[T]:
    world = current_world()
    batches, keeps_iterator = _batch_sampler(loader)
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
        numbers=dataset.indices if isinstance(dataset, Subset) else None,
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
    vars(prepared).update(sampler=sampler, batch_sampler=batches, _is_plain=keeps_iterator)
    return prepared


def _of_stream(
    loader: DataLoader[T], dataset: IterableDataset[T], pad: bool, seed: int | None, to_device: bool
) -> PreparedLoader[T]:
    if isinstance(loader, PreparedLoader):
        raise ValueError("The loader is prepared already: its samples are shared out.")
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
    """Return the batch sampler of ``loader``, and whether its own way to iterate is to be left out.

    Some loaders keep their workers by an iterator of their own that never ends, over a batch sampler that repeats
    another one: timm's MultiEpochsDataLoader, ultralytics' InfiniteDataLoader, DomainBed's FastDataLoader. Each epoch
    of them is one of that other batch sampler.
    """
    batches: Any = loader.batch_sampler
    repeated = getattr(batches, "sampler", None)
    iterates_itself = type(loader).__iter__ is not DataLoader.__iter__
    is_endless = iterates_itself and bool(_iterators_in(loader)) and isinstance(repeated, BatchSampler)
    return (repeated, True) if is_endless else (batches, False)


def _iterators_in(loader: DataLoader[Any]) -> list[str]:
    """Return the attributes that are iterators of torch's, but for the one in which torch keeps workers."""
    attributes = vars(loader).items()
    return [name for name, value in attributes if isinstance(value, _BaseDataLoaderIter) and name != "_iterator"]


def _check_whole(source: Any, world: World) -> None:
    """Raise if ``source``, a sampler or batch sampler, takes the part of a rank already."""
    for sampler in (source, getattr(source, "sampler", None)):
        if isinstance(sampler, RankSampler):
            raise ValueError("The loader is prepared already: its samples are shared out.")
        parts = _first_attribute(sampler, "num_replicas", "world_size", "_world_size")
        rank = _first_attribute(sampler, "rank", "_rank")
        is_for_here = isinstance(sampler, DistributedSampler) or (parts, rank) == (world.world_size, world.rank)
        if is_for_here and parts != 1:
            name = type(sampler).__name__
            raise ValueError(
                f"The loader shares its samples out already: its {name} takes the part of rank {rank} of {parts}. Use "
                "the loader without prepare_dataloader(), or give it a sampler that draws for all ranks."
            )


def _first_attribute(sampler: Any, *names: str) -> Any:
    return next((getattr(sampler, name) for name in names if hasattr(sampler, name)), None)


def _check_drop_last(drops: bool, pad: bool) -> None:
    if drops and not pad:
        raise ValueError("drop_last=True leaves samples out, and pad=False none: give the loader drop_last=False.")


def _agree(source: Any, given: int | None) -> tuple[int, LoaderId | None]:
    """Return the seed of rank 0 for ``source``, the ``given`` one or another, and a name for the loader. All call it.

    The ranks' own seeds differ after `seed_everything`.
    """
    blocks = blocks_of(rank_context())
    seed = _seed_of(source) if given is None else given  # on every rank: afterwards they draw on alike
    if blocks is None or blocks.nested_in:  # not all ranks are here to agree
        return seed, None

    def prepare_dataloader() -> tuple[int, LoaderId]:
        return seed, new_loader_id()

    return on_rank(0, broadcast=True)(prepare_dataloader)()


def _seed_of(source: Any) -> int:
    """Return a seed from where ``source`` draws its own, so that two loaders have two orders."""
    if type(source) is SequentialSampler:
        return 0
    generator = generator_of(source) or torch.default_generator
    return int(torch.randint(2**62, (), generator=generator))  # the epoch is added to it


def _prepared(
    loader: DataLoader[T],
    share: RankSampler | Stream,
    loader_id: LoaderId | None,
    to_device: bool,
    replaced: dict[str, Any],
) -> PreparedLoader[T]:
    """Return a copy of ``loader`` that hands out the part of this rank.

    Args:
        replaced: attributes that torch is to find instead of the loader's own, as it makes an iterator.
    """
    world = current_world()
    prepared: Any = copy.copy(loader)
    # Past the setter, which forbids it for a loader that has been made.
    object.__setattr__(prepared, "__class__", _prepared_class(type(loader)))
    vars(prepared).update(dict.fromkeys([*_iterators_in(loader), "_iterator"]))  # those draw from the given loader
    if loader.generator is not None and world.world_size > 1:  # the seeds of the workers come from it
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
    """A loader that hands out the part of one rank, on its device, and counts the batches.

    Its attributes are those of the loader that was prepared, but for the sampler of a dataset with a length.
    """

    _share: RankSampler | Stream
    _loader_id: LoaderId | None
    _device: torch.device | None
    _replaced: dict[str, Any]
    _is_plain: bool  # it iterates as torch's own class

    def __iter__(self) -> Any:  # torch says: its own class
        self._share.begin_iteration()
        # Torch draws a seed for workers, which has been drawn already where the epoch has begun before.
        with torch.random.fork_rng(devices=[], enabled=self._share.begin > 0):
            batches: Iterator[T] = DataLoader.__iter__(self) if self._is_plain else super().__iter__()
        if isinstance(self._share, Stream):
            batches = itertools.islice(batches, self._share.begin, None)
        count: float = math.inf
        with contextlib.suppress(TypeError, NotImplementedError):  # many an iterable dataset has no length
            count = len(self)
        return _Batches(batches, self._share, self._loader_id, count, self._device)

    def __len__(self) -> int:
        if isinstance(self._share, Stream):
            return len(self._share)
        return DataLoader.__len__(self) if self._is_plain else super().__len__()

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: the next iteration draws it, in the order that belongs to it."""
        self._share.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the epoch and the position in it, for `load_state_dict`."""
        return self._share.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on at the epoch and the position of ``state``."""
        self._share.load_state_dict(state)

    def _get_iterator(self) -> Any:
        """Return torch's iterator. Whatever class made this loader, torch makes each of its iterators here."""
        replaced = dict(self._replaced)
        init = WorkerInit(self.worker_init_fn, is_stream=isinstance(self._share, Stream)) if self.num_workers else None
        if init is not None:
            replaced["worker_init_fn"] = init
        own = {name: vars(self)[name] for name in replaced}
        vars(self).update(replaced)  # past the setter
        try:
            iterator = super()._get_iterator()
        finally:
            vars(self).update(own)
        if init is not None:
            init.guard(getattr(iterator, "_workers", []))
        return iterator

    def __reduce__(self) -> tuple[Any, ...]:
        return _unmade, (type(self).__bases__[-1],), self.__getstate__()


def _prepared_class(kind: type[DataLoader[T]]) -> type[PreparedLoader[T]]:
    """Return the class of prepared loaders of this ``kind``."""
    return PreparedLoader if kind is DataLoader else type(kind.__name__, (PreparedLoader, kind), {})


def _unmade(kind: type[DataLoader[T]]) -> PreparedLoader[T]:
    """Return a loader to be unpickled into."""
    return object.__new__(_prepared_class(kind))


class _Batches(Iterator[T]):
    """The batches of one iteration. Only here is it known which were handed out: workers draw ahead."""

    def __init__(
        self,
        batches: Iterator[T],
        share: RankSampler | Stream,
        loader_id: LoaderId | None,
        count: float,
        device: torch.device | None,
    ) -> None:
        """``count``: of the batches; infinity if it is not known."""
        self._batches = batches
        self._share = share
        self._loader_id = loader_id
        self._count = count
        self._device = device
        self._taken = 0
        self._epoch = 0
        self._is_checked = loader_id is None
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
        first = share.drawn()
        if not first.samples:  # the first worker comes later
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
    """A batch that could not be collated as one."""

    first: Any
    last: Any


@dataclass
class EvenCollate:
    """The ``collate`` of a loader, for batches of which the last may have one sample too many."""

    collate: Callable[[list[Any]], Any]
    batch_size: int

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of ``samples``, in two parts if one sample too many does not go into it."""
        if len(samples) > self.batch_size:
            try:
                return self.collate(samples)
            except Exception:  # of whatever does not go together; a sample that is bad by itself raises again
                return Parts(self.collate(samples[:-1]), self.collate(samples[-1:]))
        return self.collate(samples)
