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
import os
import re
import signal
import socket
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self


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
        self = super().__new__(cls, message, list(failures.values()))
        self.failures = dict(failures)
        return self

    def __init__(self, message: str, failures: Mapping[int, Exception]) -> None:
        super().__init__(message, failures)  # type: ignore[arg-type]  # the args to copy and pickle it by

    @property
    def rank(self) -> int:
        return next(iter(self.failures))

    def derive(self, excs: Sequence[Exception]) -> RankError:  # type: ignore[override]
        """The group of some of the leaves, for ``except*``: each keeps its rank."""
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
        self.rank, self.pid, self.exitcode, self.evidence = rank, pid, exitcode, evidence


class RankTimeoutError(ParallelError, TimeoutError):
    """A rank did not answer in time.

    Attributes:
        ranks: the silent ranks.
        stacks: ``{rank: text}``, where each of them stands, as far as that is known from here.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.ranks, self.stacks = list(ranks), dict(stacks or {})


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

    failure: Failure | None = None

    def __init__(self, where: str, tb: str) -> None:
        super().__init__(where, tb)
        self.tb = _with_source(tb)
        self.add_note(self.tb.rstrip())  # a note keeps the margin that an ExceptionGroup prints, a message does not

    def __str__(self) -> str:
        return f"raised by {self.args[0]}"


class Verbatim(str):
    """Text that is shown as it is where Python would quote it, as a KeyError does with its key.

    Torch's loader has such a class too: the KeyError of a worker holds its whole traceback.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Failure(NamedTuple):
    """An exception as plain data: all of it that may cross a network."""

    type_name: str
    args: list[str | float | int | None] | None  # what its constructor takes, where that is all plain scalars
    message: str
    where: str  # for instance "rank 1 of 2 (pid 8123 on node7)"
    traceback: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> Failure:
        """Describe ``error``, raised by ``where``, for instance ``"rank 1 of 2"``."""
        if _NO_GROUP in _text_of(error) and _CALL_INITIALIZE_DDP not in getattr(error, "__notes__", ()):
            error.add_note(_CALL_INITIALIZE_DDP)
        args = error.__reduce__()[1] if type(error).__reduce__ in _PLAIN_REDUCE else None
        plain = isinstance(args, tuple) and all(isinstance(a, str | float | None) or _is_short(a) for a in args)
        return cls(
            type_name=qualified_name(type(error)),
            args=list(args) if plain and isinstance(args, tuple) else None,
            message=_text_of(error),
            where=f"{where} (pid {os.getpid()} on {socket.gethostname()})",
            traceback=format_traceback(error),
        )

    def rebuild(self, allowed: Mapping[str, type[Exception]]) -> Exception:
        """The exception again, of its own type where ``allowed`` lists that, else a `RemoteError`."""
        error: Exception | None = None
        if kind := allowed.get(self.type_name):
            try:
                error = kind(*self.args) if self.args is not None else kind(self.message)
                if len(error.args) == 1 and _text_of(error) != self.message:
                    error = kind(Verbatim(self.message))
            except Exception:  # a constructor that wants something else: the stand-in below says all we know
                error = None
        if error is None:
            error = RemoteError(f"{self.type_name}: {self.message}")
        error.__cause__ = self.as_cause()
        return error

    def as_cause(self) -> RemoteTraceback:
        cause = RemoteTraceback(self.where, self.traceback)
        cause.failure = self
        return cause


def rank_error(function: str, world_size: int, failures: Mapping[int, Exception]) -> RankError:
    """A `RankError` of failures in the order of their arrival, the cause first.

    A connection that was lost because another rank had failed is no failure of its own. A traceback that several ranks
    have is shown once.
    """
    causes = {rank: failure for rank, failure in failures.items() if not lost_connection(failure)} or failures
    cause, *others = causes
    also = f" (and then on {rank_names(others)})" if others else ""
    shown = dict[str, int]()
    for rank, failure in causes.items():
        remote = failure.__cause__
        if isinstance(remote, RemoteTraceback) and (first := shown.setdefault(remote.tb, rank)) != rank:
            remote.__notes__ = [f"The traceback is the same as on rank {first}."]
    return RankError(f"{function} failed on rank {cause} of {world_size}{also}: {summary(causes[cause])}", causes)


def rank_names(ranks: Iterable[int]) -> str:
    """``"rank 3"``, or ``"ranks 0, 2-7"``."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and rank <= runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {named}" if named.isdecimal() else f"ranks {named}"


def qualified_name(kind: type) -> str:
    """``ValueError``, or ``package.module.MyError``."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def format_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without our own frames at its top, bounded in length."""
    text = "".join(traceback.format_exception(type(error), error, user_frames(error)))
    half = MAX_TRACEBACK_CHARS // 2
    return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n  [...]\n{text[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` from the first frame that is not ours; ours alone if there is no other."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frames = frames.tb_next
    return frames or error.__traceback__


def lost_connection(error: BaseException) -> bool:
    """Whether ``error`` is what a rank sees when a peer of its process group goes away.

    Gloo raises plain `RuntimeError`, so its own source file in the message is the only mark there is. NCCL's errors are
    of one type, whatever they tell.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, WorkerDiedError) or collective_timed_out(error):
        return False
    return any(mark in _text_of(error) for mark in _LOST_CONNECTION_MARKS)


def collective_timed_out(error: BaseException) -> bool:
    """Return whether a rank has waited in a collective for as long as its group allows; its peers then lose it."""
    if not isinstance(error, RuntimeError) or _TIMED_OUT not in (text := _text_of(error)):
        return False
    return "gloo/transport" in text or text.startswith("NCCL: ")


def exit_reason(exitcode: int) -> str:
    """``"exited with code 3"`` or ``"was killed by SIGKILL"``."""
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def summary(error: BaseException) -> str:
    """``"ValueError: no such file"``, on one line."""
    first, *more = _text_of(error).splitlines() or [""]
    name = type(error).__name__
    return f"{name}: {first}{' ...' if more else ''}" if first else name


def _with_source(tb: str) -> str:
    """A traceback with the lines of code that its own process has not got, and this one has: of a notebook's cells.

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


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _is_short(value: Any) -> bool:
    """Whether it is an integer that can be written down: Python refuses those of thousands of digits."""
    return isinstance(value, int) and value.bit_length() <= 10_000


def _leaves(error: BaseException) -> set[int]:
    """The identities of the exceptions in a group, however deep; of a plain exception, its own."""
    if isinstance(error, BaseExceptionGroup):
        return set().union(*map(_leaves, error.exceptions))
    return {id(error)}


MAX_TRACEBACK_CHARS = 20_000
PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRAME = re.compile(r'( *)File "(.+)", line (\d+), in ')
_PLAIN_REDUCE = (BaseException.__reduce__, OSError.__reduce__, ImportError.__reduce__)
_NO_GROUP = "Default process group has not been initialized"  # torch's words
_CALL_INITIALIZE_DDP = (
    "Call nn_parallel.initialize_ddp() before: it connects these ranks by a process group, also again after a failure."
)
_TIMED_OUT = "Timed out waiting"
_LOST_CONNECTION_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Another rank failed while",  # our own, of a rank that waits for the others to make a group
)
