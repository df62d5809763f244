"""A script for the tests of this folder."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tests.support.scripts import HEADER


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of a new ``__main__``, so that no script of its own has to be started for each test."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(HEADER, vars(module))
    return vars(module)
