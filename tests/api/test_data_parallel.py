"""`parallel_on_all_devices`: the batch split, a thread per device, results and gradients as in the plain call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nn_parallel import data_parallel as module
from nn_parallel import parallel_on_all_devices
from nn_parallel._engine.ranks.context import RankContext, join
from nn_parallel.world import World

Use = Callable[[int], None]


def _fake_accelerators(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A fake behind the interface of `accelerators`: the CPU stands for several devices."""
    monkeypatch.setattr(module, "accelerators", lambda: [torch.device("cpu")] * count)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    return functools.partial(_fake_accelerators, monkeypatch)


@pytest.fixture(params=[2, 3])
def devices(request: pytest.FixtureRequest, use: Use) -> int:
    """The test runs on two and on three devices."""
    count: int = request.param
    use(count)
    return count


class Seen:
    """Records what each call got, and from which thread."""

    def __init__(self, result: Callable[..., Any] = lambda x: x) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.threads: set[int] = set()
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        self.threads.add(threading.get_ident())
        return self._result(*args, **kwargs)


def test_the_batch_is_split_over_threads_and_gathered_in_order(devices: int) -> None:
    """One call per device, in threads of their own, each with its share; nothing of them remains."""
    at_once = threading.Barrier(devices)  # breaks, by its timeout, unless all calls run at the same time
    seen = Seen(lambda x: x * 2 + 0 * at_once.wait(30))
    batch = torch.arange(14).reshape(7, 2)
    before = threading.active_count()
    assert torch.equal(parallel_on_all_devices(seen)(batch), batch * 2)
    assert sorted(len(args[0]) for args, _ in seen.calls) == {2: [3, 4], 3: [2, 2, 3]}[devices]
    assert len(seen.calls) == devices
    assert threading.get_ident() not in seen.threads
    assert threading.active_count() == before


@settings(max_examples=60)
@given(length=st.integers(0, 12), devices=st.integers(1, 6))
def test_each_item_runs_exactly_once_in_its_place(length: int, devices: int) -> None:
    """Whatever the length and the number of devices, no item is lost, doubled or moved; no call is empty."""
    seen = Seen()
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fake_accelerators(monkeypatch, devices)
        result = parallel_on_all_devices(seen)(torch.arange(length))
    assert result.tolist() == list(range(length))
    assert sorted(item for args, _ in seen.calls for item in args[0].tolist()) == list(range(length))
    assert len(seen.calls) == max(1, min(length, devices))


@pytest.mark.parametrize("batch", [torch.empty(0, 3), torch.ones(1, 3), torch.tensor(3.0), [1, 2], None])
def test_what_cannot_be_split_is_a_plain_call(batch: Any, devices: int) -> None:
    """An empty batch, one item, a 0-dim tensor or no tensor at all: one call, in this thread, on the same object."""
    seen = Seen()
    assert parallel_on_all_devices(seen)(batch) is batch
    assert seen.calls == [((batch,), {})]
    assert seen.threads == {threading.get_ident()}


@pytest.mark.parametrize("count", [0, 1])
def test_with_one_device_or_none_it_is_a_plain_call(count: int, use: Use) -> None:
    """Nothing to split over: also results that are no tensors are fine."""
    use(count)
    seen = Seen(lambda x, *, scale: {"any": [scale, "thing"]})
    batch = torch.ones(4)
    assert parallel_on_all_devices(seen)(batch, scale=2) == {"any": [2, "thing"]}
    assert seen.calls[0][0][0] is batch
    assert seen.threads == {threading.get_ident()}


