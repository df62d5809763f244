"""The training layer: several ranks give what one gives, and one rank gets the plain thing."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from nn_parallel import (
    ParallelExecutor,
    RankError,
    accumulate,
    average_parameters,
    initialize_ddp,
    prepare_dataloader,
    prepare_model,
    save_checkpoint,
    seed_everything,
    sync_buffers,
    unwrap_model,
)
from tests.support.ranks import AnyRanks

SAMPLES = 48


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


def trained(batch: int, every: int = 1, clip: float = math.inf, **options: Any) -> dict[str, torch.Tensor]:
    """The parameters, and the last norm of the gradients, after an epoch of SGD.

    With ``batch`` samples per rank and micro-step, and gradients clipped to a norm.
    """
    initialize_ddp()
    model = prepare_model(small_model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = prepare_dataloader(DataLoader(data(), batch_size=batch, shuffle=True))
    for step, (x, y) in enumerate(loader):
        last = step == len(loader) - 1
        together = every if step // every < len(loader) // every else len(loader) % every
        with accumulate(model, step, every, last=last) as complete:
            (nn.functional.cross_entropy(model(x), y) / together).backward()
        if complete:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(value) for name, value in unwrap_model(model).state_dict().items()} | {"norm": whole(norm)}


def trained_by_hand(batch: int, clip: float = math.inf) -> dict[str, torch.Tensor]:
    """The same in one process, by a plain loop."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for x, y in prepare_dataloader(DataLoader(data(), batch_size=batch, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict() | {"norm": norm}


def whole(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.clone()


def assert_close(results: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor], within: float) -> None:
    for result in results:
        assert result.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (result[name] - value).abs().max() <= within, name


def test_parts_of_a_batch_on_several_ranks_train_like_the_whole_on_one(any_ranks: AnyRanks) -> None:
    """Each rank with its part of the batch: the same parameters within 1e-6."""
    n = len(any_ranks.run(int))
    assert_close(any_ranks.run(trained, 24 // n), trained_by_hand(24), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_accumulated_parts_train_like_the_whole(executor2: ParallelExecutor, strategy: str) -> None:
    """Also where the last step of the epoch has fewer micro-steps: 6 of 4 samples per rank, 4 at a time."""
    wanted = trained_by_hand(2 * 4 * 4)
    assert_close(executor2.run(trained, 4, 4, strategy=strategy), wanted, 1e-6)
    assert_close([trained(8, every=4)], wanted, 1e-6)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torch_clips_the_norm_over_all_ranks(executor2: ParallelExecutor, strategy: str, every: int) -> None:
    """Of gradients averaged, sharded and accumulated: once they are complete, as in one process."""
    wanted = trained_by_hand(2 * 4 * every, clip=0.2)
    assert wanted["norm"] > 0.2
    assert_close(executor2.run(trained, 4, every, clip=0.2, strategy=strategy), wanted, 1e-6)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": prepare_model,
    "compiled DDP": lambda model: compiled(prepare_model(model)),
    "DDP of a compiled model": lambda model: prepare_model(compiled(model)),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_gradients_are_sent_only_with_the_last_micro_step(executor2: ParallelExecutor, wrap: Any) -> None:
    """Until then the ranks have their own, whatever is around the model."""

    def scenario() -> list[bool]:
        rank = initialize_ddp().rank
        model = wrap(nn.Linear(2, 1))
        alike = []
        for step in range(5):
            with accumulate(model, step, 3, last=step == 4) as complete:
                model(torch.full((1, 2), rank + 1.0)).sum().backward()
            gradients = [torch.zeros(1, 2) for _ in range(2)]
            dist.all_gather(gradients, unwrap_model(model).weight.grad)
            alike.append(torch.equal(*gradients) == complete)
            if complete:
                model.zero_grad()
        return alike

    assert executor2.run(scenario) == [[True] * 5] * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_zero_grad_ends_an_accumulation_that_is_not_complete(executor2: ParallelExecutor, strategy: str) -> None:
    """What an epoch leaves over is in no later gradient, neither of `accumulate` nor of a plain step."""

    def scenario() -> list[list[float]]:
        initialize_ddp()
        model = prepare_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), strategy=strategy)
        head = list(model.parameters())[-1]
        gradients = []
        for step, scale in ((0, 100.0), (1, 1.0), (0, 100.0), (None, 1.0)):
            with accumulate(model, step, 2) if step is not None else contextlib.nullcontext():
                (scale * model(torch.ones(1, 2))).sum().backward()
            gradients.append(whole(head.grad).tolist())
            model.zero_grad()
        return [gradients[1], gradients[3]]

    assert executor2.run(scenario) == [[[1.0], [1.0]]] * 2


