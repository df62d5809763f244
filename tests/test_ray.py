"""`ParallelExecutor(engine="ray")` on a real cluster of Ray: two nodes on this machine, with four workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from nn_parallel import (
    ExecutorClosedError,
    LaunchError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    TransferError,
    WorkerDiedError,
    initialize_ddp,
    on_rank,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray's own
GONE_WITHIN_S = 5.0


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Not asked here: Ray opens files and starts threads of its own in this process, as it likes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def pool(cluster: Any) -> Iterator[ParallelExecutor]:
    with ParallelExecutor(engine="ray", num_workers=4, devices="cpu") as ex:
        yield ex


def add_up(device: torch.device) -> tuple[Any, ...]:
    here, number = initialize_ddp(), torch.ones(1)
    dist.all_reduce(number.mul_(here.rank + 1))
    return here.rank, here.local_rank, here.node_rank, here.local_world_size, str(device), number.item()


WORLD = [(0, 0, 0, 2, "cpu", 10.0), (1, 1, 0, 2, "cpu", 10.0), (2, 0, 1, 2, "cpu", 10.0), (3, 1, 1, 2, "cpu", 10.0)]


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_the_ranks_of_a_run_are_one_world(pool: ParallelExecutor) -> None:
    """By nodes; with a process group across these, and `on_rank` inside."""
    assert pool.run(add_up) == WORLD
    assert len(set(pool.run(on_rank(3, broadcast=True)(os.getpid)))) == 1


def test_calls(pool: ParallelExecutor) -> None:
    """All that a pool on one machine does."""
    assert list(pool.map(lambda number: number**2, range(20))) == [number**2 for number in range(20)]
    assert list(pool.map(lambda number: number**2, range(20), chunksize=3)) == [number**2 for number in range(20)]
    assert pool.submit(pow, 2, 10).result() == 1024
    data = torch.arange(1 << 20)
    handle = pool.put(data)
    assert pool.run(lambda tensor: tensor.sum().item(), handle) == [data.sum().item()] * 4
    assert all(torch.equal(tensor, data) for tensor in pool.run(lambda tensor: tensor, data))
    data.share_memory_()
    assert all(torch.equal(tensor, data) for tensor in pool.run(lambda tensor: tensor, data))
    assert [box.value for box in pool.run(lambda box: Box(box.value + 1), Box(1))] == [2] * 4


def raise_value_error() -> None:
    raise ValueError("a bad batch")


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fail", "kind"),
    [(raise_value_error, ValueError), (kill_oneself, WorkerDiedError), (lambda: os._exit(3), WorkerDiedError)],
)
@pytest.mark.parametrize("waits_in", ["collective", "sleep"])
def test_a_rank_fails(fail: Callable[[], None], kind: type[Exception], waits_in: str, pool: ParallelExecutor) -> None:
    """All others are freed at once, on both nodes, and the pool is whole again."""

    def work() -> None:
        here = initialize_ddp()
        if here.rank == 3:
            fail()
        if waits_in == "sleep":
            time.sleep(100)
        dist.all_reduce(torch.ones(1))

    pool.run(add_up)
    began = time.monotonic()
    with pytest.raises(RankError) as raised:
        pool.run(work)
    assert {rank: type(error) for rank, error in raised.value.failures.items()} == {3: kind}
    assert time.monotonic() - began < GONE_WITHIN_S
    assert pool.run(add_up) == WORLD


def test_a_task_fails_alone(pool: ParallelExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
    with pytest.raises(WorkerDiedError, match="exited with code 3"):
        pool.submit(os._exit, 3).result()
    with pytest.raises(TransferError):
        pool.run(lambda lock: None, threading.Lock())
    with pytest.raises(RankError) as raised:
        pool.run(threading.Lock)
    assert {type(error) for error in raised.value.failures.values()} == {TransferError}


def test_timeout_tells_where_the_ranks_of_all_nodes_stand(cluster: Any, pool: ParallelExecutor) -> None:
    def work(device: Any = None) -> None:
        time.sleep(100)

    began = time.monotonic()
    pool._options = (before := pool._options)._replace(timeout_s=1.0)
    try:
        with pytest.raises(RankTimeoutError) as raised:
            pool.run(work)
    finally:
        pool._options = before
    assert raised.value.ranks == [0, 1, 2, 3]
    assert all("in work" in stack for stack in raised.value.stacks.values())
    assert time.monotonic() - began < 1 + GONE_WITHIN_S
    assert pool.run(add_up) == WORLD


def test_bad_input(cluster: Any, pool: ParallelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a clear error."""
    for wrong in ({"engine": "dask"}, {"engine": "ray", "placement": "x"}, {"resources_per_worker": {"CPU": 1}}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            ParallelExecutor(**wrong)
    with pytest.raises(ValueError, match="Ray chooses them"):
        ParallelExecutor(engine="ray", devices="0,1")
    with pytest.raises(LaunchError, match="no room for 2 workers with 1 CPU and 1 GPU within 1 s.*has 4 CPU"):
        ParallelExecutor(engine="ray", num_gpus=2, wait_for_resources=1)


def test_a_node_is_gone(cluster: Any, pool: ParallelExecutor) -> None:
    """In a collective: its ranks have died, soon; on another node the pool is whole again. Then it is closed."""

    def work() -> None:
        initialize_ddp()
        while True:
            dist.all_reduce(torch.ones(1))

    [node], killed_at = cluster.worker_nodes, list[float]()

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    timer = threading.Timer(1, kill)
    timer.start()
    with pytest.raises(RankError) as raised:
        pool.run(work)
    assert time.monotonic() - killed_at[0] < GONE_WITHIN_S
    assert {rank: type(error) for rank, error in raised.value.failures.items()} == dict.fromkeys(
        (2, 3), WorkerDiedError
    )
    cluster.remove_node(node)
    cluster.add_node(num_cpus=2)
    assert pool.run(add_up) == WORLD
    pool.resize(2)
    assert len(pool.run(add_up)) == 2
    pool.shutdown()
    with pytest.raises(ExecutorClosedError):
        pool.run(int)
