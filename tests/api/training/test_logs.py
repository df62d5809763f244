"""`setup_logging`: each line says whose it is, and ranks other than 0 are quiet."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from nn_parallel import current_world, initialize_ddp, setup_logging
from nn_parallel.training.logs import _RankHandler
from tests.support.ranks import AnyRanks


def said(level: int | str = "INFO", times: int = 1) -> list[str]:
    """What this process logs to stderr, without the times."""
    root, stderr, before = logging.getLogger(), sys.stderr, logging.getLogger().level
    sys.stderr = io.StringIO()
    try:
        for _ in range(times):
            setup_logging(level)
        for name in ("debug", "info", "warning"):
            getattr(logging.getLogger("mine"), name)("%s of %d", name, 7)
        text = sys.stderr.getvalue()
    finally:
        sys.stderr = stderr
        root.setLevel(before)
        for handler in [handler for handler in root.handlers if isinstance(handler, _RankHandler)]:
            root.removeHandler(handler)
    return text.splitlines()


def test_rank_0_tells_what_is_asked_for_and_the_others_what_one_must_know(any_ranks: AnyRanks) -> None:
    """Each line is headed by the rank; called twice, it is not told twice."""

    def scenario(*args: Any) -> Any:
        initialize_ddp()
        return said(*args)

    first, *others = any_ranks.run(scenario, "INFO", 2)
    assert [(line[:9], line.split(" ", 4)[4]) for line in first] == [
        ("[rank 0] ", "INFO mine: info of 7"),
        ("[rank 0] ", "WARNING mine: warning of 7"),
    ]
    for rank, lines in enumerate(others, 1):
        assert [(line[:9], line.split(" ", 4)[4]) for line in lines] == [
            (f"[rank {rank}] ", "WARNING mine: warning of 7")
        ]
    first, *others = any_ranks.run(scenario, "DEBUG")
    assert len(first) == 3
    assert all(len(lines) == 1 for lines in others)


def test_alone_there_is_no_head() -> None:
    assert current_world().world_size == 1
    lines = said(logging.INFO)
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO mine: info of 7", "WARNING mine: warning of 7"]


def test_an_unknown_level_is_an_error() -> None:
    """And nothing is set up."""
    before = list(logging.getLogger().handlers)
    with pytest.raises(ValueError, match="LOUD"):
        setup_logging("LOUD")
    assert logging.getLogger().handlers == before
