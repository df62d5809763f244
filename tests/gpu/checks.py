"""Programs that show what failures do on GPUs: each check is a program of its own, ``python tests/gpu/checks.py NAME``.

Two ranks talk by NCCL: on two GPUs, where there are two. On a machine with one they share it. NCCL refuses that, unless
each rank says that it is another host, which makes the other one a remote peer, over a socket (`join_by_nccl`).

A check prints what it sees, and raises if that is not as promised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import (
    ParallelExecutor,
    RankError,
    World,
    all_gather_tensor,
    average_parameters,
    current_world,
    find_batch_size,
    initialize_ddp,
    load_checkpoint,
    parallel_on_all_devices,
    prepare_model,
    save_checkpoint,
)

CHECKS: dict[str, Callable[[], None]] = {}
LIMITS_S: dict[str, float] = {}
BY_NCCL: set[str] = set()  # the checks that need two ranks that talk by NCCL
ALONE: set[str] = set()  # those that need the whole memory of the GPU
SOCKETS_ONLY = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
AT_ONCE_S = 2.0
MIB = 1 << 20


def check(
    limit_s: float = 60, *, by_nccl: bool = False, alone: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a function a check that must end within ``limit_s``."""

    def register(fn: Callable[[], None]) -> Callable[[], None]:
        name = fn.__name__
        CHECKS[name], LIMITS_S[name] = fn, limit_s
        if by_nccl:
            BY_NCCL.add(name)
        if alone:
            ALONE.add(name)
        return fn

    return register


def say(*what: object) -> None:
    print(f"[{time.monotonic() - BEGAN:6.2f} s]", *what, flush=True)


def two_workers(timeout: float | None = 40) -> ParallelExecutor:
    return ParallelExecutor(devices=[0, min(1, torch.cuda.device_count() - 1)], timeout=timeout)


def join_by_nccl(timeout: float = 30) -> World:
    """Be one of two ranks that talk by NCCL, also where they share a GPU."""
    shared = None
    if torch.cuda.device_count() < 2:
        shared = "cuda:0"
        rank = os.environ.get("RANK") or current_world().rank
        os.environ.update(SOCKETS_ONLY, NCCL_HOSTID=f"host{rank}")
    world = initialize_ddp(timeout, device=shared)
    assert "nccl" in dist.get_backend_config(), dist.get_backend_config()
    return world


def total_of_ones(device: torch.device) -> float:
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    return ones[0].item()


def pids_of(pool: ParallelExecutor) -> list[int]:
    return pool.run(os.getpid)


