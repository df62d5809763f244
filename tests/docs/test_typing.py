"""The types of the public names, as a type checker sees them from outside the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nn_parallel
from tests.support.paths import ROOT

USES = Path(__file__).with_name("public_types.py")


@pytest.mark.slow
def test_right_uses_have_their_types_and_wrong_uses_are_errors() -> None:
    """Mypy agrees with each `assert_type`, and needs each ``type: ignore``."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(USES)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_used() -> None:
    """A new public name needs a statement of its types."""
    used = {node.id for node in ast.walk(ast.parse(USES.read_text())) if isinstance(node, ast.Name)}
    assert set(nn_parallel.__all__) - used == set()
