"""The table of faults: every rank gets the cause, at once; the pool goes on; nothing is left behind.

The cells that need no fresh ranks run always; all of them with ``-m "faults or not faults"``. With ``--fault-results
FILE`` what a cell gave is recorded there, and a cell that is recorded as passed is not run again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import ParallelError, ParallelExecutor, RankError, current_world, initialize_ddp, on_rank
from nn_parallel._engine.by_value.packer import CallOptions
from nn_parallel._engine.descendants import children_of
from nn_parallel._engine.pool import forkserver_client
from nn_parallel._engine.pool.event_loop import EventLoop
from tests.support.fault_table import (
    FAULTS,
    LAUNCHED_MODES,
    MODES,
    ON_RAY,
    PHASES,
    POOL_MODES,
    TIMEOUT_S,
    Cell,
    Fault,
    OnPickle,
    OnUnpickle,
    as_markdown,
    expected,
    left_out,
    of_nodes,
    table,
    work,
)
from tests.support.paths import ROOT
from tests.support.ranks import AT_ONCE_S, Ranks, launched


@contextlib.contextmanager
def ending_hangs(pool: ParallelExecutor, cell: Cell) -> Iterator[None]:
    """The calls in here have a timeout if they hang; what comes before and after may take long on a busy machine."""
    pool._options = CallOptions(pass_device=True, timeout_s=TIMEOUT_S if is_hang(cell) else None)
    try:
        yield
    finally:
        pool._options = CallOptions(pass_device=True, timeout_s=None)


def is_hang(cell: Cell) -> bool:
    return FAULTS[cell.fault].kind == "hang"


def is_run(cell: Cell) -> bool:
    return cell.mode in ("run", ON_RAY)


def told_within_s(cell: Cell) -> float:
    return AT_ONCE_S + TIMEOUT_S * is_hang(cell)


def call(pool: ParallelExecutor, cell: Cell) -> Any:
    fault = FAULTS[cell.fault]
    argument: Any = None
    if cell.phase == "pickling the task":
        argument = OnPickle(fault.action)
    elif cell.phase == "unpickling the task":
        argument = OnUnpickle(functools.partial(only_on_rank_1, fault)) if is_run(cell) else OnUnpickle(fault.action)
    if cell.mode == "submit":
        return pool.submit(work, fault, cell.phase, argument).result()
    if cell.mode == "map":
        return list(pool.map(work, [fault], [cell.phase], [argument]))
    return pool.run(work, fault, cell.phase, argument)


def only_on_rank_1(fault: Fault) -> None:
    if current_world().rank == 1:
        fault.action()


def failing(cell: Cell, error: BaseException) -> BaseException:
    """What stands for the fault in what was raised: of a `RankError`, the leaf of rank 1."""
    if isinstance(error, RankError):
        assert list(error.failures) == [1]
        return error.failures[1]
    return error


def check(cell: Cell, error: BaseException | None, seconds: float) -> str:
    """Compare what a cell gave with what it must give; returns what it gave."""
    wanted = expected(cell)
    if wanted is None:
        if error is not None:
            raise error
        assert seconds < AT_ONCE_S
        return "no error"
    assert error is not None, "no error"
    kind, words = wanted
    leaf = failing(cell, error)
    assert type(leaf).__name__ == kind, repr(error)
    assert words in str(leaf)
    if is_run(cell) and kind not in ("RankTimeoutError", "SystemExit", "KeyboardInterrupt"):
        assert isinstance(error, RankError) or cell.phase == "pickling the task"
    assert seconds < told_within_s(cell)
    return kind if leaf is error else f"RankError of {kind}"


POOL_CELLS = [cell for cell in table() if cell.mode in POOL_MODES]
IN_A_CALL = {cell.phase for cell in POOL_CELLS} - {"idle", "at start", "at shutdown"}


def in_a_pool(*phases: str) -> list[Any]:
    """The cells of these phases. An item of a map is a task as that of `submit` is: few of them are slow tests."""
    cells = list[Any]()
    for cell in POOL_CELLS:
        if cell.phase in phases:
            is_slow = cell.mode != "map" or cell.phase == "running"
            cells.append(pytest.param(cell, marks=pytest.mark.slow if is_slow else pytest.mark.faults, id=cell.id))
    return cells


@pytest.mark.parametrize("cell", in_a_pool(*IN_A_CALL))
def test_during_a_call(cell: Cell, executor2: ParallelExecutor, record: Any) -> None:
    """The error names the cause, comes at once, and the pool goes on."""
    assert executor2.run(go_on) == [2, 2]  # whole, after the last cell
    start, error = time.monotonic(), None
    try:
        with ending_hangs(executor2, cell):
            result = call(executor2, cell)
    except BaseException as raised:
        error = raised
    else:
        assert str(result if cell.mode == "submit" else result[-1]) in ("tensor([1., 1., 1.])", "0")
    told = check(cell, error, seconds := time.monotonic() - start)
    start = time.monotonic()
    assert executor2.run(go_on) == [2, 2]
    assert time.monotonic() - start < AT_ONCE_S
    record(told=told, seconds=seconds)


@pytest.mark.parametrize("cell", in_a_pool("idle"))
def test_idle(cell: Cell, executor2: ParallelExecutor, record: Any) -> None:
    """A worker that dies while it has nothing to do is replaced; one that is stopped is a hang of the next call."""
    pids, before = executor2.run(os.getpid), workers()
    if cell.fault == "os._exit(3)":
        executor2.run(leave_soon)
    else:
        os.kill(pids[1], getattr(signal, cell.fault))
    if FAULTS[cell.fault].kind == "death":
        wait_for_replacement(pids[1], before)
    start, error = time.monotonic(), None
    try:
        with ending_hangs(executor2, cell):
            for _ in range(2):  # a single task takes the worker that is free first: both must be asked
                results = {
                    "submit": lambda: [future.result() for future in [executor2.submit(pause, 0.05) for _ in range(2)]],
                    "map": lambda: list(executor2.map(pause, [0.05] * 2)),
                    "run": lambda: executor2.run(pause, 0.05),
                }[cell.mode]()
                assert results == [0.05, 0.05]
    except BaseException as raised:
        error = raised
    told = check(cell, error, seconds := time.monotonic() - start)
    assert executor2.run(go_on) == [2, 2]
    record(told=told, seconds=seconds)


def pause(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def leave_soon() -> None:
    """End this process once its task is over, if it is rank 1."""
    if current_world().rank == 1:
        threading.Thread(target=lambda: (time.sleep(0.05), os._exit(3)), daemon=True).start()


def workers() -> set[int]:
    """The processes of all pools."""
    return set(children_of(forkserver_client.fork_server_pid() or 0))


def wait_for_replacement(pid: int, before: set[int]) -> None:
    """Return when that worker has been replaced: until then the pool may not know of its death."""
    deadline = time.monotonic() + 10
    while pid in (now := workers()) or not now - before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("cell", in_a_pool("at start"))
def test_at_start(cell: Cell, record: Any) -> None:
    """A fault in the initializer is an error of every call, and the block is left at once."""
    fault = FAULTS[cell.fault]
    start = time.monotonic()
    with ParallelExecutor(
        num_workers=2, devices="cpu", timeout=TIMEOUT_S if fault.kind == "hang" else None, initializer=fault.action
    ) as pool:
        for _ in range(2):
            with pytest.raises(ParallelError) as caught:
                call(pool, cell._replace(fault="closed stdout", phase="idle"))
    seconds = time.monotonic() - start
    assert fault.error is not None
    kind, words = fault.error if fault.kind in ("hang", "death") else ("ParallelError", "The initializer failed in")
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    assert fault.error[1] in str(caught.value)
    assert seconds < AT_ONCE_S + TIMEOUT_S * (fault.kind == "hang")
    record(told=kind, seconds=seconds)


@pytest.mark.parametrize("cell", in_a_pool("at shutdown"))
def test_at_shutdown(cell: Cell, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in a task that runs while the pool shuts down is that task's error, and the shutdown ends."""
    pool = ParallelExecutor(num_workers=2, devices="cpu", timeout=TIMEOUT_S if is_hang(cell) else None)
    pool.run(int)
    outcome: list[Any] = []
    handed_in = threading.Event()
    post = EventLoop.post

    def tell(loop: EventLoop, *call: Any) -> None:
        post(loop, *call)
        handed_in.set()

    def make_the_call() -> None:
        try:
            outcome.append(call(pool, cell))
        except BaseException as raised:
            outcome.append(raised)

    monkeypatch.setattr(EventLoop, "post", tell)
    caller = threading.Thread(target=make_the_call)
    start = time.monotonic()
    caller.start()
    assert handed_in.wait(10)
    pool.shutdown()
    caller.join()
    error = outcome[0] if isinstance(outcome[0], BaseException) else None
    seconds = time.monotonic() - start
    record(told=check(cell, error, seconds), seconds=seconds)