def test_under_a_launcher_it_is_a_plain_call(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the other devices belong to other ranks."""
    launched = World(False, 1, 1, 2, torch.device("cpu"), launcher="torchrun")
    monkeypatch.setattr(module, "current_world", lambda: launched)
    seen = Seen()
    batch = torch.ones(4)
    assert parallel_on_all_devices(seen)(batch) is batch
    assert seen.threads == {threading.get_ident()}


def test_a_process_that_is_alone_after_a_fallback_uses_its_devices(devices: int) -> None:
    """They are nobody else's."""
    join(RankContext(World(False, 0, 0, 1, torch.device("cpu"))))
    try:
        seen = Seen()
        parallel_on_all_devices(seen)(torch.ones(4))
    finally:
        join(None)
    assert len(seen.calls) == devices


def test_tensors_in_nests_and_keywords_are_split_and_the_rest_is_passed_on(devices: int) -> None:
    """Lists, tuples and dicts are looked into; 0-dim tensors go to every device, other objects as they are."""
    marker, scale = object(), torch.tensor(10)
    seen = Seen(lambda batch, *_, mask, **__: batch["x"][0] * mask)
    x, mask = torch.arange(6), torch.arange(6) % 2
    result = parallel_on_all_devices(seen)({"x": [x, "text"]}, scale, (marker, 3), mask=mask, note=None)
    assert torch.equal(result, x * mask)
    for args, kwargs in seen.calls:
        assert len(args[0]["x"][0]) == len(kwargs["mask"]) == 6 // devices
        assert args[0]["x"][1] == "text"
        assert args[1].item() == 10
        assert args[2] == (marker, 3)
        assert kwargs["note"] is None


def test_tensors_of_different_lengths_are_an_error(devices: int) -> None:
    """The error names the function and both lengths, and nothing was called."""
    calls = []

    @parallel_on_all_devices
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x

    with pytest.raises(ValueError, match=r"forward\(\) got tensors of lengths 4, 6 along dimension 0"):
        forward(torch.ones(6, 2), y=torch.ones(4))
    assert calls == []


@pytest.mark.parametrize("func", [functools.partial(torch.add, alpha=2), nn.Bilinear(2, 2, 1)])
def test_callables_without_a_name_get_the_same_error(func: Callable[..., Any], devices: int) -> None:
    """Partials and modules are called like functions and fail like them."""
    with pytest.raises(ValueError, match="lengths 4, 6"):
        parallel_on_all_devices(func)(torch.ones(6, 2), torch.ones(4, 2))


def test_scalar_results_are_stacked(devices: int) -> None:
    """A 0-dim result per device becomes a vector of them, in the order of the devices."""
    parts = torch.tensor_split(torch.arange(6.0), devices)
    means = parallel_on_all_devices(torch.mean)(torch.arange(6.0))
    assert means.tolist() == [part.mean().item() for part in parts]


class Output(NamedTuple):
    logits: torch.Tensor
    extras: dict[str, Any]


def test_nests_of_results_are_gathered_leaf_by_leaf(devices: int) -> None:
    """Tuples, dicts, lists and named tuples come back as such; scalars inside are stacked, the rest concatenated."""

    @parallel_on_all_devices
    def forward(x: torch.Tensor) -> Output:
        return Output(x * 2, {"sum": x.sum(), "both": [x, (x + 1,)], "none": ()})

    x = torch.arange(12.0).reshape(6, 2)
    result = forward(x)
    assert type(result) is Output
    assert torch.equal(result.logits, x * 2)
    assert torch.equal(result.extras["sum"], torch.stack([part.sum() for part in torch.tensor_split(x, devices)]))
    assert torch.equal(result.extras["both"][0], x)
    assert torch.equal(result.extras["both"][1][0], x + 1)
    assert result.extras["none"] == ()


@pytest.mark.parametrize(
    ("value", "name"), [(3.0, "float"), ("text", "str"), (None, "NoneType"), ([torch.ones(1), 2], "int")]
)
def test_a_result_that_is_no_tensor_is_an_error(value: Any, name: str, devices: int) -> None:
    """On several devices there is no rule for joining other things; the error names the function and the type."""

    @parallel_on_all_devices
    def forward(x: torch.Tensor) -> Any:
        return value

    with pytest.raises(TypeError, match=rf"forward\(\) returned a {name}: .* must return tensors"):
        forward(torch.ones(4))


def test_different_nests_are_an_error(devices: int) -> None:
    """What has another structure on another device cannot be gathered, and is not taken for the first one's."""

    @parallel_on_all_devices
    def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"first" if 0 in x.tolist() else "other": x}

    with pytest.raises((TypeError, ValueError), match="forward"):
        forward(torch.arange(6))


