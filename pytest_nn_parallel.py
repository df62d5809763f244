"""The pytest plugin that every run of pytest loads if nn_parallel is installed. It registers the marker ``ranks``.

The plugin `nn_parallel.testing` runs the tests with this marker. It imports torch, which takes seconds, so it is loaded
only if there is such a test.
"""

from __future__ import annotations

import importlib

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``ranks``, so that pytest does not report it as unknown."""
    config.addinivalue_line("markers", "ranks(n): run this test on n ranks, each a process on the CPU (nn_parallel).")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Load the plugin that runs the tests with the marker ``ranks``, if there are any."""
    name = "nn_parallel.testing"
    if any(item.get_closest_marker("ranks") for item in items) and not config.pluginmanager.has_plugin(name):
        # `import_plugin` is not used: it warns if the module is imported already, because it can then no longer rewrite
        # the ``assert`` statements of the module.
        config.pluginmanager.register(importlib.import_module(name), name)
