"""The states of models, optimizers and other objects, made ready to be saved or to be loaded.

A saved state does not depend on how the model was trained. It has no names of wrappers, such as the ``module.`` that
DDP puts before each name. Unless the checkpoint is sharded, each tensor in it is whole. So a checkpoint can be loaded
into a model that is wrapped or sharded in another way.

A *target* is an object into which a state is loaded. This module first makes the state fit the target: it shards the
tensors as the target does, and gives them the names that the target uses. This module checks and changes nothing else:
the ``load_state_dict`` of the target decides which states it accepts, and may convert old states with its own hooks.

In the file of a sharded checkpoint, each sharded tensor is represented by a *placeholder*, a tensor without values. The
values are in a folder beside the file (`_shards`).
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
WRAPPERS = {"module", "_orig_mod"}  # the names that DDP, DataParallel, AveragedModel and torch.compile add to keys
NAMED_KEYS = 5  # how many keys of a file an error message lists


def saved_state(name: str, value: Any, take: TakeSharded) -> Any:
    """Return the state of ``value`` in a form that `torch.load` can read. Every rank calls this function.

    NumPy's numbers are converted to Python's.

    Args:
        name: the name of the value in the checkpoint.
        value: an object with a ``state_dict``, or a value that is saved as it is.
        take: a function that is called with the path of each sharded tensor and with the tensor. The result of the
            function is saved instead of the tensor.
    """
    if isinstance(value, nn.Module):
        value = unwrap_model(value)
    if _is_zero(value):
        value.consolidate_state_dict(to=0)  # now rank 0 has the whole state, and on other ranks state_dict() raises
        state = value.state_dict() if current_world().is_main else {}
    else:
        state = value.state_dict() if hasattr(value, "state_dict") else value

    def storable(path: str, leaf: Any) -> Any:
        if (numpy := sys.modules.get("numpy")) and isinstance(leaf, numpy.generic):
            return leaf.item()
        return take(path, leaf) if is_sharded(leaf) else leaf

    return _mapped(state, f"/{name}", storable)


def loadable(name: str, target: Any, saved: Mapping[str, Any], shards: Shards) -> Any:
    """Return the saved state called ``name`` in the form that ``target.load_state_dict`` needs.

    The tensors of the result are sharded in the same way as the tensors of the target. Tensors that were saved sharded
    are empty until `Shards.read` fills them.

    Raises:
        TypeError: ``target`` has no ``load_state_dict``.
        ValueError: nothing was saved under this name.
    """
    if name not in saved:
        raise ValueError(_why_missing(name, target, saved))
    if not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name} is a {type(target).__name__} without load_state_dict: take its value from the dict that "
            "load_checkpoint() returns."
        )
    state = saved[name]
    if isinstance(target, nn.Module) and isinstance(state, dict):
        return _of_model(target, state, shards)
    if isinstance(target, Optimizer) and isinstance(state, dict) and {"state", "param_groups"} <= state.keys():
        return _of_optimizer(target, state, shards)
    return copied_state(state, shards)


def copied_state(state: Any, shards: Shards) -> Any:
    """Return ``state`` with its tensors copied into memory, because the originals are only mapped from the file.

    Tensors that were saved sharded are empty until `Shards.read` fills them.
    """
    return _mapped(state, "", lambda _, leaf: _placed(leaf, None, shards))


def load(name: str, target: Any, state: Any) -> None:
    """Call ``target.load_state_dict(state)``.

    Raises:
        ValueError: ``load_state_dict`` raised an exception, which is the cause of this error.
    """
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded: {qualified_name(type(error))}: {error}") from error


def _why_missing(name: str, target: Any, saved: Mapping[str, Any]) -> str:
    """Return the message of an error which says that nothing was saved under ``name``."""
    names = [repr(key) for key in saved]
    more = f" and {len(names) - NAMED_KEYS} more" if len(names) > NAMED_KEYS else ""
    why = f"the file has no {name!r}, only {', '.join(names[:NAMED_KEYS]) or 'random numbers'}{more}."
    if saved and all(isinstance(value, torch.Tensor) for value in saved.values()):
        loads = f"{name}.load_state_dict(torch.load(path))" if isinstance(target, nn.Module) else "torch.load(path)"
        why += f" The file looks like the bare state_dict of one model: load it by {loads}."
    return why


def _of_model(model: nn.Module, state: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    own = model.state_dict()
    renamed = _under_own_names(state, model, own)
    for key, value in list(renamed.items()):
        if isinstance(value, torch.Tensor):
            renamed[key] = _placed(value, own.get(key), shards, copies=False)  # load_state_dict copies the numbers
    return renamed


def _under_own_names(state: Mapping[str, Any], model: nn.Module, own: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of ``state`` whose keys contain the names of the wrappers in ``model``.

    For example, if ``torch.compile`` wraps the layer in ``model``, ``layer.weight`` becomes ``layer._orig_mod.weight``.

    A key consists of the path of a module and the name of a parameter in the module. Wrappers are modules, so only the
    path needs to be changed. The name of the parameter stays as it was saved, because it may be an old name that the
    hooks of ``model`` still accept. A state also holds the version of each module, from which the module recognises an
    old state. The versions are stored under the paths of the modules, and these paths are changed in the same way.

    Args:
        state: the saved state.
        model: the model into which the state will be loaded.
        own: the present state of the model; only its keys are used.
    """
    renamed = OrderedDict(state)
    versions = getattr(state, "_metadata", None)
    # A module of the user may have the same name as a wrapper, such as ``module``. This is certain if two keys differ
    # only in this name, as ``weight`` and ``module.weight`` do. Then the keys stay as they are.
    is_ambiguous = len(set(map(_bare, own))) < len(own) or len(set(map(_bare, state))) < len(state)
    if not is_ambiguous and not state.keys() <= own.keys():
        # If wrapper names are left out, a wrapper and the module in it have the same path. `named_modules` yields the
        # module after its wrapper, so ``path_of`` keeps the path of the module, and not the path of the wrapper.
        path_of = {_bare(path): path for path, _ in model.named_modules()}
        renamed = OrderedDict((key if key in own else _own_name(key, path_of), value) for key, value in state.items())
        if versions is not None:
            versions = {_own_name(path, path_of): version for path, version in versions.items()}
    if versions is not None:
        renamed._metadata = versions  # type: ignore[attr-defined]  # torch keeps the versions in it
    return renamed


