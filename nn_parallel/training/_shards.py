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
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist

from .._engine.failures import Failure, rank_error, summary
from ..errors import RemoteError

LOCK = "lock"  # the name of a file that is locked while a folder is written
# What the index of the folder is made of. It is a pickle, in which torch would allow anything.
METADATA = {"ChunkStorageMetadata", "TensorStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"}
METADATA |= {"TensorProperties", "_MEM_FORMAT_ENCODING"}
ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in METADATA}
ALLOWED |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")}
ALLOWED |= {("torch.serialization", "_get_layout")}
PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the latter of Python 3.13


def is_sharded(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Shards:
    """The sharded tensors of one checkpoint, by the path of each in its states."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.are_copies = False  # in the memory of the CPU
        self._path_of: dict[int, str] = {}  # by the identity of what stands for the tensor

    def add(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Have ``tensor`` written; returns what stands for it."""
        self.tensors[path] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def copy(self) -> None:
        """Have written what the tensors hold now, whatever becomes of them."""
        self.tensors = {path: tensor.to("cpu", copy=True) for path, tensor in self.tensors.items()}
        self.are_copies = True

    def find(self, states: Any, path: str = "") -> None:
        """Learn for which tensors those of no device stand in ``states``."""
        if isinstance(states, torch.Tensor) and states.is_meta:
            self._path_of[id(states)] = path
        elif isinstance(states, list | tuple):
            states = dict(enumerate(states))
        for key, value in states.items() if isinstance(states, dict) else ():
            self.find(value, f"{path}/{key}")

    def place(self, stand_in: torch.Tensor, wanted: Any = None) -> torch.Tensor:
        """Return an empty tensor for `read` to fill with what this stands for: sharded as ``wanted``, or on the CPU.

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


def write_shards(shards: Shards, folder: Path, group: dist.ProcessGroup | None = None) -> Exception | None:
    """Write them into ``folder``, each rank its part. All ranks call it.

    Args:
        shards: the tensors.
        folder: a folder that all ranks reach.
        group: by which the ranks speak with each other; None for the default one.

    Returns:
        Why ranks could not, the same on all of them: it is no reason to close the process group.

    Raises:
        Exception: what the others do not know of, so that they wait for this rank.
    """
    from torch.distributed import checkpoint

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    writer = checkpoint.FileSystemWriter(folder)
    if shards.are_copies:  # else torch waits for the first GPU, whichever one this rank has
        writer.per_thread_copy_ahead = 0
    try:
        checkpoint.save(shards.tensors, storage_writer=writer, process_group=group)
    except checkpoint.CheckpointException as error:
        failures = dict[int, Exception]()
        for failed, (failure, frames) in error.failures.items():
            if not isinstance(failure, Exception):  # interrupted, as by Ctrl-C
                if failed == rank:
                    raise failure from None
                failure = RemoteError(summary(failure))
            described = Failure.from_exception(failure, "")._replace(
                where=f"rank {failed} of {world_size}", traceback="".join([*frames.format(), summary(failure)])
            )
            failure.__cause__ = described.as_cause()
            failures[failed] = failure
        return rank_error("save_checkpoint()", world_size, failures) if world_size > 1 else failures[0]
    return None


def _load_data(path: Path) -> Any:
    with open(path, "rb") as file:
        return DataUnpickler(file).load()


class DataUnpickler(pickle.Unpickler):
    """Reads the index of a folder, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PATHS:
            return PurePath
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which could run code")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder for the shards of the checkpoint ``path``, locked in the block: nobody removes it."""
    folder = folder_of_all(path) / secrets.token_hex(4)
    folder.mkdir(parents=True)
    with open(folder / LOCK, "wb") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: there nothing is removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
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
    """Return the folder that holds the folders of shards of the checkpoint ``path``, and of those before it."""
    return path.with_name(f"{path.name}.shards")


def sync_directory(path: Path) -> None:
    """Have the names in it on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