def _loss(model: nn.Module, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return model(x).square() * scale


def test_gradients_flow_as_in_the_plain_call(devices: int) -> None:
    """The original inputs, 0-dim tensors and parameters get the plain call's gradients, and stay what they were."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(7, 3, dtype=torch.double, requires_grad=True)
    scale = torch.tensor(3.0, dtype=torch.double, requires_grad=True)
    wanted: list[torch.Tensor] = [x, scale, *model.parameters()]
    expected = torch.autograd.grad(_loss(model, x, scale).sum(), wanted)
    result = parallel_on_all_devices(_loss)(model, x, scale=scale)
    assert torch.allclose(result, _loss(model, x, scale))
    result.sum().backward()
    for tensor, gradient in zip(wanted, expected, strict=True):
        assert tensor.grad is not None
        assert torch.allclose(tensor.grad, gradient)
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 4


def test_each_device_gets_a_module_of_its_own(devices: int) -> None:
    """What one thread does to its module does not reach the others, nor the caller's."""
    seen = Seen(lambda model, x: model.eval()(x))
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    parallel_on_all_devices(seen)(model, torch.ones(6, 2))
    assert len({id(args[0]) for args, _ in seen.calls} - {id(model)}) == devices
    assert model.training


def test_a_frozen_parameter_gets_no_gradient(devices: int) -> None:
    """``requires_grad=False`` goes to the devices with the parameter."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    parallel_on_all_devices(lambda m, x: m(x))(model, torch.ones(6, 2)).sum().backward()
    assert model.bias.grad is None
    assert torch.equal(model.weight.grad, torch.full((2, 2), 6.0))


def _modes(x: torch.Tensor) -> torch.Tensor:
    on = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    return torch.tensor([[*on, torch.get_autocast_dtype("cpu") is torch.float16]])


@pytest.mark.parametrize(
    "mode",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", torch.float16),
        functools.partial(torch.autocast, "cpu", torch.bfloat16),
    ],
)
def test_the_modes_of_the_caller_hold_in_the_threads(mode: Callable[[], Any], devices: int) -> None:
    """no_grad, inference mode and autocast are thread-local in torch; here they are the caller's."""
    with mode():
        expected = _modes(torch.empty(0))
        assert torch.equal(parallel_on_all_devices(_modes)(torch.ones(6)), expected.expand(devices, -1))


def test_no_grad_keeps_no_graph(devices: int) -> None:
    """Under no_grad the result of a training module wants no gradient."""
    with torch.no_grad():
        assert not parallel_on_all_devices(lambda m, x: m(x))(nn.Linear(2, 2), torch.ones(4, 2)).requires_grad


@pytest.mark.parametrize("bad", [0, 5])
def test_an_exception_in_one_thread_is_raised(bad: int, devices: int) -> None:
    """The very exception of the function, on whichever device, once all threads have ended."""
    error = KeyError("mine")
    before = threading.active_count()

    @parallel_on_all_devices
    def forward(x: torch.Tensor) -> torch.Tensor:
        if bad in x.tolist():
            raise error
        return x

    with pytest.raises(KeyError) as caught:
        forward(torch.arange(6))
    assert caught.value is error
    assert threading.active_count() == before


def test_the_function_keeps_its_name_and_help() -> None:
    """Decorating changes neither name nor docstring nor signature."""

    @parallel_on_all_devices
    def forward(batch: torch.Tensor) -> torch.Tensor:
        """Helps."""
        return batch

    assert (forward.__name__, forward.__doc__) == ("forward", "Helps.")