def test_accumulate_needs_at_least_one() -> None:
    with pytest.raises(ValueError, match="every=0 must be at least 1"), accumulate(nn.Linear(1, 1), 0, 0):
        pass


@pytest.mark.parametrize("compression", ["fp16", "powersgd"])
def test_compressed_gradients_train_nearly_alike(executor2: ParallelExecutor, compression: str) -> None:
    """By torch's own hooks; the ranks keep the same parameters, which are not those without compression."""
    first, second = executor2.run(trained, 4, compression=compression)
    assert_close([first], second, 0)
    (exact, _) = executor2.run(trained, 4)
    difference = max(float((first[name] - exact[name]).abs().max()) for name in exact)
    assert 0 < difference < 0.1 if compression == "fp16" else difference < 1


@pytest.mark.ranks(2)
def test_options_reach_ddp() -> None:
    """A model with parameters that a step leaves out trains with ``find_unused_parameters``, and fails without it."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    def train(find: bool) -> None:
        model = prepare_model(Partly(), find_unused_parameters=find)
        assert isinstance(model, DistributedDataParallel)
        assert model.find_unused_parameters is find
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    initialize_ddp()
    train(find=True)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        train(find=False)


class Blocks(nn.Module):
    """A model of repeated blocks, as transformers are."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def test_options_reach_fully_shard(executor2: ParallelExecutor) -> None:
    """It computes in bfloat16, keeps whole parameters after forward, and what it has not got is an error on all."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    def scenario() -> Any:
        initialize_ddp()
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = prepare_model(small_model(), strategy="fsdp", mp_policy=precision, reshard_after_forward=False)
        out = model(torch.ones(1, 6))
        is_whole = [not hasattr(parameter, "full_tensor") for parameter in model.parameters()]
        model.reshard()
        kept = [parameter.dtype for parameter in model.parameters()]
        offload = CPUOffloadPolicy(pin_memory=False)
        prepare_model(small_model(), strategy="fsdp", offload_policy=offload)(torch.ones(1, 6)).sum().backward()
        with pytest.raises(RankError, match="unexpected keyword argument 'bucket_cap_mb'"):
            prepare_model(small_model(), strategy="fsdp", bucket_cap_mb=1)
        return out.dtype, all(is_whole), kept

    for dtype, is_whole, kept in executor2.run(scenario):
        assert dtype == torch.bfloat16
        assert is_whole
        assert set(kept) == {torch.float32}


def test_a_sharded_model_takes_half_the_memory(executor2: ParallelExecutor) -> None:
    """Parameters, and gradients, per rank; each repeated block is a unit, so that one at a time is whole."""

    def scenario(strategy: str) -> tuple[int, int, int]:
        from torch.distributed.fsdp import FSDPModule

        initialize_ddp()
        model = prepare_model(Blocks(), strategy=strategy)
        model(torch.ones(3, 256)).sum().backward()
        mine = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        return sum(p.untyped_storage().nbytes() for p in mine), sum(g.nbytes for g in gradients), units

    for sharded, whole_ in zip(executor2.run(scenario, "fsdp"), executor2.run(scenario, "ddp"), strict=True):
        assert sharded[0] <= 0.6 * whole_[0]
        assert sharded[1] <= 0.6 * whole_[1]
        assert (sharded[2], whole_[2]) == (5, 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_to_train_begins_as_that_of_rank_0(any_ranks: AnyRanks, strategy: str) -> None:
    """Parameters and buffers, however different they are on the other ranks."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
        prepared = unwrap_model(prepare_model(model, strategy=strategy))
        return [whole(tensor).unique().tolist() for tensor in prepared.state_dict().values()]

    assert any_ranks.run(scenario) == [[[1]] * 7] * len(any_ranks.run(int))


