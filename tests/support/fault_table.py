"""The table of faults: what can go wrong, when and where, and what must come of it. As a script, it prints the table.

``python -m tests.support.fault_table results.json`` prints what was measured by ``pytest --fault-results results.json
-m faults``.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nn_parallel import current_world, initialize_ddp
from tests.support.node_rank import TIMEOUT_S as NODES_TIMEOUT_S

MAX_WORDS = 160
TIMEOUT_S = 1.0  # of the executor, or of on_rank, in the rows that need one


class Unpicklable(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class KeywordOnly(Exception):
    """An exception that pickles, and cannot be unpickled."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def raise_exception() -> None:
    raise ValueError("bad batch")


def raise_unpicklable() -> None:
    raise Unpicklable("strange")


def raise_keyword_only() -> None:
    raise KeywordOnly(code=3)


def raise_system_exit() -> None:
    raise SystemExit(3)


def raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def exit_at_once() -> None:
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's faulthandler would print
    ctypes.string_at(0)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_endlessly() -> None:
    while True:
        pass


def sleep_long() -> None:
    time.sleep(60)


def hold_the_gil() -> None:
    sum(range(200_000_000))  # some seconds


def wait_for_nobody() -> None:
    initialize_ddp()
    if current_world().rank == 1:
        dist.all_reduce(torch.ones(1))


def wait_for_a_failed_peer() -> None:
    initialize_ddp()
    if current_world().rank == 1:
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))


def run_out_of_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def recurse() -> None:
    recurse()


def close_stdout() -> None:
    sys.stdout.close()


