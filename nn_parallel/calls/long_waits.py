"""What a rank does that waits for others for long: it says what for, and warns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence

from ..launch.context import RankContext
from ..launch.store import ASKED_KEY, WARN_AFTER_S, waiting_key, where_key
from .deadlock import waits_for
from .records import Call, Progress, Report, Where
from .watcher import LOOK_EVERY_S

SAY_WHAT_FOR_AFTER_S = 1.0
ANSWER_WITHIN_S = 2 * LOOK_EVERY_S  # where a rank stands
RANKS_NAMED = 8
logger = logging.getLogger("nn_parallel")


class LongWaits:
    """The long waits of one rank in calls of ours."""

    def __init__(self, context: RankContext, report_of: Callable[[int], Report]) -> None:
        self._context, self._report_of = context, report_of
        self._warned_of = set[Call]()

    def steps(
        self, call: Call, ranks: Sequence[int], until: Progress, says: str, warn_after_s: float | None
    ) -> Iterator[float]:
        """Do what is due in a wait for ``ranks`` to get as far as ``until``; after how many seconds more is.

        The first step is due after `SAY_WHAT_FOR_AFTER_S`. It tells the other ranks, unless ``says``, with which that
        begins, is empty. Then this rank warns, once for each place of the script.
        """
        me, warn_after_s, connection = self._context.rank, warn_after_s or WARN_AFTER_S, self._context.connection
        if says:
            connection.write(waiting_key(me), waits_for(self._context, ranks, until, f"{says} {call}"))
        if call in self._warned_of:
            yield math.inf
        yield warn_after_s
        self._warned_of.add(call)
        question = f"{me} {until}"
        connection.set(ASKED_KEY, question)
        yield warn_after_s + ANSWER_WITHIN_S
        missing = [rank for rank in ranks if self._report_of(rank).progress < until]
        where = [f"Rank {rank} {self._where(rank, question)}." for rank in missing[:RANKS_NAMED]]
        if missing:
            logger.warning(
                "Rank %d has waited %.0f s in %s for rank %s. %s%s",
                *(me, warn_after_s, call, ", ".join(map(str, missing)), " ".join(where)),
                " ..." if len(missing) > RANKS_NAMED else "",
            )
        yield math.inf

    def _where(self, rank: int, question: str) -> str:
        """Where another rank stands: as it answers, or else as far as it has told."""
        answer = self._context.connection.read(where_key(rank), Where)
        return f"is {answer.where}" if answer and answer.question == question else self._report_of(rank).describe()
