"""`parallelize_on_gpus` over processes, and the utilities of the old toolkit called as its page calls them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nn_parallel import (
    ParallelError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    on_rank,
    parallel_on_all_devices,
    parallelize_on_gpus,
)
from nn_parallel._engine.devices import cpu_count
from nn_parallel._engine.pool import backend, forkserver_client
from tests.support.ranks import launched


@pytest.fixture(autouse=True)
def _no_shared_pool_is_left(_nothing_left_behind: None) -> Iterator[None]:
    """The shared pools, which would live for another minute, end with each test."""
    yield
    while backend._shared:
        backend._shared.popitem()[1].shutdown(True, False)


def test_every_device_runs_it() -> None:
    """Two results from two processes, the device bound by name, the decorated function's name kept."""

    @parallelize_on_gpus(num_gpus=2)
    def double(device: torch.device, data: torch.Tensor) -> Any:
        """Doubles."""
        return data.to(device) * 2, os.getpid(), current_world().rank

    results = double(torch.tensor([1, 2, 3]))
    assert [result[0].tolist() for result in results] == [[2, 4, 6]] * 2
    assert [result[2] for result in results] == [0, 1]
    assert len({result[1] for result in results} | {os.getpid()}) == 3
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")


def test_functions_with_the_same_devices_share_warm_processes() -> None:
    """Another function and another call find the same processes; an exception does not end them for good."""

    @parallelize_on_gpus(num_gpus=2)
    def pids() -> int:
        return os.getpid()

    @parallelize_on_gpus(num_gpus=2)
    def also(fail: bool) -> int:
        if fail:
            raise ValueError("here")
        return os.getpid()

    first = pids()
    assert also(False) == first == pids()
    with pytest.raises(RankError, match=r"also\(\) failed on rank [01] of 2.*ValueError: here"):
        also(True)
    assert len(also(False)) == 2


def test_functions_that_are_called_in_other_ways_share_them_too() -> None:
    """There is one pool for a set of devices, however that is named; each function has its own options."""

    @parallelize_on_gpus(num_gpus=2)
    def pids(device: torch.device | None = None) -> Any:
        return os.getpid(), device

    @parallelize_on_gpus(devices=["cpu", torch.device("cpu")], pass_device=False, timeout=2)
    def also(sleep_s: float, device: torch.device | None = None) -> Any:
        time.sleep(sleep_s)
        return os.getpid(), device

    first = pids()
    assert [device for _, device in first] == [torch.device("cpu")] * 2
    assert also(0) == [(pid, None) for pid, _ in first]
    with pytest.raises(RankTimeoutError, match=r"also\(\) did not end within timeout=2 s"):
        also(3600)

    @parallelize_on_gpus(2, pass_device=False)
    def slow() -> None:
        time.sleep(1)

    assert slow() == [None, None]
    assert len(backend._shared) == 1


def test_a_device_may_be_given_itself() -> None:
    """As to the executor."""
    assert len(parallelize_on_gpus(devices=torch.device("cpu"))(int)()) == cpu_count()


def test_a_process_that_is_alone_after_a_fallback_keeps_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no ranks to run on."""
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="Running alone"):
        initialize_ddp(fallback=True)
    try:
        pid = parallelize_on_gpus(1)(os.getpid)
        assert pid() == pid() != [os.getpid()]
    finally:
        cleanup_ddp()


@pytest.mark.slow
def test_a_pool_that_cannot_go_on_is_replaced_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the decorator could make another."""
    monkeypatch.setattr(forkserver_client, "_fork_server", None)  # not the one that the other tests share
    try:
        sleep = parallelize_on_gpus(num_gpus=1)(time.sleep)
        sleep(0)
        threading.Timer(0.1, os.kill, (forkserver_client.fork_server_pid(), signal.SIGKILL)).start()
        with pytest.raises(ParallelError, match="fork server has ended"):
            sleep(3600)
        assert sleep(0) == [None]
        (pool,) = backend._shared.values()
        os.kill(forkserver_client.fork_server_pid() or 0, signal.SIGKILL)
        pool.shutdown()
        assert sleep(0) == [None]  # nothing was lost
    finally:
        backend._shared.popitem()[1].shutdown(True, False)
        forkserver_client.stop_fork_server()


