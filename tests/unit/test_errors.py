"""The error tree, and how its errors cross processes."""

from __future__ import annotations

import copy
import linecache
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nn_parallel
from nn_parallel import errors
from nn_parallel.errors import (
    ExecutorClosedError,
    LaunchError,
    ParallelError,
    RankError,
    RankTimeoutError,
    RemoteError,
    RemoteTraceback,
    TransferError,
    WorkerDiedError,
)


def _group() -> RankError:
    return RankError("save() failed on ranks 2 and 0.", {2: ValueError("two"), 0: OSError(2, "zero")})


@pytest.mark.parametrize("kind", [getattr(nn_parallel, n) for n in nn_parallel.__all__ if n.endswith("Error")])
def test_every_public_error_is_a_parallel_error(kind: type[Exception]) -> None:
    """One ``except ParallelError``, or ``except RuntimeError``, catches them all."""
    assert issubclass(kind, ParallelError)
    assert issubclass(kind, RuntimeError)
    assert kind.__doc__


def test_every_error_of_the_module_is_public() -> None:
    """No error class is forgotten in the package's names; the traceback's carrier is no error of its own."""
    own = {n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ParallelError)}
    assert own == {name for name in nn_parallel.__all__ if name.endswith("Error")}


def test_where_the_tree_meets_pythons() -> None:
    """A RankError is an ExceptionGroup, a RankTimeoutError a TimeoutError."""
    assert issubclass(RankError, ExceptionGroup)
    assert issubclass(RankTimeoutError, TimeoutError)
    with pytest.raises(TimeoutError):
        raise RankTimeoutError("too slow")


def test_except_star_reaches_the_leaves_with_their_ranks() -> None:
    """``except* ValueError`` gets the failed ranks with a ValueError, still by rank; the rest goes on."""
    seen: list[Any] = []

    def handle() -> None:
        try:
            raise _group()
        except* ValueError as group:
            seen.extend([type(group), group.failures.keys(), group.rank, group.message])

    with pytest.raises(RankError) as caught:
        handle()
    assert seen == [RankError, {2}, 2, "save() failed on ranks 2 and 0."]
    assert caught.value.failures.keys() == {0}
    assert isinstance(caught.value.failures[0], FileNotFoundError)


def test_split_and_subgroup_keep_the_ranks() -> None:
    """Parts of a RankError are RankErrors: by rank, in order, with the traceback and notes of the whole."""
    error = RankError("all failed", {rank: (ValueError, KeyError)[rank % 2](rank) for rank in (3, 2, 1, 0)})
    error.add_note("seen on rank 0")
    match, rest = error.split(ValueError)
    assert (list(match.failures), list(rest.failures)) == ([2, 0], [3, 1])
    assert match.failures[2] is error.failures[2]
    assert match.__notes__ == ["seen on rank 0"]
    assert error.subgroup(OSError) is None
    assert list(error.subgroup(lambda e: isinstance(e, KeyError) and e.args == (1,)).failures) == [1]


def test_a_rank_that_raised_a_group_itself_can_be_split() -> None:
    """What asyncio.TaskGroup raises is a group: ``except*`` looks into it, and its rank is kept."""
    inner = ExceptionGroup("tasks", [ValueError("a"), KeyError("b")])
    match, rest = RankError("failed", {1: inner, 0: KeyError("c")}).split(ValueError)
    assert list(match.failures) == [1]
    assert [str(e) for e in match.failures[1].exceptions] == ["a"]
    assert list(rest.failures) == [1, 0]
    assert [str(e) for e in rest.failures[1].exceptions] == ["'b'"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_rank_error_copies_and_pickles(copied: Callable[[RankError], RankError]) -> None:
    """Message, ranks, their order, the leaves, notes and remote tracebacks survive, nested too."""
    error = RankError("outer", {1: _group(), 0: ValueError("x")})
    error.failures[0].__cause__ = RemoteTraceback("rank 0 of 2", "its traceback")
    error.add_note("a note")
    again = copied(error)
    assert type(again) is RankError
    assert str(again) == str(error)
    assert [(rank, str(e)) for rank, e in again.failures.items()] == [(r, str(e)) for r, e in error.failures.items()]
    assert again.exceptions == tuple(again.failures.values())
    assert again.failures[1].failures.keys() == {2, 0}
    assert again.__notes__ == ["a note"]
    cause = again.failures[0].__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.tb == "its traceback"


def test_a_rank_error_wants_a_failure() -> None:
    """A failure of nobody is a bug of the caller's."""
    with pytest.raises(ValueError, match="non-empty"):
        RankError("nobody failed", {})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize(
    "error",
    [
        WorkerDiedError("Rank 2 was killed.", rank=2, pid=123, exitcode=-9, evidence="one OOM kill"),
        WorkerDiedError("Rank 2 is gone.", rank=2, pid=123),
        RankTimeoutError("Rank 1 is silent.", ranks=(1, 3), stacks={1: "File ...", 3: ""}),
        RankTimeoutError("Silent."),
        TransferError("The result cannot be sent."),
        RemoteError("MyError: x"),
        LaunchError("RANK is set."),
        ExecutorClosedError("closed"),
    ],
)
def test_errors_survive_pickle_and_copy(error: ParallelError, copied: Callable[[Any], Any]) -> None:
    """Type, message, args and every attribute, also one that was added later."""
    error.__notes__ = ["a note"]
    again = copied(error)
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert vars(again) == vars(error)


def test_what_their_attributes_are() -> None:
    """The documented attributes, with lists and dicts of the error's own."""
    died = WorkerDiedError("gone", rank=2, pid=123)
    assert (died.rank, died.pid, died.exitcode, died.evidence) == (2, 123, None, "")
    stacks = {1: "File"}
    late = RankTimeoutError("late", ranks=(1,), stacks=stacks)
    stacks.clear()
    assert (late.ranks, late.stacks) == ([1], {1: "File"})
    assert (RankTimeoutError("late").ranks, RankTimeoutError("late").stacks) == ([], {})


def test_a_traceback_shows_the_code_that_is_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has not got the text of a notebook's cell; what it has shown stays."""
    monkeypatch.setitem(linecache.cache, "<cell 1>", (0, None, ["def f():\n", "    return [][1]\n"], "<cell 1>"))
    told = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 1, in step\n    f()\n    ~^^\n'
        '  File "<cell 1>", line 2, in f\n'
        '  File "<unknown>", line 3, in g\n'
        "IndexError: list index out of range\n"
    )
    shown = told.replace("in f\n", "in f\n    return [][1]\n")
    assert RemoteTraceback("rank 1 of 2", told).tb == shown
    assert RemoteTraceback("rank 1 of 2", shown).tb == shown


def test_a_traceback_from_elsewhere_opens_no_file(tmp_path: Path) -> None:
    """Who has written it may be a stranger: only code that Python has read before is shown."""
    file = tmp_path / "secret.py"
    file.write_text("the text\n")
    told = f'Traceback (most recent call last):\n  File "{file}", line 1, in f\nValueError: no\n'
    assert RemoteTraceback("rank 1 of 2", told).tb == told
