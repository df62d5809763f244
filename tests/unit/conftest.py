"""What tests of units promise beside all others: they start no worker, so that all of them take seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nn_parallel._engine.pool import forkserver_client


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Start none, in the place of the fixture that the other folders share."""


@pytest.fixture(autouse=True)
def _no_worker_is_started() -> Iterator[None]:
    before = forkserver_client.fork_server_pid()
    yield
    assert forkserver_client.fork_server_pid() == before
