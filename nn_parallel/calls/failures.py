"""What this rank knows of failures on the others: of calls, and of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import Failure, ParallelError
from ..launch.context import RankContext
from ..launch.store import Connection, decode, encode, ended_key, failures_key
from .records import FINISHED, FailedBlock, FailedCall, FailedCalls, Progress, Report

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
        self._not_awaited.clear()
        self._late = list(late)

    def do_not_await(self, rank: int, number: int) -> None:
        """This rank goes on without waiting for the end of a call on ``rank``: a later call looks for its failure."""
        self._not_awaited[rank] = number

    def take_late(self, number: int, report_of: Callable[[int], Report]) -> list[FailedCall]:
        """What ranks report of such calls, up to call ``number``, the first ones first; each failure once."""
        for rank, last in list(self._not_awaited.items()):
            report = report_of(rank)
            self._take(rank, report, number)
            if last <= number and report.progress >= Progress(self._context.generation, last, FINISHED):
                del self._not_awaited[rank]
        late, self._late = self._late, []
        return late

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


class BlockFailures:
    """The failures of blocks. Every generation ends with one: whichever rank writes it first decides it for all."""

    def __init__(self, context: RankContext, connection: Connection) -> None:
        self._context, self._connection = context, connection

    def end_of(self, generation: int) -> FailedBlock | None:
        return self._connection.read(ended_key(generation), FailedBlock)

    def of(self, number: int) -> FailedBlock | None:
        """The failure since this generation began that ends block ``number``: of that block, or of one around it.

        A block that began later (its number is smaller) is none that this rank is in; the rank goes through that
        failure when it enters that block.
        """
        generation = self._context.generation
        while (failed := self.end_of(generation)) is not None and failed.number < number:
            generation += 1
        return failed

    def add(self, mine: FailedBlock) -> tuple[int, FailedBlock]:
        """Have a generation end with this failure, or add it to the one that ends the block already: which one, how."""
        generation, expected, proposed = self._context.generation, "", mine
        while True:
            key = ended_key(generation)
            text = self._connection.swap(key, expected, encode(proposed))
            failed = decode(FailedBlock, key, text)
            if failed.number < mine.number:
                generation += 1
            elif mine.failures.keys() <= failed.failures.keys():
                return generation, failed
            else:
                expected, proposed = text, failed._replace(failures=failed.failures | mine.failures | failed.failures)
