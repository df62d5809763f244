"""The table of faults, where the two ranks are on two nodes of a Ray cluster, on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nn_parallel import ParallelError, ParallelExecutor
from tests.faults.test_faults import call, check, ending_hangs, go_on, leave_soon
from tests.support.fault_table import FAULTS, ON_RAY, PHASES, TIMEOUT_S, Cell, expected, table

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Not asked here: Ray opens files and starts threads of its own in this process, as it likes."""


@pytest.fixture(scope="module")
def executor2(ray_cluster: Any) -> Iterator[ParallelExecutor]:
    with ParallelExecutor(engine="ray", num_workers=2, devices="cpu", placement="spread") as ex:
        yield ex


def cells(*phases: str) -> list[Any]:
    """Of the table of faults; those of a running function are among the slow tests."""
    return [
        pytest.param(cell, id=cell.id, marks=[pytest.mark.faults, *[pytest.mark.slow] * (cell.phase == "running")])
        for cell in table()
        if cell.mode == ON_RAY and cell.phase in phases
    ]


@pytest.mark.parametrize("cell", cells(*PHASES[:6]))
def test_a_cell_of_the_table(cell: Cell, executor2: ParallelExecutor, record: Callable[..., None]) -> None:
    """As `test_faults.test_during_a_call`, or `test_idle`, with a rank on each of two nodes."""
    assert executor2.run(go_on) == [2, 2]
    if cell.phase == "idle":
        executor2.run(leave_soon) if cell.fault == "os._exit(3)" else os.kill(
            executor2.run(os.getpid)[1], getattr(signal, cell.fault)
        )
        time.sleep(0.5)  # until it has left; nothing depends on it
    start, error = time.monotonic(), None
    try:
        with ending_hangs(executor2, cell):
            executor2.run(go_on) if cell.phase == "idle" else call(executor2, cell)
    except BaseException as raised:
        error = raised
    told = check(cell, error, seconds := time.monotonic() - start)
    assert executor2.run(go_on) == [2, 2]
    record(told=told, seconds=seconds)


@pytest.mark.parametrize("cell", cells("at start"))
def test_a_cell_of_the_table_at_start(cell: Cell, ray_cluster: Any, record: Callable[..., None]) -> None:
    """A fault in the initializer is an error of every call."""
    fault, start = FAULTS[cell.fault], time.monotonic()
    with ParallelExecutor(
        engine="ray",
        num_workers=2,
        devices="cpu",
        placement="spread",
        timeout=TIMEOUT_S if fault.kind == "hang" else None,
        initializer=fault.action,
    ) as ex:
        for _ in range(2):
            with pytest.raises(ParallelError) as caught:
                ex.run(go_on)
    assert fault.error is not None
    kind, words = expected(cell) or ("", "")
    if fault.kind not in ("hang", "death"):
        assert words in str(caught.value)
        kind, words = "ParallelError", "The initializer failed in"
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    record(told=kind, seconds=time.monotonic() - start)
