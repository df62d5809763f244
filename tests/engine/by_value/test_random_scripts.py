"""Scripts made at random."""

from __future__ import annotations

import sys

import pytest

from nn_parallel import ParallelExecutor
from tests.support.random_scripts import disagreement


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 100))
def test_script_and_worker_agree(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each change of the script, whatever it defines, redefines or changes in place."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with ParallelExecutor(num_workers=1, devices="cpu") as executor:
        for seed in range(first, first + 100):
            assert disagreement(seed, executor) is None