def _own_name(key: str, path_of: Mapping[str, str]) -> str:
    """Return the key that the model itself uses for ``key``: ``layer._orig_mod.weight`` for ``layer.weight``.

    Args:
        key: a key of a saved state, such as ``layer.weight``.
        path_of: maps paths in which the names of wrappers are left out, such as ``layer``, to the paths that the model
            itself uses, such as ``layer._orig_mod``. It has an entry for each module of the model.
    """
    parts = _bare(key).split(".")
    for length in range(len(parts), -1, -1):
        path = path_of.get(".".join(parts[:length]))
        if path is not None:
            return ".".join([path] * bool(path) + parts[length:])
    return key


def _bare(key: str) -> str:
    """Return ``key`` without the names of wrappers: ``layer.weight`` for ``module.layer._orig_mod.weight``."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _of_optimizer(optimizer: Optimizer, state: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    numbers = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameter_of = dict(zip(numbers, parameters, strict=False))  # if the lengths differ, load_state_dict will raise

    def placed(number: Any, values: Any) -> Any:
        return _mapped(values, "", lambda _, leaf: _placed(leaf, parameter_of.get(number), shards))

    states = {number: placed(number, values) for number, values in state["state"].items()}
    others = {key: copied_state(value, shards) for key, value in state.items() if key != "state"}
    return others | {"state": states}


def _is_zero(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(value, module.ZeroRedundancyOptimizer)


def _mapped(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with each leaf replaced by the result of ``change(path, leaf)``.

    A container in which nothing changes is used as it is. If a part changes, the container is copied with `copy.copy`,
    and only the changed parts are set in the copy. A new container must not be made from the parts, because subclasses
    of dict may treat their arguments in another way. A Counter, for instance, would count the parts.
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
    copied = copy.copy(value)  # `copy.copy` keeps the attributes of a dict, such as the versions of modules
    for key, part in changed.items():
        copied[key] = part
    return copied


def _placed(value: Any, wanted: Any, shards: Shards, *, copies: bool = True) -> Any:
    """Return a value of the file, sharded in the same way as ``wanted``.

    Args:
        value: the value. Only tensors are changed.
        wanted: the tensor of the target. If this tensor is not sharded or has another shape, the value is not sharded.
        shards: the sharded tensors of the checkpoint. The file holds a placeholder for each of them, and `Shards.place`
            returns the tensor that replaces the placeholder.
        copies: if True, a tensor that will not be sharded is copied, so that the result does not depend on the file.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return shards.place(value, wanted)
    if not is_sharded(wanted) or value.shape != wanted.shape:
        return value.clone() if copies else value
    from torch.distributed.tensor import distribute_tensor

    # With ``src_data_rank=None`` each rank cuts its part out of its own copy, and nothing is sent.
    part = distribute_tensor(value, wanted.device_mesh, wanted.placements, src_data_rank=None)
    return part.clone()  # in older versions of torch ``part`` is a view, which would keep ``value`` in memory
