"""Blocks that all ranks go through together: a failure on one rank ends the block on all.

A *block* holds any number of calls and of blocks, and every rank enters it. Blocks are numbered -1, -2, ... as they are
entered, so what is inside a block or comes after it has a smaller number. Whether a block passes or fails is decided
once for all, by the first rank that writes it into the store, whether that rank leaves the block or fails in it. When
it fails, all ranks leave it, close their group and begin a new *generation*: calls, of which the end of a block is one,
are counted from one again, and blocks from the number of the failed one. So they go through the same failures in the
same order, however far behind one is.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterator

from ...errors import ParallelError
from ..failures import rank_error
from ..interrupts import DeferredSignals, Interrupted
from .calls import Calls, Wait, exceptions_in, failures_in
from .context import RankContext, rank_context
from .records import WAITING, BlockOutcome, Call, call_site, rebuilt
from .store import LEFT_KEY, ended_key
from .watchdog import Block, cause_of, is_consequence

UNINTERRUPTED = True  # see interrupts
WARN_OF_MISSING_AFTER_S = 3.0
TIMEOUT_MARGIN_S = 0.5  # for the silent rank to tell where it stands, before those that wait say that it is silent
SEEK_CAUSE_S, SEEK_EVERY_S = 0.5, 0.002
LINGER_S = 30.0


class Blocks(Calls):
    """One rank's end of the blocks that all ranks run, and of the calls in them."""

    def __init__(self, context: RankContext) -> None:
        self._blocks_entered = 0  # in this generation
        self._earlier: list[int] = []  # generations of which there may still be a key in the store
        super().__init__(context)

    def begin_generation(self, generation: int, blocks_entered: int = 0) -> None:
        if self._blocks_entered:
            self._earlier.append(self.generation)
        super().begin_generation(generation)
        self._blocks_entered = blocks_entered
        self.stop_calls = 0  # how often this rank has called `stop_requested`

    @contextlib.contextmanager
    def block(
        self,
        call: Call,
        timeout_s: float | None = None,
        *,
        from_end: bool = False,
        begins_together: bool = False,
    ) -> Iterator[None]:
        """A block that all ranks enter, the calls in it included, and leave together; a failure is raised on all.

        ``call`` is what errors name it by. A failure frees the others from what they sit in, closes the process group
        and begins a new generation. With ``begins_together`` a rank runs it once all have come, and soon warns of those
        that do not.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
            RankTimeoutError: on every rank, when one took longer than ``timeout_s``: from when it entered, or with
                ``from_end`` from when the first rank was through. Or one did not come to a block that
                ``begins_together``, within the timeout of the process group.
        """
        self.raise_if_nested(call)
        self._raise_if_block_failed()
        self._blocks_entered += 1
        number = -self._blocks_entered
        began, left_value = None if from_end else time.monotonic(), f"{self.generation} {number}"
        block, watchdog = Block(call, number, timeout_s, began, left_value), self.watch()
        with watchdog.entered(block):
            try:
                if begins_together:
                    self._begin(call)
                    come_by = time.monotonic() + self.context.timeout.total_seconds()
                    self._barrier(Wait(call, come_by, "waits in", WARN_OF_MISSING_AFTER_S))
                with watchdog.watching(block):
                    yield
                self._leave_together(block)
            except BaseException as error:
                # The frames that hand ``error`` to this one keep it, and since Python 3.12 this frame keeps them.
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                with DeferredSignals():  # Ctrl-C leaves no generation half ended
                    failed = self._fail(block, cause_of(error, block.reason))
                try:
                    if failed is error:
                        raise
                    if failed is not None:
                        raise failed from None
                finally:
                    del failed  # it would live in a cycle with its traceback, and all that the frames there hold

    def _leave_together(self, block: Block) -> None:
        if (failure := self.context.group.error()) is not None:
            raise failure
        if block.timeout_s is not None:
            self.connection.set(LEFT_KEY, block.left_value)
        self._begin(block.call)
        began = block.began or time.monotonic()
        leave_by = None if block.timeout_s is None else began + block.timeout_s + TIMEOUT_MARGIN_S
        self._barrier(Wait(block.call, leave_by, "has left"))
        ended = self._block_outcomes.leave(block.number)
        is_this_or_around = ended.number >= block.number
        if is_this_or_around and not ended.has_passed:
            block.must_leave = True
            raise Interrupted
        if not ended.has_passed and ended.calls < self._number:  # else it comes after this block, which has passed
            never = ParallelError(
                f"Rank {self.rank} is at the end of {block.call}, and never entered a block inside that failed."
            )
            raise rank_error(block.call.function, self.world_size, rebuilt(ended.failures) | {self.rank: never})
        while self._earlier:  # every rank is through them
            earlier = self._earlier.pop()
            if self.rank == 0:
                self.connection.delete(ended_key(earlier))

    def _fail(self, block: Block, error: BaseException) -> BaseException | None:
        """Fail the innermost block with ``error``, and go on in a new generation. What to raise:

        The error of all ranks that failed. `Interrupted`, if a block around this one has failed. ``error`` itself, if
        it has its own way out: a SystemExit, a KeyboardInterrupt, or what interrupts the code around the block. None,
        if the block has passed: ``error`` came up as this rank waited to leave it.
        """
        is_failure = isinstance(error, Exception) or (isinstance(error, Interrupted) and block.must_leave)
        has_passed = False
        try:
            failures = self._failures_of(block, error)
            described = self._described(failures)
            mine = BlockOutcome(block.number, self._number, block.call.function, described)
            generation, ended = self._block_outcomes.fail(mine)
            if has_passed := ended.has_passed:
                return None if is_failure else error
            around = [each for each in self._entered_blocks[:-1] if each.number <= ended.number]
            for each in around:
                each.must_leave = True
            if around:
                failed: BaseException = Interrupted()  # which user code does not catch in there, to go on
            else:
                own = exceptions_in(failures)
                known = {rank: own[rank] for rank in own if ended.failures[rank] == described[rank]}
                failed = self._error(block.call, rebuilt(ended.failures) | known)
                self._go_on_after(generation, ended)
        finally:
            if not has_passed:
                self.context.group.close()
        return failed if is_failure else error

    def _go_on_after(self, generation: int, failed: BlockOutcome) -> None:
        """Begin the generation that follows ``generation``, which a block has ended."""
        self._earlier += range(self.generation + 1, generation + 1)
        self.begin_generation(generation + 1, blocks_entered=-failed.number)
        self._post(WAITING)

    def _failures_of(self, block: Block, error: BaseException) -> dict[int, BaseException]:
        """What this rank has to tell of; nothing if it only follows from the failure that others know already."""
        if is_consequence(error) and (block.must_leave or not isinstance(error, Interrupted)):
            deaths = self._seek_deaths(block)
            if deaths or self._block_outcomes.failure_of(block.number) is not None:
                return deaths
        return failures_in(error, self.rank)

    def _seek_deaths(self, block: Block) -> dict[int, BaseException]:
        """The deaths for which ``block`` has to fail; none if it has failed already, or nothing is found in time."""
        deadline = time.monotonic() + SEEK_CAUSE_S
        while self._block_outcomes.failure_of(block.number) is None and time.monotonic() < deadline:
            if dead := self._liveness.dead(self._others):
                return {rank: self._liveness.death(rank, block.call) for rank in dead}
            time.sleep(SEEK_EVERY_S)
        return {}


def blocks_of(context: RankContext | None) -> Blocks | None:
    """Those of the world that this process is in; None when it is the only rank."""
    global _current
    if context is None or context.world_size == 1:
        return None
    if _current is None or _current.context is not context:
        _current = Blocks(context)
        if context.store_host == context.rank:
            _hosted[:] = [_current]  # who has joined again has heard of the one before
    if _current.generation != context.generation:
        _current.begin_generation(context.generation)
    return _current


def block(
    function: str,
    timeout_s: float | None = None,
    *,
    from_end: bool = False,
    begins_together: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """A block that all ranks run, see `Blocks.block`; plain code where this is the only rank."""
    if (here := blocks_of(rank_context())) is None:
        return contextlib.nullcontext()
    call = Call(function, tuple(range(here.world_size)), call_site())
    return here.block(call, timeout_s, from_end=from_end, begins_together=begins_together)


@atexit.register
def _outlive_readers() -> None:
    """The store ends with the process that holds it: stay while another rank may still have to read an outcome."""
    deadline = time.monotonic() + LINGER_S
    for hosted in _hosted:
        if not hosted.context.is_inherited:
            hosted.outlive_readers(deadline)


_current: Blocks | None = None
_hosted: list[Blocks] = []  # those whose store lives in this process
