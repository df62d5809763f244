"""One command for whoever has a GPU: ``python -m pytest -m gpu tests/gpu``.

At the end it prints a table for docs/project/tested_on.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from .checks import ALONE, LIMITS_S

AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 3))
SECONDS: dict[str, float] = {}  # that each check has taken
_TABLE = pytest.StashKey[list[tuple[str, str, float]]]()


class Outcome(NamedTuple):
    """The end of a check."""

    exit_code: int | None  # None: it did not end within its limit
    printed: str


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU, where there is none; it has all the time that the limits of the checks give it."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(300))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no GPU that torch can use"))


@pytest.fixture(scope="session")
def checks(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Outcome]]]:
    """The checks that have been chosen, begun in the order of the file, some at the same time."""
    chosen = {item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {name: threads.submit(run_check, name) for name in LIMITS_S if name in chosen - ALONE}


def run_check(name: str) -> Outcome:
    """Run it in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("checks.py")), name]
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment(), start_new_session=True)
        try:
            code: int | None = process.wait(LIMITS_S[name])
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, 9)
            process.wait()
        SECONDS[name] = time.monotonic() - began
        output.seek(0)
        return Outcome(code, output.read())


def _environment() -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "NCCL_DEBUG": "WARN", "PYTHONFAULTHANDLER": "1"}
    return dict(os.environ) | own


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Nothing is looked for: drivers open files and start threads as they like, and checks run at the same time."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Collect the rows of the table."""
    report = yield
    if item.get_closest_marker("gpu") and (report.when == "call" or report.outcome != "passed"):
        name = item.callspec.params["name"] if hasattr(item, "callspec") else item.name
        seconds = SECONDS.get(name, report.duration)
        item.config.stash.setdefault(_TABLE, []).append((name, report.outcome, seconds))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, if anything has run."""
    rows = terminalreporter.config.stash.get(_TABLE, [])
    if not rows or not torch.cuda.is_available():
        return
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    card = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver.stdout.split()[0]}"
    write = terminalreporter.write_line
    write(f"\n{card}, torch {torch.__version__}, NCCL {nccl}, Python {sys.version.split()[0]}\n")
    write("| check | outcome | seconds |\n|---|---|---|")
    for name, outcome, seconds in rows:
        write(f"| {name} | {outcome} | {seconds:.1f} |")
