"""What ranks tell each other: exceptions that may be rebuilt by their type, and no others."""

from __future__ import annotations

import pytest
import torch

from nn_parallel._engine.failures import Failure
from nn_parallel._engine.ranks.records import known_exceptions
from nn_parallel._engine.ranks.store import decode, encode
from nn_parallel.errors import (
    LaunchError,
    ParallelError,
    RemoteError,
    TransferError,
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


def test_only_listed_types_are_rebuilt() -> None:
    """The list decides, not what the data says: a name that is not on it is never looked up."""
    failure = Failure(type_name="builtins.eval", args=["1"], message="m", where="rank 1", traceback="tb", stacks={})
    assert type(failure.rebuild({})) is RemoteError
    assert type(Failure.from_exception(ValueError("x"), "").rebuild({})) is RemoteError
    assert type(Failure.from_exception(ValueError("x"), "").rebuild({"ValueError": KeyError})) is KeyError
