"""Blocks that all ranks go through together: a failure on one rank ends the block on all.

A *block* holds any number of calls and of blocks. All ranks begin it together and end it together, at *barriers*. They
go through the same barriers in the same order, so one counter serves for all: to arrive is to add 1, and the b-th
barrier is complete once ``b * world_size`` have arrived.

A rank that has to leave early, by its own exception, a timeout or a death that it sees, *ends the generation*: it adds
`END_MARK` to the counter. From then on nobody passes a barrier by the counter alone. Then it writes a `GenerationEnd`:
how many barriers were complete, and what failed. The first rank to write one decides for all; if a rank dies in
between, another one that sees the death does the same. Which block has failed follows from that number, alike on all
ranks: the innermost one that was open. There all ranks raise what the record says, and begin the next generation, in
which calls and barriers are counted from one again.

If a generation ends while a rank is in the body of a block, this block has failed, and the watchdog frees the rank. If
the rank is at a barrier, the number tells whether all had come.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections.abc import Callable, Iterator

from ...errors import ParallelError
from ..failures import Failure
from ..interrupts import DeferredSignals, Interrupted
from ..polling import looks
from . import times
from .calls import Calls, Wait, deadline_of, exceptions_in, failures_in
from .context import RankContext, rank_context
from .records import ARRIVED, HAS_LEFT, WAITING, Call, GenerationEnd, rebuilt
from .store import arrived_key, decode, encode, ended_key
from .watchdog import BlockState, cause_of, is_consequence

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
END_MARK = 1 << 40  # more than can arrive in a generation


class Blocks(Calls):
    """One rank's end of the blocks that all ranks run, and of the calls in them."""

    def __init__(self, context: RankContext) -> None:
        self._barriers = 0  # that this rank has come to in this generation
        self._earlier: list[int] = []  # generations of which there may still be a key in the store
        super().__init__(context)
        self._neighbor = (self.rank - 1) % self.world_size

    def begin_generation(self, generation: int) -> None:
        if self._barriers or self._entered_blocks:
            self._earlier.append(self.generation)
        super().begin_generation(generation)
        self._barriers = 0
        for block in self._entered_blocks:
            block.begin = 0
        self.stop_calls = 0  # how often this rank has called `stop_requested`

    def barrier(self, call: Call, timeout_s: float | None = None, refusal: Exception | None = None) -> None:
        """Return once every rank is here. A ``refusal`` of this rank is raised on all instead.

        Raises:
            RankError: on every rank, when one did not wait until all had come, or a process ended before.
            RankTimeoutError: on every rank, when one has waited for longer than its ``timeout_s``.
            ParallelError: the ranks are not in the same call; the message names both.
        """
        with self._barrier(call, timeout_s) as meet:
            if refusal is not None:
                raise refusal
            meet()

    def call_and_barrier(self, call: Call, timeout_s: float | None) -> contextlib.AbstractContextManager[bool]:
        """A `call` of one rank, after which all ranks wait for each other, also if it has failed."""
        return self.call(call, timeout_s, self._barrier(call, timeout_s))

    @contextlib.contextmanager
    def _barrier(self, call: Call, timeout_s: float | None) -> Iterator[Callable[[], None]]:
        """A barrier, at which each rank arrives by calling what this yields; whoever leaves before, leaves it."""
        self._raise_if_must_leave()
        self._barriers += 1
        barrier = BlockState(call, self._innermost_block, end=self._barriers)

        def meet() -> None:
            self._begin(call)
            says = "" if timeout_s else "waits in"
            self._meet(barrier, Wait(call, self._others, ARRIVED, deadline_of(timeout_s), says))
            barrier.has_passed = True

        with self._on_all_ranks(barrier):
            yield meet

    @contextlib.contextmanager
    def block(self, call: Call, timeout_s: float | None = None, *, from_end: bool = False) -> Iterator[None]:
        """A block that all ranks begin and end together, the calls in it included; a failure is raised on all.

        ``call`` is what errors name it by. A failure frees the others from what they sit in, closes the process group
        and begins a new generation.

        Raises:
            RankError: on every rank, when the block raised on one, or a process ended before its end.
            RankTimeoutError: on every rank, when one took longer than ``timeout_s``: from its beginning, or with
                ``from_end`` from when the first rank was through. Or one did not come within ``timeout_s``, or within
                the timeout of the process group.
        """
        self.raise_if_nested(call)
        self._raise_if_must_leave()
        block, watchdog = BlockState(call, self._innermost_block, timeout_s), self.watch()
        with watchdog.entered(block), self._on_all_ranks(block):
            self._barriers += 1
            block.begin = self._barriers
            self._begin(call)
            come_by = min(deadline_of(timeout_s), deadline_of(self.context.timeout.total_seconds()))
            self._meet(block, Wait(call, self._others, ARRIVED, come_by, "waits in"))
            block.deadline = math.inf if from_end else deadline_of(timeout_s)
            with watchdog.watching(block):
                yield
            self._end_block(block)

    @property
    def _innermost_block(self) -> BlockState | None:
        return self._entered_blocks[-1] if self._entered_blocks else None

    def _end_block(self, block: BlockState) -> None:
        """Wait at the end of ``block`` for the others."""
        if (failure := self.context.group.error()) is not None:
            raise failure
        end = block.call._replace(function=f"the end of {block.call.function}")
        self._begin(end)
        self._barriers += 1
        block.end = self._barriers
        block.deadline = min(block.deadline, deadline_of(block.timeout_s))
        self._meet(block, Wait(end, self._others, ARRIVED, block.first_due().deadline, "waits at"))

    def _meet(self, block: BlockState, wait: Wait) -> None:
        """Return once every rank has arrived at the present barrier, of ``block``; raise if one never will."""
        self._post(ARRIVED)
        key, all_arrived = arrived_key(self.generation), self._barriers * self.world_size
        has_arrived = False

        def is_complete(waited: float) -> bool:
            nonlocal has_arrived
            has_left = waited > times.LOOK_UP_PEER_AFTER_S and self._check_neighbor(wait.call)  # before the counter
            arrived = self.connection.add(key, 0 if has_arrived else 1)
            has_arrived = True
            if arrived >= END_MARK:
                end = self.connection.read(ended_key(self.generation), GenerationEnd)
                if end is not None and end.barriers < self._barriers:
                    block.must_leave = True
                    raise Interrupted
                return end is not None
            if arrived >= all_arrived:
                self._check_neighbor(wait.call)
                return True
            if has_left:
                raise self._left_error(self._neighbor, wait.call)
            return False

        self._poll(wait, is_complete)
        while self._earlier:  # every rank is through them
            earlier = self._earlier.pop()
            if self.rank == 0:
                self.connection.delete(ended_key(earlier))
                self.connection.delete(arrived_key(earlier))

    def _check_neighbor(self, call: Call) -> bool:
        """Raise if the rank before this one is at another barrier; return whether it has left the others.

        Where ranks are at different barriers, some rank at each of them has such a neighbor; others may come through.
        """
        report = self._report_of(self._neighbor)
        if report.progress.generation == self.generation:
            try:
                self._check_same_call(self._neighbor, report, call)
            except ParallelError:
                self._barriers -= 1  # whoever has arrived, it was not at this barrier
                raise
        return report.progress.phase == HAS_LEFT

    @contextlib.contextmanager
    def _on_all_ranks(self, block: BlockState) -> Iterator[None]:
        """Have what is raised in here end the generation: all ranks raise it, each out of the block that has failed."""
        try:
            yield
        except BaseException as error:
            if block.has_passed:
                raise
            if block.around is not None:  # it may have failed just before this one began
                block.must_leave = block.must_leave or block.around.must_leave
                block.reason = block.reason or block.around.reason
            # The frames that hand ``error`` to this one keep it, and since Python 3.12 this frame keeps them.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            with DeferredSignals():  # Ctrl-C leaves no generation half ended
                raised = self._fail(block, cause_of(error, block.reason))
            try:
                if not (isinstance(error, Exception) or (isinstance(error, Interrupted) and block.must_leave)):
                    raise  # it has its own way out: a SystemExit, a KeyboardInterrupt, the end of a task
                if raised is not None:
                    raise raised from None
            finally:
                del raised  # it would live in a cycle with its traceback, and all that the frames there hold

    def _fail(self, block: BlockState, error: BaseException) -> BaseException | None:
        """End the generation with ``error``, which has come up in ``block``: what to raise there.

        - If this block fails, what all ranks raise.
        - If the block around it does, `Interrupted`, which comes out there.
        - If neither does, nothing: all ranks had come to the end in the same instant. Their next barrier raises it.
        """
        failures = self._failures_of(block, error)
        described = self._described(failures)
        closes_group = True  # also if the store is gone
        try:
            end = self._end_generation(described)
            fails = end.fails(block.begin, block.end, is_outermost=block.around is None)
            closes_group = fails and block.begin <= end.barriers
            if not fails:
                if block.around is None:
                    return None
                block.around.must_leave = True
                return Interrupted()  # which user code does not catch on the way there, to go on
            own = exceptions_in(failures)
            known = {rank: own[rank] for rank in own if end.failures[rank] == described[rank]}
            self.begin_generation(self.generation + 1)
            self._post(WAITING)
            return self._error(block.call, rebuilt(end.failures) | known)
        finally:
            if closes_group:
                self.context.group.close()

    def _end_generation(self, failures: dict[int, Failure]) -> GenerationEnd:
        """End the generation, if nobody has: how it has ended, with these ``failures`` among the others.

        The cause, which comes first, is the same on all ranks; which others a rank sees depends on when it looks.
        """
        key = ended_key(self.generation)
        text = self.connection.get(key)
        if text is None:
            arrived = self.connection.add(arrived_key(self.generation), END_MARK) % END_MARK
            barriers = min(arrived // self.world_size, self._barriers)
            text = self.connection.swap(key, "", encode(GenerationEnd(barriers, failures)))
        while True:
            end = decode(GenerationEnd, key, text)
            added = {rank: failure for rank, failure in failures.items() if rank not in end.failures}
            if not added:
                return end
            text = self.connection.swap(key, text, encode(end._replace(failures=end.failures | added)))

    def _failures_of(self, block: BlockState, error: BaseException) -> dict[int, BaseException]:
        """What this rank has to tell of; nothing if it only follows from the failure that others know already."""
        if is_consequence(error) and (block.must_leave or not isinstance(error, Interrupted)):
            deaths = self._seek_deaths(block)
            if deaths or self._has_generation_ended():
                return deaths
        return failures_in(error, self.rank)

    def _seek_deaths(self, block: BlockState) -> dict[int, BaseException]:
        """The deaths that end the generation; none if it has ended already, or nothing is found in time."""
        for waited in looks(*times.POLL):
            if self._has_generation_ended() or waited > times.CAUSE_WITHIN_S:
                break
            if dead := self._liveness.dead(self._others):
                return {rank: self._liveness.death(rank, block.call) for rank in dead}
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
    function: str, timeout_s: float | None = None, *, from_end: bool = False
) -> contextlib.AbstractContextManager[None]:
    """A block that all ranks run, see `Blocks.block`; plain code where this is the only rank."""
    if (here := blocks_of(rank_context())) is None:
        return contextlib.nullcontext()
    return here.block(here.call_of_all(function), timeout_s, from_end=from_end)


@atexit.register
def _outlive_readers() -> None:
    """The store ends with the process that holds it: stay while another rank may still have to read an outcome."""
    deadline = time.monotonic() + times.LINGER_S
    for hosted in _hosted:
        if not hosted.context.is_inherited:
            hosted.outlive_readers(deadline)


_current: Blocks | None = None
_hosted: list[Blocks] = []  # those whose store lives in this process
