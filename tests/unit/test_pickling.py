"""`dumps` and `loads`: everything comes out as it went in, or an error gives the path to what cannot be sent."""

from __future__ import annotations

import copy
import functools
import gc
import math
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nn_parallel._engine import pickling
from nn_parallel._engine.pickling import dumps, loads

# Torch calls these dtypes and layouts experimental; that is its own affair.
pytestmark = pytest.mark.filterwarnings(
    "ignore:B?Complex(Half|32) support", "ignore:Sparse CSR tensor support", "ignore:.*quantize_per_"
)
QUANTISED = ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"]
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
PLAIN_DTYPES = sorted(set(DTYPES) - set(QUANTISED))
SCRIPT = """
def outer():
    return lambda: 1 / 0
"""


@pytest.fixture(autouse=True, params=["all out of band", "the large out of band"])
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds for buffers that stay in the pickle, and for those that leave it."""
    if request.param == "all out of band":
        monkeypatch.setattr(pickling, "LARGE_BYTES", 1)


def round_trip(obj: Any) -> Any:
    """``obj`` as another process would get it, its buffers copied to writable memory."""
    packed = dumps(obj)
    return loads(packed.pickle, [bytearray(buffer) for buffer in packed.buffers])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, in a further dimension, for dtypes that torch can neither compare nor copy."""
    size, start = tensor.dtype.itemsize, tensor.storage_offset() * tensor.dtype.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (*tensor.shape, size), (*strides, 1))


def _tensor_of(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A tensor of any dtype, its bytes counting up."""
    data = torch.arange(math.prod(shape) * dtype.itemsize).to(torch.uint8)
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, shape, strides)


@st.composite
def shapes_and_views(draw: st.DrawFn) -> tuple[list[int], list[Callable[[torch.Tensor], torch.Tensor]]]:
    """A shape, 0-dim and empty ones too, and steps that make a tensor of it a view."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    probe = torch.empty(shape)
    for kind in draw(st.lists(st.sampled_from(["permute", "slice", "select", "expand", "unsqueeze"]), max_size=4)):
        step: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.unsqueeze, dim=0)
        if kind == "expand":
            step = functools.partial(_repeated, times=draw(st.integers(0, 3)))
        elif kind == "permute":
            step = functools.partial(torch.permute, dims=draw(st.permutations(range(probe.dim()))))
        elif kind in ("slice", "select") and probe.dim():
            dim = draw(st.integers(0, probe.dim() - 1))
            where: Any = slice(draw(st.integers(0, 2)), draw(st.integers(2, 4)), draw(st.integers(1, 2)))
            if kind == "select" and probe.shape[dim]:
                where = draw(st.integers(0, probe.shape[dim] - 1))
            step = functools.partial(_indexed, where=(*[slice(None)] * dim, where))
        steps.append(step)
        probe = step(probe)
    return shape, steps


def _repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor.expand(times, *tensor.shape)


def _indexed(tensor: torch.Tensor, where: tuple[Any, ...]) -> torch.Tensor:
    return tensor[where]


@pytest.mark.parametrize("name", PLAIN_DTYPES)
@settings(max_examples=30)
@given(made=shapes_and_views())
def test_a_tensor_of_any_dtype_shape_and_stride_comes_out_the_same(
    name: str, made: tuple[list[int], list[Callable[[torch.Tensor], torch.Tensor]]]
) -> None:
    """Same dtype, shape, strides and bytes; in its own writable memory."""
    shape, steps = made
    tensor = functools.reduce(lambda view, step: step(view), steps, _tensor_of(DTYPES[name], shape))
    result = round_trip(tensor)
    assert (type(result), result.dtype, result.device) == (torch.Tensor, tensor.dtype, tensor.device)
    assert (result.shape, result.stride()) == (tensor.shape, tensor.stride())
    assert torch.equal(_bytes_of(result), _bytes_of(tensor))
    if tensor.numel():
        before = _bytes_of(tensor).clone()
        torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage()).bitwise_not_()
        assert torch.equal(_bytes_of(tensor), before)
        assert result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's own code warns, in `_rebuild_qtensor`
