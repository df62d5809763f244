"""Batches on a device: what torch's ``pin_memory`` would find in them, and what people collate into."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from nn_parallel.training._to_device import move_to_device

META = torch.device("meta")  # stands for an accelerator


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class EasyDict(dict[str, Any]):
    """A dict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokens(list[Any]):
    language = "en"


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be written to."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Unmakeable(Frozen):
    """A mapping that is not made of one."""

    def __init__(self, x: torch.Tensor, y: int) -> None:
        super().__init__({"x": x, "y": y})


class Window(Sequence[Any]):
    def __init__(self, parts: Any, more: None) -> None:
        self._parts = list(parts)

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBatch:
    x: torch.Tensor
    y: int = 0


def x() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"x": x(), "y": 1},
        lambda: EasyDict(x=x(), y=1),
        lambda: collections.OrderedDict(x=x(), y=1),
        lambda: collections.defaultdict(list, x=x()),
        lambda: collections.UserDict(x=x(), y=1),
        lambda: Frozen({"x": x(), "y": 1}),
        lambda: Batch(x(), ["a"]),
        lambda: FrozenBatch(x()),
        lambda: SimpleNamespace(x=x(), y=1),
        lambda: Pair(x(), "name"),
    ],
)
def test_what_holds_a_tensor_by_name_keeps_its_type(make: Any) -> None:
    """And the batch that was given stays where it is."""
    batch = make()
    moved = move_to_device(batch, META)
    assert type(moved) is type(batch)

    def tensor_of(holder: Any) -> Any:
        return holder["x"] if isinstance(holder, Mapping) else holder.x

    assert (tensor_of(moved).is_meta, tensor_of(batch).is_meta) == (True, False)


@pytest.mark.parametrize("make", [list, tuple, Tokens, collections.deque])
def test_what_holds_tensors_in_a_row_keeps_its_type(make: Any) -> None:
    """With what stands beside them, and the attributes of its type."""
    batch = make([x(), "text", 3])
    moved = move_to_device(batch, META)
    assert type(moved) is type(batch)
    first, text, number = moved
    assert (first.is_meta, text, number) == (True, "text", 3)
    assert getattr(moved, "language", "") == getattr(batch, "language", "")


def test_what_cannot_be_made_anew_becomes_a_plain_dict_or_list() -> None:
    """As torch's ``pin_memory`` does it."""
    moved = move_to_device(Unmakeable(x(), 1), META)
    assert (type(moved), moved["x"].is_meta, moved["y"]) == (dict, True, 1)
    parts = move_to_device(Window([x()], None), META)
    assert (type(parts), parts[0].is_meta) == (list, True)


def test_counts_are_not_added_up() -> None:
    """A Counter is copied, and not updated by its own counts."""
    batch = collections.Counter({"a": 2, "b": x()})  # type: ignore[dict-item]
    moved = move_to_device(batch, META)
    assert (type(moved), moved["a"], moved["b"].is_meta) == (collections.Counter, 2, True)


class Whole:
    """A batch that knows how to move itself."""

    place: Any = "cpu"

    def to(self, device: torch.device, non_blocking: bool = False) -> Whole:
        moved = Whole()
        moved.place = device.type, non_blocking
        return moved


class Simple:
    """Another one, which cannot do so without waiting."""

    place: Any = "cpu"

    def to(self, device: torch.device) -> Simple:
        moved = Simple()
        moved.place = device.type
        return moved


class InPlace:
    """One that moves itself, and returns nothing."""

    place: Any = "cpu"

    def to(self, device: torch.device, **options: Any) -> None:
        self.place = device.type, options


def test_what_has_a_method_to_moves_itself() -> None:
    """Without waiting if it can; wherever it stands; a class is not moved."""
    moved = move_to_device({"parts": [Whole(), Simple(), InPlace(), Whole, None, 1.5]}, META)
    assert [getattr(part, "place", part) for part in moved["parts"]] == [
        ("meta", True),
        "meta",
        ("meta", {"non_blocking": True}),
        "cpu",
        None,
        1.5,
    ]


def test_on_the_cpu_a_batch_is_what_was_collated() -> None:
    """And what holds no tensor is not copied elsewhere either."""
    batch = {"x": [x()], "names": ["a"]}
    assert move_to_device(batch, torch.device("cpu")) is batch
    assert move_to_device(batch, META)["names"] is batch["names"]
