"""Checkpoints that survive a kill at any moment, and load at any number of ranks, wrapped or not, sharded or whole."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import io
import logging
import os
import pickle
import random
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ..calls.blocks import block
from ..calls.records import call_site
from ..ddp import initialize_ddp
from ..errors import summary
from ..on_rank import on_rank
from .collectives import all_gather_object
from .model import unwrap_model
from .states import fitting, load_all_but_tensors, stored

RANDOM_STATES = "random_states"  # the key of those of all ranks, in the file
logger = logging.getLogger("nn_parallel")


def save_checkpoint(path: str | os.PathLike[str], **state: Any) -> None:
    """Save the state of models, optimizers and whatever else training needs to go on. Every rank calls it.

    Rank 0 writes it beside ``path`` and then puts it there: whatever ends the process, at ``path`` is the old
    checkpoint or the new one, whole. The states of the random numbers of all ranks are saved with it.

    Args:
        path: one file, that `torch.load` reads with ``weights_only=True`` as a dict of what is given here.
        state: anything with a ``state_dict`` (models, optimizers, schedulers, scalers, prepared loaders); numbers,
            strings, tensors, and lists, tuples and dicts of them. Models are saved without their wrappers, and sharded
            ones whole, with their optimizers; NumPy's numbers as Python's.

    Raises:
        ValueError: a value is such that it could not be loaded.
        OSError: it cannot be written, for instance because the disk is full; what was at ``path`` is still there.
        RankError: one of these, where there are several ranks, on each of them.

    Example::

        save_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)
    """
    if RANDOM_STATES in state:
        raise ValueError(f"{RANDOM_STATES!r} is the name of what save_checkpoint adds itself.")
    world = initialize_ddp()
    with block("save_checkpoint()", call_site(sys._getframe(1)), begins_together=True):
        whole = {name: stored(value, keeps=world.is_main) for name, value in state.items()}
        random_states = all_gather_object(_random_state())
    on_rank(0)(write_checkpoint)(Path(path).resolve(), whole | {RANDOM_STATES: random_states})


def load_checkpoint(path: str | os.PathLike[str], **targets: Any) -> dict[str, Any]:
    """Load what `save_checkpoint` has saved. Every rank calls it; rank 0 reads the file.

    The number of ranks, wrappers and sharding may differ from those at the time of saving. If the number of ranks is
    the same, their random numbers go on where they were.

    Args:
        path: the file; code in it is not executed.
        targets: what to load into, under the names that were saved. If one of them does not take its state, on
            whichever rank, nothing is loaded: those that took theirs get back what they had.

    Returns:
        The rest of what was saved, by its names.

    Raises:
        ValueError: on every rank: the file is damaged, holds objects that are more than data, lacks a target, or is of
            another model or optimizer; or a ``load_state_dict`` raised, and what it raised is the cause.
        OSError: it cannot be read.
        RankError: on every rank, where there are several: rank 0 could not read it, or one failed in another way.

    Example::

        epoch = load_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]
    """
    world = initialize_ddp()
    saved = on_rank(0, broadcast=True)(read_checkpoint)(Path(path))
    random_states = saved.pop(RANDOM_STATES, [])
    targets |= {name: unwrap_model(target) for name, target in targets.items() if isinstance(target, nn.Module)}
    states: dict[str, Any] = {}
    misfit: Exception | None = None
    with block("load_checkpoint()", call_site(sys._getframe(1))), contextlib.ExitStack() as undo:
        try:
            states.update((name, fitting(name, target, saved)) for name, target in targets.items())
            for name, target in targets.items():
                load_all_but_tensors(name, target, states[name], undo)
        except (TypeError, ValueError) as error:
            misfit = error
        told = all_gather_object(None if misfit is None else str(misfit))
        misfit = misfit or next((ValueError(text) for text in told if text is not None), None)
        if misfit is None:
            undo.pop_all()
            for name, target in targets.items():
                if isinstance(target, nn.Module):
                    target.load_state_dict(states[name])
    if misfit is not None:  # raised in the block, it would close the process group
        raise ValueError(f"{path} does not fit: {misfit}") from misfit.__cause__
    if len(random_states) == world.world_size:
        _set_random_state(random_states[world.rank])
    elif random_states:
        count = len(random_states)
        logger.info("%s is of %d ranks, not %d: random numbers do not go on from it.", path, count, world.world_size)
    return {name: value for name, value in saved.items() if name not in targets}


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is there, and is no file.")
    file = _new_file(path)
    new = Path(file.name)
    try:
        with file:
            with contextlib.suppress(OSError):  # there is none to replace, or a file system without modes
                shutil.copymode(path, new)
            try:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                torch.load(new, map_location="cpu", weights_only=True, mmap=True)
            except (TypeError, AttributeError, pickle.PickleError) as error:
                raise _unloadable(state, error) from error
            except RuntimeError as error:  # torch raises again as it closes its archive, and hides why
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
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


def _new_file(path: Path) -> IO[bytes]:
    """A file beside ``path`` that nobody else writes, locked until it is closed.

    Files that killed processes have left are removed: nobody holds their locks.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        with contextlib.suppress(OSError), open(left, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    while True:
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
        created = open(new, "xb")  # noqa: SIM115  # the caller closes it
        with contextlib.suppress(OSError):  # a file system without locks: there no file that was left is removed
            fcntl.flock(created, fcntl.LOCK_EX)
        if new.exists():
            return created
        created.close()  # another process removed it before it was locked


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
    return f"{path} is damaged or no checkpoint ({summary(error)})."


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
