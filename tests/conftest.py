"""What every test promises: bounded waits, warnings as errors, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

# Every store connection looks its peer up in reverse DNS: where a resolver drops that, each would stall for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import hypothesis
import laboratory
import pytest
from laboratory import Node
from ranks import launched, trim

from nn_parallel import ParallelExecutor, initialize_ddp, on_rank
from nn_parallel._engine.descendants import children_of
from nn_parallel._engine.pool import forkserver_client
from nn_parallel._engine.ranks import rendezvous
from nn_parallel.testing import pool_of


def pytest_configure(config: pytest.Config) -> None:
    """Examples may take their time, and Ctrl-C works."""
    hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is nobody's fault
    hypothesis.settings.load_profile("untimed")
    # A shell without job control has what it starts in the background ignore Ctrl-C; the tests of that must not.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where CI is set, a skipped test is a failure: CI has, or installs, everything that a test needs."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter.stats.get("skipped") and exitstatus == 0:
        reporter.write_line("skipped tests are failures where CI is set", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-results", metavar="FILE", help="record what the table of faults gives, and resume it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells of the table of faults that are recorded already; give the slow tests their time."""
    name = config.getoption("--fault-results")
    done = json.loads(Path(name).read_text()) if name and os.path.exists(name) else {}
    items[:] = [item for item in items if getattr(item, "callspec", None) is None or item.callspec.id not in done]
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(600))  # they train, which takes a busy machine long


STAND_IN = str(Path(__file__).with_name("stand_in"))  # for PYTHONPATH: processes then have a made-up accelerator
SETTLE_WITHIN_S = 5.0
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # the latter with torch's first optimizer
TORCH_MADE = re.compile(r"torch_(\d+)_")  # in /dev/shm, by the process of this number
LASTING = ("world", "pools", "shared_ranks", "two", "three", "cluster")  # fixtures that outlive a test


class World(Protocol):
    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn`` on every rank; the results in rank order."""


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """The one process that may outlive a test ends with the session."""
    with ParallelExecutor(num_workers=1, devices="cpu") as ex:
        ex.run(int)
    yield
    forkserver_client.stop_fork_server()
    assert children_of(os.getpid()) == []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two of them, see `laboratory`."""
    if not laboratory.is_possible():
        pytest.skip("needs root and iproute2, to make namespaces")
    with laboratory.laboratory(tmp_path) as both:
        yield both


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A cluster of Ray with two nodes of four CPUs each, on this machine; this process is connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    nodes.add_node(num_cpus=4)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Write down what a cell of the table of faults gave, if a file for it was named."""

    def write(**found: Any) -> None:
        if name := request.config.getoption("--fault-results"):
            path = Path(name)
            results = json.loads(path.read_text()) if path.exists() else {}
            results[request.node.callspec.id] = found
            path.with_suffix(".new").write_text(json.dumps(results, indent=1))
            path.with_suffix(".new").replace(path)

    return write


@pytest.fixture(scope="session")
def _torchrun_ranks() -> Iterator[World]:
    with launched(2, "torchrun") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _env_ranks() -> Iterator[World]:
    with launched(3, "env") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _pool_ranks() -> Iterator[World]:
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        ex.run(lambda: on_rank([0, 1])(int)())  # connects the ranks to the store, which this process holds
        yield ex


@pytest.fixture(params=["executor", "torchrun", "env"])
def world(request: pytest.FixtureRequest) -> World:
    """Ranks that each test shares with the others: two in a pool, two under torchrun, three with variables by hand."""
    fixture = {"executor": "_pool_ranks", "torchrun": "_torchrun_ranks", "env": "_env_ranks"}[request.param]
    ranks: World = request.getfixturevalue(fixture)
    return ranks


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No child process but the fork server, the same open files and threads, nothing new of ours in /dev/shm.

    The stores that `initialize_ddp` keeps for the life of a process are dropped: here many tests share one.
    """
    lasting = [request.getfixturevalue(name) for name in LASTING if name in request.fixturenames]
    lasting += [pool for fixture in lasting if isinstance(fixture, dict) for pool in fixture.values()]
    lasting += [pool_of(request.config, *marker.args) for marker in request.node.iter_markers("ranks")]
    pools = [fixture for fixture in lasting if isinstance(fixture, ParallelExecutor)]
    _settle(pools)
    before, abandoned = _state(), abandoned_in_shared_memory()
    yield
    rendezvous._stores.clear()
    _settle(pools)
    deadline = time.monotonic() + SETTLE_WITHIN_S
    while (_state() != before or abandoned_in_shared_memory() - abandoned) and time.monotonic() < deadline:
        time.sleep(0.01)  # a store closes the connection of a rank that has ended when it gets to it
    assert _state() == before
    assert abandoned_in_shared_memory() <= abandoned


def _settle(pools: list[ParallelExecutor]) -> None:
    for pool in pools:
        pool.run(_connect)
        trim(pool)


def _connect() -> None:
    """As a rank: have all connections to the store in the parent that there can be, and none that was closed before."""
    world = initialize_ddp()
    on_rank(list(range(world.world_size)))(int)()
    gc.collect()  # a traceback may hold an old one


def _state() -> dict[str, object]:
    return {
        "children": set(children_of(os.getpid())) - {forkserver_client.fork_server_pid()},
        "files": Counter(_open_files()),
        "environment": {name: value for name, value in os.environ.items() if name not in SET_BY_OTHERS},
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def abandoned_in_shared_memory() -> set[str]:
    """The files in /dev/shm of processes that were killed as they sent a tensor: torch names each after its process.

    All else there belongs to other programs, or to a process that lives and is about to remove it.
    """
    names = os.listdir("/dev/shm")
    return {name for name in names if (made := TORCH_MADE.match(name)) and not os.path.exists(f"/proc/{made[1]}")}


def wait_for_state(pid: int, state: str) -> None:
    """Return once all threads of a process are in this state, as the kernel names it."""

    def differs(stat: Path) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            return stat.read_text().rpartition(")")[2].split()[0] != state
        return False

    while any(map(differs, Path(f"/proc/{pid}/task").glob("*/stat"))):
        time.sleep(0.001)


def _open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing itself
            continue
        yield target.split(":")[0] if target.startswith(("socket:", "pipe:", "/memfd:stack of")) else target
