"""How far a map has got: a bar of tqdm counts its items."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Progress(NamedTuple):
    """The bar of a map, if one is wanted."""

    bar: Any  # of tqdm, which stays open; True: one is made; False or None: there is none
    total: int | None  # how many items there are, if that is known
    name: str  # of the call: stands before a bar that is made

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """Return the items, each of which is counted as it is taken.

        Raises:
            ImportError: tqdm is not installed.
            TypeError: ``bar`` is nothing of this.
        """
        if self.bar is False or self.bar is None:
            return iter(items)
        if self.bar is not True and not hasattr(self.bar, "update"):
            raise TypeError(f"progress={self.bar!r} must be True, False or a bar of tqdm.")
        return _counted(items, self._made() if self.bar is True else self.bar, closes=self.bar is True)

    def _made(self) -> Any:
        """Return a bar for a notebook or a terminal; where there is neither, one that shows nothing."""
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True shows a bar of tqdm, which is not installed: pip install tqdm") from error
        is_seen = "ipykernel" in sys.modules or sys.stderr.isatty()
        return tqdm(total=self.total, desc=self.name, disable=not is_seen)


def _counted(items: Iterable[T], bar: Any, closes: bool) -> Iterator[T]:
    try:
        for item in items:
            bar.update()
            yield item
    finally:
        if closes:
            bar.close()