@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32"])
def test_quantised_tensors_keep_their_scheme(name: str) -> None:
    """Values, scales and zero points, per tensor and per channel."""
    values = torch.arange(6.0).reshape(2, 3)
    per_tensor = torch.quantize_per_tensor(values, 0.5, 1, DTYPES[name])
    per_channel = torch.quantize_per_channel(values, torch.tensor([0.5, 2.0]), torch.tensor([0, 1]), 0, DTYPES[name])
    for tensor in (per_tensor, per_channel):
        result = round_trip(tensor)
        assert (result.dtype, result.qscheme()) == (tensor.dtype, tensor.qscheme())
        assert torch.equal(result, tensor)


def test_a_large_tensor_leaves_the_pickle_without_a_copy() -> None:
    """The buffer is a view of the tensor's own memory, which it keeps alive, and the pickle stays small."""
    tensor = torch.arange(1 << 18)
    address = tensor.data_ptr()
    packed = dumps({"nested": [tensor]})
    assert len(packed.pickle) < 1_000
    assert [torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() for buffer in packed.buffers[1:]] == [address]
    del tensor
    gc.collect()
    assert torch.equal(torch.frombuffer(packed.buffers[1], dtype=torch.int64), torch.arange(1 << 18))


@pytest.mark.slow
def test_what_was_packed_may_be_garbage_in_a_cycle() -> None:
    """A failed send leaves a cycle of its exception and its frame, the packed object in it: no crash when that goes."""
    code = """
import gc, torch
from nn_parallel._engine.pickling import dumps

def send():
    packed = dumps([torch.arange(5), torch.ones(2)])
    try:
        raise OSError("the worker is gone")
    except OSError as error:
        kept = error

for _ in range(100):
    send()
gc.collect()
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_the_buffers_become_the_memory_of_the_result() -> None:
    """`loads` copies nothing: a write to the tensor is a write to the buffer."""
    packed = dumps(torch.zeros(1 << 16, dtype=torch.uint8))
    places, buffer = map(bytearray, packed.buffers)
    loads(packed.pickle, [places, buffer]).add_(7)
    assert buffer == b"\7" * (1 << 16)


class Counted:
    """Knows how often it has been reduced."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> Any:
        self.times += 1
        return Counted, ()


def test_all_is_reduced_once() -> None:
    """Also where of a large tensor only a few rows are sent, which is known when all has been seen."""
    counted, table = Counted(), torch.zeros(1000, 1000)
    packed = dumps([table[5], counted, table[7]])
    assert counted.times == 1
    assert sum(buffer.nbytes for buffer in packed.buffers) < 10_000


def test_nothing_is_kept_in_a_cycle() -> None:
    """What was packed, and what was rebuilt, goes with its last reference: it may be all the memory there is."""
    gc.collect()
    gc.disable()
    try:
        sent = [nn.Linear(200, 200), torch.ones(1 << 16)]
        received = round_trip(sent)
        ends = [weakref.ref(each) for each in (*sent, *received)]
        del sent, received
        assert [end() for end in ends] == [None] * 4
    finally:
        gc.enable()


def test_views_of_one_storage_still_share_it() -> None:
    """What is written through one view shows through the other, also where their dtypes differ."""
    base = torch.zeros(4, 4)
    rows, columns, integers, alone = round_trip([base[1:3], base.t()[::2], base.view(torch.int32), base.clone()])
    rows.fill_(1)
    assert torch.equal(columns, torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 0]]))
    assert integers.count_nonzero() == 8
    assert alone.count_nonzero() == 0
    assert base.count_nonzero() == 0


def test_the_same_object_twice_is_one_object() -> None:
    """Identity inside the object is kept, in cycles too."""
    tensor, nest = torch.ones(2), list[Any]()
    nest += [tensor, {"again": tensor}, nest]
    result = round_trip(nest)
    assert result[0] is result[1]["again"]
    assert result[2] is result


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_requires_grad_and_attributes_travel(requires_grad: bool, dtype: torch.dtype) -> None:
    """A tensor keeps whether it wants gradients, and what was attached to it."""
    tensor = torch.empty(2, dtype=dtype).requires_grad_(requires_grad)
    tensor.note = "mine"  # type: ignore[attr-defined]
    result = round_trip(tensor)
    assert (result.requires_grad, result.note) == (requires_grad, "mine")


