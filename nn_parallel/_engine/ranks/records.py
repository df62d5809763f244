"""The records about calls and blocks that ranks write into the store, so that other ranks read them.

The docstring of `store` lists the keys of these records.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import ExecutorClosedError, LaunchError, ParallelError, RankTimeoutError, TransferError, WorkerDiedError
from ..failures import Failure, qualified_name, rank_names
from ..stack_dump import by_place
from ..tracebacks import PACKAGE_FOLDER
from .store import decode

RANKS_NAMED = 8  # a message describes at most this number of ranks one by one

# The phases of a call on a rank. Each call begins with WAITING. FINISHED means that the rank has run the function of
# the call, or has failed in it. ARRIVED means that the rank is at a barrier. HAS_LEFT means that the rank makes no more
# calls in this generation (all calls and barriers between two failed blocks), because it has left the world or its task
# in a pool has ended.
WAITING, FINISHED, ARRIVED, HAS_LEFT = range(4)


class Call(NamedTuple):
    """A call that all ranks make. ``function`` and ``ranks`` must be the same on all ranks; ``site`` may differ."""

    function: str  # the name of the function, or of the block or barrier, for messages
    ranks: tuple[int, ...]  # the ranks that run the function; all ranks for a barrier
    site: str  # the line of user code that makes the call, as ``file:line``

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"

    @property
    def what(self) -> str:
        return f"{self.function} on {rank_names(self.ranks)}"


class Position(NamedTuple):
    """The progress of a rank: the number of calls that the rank has made, and its phase in the last call.

    Positions can be compared: ``a >= b`` means that ``a`` is at least as far as ``b``.
    """

    generation: int  # the number of the generation, which consists of all calls and barriers between two failed blocks
    call: int  # the number of the call in its generation, from 1; 0 before the first call
    phase: int  # WAITING, FINISHED, ARRIVED or HAS_LEFT


class CallMade(NamedTuple):
    """A call that a rank has made, once or several times in succession.

    For instance, if a `CallMade` has the number 3 and the next `CallMade` has the number 7, the rank made the call of
    the first record four times, as its calls 3 to 6.
    """

    number: int  # the number under which the rank made the call first
    what: str  # `Call.what` of the call
    site: str  # `Call.site` of the call


class RankStatus(NamedTuple):
    """The status of a rank, as the rank publishes it in the store."""

    position: Position
    failed_calls: int  # the number of calls that have failed on this rank, in all generations
    last: CallMade | None = None  # the call that the rank has made last; None if it has made no call
    earlier: str = "[]"  # the calls before ``last``, still encoded because most readers do not need them

    def made_as(self, number: int) -> CallMade | None:
        """Return the `CallMade` of the rank's call with this ``number``; None if the status no longer lists the call.

        A `CallMade` also represents the direct repetitions of its call. For instance, if the rank's records have the
        numbers 3 and 7, the calls 3 to 6 belong to the first record.
        """
        if self.last is None or self.last.number <= number:
            return self.last
        earlier = decode(tuple[CallMade, ...], "status", self.earlier)
        return next((call for call in reversed(earlier) if call.number <= number), None)

    def describe(self) -> str:
        """Return the position of the rank in words, for messages."""
        if self.last is None:
            return "has made no call of this package"
        return f"was last in {self.last.what} at {self.last.site}"


NO_STATUS = RankStatus(Position(-1, -1, WAITING), 0)  # the status of a rank that has not published a status


class FailedCall(NamedTuple):
    """A call that has failed on a rank."""

    generation: int
    number: int  # the number of the call in this generation
    function: str  # `Call.function` of the call
    failures: dict[int, Failure]  # maps each failed rank to its failure


class FailedCalls(NamedTuple):
    """The last calls that have failed on a rank."""

    total: int  # the number of all calls that have failed, including those that are no longer in ``kept``
    kept: tuple[FailedCall, ...]  # the last failed calls, the oldest first


NONE_FAILED = FailedCalls(0, ())


class GenerationEnd(NamedTuple):
    """The end of a generation. The first rank that leaves a block or a barrier early writes this record."""

    barriers: int  # how many barriers all ranks had reached when the generation ended
    failures: dict[int, Failure]  # maps each failed rank to its failure, the cause first
    # Whether ranks were at different barriers at the same time. If true, the process group is closed in any case,
    # because some ranks may have passed a barrier that others have not reached.
    is_mixed: bool = False

    def fails(self, begin: float, end: float, is_outermost: bool) -> bool:
        """Return whether the end of the generation makes a block fail.

        The result is the same on all ranks. The block that fails is the innermost block that all ranks have begun, but
        not all ranks have ended. Therefore a rank calls this method for its innermost block first, and then for the
        blocks around it.

        For instance, an outer block begins at barrier 1 and ends at barrier 4. A block inside it begins at barrier 2
        and ends at barrier 3. The number of barriers that all ranks have reached (``barriers``) decides:

        - 0: the outer block fails. Not all ranks have begun this block, but there is no other block that could fail.
        - 1 or 3: the outer block fails.
        - 2: the inner block fails.
        - 4: no block fails, because all ranks have reached the end of the outer block.

        Args:
            begin: the number of the barrier at which the block begins; infinite if this rank has not reached it.
            end: the number of the barrier at which the block ends; infinite if this rank has not reached it.
            is_outermost: true if there is no block around this block.
        """
        return self.barriers < end and (begin <= self.barriers or is_outermost)


class Waits(NamedTuple):
    """A record that a rank publishes while it waits in a call of this package until other ranks reach a position."""

    where: str  # the call in which the rank waits, in words such as "waits in save() on rank 0 at train.py:12"
    ranks: tuple[int, ...]  # the ranks for which the rank waits
    until: Position  # the position that all these ranks have to reach


class Whereabouts(NamedTuple):
    """The code that a rank executes, and its wait for other ranks. The watchdog of the rank publishes this record."""

    # The line of code in words, such as "is in all_reduce() at train.py:12"; ``waits.where`` if ``waits`` is not None.
    where: str
    stack: str  # the stack of the main thread, only the user's code
    entered: dict[str, int]  # an upper limit for the number of collectives that the rank has entered, by process group
    waits: Waits | None  # None if the rank does not wait in a call of this package; it may wait in a collective

    def waits_for(self, rank: int) -> bool:
        return self.waits is not None and rank in self.waits.ranks


def timeout_error(what: str, silent: Sequence[int], whereabouts: Mapping[int, Whereabouts | None]) -> RankTimeoutError:
    """Return the error that ranks raise because the ``silent`` ranks have not come in time.

    Args:
        what: the beginning of the message, which says what has not ended within which time.
        silent: the ranks that the others have waited for.
        whereabouts: maps ranks to their `Whereabouts`, or to None if they have published none.
    """
    known = {rank: published for rank, published in sorted(whereabouts.items()) if published is not None}
    places = by_place({f"rank {rank}": published.where.removeprefix("is ") for rank, published in known.items()})
    stacks = {rank: known[rank].stack if rank in known else "" for rank in silent}
    named = [f"Rank {rank}:\n{stacks[rank].rstrip()}" for rank in silent[:RANKS_NAMED] if stacks[rank]]
    text = "\n\n".join([f"{what}. Where the ranks stand:\n{places}", *named])
    return RankTimeoutError(text, ranks=silent, stacks=stacks)


def call_name(fn: Callable[..., Any]) -> str:
    """Return the name of a call of ``fn``, for errors. The name is the same on all ranks, which compare their calls."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{name}()"


