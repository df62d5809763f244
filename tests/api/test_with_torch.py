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
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from nn_parallel import (
    accumulate,
    all_gather_object,
    average_parameters,
    broadcast,
    initialize_ddp,
    load_checkpoint,
    prepare_dataloader,
    prepare_model,
    reduce_metrics,
    save_checkpoint,
    unwrap_model,
)
from tests.support.ranks import free_port


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    rank = initialize_ddp().rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def sums(model: nn.Module) -> list[float]:
    return [float(p.detach().sum()) for p in model.parameters()]


def same_on_all(value: Any) -> bool:
    first, *others = all_gather_object(value)
    return all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_uneven_inputs() -> None:
    """`Join` lets a rank that has run out of samples shadow the collectives of the others."""
    model, _ = model_and_batch()
    model = prepare_model(model)
    loader = prepare_dataloader(DataLoader(TensorDataset(torch.randn(5, 16)), batch_size=None), pad=False)
    assert isinstance(model, DistributedDataParallel)
    with Join([model]):
        for (x,) in loader:
            model(x).sum().backward()
    assert all_gather_object(len(loader)) == [3, 2]
    assert same_on_all(sums(model))


@pytest.mark.ranks(2)
def test_mixed_precision() -> None:
    """`autocast` around forward; the parameters stay in full precision and alike."""
    model, x = model_and_batch()
    model = prepare_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().square().mean().backward()
    assert out.dtype is torch.bfloat16
    gradients = [p.grad for p in model.parameters()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert same_on_all([float(gradient.sum()) for gradient in gradients])


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`torch.compile` after `prepare_model`: it trains alike on all ranks, and its checkpoint is that of the model."""
    model, x = model_and_batch()
    model = prepare_model(model)
    compiled = torch.compile(model, backend="aot_eager")  # without a C++ compiler
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with accumulate(compiled, step, 2) as complete:
            compiled(x + initialize_ddp().rank).square().mean().backward()
        if complete:
            optimizer.step()
    assert same_on_all(sums(model))
    path = broadcast(tmp_path_factory.mktemp("compiled") / "last.pt")
    save_checkpoint(path, model=compiled)
    again, _ = model_and_batch()
    load_checkpoint(path, model=again)
    assert sums(again) == sums(model)


@pytest.mark.ranks(2)
def test_averaged_weights_of_each_rank_and_of_all() -> None:
    """`AveragedModel` is kept by each rank, unwrapped; before validation `average_parameters` makes them one."""
    model, x = model_and_batch()
    model = prepare_model(model)
    ema = AveragedModel(unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        ema.update_parameters(unwrap_model(model))
    before = sums(ema)
    assert same_on_all((before, sums(model)))
    next(ema.parameters()).data += initialize_ddp().rank  # what batch norm, say, makes of it on each rank
    average_parameters(ema)
    assert same_on_all(sums(ema))
    assert sums(ema)[0] == pytest.approx(before[0] + 0.5 * 16 * 32, rel=1e-5)


@pytest.mark.ranks(2)
def test_sharded_optimizer() -> None:
    """ZeRO: `ZeroRedundancyOptimizer` gives each rank a part of the optimizer's state; parameters are as without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, by torch's own import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def trained(sharded: bool) -> tuple[int, list[float]]:
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
        return len(optimizer.optim.state if sharded else optimizer.state), sums(model)

    (states, sharded), (all_states, whole) = trained(True), trained(False)
    assert sharded == whole
    assert states < sum(all_gather_object(states)) == all_states == 4


@pytest.mark.ranks(2)
def test_model_parallelism() -> None:
    """`parallelize_module` splits layers over the ranks of `initialize_ddp`'s group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, _ = model_and_batch()
    x = torch.ones(3, 16)
    wanted = model(x)
    mesh = init_device_mesh("cpu", (initialize_ddp().world_size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert (model(x) - wanted).abs().max() < 1e-6
    assert model[0].weight.to_local().shape[0] == 16


@pytest.mark.ranks(2)
def test_activation_checkpointing() -> None:
    """`torch.utils.checkpoint` computes a part again in backward, where memory is short."""
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self, inner: nn.Module, again: bool) -> None:
            super().__init__()
            self.inner, self.again = inner, again

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    def gradients(again: bool) -> list[float]:
        model, x = model_and_batch()
        prepared = prepare_model(Saving(model, again))
        prepared(x).square().mean().backward()
        return [float(p.grad.sum()) for p in prepared.parameters()]

    assert gradients(again=True) == gradients(again=False)


@pytest.mark.ranks(2)
def test_gradients_are_watched() -> None:
    """That the ranks have the same gradients, and each rank's own metrics, are one gather away."""
    model, x = model_and_batch()
    model = prepare_model(model)
    model(x).square().mean().backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    seen = {"norm": norm, "mean": x.mean()}
    largest, smallest = reduce_metrics(seen, op="max"), reduce_metrics(seen, op="min")
    of_each = all_gather_object({"rank": dist.get_rank(), "mean": float(x.mean())})
    assert largest["norm"] == smallest["norm"]
    assert largest["mean"] - smallest["mean"] == abs(of_each[0]["mean"] - of_each[1]["mean"]) > 0
    assert [each["rank"] for each in of_each] == [0, 1]


@pytest.mark.ranks(2)
def test_the_linear_rule() -> None:
    """The learning rate times the number of ranks (Goyal et al., 2017) is one line; the batch size is each rank's."""
    world = initialize_ddp()
    loader = prepare_dataloader(DataLoader(TensorDataset(torch.zeros(64)), batch_size=8))
    samples = reduce_metrics({"samples": next(iter(loader))[0].numel()}, op="sum")["samples"]
    assert (0.1 * world.world_size, samples, len(loader)) == (0.2, 16, 4)


@pytest.mark.slow
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