def test_a_module_keeps_its_tied_parameters() -> None:
    """State, frozen parameters, buffers and tied weights; the result trains on its own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    before, result = copy.deepcopy(model.state_dict()), round_trip(model)
    assert all(torch.equal(a, b) for a, b in zip(result.state_dict().values(), before.values(), strict=True))
    assert result[2].weight is result[0].weight
    assert [type(p) for p in result.parameters()] == [nn.Parameter] * 5
    assert [p.requires_grad for p in result.parameters()] == [p.requires_grad for p in model.parameters()]
    result(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        result[0].weight.zero_()
    assert result[2].weight.count_nonzero() == 0
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_sparse_tensors_keep_their_layout(layout: torch.layout) -> None:
    """Each sparse layout comes out as it was, uncoalesced too."""
    dense = torch.diag(torch.arange(4.0))
    blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
    result = round_trip(dense.to_sparse(layout=layout, **blocks))
    assert result.layout is layout
    assert torch.equal(result.to_dense(), dense)
    if layout is torch.sparse_coo:
        twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=True)
        assert not round_trip(twice).is_coalesced()
        assert torch.equal(round_trip(twice).to_dense(), torch.tensor([0.0, 5.0, 0.0]))


def test_lazy_conjugates_and_negatives_stay_lazy() -> None:
    """The conj and neg bits are part of the view."""
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    negative = conjugate.imag
    results = round_trip((conjugate, negative))
    assert results[0].is_conj()
    assert results[1].is_neg()
    assert torch.equal(results[0], conjugate)
    assert torch.equal(results[1], negative)


class Marked(torch.Tensor):
    """A tensor of a type of its own."""


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 2)])
def test_a_tensor_subclass_keeps_its_type(shape: tuple[int, ...]) -> None:
    """The user's own tensor type arrives, and its data with it."""
    result = round_trip(torch.ones(shape).as_subclass(Marked))
    assert type(result) is Marked
    assert torch.equal(result, torch.ones(shape))


def test_what_has_no_data_travels_too() -> None:
    """Meta tensors, an empty storage, devices and dtypes."""
    meta, storage, device, dtype = round_trip(
        (torch.empty(2, 3, device="meta"), torch.UntypedStorage(0), torch.device("cuda", 1), torch.float8_e5m2)
    )
    assert (meta.device.type, meta.shape, storage.nbytes()) == ("meta", (2, 3), 0)
    assert (device, dtype) == (torch.device("cuda", 1), torch.float8_e5m2)


def test_an_empty_part_of_a_large_tensor_travels_with_another_part() -> None:
    """It may lie before the first byte that is sent."""
    large = torch.arange(100_000.0)
    part, *empty = round_trip((large[1000:1010], large[:0], large[500:500], large[-1:][:0]))
    assert part.tolist() == list(range(1000, 1010))
    assert [tensor.shape for tensor in empty] == [(0,)] * 3


def test_a_default_device_moves_nothing() -> None:
    """A user's default device is for what the user makes, not for what arrives."""
    sent = [torch.ones(2), torch.empty(0), torch.eye(2).to_sparse(), nn.Parameter(torch.ones(1))]
    with torch.device("meta"):
        result = round_trip(sent)
    assert [tensor.device.type for tensor in result] == ["cpu"] * 4
    assert result[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10, dtype=np.uint16)[::3],
        np.array(3 + 4j),
        np.empty((0, 2), dtype=bool),
        np.array(["a", "bc"]),
        np.array([1, "a", None], dtype=object),
        np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
    ],
)
def test_numpy_arrays_come_out_the_same_and_writable(array: np.ndarray) -> None:
    """dtype, shape and values of any array, in memory of its own."""
    result = round_trip([array])[0]
    assert (result.dtype, result.shape, result.flags.writeable) == (array.dtype, array.shape, True)
    assert np.array_equal(result, array)
    assert not np.shares_memory(result, array)


@settings(max_examples=50)
@given(
    nest=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=300).map(bytearray),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
        max_leaves=10,
    )
)
def test_plain_nests_come_out_equal(nest: Any) -> None:
    """Built-in types in any nest are equal afterwards."""
    assert round_trip(nest) == nest


