"""`save_checkpoint` and `load_checkpoint`.

If a process is killed at any moment, a complete checkpoint remains (`_checkpoint_file`). A checkpoint can be loaded
with another number of ranks, and into a model that is wrapped or sharded in another way (`_states`, `_shards`). It can
be written while training goes on (`_saving`). The docstrings of these modules explain how.
"""

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
from .._engine.ranks.run_on_ranks import on_rank_0
from ..ddp import initialize_ddp
from ..ranks import broadcast
from ._checkpoint_file import FileIdentity, dump, dumped, read_checkpoint, replace_file
from ._random_numbers import random_state, set_random_state
from ._saving import finish_saving, save_in_background
from ._shards import Shards, folder_of_all, new_folder, remove_folders, sync_directory, write_shards
from ._states import copied_state, load, loadable, saved_state
from .collectives import all_gather_object, all_ranks
from .model import unwrap_model

# The keys that `save_checkpoint` adds to the names of the user's values.
RANDOM_STATES = "random_states"  # the states of the random numbers of all ranks
FOLDER = "shards_folder"  # the path of the folder with the shards, relative to the folder of the file
logger = logging.getLogger("nn_parallel")


def save_checkpoint(
    path: str | os.PathLike[str], *, keep: int = 1, sharded: bool = False, asynchronous: bool = False, **state: Any
) -> None:
    """Save everything that training needs to go on, such as models and optimizers. Every rank calls this function.

    Rank 0 first writes the checkpoint into a second file and then puts this file at ``path``. So if the process is
    killed at any moment, there is a complete checkpoint at ``path``, the old or the new one. The states of the random
    numbers of all ranks are saved too.

    Args:
        path: the file. `torch.load` can read it with ``weights_only=True``, as a dict with the names in ``state``.
        keep: the number of checkpoints to keep: the new one and previous ones. If ``path`` is ``last.pt``, the previous
            ones are ``last.1.pt`` (the most recent of them), ``last.2.pt``, and so on.
        sharded: if True, each rank writes its own shards of sharded models and of their optimizers, so that no rank
            ever holds a whole model. `torch.distributed.checkpoint` writes the shards into a folder beside the file,
            ``last.pt.shards`` for ``last.pt``. To save and to load, all ranks must reach this folder, for example on a
            shared file system.
        asynchronous: if True, return as soon as the state is copied into the memory of the CPU. A thread then writes
            the checkpoint while training goes on. Until the thread has finished, the previous checkpoint stays at
            ``path``. The next `save_checkpoint` or `load_checkpoint` waits for the thread, and raises the errors of the
            thread on every rank.
            `cleanup_ddp`, the end of the process and the end of a task of a pool wait for the thread too; at the end of
            the process, errors are logged. To write sharded tensors, the thread needs the process group. If all ranks
            raise a failure while the thread runs, the group is closed, and the checkpoint is given up: the previous one
            stays. Call `cleanup_ddp` before your own code destroys a process group.
        state: the values to save, under their names. A value may be an object with a ``state_dict`` (models,
            optimizers, schedulers, scalers, prepared loaders), a number, a string, a tensor, or a list, tuple or dict
            of these. Models are saved without their wrappers. Without ``sharded``, sharded models and their optimizers
            are saved whole. NumPy's numbers are saved as Python's.

    Raises:
        ValueError: a value could not be loaded again; the message names it.
        OSError: the checkpoint cannot be written, for instance because the disk is full or the folder does not exist.
            The previous checkpoint is still at ``path``.
        RankError: raised on every rank instead of these errors, if there are several ranks. It contains the errors.
        RankTimeoutError: a rank has not called this function within the timeout of the process group.

    Example::

        save_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)
    """
    if reserved := {RANDOM_STATES, FOLDER} & state.keys():
        raise ValueError(f"The name {reserved.pop()!r} is reserved, because save_checkpoint() uses it: choose another.")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep={keep!r} must be a whole number of at least 1.")
    world = initialize_ddp()
    file = Path(path).resolve()
    shards = Shards()
    finish_saving("save_checkpoint()")

    def take_whole(_: str, tensor: Any) -> torch.Tensor | None:
        whole: torch.Tensor = tensor.full_tensor()  # a collective
        return whole.cpu() if world.is_main else None

    with block("save_checkpoint()"):
        take = shards.add if sharded else take_whole
        states = {name: saved_state(name, value, take) for name, value in state.items()}
        states[RANDOM_STATES] = all_gather_object(_random_state())
    with contextlib.ExitStack() as until_written:
        if world.is_main:
            until_written.callback(_remove_unused_shards, file)
        folder: Path | None = None
        if shards.tensors:
            enter = functools.partial(until_written.enter_context, new_folder(file))
            folder = on_rank_0("save_checkpoint()", enter, broadcast=True)
            assert folder is not None
            states[FOLDER] = str(folder.relative_to(file.parent))
        if asynchronous:
            in_memory = on_rank_0("save_checkpoint()", functools.partial(dumped, states))
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

        def finish() -> None:
            if failure is not None:
                raise failure
            _write_file(file, functools.partial(dump, states), keep, folder)

        on_rank_0("save_checkpoint()", finish)