@contextlib.contextmanager
def launched(name: str, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two ranks with variables by hand: each calls the function ``name`` of this file."""
    with contextlib.ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        ranks = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        for rank in "01":
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port}
            output = started.enter_context(open(Path(folder, rank), "w+"))
            process = subprocess.Popen(
                [sys.executable, __file__, "as-a-rank", name, *arguments],
                env=os.environ | place | {"MASTER_ADDR": "127.0.0.1"},
                stdout=output,
                stderr=output,
                text=True,
            )
            started.callback(process.wait)
            started.callback(process.kill)
            ranks.append(process)
        try:
            yield ranks
        finally:
            printed = [Path(folder, rank).read_text() for rank in "01"]
            for rank, text in enumerate(printed):
                say(f"rank {rank} printed:\n{text[-3000:]}")
        assert not any("Exception ignored" in text for text in printed)


# Two ranks by NCCL


@check(by_nccl=True)
def rig() -> None:
    """Two ranks add up by NCCL."""
    with two_workers() as pool:
        say(pool.run(lambda: total_of_ones(join_by_nccl().device)))
        assert pool.run(lambda: total_of_ones(join_by_nccl().device)) == [2.0, 2.0]
        say(pool.run(lambda: (dist.get_backend_config(), {name: os.environ.get(name) for name in SETTINGS})))


@check()
def poisoned_worker() -> None:
    """An assertion in a kernel fails the task that queued it, and no later one; its worker is replaced."""

    def bad(device: torch.device) -> None:
        torch.zeros(2, device=device)[torch.tensor([9], device=device)]

    def item(device: torch.device, number: int) -> int:
        if number == 3:
            bad(device)
        return number

    with ParallelExecutor(devices=[0]) as pool:
        [before] = pids_of(pool)
        began = time.monotonic()
        try:
            pool.run(bad)
        except RankError as error:
            say("raised after", time.monotonic() - began, str(error).splitlines()[0])
        else:
            raise AssertionError("nothing was raised")
        assert pool.run(lambda device: torch.ones(3, device=device).sum().item()) == [3.0]
        assert pids_of(pool) != [before]
        results = pool.map(item, range(8))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        try:
            next(results)
        except Exception as error:
            say("item 3:", repr(error)[:200])
        else:
            raise AssertionError("item 3 did not raise")
        assert pool.submit(lambda device: torch.ones(3, device=device).sum().item()).result() == 3.0
        say("an ordinary error keeps the worker")
        [before] = pids_of(pool)
        try:
            pool.run(lambda device: torch.ones(2, device=device) @ torch.ones(3, device=device))
        except RankError:
            assert pids_of(pool) == [before]


def fails_beside_a_collective(flag: str, groups: int) -> None:
    world = join_by_nccl()
    others = [dist.new_group([0, 1]) for _ in range(groups - 1)]
    total_of_ones(world.device)
    for other in others:
        dist.all_reduce(torch.ones(1, device=world.device), group=other)
    torch.cuda.synchronize()
    if world.rank == 1:
        time.sleep(0.5)
        raise ValueError("a bad batch")
    ones = torch.ones(4, device=world.device)
    dist.all_reduce(ones)
    for other in others:
        with torch.cuda.stream(torch.cuda.Stream()):
            dist.all_reduce(torch.ones(1, device=world.device), group=other)
    if others:
        torch.cuda.synchronize()
    Path(flag).write_text(f"went on with {ones[0].item()}")


def frees(groups: int, times: int) -> None:
    with two_workers() as pool, tempfile.TemporaryDirectory() as folder:
        assert pool.run(lambda: total_of_ones(join_by_nccl().device)) == [2.0, 2.0]
        before, took = pids_of(pool), list[float]()
        for number in range(times):
            flag = Path(folder, str(number))
            began = time.monotonic()
            try:
                pool.run(fails_beside_a_collective, str(flag), groups)
            except RankError as error:
                told = str(error).splitlines()[0]
            else:
                raise AssertionError("nothing was raised")
            seconds = time.monotonic() - began
            say(number, f"{seconds:.2f} s", told, flag.exists() and flag.read_text())
            assert "ValueError: a bad batch" in told
            assert not flag.exists()
            took.append(seconds)
            assert pids_of(pool) == before
        # The first failure of a process takes longer: torch imports its compiler, to print a stack.
        assert sorted(took)[times // 2] < 0.5 + AT_ONCE_S
        assert pool.run(lambda: total_of_ones(join_by_nccl().device)) == [2.0, 2.0]


@check(by_nccl=True)
def freed_from_item() -> None:
    """A rank in ``.item()`` is freed and does not go on with wrong numbers; ten times, in the same processes."""
    frees(groups=1, times=10)


@check(by_nccl=True)
def freed_from_two_groups() -> None:
    """The same, stuck in two communicators."""
    frees(groups=2, times=3)


@check(150, by_nccl=True)
def survives_an_idle_minute() -> None:
    """NCCL's own thread does not end the processes later."""
    with two_workers() as pool, tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(RankError):
            pool.run(fails_beside_a_collective, str(Path(folder, "flag")), 1)
        before = pids_of(pool)
        time.sleep(70)
        assert pids_of(pool) == before
        assert pool.run(lambda: total_of_ones(join_by_nccl().device)) == [2.0, 2.0]


@check(by_nccl=True)
def a_timeout_is_raised() -> None:
    """A collective that takes longer than the group allows raises on the rank that waits, and its process lives."""

    def late() -> float:
        world = join_by_nccl(5)
        total_of_ones(world.device)
        if world.rank == 1:
            time.sleep(30)
        return total_of_ones(world.device)

    with two_workers() as pool:
        before, began = pids_of(pool), time.monotonic()
        try:
            pool.run(late)
        except RankError as error:
            say(f"after {time.monotonic() - began:.2f} s:", str(error))
            assert "Timed out" in str(error)
        else:
            raise AssertionError("nothing was raised")
        assert time.monotonic() - began < 25
        assert pids_of(pool) == before
        assert pool.run(lambda: total_of_ones(join_by_nccl().device)) == [2.0, 2.0]


@check(by_nccl=True)
def a_killed_peer() -> None:
    """The others hear who has died, in a pool; two runs later all is well."""

    def dies() -> float:
        world = join_by_nccl()
        total_of_ones(world.device)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return total_of_ones(world.device)

    with two_workers() as pool:
        began = time.monotonic()
        try:
            pool.run(dies)
        except RankError as error:
            say(f"after {time.monotonic() - began:.2f} s:", str(error))
            assert "SIGKILL" in str(error)
        else:
            raise AssertionError("nothing was raised")
        for _ in range(2):
            assert pool.run(lambda: total_of_ones(join_by_nccl().device)) == [2.0, 2.0]


def rank_that_loses_its_peer(where: str) -> None:
    world = join_by_nccl()
    total_of_ones(world.device)
    if world.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        with ParallelExecutor() if where == "in a block" else contextlib.nullcontext():
            say("went on with", total_of_ones(world.device))
    except (RankError, dist.DistBackendError) as error:
        say(f"RAISED after {time.monotonic() - began:.2f} s: {error!r}")
        raise


@check(by_nccl=True)
def a_killed_peer_under_a_launcher() -> None:
    """In a block and outside of one the rank that waits raises, and its process ends with that."""
    for where in ("in a block", "outside"):
        with launched("rank_that_loses_its_peer", where) as (waits, _):
            began = time.monotonic()
            code = waits.wait(40)
            say(where, "exit code", code, f"after {time.monotonic() - began:.2f} s")
            assert code == 1


def rank_that_gives_up() -> None:
    world = join_by_nccl()
    total_of_ones(world.device)
    if world.rank == 1:
        time.sleep(30)
        return
    dist.all_reduce(torch.ones(4, device=world.device))
    Path(os.environ["RAISES_AT"]).write_text(str(time.time()))
    raise ValueError("an exception that nobody catches")


@check(by_nccl=True)
def an_uncaught_exception_ends_the_process() -> None:
    """Also while a collective is queued that nobody matches."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAISES_AT"] = str(Path(folder, "time"))
        with launched("rank_that_gives_up") as (fails, _):
            code = fails.wait(40)
            took = time.time() - float(Path(folder, "time").read_text())
            say("exit code", code, f"{took:.2f} s after the exception")
            assert code == 1
            assert took < 15


def rank_that_dies_in_the_making() -> None:
    if os.environ["RANK"] == "1":
        with mock.patch("torch.distributed.init_process_group") as init:
            init.side_effect = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            join_by_nccl(20)
    began = time.monotonic()
    try:
        join_by_nccl(20)
    finally:
        say(f"rank 0 was {time.monotonic() - began:.2f} s in initialize_ddp()")


@check(by_nccl=True)
def what_nccl_refuses() -> None:
    """Integers that it has no name for, and views: in the buffers of a model, and in what ranks gather."""

    def body() -> Any:
        world = join_by_nccl()
        model = nn.Linear(3, 2)
        model.register_buffer("short", torch.tensor([1, 2, 3], dtype=torch.int16) * (world.rank + 1))
        model.register_buffer("view", torch.ones(3, 2).t() * (world.rank + 1))
        prepared = prepare_model(model)
        prepared(torch.ones(1, 3, device=world.device)).sum().backward()
        average_parameters(prepared)
        rows = torch.full((world.rank + 1, 2), world.rank, dtype=torch.int16, device=world.device)
        return model.short.tolist(), model.view.tolist(), all_gather_tensor(rows.t()[:, :1].t()).tolist()

    with two_workers() as pool:
        told = pool.run(body)
        say(told)
        assert told == [([1, 2, 3], [[1.0] * 3] * 2, [[0, 0], [1, 1]])] * 2


@check(by_nccl=True)
def a_death_as_the_group_is_made() -> None:
    """The other rank gets an error within the timeout."""
    with launched("rank_that_dies_in_the_making") as (waits, _):
        code = waits.wait(40)
        say("exit code", code)
        assert code == 1


# One GPU


@check()
def two_workers_on_one_gpu() -> None:
    """They talk by gloo, which NCCL would refuse; their tensors may be on the GPU."""

    def body() -> Any:
        world = initialize_ddp(30)
        model = prepare_model(nn.Linear(2, 2))
        model(torch.ones(1, 2, device=world.device)).sum().backward()
        return str(world.device), dist.get_backend_config(), total_of_ones(world.device)

    with ParallelExecutor(devices=[0, 0], timeout=40) as pool:
        told = pool.run(body)
        say(told)
        assert [(device, total) for device, _, total in told] == [("cuda:0", 2.0)] * 2
        assert "nccl" not in told[0][1]


@check()
def fsdp_on_the_cpu() -> None:
    """Ranks on the CPU stay there, whatever else this machine has."""

    def body() -> Any:
        model = prepare_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), strategy="fsdp")
        model(torch.ones(1, 2)).sum().backward()
        return sorted({parameter.device.type for parameter in model.parameters()}), torch.cuda.is_initialized()

    with ParallelExecutor(num_workers=2, devices="cpu", timeout=40) as pool:
        told = pool.run(body)
        say(told)
        assert told == [(["cpu"], False)] * 2


STARTS_NO_CUDA = {
    "import": "pass",
    "current_world": "nn_parallel.current_world()",
    "resolve_device": "assert str(nn_parallel.resolve_device('cuda')) == 'cuda:0'",
    "list_gpus": "nn_parallel.list_gpus()",
    "on_rank": "nn_parallel.on_rank(0)(int)()",
    "seed_everything": "nn_parallel.seed_everything(1)",
    "should_use_distributed": "nn_parallel.should_use_distributed()",
    "reduce_metrics": "nn_parallel.reduce_metrics({'a': 1})",
    "executor": "nn_parallel.ParallelExecutor(devices=[0]).__enter__().run(int)",
    "parallelize": "nn_parallel.parallelize_on_gpus()(int)()",
    "doctor": "nn_parallel.verify_ddp_setup()",
    "initialize_ddp": "nn_parallel.initialize_ddp()",
    "checkpoint": "nn_parallel.initialize_ddp(device='cpu'); nn_parallel.save_checkpoint(sys.argv[1], epoch=1)",
}


@check(120)
def what_starts_cuda() -> None:
    """Nothing of ours does in the script's own process, but what is asked to use the GPU there."""
    with tempfile.TemporaryDirectory() as folder:
        ask = "import sys, torch, nn_parallel\n{}\nprint(torch.cuda.is_initialized())"
        begun = {
            name: subprocess.Popen(
                [sys.executable, "-c", ask.format(code), str(Path(folder, name))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, code in STARTS_NO_CUDA.items()
        }
        told = {name: process.communicate()[0].strip() for name, process in begun.items()}
    for name, text in told.items():
        say(name, text[-300:])
    assert {text.splitlines()[-1] for text in told.values()} == {"False"}


@check()
def streams_of_the_caller() -> None:
    """The work that the caller has queued on its own stream comes before the work of the threads."""

    @parallel_on_all_devices
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    device = torch.device("cuda", 0)
    big = torch.ones(8192, 8192, device=device)
    wrong = 0
    with mock.patch("nn_parallel.data_parallel.accelerators", return_value=[device, device]):
        for number in range(5):
            x = torch.zeros(1 << 20, device=device)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    big @ big
                x.fill_(number + 1)
                y = double(x)
                wrong += int((y != 2 * (number + 1)).sum().item())
    say("wrong numbers:", wrong)
    assert wrong == 0


@check(alone=True)
def transport_and_memory() -> None:
    """Tensors arrive as they were sent; what a worker takes at its start; a checkpoint loads where no GPU is."""
    device = torch.device("cuda", 0)
    base = torch.arange(64, device=device, dtype=torch.float32).reshape(8, 8)
    sent = [base.t(), base[::2, 1:3], base.to(torch.bfloat16), torch.ones((), device=device)]

    def body(device: torch.device, tensors: list[torch.Tensor], large: torch.Tensor) -> Any:
        return [str(each.device) for each in tensors], [each.cpu() for each in tensors], large.sum().item(), tensors[0]

    with ParallelExecutor(devices=[0]) as pool, tempfile.TemporaryDirectory() as folder:
        used_before = torch.cuda.mem_get_info()[0]
        [(devices, values, total, back)] = pool.run(body, sent, torch.ones(64 * MIB, device=device))
        assert devices == ["cuda:0"] * 4
        assert all(torch.equal(value, each.cpu()) for value, each in zip(values, sent, strict=True))
        assert (total, back.device.type) == (float(64 * MIB), "cpu")
        with ParallelExecutor(devices=[0]) as other:
            before = torch.cuda.mem_get_info()[0]
            other.run(int)
            say("a worker takes", (before - torch.cuda.mem_get_info()[0]) // MIB, "MiB at its start")
        say("and after a task of 256 MiB", (used_before - torch.cuda.mem_get_info()[0]) // MIB, "MiB")
        model = nn.Linear(4, 2).to(device)
        path = str(Path(folder, "checkpoint.pt"))
        save_checkpoint(path, model=model)
        code = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['model']['weight'].device)"
        loaded = subprocess.run(
            [sys.executable, "-c", code, path],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        say(loaded.stdout, loaded.stderr[-500:])
        assert loaded.stdout.strip() == "cpu"
        again = nn.Linear(4, 2).to(device)
        load_checkpoint(path, model=again)
        assert torch.equal(again.weight, model.weight)


@check(alone=True)
def batch_size_at_out_of_memory() -> None:
    """The largest that fits is found, and nothing is left on the GPU."""
    free, _ = torch.cuda.mem_get_info()
    unit = free // 6
    sizes = []

    def step(batch_size: int) -> None:
        sizes.append(batch_size)
        device = current_world().device
        weights = torch.zeros(unit, dtype=torch.uint8, device=device)
        torch.zeros(unit * batch_size, dtype=torch.uint8, device=device).add_(weights[0])

    found = find_batch_size(step, 8)
    say("alone:", sizes, "->", found, torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB)
    assert (sizes, found) == ([8, 4], 4)
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() <= 32 * MIB

    def body(free: int) -> tuple[int, int, int]:
        world = initialize_ddp(30)
        share = free // 50 * (4 if world.rank else 1)

        def step(batch_size: int) -> None:
            total_of_ones(world.device)
            torch.zeros(share * batch_size, dtype=torch.uint8, device=world.device).add_(1)
            total_of_ones(world.device)

        found = find_batch_size(step, 16)
        return found, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    torch.cuda.empty_cache()
    with ParallelExecutor(devices=[0, 0], timeout=50) as pool:
        told = pool.run(body, free)
        say("two ranks by gloo:", told)
        assert {found for found, *_ in told} == {8}
        assert all(reserved <= 32 * MIB for *_, reserved in told)


SETTINGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_DUMP_ON_TIMEOUT")
BEGAN = time.monotonic()

if __name__ == "__main__":
    _, name, *arguments = sys.argv
    if name == "as-a-rank":
        globals()[arguments[0]](*arguments[1:])
    else:
        CHECKS[name]()
