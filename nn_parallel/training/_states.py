"""The states of models, optimizers and others: how they are saved, and how they are loaded.

A saved state is whole and without wrappers, whatever strategy a model is trained by. Each ``load_state_dict`` decides
for itself what it takes: with its hooks, its migrations of old states, its options. Nothing is checked before it.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._engine.failures import qualified_name
from .._engine.ranks.context import current_world
from ._shards import Shards, is_sharded
from .model import unwrap_model

TakeSharded = Callable[[str, Any], Any]
WRAPPERS = {"module", "_orig_mod"}  # what DDP, DataParallel, AveragedModel and torch.compile put into names
NAMED_KEYS = 5  # of a file, in an error


def saved_state(name: str, value: Any, take: TakeSharded) -> Any:
    """Return the state of ``value``, or ``value`` itself, as `torch.load` can read it. Every rank calls it.

    NumPy's numbers become Python's. Each sharded tensor becomes what ``take`` returns for its path and itself.
    """
    if isinstance(value, nn.Module):
        value = unwrap_model(value)
    if _is_zero(value):
        value.consolidate_state_dict(to=0)  # torch's own state_dict() raises on every rank that has not got the whole
        state = value.state_dict() if current_world().is_main else {}
    else:
        state = value.state_dict() if hasattr(value, "state_dict") else value

    def storable(path: str, leaf: Any) -> Any:
        if (numpy := sys.modules.get("numpy")) and isinstance(leaf, numpy.generic):
            return leaf.item()
        return take(path, leaf) if is_sharded(leaf) else leaf

    return _mapped(state, f"/{name}", storable)


def loadable(name: str, target: Any, saved: Mapping[str, Any], shards: Shards) -> Any:
    """Return the saved state of that name as ``target.load_state_dict`` takes it, with tensors sharded as there.

    Tensors that were saved sharded are empty until ``shards`` has read them.

    Raises:
        TypeError: ``target`` has no ``load_state_dict``.
        ValueError: nothing was saved under that name.
    """
    if name not in saved:
        raise ValueError(_why_missing(name, target, saved))
    if not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name} is a {type(target).__name__} without load_state_dict: its value is in what is returned."
        )
    state = saved[name]
    if isinstance(target, nn.Module) and isinstance(state, dict):
        return _of_model(target, state, shards)
    if isinstance(target, Optimizer) and isinstance(state, dict) and {"state", "param_groups"} <= state.keys():
        return _of_optimizer(target, state, shards)
    return copied_state(state, shards)


def copied_state(state: Any, shards: Shards) -> Any:
    """Return ``state`` with its tensors copied out of the file.

    Tensors that were saved sharded are empty until ``shards`` has read them.
    """
    return _mapped(state, "", lambda _, leaf: _placed(leaf, None, shards))


def load(name: str, target: Any, state: Any) -> None:
    """Have ``target`` load ``state``.

    Raises:
        ValueError: its ``load_state_dict`` raised; what it raised is the cause.
    """
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded: {qualified_name(type(error))}: {error}") from error


def _why_missing(name: str, target: Any, saved: Mapping[str, Any]) -> str:
    names = [repr(key) for key in saved]
    more = f" and {len(names) - NAMED_KEYS} more" if len(names) > NAMED_KEYS else ""
    why = f"it has no {name!r}, only {', '.join(names[:NAMED_KEYS]) or 'random numbers'}{more}."
    if saved and all(isinstance(value, torch.Tensor) for value in saved.values()):
        loads = f"{name}.load_state_dict(torch.load(path))" if isinstance(target, nn.Module) else "torch.load(path)"
        why += f" It looks like the bare state_dict of one model, which {loads} reads."
    return why


def _of_model(model: nn.Module, state: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    own = model.state_dict()
    renamed = _under_own_names(state, model, own)
    for key, value in list(renamed.items()):
        if isinstance(value, torch.Tensor):
            renamed[key] = _placed(value, own.get(key), shards, copies=False)  # the model copies it
    return renamed


def _under_own_names(state: Mapping[str, Any], model: nn.Module, own: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of ``state`` whose keys have the wrappers that the keys of ``model`` have.

    A key begins with the path of a module, and wrappers are modules. So it is enough to find the module: what stands
    behind its path is for the hooks of ``model``, which may know it under an old name. The versions of the modules, by
    which each of them sees how old its state is, go along.
    """
    renamed = OrderedDict(state)
    versions = getattr(state, "_metadata", None)
    is_ambiguous = len(set(map(_bare, own))) < len(own) or len(set(map(_bare, state))) < len(state)
    if not is_ambiguous and not state.keys() <= own.keys():  # ambiguous: a part of the user's own is called "module"
        # Of several modules with the same bare path, as a wrapper and what it wraps, the innermost comes last.
        path_of = {_bare(path): path for path, _ in model.named_modules()}
        renamed = OrderedDict((key if key in own else _own_name(key, path_of), value) for key, value in state.items())
        if versions is not None:
            versions = {_own_name(path, path_of): version for path, version in versions.items()}
    if versions is not None:
        renamed._metadata = versions  # type: ignore[attr-defined]  # where torch keeps them
    return renamed


def _own_name(key: str, path_of: Mapping[str, str]) -> str:
    """Return ``key`` with the path of its module replaced by the one that ``path_of`` has for it."""
    parts = _bare(key).split(".")
    for length in range(len(parts), -1, -1):
        path = path_of.get(".".join(parts[:length]))
        if path is not None:
            return ".".join([path] * bool(path) + parts[length:])
    return key


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _of_optimizer(optimizer: Optimizer, state: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    numbers = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameter_of = dict(zip(numbers, parameters, strict=False))  # torch refuses other groups itself

    def placed(number: Any, values: Any) -> Any:
        return _mapped(values, "", lambda _, leaf: _placed(leaf, parameter_of.get(number), shards))

    states = {number: placed(number, values) for number, values in state["state"].items()}
    others = {key: copied_state(value, shards) for key, value in state.items() if key != "state"}
    return others | {"state": states}


def _is_zero(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(value, module.ZeroRedundancyOptimizer)


def _mapped(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """Return a nest of dicts, lists and tuples with each leaf replaced by what ``change`` makes of its path and itself.

    A container in which nothing changes is used as it is. Another one is copied by its own type, and only the parts
    that change are set in the copy: a Counter counts what it is updated with, and other dicts have rules of their own.
    """
    if isinstance(value, dict):
        items = list(value.items())
    elif type(value) in (list, tuple):
        items = list(enumerate(value))
    else:
        return change(path, value)
    mapped = ((key, part, _mapped(part, f"{path}/{key}", change)) for key, part in items)
    changed = {key: new for key, part, new in mapped if new is not part}
    if not changed:
        return value
    if isinstance(value, tuple):
        return tuple(changed.get(index, part) for index, part in items)
    copied = copy.copy(value)  # a dict keeps its attributes, as the versions of modules are
    for key, part in changed.items():
        copied[key] = part
    return copied


def _placed(value: Any, wanted: Any, shards: Shards, *, copies: bool = True) -> Any:
    """Return ``value`` sharded as ``wanted`` is, if that is a sharded tensor of its shape.

    Args:
        copies: copy another tensor, which may still be in the file.
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