def load_checkpoint(path: str | os.PathLike[str], **targets: Any) -> dict[str, Any]:
    """Load a checkpoint that `save_checkpoint` has saved. Every rank calls this function.

    If all ranks find the same file at ``path``, each rank reads it. Otherwise rank 0 reads the file and sends it to the
    others. The number of ranks, the wrappers and the sharding may be different from those at the time of saving.

    If the number of ranks is the same, the random numbers of each rank continue where they were when the checkpoint was
    saved. They are not restored if there are only models among the targets, because loading only models usually begins
    a new training. Without any targets, they are restored.

    Args:
        path: the file. Code in the file, or in the shards beside it, is not executed.
        targets: the objects to load into, under the names that were given to `save_checkpoint`. They are loaded in the
            order of the arguments. The ``load_state_dict`` of each target is called as usual. It decides which states
            the target accepts, and its hooks may convert old states. If a ``load_state_dict`` raises on any rank,
            nothing is undone: some targets may be loaded, or loaded in part.

    Returns:
        The saved values that are not in ``targets``, under their names.

    Raises:
        ValueError: on every rank: the file is damaged, holds objects that are not plain data, or has no state for a
            target; or a ``load_state_dict`` raised an exception, which is the cause of this error.
        OSError: on every rank: rank 0 cannot read the file, for instance because there is no checkpoint yet
            (`FileNotFoundError`).
        RankError: one of several ranks failed in another way. Every rank raises this error.
        RankTimeoutError: a rank has not called this function within the timeout of the process group.

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
    if problem is not None:  # raised after the block, because an error in a block closes the process group
        raise ValueError(f"{path} does not fit: {problem}") from problem.__cause__
    if targets and all(isinstance(target, nn.Module) for target in targets.values()):
        return rest
    if len(random_states) == world.world_size:
        _set_random_state(random_states[world.rank])
    elif random_states:
        count = len(random_states)
        logger.info(
            "%s is of %d ranks, but now there are %d: random numbers are not restored.", path, count, world.world_size
        )
    return rest


def _problem_of(step: Callable[[], None]) -> Exception | None:
    """Call ``step``, and return an error that ``step`` has raised on this or on another rank.

    Every rank calls this function, so that all ranks learn of the error. If ``step`` has raised on this rank, the
    result is the error of this rank. If no rank has an error, the result is None.
    """
    own: Exception | None = None
    try:
        step()
    except (TypeError, ValueError) as error:
        own = error
    problems = all_gather_object(None if own is None else str(own))
    return own or next((ValueError(problem) for problem in problems if problem is not None), None)


def _write_file(path: Path, write: Callable[[IO[bytes]], object], keep: int, folder: Path | None) -> None:
    """Write the file at ``path``. If there are shards, first flush their ``folder``, to which the file refers."""
    if folder is not None:
        sync_directory(folder)
        sync_directory(folder.parent)
    replace_file(path, write, keep)


def _remove_unused_shards(path: Path) -> None:
    """Remove the shards to which neither the checkpoint at ``path`` nor the kept previous checkpoints refer."""
    if folder_of_all(path).exists():
        try:
            files = [file for file in (path, *_files_before(path)) if file.exists()]
            remove_folders(path, {_folder(file, read_checkpoint(file)[0]) for file in files})
        except (OSError, ValueError) as error:
            # The file that cannot be read may refer to any of the folders, so no folder may be removed.
            logger.warning("Old shards of %s are kept: %s", path, error)


def _folder(path: Path, saved: dict[str, Any]) -> Path:
    """Return the folder with the shards of a checkpoint, or the folder of its file if there are no shards.

    Args:
        path: the file of the checkpoint.
        saved: the content of this file.
    """
    return path.parent / str(saved.get(FOLDER, ""))


def _files_before(path: Path) -> list[Path]:
    """Return the previous checkpoints that are kept beside ``path``: last.1.pt, last.2.pt, ..."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d+{re.escape(path.suffix)}")
    return [file for file in path.parent.iterdir() if name.fullmatch(file.name)]


def _read_on_all(path: Path) -> dict[str, Any]:
    """Return the checkpoint at ``path`` on every rank. Tensors may still be mapped from the file."""
    saved: dict[str, Any] | None = None

    def read() -> FileIdentity | Exception:
        nonlocal saved
        try:
            saved, identity = read_checkpoint(path)
        except (OSError, ValueError) as error:  # returned, because `on_rank_0` turns a raised error into a RankError
            return error
        return identity

    answer = on_rank_0("load_checkpoint()", read, broadcast=True)
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
    if current_world().device.type != "cpu":  # on a CPU rank, asking for the state would initialise CUDA
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    set_random_state(state)
    if "accelerator" in state and current_world().device.type != "cpu":
        torch.get_device_module().set_rng_state(state["accelerator"])
