"""Failures: an exception as plain data, the error that ranks raise together, and what stands in their messages."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import RankError, RankTimeoutError, RemoteError, RemoteTraceback, WorkerDiedError
from .tracebacks import format_traceback


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
    stacks: dict[int, str]  # of a `RankTimeoutError`: by silent rank, empty where it is not known

    @classmethod
    def from_exception(cls, error: BaseException, where: str) -> Failure:
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
            stacks={rank: error.stacks.get(rank, "") for rank in error.ranks}
            if isinstance(error, RankTimeoutError)
            else {},
        )

    def rebuild(self, allowed: Mapping[str, type[Exception]]) -> Exception:
        """Return the exception again, of its own type where ``allowed`` lists that, else a `RemoteError`."""
        error: Exception | None = None
        if self.stacks:
            error = RankTimeoutError(self.message, ranks=list(self.stacks), stacks=self.stacks)
        elif kind := allowed.get(self.type_name):
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


def set_cause(error: BaseException, cause: BaseException) -> None:
    """As ``error.__cause__ = cause``, also where the class forbids that, as a frozen dataclass does."""
    vars(BaseException)["__cause__"].__set__(error, cause)


def rank_error(function: str, world_size: int, failures: Mapping[int, Exception]) -> RankError:
    """Return a `RankError` of failures in the order of their arrival, the cause first.

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


def lost_connection(error: BaseException) -> bool:
    """Return whether ``error`` is what a rank sees when a peer of its process group goes away.

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


def exit_reason(exitcode: int | None) -> str:
    """Return ``"exited with code 3"`` or ``"was killed by SIGKILL"``; ``"died"`` if the exit code is not known."""
    if exitcode is None:
        return "died"
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


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _is_short(value: Any) -> bool:
    """Return whether ``value`` is an integer that Python writes as text: it refuses thousands of digits."""
    return isinstance(value, int) and value.bit_length() <= 10_000


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
    "Failed to recv, got 0 bytes",  # from the store, as it waits there for the others in `new_group`
    "Another rank failed while",  # our own, of a rank that waits for the others to make a group
)
