"""What every test promises: bounded waits, warnings as errors, and nothing left behind."""

from __future__ import annotations

import gc
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Every store connection looks its peer up in reverse DNS: where a resolver drops that, each would stall for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import hypothesis
import pytest

from nn_parallel import ParallelExecutor, initialize_ddp, on_rank
from nn_parallel._engine.descendants import children_of
from nn_parallel._engine.pool import forkserver_client, memory_files
from nn_parallel._engine.ranks import blocks, rendezvous
from nn_parallel.testing import pool_of
from tests.support import laboratory
from tests.support.laboratory import Node
from tests.support.processes import abandoned_in_shared_memory
from tests.support.ranks import AnyRanks, Ranks, launched, rank_forker, rank_forker_pid, stop_rank_forker
from tests.support.scripts import HEADER


def pytest_configure(config: pytest.Config) -> None:
    """Examples may take their time, and Ctrl-C works."""
    hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is nobody's fault
    hypothesis.settings.load_profile("untimed")
    config.stash[SHARED] = {}
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


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Note what several tests share: `_nothing_left_behind` has to tell its files from those of a test."""
    value = yield
    if fixturedef.scope != "function":
        request.config.stash[SHARED][fixturedef.argname] = value
    return value


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """Forget a fixture that has ended."""
    if fixturedef.scope != "function":
        request.config.stash[SHARED].pop(fixturedef.argname, None)


SETTLE_WITHIN_S = 5.0
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # the latter with torch's first optimizer
SHARED = pytest.StashKey[dict[str, object]]()  # the values of fixtures that outlive a test, by their name


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield the names of a new ``__main__``, so that no script of its own has to be started for each test."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(HEADER, vars(module))
    yield vars(module)
    vars(module).clear()  # pytest holds the dict longer, and what it refers to may hold files


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """The two processes that may outlive a test end with the session."""
    rank_forker()
    with ParallelExecutor(num_workers=1, devices="cpu") as ex:
        ex.run(int)
    yield
    forkserver_client.stop_fork_server()
    stop_rank_forker()
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


@pytest.fixture(scope="module")
def executor2() -> Iterator[ParallelExecutor]:
    """A pool of two workers on the CPU, which the tests of a module share."""
    with ParallelExecutor(num_workers=2, devices="cpu") as executor:
        executor.run(_connect)
        yield executor


@pytest.fixture
def own_executor2() -> Iterator[ParallelExecutor]:
    """A pool of two workers on the CPU that a test has for itself, to break it."""
    with ParallelExecutor(num_workers=2, devices="cpu") as executor:
        yield executor


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    """Two launched ranks, which the tests of a module share."""
    with launched(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks3() -> Iterator[Ranks]:
    """Three launched ranks, which the tests of a module share."""
    with launched(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _torchrun_ranks() -> Iterator[AnyRanks]:
    with launched(2, "torchrun") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _env_ranks() -> Iterator[AnyRanks]:
    with launched(3, "env") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _pool_ranks() -> Iterator[AnyRanks]:
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        ex.run(lambda: on_rank([0, 1])(int)())  # connects the ranks to the store, which this process holds
        yield ex


@pytest.fixture(scope="module", params=["executor", "torchrun", "env"])
def any_ranks(request: pytest.FixtureRequest) -> AnyRanks:
    """Ranks that each test shares with the others: two in a pool, two under torchrun, three with variables by hand."""
    fixture = {"executor": "_pool_ranks", "torchrun": "_torchrun_ranks", "env": "_env_ranks"}[request.param]
    ranks: AnyRanks = request.getfixturevalue(fixture)
    return ranks


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No child process but those of `_fork_server`, the same open files and threads, nothing new of ours in /dev/shm.

    The stores that `initialize_ddp` keeps for the life of a process are dropped: here many tests share one.
    """
    shared = request.config.stash[SHARED]
    values = [shared[name] for name in request.fixturenames if name in shared]
    values += [executor for value in values if isinstance(value, dict) for executor in value.values()]
    values += [pool_of(request.config, *marker.args) for marker in request.node.iter_markers("ranks")]
    pools = [value for value in values if isinstance(value, ParallelExecutor)]
    _settle(pools)
    before, abandoned = _state(), abandoned_in_shared_memory()
    yield
    # From Python 3.14 on, `multiprocessing` starts these two for the first worker of a `DataLoader`, and keeps them.
    if multiprocessing.resource_tracker._resource_tracker._fd is not None:
        gc.collect()  # semaphores that are still there would be removed by the tracker, and again by their owners
        multiprocessing.forkserver._forkserver._stop()
        multiprocessing.resource_tracker._resource_tracker._stop()
    rendezvous._stores.clear()
    blocks._hosted.clear()
    blocks._current = None
    _settle(pools)
    deadline = time.monotonic() + SETTLE_WITHIN_S
    while (_state() != before or abandoned_in_shared_memory() - abandoned) and time.monotonic() < deadline:
        time.sleep(0.01)  # a store closes the connection of a rank that has ended when it gets to it
    assert _state() == before
    assert abandoned_in_shared_memory() <= abandoned


def _settle(pools: list[ParallelExecutor]) -> None:
    for pool in pools:
        pool.run(_connect)


def _connect() -> None:
    """As a rank: have all connections to the store in the parent that there can be, and none that was closed before."""
    world = initialize_ddp()
    on_rank(list(range(world.world_size)))(int)()
    gc.collect()  # a traceback may hold an old one


def _state() -> dict[str, object]:
    memory_files._reusable_files.clear()  # files of this process that wait to be filled again
    return {
        "children": set(children_of(os.getpid())) - {forkserver_client.fork_server_pid(), rank_forker_pid()},
        "files": Counter(_open_files()),
        "environment": {name: value for name, value in os.environ.items() if name not in SET_BY_OTHERS},
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def _open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing itself
            continue
        yield target.split(":")[0] if target.startswith(("socket:", "pipe:", "/memfd:stack of")) else target
