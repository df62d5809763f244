"""An import of the package is not interrupted by the garbage collector."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("set_before", ["enable", "disable"])
def test_an_import_is_not_interrupted_by_collections(set_before: str) -> None:
    """What is due is done before or after, and the collector is left as it was."""
    code = f"""
import gc, sys, torch
def imported():
    return sum(name.startswith("nn_parallel.") for name in sys.modules)
seen = []
gc.{set_before}()
gc.callbacks.append(lambda phase, info: seen.append(imported()))
before = gc.isenabled()
import nn_parallel
print(gc.isenabled() == before, [count for count in seen if 1 < count < imported()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
