"""The progress bar of a `map`: a bar of tqdm that counts the items."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Progress(NamedTuple):
    """The progress bar that the user has asked for in a call of `map`."""

    # A bar of tqdm that the user has made and will close; True if a bar must be made; False or None for no bar.
    bar: Any
    total: int | None  # the number of items, if it is known
    name: str  # the name of the call, which is the title of the bar if a bar must be made

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """Return an iterator over ``items`` that counts each item on the bar when it is taken.

        Raises:
            ImportError: a bar must be made, and tqdm is not installed.
            TypeError: ``bar`` is neither True, False nor None, and is not a bar of tqdm.
        """
        if self.bar is False or self.bar is None:
            return iter(items)
        if self.bar is not True and not hasattr(self.bar, "update"):
            raise TypeError(f"progress={self.bar!r} must be True, False or a bar of tqdm.")
        return _count_on_bar(items, self._make_bar() if self.bar is True else self.bar, closes=self.bar is True)

    def _make_bar(self) -> Any:
        """Return a new bar. It is shown only in a notebook, or if standard error is a terminal."""
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True shows a bar of tqdm, which is not installed: pip install tqdm") from error
        is_seen = "ipykernel" in sys.modules or sys.stderr.isatty()
        return tqdm(total=self.total, desc=self.name, disable=not is_seen)


def _count_on_bar(items: Iterable[T], bar: Any, closes: bool) -> Iterator[T]:
    """Yield the items, and count them on the bar. If ``closes``, close the bar at the end."""
    try:
        for item in items:
            bar.update()
            yield item
    finally:
        if closes:
            bar.close()
