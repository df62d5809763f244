"""The error tree, how its errors cross processes, and how any exception does as plain data."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import linecache
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import nn_parallel
from nn_parallel import errors
from nn_parallel._engine.devices import call_on_device
from nn_parallel._engine.failures import Failure, exit_reason, lost_connection, qualified_name, rank_error, summary
from nn_parallel._engine.ranks.environment import detect_launch
from nn_parallel._engine.ranks.records import known_exceptions
from nn_parallel._engine.ranks.store import decode, encode
from nn_parallel._engine.tracebacks import MAX_TRACEBACK_CHARS, format_traceback
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


def _raised(error: BaseException) -> BaseException:
    """``error`` with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def _sent(error: BaseException) -> Exception:
    """``error`` as another rank gets it: through JSON, rebuilt from the list of known types."""
    failure = decode(Failure, "key", encode(Failure.of(_raised(error), "Rank 1 of 2")))
    return failure.rebuild(known_exceptions())


def _group() -> RankError:
    return RankError("save() failed on ranks 2 and 0.", {2: ValueError("two"), 0: OSError(2, "zero")})


# The tree


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


# RankError


def test_a_rank_error_tells_each_ranks_failure_the_cause_first() -> None:
    """`failures` by rank in their order, `rank` the first of them, the leaves the same objects."""
    error = _group()
    assert list(error.failures) == [2, 0]
    assert error.rank == 2
    assert error.message == "save() failed on ranks 2 and 0."
    assert error.exceptions == tuple(error.failures.values())
    assert str(error).startswith(error.message)


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
    """Message, ranks, their order, the leaves and notes survive, nested too."""
    error = RankError("outer", {1: _group(), 0: ValueError("x")})
    error.add_note("a note")
    again = copied(error)
    assert type(again) is RankError
    assert str(again) == str(error)
    assert [(rank, str(e)) for rank, e in again.failures.items()] == [(r, str(e)) for r, e in error.failures.items()]
    assert again.exceptions == tuple(again.failures.values())
    assert again.failures[1].failures.keys() == {2, 0}
    assert again.__notes__ == ["a note"]


def test_a_rank_error_wants_a_failure() -> None:
    """A failure of nobody is a bug of the caller's."""
    with pytest.raises(ValueError, match="non-empty"):
        RankError("nobody failed", {})


# Errors with attributes


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


# Failure: an exception as plain data


class KeywordOnly(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Mute(ValueError):
    def __str__(self) -> str:
        raise ZeroDivisionError


class MuteRuntime(RuntimeError):
    __str__ = Mute.__str__


class Lying(ValueError):
    def __reduce__(self) -> Any:
        return print, ("never called",)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        ValueError(),
        ValueError("two", 2),
        KeyError("k"),
        KeyError(3, None, True, 1.5),
        OSError(2, "No such file or directory", "a.pt"),
        OSError(18, "Invalid cross-device link", "a", None, "b"),
        PermissionError(13, "Permission denied"),
        ImportError("no module"),
        AssertionError("assert 1 == 2"),
        StopIteration(3),
        NotImplementedError("todo"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.linalg.LinAlgError("singular"),
        ParallelError("ours"),
        LaunchError("RANK is set"),
        TransferError("no"),
    ],
    ids=repr,
)
def test_a_known_exception_is_rebuilt_as_it_was(error: Exception) -> None:
    """Built-in and torch types come back with type, args and text; an OSError with errno and file names."""
    again = _sent(error)
    assert type(again) is type(error)
    assert (again.args, str(again)) == (error.args, str(error))
    for name in ("errno", "strerror", "filename", "filename2"):
        assert getattr(again, name, None) == getattr(error, name, None)


@given(
    kind=st.sampled_from([ValueError, KeyError, RuntimeError, AssertionError, OSError, TypeError]),
    args=st.lists(st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False), max_size=4),
)
def test_plain_arguments_survive(kind: type[Exception], args: list[Any]) -> None:
    """Whatever scalars the constructor took, the rebuilt exception has the same args and text."""
    error = kind(*args)
    again = _sent(error)
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))