# Under a launcher


def on_this_rank(fault_name: str, phase: str, mode: str) -> dict[str, Any]:
    """A cell on a launched rank: what it raised there, and when."""
    fault, timeout = FAULTS[fault_name], TIMEOUT_S if is_hang(Cell(fault_name, phase, mode)) else None
    initialize_ddp()
    on_rank(0, barrier=True)(int)()
    start = time.monotonic()
    if phase == "idle" and dist.get_rank() == 1:
        fault.action()
    try:
        if mode == "launched run":
            ParallelExecutor(timeout=timeout).run(work, fault, phase)
        elif mode == "launched block":
            with ParallelExecutor(timeout=timeout):
                work(fault, phase)
        else:
            on_rank(1, broadcast="result" in phase, timeout=timeout)(work)(fault, phase)
    except BaseException as error:
        failures = error.failures if isinstance(error, RankError) else {0: error}
        leaf = failures.get(1) or next(iter(failures.values()))  # both fail at once where a result cannot be rebuilt
        told = type(error).__name__, type(leaf).__name__, f"{error}\n{leaf}"
    else:
        told = "no error", "", ""
    return {"told": told, "seconds": time.monotonic() - start}


def go_on() -> int:
    initialize_ddp()
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


LAUNCHED_CELLS = [cell for cell in table() if cell.mode in LAUNCHED_MODES]


