"""Failures: an exception as plain data, the error that all ranks raise together, and parts of error messages.

An exception must reach the other ranks through the store. It cannot be pickled for this, because nothing that comes
from the store is unpickled. So a `Failure` describes the exception with strings and numbers, from which the receiver
makes an exception of the same type, if the receiver allows this type, and otherwise a `RemoteError`.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import RankError, RankTimeoutError, RemoteError, RemoteTraceback, WorkerDiedError
from .tracebacks import format_traceback


class Verbatim(str):
    """A message that is shown unchanged even by an exception that shows the `repr` of its argument, such as `KeyError`.

    torch's DataLoader has such a class as well, `KeyErrorMessage`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Failure(NamedTuple):
    """An exception as plain data, in the form in which it is sent to other ranks."""

    type_name: str
    # The arguments of the exception's constructor. None if one of them is not a string, a number or None, or if the
    # class of the exception has its own ``__reduce__``.
    args: list[str | float | int | None] | None
    message: str
    where: str  # the process that has raised the exception, for example "rank 1 of 2 (pid 8123 on node7)"
    traceback: str
    # For a `RankTimeoutError`, maps each rank that did not answer to its stack, or to an empty string if the stack is
    # not known. For other exceptions, an empty dict.
    stacks: dict[int, str]

    @classmethod
    def from_exception(cls, error: BaseException, where: str) -> Failure:
        """Describe ``error``.

        Args:
            error: the exception.
            where: the rank that has raised it, for example ``"rank 1 of 2"``.
        """
        if _NO_GROUP in _text_of(error) and _CALL_INITIALIZE_DDP not in getattr(error, "__notes__", ()):
            error.add_note(_CALL_INITIALIZE_DDP)
        args = error.__reduce__()[1] if type(error).__reduce__ in _PLAIN_REDUCE else None
        plain = isinstance(args, tuple) and all(isinstance(arg, str | float | None) or _is_short(arg) for arg in args)
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
        """Return an exception like the described one.

        Args:
            allowed: the types that the returned exception may have, by their full names. If the type of the described
                exception is not among them, or if its constructor does not accept the arguments, a `RemoteError` is
                returned.
        """
        error: Exception | None = None
        if self.stacks:
            error = RankTimeoutError(self.message, ranks=list(self.stacks), stacks=self.stacks)
        elif kind := allowed.get(self.type_name):
            try:
                error = kind(*self.args) if self.args is not None else kind(self.message)
                if len(error.args) == 1 and _text_of(error) != self.message:
                    error = kind(Verbatim(self.message))
            except Exception:  # the constructor takes other arguments, so a `RemoteError` takes its place
                error = None
        if error is None:
            error = RemoteError(f"{self.type_name}: {self.message}")
        error.__cause__ = self.as_cause()
        return error

    def as_cause(self) -> RemoteTraceback:
        """Return the ``__cause__`` of the rebuilt exception, which shows the traceback of the other process."""
        cause = RemoteTraceback(self.where, self.traceback)
        cause.failure = self
        return cause


def set_cause(error: BaseException, cause: BaseException) -> None:
    """Set ``error.__cause__``, even if the class forbids assignments, as a frozen dataclass does."""
    vars(BaseException)["__cause__"].__set__(error, cause)


def rank_error(function: str, world_size: int, failures: Mapping[int, Exception]) -> RankError:
    """Return the `RankError` for the failures of several ranks.

    Errors about a lost connection to another rank are left out, because they follow from the failure of that rank. But
    if all failures are such errors, all are kept. A traceback that several ranks have in common is shown once.

    Args:
        function: the name of the function that failed, for the message.
        world_size: the number of ranks.
        failures: maps each rank to its failure, in the order of their arrival. The first failure that is not left out
            is called the cause.
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
    """Return the name of one or several ranks: ``"rank 3"``, or ``"ranks 0, 2-7"``."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and rank <= runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {named}" if named.isdecimal() else f"ranks {named}"


def qualified_name(kind: type) -> str:
    """Return the full name of a class: ``"ValueError"``, or ``"package.module.MyError"``."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def lost_connection(error: BaseException) -> bool:
    """Return whether ``error`` says that a connection to another rank of the process group was lost.

    Only the message shows this. Gloo raises a plain `RuntimeError` whose message names a source file of gloo. NCCL
    raises errors of one type for all reasons.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, WorkerDiedError) or collective_timed_out(error):
        return False
    return any(mark in _text_of(error) for mark in _LOST_CONNECTION_MARKS)


def collective_timed_out(error: BaseException) -> bool:
    """Return whether ``error`` says that a rank has waited in a collective until the timeout of its process group.

    Such an error does not count as a lost connection, although the other ranks then lose their connections to the rank.
    """
    if not isinstance(error, RuntimeError) or _TIMED_OUT not in (text := _text_of(error)):
        return False
    return "gloo/transport" in text or text.startswith("NCCL: ")


def exit_reason(exitcode: int | None) -> str:
    """Return a phrase for the end of a process: ``"exited with code 3"``, ``"was killed by SIGKILL"`` or ``"died"``.

    ``"died"`` means that the exit code is not known.
    """
    if exitcode is None:
        return "died"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def summary(error: BaseException) -> str:
    """Return type and message of an exception on one line: ``"ValueError: no such file"``."""
    first, *more = _text_of(error).splitlines() or [""]
    name = type(error).__name__
    return f"{name}: {first}{' ...' if more else ''}" if first else name


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _is_short(value: Any) -> bool:
    """Return whether ``value`` is an integer that is short enough to be converted to a string.

    By default, Python refuses to convert an integer of more than 4300 digits.
    """
    return isinstance(value, int) and value.bit_length() <= 10_000


# `Failure.from_exception` calls only these methods to get the arguments of an exception. If a class has its own
# ``__reduce__``, the result may be anything, so the arguments of its exceptions are not sent.
_PLAIN_REDUCE = (BaseException.__reduce__, OSError.__reduce__, ImportError.__reduce__)
_NO_GROUP = "Default process group has not been initialized"  # a part of torch's error message
_CALL_INITIALIZE_DDP = (
    "Call nn_parallel.initialize_ddp() first: it connects the ranks in a process group. Call it again after a failure."
)
_TIMED_OUT = "Timed out waiting"  # a part of the error messages of gloo and NCCL
_LOST_CONNECTION_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Failed to recv, got 0 bytes",  # an error of the store: `new_group` waits for the other ranks through the store
    "Another rank failed while",  # an error of `group` in this package, while a rank waits for the others
)
