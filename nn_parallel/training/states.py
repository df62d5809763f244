"""The states of models, optimizers and others: as they are stored, whether they fit, and how they are loaded.

A stored state is whole and without wrappers, whatever the strategy that a model is trained by.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..errors import qualified_name
from .model import unwrap_model
from .shards import Shards, is_sharded

SHAPES = "param_shapes"  # of its parameters, beside "param_groups" in the stored state of an optimizer
TakeSharded = Callable[[str, Any], Any]
WRAPPERS = {"module", "_orig_mod"}  # what DDP, DataParallel, AveragedModel and torch.compile put into names


def stored(name: str, value: Any, take: TakeSharded) -> Any:
    """The state of ``value``, or ``value`` itself, as `torch.load` can read it. A call of all ranks.

    With Python's numbers for NumPy's, and for each sharded tensor what ``take`` returns of its path and itself.
    """
    if isinstance(value, nn.Module):
        value = unwrap_model(value)
    if isinstance(value, Optimizer):
        return stored(name, value.state_dict(), take) | {SHAPES: _shapes(value)}

    def storable(path: str, leaf: Any) -> Any:
        if (numpy := sys.modules.get("numpy")) and isinstance(leaf, numpy.generic):
            return leaf.item()
        return take(path, leaf) if is_sharded(leaf) else leaf

    return _mapped(value.state_dict() if hasattr(value, "state_dict") else value, f"/{name}", storable)


def fitting(name: str, target: Any, saved: Mapping[str, Any], shards: Shards) -> Any:
    """The stored state of that name as ``target`` takes it, its tensors sharded as there, if it fits.

    Those that were stored sharded are empty until ``shards`` has read them.

    Raises:
        TypeError, ValueError: it does not.
    """
    if name not in saved:
        raise ValueError(f"it has no {name!r}, only {', '.join(map(repr, saved))}.")
    state = saved[name]
    if isinstance(target, nn.Module):
        return _fitting_model(name, target, state, shards)
    if isinstance(target, Optimizer):
        return _fitting_optimizer(name, target, state, shards)
    if not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name} is a {type(target).__name__} without load_state_dict: its value is in what is returned."
        )
    return whole(state, shards)


def whole(state: Any, shards: Shards) -> Any:
    """``state`` in memory; with tensors for those that were stored sharded, empty until ``shards`` has read them."""
    return _mapped(state, "", lambda _, leaf: _taken(leaf, None, shards))


def load_all_but_tensors(name: str, target: Any, state: Any, undo: contextlib.ExitStack) -> None:
    """Load ``state``; a model loads its own tensors in the place of the saved ones. ``undo`` gets what takes it back.

    So what a model refuses, for instance the version of a module, is known while nothing has been overwritten.

    Raises:
        ValueError: ``target`` does not take it.
    """
    if isinstance(target, nn.Module):
        own = target.state_dict(keep_vars=True)
        is_of_now = getattr(state, "_metadata", None) == getattr(own, "_metadata", None)
        undo.callback(_put_back, target, own if is_of_now else copy.deepcopy(own))  # a module may change old tensors
        trial = copy.copy(state)  # with the versions
        is_tensor = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
        trial.update({key: value for key, value in own.items() if key in is_tensor})
        _load(name, target, trial)
    elif isinstance(target, Optimizer):
        undo.callback(vars(target).update, dict(vars(target)))  # loading replaces what is in there
        _load(name, target, state)
        options = (option for option in target.defaults for group in target.param_groups if option not in group)
        if missing := next(options, None):
            raise ValueError(f"{name} is of another optimizer: {type(target).__name__} needs {missing!r}.")
    else:
        if hasattr(target, "state_dict"):
            kept = target.state_dict()
            with contextlib.suppress(Exception):  # what cannot be copied is kept as it is
                kept = copy.deepcopy(kept)
            undo.callback(_put_back, target, kept)
        _load(name, target, state)


def _load(name: str, target: Any, state: Any) -> None:
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded: {qualified_name(type(error))}: {error}") from error


def _put_back(target: Any, state: Any) -> None:
    with contextlib.suppress(Exception):  # what stopped the loading is to be raised
        target.load_state_dict(state)


def _fitting_model(name: str, model: nn.Module, state: Any, shards: Shards) -> OrderedDict[str, Any]:
    wanted = model.state_dict()
    if not isinstance(state, dict):
        raise ValueError(f"{name} in it is a {type(state).__name__}, not the state of a model.")
    renamed = _renamed(state, wanted)
    problems = [f"{key} is missing" for key in wanted if key not in renamed]
    problems += [f"{key} is not part of the {type(model).__name__}" for key in renamed if key not in wanted]
    for key, there in wanted.items():
        values = [value for value in (there, renamed.get(key)) if isinstance(value, torch.Tensor)]
        shapes = [tuple(value.shape) for value in values if not is_lazy(value)]
        if len(set(shapes)) > 1:
            problems.append(f"{key} is of shape {shapes[1]} in the file, {shapes[0]} in the model")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{name} is another model: {'; '.join(problems[:3])}{more}.")
    for key, value in list(renamed.items()):
        renamed[key] = _taken(value, wanted[key], shards, copies=False)  # the model copies it
    return renamed


def _renamed(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """``state`` under the names that are ``wanted``: these may differ in what wrappers add to them.

    With it go the versions of the modules, which tell each module how old its state is.
    """
    bare = {_bare(key): key for key in wanted}
    if len(bare) < len(wanted) or len({_bare(key) for key in state}) < len(state):
        bare = {}  # somebody's own part is called "module"
    renamed = OrderedDict((bare.get(_bare(key), key), value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None and list(renamed) != list(state):
        innermost = {_bare(key): version for key, version in versions.items()}  # "module" comes before "module.0"
        names = [key for key in getattr(wanted, "_metadata", ()) if _bare(key) in innermost]
        versions = {key: innermost[_bare(key)] for key in names}
    if versions is not None:
        renamed._metadata = versions  # type: ignore[attr-defined]  # where torch keeps them
    return renamed


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _fitting_optimizer(name: str, optimizer: Optimizer, state: Any, shards: Shards) -> dict[str, Any]:
    try:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        dict(state["state"])
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name} in it is not the state of an optimizer.") from None
    shapes = _shapes(optimizer)
    if sizes != [len(group) for group in shapes]:
        raise ValueError(f"{name} is of other parameters: groups of {sizes}, not {[len(group) for group in shapes]}.")
    there = state.get(SHAPES, shapes)  # a file that save_checkpoint has not written does not say
    for number, (saved, own) in enumerate(zip(chain(*there), chain(*shapes), strict=True)):
        if saved != own and None not in (saved, own):
            raise ValueError(
                f"{name} is of other parameters: number {number} is of shape {saved} in the file, {own} in the "
                f"{type(optimizer).__name__}."
            )
    states = dict(state["state"])
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in states:
            states[number] = {key: _taken(value, parameter, shards) for key, value in states[number].items()}
    return {key: value for key, value in state.items() if key != SHAPES} | {"state": states}


def _shapes(optimizer: Optimizer) -> list[list[tuple[int, ...] | None]]:
    groups = [group["params"] for group in optimizer.param_groups]
    return [[None if is_lazy(parameter) else tuple(parameter.shape) for parameter in group] for group in groups]


def _mapped(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """A copy of a nest of dicts, lists and tuples, with what ``change`` returns of each leaf and the path to it."""
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the versions of the modules
        copied.update((key, _mapped(part, f"{path}/{key}", change)) for key, part in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, f"{path}/{index}", change) for index, part in enumerate(value))
    return change(path, value)


def _taken(value: Any, wanted: Any, shards: Shards, *, copies: bool = True) -> Any:
    """``value`` sharded as ``wanted`` is, if that is a sharded tensor of its shape.

    Unless this ``copies`` it, another tensor is ``value`` itself, which may still be in a file.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return shards.place(value, wanted)
    if not is_sharded(wanted) or value.shape != wanted.shape:
        return value.clone() if copies else value
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value, wanted.device_mesh, wanted.placements, src_data_rank=None)  # cut here, not sent
    return part.clone()  # older torch gives a view, which keeps all of ``value``
