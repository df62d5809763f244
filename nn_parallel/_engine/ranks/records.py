"""The records by which ranks tell each other of calls and blocks; `store` has their keys."""

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

RANKS_NAMED = 8  # in a text
WAITING, FINISHED, ARRIVED, HAS_LEFT = range(4)  # how far a rank is within a call; ARRIVED: at a barrier


class Call(NamedTuple):
    """A call that all ranks make: ``function`` and ``ranks`` must agree between them, ``site`` need not."""

    function: str
    ranks: tuple[int, ...]  # those that run it
    site: str  # file:line

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"

    @property
    def what(self) -> str:
        return f"{self.function} on {rank_names(self.ranks)}"


class Position(NamedTuple):
    """The position of a rank in its calls; ``a >= b`` means that ``a`` is at least as far."""

    generation: int
    call: int
    phase: int


class CallMade(NamedTuple):
    """That a rank made this call under ``number``, and under the next ones if it tells of no other."""

    number: int
    what: str
    site: str


class RankStatus(NamedTuple):
    """The state of a rank, as it publishes it."""

    position: Position
    failed_calls: int  # how many have failed, in all generations
    last: CallMade | None = None
    earlier: str = "[]"  # the calls before it, as `encode` writes them: not each reader decodes them

    def made_as(self, number: int) -> CallMade | None:
        """Return the call that this rank made under ``number``; None if that is no longer known."""
        if self.last is None or self.last.number <= number:
            return self.last
        earlier = decode(tuple[CallMade, ...], "status", self.earlier)
        return next((call for call in reversed(earlier) if call.number <= number), None)

    def describe(self) -> str:
        """Return the position of the rank, for a person to read."""
        if self.last is None:
            return "has made no call of this package"
        return f"was last in {self.last.what} at {self.last.site}"


NO_STATUS = RankStatus(Position(-1, -1, WAITING), 0)


class FailedCall(NamedTuple):
    """A call that has failed on a rank."""

    generation: int
    number: int
    function: str
    failures: dict[int, Failure]  # by rank


class FailedCalls(NamedTuple):
    """The last calls that have failed on a rank."""

    total: int  # how many have, with those that are not listed any more
    kept: tuple[FailedCall, ...]


NONE_FAILED = FailedCalls(0, ())


class GenerationEnd(NamedTuple):
    """The end of a generation, as the first rank tells it that had to leave a block or a barrier early."""

    barriers: int  # how many barriers all ranks had reached
    failures: dict[int, Failure]  # by rank, the cause first
    is_mixed: bool = False  # ranks were at different barriers, so some may have come through one that others have not

    def fails(self, begin: float, end: float, is_outermost: bool) -> bool:
        """Return whether this fails a block: it does if the block was open. The answer is the same on all ranks.

        For instance a block begins at barrier 1 and ends at 4, and one inside it begins at 2 and ends at 3. If two
        barriers were complete, the inner one fails. If one or three were, the outer one does. If all four were, none
        does: all ranks had come to the end. If none was, the outer one fails, too, as there is no block around it.

        Args:
            begin: the number of the barrier at which the block begins; infinite if this rank has not come there.
            end: the number of the barrier at which it ends, or infinite.
            is_outermost: there is no block around it.
        """
        return self.barriers < end and (begin <= self.barriers or is_outermost)


class Waits(NamedTuple):
    """The wait of a rank in a call of this package: until all of ``ranks`` are as far as ``until``."""

    where: str  # for a person to read
    ranks: tuple[int, ...]
    until: Position


class Whereabouts(NamedTuple):
    """The place of a rank in its program, as its watchdog writes it."""

    where: str  # for a person to read
    stack: str  # of the user's code in the main thread
    entered: dict[str, int]  # by process group, the most collectives that it can have entered
    waits: Waits | None  # else it runs, or is in a collective

    def waits_for(self, rank: int) -> bool:
        return self.waits is not None and rank in self.waits.ranks


def timeout_error(what: str, silent: Sequence[int], whereabouts: Mapping[int, Whereabouts | None]) -> RankTimeoutError:
    """Return the error of all ranks, where those that are ``silent`` have not come within a time.

    Args:
        what: what has not ended, and in what time.
        silent: for whom the others have waited.
        whereabouts: where ranks stand, as far as that is known.
    """
    known = {rank: whereabouts for rank, whereabouts in sorted(whereabouts.items()) if whereabouts is not None}
    places = by_place({f"rank {rank}": whereabouts.where.removeprefix("is ") for rank, whereabouts in known.items()})
    stacks = {rank: known[rank].stack if rank in known else "" for rank in silent}
    named = [f"Rank {rank}:\n{stacks[rank].rstrip()}" for rank in silent[:RANKS_NAMED] if stacks[rank]]
    text = "\n\n".join([f"{what}. Where the ranks stand:\n{places}", *named])
    return RankTimeoutError(text, ranks=silent, stacks=stacks)


def call_name(fn: Callable[..., Any]) -> str:
    """Return the name of a call of ``fn``, in errors and for other ranks: the same on all of them."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    if (getattr(fn, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]:
        name = name.rpartition("<locals>.")[2]  # one of this package has the name of the public function that it is in
    return f"{name}()"


def call_site() -> str:
    """Return the line of the user's code that calls this package, as ``file:line``."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    return site_of(frame)


def site_of(frame: FrameType) -> str:
    """Return the line at which ``frame`` is, as ``file:line``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_NOT_THE_CALLER = PACKAGE_FOLDER, contextlib.__file__


def rebuilt(failures: Mapping[int, Failure]) -> dict[int, Exception]:
    """Return the exceptions that ``failures`` describe."""
    errors = {rank: failure.rebuild(known_exceptions()) for rank, failure in failures.items()}
    for rank, error in errors.items():
        if isinstance(error, WorkerDiedError):
            error.rank = rank
    return errors


@functools.cache
def known_exceptions() -> dict[str, type[Exception]]:
    """Return the exception types that are rebuilt from the store: builtin ones, torch's, and some of this package."""
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    kinds += [dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError]
    kinds += [torch.OutOfMemoryError, torch.linalg.LinAlgError]
    kinds += [ParallelError, ExecutorClosedError, LaunchError, RankTimeoutError, TransferError, WorkerDiedError]
    return {qualified_name(kind): kind for kind in kinds if not issubclass(kind, ExceptionGroup)}