def needs_fresh_ranks(cell: Cell) -> bool:
    """Whether a rank is gone, or stuck, afterwards."""
    fault = FAULTS[cell.fault]
    return fault.kind in ("death", "harmless") or is_hang(cell)


@contextlib.contextmanager
def fresh_ranks() -> Iterator[Ranks]:
    """Ranks that need not end by themselves."""
    with launched(2) as ranks:
        try:
            yield ranks
        finally:
            for pid in ranks.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def under_a_launcher() -> Iterator[Any]:
    """The cells; of those that start ranks for themselves alone, the slow tests have those of a running function."""
    for cell in LAUNCHED_CELLS:
        is_slow = not needs_fresh_ranks(cell) or cell.phase == "running"
        marks = [pytest.mark.slow] * is_slow + [pytest.mark.faults] * needs_fresh_ranks(cell)
        yield pytest.param(cell, marks=marks, id=cell.id)


@pytest.mark.parametrize("cell", list(under_a_launcher()))
def test_under_a_launcher(cell: Cell, ranks2: Ranks, record: Any) -> None:
    """Rank 0 gets the cause of what befell rank 1, and both go on where both live."""
    fresh = needs_fresh_ranks(cell)
    with fresh_ranks() if fresh else contextlib.nullcontext(ranks2) as ranks:
        (waiting,) = ranks.run(on_this_rank, *cell, only=[0], also=[1])
        if not fresh:
            ranks.finish(1)
        wanted = expected(cell)
        error, leaf, text = waiting["told"]
        if wanted is None:
            assert error == "no error"
        else:
            kind, words = wanted
            # What leaves a rank by its own way out reaches the others described, and here both may leave at once.
            assert kind in (error, leaf) or (leaf == "RemoteError" and kind in text), text
            assert error in ("RankError", "RankTimeoutError", "TransferError") or cell.fault == kind
            assert words in text
        assert waiting["seconds"] < told_within_s(cell)
        if not fresh:
            assert ranks.run(go_on) == [2, 2]
    record(told=error if error == leaf else f"{error} of {leaf}", seconds=waiting["seconds"])


def test_every_cell_is_in_the_table_or_left_out_for_a_reason() -> None:
    """The product of faults, phases and modes is covered: each cell is run by a test above, or says why not."""
    run = set(POOL_CELLS) | set(LAUNCHED_CELLS) | {cell for cell in table() if cell.mode == ON_RAY}  # see test_ray
    for fault in FAULTS:
        for phase in PHASES:
            for mode in MODES:
                cell = Cell(fault, phase, mode)
                assert (cell in run) != bool(left_out(cell))


def test_the_page_is_made_from_the_record_of_a_whole_run() -> None:
    """The docs show what the tests found, for every cell."""
    docs = ROOT / "docs" / "project"
    results = json.loads((docs / "faults.json").read_text())
    assert {name for name, found in results.items() if not of_nodes(found)} == {cell.id for cell in table()}
    assert (docs / "faults.md").read_text() == as_markdown(results) + "\n"
