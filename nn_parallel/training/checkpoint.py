"""Checkpoints that survive a kill at any moment, and load at any number of ranks, wrapped or not, sharded or whole."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from .._engine.ranks.blocks import block
from .._engine.ranks.context import current_world
from ..ddp import initialize_ddp
from ..ranks import broadcast, on_rank
from ._checkpoint_file import FileIdentity, dump, dumped, read_checkpoint, replace_file
from ._random_numbers import random_state, set_random_state
from ._saving import finish_saving, save_in_background
from ._shards import Shards, folder_of_all, new_folder, remove_folders, sync_directory, write_shards
from ._states import copied_state, load, loadable, saved_state
from .collectives import all_gather_object, all_ranks
from .model import unwrap_model

# Keys in the file: the random numbers of all ranks; the folder of the sharded tensors, beside the file.
RANDOM_STATES = "random_states"
FOLDER = "shards_folder"
logger = logging.getLogger("nn_parallel")


def save_checkpoint(
    path: str | os.PathLike[str], *, keep: int = 1, sharded: bool = False, asynchronous: bool = False, **state: Any
) -> None:
    """Save the state of models, optimizers and whatever else training needs to go on. Every rank calls it.

    Rank 0 writes it beside ``path`` and then puts it there: whatever ends the process, at ``path`` is the old
    checkpoint or the new one, whole. The states of the random numbers of all ranks are saved with it.

    Args:
        path: one file, that `torch.load` reads with ``weights_only=True`` as a dict of what is given here.
        keep: how many checkpoints to keep: the new one, and as ``last.1.pt``, ``last.2.pt``, ... those that were at
            ``path`` before, the latest first.
        sharded: have each rank write its part of sharded models and their optimizers, so that no rank ever holds a
            whole one: with `torch.distributed.checkpoint`, into a folder ``last.pt.shards`` beside the file. All ranks
            must reach it, by a common disk, also to load from it.
        asynchronous: return once all is copied in the memory of the CPU, and write it in a thread while training goes
            on. The next call of `save_checkpoint` or `load_checkpoint`, `cleanup_ddp` and the end of the process, or
            of the call of a pool, wait for it; the first two raise what went wrong, on every rank, and at the end that
            is logged. Until all of it is written, at ``path`` is the checkpoint before. What is sharded needs the
            process group: if ranks fail together meanwhile, it is given up. Call `cleanup_ddp` before your own code
            destroys a group.
        state: anything with a ``state_dict`` (models, optimizers, schedulers, scalers, prepared loaders); numbers,
            strings, tensors, and lists, tuples and dicts of them. Models are saved without their wrappers, and sharded
            ones whole, with their optimizers; NumPy's numbers as Python's.

    Raises:
        ValueError: a value is such that it could not be loaded.
        OSError: it cannot be written, for instance because the disk is full or there is no such folder; what was at
            ``path`` is still there.
        RankError: one of these, where there are several ranks, on each of them.
        RankTimeoutError: a rank has not called it within the timeout of the process group.

    Example::

        save_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)
    """
    if own := {RANDOM_STATES, FOLDER} & state.keys():
        raise ValueError(f"{own.pop()!r} is the name of what save_checkpoint adds itself.")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep={keep!r} must be a whole number, at least 1.")
    world = initialize_ddp()
    file = Path(path).resolve()
    shards = Shards()
    finish_saving("save_checkpoint()")

    def take_whole(_: str, tensor: Any) -> torch.Tensor | None:
        all_of_it: torch.Tensor = tensor.full_tensor()
        return all_of_it.cpu() if world.is_main else None

    with block("save_checkpoint()"):
        take = shards.add if sharded else take_whole
        states = {name: saved_state(name, value, take) for name, value in state.items()}
        states[RANDOM_STATES] = all_gather_object(_random_state())
    with contextlib.ExitStack() as until_written:
        if world.is_main:
            until_written.callback(_remove_unused_shards, file)
        folder: Path | None = None
        if shards.tensors:
            folder = on_rank(0, broadcast=True)(until_written.enter_context)(new_folder(file))
            states[FOLDER] = str(folder.relative_to(file.parent))
        if asynchronous:
            in_memory = on_rank(0)(dumped)(states)
            write: Callable[[], None] | None = None
            if in_memory is not None:
                copy = functools.partial(shutil.copyfileobj, in_memory)
                write = functools.partial(_write_file, file, copy, keep, folder)
            save_in_background(shards, folder, write, until_written)
            return
        failure: Exception | None = None
        if folder is not None:
            with block("save_checkpoint()"):
                failure = write_shards(shards, folder)

        def save_checkpoint() -> None:
            if failure is not None:
                raise failure
            _write_file(file, functools.partial(dump, states), keep, folder)

        on_rank(0)(save_checkpoint)()


def load_checkpoint(path: str | os.PathLike[str], **targets: Any) -> dict[str, Any]:
    """Load what `save_checkpoint` has saved. Every rank calls it.

    Rank 0 reads the file, and so does each other rank that finds the same one there; to the others rank 0 sends it. The
    number of ranks, wrappers and sharding may differ from those at the time of saving. If the number of ranks is the
    same, their random numbers go on where they were; not if nothing but models is loaded, as for a new training.

    Args:
        path: the file; code in it, and in the shards beside it, is not executed.
        targets: what to load into, under the names that were saved, in this order. Each ``load_state_dict`` decides
            what it takes, with its hooks and its migrations of old states. If one raises, on whichever rank, the
            targets are as torch has left them.

    Returns:
        The rest of what was saved, by its names.

    Raises:
        ValueError: on every rank: the file is damaged, holds objects that are more than data, or lacks a target; or a
            ``load_state_dict`` raised, and what it raised is the cause.
        OSError: on every rank: rank 0 cannot read it, for instance because there is none yet (`FileNotFoundError`).
        RankError: on every rank, where there are several: one failed in another way.
        RankTimeoutError: a rank has not called it within the timeout of the process group.

    Example::

        epoch = load_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]
    """
    world = initialize_ddp()
    shards = Shards()
    finish_saving("load_checkpoint()")
    saved = _read_on_all(Path(path))
    random_states = saved.pop(RANDOM_STATES, [])
    folder = _folder(Path(path).resolve(), saved)
    if saved.pop(FOLDER, None) is not None:
        shards.find(saved)
    targets |= {name: unwrap_model(target) for name, target in targets.items() if isinstance(target, nn.Module)}
    states: dict[str, Any] = {}
    rest: dict[str, Any] = {}

    def read() -> None:
        states.update((name, loadable(name, target, saved, shards)) for name, target in targets.items())
        rest.update((name, copied_state(value, shards)) for name, value in saved.items() if name not in targets)
        shards.read(folder)

    def load_all() -> None:
        for name, target in targets.items():
            load(name, target, states[name])

    with block("load_checkpoint()"):
        problem = _problem_of(read) or _problem_of(load_all)
    if problem is not None:  # raised in the block, it would close the process group
        raise ValueError(f"{path} does not fit: {problem}") from problem.__cause__
    if targets and all(isinstance(target, nn.Module) for target in targets.values()):
        return rest
    if len(random_states) == world.world_size:
        _set_random_state(random_states[world.rank])
    elif random_states:
        count = len(random_states)
        logger.info("%s is of %d ranks, not %d: random numbers do not go on from it.", path, count, world.world_size)
    return rest


def _problem_of(step: Callable[[], None]) -> Exception | None:
    """Call ``step``; return why it failed on any rank, with this rank's own error first. Every rank calls it."""
    own: Exception | None = None
    try:
        step()
    except (TypeError, ValueError) as error:
        own = error
    problems = all_gather_object(None if own is None else str(own))
    return own or next((ValueError(problem) for problem in problems if problem is not None), None)


