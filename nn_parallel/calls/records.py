"""The words in which ranks tell each other of outcomes: plain text and JSON, never a pickle.

A store can be reached by whoever reaches its port, so what comes out of it is read as data, checked, and named in the
error when it is not ours.
"""

from __future__ import annotations

import builtins
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import (
    ExecutorClosedError,
    Failure,
    LaunchError,
    ParallelError,
    RankTimeoutError,
    TransferError,
    WorkerDiedError,
    qualified_name,
)

# How far a rank is within a call. FINISHED + 1, + 2, ... are the rounds of a barrier.
WAITING, FINISHED, GONE = 0, 1, 1_000_000


class Call(NamedTuple):
    """A call that all ranks make together: ``function`` and ``ranks`` must agree between them, ``place`` need not."""

    function: str
    ranks: tuple[int, ...]  # those that run it
    place: str  # file:line
    wait: bool = True

    def __str__(self) -> str:
        return f"{self.what} at {self.place}"

    @property
    def what(self) -> str:
        return f"{self.function} on rank {', '.join(map(str, self.ranks))}"

    @property
    def together(self) -> bool:
        """Several ranks run it and wait for its end, so that one may wait for another in a collective."""
        return self.wait and len(self.ranks) > 1


def call_name(fn: Callable[..., Any]) -> str:
    """How a call of ``fn`` is called in errors, and told to other ranks: the same on all of them."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{getattr(fn, '__qualname__', None) or type(fn).__qualname__}()"


def place_of(frame: FrameType) -> str:
    """Where a frame stands, as ``file:line``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Progress(NamedTuple):
    """How far a rank has got; ``a >= b`` means at least as far."""

    generation: int
    call: int
    phase: int


class Report(NamedTuple):
    """What a rank says of itself: one key of the store, overwritten at each call.

    ``history`` holds its last calls as lines ``first number, function and ranks, place``, a line for each stretch of
    equal calls, so that a rank that lags behind can still see that it makes the same ones.
    """

    progress: Progress
    failures_made: int
    history: str = ""

    def format(self) -> str:
        generation, call, phase = self.progress
        return f"{generation} {call} {phase} {self.failures_made}{self.history}"

    @classmethod
    def parse(cls, text: str) -> Report:
        head, _, history = text.partition("\n")
        generation, call, phase, failures = map(int, head.split())
        return cls(Progress(generation, call, phase), failures, history)

    def made_as(self, number: int) -> tuple[str, str] | None:
        """What this rank called under ``number``, and where; None if that is no longer known."""
        for line in reversed(self.history.splitlines()):
            first, what, place = line.split("\t")
            if int(first) <= number:
                return what, place
        return None

    def describe(self) -> str:
        """How far the rank has got, for a person to read."""
        if not self.history:
            return "has made no such call"
        _, what, place = self.history.splitlines()[-1].split("\t")
        return f"has made {self.progress.call} such calls, the last one {what} at {place}"


NO_REPORT = Report(Progress(-1, -1, WAITING), 0)


class Failed(NamedTuple):
    """A failed section, or with a negative ``block`` a failed block; ``call`` counts those that the rank had made.

    ``function`` is what was called. ``failures`` are by rank, the cause first: a rank that fails because another did
    passes on what it knows.
    """

    generation: int
    call: int
    block: int
    function: str
    failures: dict[int, Failure]

    def format(self) -> str:
        failures = {str(rank): asdict(failure) for rank, failure in self.failures.items()}
        return json.dumps([self.generation, self.call, self.block, self.function, failures])

    @classmethod
    def parse(cls, text: str | bytes) -> Failed:
        """Raises an error of any builtin type if ``text`` is none of ours."""
        generation, call, block, function, failures = json.loads(text)
        if not failures:
            raise ValueError("nobody has failed")
        checked = {int(rank): _checked(fields) for rank, fields in failures.items()}
        return cls(int(generation), int(call), int(block), str(function), checked)

    def rebuild(self) -> dict[int, Exception]:
        rebuilt = {rank: failure.rebuild(known_exceptions()) for rank, failure in self.failures.items()}
        for rank, error in rebuilt.items():
            if isinstance(error, WorkerDiedError):
                error.rank = rank
        return rebuilt


def timed_out(me: int, rank: int, report: Report, call: Call, number: int, waited: float) -> RankTimeoutError:
    """The error of rank ``me``, which has waited for ``rank`` in its call ``number``."""
    made = max(report.progress.call, 0)
    where = "is in that call" if made == number else f"has told of {made} such calls, this is number {number}"
    return RankTimeoutError(
        f"Rank {me} waited {waited:.1f} s for rank {rank} in {call}. Rank {rank} {where}, and is not dead as far as is "
        f"known: it is slower than timeout=, or does not make this call. Every rank must call {call.function}.",
        ranks=[rank],
        stacks={rank: f"rank {rank} {where}"},
    )


def not_in_step(me: int, rank: int, theirs: tuple[str, str], call: Call, number: int) -> ParallelError:
    """The error of rank ``me``, whose call ``number`` is another one on ``rank``."""
    return ParallelError(
        f"The ranks are not in the same call. As call {number}, rank {rank} made {' at '.join(theirs)} and rank {me} "
        f"made {call}. Every rank must make the same calls in the same order: look for one inside `if rank == ...`."
    )


def foreign_value(key: str, value: str) -> ParallelError:
    return ParallelError(
        f"The store holds a value under our key {key!r} that this package did not write: {value[:80]!r}."
    )


def _checked(fields: Mapping[str, Any]) -> Failure:
    failure = Failure(**fields)
    texts = (failure.type_name, failure.message, failure.where, failure.traceback)
    if not all(isinstance(text, str) for text in texts) or not all(
        isinstance(arg, str | int | float | None) for arg in failure.args or []
    ):
        raise ValueError("not a failure")
    return failure


@functools.cache
def known_exceptions() -> dict[str, type[Exception]]:
    """The exception types that are rebuilt from the store: the builtin ones, torch's, and the plain ones of our own."""
    found = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    found += [dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError]
    found += [torch.OutOfMemoryError, torch.linalg.LinAlgError]
    found += [ParallelError, ExecutorClosedError, LaunchError, RankTimeoutError, TransferError, WorkerDiedError]
    return {qualified_name(kind): kind for kind in found if not issubclass(kind, ExceptionGroup)}
