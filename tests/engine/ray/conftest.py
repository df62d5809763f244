"""What tests on a Ray cluster share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nn_parallel import ParallelExecutor
from tests.support.launchers import PYTHON, environ, finish, popen


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Not asked here: Ray opens files and starts threads of its own in this process, as it likes."""


@pytest.fixture(scope="module")
def executor4(ray_cluster: Any) -> Iterator[ParallelExecutor]:
    with ParallelExecutor(engine="ray", num_workers=4, devices="cpu", placement="spread") as ex:
        yield ex


@pytest.fixture
def script(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a script that uses the cluster; what a test has not finished is ended after it."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or a warning is shown

    def start(text: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(f"import os, signal, sys, time\nfrom nn_parallel import *\n{text}")
        started.append(popen([PYTHON, "script.py"], environ(), tmp_path))
        return started[-1]

    started = list[subprocess.Popen[str]]()
    yield start
    finish([process for process in started if process.returncode is None], 0)