def test_an_idle_pool_ends_and_the_next_call_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its idle time the processes are gone; a call finds new ones."""
    monkeypatch.setattr(backend, "SHARED_IDLE_LIMIT_S", 0.1)

    @parallelize_on_gpus(num_gpus=1)
    def pid() -> int:
        return os.getpid()

    (first,) = pid()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{first}"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (second,) = pid()
    assert second != first


def test_bad_arguments_are_said_at_the_call() -> None:
    """As for the executor."""
    with pytest.raises(ValueError, match="num_gpus=0"):
        parallelize_on_gpus(num_gpus=0)(print)()
    with pytest.raises(TypeError, match="both choose"):
        parallelize_on_gpus(2, devices="cpu")(print)()


def _the_old_page() -> dict[str, Any]:
    """The calls of the old toolkit's page, alone or as one of several ranks; what they gave."""
    seen: dict[str, Any] = {}
    distributed, _rank, local_rank, _world_size, device = initialize_ddp()
    model: torch.nn.Module = torch.nn.Linear(2, 2).to(device)
    if distributed:
        model = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[local_rank] if device.type == "cuda" else None
        )
    seen["model"] = model(torch.ones(1, 2, device=device)).shape

    @on_rank(0)
    def save_model(model: torch.nn.Module) -> str:
        return "saved"

    @on_rank([0, 1])
    def process_data(data: int) -> int:
        return data + 1

    seen["saved"], seen["processed"] = save_model(model), process_data(1)

    @parallelize_on_gpus()
    def process_on_gpu(device: torch.device, data: torch.Tensor) -> torch.Tensor:
        return data.to(device) * 2

    seen["all"] = [r.tolist() for r in process_on_gpu(torch.tensor([1, 2, 3]))]

    @parallelize_on_gpus()
    def matrix_multiply(device: torch.device, size: int = 1000, iterations: int = 10) -> Any:
        a, b = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
        for _ in range(iterations):
            a = torch.matmul(a, b) / size
        return a.cpu().numpy()

    products = matrix_multiply(size=20, iterations=2)
    seen["products"] = [float(np.mean(p)) for p in products]

    @parallelize_on_gpus(num_gpus=2)
    def another_gpu_function(device: torch.device, x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x + y).to(device)

    seen["another"] = [r.tolist() for r in another_gpu_function(torch.tensor([1, 2]), torch.tensor([3, 4]))]

    def heavy_computation(device: torch.device, data: torch.Tensor) -> Any:
        return data.to(device) * 2, os.getpid()

    with ParallelExecutor(num_gpus=2) as executor:
        results = executor.run(heavy_computation, torch.tensor([1, 2, 3]))
    seen["heavy"] = [data.tolist() for data, _ in results]
    seen["processes"] = len({pid for _, pid in results})

    @parallel_on_all_devices
    def forward(chunk: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, device=chunk.device) * len(chunk)

    seen["forward"] = forward(torch.randn(128, 10)).sum().item()
    return seen


def _check_what_both_ways_give(seen: dict[str, Any]) -> None:
    assert seen["another"] == [[4, 6]] * 2
    assert (seen["heavy"], seen["processes"]) == ([[2, 4, 6]] * 2, 2)
    assert seen["forward"] == 128


def test_the_old_page_alone() -> None:
    """Alone: one result per CPU worker."""
    seen = _the_old_page()
    assert seen["model"] == (1, 2)
    assert (seen["saved"], seen["processed"]) == ("saved", 2)
    assert len(seen["all"]) >= 1
    assert all(result == [2, 4, 6] for result in seen["all"])
    assert set(seen["products"]) == {1.0}
    _check_what_both_ways_give(seen)


@pytest.mark.slow
def test_the_old_page_under_torchrun() -> None:
    """Under torchrun with two ranks: the ranks are the devices, and every rank has both results."""
    with launched(2, "torchrun") as ranks:
        for rank, seen in enumerate(ranks.run(_the_old_page)):
            assert seen["saved"] == ("saved" if rank == 0 else None)
            assert seen["processed"] == 2
            assert seen["all"] == [[2, 4, 6]] * 2
            assert seen["products"] == [1.0, 1.0]
            _check_what_both_ways_give(seen)


@pytest.mark.slow
def test_a_call_can_have_a_timeout() -> None:
    """A hang ends with the stack of the rank that hangs, and the next call works."""

    @parallelize_on_gpus(num_gpus=2, timeout=3)  # a busy machine may need a second for the next call
    def hang(rank: int) -> int:
        while current_world().rank == rank:
            pass
        return 7

    with pytest.raises(RankTimeoutError, match="in hang") as caught:
        hang(1)
    assert caught.value.ranks == [1]
    assert hang(2) == [7, 7]
