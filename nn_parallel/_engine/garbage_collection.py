"""Python's garbage collector, kept out of an import."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection in this block.

    What modules are made of stays, so there is nothing to be found. But every so many new objects Python looks through
    all that there are, and torch's alone take it 80 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
