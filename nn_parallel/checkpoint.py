"""Checkpoints that survive a kill at any moment, and load at any number of ranks, wrapped or not, sharded or whole."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .channels import channel
from .collectives import all_gather_object
from .ddp import initialize_ddp
from .errors import first_line, qualified_name
from .on_rank import on_rank
from .reports import Call, place_of
from .training import unwrap_model

RANDOM_STATES = "random_states"  # the name in the file under which those of all ranks stand
WRAPPERS = {"module", "_orig_mod"}  # what DDP, DataParallel, AveragedModel and torch.compile put into names
logger = logging.getLogger("nn_parallel")


def save_checkpoint(path: str | os.PathLike[str], **state: Any) -> None:
    """Save the state of models, optimizers and whatever else training needs to go on. Every rank calls it.

    Rank 0 writes it beside ``path`` and then puts it there: whatever ends the process, at ``path`` is the old
    checkpoint or the new one, whole. The states of the random numbers of all ranks are saved with it.

    Args:
        path: one file, that `torch.load` reads with ``weights_only=True`` as a dict of what is given here.
        state: anything with a ``state_dict`` (models, optimizers, schedulers, scalers, samplers); numbers, strings,
            tensors, and lists, tuples and dicts of them. Models are saved without their wrappers, and sharded ones
            whole, with their optimizers.

    Raises:
        ValueError: a value is such that it could not be loaded.
        OSError: it cannot be written, for instance because the disk is full; what was at ``path`` is still there.
        RankError: one of these, where there are several ranks, on each of them.

    Example::

        save_checkpoint("last.pt", model=model, optimizer=optimizer, sampler=loader.sampler, epoch=epoch)
    """
    if RANDOM_STATES in state:
        raise ValueError(f"{RANDOM_STATES!r} is the name of what save_checkpoint adds itself.")
    initialize_ddp()
    here = channel()
    call = Call("save_checkpoint()", tuple(range(here.world_size)) if here else (0,), place_of(sys._getframe(1)))
    with here.block(call) if here else contextlib.nullcontext():
        whole = {name: _whole(_state_of(value)) for name, value in state.items()}
        random_states = all_gather_object(_random_state())
    on_rank(0)(write_checkpoint)(Path(path).resolve(), whole | {RANDOM_STATES: random_states})


def load_checkpoint(path: str | os.PathLike[str], **targets: Any) -> dict[str, Any]:
    """Load what `save_checkpoint` has saved. Every rank calls it; rank 0 reads the file.

    The number of ranks, wrappers and sharding may differ from those at the time of saving. If the number of ranks is
    the same, their random numbers go on where they were.

    Args:
        path: the file; code in it is not executed.
        targets: what to load into, under the names that were saved. If anything does not fit, nothing is loaded.

    Returns:
        The rest of what was saved, by its names.

    Raises:
        ValueError: on every rank: the file is damaged, holds objects that are more than data, lacks a target, or is of
            another model or optimizer.
        OSError: it cannot be read.
        RankError: where there are several ranks and rank 0 could not read it.

    Example::

        epoch = load_checkpoint("last.pt", model=model, optimizer=optimizer, sampler=loader.sampler)["epoch"]
    """
    world = initialize_ddp()
    saved = on_rank(0, broadcast=True)(read_checkpoint)(Path(path))
    random_states = saved.pop(RANDOM_STATES, [])
    loads, problem = [], ""
    try:
        loads = [_loading(name, target, saved) for name, target in targets.items()]
    except (TypeError, ValueError) as error:
        problem = f"{path} does not fit: {error}"
    if problems := [told for told in all_gather_object(problem) if told]:
        raise ValueError(problem or problems[0])
    for load in loads:
        load()
    if len(random_states) == world.world_size:
        _set_random_state(random_states[world.rank])
    elif random_states:
        count = len(random_states)
        logger.info("%s is of %d ranks, not %d: random numbers do not go on from it.", path, count, world.world_size)
    return {name: value for name, value in saved.items() if name not in targets}


def _state_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return unwrap_model(value).state_dict()
    return value.state_dict() if hasattr(value, "state_dict") else value


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is there, and is no file.")
    new = path.with_name(f".{path.name}.new")  # always the same, so that kills leave no more than one
    try:
        with open(new, "wb") as file:
            try:
                torch.save(state, file)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise _unloadable(state, error) from error
            except RuntimeError as error:  # torch closes its archive even so, and hides why it could not be written
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
            file.flush()
            os.fsync(file.fileno())
        try:
            torch.load(new, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise _unloadable(state, error) from None
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name
    finally:
        os.close(directory)


def _unloadable(state: dict[str, Any], error: Exception) -> ValueError:
    """The error of a state of which something cannot be loaded again, with its name."""
    for name, value in state.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception:
            return ValueError(
                f"{name} is a {type(value).__qualname__} that holds more than numbers, strings, tensors, and lists, "
                "tuples and dicts of them: loading it would execute code. Save what it is made of."
            )
    return ValueError(str(error))


def read_checkpoint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch, pickle, zip and seek have many words for it
            raise ValueError(_why_unreadable(path, error)) from None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds a {type(saved).__name__}, and a checkpoint is a dict.")
    return saved


def _why_unreadable(path: Path, error: Exception) -> str:
    with contextlib.suppress(Exception):  # no file of torch's
        if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return (
                f"{path} holds more than data, which could run code: {', '.join(kinds)}. Save what these are made of, "
                "or, if you trust the file, allow them by torch.serialization.add_safe_globals."
            )
    return f"{path} is damaged or no checkpoint ({qualified_name(type(error))}: {first_line(error)})."


def _loading(name: str, target: Any, saved: Mapping[str, Any]) -> Callable[[], object]:
    """What loads the state of that name into ``target``; raises if it does not fit."""
    if name not in saved:
        raise ValueError(f"it has no {name!r}, only {', '.join(map(repr, saved))}.")
    state = saved[name]
    if isinstance(target, nn.Module):
        return _loading_model(name, unwrap_model(target), state)
    if isinstance(target, Optimizer):
        return _loading_optimizer(name, target, state)
    if not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name} is a {type(target).__name__} without load_state_dict: its value is in what is returned."
        )
    return lambda: target.load_state_dict(state)


def _loading_model(name: str, model: nn.Module, state: Any) -> Callable[[], object]:
    wanted = model.state_dict()
    if not isinstance(state, dict):
        raise ValueError(f"{name} in it is a {type(state).__name__}, not the state of a model.")
    renamed = _renamed(state, wanted)
    problems = [f"{key} is missing" for key in wanted if key not in renamed]
    problems += [f"{key} is not part of the {type(model).__name__}" for key in renamed if key not in wanted]
    for key, there in wanted.items():
        shapes = [tuple(value.shape) for value in (there, renamed.get(key)) if isinstance(value, torch.Tensor)]
        if len(set(shapes)) > 1:
            problems.append(f"{key} is of shape {shapes[1]} in the file, {shapes[0]} in the model")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{name} is another model: {'; '.join(problems[:3])}{more}.")
    return lambda: model.load_state_dict({key: _like(value, wanted[key]) for key, value in renamed.items()})


def _renamed(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` under the names that are ``wanted``: these may differ in what wrappers add to them."""
    bare = {_bare(key): key for key in wanted}
    if len(bare) < len(wanted) or len({_bare(key) for key in state}) < len(state):
        return dict(state)  # somebody's own part is called "module"
    return {bare.get(_bare(key), key): value for key, value in state.items()}


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _loading_optimizer(name: str, optimizer: Optimizer, state: Any) -> Callable[[], object]:
    try:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        states = dict(state["state"])
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name} in it is not the state of an optimizer.") from None
    groups = optimizer.state_dict()["param_groups"]
    if sizes != [len(group["params"]) for group in groups]:
        raise ValueError(f"{name} is of other parameters: groups of {sizes}, not {[len(g['params']) for g in groups]}.")
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def load() -> None:
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in states:
                states[number] = {key: _like(value, parameter) for key, value in states[number].items()}
        optimizer.load_state_dict({**state, "state": states})

    return load


