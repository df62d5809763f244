"""`resolve_device`, `parse_devices`, `device_of_rank`, `call_on_device`: which device, and how a function gets it."""

from __future__ import annotations

import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nn_parallel import resolve_device
from nn_parallel._engine import devices as module
from nn_parallel._engine.devices import (
    call_on_device,
    cpu_count,
    device_of_rank,
    hardware_id,
    named_device,
    parse_devices,
)
from nn_parallel.errors import LaunchError

CPU = torch.device("cpu")
DEVICE = torch.device("meta")  # stands for the worker's own; it exists on every machine
Show = Callable[[int], list[torch.device]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Make the machine show so many accelerators.

    A fake behind the interface of `accelerators`: this machine may have none, and no test here runs anything on them.
    """

    def show(count: int) -> list[torch.device]:
        found = [torch.device("cuda", index) for index in range(count)]
        monkeypatch.setattr(module, "accelerators", lambda: list(found))
        monkeypatch.setattr(module, "_warned", False)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
        return found

    return show


@pytest.mark.parametrize("wanted", ["cpu", CPU])
def test_the_cpu_is_the_cpu(wanted: Any, show: Show) -> None:
    """The CPU is always there, without a word."""
    show(2)
    assert resolve_device(wanted) == CPU


@pytest.mark.parametrize("wanted", ["cuda", "gpu", "cuda:9", "gpu:1", "mps", torch.device("cuda", 0)])
def test_without_an_accelerator_the_cpu_with_one_warning_per_program(wanted: Any, show: Show) -> None:
    """A laptop runs the same script; it is told so once, at its own line, and not again."""
    show(0)
    with pytest.warns(UserWarning, match=re.escape(f"{wanted} was asked for and there is no accelerator")) as caught:
        assert resolve_device(wanted) == CPU
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        assert resolve_device("cuda") == resolve_device("gpu:3") == CPU


@pytest.mark.parametrize("wanted", ["cuda", "gpu"])
def test_cuda_and_gpu_mean_the_current_accelerator(wanted: str, show: Show) -> None:
    """Without a number it is the one that torch takes for the current one."""
    assert show(3)[1] == resolve_device(wanted)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (None, None),
        ("cuda", None),
        ("gpu", None),
        (torch.device("cuda"), None),
        ("cuda:2", torch.device("cuda", 2)),
        ("gpu:0", torch.device("cuda", 0)),
        ("cpu", CPU),
    ],
)
def test_which_device_a_rank_names(wanted: Any, named: torch.device | None, show: Show) -> None:
    """One without a number is for the local rank to say, or all ranks of a node would take the current one."""
    show(3)
    assert named_device(wanted) == named


@pytest.mark.parametrize("wanted", ["cuda:2", "gpu:2", torch.device("cuda", 2)])
def test_a_number_means_that_accelerator(wanted: Any, show: Show) -> None:
    """With a number it is that one."""
    assert show(3)[2] == resolve_device(wanted)


def test_cuda_means_the_accelerator_of_another_type_too(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that says "cuda" runs on a machine whose accelerator is of another type."""
    show(0)
    monkeypatch.setattr(module, "accelerators", lambda: [torch.device("xpu", 0), torch.device("xpu", 1)])
    assert resolve_device("cuda") == resolve_device("xpu:1") == torch.device("xpu", 1)


@pytest.mark.parametrize("wanted", ["cuda:9", "gpu:3", "mps", "cuda:256", "cuda:254"])  # torch keeps 8 bits of it
def test_an_accelerator_that_is_not_there_is_an_error(wanted: str, show: Show) -> None:
    """Where there are accelerators, another than those is an error that says what exists."""
    show(3)
    with pytest.raises(ValueError, match=r"There is no .*: the accelerators are cuda:0 to cuda:2"):
        resolve_device(wanted)


@pytest.mark.parametrize("wanted", ["nonsense", "", "0", "cuda:-1", "cuda:x", "cuda:99999999999"])
@pytest.mark.parametrize("count", [0, 2])
def test_what_is_no_device_is_an_error(wanted: str, count: int, show: Show) -> None:
    """A word that torch does not know is an error that repeats it, with or without accelerators."""
    show(count)
    with pytest.raises(ValueError, match=re.escape(f"{wanted!r} is not a device")):
        resolve_device(wanted)


@pytest.mark.parametrize(
    ("devices", "numbers"),
    [
        ("all", [0, 1, 2, 3]),
        (" all ", [0, 1, 2, 3]),
        ("cuda", [0, 1, 2, 3]),
        ("gpu", [0, 1, 2, 3]),
        (torch.device("cuda"), [0, 1, 2, 3]),
        ("0", [0]),
        ("0,2-3", [0, 2, 3]),
        (" 0 , 2-3 ", [0, 2, 3]),
        ("3,0", [3, 0]),
        ("1,1", [1, 1]),
        ("cuda:1", [1]),
        ("cuda:1,cuda:3", [1, 3]),
        ([0, 2], [0, 2]),
        (("cuda:0", torch.device("cuda", 1), 2, "3"), [0, 1, 2, 3]),
        (torch.device("cuda", 3), [3]),
    ],
)
def test_devices_by_number_range_name_or_list(devices: Any, numbers: list[int], show: Show) -> None:
    """Each way to write the accelerators names the same ones, in the order and as often as written."""
    found = show(4)
    assert parse_devices(devices) == [found[number] for number in numbers]


@pytest.mark.parametrize(("devices", "count"), [("cpu", 1), ("cpu,cpu", 2), (["cpu", CPU, "cpu"], 3), (CPU, 1)])
@pytest.mark.parametrize("accelerators", [0, 2])
def test_the_cpu_once_per_mention(devices: Any, count: int, accelerators: int, show: Show) -> None:
    """The CPU may be asked for on any machine, and several times for several workers."""
    show(accelerators)
    assert parse_devices(devices) == [CPU] * count


@pytest.mark.parametrize(
    ("devices", "count", "message"),
    [
        ("all", 0, "devices='all' asks for accelerators, and there is none; 'cpu' asks for the CPU"),
        ("cpu,cuda:0", 2, "devices mixes cpu and cuda"),
        ("cpu,cuda", 0, "devices='cuda' asks for accelerators, and there is none"),
        ("cuda:0", 0, "There is no cuda:0: this machine has no accelerator, only the cpu"),
        (["cpu", 0], 1, "devices mixes cpu and cuda"),
        ([], 2, "devices names no device; the accelerators are cuda:0 to cuda:1"),
        ([], 0, "devices names no device; this machine has no accelerator"),
        ("", 1, "'' names no device; the only accelerator is cuda:0"),
        ("0,,1", 2, "'' names no device"),
        ("2", 2, "There is no accelerator 2: the accelerators are cuda:0 to cuda:1"),
        ("0-4", 4, "There is no accelerator 0-4"),
        ("3-1", 4, "There is no accelerator 3-1"),
        ("1-", 4, "'1-' names no device"),
        ([-1], 2, "'-1' names no device"),
        ("cuda:2", 2, "There is no cuda:2"),
        ("mps", 2, "There is no mps"),
        ("nonsense", 2, "'nonsense' names no device"),
        ("0", 0, "There is no accelerator 0: this machine has no accelerator"),
    ],
)
def test_devices_that_do_not_exist_are_an_error(devices: Any, count: int, message: str, show: Show) -> None:
    """The error says which one is wrong and what there is; one pool has one kind."""
    show(count)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_devices(devices)


def test_a_rank_takes_the_cpu_where_there_is_nothing_else(show: Show) -> None:
    """Without accelerators every rank is on the CPU, without a warning."""
    show(0)
    assert {device_of_rank(local_rank, 8) for local_rank in range(8)} == {CPU}


@pytest.mark.parametrize("local_rank", range(4))
def test_a_rank_takes_the_only_visible_accelerator(local_rank: int, show: Show) -> None:
    """A launcher that shows each rank its own accelerator gives it the number 0 everywhere."""
    assert show(1)[0] == device_of_rank(local_rank, 4)


@pytest.mark.parametrize("count", [4, 6])
@pytest.mark.parametrize("local_rank", range(4))
def test_a_rank_takes_the_accelerator_of_its_number(local_rank: int, count: int, show: Show) -> None:
    """Where there are enough for all ranks of the node, the local rank is the number."""
    assert show(count)[local_rank] == device_of_rank(local_rank, 4)


@pytest.mark.parametrize("local_rank", range(4))
def test_too_few_accelerators_are_an_error_on_every_rank(local_rank: int, show: Show) -> None:
    """Two ranks never share one silently: all ranks of the node get an error with both counts and what to do."""
    show(3)
    with pytest.raises(
        LaunchError, match=r"4 ranks run on this node and the accelerators are cuda:0 to cuda:2: start at most 3 ranks"
    ):
        device_of_rank(local_rank, 4)


def first(device: Any, a: Any, b: Any = "b") -> Any:
    return a, b, device


def middle(a: Any, device: Any, b: Any = "b") -> Any:
    return a, b, device


def last(a: Any, b: Any = "b", device: Any = None) -> Any:
    return a, b, device


def keyword_only(a: Any, b: Any = "b", *, device: Any = None) -> Any:
    return a, b, device


def after_star(*args: Any, device: Any) -> Any:
    a, b = args if len(args) == 2 else (*args, "b")
    return a, b, device


def positional_only(a: Any, device: Any, b: Any = "b", /) -> Any:
    return a, b, device


@functools.wraps(middle)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return middle(*args, **kwargs)


class Callables:
    def method(self, a: Any, device: Any, b: Any = "b") -> Any:
        return a, b, device

    @classmethod
    def of_class(cls, device: Any, a: Any, b: Any = "b") -> Any:
        return a, b, device

    @staticmethod
    def static(a: Any, device: Any, b: Any = "b") -> Any:
        return a, b, device

    def __call__(self, a: Any, b: Any = "b", device: Any = None) -> Any:
        return a, b, device


WITH_DEVICE = [first, middle, last, keyword_only, after_star, positional_only, wrapped]
WITH_DEVICE += [Callables().method, Callables.of_class, Callables.static, Callables()]
BY_KEYWORD = [fn for fn in WITH_DEVICE if fn not in (after_star, positional_only)]


@pytest.mark.parametrize("fn", WITH_DEVICE)
@pytest.mark.parametrize("args", [(1,), (1, 2)])
def test_the_device_is_bound_by_name_wherever_it_stands(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The caller's positional arguments fill the other parameters, in their order."""
    assert call_on_device(fn, args, {}, DEVICE) == ((*args, "b")[0], (*args, "b")[1], DEVICE)


@pytest.mark.parametrize("fn", BY_KEYWORD)
@pytest.mark.parametrize(("args", "kwargs"), [((1,), {"b": 2}), ((), {"a": 1, "b": 2}), ((), {"b": 2, "a": 1})])
def test_the_device_goes_with_keywords(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The caller may name any of the other parameters."""
    assert call_on_device(fn, args, kwargs, DEVICE) == (1, 2, DEVICE)


@pytest.mark.parametrize("fn", BY_KEYWORD)
def test_a_device_that_the_caller_passed_stays(fn: Callable[..., Any]) -> None:
    """``device=`` in the call wins over the worker's own."""
    assert call_on_device(fn, (), {"a": 1, "device": "mine"}, DEVICE) == (1, "b", "mine")


@pytest.mark.parametrize(
    "fn",
    [
        functools.partial(first, b="b"),
        functools.partial(middle, b="b"),
        functools.partial(keyword_only, b="b"),
    ],
)
def test_a_partial_is_given_the_device(fn: Callable[..., Any]) -> None:
    """What a partial has bound already is not in the way."""
    assert call_on_device(fn, (1,), {}, DEVICE) == (1, "b", DEVICE)
    assert call_on_device(functools.partial(middle, 1), (2,), {}, DEVICE) == (1, 2, DEVICE)


@pytest.mark.parametrize("fn", [first, middle, last, keyword_only])
def test_a_device_that_a_partial_has_bound_stays(fn: Callable[..., Any]) -> None:
    """``partial(f, device=...)`` is a caller that passed ``device=`` itself."""
    assert call_on_device(functools.partial(fn, device="mine"), (), {"a": 1}, DEVICE) == (1, "b", "mine")


def test_a_positional_only_device_after_parameters_left_out() -> None:
    """The device never lands in another parameter: those before it keep their defaults."""

    def fn(a: Any = "a", device: Any = None, /) -> Any:
        return a, device

    assert call_on_device(fn, (), {}, DEVICE) == ("a", DEVICE)


def test_a_positional_only_parameter_that_is_missing_is_pythons_own_error() -> None:
    """Nothing takes its place."""

    def fn(a: Any, device: Any, /) -> Any:
        return a, device

    assert call_on_device(fn, (1,), {}, DEVICE) == (1, DEVICE)
    with pytest.raises(TypeError, match="missing .* required positional argument"):
        call_on_device(fn, (), {}, DEVICE)


def test_a_function_without_such_a_parameter_is_called_as_it_is() -> None:
    """No parameter called device: nothing is added, neither to ``*args`` nor to ``**kwargs``."""
    assert call_on_device(lambda a, b: (a, b), (1, 2), {}, DEVICE) == (1, 2)
    assert call_on_device(lambda **kwargs: kwargs, (), {"a": 1}, DEVICE) == {"a": 1}
    assert call_on_device(lambda *device: device, (1,), {}, DEVICE) == (1,)
    assert call_on_device(lambda **device: device, (), {"a": 1}, DEVICE) == {"a": 1}
    assert call_on_device(max, (1, 2), {}, DEVICE) == 2  # a builtin that tells no signature
    assert call_on_device(dict, (), {"a": 1}, DEVICE) == {"a": 1}


@pytest.mark.parametrize("fn", [np.zeros, functools.partial(np.zeros, dtype=int), torch.nn.GroupNorm])
def test_a_function_of_a_library_is_called_as_it_is(fn: Callable[..., Any]) -> None:
    """Its parameter ``device`` means something else: numpy takes a text."""
    assert "device" in inspect.signature(fn).parameters
    args = (2, 4) if fn is torch.nn.GroupNorm else (2,)
    assert repr(call_on_device(fn, args, {}, DEVICE)) == repr(fn(*args))
    if fn is torch.nn.GroupNorm:
        assert call_on_device(fn, args, {}, DEVICE).weight.device == CPU


@pytest.mark.parametrize("fn", [last, keyword_only])
def test_no_device_is_bound_where_there_is_none(fn: Callable[..., Any]) -> None:
    """``device=None`` (``pass_device=False``) leaves the call alone."""
    assert call_on_device(fn, (1,), {}, None) == (1, "b", None)


@pytest.mark.parametrize("fn", [first, middle, last, keyword_only, functools.partial(first)])
def test_an_argument_too_many_is_told_that_the_device_is_bound(fn: Callable[..., Any]) -> None:
    """As when the caller also passes the device by position."""
    told = r"was given 3 positional arguments and takes 2 beside 'device', which pass_device=True binds to the worker's"
    with pytest.raises(TypeError, match=f"{told} device. Leave the device out .* or set pass_device=False"):
        call_on_device(fn, (DEVICE, 1, 2), {}, DEVICE)


def test_any_number_of_arguments_may_go_before_and_after_the_device() -> None:
    """Where the function takes them."""

    def fn(a: Any, device: Any, *rest: Any) -> Any:
        return a, device, rest

    assert call_on_device(fn, (1, 2, 3), {}, DEVICE) == (1, DEVICE, (2, 3))
    assert call_on_device(lambda *rest, device: (rest, device), (1, 2), {}, DEVICE) == ((1, 2), DEVICE)


def test_an_accelerator_may_have_no_properties() -> None:
    """As on MPS, a module that every build of torch has."""
    assert hardware_id(torch.device("mps", 0)) is None


def test_cpu_count_is_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cpuset counts, not the machine; where the system has none, the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cpu_count() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cpu_count() == 64
