"""Every error that this package raises on purpose.

    ParallelError(RuntimeError)
    ├─ RankError(ExceptionGroup)        one leaf per failed rank, the cause first
    ├─ WorkerDiedError                  a process is gone
    ├─ RankTimeoutError(TimeoutError)   a rank did not answer in time
    ├─ ExecutorClosedError              the pool was shut down
    ├─ TransferError                    an object could not be sent
    ├─ RemoteError                      an exception that could not be rebuilt here
    └─ LaunchError                      the launch environment or device configuration is wrong

``except ParallelError`` therefore catches them all, and ``except* ValueError`` reaches the leaves of a `RankError`.
A bad argument is a plain `ValueError` or `TypeError`.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self


class ParallelError(RuntimeError):
    """The base of every error of this package."""


class RankError(ExceptionGroup[Exception], ParallelError):
    """One or more ranks failed in a call that all ranks make together.

    Raised on *every* rank, the failed one included. Its leaves are the exceptions of the failed ranks in the order of
    their arrival, the cause first. A rank that was only freed from waiting for a failed one has no leaf.

    Attributes:
        failures: ``{rank: exception}``, in the same order.
        rank: the rank of the cause.

    Example::

        try:
            save(model)
        except* OSError as group:  # on every rank, whichever one failed
            ...
    """

    failures: dict[int, Exception]

    def __new__(cls, message: str, failures: Mapping[int, Exception]) -> Self:
        """Make the group of the exceptions of these ranks; the first one is the cause."""
        self = super().__new__(cls, message, list(failures.values()))
        self.failures = dict(failures)
        return self

    def __init__(self, message: str, failures: Mapping[int, Exception]) -> None:
        super().__init__(message, failures)  # type: ignore[arg-type]  # the args to copy and pickle it by

    @property
    def rank(self) -> int:
        """The rank that failed first."""
        return next(iter(self.failures))

    def derive(self, excs: Sequence[Exception]) -> RankError:  # type: ignore[override]
        """Return the group of some of the leaves, for ``except*``: each keeps its rank."""
        kept = {
            rank: part
            for part in excs
            for rank, whole in self.failures.items()
            if part is whole or _leaves(part) & _leaves(whole)  # of a leaf that is a group, Python passes a part
        }
        return RankError(self.message, kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.failures), self.__dict__


class WorkerDiedError(ParallelError):
    """A process ended without an answer.

    Attributes:
        rank: its rank.
        pid: its process id; 0 when another rank told of it.
        exitcode: its exit code, ``-n`` when signal ``n`` killed it, None when it is not known from here.
        evidence: what else is known of its end; an empty string if nothing is.
    """

    def __init__(
        self, message: str, *, rank: int = 0, pid: int = 0, exitcode: int | None = None, evidence: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.exitcode = exitcode
        self.evidence = evidence


class RankTimeoutError(ParallelError, TimeoutError):
    """A rank did not answer in time.

    Attributes:
        ranks: the silent ranks.
        stacks: ``{rank: text}``, where each of them stands, as far as that is known from here.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.stacks = dict(stacks or {})


class ExecutorClosedError(ParallelError):
    """The executor was used after `shutdown`, or in a process that did not make it."""

    def __init__(self, message: str = "cannot schedule new work: the executor has been shut down.") -> None:
        super().__init__(message)


class TransferError(ParallelError):
    """An object could not be sent to another process; the message names the attribute that stands in the way."""


class RemoteError(ParallelError):
    """Stands for an exception of another rank that cannot be rebuilt here; the message begins with its type's name."""


class LaunchError(ParallelError):
    """The launch environment or the device configuration is wrong; the message says what to set."""


class RemoteTraceback(Exception):
    """The ``__cause__`` of an exception that was rebuilt here: where it was raised, and the traceback from there.

    Attributes:
        tb: the traceback, as text.
        failure: what it was rebuilt from, if it was.
    """

    failure: Any = None  # a `Failure`, as the engine has it

    def __init__(self, where: str, tb: str) -> None:
        super().__init__(where, tb)
        self.tb = _with_source(tb)
        self.add_note(self.tb.rstrip())  # a note keeps the margin that an ExceptionGroup prints, a message does not

    def __str__(self) -> str:
        return f"raised by {self.args[0]}"


def _with_source(tb: str) -> str:
    """Return a traceback with the lines of code that this process has, but not its own one: of a notebook's cells.

    It opens no file: a stranger may have written the traceback.
    """
    lines = tb.splitlines(keepends=True)
    for index in reversed(range(len(lines))):
        frame = _FRAME.match(lines[index])
        if frame and not "".join(lines[index + 1 : index + 2]).startswith(f"{frame[1]}  "):
            known = frame[2] in linecache.cache
            source = linecache.getline(frame[2], int(frame[3])).strip() if known else ""
            lines[index + 1 : index + 1] = [f"{frame[1]}  {source}\n"] if source else []
    return "".join(lines)


def _leaves(error: BaseException) -> set[int]:
    """Return the identities of the exceptions in a group, however deep; of a plain exception, its own."""
    if isinstance(error, BaseExceptionGroup):
        return set().union(*map(_leaves, error.exceptions))
    return {id(error)}


_FRAME = re.compile(r'( *)File "(.+)", line (\d+), in ')
