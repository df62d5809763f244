"""A pause of Python's garbage collector, to make an import faster."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector in this block, which contains an import.

    An import creates many objects, so Python would start collections during the import. These would free nothing,
    because the objects of a module stay alive. But a full collection visits all objects of the process, and takes 80 ms
    for the objects of torch alone.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
