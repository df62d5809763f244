"""What tests of units promise beside all others: they start no worker, so that all of them take seconds."""

from __future__ import annotations

import pytest

from nn_parallel._engine.pool.forkserver_client import ServerConnection


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Start none, in the place of the fixture that the other folders share."""


@pytest.fixture(autouse=True)
def _no_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a test in tests/unit starts no workers: move it to tests/engine or tests/api")

    monkeypatch.setattr(ServerConnection, "__init__", start)
