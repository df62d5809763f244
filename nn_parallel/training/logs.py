"""`setup_logging`: one log of all ranks, in which each line names its rank."""

from __future__ import annotations

import logging

from .._engine.ranks.context import current_world
from .._engine.ranks.membership import join_launched_world

FORMAT = "%(rank)s%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(level: int | str = "INFO") -> None:
    """Log to stderr: rank 0 from ``level`` up, the other ranks from ``WARNING`` up.

    Each line begins with the rank, as in ``[rank 1]``, unless there is only one rank. The function adds a handler to
    the root logger. Handlers of the program stay as they are. A second call replaces the handler of the first call.

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


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]  # the type of sys.stderr is not known
    """The handler that `setup_logging` adds. A second call recognizes this type, and replaces the handler."""


def _prepare_for_rank(record: logging.LogRecord) -> bool:
    """Add the rank to ``record``, and return whether this rank logs it.

    The rank is looked up for each line, because the process may have joined or left a world since the last line.
    """
    world = current_world()
    record.rank = f"[rank {world.rank}] " if world.world_size > 1 else ""
    return world.is_main or record.levelno >= logging.WARNING