def _whole(state: Any) -> Any:
    """``state`` with whole tensors on the CPU in the place of sharded ones; otherwise the same object."""
    if "torch.distributed.tensor" not in sys.modules or not _is_sharded(state):
        return state
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_whole(value) for value in state)
    return state.full_tensor().cpu()


def _is_sharded(state: Any) -> bool:
    from torch.distributed.tensor import DTensor

    if isinstance(state, dict | list | tuple):
        return any(_is_sharded(value) for value in (state.values() if isinstance(state, dict) else state))
    return isinstance(state, DTensor)


def _like(value: Any, wanted: Any) -> Any:
    """``value`` sharded as ``wanted`` is, if that is a sharded tensor of its shape."""
    if "torch.distributed.tensor" not in sys.modules:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(wanted, DTensor) or not isinstance(value, torch.Tensor) or value.shape != wanted.shape:
        return value
    return distribute_tensor(value, wanted.device_mesh, wanted.placements)


def _random_state() -> dict[str, Any]:
    """The states of this process's random numbers, as tensors and plain numbers."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy.random"):
        _, keys, *rest = numpy.get_state()
        state["numpy"] = [torch.tensor(keys.tolist()), *rest]
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy.random

        keys, *rest = state["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy(), *rest))
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["accelerator"])