def forbid_files_to_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def use_up_file_descriptors() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    files = []
    try:
        while True:
            files.append(open("/dev/null"))  # noqa: SIM115
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    ``error`` is what the failing function is known by where it ran in time and could be described: a type, and words of
    the message. None: no error comes of it, and the result arrives.
    """

    name: str
    action: Callable[[], None]
    error: tuple[str, str] | None
    kind: str = "exception"  # "exception", "leaving" (SystemExit, ...), "death", "hang", "peer", "harmless"


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("exception", raise_exception, ("ValueError", "bad batch")),
        Fault("exception that does not pickle", raise_unpicklable, ("RemoteError", "Unpicklable: strange")),
        Fault("exception with keyword-only arguments", raise_keyword_only, ("RemoteError", "KeywordOnly: code 3")),
        Fault("SystemExit", raise_system_exit, ("RemoteError", "SystemExit: 3"), "leaving"),
        Fault("KeyboardInterrupt", raise_keyboard_interrupt, ("RemoteError", "KeyboardInterrupt"), "leaving"),
        Fault("os._exit(3)", exit_at_once, ("WorkerDiedError", "exited with code 3"), "death"),
        Fault("SIGKILL", be_killed, ("WorkerDiedError", "SIGKILL"), "death"),
        Fault("SIGSEGV", segfault, ("WorkerDiedError", "SIGSEGV"), "death"),
        Fault("SIGSTOP", be_stopped, ("RankTimeoutError", "stopped"), "hang"),
        Fault("endless loop", loop_endlessly, ("RankTimeoutError", "in loop_endlessly"), "hang"),
        Fault("sleep", sleep_long, ("RankTimeoutError", "in sleep_long"), "hang"),
        Fault("C call that holds the GIL", hold_the_gil, ("RankTimeoutError", "C code holds the GIL"), "hang"),
        Fault("collective that a peer never enters", wait_for_nobody, ("ParallelError", "can never end"), "peer"),
        Fault(
            "collective that a peer left by an exception", wait_for_a_failed_peer, ("ValueError", "bad batch"), "peer"
        ),
        Fault("out of memory", run_out_of_memory, ("MemoryError", "")),
        Fault("recursion to the limit", recurse, ("RecursionError", "maximum recursion")),
        Fault("closed stdout", close_stdout, None, "harmless"),
        Fault("files must not grow", forbid_files_to_grow, None, "harmless"),
        Fault("no file descriptors left", use_up_file_descriptors, ("OSError", "Too many open files")),
        Fault("result does not pickle", threading.Lock, ("TransferError", "The result is a _thread.lock"), "result"),
        Fault("result does not unpickle", raise_exception, ("TransferError", "cannot be rebuilt"), "result"),
    )
}
PHASES = (
    "pickling the task",
    "unpickling the task",
    "running",
    "pickling the result",
    "unpickling the result",
    "idle",
    "at start",
    "at shutdown",
)
POOL_MODES = ("submit", "map", "run")
ON_RAY = "run on Ray"  # one rank on each of two nodes
LAUNCHED_MODES = ("launched run", "launched block", "on_rank")
MODES = (*POOL_MODES, ON_RAY, *LAUNCHED_MODES)


class Cell(NamedTuple):
    """One place in the table."""

    fault: str
    phase: str
    mode: str

    @property
    def id(self) -> str:
        return "-".join(self).replace(" ", "_")


def left_out(cell: Cell) -> str | None:
    """Why a cell makes no sense; None if it does."""
    fault, phase, mode = FAULTS[cell.fault], cell.phase, cell.mode
    launched = mode in LAUNCHED_MODES
    if fault.kind == "result":
        wanted = "pickling the result" if "not pickle" in fault.name else "unpickling the result"
        if phase != wanted:
            return f"it can only happen {wanted}"
        if mode == "launched block":
            return "a block has no result"
    if fault.kind == "peer":
        if mode in ("submit", "map"):
            return "a single task is alone: it has no peers"
        if phase != "running":
            return "a collective is entered by a running function"
        if mode == "on_rank":
            return "one rank runs it, so it has no peer in the function"
    in_parent = phase in ("pickling the task", "unpickling the result") and not launched
    if in_parent and fault.kind not in ("exception", "leaving", "result"):
        return "this is the user's own code in the user's own process, which nobody else can end"
    if launched and phase in ("pickling the task", "unpickling the task"):
        return "every rank has the function and its arguments already"
    if launched and phase == "unpickling the result" and fault.kind not in ("exception", "leaving", "result"):
        return "this is the user's own code on every rank at once"
    if mode == "launched block" and "result" in phase:
        return "a block has no result"
    if phase == "idle" and fault.kind != "death" and fault.name != "SIGSTOP":
        return "no user code runs in an idle process"
    if phase == "at start" and launched:
        return "nothing of ours runs before the launcher's ranks do"
    if phase == "at start" and fault.kind == "harmless":
        return "it does nothing there that it does not do while running"
    if phase == "at shutdown" and mode == ON_RAY:
        return "a run on Ray is over before the workers are told to leave"
    if phase == "at shutdown" and launched:
        return "a launched executor ends no process: the end of the block is the row of its own"
    return None


def table() -> list[Cell]:
    """Every cell that makes sense."""
    return [cell for cell in map(Cell._make, itertools.product(FAULTS, PHASES, MODES)) if left_out(cell) is None]


def expected(cell: Cell) -> tuple[str, str] | None:
    """The type and words of the error that a cell must give, as `Fault.error`; None: the result arrives."""
    fault = FAULTS[cell.fault]
    if fault.kind == "result" or fault.error is None:
        return fault.error
    if cell.phase == "pickling the task" and fault.kind == "leaving":
        return cell.fault, ""  # the caller's own way out
    if cell.phase == "unpickling the result" and cell.fault == "KeyboardInterrupt" and cell.mode in LAUNCHED_MODES:
        return cell.fault, ""  # the same: it may be the user's
    if cell.phase in ("pickling the task", "unpickling the task", "unpickling the result") and fault.kind in (
        "exception",
        "leaving",
    ):
        return "TransferError", ""
    if cell.phase == "pickling the result" and fault.kind == "exception":
        return "TransferError", "The result is a "
    if cell.mode in LAUNCHED_MODES and fault.kind == "death":
        return "WorkerDiedError", "ended before it finished"  # its exit code is the launcher's to know
    if cell.mode == "on_rank" and fault.kind == "hang":
        return "RankTimeoutError", "Rank 0 waited"  # slow is not dead: it goes on
    if cell.mode in LAUNCHED_MODES and cell.fault in ("SIGSTOP", "C call that holds the GIL"):
        return "RankTimeoutError", "Rank 0 waited"  # that rank cannot say where it stands
    if cell.phase == "idle" and fault.kind == "death" and cell.mode == ON_RAY:
        return "WorkerDiedError", "died while"  # the other ranks have begun when Ray tells of it
    if cell.mode == ON_RAY and fault.kind == "death":
        return "WorkerDiedError", "died while"  # its exit code is Ray's to know
    if cell.mode == ON_RAY and cell.fault in ("SIGSTOP", "C call that holds the GIL"):
        return "RankTimeoutError", "did not tell its stack"  # nobody on its node asks in another way
    if cell.phase == "idle" and fault.kind == "death":
        return None  # the worker is replaced; whoever calls next does not notice
    return fault.error


class OnPickle:
    """Something happens when this is pickled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __reduce__(self) -> Any:
        self._action()
        return int, ()


