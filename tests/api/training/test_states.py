"""The states in a checkpoint: how they are stored, and how they are loaded."""

from __future__ import annotations

import collections
import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nn_parallel import (
    ParallelExecutor,
    initialize_ddp,
    load_checkpoint,
    prepare_model,
    save_checkpoint,
    unwrap_model,
)
from nn_parallel.training._states import saved_state
from tests.support.networks import Net, equal


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in torch's own import of its compiler
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_states_load_with_and_without_the_names_of_wrappers(tmp_path: Path, prefix: str) -> None:
    """Whoever saved it, and whatever is around the model now; an averaged model too."""
    source = Net()
    torch.save({"model": {prefix + name: value for name, value in source.state_dict().items()}}, tmp_path / "a.pt")
    for target in (Net(), torch.compile(Net()), nn.DataParallel(Net())):
        assert load_checkpoint(tmp_path / "a.pt", model=target) == {}
        assert equal(unwrap_model(target).state_dict(), source.state_dict())


def test_a_part_of_the_model_that_is_called_module_is_left_alone(tmp_path: Path) -> None:
    """Names that only seem to come from a wrapper."""
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.ModuleDict({"module": nn.Linear(1, 1)})})
    save_checkpoint(tmp_path / "a.pt", model=model)
    again = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.ModuleDict({"module": nn.Linear(1, 1)})})
    load_checkpoint(tmp_path / "a.pt", model=again)
    assert equal(model.state_dict(), again.state_dict())


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Alone, in lists and dicts, and in the state of a scheduler, which takes what it is given."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scheduler.step(np.mean([0.5, 0.7]))
    state = {"best": np.float64(0.5), "history": [{"loss": np.float32(0.5)}, 1], "step": np.int64(3), "done": np.True_}
    save_checkpoint(tmp_path / "a.pt", **state, scheduler=scheduler)
    saved = load_checkpoint(tmp_path / "a.pt", scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert saved == {"best": 0.5, "history": [{"loss": 0.5}, 1], "step": 3, "done": True}
    assert {type(saved[name]) for name in ("best", "step", "done")} == {float, int, bool}


class Versioned(nn.Module):
    """A module that reads old states in another way, and those without a version not at all."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version") not in (1, 2):
            raise ValueError(f"version should be 1 or 2 instead of {metadata.get('version')}")
        if metadata["version"] == 1:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in torch's own import of its compiler
@pytest.mark.parametrize("saved_by", ["ddp", "fsdp", "by hand"])
@pytest.mark.parametrize("loaded_by", ["ddp", "fsdp", "alone", "compiled"])
def test_each_module_is_told_the_version_of_its_state(
    executor2: ParallelExecutor, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    """Whatever is, or was, around the model."""
    path = tmp_path / "a.pt"

    def save() -> None:
        initialize_ddp()
        save_checkpoint(path, model=prepare_model(nn.Sequential(Versioned(), Versioned()), strategy=saved_by))

    def load(strategy: str) -> list[float]:
        initialize_ddp()
        model = nn.Sequential(Versioned(), Versioned())
        wrapped = torch.compile(model) if strategy == "compiled" else prepare_model(model, strategy=strategy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(path, model=wrapped)
        return [getattr(p, "full_tensor", p.clone)().sum().item() for p in model.parameters()]

    if saved_by == "by hand":
        torch.save({"model": nn.DataParallel(nn.Sequential(Versioned(), Versioned())).state_dict()}, path)
    else:
        executor2.run(save)
    if loaded_by in ("ddp", "fsdp"):
        assert executor2.run(load, loaded_by) == [[4.0, 4.0]] * 2
    else:
        assert load("none" if loaded_by == "alone" else loaded_by) == [4.0, 4.0]


def test_lazy_modules_take_their_shapes_from_the_checkpoint(tmp_path: Path) -> None:
    """As by ``load_state_dict``."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    model(torch.ones(2, 5))
    save_checkpoint(tmp_path / "a.pt", model=model)
    again = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    load_checkpoint(tmp_path / "a.pt", model=again)
    assert equal(again.state_dict(), model.state_dict())


class Lion(torch.optim.Optimizer):
    """An optimizer as people write them: a state and defaults of its own, and none of torch's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)


@pytest.mark.parametrize("kind", [Lion, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.AdamW])
def test_every_optimizer_is_loaded(kind: Any, tmp_path: Path) -> None:
    """As its own ``load_state_dict`` does it, torch's own or not; before and after its first step."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2, bias=False)
        return model, kind(model.parameters())

    for steps in range(2):
        model, optimizer = made()
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step(lambda model=model: model(torch.ones(1, 3)).sum())
        save_checkpoint(tmp_path / "a.pt", optimizer=optimizer)
        _, again = made()
        load_checkpoint(tmp_path / "a.pt", optimizer=again)
        assert str(again.state_dict()) == str(optimizer.state_dict())


def old_weight_norm() -> tuple[dict[str, Any], nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(nn.Linear(3, 2))
    return old.state_dict(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


def old_batch_norm() -> tuple[dict[str, Any], nn.Module]:
    state = dict(nn.BatchNorm1d(3).state_dict())
    del state["num_batches_tracked"]
    return state, nn.BatchNorm1d(3)


def renaming_hook() -> tuple[dict[str, Any], nn.Module]:
    model = nn.Sequential()
    model.head = nn.Linear(2, 2)

    def rename(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}fc.")]:
            state[key.replace("fc.", "head.")] = state.pop(key)

    model.register_load_state_dict_pre_hook(rename)
    return {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}, model


def forgiving_hook() -> tuple[dict[str, Any], nn.Module]:
    model = nn.ModuleDict({"base": nn.Linear(2, 2), "lora": nn.Linear(2, 2)})
    model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
    return {"lora.weight": torch.ones(2, 2), "lora.bias": torch.ones(2)}, model


@pytest.mark.parametrize("make", [old_weight_norm, old_batch_norm, renaming_hook, forgiving_hook])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_states_that_the_model_migrates_are_loaded(make: Any, prefix: str, tmp_path: Path) -> None:
    """By torch's hooks, also where the state comes from a model in a wrapper."""
    state, model = make()
    wanted, _ = copy.deepcopy(model), model.load_state_dict(state)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save({"model": {f"{prefix}{key}": value for key, value in state.items()}}, tmp_path / "a.pt")
    load_checkpoint(tmp_path / "a.pt", model=wanted)
    assert all(torch.equal(value, expected[key]) for key, value in wanted.state_dict().items() if "base" not in key)


class Doubling(dict[str, Any]):
    """A dict that changes what it is updated with."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update({key: [value] * 2 for key, value in dict(*args, **kwargs).items()})


def test_containers_are_copied_by_their_own_type(tmp_path: Path) -> None:
    """A Counter is not counted again, and a scheduler has the milestones that it had, however often it is loaded."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6, 6])
    seen = collections.Counter(cat=3, dog=np.int64(1))
    for _ in range(3):
        save_checkpoint(tmp_path / "a.pt", scheduler=scheduler, seen=seen)
        assert torch.load(tmp_path / "a.pt", weights_only=True)["seen"] == collections.Counter(cat=3, dog=1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1])
        seen = load_checkpoint(tmp_path / "a.pt", scheduler=scheduler)["seen"]
        assert seen == collections.Counter(cat=3, dog=1)
        assert scheduler.milestones == collections.Counter({3: 1, 6: 2})
    nested = Doubling(a=[1, (2, np.float64(3.0))], b=4)
    mapped = saved_state("nested", nested, lambda _, leaf: leaf)
    assert (type(mapped), dict(mapped)) == (Doubling, {"a": [1, (2, 3.0)], "b": 4})
    assert nested["a"][1][1].dtype == np.float64


def test_what_cannot_be_saved_is_named_by_its_path(tmp_path: Path) -> None:
    """With what to do about it; and a folder that is not there, instead of a file that nobody knows."""
    with pytest.raises(ValueError, match=r"models\['net'\] is a Linear: .* Save it under a name of its own"):
        save_checkpoint(tmp_path / "a.pt", models={"net": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"history\[1\] is a PosixPath: .* Save the data that it consists of"):
        save_checkpoint(tmp_path / "a.pt", history=[1, tmp_path])
    with pytest.raises(FileNotFoundError, match="folder for a checkpoint does not exist, create it: '.*missing'$"):
        save_checkpoint(tmp_path / "missing" / "a.pt", epoch=1)


def test_a_bare_state_dict_is_named_as_such(tmp_path: Path) -> None:
    """In a few words, and not by its keys, of which there may be hundreds."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with pytest.raises(
        ValueError, match=r"'2.weight' and 95 more. The file looks like the bare state_dict of one model"
    ) as raised:
        load_checkpoint(tmp_path / "a.pt", model=model)
    assert len(str(raised.value)) < 400
