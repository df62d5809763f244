"""What is left to torch works with what is prepared here: each test is a recipe of the table of requirements."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from nn_parallel import (
    ParallelExecutor,
    all_gather_object,
    average_parameters,
    initialize_ddp,
    prepare_dataloader,
    prepare_model,
    reduce_metrics,
    unwrap_model,
)


@pytest.fixture(scope="module")
def two() -> Any:
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        yield ex


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    rank = initialize_ddp().rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def test_uneven_inputs(two: ParallelExecutor) -> None:
    """`Join` lets a rank that has run out of samples shadow the collectives of the others."""

    def scenario() -> tuple[int, list[float]]:
        model, _ = model_and_batch()
        model = prepare_model(model)
        loader = prepare_dataloader(DataLoader(TensorDataset(torch.randn(5, 16)), batch_size=None), pad=False)
        assert isinstance(model, DistributedDataParallel)
        with Join([model]):
            for (x,) in loader:
                model(x).sum().backward()
        return len(loader), [float(p.sum()) for p in model.parameters()]

    (three, first), (fewer, second) = two.run(scenario)
    assert (three, fewer) == (3, 2)
    assert first == second


def test_mixed_precision(two: ParallelExecutor) -> None:
    """`autocast` around forward; the parameters stay in full precision and alike."""

    def scenario() -> Any:
        model, x = model_and_batch()
        model = prepare_model(model)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        return str(out.dtype), {str(g.dtype) for g in gradients}, [float(g.sum()) for g in gradients]

    first, second = two.run(scenario)
    assert first == second
    assert first[:2] == ("torch.bfloat16", {"torch.float32"})


def test_averaged_weights_of_each_rank_and_of_all(two: ParallelExecutor) -> None:
    """`AveragedModel` is kept by each rank, unwrapped; before validation `average_parameters` makes them one."""

    def scenario() -> Any:
        model, x = model_and_batch()
        model = prepare_model(model)
        ema = AveragedModel(unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            ema.update_parameters(unwrap_model(model))
        alike = [float(p.sum()) for p in ema.parameters()]
        next(ema.parameters()).data += initialize_ddp().rank  # what batch norm, say, makes of it on each rank
        average_parameters(ema)
        return alike, [float(p.sum()) for p in ema.parameters()], float(next(unwrap_model(model).parameters()).sum())

    first, second = two.run(scenario)
    assert first == second
    assert first[1][0] == pytest.approx(first[0][0] + 0.5 * 16 * 32, rel=1e-5)


def test_sharded_optimizer(two: ParallelExecutor) -> None:
    """ZeRO: `ZeroRedundancyOptimizer` gives each rank a part of the optimizer's state; parameters are as without."""

    def scenario(sharded: bool) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model, x = model_and_batch()
        model = prepare_model(model)
        if sharded:
            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        state = optimizer.optim.state if sharded else optimizer.state
        return len(state), [float(p.sum()) for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, by torch's own import
        sharded, whole = two.run(scenario, True), two.run(scenario, False)
    assert [values for _, values in sharded] == [values for _, values in whole]
    assert sum(count for count, _ in sharded) == whole[0][0] == 4
    assert max(count for count, _ in sharded) < 4


def test_model_parallelism(two: ParallelExecutor) -> None:
    """`parallelize_module` splits layers over the ranks of `initialize_ddp`'s group."""

    def scenario() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model, _ = model_and_batch()
        x = torch.ones(3, 16)
        wanted = model(x)
        mesh = init_device_mesh("cpu", (initialize_ddp().world_size,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return float((model(x) - wanted).abs().max()), model[0].weight.to_local().shape[0]

    assert all(difference < 1e-6 and rows == 16 for difference, rows in two.run(scenario))


def test_activation_checkpointing(two: ParallelExecutor) -> None:
    """`torch.utils.checkpoint` computes a part again in backward, where memory is short."""

    def scenario(again: bool) -> list[float]:
        from torch.utils.checkpoint import checkpoint

        model, x = model_and_batch()

        class Saving(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: torch.Tensor) -> Any:
                return checkpoint(self.inner, x, use_reentrant=False) if again else self.inner(x)

        prepared = prepare_model(Saving())
        prepared(x).square().mean().backward()
        return [float(p.grad.sum()) for p in prepared.parameters()]

    assert two.run(scenario, True) == two.run(scenario, False)


def test_gradients_are_watched(two: ParallelExecutor) -> None:
    """That the ranks have the same gradients, and each rank's own metrics, are one gather away."""

    def scenario() -> Any:
        model, x = model_and_batch()
        model = prepare_model(model)
        model(x).square().mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        seen = {"norm": norm, "mean": x.mean()}
        largest, smallest = reduce_metrics(seen, op="max"), reduce_metrics(seen, op="min")
        spread = {name: largest[name] - smallest[name] for name in seen}
        return spread, all_gather_object({"rank": dist.get_rank(), "mean": float(x.mean())})

    first, second = two.run(scenario)
    assert first == second
    spread, of_each = first
    assert spread["norm"] == 0
    assert spread["mean"] == abs(of_each[0]["mean"] - of_each[1]["mean"])
    assert [each["rank"] for each in of_each] == [0, 1]
    assert of_each[0]["mean"] != of_each[1]["mean"]


def test_the_linear_rule(two: ParallelExecutor) -> None:
    """The learning rate times the number of ranks (Goyal et al., 2017) is one line; the batch size is each rank's."""

    def scenario() -> Any:
        world = initialize_ddp()
        loader = prepare_dataloader(DataLoader(TensorDataset(torch.zeros(64)), batch_size=8))
        samples = reduce_metrics({"samples": next(iter(loader))[0].numel()}, op="sum")["samples"]
        return 0.1 * world.world_size, samples, len(loader)

    assert two.run(scenario) == [(0.2, 16, 4)] * 2


def test_torch_s_own_debugging(tmp_path: Path) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL has torch check that all ranks make the same collective, and name who differs."""
    (tmp_path / "script.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from nn_parallel import initialize_ddp\n"
        "world = initialize_ddp()\n"
        "dist.all_reduce(torch.ones(2 + world.rank))\n"
    )
    environ = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*command, "script.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environ
    )
    assert done.returncode != 0
    assert "Detected mismatch between collectives on ranks" in done.stderr
