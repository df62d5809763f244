"""An exception that ends a rank, outside all blocks: the ranks that then lose the connection show it above their own.

The first rank to fail tells the others, before its process ends and their collectives fail with it.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import NamedTuple

from ...errors import RankError
from ..failures import collective_timed_out
from ..polling import looks
from ..tracebacks import format_traceback
from . import times
from .context import RankContext
from .liveness import Liveness
from .store import UNCAUGHT_KEY, decode, encode
from .watchdog import has_left, is_consequence


class Uncaught(NamedTuple):
    """The exception or the exit that has ended the first rank."""

    description: str  # with the traceback, or which ranks have died without one


def share_uncaught(context: RankContext) -> None:
    """Tell the others of an exception that nobody catches here, or show theirs, until this rank leaves the world."""

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        context.ends_by_exception = True
        if not context.is_inherited:
            with contextlib.suppress(Exception):  # without a store there is nobody to tell, or to ask
                _tell_or_show(context, error)
        before(kind, error, frames)

    def restore() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = before

    before = sys.excepthook
    sys.excepthook = excepthook
    context.on_leave.callback(restore)


def _tell_or_show(context: RankContext, error: BaseException) -> None:
    if is_consequence(error):
        cause = _cause(context)
    else:
        cause = _stopped(context) if collective_timed_out(error) else ""
        uncaught = Uncaught(f"On rank {context.rank}:\n\n{format_traceback(error)}\n{cause}")
        context.connection.swap(UNCAUGHT_KEY, "", encode(uncaught))
    if cause:
        print(f"\n{cause.rstrip()}\n\nTherefore:\n", file=sys.stderr, flush=True)


def _cause(context: RankContext) -> str:
    """Return why the first rank has ended: as it has told, or who has died; if neither is soon known, who has left.

    All ranks agree on it.
    """
    connection = context.connection
    try:
        with contextlib.closing(Liveness(context, connection)) as liveness:
            for waited in looks(*times.POLL):
                uncaught = connection.read(UNCAUGHT_KEY, Uncaught)
                if uncaught is None:
                    dead = (rank for rank in liveness.dead(_others(context)) if not has_left(context, connection, rank))
                    gone = [str(liveness.death(rank)) for rank in dead]
                    if waited > times.DIES_WITHIN_S and not gone:
                        left = (rank for rank in _others(context) if has_left(context, connection, rank))
                        gone = [f"Rank {rank} has left: it is at its end, or called cleanup_ddp()." for rank in left]
                    if gone:
                        first = connection.swap(UNCAUGHT_KEY, "", encode(Uncaught("\n".join(gone))))
                        uncaught = decode(Uncaught, UNCAUGHT_KEY, first)
                if uncaught is not None or waited > times.DIES_WITHIN_S:
                    return "" if uncaught is None else uncaught.description
    except RankError as lost:  # the store, with its host
        return "\n".join(map(str, lost.exceptions))
    return ""


def _stopped(context: RankContext) -> str:
    """Name the ranks on this node that are stopped, for which a collective has waited in vain."""
    with contextlib.closing(Liveness(context, context.connection)) as liveness:
        stopped = [rank for rank in _others(context) if liveness.is_stopped(rank)]
    return "\n".join(f"Rank {rank} is stopped by a signal." for rank in stopped)


def _others(context: RankContext) -> list[int]:
    return [rank for rank in range(context.world_size) if rank != context.rank]
