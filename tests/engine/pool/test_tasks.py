"""The results of tasks."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from nn_parallel import (
    ParallelExecutor,
    RankError,
    TransferError,
)


def test_a_result_may_be_of_a_class_that_only_its_call_knew(executor2: ParallelExecutor) -> None:
    """Until it is rebuilt, however late; and so may an exception."""

    def calls() -> tuple[Future[Any], Future[Any], Iterator[Any]]:
        class Local(Exception):
            pass

        def fail() -> None:
            raise Local

        return executor2.submit(lambda: Local()), executor2.submit(fail), executor2.map(lambda _: Local(), range(2))

    made, failed, mapped = calls()
    wait([made, failed])
    gc.collect()
    assert type(made.result()).__name__ == "Local"
    assert type(failed.exception()).__name__ == "Local"
    assert [type(each).__name__ for each in mapped] == ["Local", "Local"]


class Rebuilt:
    """Raises as it is rebuilt."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return raise_it, (self.kind,)


def raise_it(kind: type[BaseException]) -> None:
    raise kind("as it is rebuilt")


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_result_that_cannot_be_rebuilt_is_an_error_of_its_call(
    executor2: ParallelExecutor, kind: type[BaseException]
) -> None:
    """Whatever it raises; the pool goes on."""
    with pytest.raises(TransferError, match=r"The result of .*lambda.* cannot be rebuilt"):
        executor2.submit(lambda: Rebuilt(kind)).result()
    assert executor2.run(int) == [0, 0]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Lets no attribute be set, its cause among them."""


def raise_frozen(_: int = 0) -> None:
    raise Frozen


@pytest.mark.parametrize("call", ["submit", "run", "map", "map in chunks"])
def test_an_exception_may_let_no_attribute_be_set(call: str, executor2: ParallelExecutor) -> None:
    """It has its cause nevertheless."""
    with pytest.raises((Frozen, RankError)) as caught:
        match call:
            case "submit":
                executor2.submit(raise_frozen).result(20)
            case "run":
                executor2.run(raise_frozen)
            case _:
                list(executor2.map(raise_frozen, range(3), chunksize=2 if call == "map in chunks" else None))
    # A rank that fails cancels the other one, which may not have failed by then.
    error = next(iter(caught.value.failures.values())) if isinstance(caught.value, RankError) else caught.value
    assert "in raise_frozen" in repr(error.__cause__)


class Unprintable(Exception):
    """Its `__repr__` and `__str__` raise."""

    def __reduce__(self) -> Any:
        return Unprintable.fail, ()

    def __repr__(self) -> str:
        raise ValueError

    __str__ = __repr__

    @staticmethod
    def fail() -> None:
        raise Unprintable


class NotRebuilt:
    """Raises an error as it is rebuilt, but not where it was made."""

    def __reduce__(self) -> Any:
        return Unprintable.fail, ()


def test_the_error_of_a_result_that_cannot_be_rebuilt_may_not_be_printable(executor2: ParallelExecutor) -> None:
    """The pool goes on."""
    with pytest.raises(TransferError, match="cannot be rebuilt in the parent process"):
        executor2.submit(NotRebuilt).result(20)
    assert executor2.run(int) == [0, 0]
