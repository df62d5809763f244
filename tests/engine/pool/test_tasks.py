"""The results of tasks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from nn_parallel import (
    ParallelExecutor,
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
