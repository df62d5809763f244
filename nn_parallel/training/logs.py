"""What the ranks log: from rank 0 what is asked for, from the others what one must know; each line says whose it is."""

from __future__ import annotations

import logging

from .._engine.ranks.context import current_world
from .._engine.ranks.membership import join_launched_world

FORMAT = "%(rank)s%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(level: int | str = "INFO") -> None:
    """Log to stderr: rank 0 from ``level`` up, the other ranks from ``WARNING`` up, each line headed ``[rank 1]``.

    Alone, there is no such head. Handlers that the program has set up stay as they are; called again, this one is
    replaced.

    Args:
        level: a level of `logging`, by name or number.

    Raises:
        ValueError: there is no such level.

    Example::

        setup_logging()
        logging.getLogger(__name__).info("epoch %d", epoch)  # [rank 0] 2026-01-01 12:00:00,000 INFO __main__: epoch 1
    """
    join_launched_world()
    handler = _RankHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(_prepare_for_rank)
    root = logging.getLogger()
    root.setLevel(level)
    for earlier in [handler for handler in root.handlers if isinstance(handler, _RankHandler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]  # of sys.stderr, whatever that is
    """The handler of `setup_logging`."""


def _prepare_for_rank(record: logging.LogRecord) -> bool:
    """Asked for each line, because a process can be a rank now and alone later."""
    world = current_world()
    record.rank = f"[rank {world.rank}] " if world.world_size > 1 else ""
    return world.is_main or record.levelno >= logging.WARNING
