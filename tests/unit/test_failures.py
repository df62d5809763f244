"""The error tree, how its errors cross processes, and how any exception does as plain data."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from nn_parallel._engine.failures import Failure, exit_reason, lost_connection, qualified_name, rank_error, summary
from nn_parallel._engine.ranks.records import known_exceptions
from nn_parallel._engine.ranks.store import decode, encode
from nn_parallel.errors import (
    RankError,
    RemoteError,
    RemoteTraceback,
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
    failure = decode(Failure, "key", encode(Failure.from_exception(_raised(error), "Rank 1 of 2")))
    return failure.rebuild(known_exceptions())


def _group() -> RankError:
    return RankError("save() failed on ranks 2 and 0.", {2: ValueError("two"), 0: OSError(2, "zero")})


def test_a_rank_error_tells_each_ranks_failure_the_cause_first() -> None:
    """`failures` by rank in their order, `rank` the first of them, the leaves the same objects."""
    error = _group()
    assert list(error.failures) == [2, 0]
    assert error.rank == 2
    assert error.message == "save() failed on ranks 2 and 0."
    assert error.exceptions == tuple(error.failures.values())
    assert str(error).startswith(error.message)


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
    # The loader's worker is forked, because the default of Python 3.14 would have to pickle the lambda.
    loader = DataLoader(
        samples, collate_fn=lambda batch: batch[0]["label"], num_workers=1, multiprocessing_context="fork"
    )
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


def test_a_listed_type_whose_constructor_refuses_becomes_a_remote_error() -> None:
    """A keyword-only constructor cannot be called with what is known; nothing is lost but the type."""
    allowed = {qualified_name(KeywordOnly): KeywordOnly}
    again = Failure.from_exception(KeywordOnly(code=3), "Rank 1").rebuild(allowed)
    assert type(again) is RemoteError
    assert str(again).endswith("KeywordOnly: code 3")


@pytest.mark.parametrize("argument", [object(), b"bytes", [1], ("a",), torch.ones(2)])
def test_arguments_that_are_not_plain_stay_behind(argument: Any) -> None:
    """Only scalars cross a network: the rebuilt exception has the message instead."""
    error = ValueError(argument)
    assert Failure.from_exception(error, "").args is None
    again = _sent(error)
    assert (type(again), again.args) == (ValueError, (str(error),))


def test_a_reduce_of_the_users_own_is_not_asked() -> None:
    """What a type says of its own pickling is neither called nor sent."""
    failure = Failure.from_exception(Lying("x"), "Rank 1")
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
        (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
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
            failures[rank] = Failure.from_exception(error, f"rank {rank} of 4").rebuild({"ValueError": ValueError})
    error = rank_error("save()", 4, failures)
    text = "".join(traceback.format_exception(error))
    assert "save() failed on rank 0 of 4 (and then on ranks 1-3): ValueError: everywhere" in text
    assert text.count("raise ValueError(") == 2  # of ranks 0 and 3
    assert text.count("The traceback is the same as on rank 0.") == 2
    causes = [failure.__cause__ for failure in error.failures.values()]
    assert all(isinstance(cause, RemoteTraceback) and "raise ValueError(" in cause.tb for cause in causes)