class OnUnpickle:
    """Something happens when this is unpickled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __reduce__(self) -> Any:
        return _happen, (self._action,)


def _happen(action: Callable[[], None]) -> int:
    action()
    return 0


def work(fault: Fault, phase: str, argument: object = None) -> Any:
    """What a task does for a cell: the fault, on rank 1 of several or in a single task."""
    world = current_world()
    if fault.kind == "peer":
        fault.action()
        return torch.ones(3)
    if world.world_size > 1 and world.rank != 1:
        return torch.ones(3)
    if fault.name == "result does not pickle":
        return threading.Lock()
    if phase in ("running", "at shutdown"):
        fault.action()
    if phase == "pickling the result":
        return OnPickle(fault.action)
    if phase == "unpickling the result":
        return OnUnpickle(fault.action)
    return torch.ones(3)


def as_markdown(results: dict[str, dict[str, Any]]) -> str:
    """The page of the docs, from the record of a run: what came of each cell, and after how long."""
    lines = [HEAD, "| fault | phase | " + " | ".join(MODES) + " |", "|---|---|" + "---|" * len(MODES)]
    reasons: dict[str, int] = {}
    for fault, phase in itertools.product(FAULTS, PHASES):
        cells = [Cell(fault, phase, mode) for mode in MODES]
        told = [_told(results.get(cell.id)) for cell in cells]
        if any(told):
            lines.append(f"| {fault} | {phase} | " + " | ".join(told) + " |")
        for reason in filter(None, map(left_out, cells)):
            reasons[reason] = reasons.get(reason, 0) + 1
    lines += ["", "The other cells are left out:", ""]
    lines += [f"- {count}: {reason}" for reason, count in reasons.items()]
    lines += [HEAD_OF_NODES, "| fault | started by | ranks 0 and 1 | ranks 2 and 3 |", "|---|---|---|---|"]
    for found in filter(of_nodes, results.values()):
        sides = [_told_by_side(found["sides"].get(half)) for half in "01"]
        lines.append(f"| {found['fault']} | {found['launcher']} | " + " | ".join(sides) + " |")
    return "\n".join(lines)


def of_nodes(found: dict[str, Any]) -> bool:
    """Whether it is of the second table, that of `test_nodes`."""
    return "sides" in found


def _told_by_side(found: list[Any] | None) -> str:
    if found is None:
        return "nothing: it is off"
    error, seconds, words = found
    if not words:
        return error
    words = " ".join(re.sub(r"pid \d+", "pid ...", words).split())
    if len(words) > MAX_WORDS:
        words = f"{words[: MAX_WORDS // 2]} [...] {words[-MAX_WORDS // 2 :]}"
    return f"{error}, {seconds:.1f} s: {words}"


def _told(found: dict[str, Any] | None) -> str:
    return f"{found['told'].removesuffix(' of ')}, {found['seconds'] * 1e3:.0f} ms" if found else ""


HEAD = f"""# Fault records

This page is the record behind the table of [failure modes](../explanation/failure_modes.md). Rank 1 of 2 has the fault
of the first column. A cell holds the error that the caller gets (under a launcher: rank 0) and the time since the call
began. The time of a hang contains a `timeout` of {TIMEOUT_S * 1e3:.0f} ms. Afterwards the pool goes on, or both ranks
do if they live, and no process, file or shared memory is left. On Ray the two ranks are on two nodes of one machine.
The figures are from one run on two cores. `python -m tests.support.fault_table docs/project/faults.json` prints this
page.
"""

HEAD_OF_NODES = f"""
## Several nodes

Four ranks add numbers up, two on each of two nodes, or all on one node. Rank 3 or the second node has the fault. A cell
holds what the first rank of each half gets: the error, its time, and the words of the error or above its traceback. The
timeout of the collectives is {NODES_TIMEOUT_S:g} s, so a node counts as lost when it has not answered for half of that.
Nothing is left on a node. The figures are from one run on virtual nodes (`tests/support/laboratory.py`), recorded by
`python -m pytest -m faults tests/faults/test_nodes.py --fault-results docs/project/faults.json`.
"""

if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(as_markdown(json.load(file)))
