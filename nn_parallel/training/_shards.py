"""The sharded tensors of a checkpoint: each rank writes and reads its part, by torch.distributed.checkpoint.

In the file of the checkpoint a tensor of no device, of the same shape, stands for each of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import secrets
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist

from .._engine.ranks.context import rank_context
from .collectives import all_gather_object

LOCK = "lock"  # the name of a file that is locked while a folder is written
WRITTEN, FAILED = ".written", ".failed"  # files in the folder, after the number of a rank
LOOK_EVERY_S = 0.1  # whether parts have been written
# What the index of the folder is made of. It is a pickle, in which torch would allow anything.
METADATA = {"ChunkStorageMetadata", "TensorStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"}
METADATA |= {"TensorProperties", "_MEM_FORMAT_ENCODING"}
ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in METADATA}
ALLOWED |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")}
ALLOWED |= {("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.storage", "WriteResult")}
PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the latter of Python 3.13


def is_sharded(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Shards:
    """The sharded tensors of one checkpoint, by the path of each in its states."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._path_of: dict[int, str] = {}  # by the identity of what stands for the tensor

    def add(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Have ``tensor`` written; returns what stands for it."""
        self.tensors[path] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def find(self, states: Any, path: str = "") -> None:
        """Learn for which tensors those of no device stand in ``states``."""
        if isinstance(states, torch.Tensor) and states.is_meta:
            self._path_of[id(states)] = path
        elif isinstance(states, list | tuple):
            states = dict(enumerate(states))
        for key, value in states.items() if isinstance(states, dict) else ():
            self.find(value, f"{path}/{key}")

    def place(self, stand_in: torch.Tensor, wanted: Any = None) -> torch.Tensor:
        """An empty tensor that `read` fills with what this stands for: sharded as ``wanted`` is, else whole on the CPU.

        The tensor itself, if it stands for none.
        """
        path = self._path_of.get(id(stand_in))
        if path is None:
            return stand_in
        is_like_it = is_sharded(wanted) and wanted.shape == stand_in.shape
        like, device = (wanted, None) if is_like_it else (stand_in, "cpu")
        empty = torch.empty_like(like, dtype=stand_in.dtype, device=device).detach()
        self.tensors[path] = empty
        return empty

    def read(self, folder: Path) -> None:
        """Fill all tensors that were placed, each rank for itself.

        Raises:
            OSError, ValueError: the folder is not there, is damaged, or its index holds more than data.
        """
        if not self.tensors:
            return
        from torch.distributed import checkpoint

        try:
            index = _load_data(folder / ".metadata")
        except (pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"the index of {folder} is damaged: {error}") from None

        class Reader(checkpoint.FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return index

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads for itself
                checkpoint.load(self.tensors, storage_reader=Reader(folder), no_dist=True)
        except checkpoint.CheckpointException as error:
            cause, *_ = error.failures.values()
            raise ValueError(f"the tensors in {folder} cannot be read: {cause[0]}") from cause[0]


class Part:
    """What one rank writes of the sharded tensors of a checkpoint, as all ranks have agreed.

    Beside it, it writes a file that says what is where: with those of all ranks, rank 0 makes the index. Thus no rank
    has to wait for another while they write.
    """

    def __init__(self, shards: Shards, folder: Path, *, copies: bool) -> None:
        """Agree on it. A call of all ranks; ``folder`` is there. ``copies``: write what the tensors hold now."""
        from torch.distributed import checkpoint

        held = {path: _held(tensor, copies) for path, tensor in shards.tensors.items()}

        class Planner(checkpoint.DefaultSavePlanner):
            def lookup_object(self, index: Any) -> torch.Tensor:
                return held[index.fqn]

        self._folder, self._rank, self._world_size = folder, dist.get_rank(), dist.get_world_size()
        self._timeout_s = context.timeout.total_seconds() if (context := rank_context()) else 0.0
        self._planner, self._storage = Planner(), checkpoint.FileSystemWriter(folder)
        self._planner.set_up_planner(shards.tensors, self._storage.storage_meta(), self._rank == 0)
        self._storage.set_up_storage_writer(self._rank == 0)
        plans = all_gather_object(self._storage.prepare_local_plan(self._planner.create_local_plan()))
        plans, self._index = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(self._storage.prepare_global_plan(plans)[self._rank])

    def write(self) -> None:
        """Write this part.

        Raises:
            OSError: it cannot be written. Rank 0 does not wait for it then.
        """
        try:
            written = self._storage.write_data(self._plan, self._planner).value()
            new = self._folder / f"{self._rank}.new"
            with open(new, "wb") as file:
                pickle.dump(written, file)
            os.replace(new, self._folder / f"{self._rank}{WRITTEN}")
            sync_directory(self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                (self._folder / f"{self._rank}{FAILED}").touch()
            raise

    def missing(self, no_more: threading.Event) -> list[int]:
        """The ranks whose parts will not come: one has failed, or ``no_more`` will, or the timeout is over."""
        is_last_look, wait_until = False, time.monotonic() + self._timeout_s
        while True:
            there = set(os.listdir(self._folder))
            missing = [rank for rank in range(self._world_size) if f"{rank}{WRITTEN}" not in there]
            has_failed = any(f"{rank}{FAILED}" in there for rank in missing)
            if not missing or has_failed or is_last_look or time.monotonic() > wait_until:
                return missing
            is_last_look = no_more.wait(LOOK_EVERY_S)

    def write_index(self) -> None:
        """On rank 0, when all parts are there: write what is where in them."""
        files = [self._folder / f"{rank}{WRITTEN}" for rank in range(self._world_size)]
        self._storage.finish(self._index, [_load_data(file) for file in files])
        for file in files:
            file.unlink()
        for directory in (self._folder, self._folder.parent):
            sync_directory(directory)


def _held(tensor: Any, copies: bool) -> torch.Tensor:
    """What this rank holds of ``tensor``; if this ``copies``, what it holds now, in the memory of the CPU."""
    held: torch.Tensor = tensor.to_local()
    return held.to("cpu", copy=True) if copies else held


def _load_data(path: Path) -> Any:
    with open(path, "rb") as file:
        return DataUnpickler(file).load()


class DataUnpickler(pickle.Unpickler):
    """Reads the index of a folder, or what a rank has written there, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PATHS:
            return PurePath
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which could run code")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder for the shards of the checkpoint ``path``, locked in the block; it is removed if the block raises."""
    folder = folder_of_all(path) / secrets.token_hex(4)
    folder.mkdir(parents=True)
    with open(folder / LOCK, "wb") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: there nothing is removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # also for processes that were forked meanwhile


def remove_folders(path: Path, kept: set[Path]) -> None:
    """Remove the shards beside the checkpoint ``path``, but for those ``kept``, and those that are being written."""
    for folder in folder_of_all(path).iterdir():
        if folder not in kept:
            # A process that was killed as it made or removed the folder may have left no lock in it.
            with contextlib.suppress(OSError), open(folder / LOCK, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def folder_of_all(path: Path) -> Path:
    """Where the folders are with the shards of the checkpoint ``path``, and of those before it."""
    return path.with_name(f"{path.name}.shards")


def sync_directory(path: Path) -> None:
    """Have the names in it on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
