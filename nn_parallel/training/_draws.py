"""A check that all ranks draw the same samples in the same order.

A prepared loader relies on this order: every rank draws all samples alike, and takes its part of them. If the order
differs between the ranks, some samples come twice and others never, without any error. The order differs, for instance,
if a sampler already takes the part of its rank, if a generator is not seeded, or if samples come in the order of a set.

The ranks compare their draws through the store, and no rank waits for another. The first rank that begins an iteration
of a loader writes a record of its draws into the store. Each other rank compares its own draws with this record when it
begins the same iteration of the same epoch. If the record belongs to another iteration, nothing is compared. So one
rank alone may look at a batch, and the other ranks neither wait nor fail.

The ranks compare the length of an epoch, and checksums of the first samples. The checksums cover only integers and
strings, such as an index, a label or a file name. Other numbers, such as floats, are not compared, because each rank
may augment its samples in its own way.

An augmented stream may hold random integers as well, such as the index of a randomly chosen negative example. They may
differ between the ranks although the order is the same. So the samples are treated as a table: each sample is a row,
and its first integer or string is in the first column, the second one in the second column, and so on. Each column has
a checksum of its own. The order counts as different only if the checksums of the two ranks differ in every compared
column. A column in which all values are different, such as a column of indices, identifies the samples. If there are
such columns, only they are compared. Otherwise all columns are compared, except those in which all values are equal.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._engine.ranks.blocks import blocks_of
from .._engine.ranks.context import rank_context
from .._engine.ranks.store import decode, draws_key, encode
from .._engine.torch_private import tree_leaves
from ..errors import ParallelError

SAMPLES = 16  # the number of samples that are compared in each iteration
PLACES = 8  # of each sample, only this many integers and strings are compared, one in each column of `Checksums`
SLOTS = 64  # all loaders share this many keys of the store, so that many loaders do not fill the store
LEADING = 256  # at most this many elements of a tensor, or bytes of an array, are compared


class LoaderId(NamedTuple):
    """The identity of a prepared loader, the same on every rank."""

    slot: int  # the number of the loader's key in the store; other loaders may use the same key
    name: str  # a random name, which shows to which loader a record in the store belongs


class Checksums(NamedTuple):
    """The checksums of the first samples that a rank has drawn. Ranks compare them to see if they draw alike.

    The samples form a table. Each sample is a row: its first integer or string is in the first column, its second one
    in the second column, and so on. For each of the first `PLACES` columns, there is an entry in `of_keys` and one in
    `of_others`:

    - If all values in the column are different, as with indices, the checksum of the column is in `of_keys`. Such a
      column identifies the samples, so other columns are compared only if there is no such column.
    - If some, but not all, values are equal, as with labels, the checksum of the column is in `of_others`.
    - If the column is empty, or has the same value in all rows, it has no checksum.

    All entries without a checksum are 0.
    """

    samples: int = 0  # the number of samples; 0 if nothing has been drawn yet
    of_keys: list[int] = [0] * PLACES
    of_others: list[int] = [0] * PLACES


class Draws(NamedTuple):
    """The record of the samples that one rank has drawn at the beginning of an iteration."""

    loader: str  # the `LoaderId.name` of the loader
    iteration: int  # the number of iterations of this loader that the rank has begun
    epoch: int
    position: int  # the position in the epoch at which the iteration began
    rank: int
    length: int | None  # the length of an epoch; None if it is not known
    first: Checksums  # the checksums of the first samples

    def is_of_iteration(self, other: Draws) -> bool:
        """Return whether both records belong to the same iteration. If they do, they should be equal."""
        return (self.loader, self.iteration, self.epoch, self.position) == (
            other.loader,
            other.iteration,
            other.epoch,
            other.position,
        )


def new_loader_id() -> LoaderId:
    """Return the identity of a new loader. One rank calls this function for all ranks."""
    return LoaderId(next(_count) % SLOTS, secrets.token_hex(8))


def checksums(drawn: list[Any]) -> Checksums:
    """Return the checksums of the first samples in ``drawn``."""
    rows = [list(itertools.islice(_identifying_parts(sample), PLACES)) for sample in drawn[:SAMPLES]]
    sums = Checksums(len(rows), [0] * PLACES, [0] * PLACES)
    for place, column in enumerate(itertools.zip_longest(*rows)):
        different = len(set(column))
        if different > 1:
            kind = sums.of_keys if different == len(rows) else sums.of_others
            kind[place] = zlib.crc32(repr(column).encode())
    return sums


def check_alike(loader: LoaderId | None, name: str, draws: Draws) -> None:
    """Check that all ranks draw the same samples, of which each rank then takes its share.

    The first rank writes a description of its samples into the store. Each other rank compares the description of its
    own samples with this one. Nothing is compared in these cases:

    - this rank is the only rank, or the store can no longer be reached;
    - the loader is used inside a function that only some ranks run;
    - the loader is used in a forked process, or in a thread other than the main thread.

    Args:
        loader: the identity of the loader; None if the ranks have not agreed on an identity.
        name: the name of the sampler or dataset, for the error message.
        draws: the description of the samples that this rank draws.

    Raises:
        ValueError: the ranks draw different samples, or a different number of them.
    """
    context = rank_context()
    blocks = blocks_of(context)
    if loader is None or context is None or blocks is None or blocks.nested_in or context.is_inherited:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    key = draws_key(loader.slot)
    own_record = encode(draws)
    try:
        text = context.connection.get(key)
        while True:
            other = None if text is None else decode(Draws, key, text)
            if other is not None and other.loader == draws.loader and other.iteration >= draws.iteration:
                break
            # There is no record of this iteration: the key is empty, or holds the record of another loader or of an
            # earlier iteration. So this rank writes its own record, for the ranks that begin this iteration later.
            present = context.connection.swap(key, text or "", own_record)
            if present == own_record:
                return
            text = present  # another rank has written a record meanwhile
    except ParallelError:  # the store is gone
        return
    if draws.is_of_iteration(other) and (why := _difference(draws, other)):
        raise ValueError(
            f"{name} does not draw alike on all ranks: in epoch {draws.epoch} {why}. All ranks must draw in the same "
            "order, because prepare_dataloader() gives each rank a part of it. "
            f"If {name} already takes the part of its rank, use the loader without prepare_dataloader(). If it has "
            "random numbers of its own, seed them alike on every rank; give random_split() a generator. Sort samples "
            "that come in the order of a set or of a directory."
        )


def _difference(mine: Draws, other: Draws) -> str:
    """Say in words how the samples of two ranks differ.

    Returns:
        A clause for an error message; an empty string if the samples are alike or cannot be compared.
    """
    if mine.length is not None and other.length is not None and mine.length != other.length:
        return f"rank {mine.rank} draws {mine.length} times and rank {other.rank} {other.length} times"
    if mine.first.samples != other.first.samples:
        return ""
    kinds = (mine.first.of_keys, other.first.of_keys), (mine.first.of_others, other.first.of_others)
    for own, others in kinds:
        pairs = [pair for pair in zip(own, others, strict=True) if all(pair)]
        if pairs:
            differ = all(one != another for one, another in pairs)
            return f"rank {mine.rank} does not draw the same samples as rank {other.rank}" if differ else ""
    return ""


def _identifying_parts(sample: Any) -> Iterator[Any]:
    """Yield the integers and strings in ``sample``. They identify the sample, because augmentation seldom changes them.

    For a tensor or array of integers, yield the shape and the first elements as one value.
    """
    for leaf in tree_leaves(sample):
        if isinstance(leaf, int | str | bytes):
            yield leaf
        elif hasattr(leaf, "dtype") and hasattr(leaf, "tobytes") and leaf.dtype.kind in "iu":  # NumPy
            yield leaf.shape, leaf.tobytes()[:LEADING]
        elif isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            yield tuple(leaf.shape), *leaf.flatten()[:LEADING].tolist()


# Counts the new loaders. `new_loader_id` gives each loader the next of the `SLOTS` keys of the store, and after the
# last key the first one again.
_count = itertools.count()
