"""Exceptions that end a rank outside of all blocks, and how the other ranks show the first of them.

If an exception ends a rank, the collectives of the other ranks fail too, but their errors say only that a connection
was lost. Therefore the first rank that fails writes its exception into the store before its process ends. A rank that
then loses the connection prints this exception, which is the cause, above its own traceback.
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
    """The reason why ranks end outside of all blocks: an exception of one rank, or ranks that have died or left.

    The store keeps only the first reason that a rank writes, so that all ranks show the same one.
    """

    # The text that ranks print: the exception with its traceback. If there is no exception, the text names the ranks
    # that have died or left.
    description: str


def share_uncaught(context: RankContext) -> None:
    """Install an excepthook that shares uncaught exceptions with the other ranks, until this rank leaves the world."""

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        context.ends_by_exception = True
        if not context.is_inherited:
            with contextlib.suppress(Exception):  # an error of the store must not hide ``error``, which is printed next
                _publish_or_show_cause(context, error)
        former_hook(kind, error, frames)

    def restore() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = former_hook

    former_hook = sys.excepthook
    sys.excepthook = excepthook
    context.on_leave.callback(restore)


def _publish_or_show_cause(context: RankContext, error: BaseException) -> None:
    """Publish ``error``, or print the failure of another rank that has caused ``error``.

    If ``error`` is the timeout of a collective, ranks on this node that are stopped by a signal may be the cause. So
    the list of these ranks is published with ``error``, and printed.
    """
    if is_consequence(error):
        cause = _cause(context)
    else:
        cause = _stopped_ranks(context) if collective_timed_out(error) else ""
        uncaught = Uncaught(f"On rank {context.rank}:\n\n{format_traceback(error)}\n{cause}")
        context.connection.swap(UNCAUGHT_KEY, "", encode(uncaught))
    if cause:
        print(f"\n{cause.rstrip()}\n\nTherefore:\n", file=sys.stderr, flush=True)


def _cause(context: RankContext) -> str:
    """Return a text that says why this rank has lost a connection; an empty string if no reason is found in time.

    The reason is the exception that the first failed rank has published, or else the death of ranks. If neither is
    found within `times.DIES_WITHIN_S`, the reason is that ranks have left the world. The first rank that finds dead
    ranks, or ranks that have left, publishes them, so that all ranks show the same reason.
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
    except RankError as lost:  # the store is lost, and so is the rank that hosts it
        return "\n".join(map(str, lost.exceptions))
    return ""


def _stopped_ranks(context: RankContext) -> str:
    """Return a line for each rank on this node that is stopped by a signal.

    Such a rank may be the reason why a collective of this rank has timed out.
    """
    with contextlib.closing(Liveness(context, context.connection)) as liveness:
        stopped = [rank for rank in _others(context) if liveness.is_stopped(rank)]
    return "\n".join(f"Rank {rank} is stopped by a signal." for rank in stopped)


def _others(context: RankContext) -> list[int]:
    return [rank for rank in range(context.world_size) if rank != context.rank]
