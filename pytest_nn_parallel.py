"""What every run of pytest loads where nn_parallel is installed: it knows the marker, and costs nothing before that.

Torch, and `nn_parallel.testing`, are imported once a test is marked so.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "ranks(n): run this test on n ranks, each a process on the CPU (nn_parallel).")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Load what runs the marked tests, if there are any."""
    if any(item.get_closest_marker("ranks") for item in items):
        config.pluginmanager.import_plugin("nn_parallel.testing")