def test_a_model_is_prepared_once(executor2: ParallelExecutor) -> None:
    """DDP in DDP would average the gradients twice; what is inside can be prepared again."""

    def scenario() -> list[str]:
        initialize_ddp()
        ddp = prepare_model(nn.Linear(2, 1))
        assert prepare_model(ddp, strategy="none") is ddp
        assert isinstance(prepare_model(unwrap_model(ddp)), DistributedDataParallel)
        told = []
        sharded = prepare_model(nn.Linear(2, 1), strategy="fsdp")
        for model in (ddp, compiled(ddp), nn.Sequential(ddp, nn.Linear(1, 1)), sharded):
            for strategy in ("ddp", "fsdp"):
                try:
                    prepare_model(model, strategy=strategy)
                except ValueError as error:
                    told.append(str(error))
        return told

    for told in executor2.run(scenario):
        wrapped = "The model is prepared already, as a DistributedDataParallel in it shows: pass unwrap_model(model)."
        assert told[:6] == [wrapped] * 6
        sharded = "The model is prepared already, and stays sharded: make a new model and load its state."
        assert told[6:] == [sharded] * 2


def test_a_model_with_nothing_to_train_is_that_of_rank_0(any_ranks: AnyRanks) -> None:
    """DDP would refuse it."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
        prepared = prepare_model(model)
        return prepared is model, [tensor.unique().tolist() for tensor in model.state_dict().values()]

    assert any_ranks.run(scenario) == [(True, [[1]] * 7)] * len(any_ranks.run(int))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "zero"}, "strategy='zero' must be one of ddp, fsdp, dp, none"),
        ({"compression": "zip"}, "compression='zip' must be one of fp16, bf16, powersgd"),
        (
            {"strategy": "fsdp", "compression": "fp16"},
            "compression='fp16' is for strategy='ddp', not for strategy='fsdp'",
        ),
        (
            {"strategy": "none", "bucket_cap_mb": 1},
            "bucket_cap_mb: only for strategy='ddp' or 'fsdp', not for strategy='none'",
        ),
        ({"strategy": "dp"}, "strategy='dp' is for one process, but there are 2 ranks"),
    ],
)
def test_what_does_not_go_together_is_an_error(executor2: ParallelExecutor, options: Any, words: str) -> None:
    """On every rank, before anything is done to the model."""

    def scenario() -> str:
        initialize_ddp()
        try:
            prepare_model(small_model(), **options)
        except ValueError as error:
            return str(error)
        return "no error"

    assert all(words in told for told in executor2.run(scenario))


@pytest.mark.parametrize("wrong", [None, nn.Linear, [1, 2]])
def test_what_is_neither_a_model_nor_a_loader(wrong: Any) -> None:
    """It is said what is wanted."""
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not "):
        prepare_model(wrong)
    with pytest.raises(TypeError, match=r"takes a torch\.utils\.data\.DataLoader, not "):
        prepare_dataloader(wrong)


def test_without_batch_norm_over_ranks_on_the_cpu_a_line_says_so(executor2: ParallelExecutor) -> None:
    """Torch has it on accelerators only; training goes on with that of each rank."""

    def scenario() -> Any:
        initialize_ddp()
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("nn_parallel")
        logger.addHandler(handler)
        logger.setLevel("INFO")
        try:
            model = prepare_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), sync_batchnorm=True)
        finally:
            logger.removeHandler(handler)
            logger.setLevel("NOTSET")
        return lines, [type(module).__name__ for module in unwrap_model(model)]

    for lines, kinds in executor2.run(scenario):
        assert ["sync_batchnorm" in line for line in lines] == [True]
        assert kinds == ["Linear", "BatchNorm1d"]


def test_alone_the_model_is_moved_and_nothing_else() -> None:
    """No wrapper, no group; DataParallel passes through where there is one device."""
    model = small_model()
    for options in ({}, {"strategy": "fsdp"}, {"strategy": "none"}, {"compression": "fp16"}, {"sync_batchnorm": True}):
        assert prepare_model(model, **options) is model
    parallel = prepare_model(model, strategy="dp")
    assert isinstance(parallel, DataParallel)
    assert torch.equal(parallel(torch.ones(2, 6)), model(torch.ones(2, 6)))
    assert not dist.is_initialized()


def test_data_parallel_begins_with_the_current_device() -> None:
    """The model is there; torch itself would begin with the first device."""
    found = [torch.device("cuda", index) for index in range(3)]
    with (
        mock.patch("nn_parallel.training.model.accelerators", return_value=found),
        mock.patch("nn_parallel.training.model.initialize_ddp") as initialize,
        mock.patch("nn_parallel.training.model.DataParallel") as wrapper,
        mock.patch("torch.nn.Module.to", return_value="the model"),
    ):
        initialize.return_value = mock.Mock(world_size=1, device=found[1])
        prepare_model(nn.Linear(2, 2), strategy="dp")
    wrapper.assert_called_once_with("the model", [found[1], found[0], found[2]])


@pytest.mark.slow
def test_wrappers_are_taken_off(executor2: ParallelExecutor) -> None:
    """DDP and compile, in whatever order; a model that has none is itself."""

    def scenario() -> bool:
        initialize_ddp()
        model = small_model()
        return all(
            unwrap_model(wrapped) is model
            for wrapped in (
                model,
                prepare_model(torch.compile(model)),
                torch.compile(prepare_model(model)),
                DataParallel(model),
            )
        )

    assert all(executor2.run(scenario))
    averaged = AveragedModel(small_model(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert unwrap_model(averaged) is averaged  # a model of its own


def test_seeds_differ_by_the_rank(any_ranks: AnyRanks) -> None:
    """For Python, NumPy and torch; the same ones again with the same seed; alike with ``per_rank=False``."""

    def scenario(per_rank: bool) -> Any:
        initialize_ddp()
        results = []
        for _ in range(2):
            seed = seed_everything(10, per_rank=per_rank)
            results.append((seed, random.random(), np.random.rand(), torch.rand(1).item()))
        return results

    own = any_ranks.run(scenario, True)
    assert all(first == second for first, second in own)
    for kind in range(4):
        assert len({first[kind] for first, _ in own}) == len(own)
    assert [first[0] for first, _ in own] == [10 + rank for rank in range(len(own))]
    together = any_ranks.run(scenario, False)
    assert all(result == together[0] for result in together)
    torch.manual_seed(10)
    assert together[0][0][3] == torch.rand(1).item()


def test_parameters_are_averaged_by_weight(any_ranks: AnyRanks) -> None:
    """Federated averaging: parameters and buffers of every dtype; a rank of weight 0 only receives."""

    def scenario() -> Any:
        rank, n = initialize_ddp()[1:4:2]
        model = nn.Sequential(nn.Linear(2, 1, dtype=torch.float64), nn.BatchNorm1d(1))
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
        if rank == n - 1:
            model[0].weight.data.fill_(torch.nan)
        model.register_buffer("phase", torch.tensor([complex(rank + 1, 2 * rank + 2)]))
        average_parameters(model, weight=3 if rank == 0 else 0 if rank == n - 1 else 1)
        state = model.state_dict()
        phase = state.pop("phase").item()
        values = {value for tensor in state.values() for value in tensor.flatten().tolist()}
        return values, phase, model[0].weight.requires_grad, model[1].num_batches_tracked.dtype

    results = any_ranks.run(scenario)
    n = len(results)
    mean = (3 * 1 + sum(range(2, n))) / (3 + n - 2)
    for values, phase, needs_grad, counted in results:
        assert all(value in (pytest.approx(mean), round(mean)) for value in values)
        assert phase == pytest.approx(complex(mean, 2 * mean))
        assert (needs_grad, counted) == (True, torch.int64)


def test_a_group_averages_by_itself(any_ranks: AnyRanks) -> None:
    """The clients of one group do not hear of the others."""

    def scenario() -> float:
        rank, n = initialize_ddp()[1:4:2]
        groups = [dist.new_group([0]), dist.new_group(list(range(1, n)))]
        model = nn.Linear(1, 1)
        model.weight.data.fill_(rank)
        average_parameters(prepare_model(model, strategy="none"), group=groups[rank > 0])
        for group in groups:
            if dist.get_rank(group) >= 0:
                dist.destroy_process_group(group)
        return float(model.weight)

    results = any_ranks.run(scenario)
    n = len(results)
    assert results == [0.0] + [sum(range(1, n)) / (n - 1)] * (n - 1)


@pytest.mark.parametrize(
    ("width", "weight", "words"),
    [
        (lambda rank: 2 + rank, lambda rank: 1, "The calls of the ranks do not match"),
        (lambda rank: 2, lambda rank: 0, "the weights of all ranks are 0"),
        (lambda rank: 2, lambda rank: -1.0 if rank else 1, "weight=-1.0 is not a number of at least 0 on rank 1"),
        (lambda rank: 2, lambda rank: None if rank else 1, "weight=None is not a number of at least 0 on rank 1"),
    ],
)
def test_models_that_cannot_be_averaged_are_an_error_on_every_rank(
    executor2: ParallelExecutor, width: Any, weight: Any, words: str
) -> None:
    """Nothing has been changed then."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = nn.Linear(width(rank), 1)
        before = copy.deepcopy(model.state_dict())
        try:
            average_parameters(model, weight=weight(rank))
        except ValueError as error:
            return str(error), all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        return "no error", False

    for told, unchanged in executor2.run(scenario):
        assert words in told
        assert unchanged