def _write_file(path: Path, write: Callable[[IO[bytes]], object], keep: int, folder: Path | None) -> None:
    """Write the file at ``path``, once the names of its shards in their ``folder`` are on the disk, if it has any."""
    if folder is not None:
        sync_directory(folder)
        sync_directory(folder.parent)
    replace_file(path, write, keep)


def _remove_unused_shards(path: Path) -> None:
    """Remove the shards that neither the checkpoint at ``path`` nor those before it refer to."""
    if folder_of_all(path).exists():
        try:
            files = [file for file in (path, *_files_before(path)) if file.exists()]
            remove_folders(path, {_folder(file, read_checkpoint(file)[0]) for file in files})
        except (OSError, ValueError) as error:  # a file that cannot be read may refer to any of them
            logger.warning("Old shards of %s are kept: %s", path, error)


def _folder(path: Path, saved: dict[str, Any]) -> Path:
    """Return the folder with the shards of what was ``saved`` at ``path``."""
    return path.parent / str(saved.get(FOLDER, ""))


def _files_before(path: Path) -> list[Path]:
    """Return the checkpoints that ``keep`` has kept beside the one at ``path``: last.1.pt, last.2.pt, ..."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d+{re.escape(path.suffix)}")
    return [file for file in path.parent.iterdir() if name.fullmatch(file.name)]


def _read_on_all(path: Path) -> dict[str, Any]:
    """Return what is saved at ``path``, on each rank; its tensors are still on the disk where this rank reads it."""
    saved: dict[str, Any] | None = None

    def load_checkpoint() -> FileIdentity | Exception:
        nonlocal saved
        try:
            saved, identity = read_checkpoint(path)
        except (OSError, ValueError) as error:  # for every rank to raise: no rank has failed
            return error
        return identity

    answer = on_rank(0, broadcast=True)(load_checkpoint)()
    if isinstance(answer, Exception):
        raise answer
    if saved is None:
        with contextlib.suppress(OSError, ValueError):
            own, identity = read_checkpoint(path)
            saved = own if identity == answer else None
    on_every_rank: Any = saved if all_ranks(saved is not None) else broadcast(saved)
    return dict(on_every_rank)


def _random_state() -> dict[str, Any]:
    """Return the states of this process's random numbers, as tensors and plain numbers."""
    state = random_state()
    if current_world().device.type != "cpu":  # to ask would begin the use of CUDA
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    set_random_state(state)
    if "accelerator" in state and current_world().device.type != "cpu":
        torch.get_device_module().set_rng_state(state["accelerator"])
