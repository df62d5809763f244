"""Every error that this package raises on purpose.

    ParallelError(RuntimeError)
    ├─ RankError(ExceptionGroup)        one leaf per failed rank, the cause first
    ├─ WorkerDiedError                  a process ended without an answer
    ├─ RankTimeoutError(TimeoutError)   a rank did not answer in time
    ├─ ExecutorClosedError              the executor was shut down
    ├─ TransferError                    an object could not be sent
    ├─ RemoteError                      raised in place of an exception that could not be rebuilt
    └─ LaunchError                      the launch environment or device configuration is wrong

``except ParallelError`` therefore catches all of them, and ``except* ValueError`` selects leaves of a `RankError`.
For a wrong argument, functions raise a plain `ValueError` or `TypeError`.
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

    *Every* rank raises the error, including the failed ranks. The leaves of this exception group are the exceptions of
    the failed ranks, in the order in which the failures became known. The first leaf is the cause. A rank that did not
    fail itself, but was freed from waiting for a failed rank, has no leaf.

    Attributes:
        failures: ``{rank: exception}``, in the order of the leaves.
        rank: the rank whose exception is the cause.

    Example::

        try:
            save(model)
        except* OSError as group:  # on every rank, whichever one failed
            ...
    """

    failures: dict[int, Exception]

    def __new__(cls, message: str, failures: Mapping[int, Exception]) -> Self:
        """Make the group of the exceptions in ``failures``. The first exception is the cause."""
        self = super().__new__(cls, message, list(failures.values()))
        self.failures = dict(failures)
        return self

    def __init__(self, message: str, failures: Mapping[int, Exception]) -> None:
        super().__init__(message, failures)  # type: ignore[arg-type]  # sets `args` to the arguments of this class

    @property
    def rank(self) -> int:
        """The rank that failed first."""
        return next(iter(self.failures))

    def derive(self, excs: Sequence[Exception]) -> RankError:  # type: ignore[override]
        """Return a `RankError` with ``excs``, the exceptions that ``except*`` has selected. Each one keeps its rank.

        The exception of a rank may itself be a group, of which ``except*`` has selected only a part. Then ``excs`` has
        a new group with this part.
        """
        kept = {
            rank: part
            for part in excs
            for rank, whole in self.failures.items()
            if part is whole or _leaves(part) & _leaves(whole)
        }
        return RankError(self.message, kept)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle drops the ``__cause__`` of each exception. Therefore the state holds each `RemoteTraceback` separately.
        causes = {rank: failure.__cause__ for rank, failure in self.failures.items()}
        remote = {rank: cause for rank, cause in causes.items() if isinstance(cause, RemoteTraceback)}
        return type(self), (self.message, self.failures), self.__dict__ | {"_causes": remote}

    def __setstate__(self, state: dict[str, Any]) -> None:  # type: ignore[override]  # pickle passes a dict
        from ._engine.failures import set_cause  # that module imports this one

        self.__dict__.update(state)
        for rank, cause in self.__dict__.pop("_causes", {}).items():
            set_cause(self.failures[rank], cause)


class WorkerDiedError(ParallelError):
    """A process ended without an answer.

    Attributes:
        rank: the rank of the process.
        pid: the process id; 0 if another rank has reported the death.
        exitcode: the exit code; ``-n`` if signal ``n`` killed the process, None if the exit code is not known.
        evidence: further facts about the death, such as the peak memory use; an empty string if there are none.
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
        stacks: ``{rank: text}``. The text is the Python stack of the silent rank, or a sentence that says why there is
            no stack. It is an empty string if nothing is known about the rank.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.stacks = dict(stacks or {})


class ExecutorClosedError(ParallelError):
    """The executor was used after its `shutdown`, or in another process than the one that made it."""

    def __init__(self, message: str = "cannot schedule new work: the executor has been shut down.") -> None:
        super().__init__(message)


class TransferError(ParallelError):
    """An object could not be sent to another process.

    If a part of the object cannot be pickled, the message names this part.
    """


class RemoteError(ParallelError):
    """An error that replaces an exception of another rank, because that exception cannot be rebuilt in this process.

    The message begins with the type of that exception.
    """


class LaunchError(ParallelError):
    """The launch environment or the device configuration is wrong. The message says what to set."""


class RemoteTraceback(Exception):
    """The ``__cause__`` of an exception that another process raised and that was rebuilt in this process.

    The message names the other process. The note holds the traceback of the exception in the other process.

    Attributes:
        tb: the traceback in the other process, as text.
        failure: the plain data from which the exception was rebuilt, or None.
    """

    failure: Any = None  # set to a `Failure` of the engine by `Failure.as_cause`; None until then

    def __init__(self, where: str, tb: str) -> None:
        super().__init__(where, tb)
        self.tb = _with_source(tb)
        self.add_note(self.tb.rstrip())  # an ExceptionGroup indents each line of a note, but not of a message

    def __str__(self) -> str:
        return f"raised by {self.args[0]}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The attribute `tb` is not pickled. The receiver makes `tb` anew from the arguments, and so adds the source
        # lines of its own notebook; see `_with_source`.
        return type(self), self.args, {"failure": self.failure}


def _with_source(tb: str) -> str:
    """Return the traceback of another process with the source lines of notebook cells added.

    A worker cannot read the source of a notebook cell, because the cell is not a file. The process of the notebook has
    the source, because IPython puts it into `linecache`. This function uses only the cache and opens no file, because
    the sender of a traceback must not be able to choose the files that this process reads.
    """
    lines = tb.splitlines(keepends=True)
    for index in reversed(range(len(lines))):
        frame = _FRAME.match(lines[index])
        if frame and not "".join(lines[index + 1 : index + 2]).startswith(f"{frame[1]}  "):
            is_cached = frame[2] in linecache.cache
            source = linecache.getline(frame[2], int(frame[3])).strip() if is_cached else ""
            lines[index + 1 : index + 1] = [f"{frame[1]}  {source}\n"] if source else []
    return "".join(lines)


def _leaves(error: BaseException) -> set[int]:
    """Return the ids of all exceptions in a group and in its subgroups, or the id of a plain exception.

    `RankError.derive` compares these ids, because Python makes new group objects when it splits a group.
    """
    if isinstance(error, BaseExceptionGroup):
        return set().union(*map(_leaves, error.exceptions))
    return {id(error)}


_FRAME = re.compile(r'( *)File "(.+)", line (\d+), in ')