@pytest.mark.parametrize(
    "error",
    [
        KeywordOnly(code=3),
        json.JSONDecodeError("Expecting value", "doc", 0),
        asyncio.CancelledError("stop"),
        KeyboardInterrupt("^C"),
        SystemExit("bye"),
        ExceptionGroup("many", [ValueError("x")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        _group(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_that_cannot_be_rebuilt_becomes_a_remote_error(error: BaseException) -> None:
    """A user's own type, one that is no Exception, or one whose arguments are not plain: its name and message stay."""
    again = _sent(error)
    assert type(again) is RemoteError
    assert str(again) == f"{qualified_name(type(error))}: {error}"


def test_the_key_error_of_a_loader_worker_keeps_its_lines() -> None:
    """Torch puts a whole traceback into it; Python shows a plain text in a KeyError as one line with quotes."""
    samples: Any = [{}]
    loader = DataLoader(samples, collate_fn=lambda batch: batch[0]["label"], num_workers=1)
    batches: Any = iter(loader)
    with pytest.raises(KeyError) as raised:
        next(batches)
    batches._shutdown_workers()
    del batches
    again = _sent(raised.value)
    assert str(again) == str(raised.value)
    assert "KeyError: 'label'" in str(again).splitlines()
    twice = pickle.loads(pickle.dumps(_sent(again)))
    assert (type(twice), str(twice)) == (KeyError, str(again))
    del raised, again, twice
    gc.collect()  # the traceback of torch's exception holds itself, and with it the iterator


def test_only_listed_types_are_rebuilt() -> None:
    """The list decides, not what the data says: a name that is not on it is never looked up."""
    failure = Failure(type_name="builtins.eval", args=["1"], message="m", where="rank 1", traceback="tb")
    assert type(failure.rebuild({})) is RemoteError
    assert type(Failure.of(ValueError("x"), "").rebuild({})) is RemoteError
    assert type(Failure.of(ValueError("x"), "").rebuild({"ValueError": KeyError})) is KeyError


def test_a_listed_type_whose_constructor_refuses_becomes_a_remote_error() -> None:
    """A keyword-only constructor cannot be called with what is known; nothing is lost but the type."""
    allowed = {qualified_name(KeywordOnly): KeywordOnly}
    again = Failure.of(KeywordOnly(code=3), "Rank 1").rebuild(allowed)
    assert type(again) is RemoteError
    assert str(again).endswith("KeywordOnly: code 3")


@pytest.mark.parametrize("argument", [object(), b"bytes", [1], ("a",), torch.ones(2)])
def test_arguments_that_are_not_plain_stay_behind(argument: Any) -> None:
    """Only scalars cross a network: the rebuilt exception has the message instead."""
    error = ValueError(argument)
    assert Failure.of(error, "").args is None
    again = _sent(error)
    assert (type(again), again.args) == (ValueError, (str(error),))


def test_a_reduce_of_the_users_own_is_not_asked() -> None:
    """What a type says of its own pickling is neither called nor sent."""
    failure = Failure.of(Lying("x"), "Rank 1")
    assert (failure.args, failure.message) == (None, "x")


@pytest.mark.parametrize("kind", [Mute, MuteRuntime])
def test_a_str_that_raises_harms_nothing(kind: type[Exception]) -> None:
    """An exception that cannot tell its message is told with that instead."""
    again = _sent(kind("hidden"))
    assert str(again) == f"{qualified_name(kind)}: <its __str__ raised ZeroDivisionError>"
    assert "in _raised" in "".join(traceback.format_exception(again))
    assert summary(kind()) == f"{kind.__name__}: <its __str__ raised ZeroDivisionError>"
    assert not lost_connection(kind())


@pytest.mark.parametrize("copied", [lambda e: e, lambda e: pickle.loads(pickle.dumps(e))])
def test_the_remote_traceback_is_shown_once_as_the_cause(copied: Callable[[Any], Any]) -> None:
    """Printed, the rebuilt exception tells which rank, process and host raised it, and where in the code."""
    again = _sent(ValueError("bad"))
    again.__cause__ = copied(again.__cause__)
    assert isinstance(again.__cause__, RemoteTraceback)
    shown = "".join(traceback.format_exception(again))
    there, _, here = shown.partition("direct cause")
    assert f"Rank 1 of 2 (pid {os.getpid()} on {socket.gethostname()})" in there
    assert there.count(", in _raised") == there.count("ValueError: bad\n") == 1
    assert here.endswith("ValueError: bad\n")


def test_the_causes_of_the_cause_are_in_the_text() -> None:
    """A chain of exceptions is sent whole, as Python prints it."""
    try:
        try:
            {}["missing"]
        except KeyError as key:
            raise ValueError("outer") from key
    except ValueError as caught:
        text = Failure.of(caught, "Rank 0").traceback
    assert text.index("KeyError: 'missing'") < text.index("direct cause") < text.index("ValueError: outer")


def test_a_long_traceback_keeps_both_ends() -> None:
    """The text is bounded: a store is no place for megabytes; the beginning and the end stay."""
    text = Failure.of(_raised(ValueError("begin" + "x" * 10 * MAX_TRACEBACK_CHARS + "end")), "Rank 1").traceback
    assert len(text) < MAX_TRACEBACK_CHARS + 200
    assert "in _raised" in text
    assert "begin" in text
    assert "[...]" in text
    assert text.endswith("end\n")


def test_our_own_frames_are_left_out() -> None:
    """The traceback begins at the user's code; where there is none of that, ours is better than nothing."""

    def users() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as users_error:
        call_on_device(users, (), {}, None)
    with pytest.raises(LaunchError) as our_error:
        detect_launch({"RANK": "0"})
    texts = [format_traceback(e.value.with_traceback(e.tb.tb_next)) for e in (users_error, our_error)]
    frames = [[line.split(" in ")[1] for line in text.splitlines() if ", line " in line] for text in texts]
    assert frames == [["users"], ["detect_launch"]]


# Words


def test_a_rank_error_says_who_failed() -> None:
    """The function, the rank of the cause, those that failed after it, the cause; no lost connections beside one."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    error = rank_error("save()", 4, {0: lost, 2: ValueError("bad\nworse"), 3: KeyError("k")})
    assert error.message == "save() failed on rank 2 of 4 (and then on rank 3): ValueError: bad ..."
    assert (error.rank, list(error.failures)) == (2, [2, 3])
    assert rank_error("f()", 2, {1: KeyError("k")}).message == "f() failed on rank 1 of 2: KeyError: 'k'"
    assert rank_error("f()", 3, {1: lost, 0: lost}).message.startswith("f() failed on rank 1 of 3 (and then on rank 0)")


@pytest.mark.parametrize(
    ("exitcode", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),  # a real-time signal without a name
        (-200, "was killed by signal 200"),
    ],
)
def test_an_exit_code_in_words(exitcode: int, text: str) -> None:
    """Codes are numbers, signals have names where they have one."""
    assert exit_reason(exitcode) == text


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("Read error: Connection reset by peer"), True),
        (torch.distributed.DistBackendError("NCCL: Connection closed by peer"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation"), False),
        (RuntimeError("shape mismatch"), False),
        (WorkerDiedError("The node is gone, says Ray: RPC error: recvmsg:Connection reset by peer"), False),
        (ValueError("gloo/transport"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # the user's own socket
    ],
)
def test_a_lost_connection_is_known_by_its_words(error: Exception, lost: bool) -> None:
    """Only what torch.distributed raises for a peer that went away is a consequence; a user's errors are causes."""
    assert lost_connection(error) is lost


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one"), "ValueError: one"),
        (ValueError("one\ntwo"), "ValueError: one ..."),
        (ValueError(), "ValueError"),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
def test_a_summary_is_one_line(error: Exception, text: str) -> None:
    """Type and first line, and a mark where there is more."""
    assert summary(error) == text


def test_a_traceback_that_several_ranks_have_is_shown_once() -> None:
    """The other ranks refer to it; `tb` is whole on each."""
    failures = {}
    for rank in range(4):
        try:
            raise ValueError("odd" if rank == 3 else "everywhere")
        except ValueError as error:
            failures[rank] = Failure.of(error, f"rank {rank} of 4").rebuild({"ValueError": ValueError})
    error = rank_error("save()", 4, failures)
    text = "".join(traceback.format_exception(error))
    assert "save() failed on rank 0 of 4 (and then on ranks 1-3): ValueError: everywhere" in text
    assert text.count("raise ValueError(") == 2  # of ranks 0 and 3
    assert text.count("The traceback is the same as on rank 0.") == 2
    causes = [failure.__cause__ for failure in error.failures.values()]
    assert all(isinstance(cause, RemoteTraceback) and "raise ValueError(" in cause.tb for cause in causes)


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