@dataclass
class Sample:
    """Something of the user's with tensors in it."""

    image: torch.Tensor
    labels: dict[str, torch.Tensor] = field(default_factory=dict)


def test_tensors_in_any_object() -> None:
    """Tensors are found wherever pickle looks, not only in known containers."""
    result = round_trip(types.SimpleNamespace(samples=(Sample(torch.ones(2), {"y": torch.tensor(3)}),)))
    assert torch.equal(result.samples[0].image, torch.ones(2))
    assert result.samples[0].labels["y"].item() == 3


def test_functions_need_not_be_importable() -> None:
    """Lambdas, closures, closures that call themselves, partials and methods."""
    weight = torch.tensor(3.0)

    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    scale, fact, part, method = round_trip((lambda x: x * weight, factorial, functools.partial(pow, 2), [1, 2].count))
    assert (scale(2).item(), fact(5), part(5), method(2)) == (6, 120, 32, 1)
    assert scale is not round_trip(scale)


def test_a_class_defined_in_a_function() -> None:
    """Instances of a class that no import finds."""

    class Local:
        factor = 2

        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def scaled(self) -> torch.Tensor:
            return self.value * self.factor

    assert round_trip(Local(torch.tensor(4))).scaled().item() == 8


@pytest.mark.slow
def test_another_process_of_the_script_understands_it(tmp_path: Path) -> None:
    """Functions and classes of ``__main__`` go by name, as each rank has them; a function's function goes by value."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import pickle, sys, torch
from nn_parallel._engine.pickling import dumps, loads
class Config: lr = 0.5
def twice(x): return x * 2
def make(k): return lambda x: twice(x) + k
if sys.argv[1] == "dump":
    config = Config()
    config.steps = 7
    packed = dumps((twice, make(1), torch.arange(3), config))
    pickle.dump((packed.pickle, [bytearray(b) for b in packed.buffers]), open(sys.argv[2], "wb"))
else:
    fn, local, tensor, config = loads(*pickle.load(open(sys.argv[2], "rb")))
    print(fn is twice, local(tensor).tolist(), type(config) is Config, config.steps)
"""
    )
    for what in ("dump", "load"):
        command = [sys.executable, script, what, tmp_path / "packed"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert not done.stderr
    assert done.stdout.strip() == "True [1, 3, 5] True 7"


def test_loads_raises_what_unpickling_raises() -> None:
    """An object that cannot be rebuilt raises its own exception."""

    class Unloadable:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    with pytest.raises(ValueError, match="not a number"):
        round_trip(Unloadable())


def test_an_empty_view_is_one_of_its_tensor() -> None:
    """It has the memory and the offset of its tensor."""
    base = torch.arange(10.0)
    whole, empty = round_trip([base, base[3:3]])
    assert empty.untyped_storage().data_ptr() == whole.data_ptr()
    assert empty.storage_offset() == 3


def test_an_empty_tensor_lands_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other one of an accelerator, for which "meta" and the CPU stand here."""
    begin = pickling._Storage.__init__

    def on_accelerator(self: pickling._Storage, *args: Any) -> None:
        begin(self, *args)
        self.on_accelerator = True

    monkeypatch.setattr(pickling._Storage, "__init__", on_accelerator)
    large = torch.arange(1e5)
    for tensor in (torch.empty(0), torch.zeros(0, 5), torch.ones(40)[5:5], large[3:5], large[5:5]):
        packed = dumps(tensor)
        received = loads(packed.pickle, [bytearray(each) for each in packed.buffers], torch.device("meta"))
        assert (received.device.type, received.shape) == ("meta", tensor.shape)


def test_code_stays_that_of_its_file() -> None:
    """Whatever cloudpickle does: without the name a traceback shows neither the file nor the line."""
    namespace: dict[str, Any] = {}
    exec(compile(SCRIPT, "/home/me/experiment.py", "exec"), namespace)
    outer = round_trip(namespace["outer"])
    with pytest.raises(ZeroDivisionError) as raised:
        outer()()
    codes = outer.__code__, raised.traceback[-1].frame.raw.f_code
    assert [(code.co_filename, code.co_firstlineno) for code in codes] == [
        ("/home/me/experiment.py", 2),
        ("/home/me/experiment.py", 3),
    ]