def test_a_sharded_model_has_no_average(executor2: ParallelExecutor) -> None:
    """Its ranks hold parts of one model: an error on all."""

    def scenario() -> str:
        initialize_ddp()
        with pytest.raises(ValueError, match="sharded") as raised:
            average_parameters(prepare_model(small_model(), strategy="fsdp"))
        return str(raised.value)

    for told in executor2.run(scenario):
        assert "the model is sharded, so there is no whole model on rank 0" in told


def test_alone_the_average_is_the_model() -> None:
    """A bad weight is an error all the same."""
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    average_parameters(model, weight=5)
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="weight=-1 is not a number of at least 0"):
        average_parameters(model, weight=-1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_has_no_room_for_the_model(executor2: ParallelExecutor, strategy: str) -> None:
    """While the other one sends it its parameters: both raise."""

    class Large(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            if initialize_ddp().rank == 1:
                raise torch.OutOfMemoryError("no room")
            return super().to(*args, **kwargs)

    def scenario() -> list[int]:
        with pytest.raises(RankError, match=r"prepare_model\(\) failed on rank 1 of 2: OutOfMemoryError") as caught:
            prepare_model(Large(4, 4), strategy=strategy)
        return list(caught.value.failures)

    assert executor2.run(scenario) == [[1], [1]]


DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "frozen"])
def test_buffers_of_every_dtype_are_those_of_rank_0(any_ranks: AnyRanks, strategy: str) -> None:
    """Also of dtypes that gloo does not know, of any shape and layout; and they are averaged."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = nn.Linear(2, 2).requires_grad_(strategy != "frozen")
        for dtype in DTYPES:
            numbers = torch.arange(24.0).view(1, 2, 3, 4).remainder(2) * (rank == 0)
            model.register_buffer(str(dtype)[6:], numbers.contiguous(memory_format=torch.channels_last).to(dtype))
        model.register_buffer("scalar", torch.tensor(7 * (rank == 0), dtype=torch.int16))
        kept = model.state_dict()["uint16"]
        prepared = prepare_model(model, strategy="fsdp" if strategy == "fsdp" else "ddp")
        with torch.set_grad_enabled(strategy != "frozen"):
            prepared(torch.ones(1, 2))
        buffers = [buffer.float().flatten().tolist() for buffer in model.buffers()]
        is_in_place = kept.data_ptr() == model.get_buffer("uint16").data_ptr()
        if strategy != "fsdp":
            average_parameters(model)
        averaged = [buffer.float().flatten().tolist() for buffer in model.buffers()]
        return buffers, is_in_place, averaged == buffers

    expected = [[0.0, 1.0] * 12] * len(DTYPES) + [[7.0]]
    assert any_ranks.run(scenario) == [(expected, True, True)] * len(any_ranks.run(int))


def test_what_the_user_hides_from_ddp_stays_hidden(any_ranks: AnyRanks) -> None:
    """Beside what we hide because gloo does not know it."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = nn.Linear(2, 2)
        model.register_buffer("own", torch.tensor([float(rank)]))
        model.register_buffer("short", torch.tensor([rank], dtype=torch.int16))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
        prepare_model(model)(torch.ones(1, 2))
        return model.own.item(), model.short.item()

    results = any_ranks.run(scenario)
    assert results == [(float(rank), 0) for rank in range(len(results))]


