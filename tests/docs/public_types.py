"""Uses of every public name, for a type checker only: nothing here is run.

`assert_type` states the type that a user gets. A wrong use has a ``type: ignore`` with the code of its error. Mypy
reports that comment as unused once it accepts the use.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nn_parallel
from nn_parallel import (
    GPU,
    ExecutorClosedError,
    LaunchError,
    ParallelError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    RemoteError,
    Report,
    TransferError,
    WorkerDiedError,
    World,
    accumulate,
    all_gather_object,
    all_gather_tensor,
    all_ranks,
    any_rank,
    average_parameters,
    barrier,
    broadcast,
    cleanup_ddp,
    current_world,
    find_batch_size,
    initialize_ddp,
    list_gpus,
    load_checkpoint,
    on_local_rank,
    on_rank,
    parallel_on_all_devices,
    parallelize_on_gpus,
    parse_gpu_selection,
    prepare_dataloader,
    prepare_model,
    profile_ranks,
    rank_first,
    reduce_metrics,
    resolve_device,
    save_checkpoint,
    seed_everything,
    select_gpus,
    setup_logging,
    should_use_distributed,
    stop_requested,
    sync_buffers,
    unwrap_model,
    verify_ddp_setup,
)


def the_world(flag: bool | None) -> None:
    assert_type(nn_parallel.__version__, str)
    world = assert_type(initialize_ddp(), World)
    initialize_ddp(60, backend="gloo", device="cpu", rank=0, world_size=1, local_rank=0, master_addr="localhost")
    initialize_ddp(timedelta(minutes=5), device=torch.device("cpu"), master_port=29500, fallback=True)
    assert_type(current_world(), World)
    distributed, rank, local_rank, world_size, device = world
    assert_type(distributed, bool)
    assert_type(rank, int)
    assert_type(local_rank, int)
    assert_type(world_size, int)
    assert_type(device, torch.device)
    assert_type(world.node_rank, int)
    assert_type(world.local_world_size, int)
    assert_type(world.launcher, str)
    assert_type(world.is_main, bool)
    assert_type(should_use_distributed(), bool)
    assert_type(should_use_distributed(flag), bool)
    assert_type(resolve_device("cuda"), torch.device)
    assert_type(resolve_device(torch.device("cpu")), torch.device)
    cleanup_ddp()

    initialize_ddp("60")  # type: ignore[arg-type]
    world.is_main = True  # type: ignore[misc]


@on_rank(0)
def count_lines(path: Path, *, encoding: str = "utf-8") -> int:
    return len(path.read_text(encoding).splitlines())


@on_rank([0, -1], True, broadcast=True, timeout=60)
def count_on_both_ends(path: Path) -> int:
    return len(path.read_bytes())


@on_local_rank(0, timeout=timedelta(seconds=60))
def download(url: str) -> Path:
    return Path(url)


@on_local_rank(0, broadcast=True)
def download_for_all(url: str) -> Path:
    return Path(url)


@on_rank(0, wait=False)
def log(message: str) -> None:
    print(message)


class Trainer:
    @on_rank(0)
    def save(self, path: Path) -> Path:
        return path

    @on_rank(0, broadcast=True)
    def name(self) -> str:
        return "trainer"


def code_for_one_rank(path: Path, flag: bool) -> None:
    assert_type(count_lines(path, encoding="ascii"), int | None)
    assert_type(count_on_both_ends(path), int)
    assert_type(download("data"), Path | None)
    assert_type(download_for_all("data"), Path)
    assert_type(Trainer().save(path), Path | None)
    assert_type(Trainer().name(), str)
    assert_type(on_rank(0, broadcast=flag)(path.exists)(), bool | None)
    assert_type(on_local_rank(0, broadcast=flag)(path.exists)(), bool | None)
    log("done")
    barrier()
    barrier(timeout=60)
    assert_type(broadcast("name"), str)
    assert_type(broadcast({"lr": 0.1}, src=-1), dict[str, float])
    with rank_first() as entered:
        assert_type(entered, None)
    with rank_first(0, local=True, timeout=timedelta(seconds=60)):
        ...

    count_lines()  # type: ignore[call-arg]
    count_lines("file")  # type: ignore[arg-type]
    count_lines(path, errors="ignore")  # type: ignore[call-arg]
    Trainer().save("file")  # type: ignore[arg-type]
    lines: int = count_lines(path)  # type: ignore[assignment]
    on_rank(count_lines)  # type: ignore[call-overload]
    on_rank("0")  # type: ignore[arg-type]
    on_rank(0, broadcast="yes")  # type: ignore[call-overload]
    on_local_rank([0, 1])  # type: ignore[call-overload]
    name: int = broadcast("name")  # type: ignore[assignment]
    print(lines, name)


def scale(x: torch.Tensor, factor: float, device: torch.device) -> torch.Tensor:
    return x.to(device) * factor


@parallelize_on_gpus()
def scale_on_gpus(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    return x.to(device)


@parallelize_on_gpus(2, True, timeout=60, engine="ray")
def name_of(device: torch.device) -> str:
    return str(device)


@parallel_on_all_devices
def forward(batch: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    return batch * factor


def code_on_every_device(x: torch.Tensor) -> None:
    executor: Executor = ParallelExecutor()
    with ParallelExecutor(2, True, timeout=timedelta(seconds=60), initializer=print, initargs=("begin",)) as ex:
        assert_type(ex, ParallelExecutor)
        assert_type(ex.run(scale, x, 2.0), list[torch.Tensor])
        assert_type(ex.run(lambda device, y: str(device), 1), list[str])
        assert_type(ex.submit(pow, 2, 10).done(), bool)
        assert_type(ex.submit(scale, x, factor=2.0), Future[torch.Tensor])
        assert_type(ex.submit(scale, x, factor=2.0).result(), torch.Tensor)
        assert_type(ex.map(len, ["a", "b"]), Iterator[int])
        assert_type(ex.map(scale, [x], [2.0], timeout=60, chunksize=2, progress=True), Iterator[torch.Tensor])
        assert_type(ex.put(x), Any)
        ex.resize(4)
        ex.shutdown(wait=True, cancel_futures=True)

        ex.run(x)  # type: ignore[arg-type]
        ex.map(len, 3)  # type: ignore[arg-type]
        ex.resize("4")  # type: ignore[arg-type]
        counts: list[str] = ex.run(len, "a")  # type: ignore[arg-type]
    ParallelExecutor(num_workers=2, devices="cpu", prefix_output=True)
    ParallelExecutor(devices=["cuda:0", torch.device("cuda", 1), 2])
    ParallelExecutor(engine="ray", resources_per_worker={"CPU": 4}, placement="spread", wait_for_resources=60)
    assert_type(scale_on_gpus(x), list[torch.Tensor])
    assert_type(name_of(), list[str])
    assert_type(forward(x, factor=2.0), torch.Tensor)

    ParallelExecutor(engine="dask")  # type: ignore[arg-type]
    ParallelExecutor(placement="random")  # type: ignore[arg-type]
    ParallelExecutor(max_workers=2)  # type: ignore[arg-type]
    parallelize_on_gpus(scale)  # type: ignore[arg-type]
    parallelize_on_gpus(engine="dask")  # type: ignore[arg-type]
    forward(1.0)  # type: ignore[arg-type]
    print(executor, counts)


def gpus() -> None:
    [gpu] = assert_type(list_gpus(), list[GPU])
    assert_type(gpu.index, int)
    assert_type(gpu.uuid, str)
    assert_type(gpu.name, str | None)
    assert_type(gpu.memory_free_mb, int | None)
    assert_type(gpu.processes, tuple[int, ...] | None)
    assert_type(gpu.is_visible, bool)
    assert_type(parse_gpu_selection("0,2-3"), list[GPU])
    assert_type(select_gpus(2, min_memory_mb=8000), list[GPU])

    gpu.index = 1  # type: ignore[misc]
    parse_gpu_selection([0, 2])  # type: ignore[arg-type]


def training(dataset: TensorDataset, optimizer: torch.optim.Optimizer) -> None:
    setup_logging()
    setup_logging(10)
    assert_type(seed_everything(0, per_rank=False), int)
    model = assert_type(prepare_model(nn.Linear(4, 2)), nn.Module)
    prepare_model(nn.Linear(4, 2), strategy="fsdp", reshard_after_forward=False)
    prepare_model(nn.Linear(4, 2), strategy="ddp", sync_batchnorm=True, compression="powersgd")
    assert_type(unwrap_model(model), nn.Module)
    loader = prepare_dataloader(DataLoader(dataset), pad=False, seed=1, to_device=False)
    plain_loader: DataLoader[tuple[torch.Tensor, ...]] = loader
    loader.set_epoch(1)
    loader.load_state_dict(loader.state_dict())
    for step, _ in enumerate(loader):
        with accumulate(model, step, every=4, last=step == len(loader) - 1) as complete:
            assert_type(complete, bool)
    assert_type(stop_requested(), bool)
    average_parameters(model, weight=len(dataset))
    sync_buffers(model, average=True)
    save_checkpoint("last.pt", keep=2, sharded=True, asynchronous=True, model=model, optimizer=optimizer, epoch=1)
    assert_type(load_checkpoint(Path("last.pt"), model=model), dict[str, Any])
    assert_type(find_batch_size(lambda size: size, start=256), int)
    with profile_ranks("trace.json.gz") as profile:
        ...
    assert_type(profile.seconds, list[float])
    assert_type(profile.communication, list[float])

    prepare_model(model, strategy="zero")  # type: ignore[arg-type]
    prepare_model(model, strategy=None)  # type: ignore[arg-type]
    prepare_model(model, compression="int8")  # type: ignore[arg-type]
    prepare_model(nn.Linear)  # type: ignore[arg-type]
    prepare_dataloader(dataset)  # type: ignore[arg-type]
    save_checkpoint(model=model)  # type: ignore[call-arg]
    load_checkpoint(3)  # type: ignore[arg-type]
    find_batch_size(model, start="256")  # type: ignore[arg-type]
    print(plain_loader)


def collectives(x: torch.Tensor) -> None:
    assert_type(reduce_metrics({"loss": 0.5, "accuracy": x}, weight=16), dict[str, float])
    assert_type(reduce_metrics({0: 12, 1: 16}, op="sum"), dict[int, float])
    assert_type(any_rank(x), bool)
    assert_type(all_ranks(True), bool)
    assert_type(all_gather_object({"rank": 0}), list[dict[str, int]])
    assert_type(all_gather_tensor(x), torch.Tensor)

    reduce_metrics({"loss": 0.5}, op="median")  # type: ignore[arg-type]
    reduce_metrics({"loss": "low"})  # type: ignore[dict-item]
    reduce_metrics({0.5: 1.0})  # type: ignore[type-var]
    all_gather_tensor([1, 2])  # type: ignore[arg-type]


def errors() -> None:
    try:
        verify_ddp_setup()
    except RankError as error:
        assert_type(error.failures, dict[int, Exception])
        assert_type(error.rank, int)
        assert_type(error.exceptions, tuple[Exception | ExceptionGroup[Exception], ...])
    except WorkerDiedError as error:
        assert_type(error.rank, int)
        assert_type(error.pid, int)
        assert_type(error.exitcode, int | None)
        assert_type(error.evidence, str)
    except RankTimeoutError as error:
        timeout: TimeoutError = error
        assert_type(error.ranks, list[int])
        assert_type(error.stacks, dict[int, str])
        print(timeout)
    except (ExecutorClosedError, TransferError, RemoteError, LaunchError) as error:
        base: ParallelError = error
        print(base)
    except ParallelError as error:
        runtime_error: RuntimeError = error
        print(runtime_error)


def the_report() -> None:
    report = assert_type(verify_ddp_setup(), Report)
    assert_type(bool(report), bool)
    assert_type(report.findings[0].status, str)
    assert_type(report.findings[0].advice, str)
