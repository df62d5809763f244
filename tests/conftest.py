"""What every test promises: bounded waits, warnings as errors, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Every store connection looks its peer up in reverse DNS: where a resolver drops that, each would stall for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from nn_parallel.executor import servers, supervisor


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """The one process that may outlive a test ends with the session."""
    yield
    servers.stop_fork_server()
    assert _children() == set()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No child process but the fork server, the same open files, the same environment, nothing new in /dev/shm."""
    before = _state()
    yield
    for pool in list(supervisor.live_supervisors()):
        pool.close()
    after = _state()
    assert after == before


def _state() -> dict[str, object]:
    return {
        "children": _children() - {servers.fork_server_pid()},
        "files": _open_files(),
        "environment": dict(os.environ) | {"PYTEST_CURRENT_TEST": ""},
        "/dev/shm": sorted(os.listdir("/dev/shm")),
    }