def test_a_frozen_model_that_is_unfrozen_raises_until_it_is_prepared_again(any_ranks: AnyRanks) -> None:
    """Its gradients would differ between the ranks. Without gradients it may be called, and a copy of it prepared."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = prepare_model(nn.Linear(1, 1).requires_grad_(False))
        twin = copy.deepcopy(model)
        x = torch.full((1, 1), float(rank))
        model(x)
        model.requires_grad_()
        with torch.no_grad():
            model(x)
        with pytest.raises(RuntimeError, match="The Linear had nothing to train when prepare_model.. was called"):
            model(x)
        gradients = []
        for each in (model, twin.requires_grad_()):
            prepared = prepare_model(each)  # kept: DDP averages in backward only as long as it lives
            prepared(x).sum().backward()
            gradients.append(each.weight.grad.item())
        each(x)
        return gradients

    results = any_ranks.run(scenario)
    assert results == [[(len(results) - 1) / 2] * 2] * len(results)


@pytest.mark.parametrize("average", [False, True])
def test_synchronised_buffers_are_those_of_the_checkpoint(any_ranks: AnyRanks, average: bool, tmp_path: Path) -> None:
    """Batch norm evaluates then by one model on all ranks, without a wrapper, and by the one that is saved."""

    def scenario() -> Any:
        rank = initialize_ddp().rank
        model = prepare_model(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        for _ in range(3):
            model(torch.randn(4, 2, generator=torch.Generator().manual_seed(rank)) + rank).sum().backward()
        own = unwrap_model(model)[1].running_mean.tolist()
        sync_buffers(model, average=average)
        save_checkpoint(tmp_path / "a.pt", model=model)
        return own, unwrap_model(model)[1].running_mean.tolist(), int(unwrap_model(model)[1].num_batches_tracked)

    results = any_ranks.run(scenario)
    own, synchronised, counts = zip(*results, strict=True)
    assert own[0] != own[1]
    saved = torch.load(tmp_path / "a.pt", weights_only=True)["model"]["1.running_mean"].tolist()
    assert list(synchronised) == [saved] * len(results)
    assert set(counts) == {3}
    expected = [sum(column) / len(own) for column in zip(*own, strict=True)] if average else own[0]
    assert saved == pytest.approx(expected)
    sync_buffers(nn.BatchNorm1d(3), average=average)  # alone: nothing to do
