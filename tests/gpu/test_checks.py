"""The checks of failures on GPUs: see checks.py, each of which is a program of its own."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from .checks import ALONE, BY_NCCL, CHECKS
from .conftest import Outcome, run_check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, checks: dict[str, Future[Outcome]]) -> None:
    """It has ended in time, and raised nothing."""
    if name in BY_NCCL - {"rig"} and "rig" in checks and checks["rig"].result().exit_code != 0:
        pytest.skip("two ranks cannot talk by NCCL on this machine")
    outcome = run_check(name) if name in ALONE else checks[name].result()
    print(outcome.printed)
    assert outcome.exit_code == 0, f"{name}: {'no end' if outcome.exit_code is None else outcome.exit_code}"
