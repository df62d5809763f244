"""How calls and blocks ended: of calls each rank tells itself, of blocks the first rank that writes it decides."""

from __future__ import annotations

from ...errors import ParallelError
from ..failures import Failure
from .context import RankContext
from .records import NONE_FAILED, BlockOutcome, FailedCalls, RankStatus
from .store import StoreClient, decode, encode, ended_key, failures_key

FAILURES_KEPT = 64  # of each rank, in the store


class CallFailures:
    """The failures of calls that other ranks run."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._failed: dict[int, FailedCalls] = {}  # by rank, as read last

    def of(self, rank: int, report: RankStatus, number: int) -> dict[int, Failure]:
        """What ``rank`` reports of call ``number`` of this generation.

        Raises:
            ParallelError: it has failed too often since for that to be known.
        """
        failed, this = self._read(rank, report), (self._context.generation, number)
        for each in failed.kept:
            if (each.generation, each.number) == this:
                return each.failures
        if failed.made > len(failed.kept) and this < (failed.kept[0].generation, failed.kept[0].number):
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {number}: whether that one failed "
                "is no longer known here."
            )
        return {}

    def _read(self, rank: int, report: RankStatus) -> FailedCalls:
        """The last failures of ``rank``, from the store if it reports more than are known here."""
        failed = self._failed.get(rank, NONE_FAILED)
        if report.failures > failed.made:
            failed = self._context.connection.read(failures_key(rank), FailedCalls) or failed
            self._failed[rank] = failed
        return failed


class BlockOutcomes:
    """How blocks ended: each has passed or failed, and whichever rank writes that first decides it for all.

    There is one key for each generation. It holds the last block that has passed, until one fails, which ends the
    generation.
    """

    def __init__(self, context: RankContext, connection: StoreClient) -> None:
        self._context, self._connection = context, connection

    def failure_of(self, number: int) -> BlockOutcome | None:
        """The failure that ends block ``number``, in which this rank is: of that block, or of one around it.

        A failed block with a smaller number is inside this one or comes after it: this rank goes through that failure
        when it gets there. Others may be generations ahead by then, so the search goes on in the next one.
        """
        generation = self._context.generation
        while (outcome := self._connection.read(ended_key(generation), BlockOutcome)) is not None:
            if outcome.has_passed:
                return None
            if outcome.number >= number:
                return outcome
            generation += 1
        return None

    def leave(self, number: int) -> BlockOutcome:
        """Have block ``number`` pass, unless it has failed, or another one has in this generation: what is written."""
        return self._write(self._context.generation, BlockOutcome(number, 0, "", {}))

    def fail(self, mine: BlockOutcome) -> tuple[int, BlockOutcome]:
        """Have a block fail, or add to the failure that ends it already: in which generation, and how it has ended.

        It may have passed, too.
        """
        generation = self._context.generation
        while not (outcome := self._write(generation, mine)).has_passed and outcome.number < mine.number:
            generation += 1
        while not (outcome.has_passed or mine.failures.keys() <= outcome.failures.keys()):
            both = outcome.failures | mine.failures | outcome.failures  # in the order and the words that came first
            key, added = ended_key(generation), outcome._replace(failures=both)
            outcome = decode(BlockOutcome, key, self._connection.swap(key, encode(outcome), encode(added)))
        return generation, outcome

    def _write(self, generation: int, mine: BlockOutcome) -> BlockOutcome:
        """Write ``mine`` if that is still open; what is written."""
        key, expected = ended_key(generation), ""
        while True:
            text = self._connection.swap(key, expected, encode(mine))
            outcome = decode(BlockOutcome, key, text)
            if not outcome.has_passed or outcome.number == mine.number:
                return outcome
            expected = text  # an earlier block has passed
