"""How calls and blocks ended on other ranks, as this rank knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import Failure, ParallelError
from ..launch.context import RankContext
from ..launch.store import Connection, decode, encode, ended_key, failures_key
from .records import FINISHED, BlockOutcome, FailedCall, FailedCalls, Progress, Report

FAILURES_KEPT = 64  # of each rank, in the store


class CallFailures:
    """The failures of calls that other ranks have reported, each until this rank has raised it."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._reported: dict[int, list[FailedCall]] = {rank: [] for rank in range(context.world_size)}
        self._seen = dict.fromkeys(self._reported, 0)
        self._forgotten = dict.fromkeys(self._reported, (0, 0))  # generation and call: what failed before is unknown
        self._not_awaited: dict[int, int] = {}  # by rank, the last call for whose end this rank did not wait
        self._late: list[FailedCall] = []  # failures of such calls

    def begin_generation(self, late: Sequence[FailedCall] = ()) -> None:
        """Forget all but ``late``."""
        self._not_awaited, self._late = {}, list(late)

    def do_not_await(self, rank: int, number: int) -> None:
        """This rank goes on without waiting for the end of a call on ``rank``: a later call looks for its failure."""
        self._not_awaited[rank] = number

    def late(self, number: int, report_of: Callable[[int], Report]) -> list[FailedCall]:
        """The failures of such calls that ranks report, up to call ``number``; who raises one removes it."""
        for rank, last in list(self._not_awaited.items()):
            report = report_of(rank)
            self._take(rank, report, number)
            if last <= number and report.progress >= Progress(self._context.generation, last, FINISHED):
                del self._not_awaited[rank]
        return self._late

    def of(self, rank: int, report: Report, number: int) -> dict[int, Failure]:
        """What ``rank`` reports of call ``number`` of this generation.

        Raises:
            ParallelError: it has failed too often since for that to be known.
        """
        failed = [each for each in self._take(rank, report, number) if each.number == number]
        if not failed and (self._context.generation, number) < self._forgotten[rank]:
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {number}: whether that one failed "
                "is no longer known here."
            )
        return failed[0].failures if failed else {}

    def _take(self, rank: int, report: Report, number: int) -> list[FailedCall]:
        """What ``rank`` reports up to call ``number`` of this generation, each failure once."""
        if report.failures > self._seen[rank]:
            self._read(rank)
        generation, reported = self._context.generation, self._reported[rank]
        due = [each for each in reported if each.generation == generation and each.number <= number]
        self._reported[rank] = [each for each in reported if each.generation >= generation and each not in due]
        self._late += [each for each in due if not each.wait]
        return due

    def _read(self, rank: int) -> None:
        failed = self._context.connection.read(failures_key(rank), FailedCalls) or FailedCalls(0, ())
        unseen = failed.made - self._seen[rank]
        if unseen > len(failed.kept) > 0:
            self._forgotten[rank] = failed.kept[0].generation, failed.kept[0].number
        self._reported[rank] += failed.kept[max(0, len(failed.kept) - unseen) :]
        self._seen[rank] = failed.made


class BlockOutcomes:
    """How blocks ended: each has passed or failed, and whichever rank writes that first decides it for all.

    There is one key for each generation. It holds the last block that has passed, until one fails, which ends the
    generation.
    """

    def __init__(self, context: RankContext, connection: Connection) -> None:
        self._context, self._connection = context, connection

    def failure_of(self, number: int) -> BlockOutcome | None:
        """The failure that ends block ``number``, in which this rank is: of that block, or of one around it.

        Blocks inside it, and those that come after it, have smaller numbers. If one of these has failed, this rank has
        not come to it yet: it will go through that failure there. Until then it may be that several generations have
        ended so.
        """
        generation = self._context.generation
        while (outcome := self._connection.read(ended_key(generation), BlockOutcome)) is not None:
            if not outcome.failures:
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
        while (outcome := self._write(generation, mine)).failures and outcome.number < mine.number:
            generation += 1
        while outcome.failures and not mine.failures.keys() <= outcome.failures.keys():
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
            if outcome.failures or outcome.number == mine.number:
                return outcome
            expected = text  # an earlier block has passed