def call_site() -> str:
    """Return the line of user code that has called this package, as ``file:line``."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FILES):
        frame = frame.f_back
    return site_of(frame)


def site_of(frame: FrameType) -> str:
    """Return the line that ``frame`` executes, as ``file:line``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# Frames of contextlib are skipped too, because they lie between a ``with`` statement in user code and this package.
_SKIPPED_FILES = PACKAGE_FOLDER, contextlib.__file__


def rebuilt(failures: Mapping[int, Failure]) -> dict[int, Exception]:
    """Return a dict from each failed rank to its exception, rebuilt from the plain data in ``failures``."""
    errors = {rank: failure.rebuild(known_exceptions()) for rank, failure in failures.items()}
    for rank, error in errors.items():
        if isinstance(error, WorkerDiedError):
            error.rank = rank
    return errors


@functools.cache
def known_exceptions() -> dict[str, type[Exception]]:
    """Return the exception types that may be rebuilt from records in the store, by their full names.

    These are the builtin exceptions, and some exceptions of torch and of this package.
    """
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    kinds += [dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError]
    kinds += [torch.OutOfMemoryError, torch.linalg.LinAlgError]
    kinds += [ParallelError, ExecutorClosedError, LaunchError, RankTimeoutError, TransferError, WorkerDiedError]
    return {qualified_name(kind): kind for kind in kinds if not issubclass(kind, ExceptionGroup)}
