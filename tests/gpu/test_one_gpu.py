"""The checks of one GPU: ``pytest -m gpu`` on a machine with one. docs/project/tested_on.md records past runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import (
    ParallelExecutor,
    RankError,
    cleanup_ddp,
    initialize_ddp,
    list_gpus,
    load_checkpoint,
    on_rank,
    prepare_model,
    reduce_metrics,
    resolve_device,
    save_checkpoint,
    select_gpus,
    unwrap_model,
    verify_ddp_setup,
)
from nn_parallel._engine.devices import accelerators, hardware_id
from tests.support.ranks import launched

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def pool() -> Any:
    with ParallelExecutor(devices=[0]) as executor:
        yield executor


def test_the_device_is_found_and_named() -> None:
    """Torch and NVML speak of the same GPU."""
    assert accelerators()[0] == resolve_device("cuda") == GPU
    uuid = torch.cuda.get_device_properties(0).uuid
    assert f"GPU-{uuid}" in [gpu.uuid for gpu in list_gpus()]
    assert re.fullmatch("[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", hardware_id(GPU) or "")


def test_nvml_tells_of_it() -> None:
    """Its memory in MiB, and it can be selected."""
    gpu = list_gpus()[0]
    total = torch.cuda.get_device_properties(0).total_memory >> 20
    assert gpu.memory_total_mb is not None
    assert abs(gpu.memory_total_mb - total) < 0.1 * total
    assert select_gpus(1, min_memory_mb=1)[0].uuid in [each.uuid for each in list_gpus()]


def test_looking_starts_no_cuda() -> None:
    """Neither the import nor NVML opens a context."""
    code = "import torch, nn_parallel; nn_parallel.list_gpus(); assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_worker_has_the_device(pool: ParallelExecutor) -> None:
    """It is bound to ``device``, it is the current one, and tensors come back on the CPU."""

    def body(device: torch.device) -> Any:
        return str(device), torch.cuda.current_device(), torch.arange(3, device=device)

    [(device, current, tensor)] = pool.run(body)
    assert (device, current) == ("cuda:0", 0)
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [0, 1, 2]


def test_workers_on_one_gpu_draw_different_random_numbers() -> None:
    """Also from the generator of the GPU, and other ones than the workers before them."""
    draws = list[float]()
    for _ in range(2):
        with ParallelExecutor(devices=[0, 0]) as two:
            draws += two.run(lambda device: torch.rand(1, device=device).item())
    assert len(set(draws)) == 4


def test_tensors_land_on_the_device_of_the_worker(pool: ParallelExecutor) -> None:
    """An accelerator tensor in an argument is on the worker's device; one on the CPU stays there."""
    here = torch.ones(1000, device=GPU)
    assert pool.run(lambda x, y: (str(x.device), str(y.device), x.sum().item()), here, torch.ones(2)) == [
        ("cuda:0", "cpu", 1000.0)
    ]


def test_an_error_in_a_worker_on_the_gpu(pool: ParallelExecutor) -> None:
    """The pool is whole again after it."""

    def fail(device: torch.device) -> None:
        torch.ones(2, device=device) @ torch.ones(3, device=device)

    with pytest.raises(RankError, match="RuntimeError"):
        pool.run(fail)
    assert pool.run(lambda device: torch.ones(2, device=device).sum().item()) == [2.0]


def _collectives() -> Any:
    world = initialize_ddp(timeout=60)
    on_cpu, on_gpu = torch.ones(2), torch.ones(2, device=world.device)
    dist.all_reduce(on_cpu)
    dist.all_reduce(on_gpu)
    return str(world.device), dist.get_backend_config(), on_cpu.sum().item(), on_gpu.sum().item()


def test_gloo_and_nccl_beside_each_other() -> None:
    """One group, each kind of tensor by its own backend."""
    with launched(1) as ranks:
        assert ranks.run(_collectives) == [("cuda:0", "cpu:gloo,cuda:nccl", 2.0, 2.0)]


def test_a_block_that_fails_closes_the_group_and_it_is_made_again() -> None:
    """The watchdog starts and stops beside NCCL."""

    def body() -> Any:
        initialize_ddp(timeout=60)
        try:
            with ParallelExecutor():
                on_rank(0)(lambda: 1 / 0)()
        except (RankError, ZeroDivisionError) as error:
            told = type(error).__name__
        return told, _collectives()[0]

    with launched(1) as ranks:
        [(told, device)] = ranks.run(body)
        assert told in ("RankError", "ZeroDivisionError")
        assert device == "cuda:0"


def test_two_ranks_with_one_gpu_talk_by_gloo() -> None:
    """As NCCL refuses it: both are shown the same one, or name it."""

    def body(**arguments: Any) -> Any:
        world = initialize_ddp(timeout=60, **arguments)
        total = torch.ones(1, device=world.device)
        dist.all_reduce(total)
        backends = dist.get_backend_config()
        cleanup_ddp()
        return str(world.device), backends, total.item()

    with launched(2, CUDA_VISIBLE_DEVICES="0") as ranks:
        assert ranks.run(body) == [("cuda:0", "cpu:gloo,cuda:gloo", 2.0)] * 2
        assert ranks.run(lambda: body(device="cuda:0")) == [("cuda:0", "cpu:gloo,cuda:gloo", 2.0)] * 2


def _trained(path: str, device: str | None = None, backend: str | None = None) -> Any:
    world = initialize_ddp(timeout=60, device=device, backend=backend)
    model = prepare_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), sync_batchnorm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = model(torch.rand(8, 4, device=world.device)).square().sum()
    loss.backward()
    optimizer.step()
    save_checkpoint(path, model=model, optimizer=optimizer, epoch=3)
    weights = {name: value.cpu() for name, value in unwrap_model(model).state_dict().items()}
    optimizer.step()
    epoch = load_checkpoint(path, model=model, optimizer=optimizer)["epoch"]
    same = all(torch.equal(value.cpu(), weights[name]) for name, value in unwrap_model(model).state_dict().items())
    kind = type(unwrap_model(model)[1]).__name__
    return weights, reduce_metrics({"loss": loss})["loss"], same, epoch, kind, str(world.device)


def test_ddp_and_a_checkpoint_on_the_gpu(tmp_path: Path) -> None:
    """A step on two ranks that share the GPU by gloo, with one BatchNorm for both; what is saved loads on the CPU."""
    path = str(tmp_path / "checkpoint.pt")
    with launched(2, CUDA_VISIBLE_DEVICES="0") as ranks:
        (first, *about), (second, *alike) = ranks.run(_trained, path, "cuda:0", "gloo")
    assert about == alike
    assert about[1:] == [True, 3, "SyncBatchNorm", "cuda:0"]
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    there = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    load_checkpoint(path, model=there)
    assert all(torch.equal(value, first[name]) for name, value in there.state_dict().items())


def test_one_rank_trains_on_the_gpu(tmp_path: Path) -> None:
    """By NCCL, with nobody to share with: the model is on the device, and nothing wraps it."""
    with launched(1) as ranks:
        [(_, *about)] = ranks.run(_trained, str(tmp_path / "checkpoint.pt"))
    assert about[1:] == [True, 3, "BatchNorm1d", "cuda:0"]


def test_the_doctor_finds_the_gpu() -> None:
    """Workers on it, and a collective by NCCL."""
    report = verify_ddp_setup()
    assert report, str(report)
    assert "nccl on cuda" in str(report)
