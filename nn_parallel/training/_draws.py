"""Ranks that do not draw alike: each rank compares what it draws with what another one has drawn, and none waits.

A prepared loader relies on it: every rank draws the same order and takes its part. A sampler that takes its rank's part
already, an unseeded generator or the order of a set break that, and samples come twice or never, in silence.

The first rank that begins an iteration of a loader writes down what it has drawn; the others, as they begin the same
iteration of the same epoch, compare. A rank that looks at a batch alone is therefore no reason to wait, or to fail.
Compared are the length and what identifies the first samples: integers and text in them. Other numbers may be
augmented, by each rank in its own way. A stream may add integers of that kind too, as the number of a drawn negative
example. So it counts as another order only if the samples agree at none of the places that tell them apart.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .._engine.ranks.blocks import blocks_of
from .._engine.ranks.context import rank_context
from .._engine.ranks.store import decode, draws_key, encode
from ..errors import ParallelError

SAMPLES = 16  # that are compared of each iteration
PLACES = 8  # in a sample: the first integers and texts in it
SLOTS = 64  # for loaders, in the store: the number of keys does not grow with that of loaders
LEADING = 256  # numbers of a tensor, and bytes of an array, that are compared


class LoaderId(NamedTuple):
    """A prepared loader, by the same name on every rank."""

    slot: int
    name: str


class Checksums(NamedTuple):
    """Of the first samples: one for each of the first `PLACES` in them, 0 if it is not of that kind."""

    samples: int = 0  # how many were compared; none have been drawn yet if it is 0
    of_keys: list[int] = [0] * PLACES  # places at which all samples differ, as their numbers do
    of_others: list[int] = [0] * PLACES  # places at which some differ, as labels do


class Draws(NamedTuple):
    """The first samples that a rank has drawn in an iteration, as checksums, and where that iteration is."""

    loader: str
    iteration: int  # so many the rank has begun
    epoch: int
    position: int
    rank: int
    length: int | None
    first: Checksums

    def is_of_iteration(self, other: Draws) -> bool:
        """Return whether both ranks began the same: then they should have drawn the same."""
        return (self.loader, self.iteration, self.epoch, self.position) == (
            other.loader,
            other.iteration,
            other.epoch,
            other.position,
        )


def new_loader_id() -> LoaderId:
    """Return a name for a loader. One rank chooses it for all."""
    return LoaderId(next(_count) % SLOTS, secrets.token_hex(8))


def checksums(drawn: list[Any]) -> Checksums:
    """Return the checksums of what identifies the first samples of ``drawn``."""
    rows = [list(itertools.islice(_identifying(sample), PLACES)) for sample in drawn[:SAMPLES]]
    sums = Checksums(len(rows), [0] * PLACES, [0] * PLACES)
    for place, column in enumerate(itertools.zip_longest(*rows)):
        different = len(set(column))
        if different > 1:
            kind = sums.of_keys if different == len(rows) else sums.of_others
            kind[place] = zlib.crc32(repr(column).encode())
    return sums


def check_alike(loader: LoaderId | None, name: str, draws: Draws) -> None:
    """Compare ``draws`` of this rank with those of another rank that was here before; else write them down for it.

    Args:
        name: that of what is drawn from, for the error.

    Nothing is compared where ranks are not expected to do alike: alone, in the function of some ranks, in a fork, in a
    thread beside the main one, and when the store is gone.

    Raises:
        ValueError: the ranks draw other samples, or another number of them.
    """
    context = rank_context()
    blocks = blocks_of(context)
    if loader is None or context is None or blocks is None or blocks.nested_in or context.is_inherited:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    key = draws_key(loader.slot)
    mine = encode(draws)
    try:
        text = context.connection.get(key)
        while True:
            other = None if text is None else decode(Draws, key, text)
            if other is not None and other.loader == draws.loader and other.iteration >= draws.iteration:
                break
            present = context.connection.swap(key, text or "", mine)
            if present == mine:
                return
            text = present
    except ParallelError:
        return
    if draws.is_of_iteration(other) and (why := _difference(draws, other)):
        raise ValueError(
            f"{name} is not drawn alike: in epoch {draws.epoch} {why}. prepare_dataloader() has every rank draw the "
            f"same order, of which each takes its part. If {name} takes the part of a rank itself, use the loader "
            "without prepare_dataloader(). If it has random numbers of its own, seed them alike on every rank; give "
            "random_split() a generator. Sort what is in the order of a set or of a directory."
        )


def _difference(mine: Draws, other: Draws) -> str:
    """Return how they differ, in words; empty if they are alike, or cannot be compared."""
    if mine.length is not None and other.length is not None and mine.length != other.length:
        return f"rank {mine.rank} draws {mine.length} times and rank {other.rank} {other.length} times"
    if mine.first.samples != other.first.samples:
        return ""
    kinds = (mine.first.of_keys, other.first.of_keys), (mine.first.of_others, other.first.of_others)
    for own, others in kinds:
        pairs = [pair for pair in zip(own, others, strict=True) if all(pair)]
        if pairs:
            differ = all(one != another for one, another in pairs)
            return f"rank {mine.rank} draws other samples than rank {other.rank}" if differ else ""
    return ""


def _identifying(sample: Any) -> Iterator[Any]:
    """Yield the parts of ``sample`` that say which one it is, and do not vary with how it is augmented."""
    for leaf in tree_leaves(sample):
        if isinstance(leaf, int | str | bytes):
            yield leaf
        elif hasattr(leaf, "dtype") and hasattr(leaf, "tobytes") and leaf.dtype.kind in "iu":  # of NumPy
            yield leaf.shape, leaf.tobytes()[:LEADING]
        elif isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            yield tuple(leaf.shape), *leaf.flatten()[:LEADING].tolist()


_count = itertools.count()
