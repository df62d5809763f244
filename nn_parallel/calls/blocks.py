"""Blocks of calls that all ranks go through together: a failure on one rank ends the block on all.

A *block* holds any number of sections and of blocks, and is run by all ranks. Blocks are numbered -1, -2, ... as they
are entered. When one fails on one rank, all leave it, close their group and begin a new *generation*, counting their
calls from one again and their blocks from the failed one on. How a generation ends is decided once for all, by the
first rank that writes it into the store: so the ranks go through the same failures in the same order, however far
behind one is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

from ..errors import ParallelError, rank_error
from ..launch.context import RankContext
from ..launch.group import close_group
from ..signals import Interrupted
from .calls import SEEK_CAUSE_S, Sections, exceptions_in
from .peers import LEFT_KEY, ended_key
from .records import WAITING, Call
from .watcher import Watched, follows

UNINTERRUPTED = True  # see interrupt
WARN_OF_MISSING_AFTER_S = 3.0
TIMEOUT_MARGIN_S = 0.5  # for the silent rank to tell where it stands, before those that wait say that it is silent


class Channel(Sections):
    """One rank's end of the outcomes: sections, and blocks of them."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._ended: list[int] = []  # the generations whose end stands in the store

    def begin_generation(self, generation: int) -> None:
        super().begin_generation(generation)
        self._blocks_entered = 0

    @contextlib.contextmanager
    def block(
        self,
        function: str,
        place: str,
        timeout: timedelta | None = None,
        *,
        from_end: bool = False,
        begins_together: bool = False,
    ) -> Iterator[None]:
        """A block that all ranks run, sections in it included, and leave together; a failure on one is raised on all.

        ``function`` and ``place`` are what errors name it by. A failure frees the others from what they sit in, closes
        the process group and begins a new generation. With ``begins_together`` a rank runs it once all have come, and
        soon warns of those that do not.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
            RankTimeoutError: on every rank, when one took longer than ``timeout``: from when it entered, or with
                ``from_end`` from when the first rank was through. Or one did not come in the time that collectives
                have, to a block that ``begins_together``.
        """
        call = Call(function, tuple(range(self.world_size)), place)
        if self.nested_in:
            raise ParallelError(
                f"{call} is a call of all ranks, inside the body of a function of rank "
                f"{', '.join(map(str, self.nested_in))}: the others are not there. Make it outside."
            )
        self._raise_if_doomed()
        self._blocks_entered += 1
        number = -self._blocks_entered
        timeout_s = None if timeout is None else timeout.total_seconds()
        watched = Watched(
            call, number, f"{self.generation} {number}", timeout_s, None if from_end else time.monotonic()
        )
        watcher = self.watch()
        self._blocks.append(watched)
        with watcher.entered(watched):
            try:
                if begins_together:
                    self._begin(call)
                    come_by = time.monotonic() + self.context.timeout.total_seconds()
                    self._barrier(call, come_by, "waits in", WARN_OF_MISSING_AFTER_S)
                with watcher.watching(watched):
                    yield
                if timeout_s is not None:
                    self._peers.tell(LEFT_KEY, watched.left_value)
                self._begin(call)
                began = watched.began or time.monotonic()
                self._barrier(call, None if timeout_s is None else began + timeout_s + TIMEOUT_MARGIN_S, "has left")
                self._raise_if_others_failed_inside(call, number)
            except BaseException as error:
                failed = self._fail_block(watched, watched.cause(error))
                if failed is None:
                    raise
                try:
                    raise failed from None
                finally:
                    del failed  # it would live in a cycle with its traceback, and all that the frames there hold
            finally:
                self._blocks.remove(watched)

    def _fail_block(self, watched: Watched, error: BaseException) -> ParallelError | None:
        """Fail the innermost block, and go on from where all ranks do; what to raise.

        None for a SystemExit, a KeyboardInterrupt or what interrupts the code around it: they have their own way out.
        """
        failed, freed = watched.doom, watched.freed or watched.doom is not None
        try:
            if failed is None:
                failures = self._failures_of_block(watched, error)
                described = self._described(failures)
                ended = self._peers.fail_block(watched.number, self._calls, watched.call.function, described)
                known = {
                    rank: e for rank, e in exceptions_in(failures).items() if ended.failures[rank] == described[rank]
                }
                failed = self._error(watched.call, ended.rebuild() | known)
                for block in self._blocks[:-1]:
                    if block.number <= ended.block:  # user code must not catch this error in there and go on
                        block.doom = failed
                self._ended += range(self.generation, ended.generation + 1)
                self.begin_generation(ended.generation + 1)
                self._blocks_entered = -ended.block
                self._failed_at = (self.generation, 0)
                self._post(WAITING)
        finally:
            close_group(self.context)
            self.context.interrupted = len(self._blocks) > 1 and self._blocks[-2].doom is not None
        return failed if isinstance(error, Exception) or (isinstance(error, Interrupted) and freed) else None

    def _failures_of_block(self, watched: Watched, error: BaseException) -> Mapping[int, BaseException]:
        """What this rank has to tell of; nothing if it only follows from the failure that others know already."""
        if not follows(error) or (isinstance(error, Interrupted) and not watched.freed):
            return self._failures_in(error)
        deaths = self._peers.seek_cause(watched.call, watched.number, SEEK_CAUSE_S)
        if deaths or self._peers.failed_block(watched.number) is not None:
            return deaths
        return self._failures_in(error)

    def _raise_if_others_failed_inside(self, call: Call, number: int) -> None:
        """At the end of a block: another rank has failed in a block inside, which this one never entered."""
        ended = self._peers.ended(self.generation)
        if ended is not None and ended.block >= number:
            self._raise_if_block_failed()
        if ended is not None and ended.call < self._calls:  # or it was here, and has failed in what comes next
            never = ParallelError(
                f"Rank {self.rank} is at the end of {call}, and never entered a block inside that failed."
            )
            raise rank_error(call.function, self.world_size, ended.rebuild() | {self.rank: never})
        while self._ended:
            generation = self._ended.pop()
            if self.rank == 0:  # every rank is through it
                self.store.delete_key(ended_key(generation))
