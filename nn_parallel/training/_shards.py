"""The sharded tensors of a checkpoint.

No rank holds a whole sharded tensor, so rank 0 cannot write it into the file of the checkpoint. Instead each rank
writes its shard with torch.distributed.checkpoint into a folder beside the file. The file holds a *placeholder* for the
tensor: a tensor of the same shape on the device ``meta``, which has no values.

Each checkpoint has a folder of its own below ``last.pt.shards``, and the file of the checkpoint contains the name of
this folder. So the old file and the old shards stay together until the new file has replaced the old one. Then folders
to which no file refers are removed. No file refers yet to a folder that is being written, so a lock keeps other
processes from removing the folder.

The index of such a folder is a pickle, which could run code when it is loaded. Therefore `DataUnpickler` allows only
the types of the objects in an index that torch writes.
"""

from __future__ import annotations

import contextlib
import copyreg
import fcntl
import os
import pickle
import secrets
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, cast

import torch
import torch.distributed as dist

from .._engine.failures import Failure, rank_error, summary
from ..errors import RemoteError

LOCK = "lock"  # the name of a file in each folder; this file is locked while the folder is written
# The index of a folder contains objects of these types, so `DataUnpickler` allows them.
METADATA = {"ChunkStorageMetadata", "TensorStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"}
METADATA |= {"TensorProperties", "_MEM_FORMAT_ENCODING"}
ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in METADATA}
ALLOWED |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")}
ALLOWED |= {("torch.serialization", "_get_layout")}
PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the second one is for Python 3.13


def is_sharded(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Shards:
    """The sharded tensors of one checkpoint. Each has a path, such as ``/model/layer.weight``, which identifies it.

    To save, `add` each tensor, and pass this object to `write_shards`. To load, `find` the placeholders in the file,
    replace each placeholder with the tensor that `place` returns, and then `read` the values of these tensors.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.are_copies = False  # True after `copy`: the tensors are copies in the memory of the CPU
        self._path_of: dict[int, str] = {}  # maps the `id` of each placeholder to its path; set by `find`

    def add(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor to be written, and return the placeholder that represents it in the file."""
        self.tensors[path] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def copy(self) -> None:
        """Copy the tensors to the CPU, so that changes to the originals after this call are not saved."""
        self.tensors = {path: tensor.to("cpu", copy=True) for path, tensor in self.tensors.items()}
        self.are_copies = True

    def find(self, states: Any, path: str = "") -> None:
        """Record the path of each placeholder within ``states``. ``path`` is the path of ``states`` itself."""
        if isinstance(states, torch.Tensor) and states.is_meta:
            self._path_of[id(states)] = path
        elif isinstance(states, list | tuple):
            states = dict(enumerate(states))
        for key, value in states.items() if isinstance(states, dict) else ():
            self.find(value, f"{path}/{key}")

    def place(self, stand_in: torch.Tensor, wanted: Any = None) -> torch.Tensor:
        """Return an empty tensor, which `read` will fill with the values of the tensor that was saved.

        Args:
            stand_in: the placeholder of the tensor in the file. Any other tensor is returned unchanged.
            wanted: if this is a sharded tensor of the same shape, the new tensor is sharded in the same way. If not,
                the new tensor is not sharded, and is on the CPU.
        """
        path = self._path_of.get(id(stand_in))
        if path is None:
            return stand_in
        fits = is_sharded(wanted) and wanted.shape == stand_in.shape
        like, device = (wanted, None) if fits else (stand_in, "cpu")
        empty = torch.empty_like(like, dtype=stand_in.dtype, device=device).detach()
        self.tensors[path] = empty
        return empty

    def read(self, folder: Path) -> None:
        """Fill the tensors that `place` has returned. A rank reads its own tensors, and does not wait for other ranks.

        Raises:
            OSError, ValueError: the folder does not exist, is damaged, or has an index that could run code.
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
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # torch warns because of ``no_dist``
                checkpoint.load(self.tensors, storage_reader=Reader(folder), no_dist=True)
        except checkpoint.CheckpointException as error:
            cause, *_ = error.failures.values()
            raise ValueError(f"the tensors in {folder} cannot be read: {cause[0]}") from cause[0]


def write_shards(shards: Shards, folder: Path, group: dist.ProcessGroup | None = None) -> Exception | None:
    """Write the shards of this rank into ``folder``. All ranks call this function.

    Args:
        shards: the tensors.
        folder: a folder that all ranks can reach.
        group: the process group for the collectives; None for the default group.

    Returns:
        The failure of one or more ranks, the same on all ranks; None if all ranks have written their shards. The
        failure is returned and not raised, because an exception in a block closes the process group. The group can stay
        open, because after such a failure no rank waits in a collective.

    Raises:
        Exception: this rank has failed, but the others do not know it, and may wait in a collective.
    """
    from torch.distributed import checkpoint

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    writer = checkpoint.FileSystemWriter(folder)
    if shards.are_copies:
        # The tensors are on the CPU already. With 0, torch needs no CUDA stream. By default it would use a stream of
        # the first GPU in a thread in the background, but this rank may use another GPU.
        writer.per_thread_copy_ahead = 0
    try:
        checkpoint.save(shards.tensors, storage_writer=writer, process_group=group)
    except checkpoint.CheckpointException as error:
        failures = dict[int, Exception]()
        for failed, (failure, frames) in error.failures.items():
            if not isinstance(failure, Exception):  # an interrupt, such as Ctrl-C
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
    """An unpickler for the index of a folder with shards. It refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PATHS:
            return PurePath
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which could run code")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder for the shards of the checkpoint ``path``, and lock it during the block.

    The lock keeps `remove_folders` in another process from removing the folder.
    """
    folder = folder_of_all(path) / secrets.token_hex(4)
    folder.mkdir(parents=True)
    with open(folder / LOCK, "wb") as lock:
        with contextlib.suppress(OSError):  # the file system has no locks, so `remove_folders` removes nothing
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                # Closing the file is not enough, because a process that was forked meanwhile would keep the lock.
                fcntl.flock(lock, fcntl.LOCK_UN)


def remove_folders(path: Path, kept: set[Path]) -> None:
    """Remove the folders with shards of the checkpoint ``path``, except those in ``kept`` and those being written."""
    for folder in folder_of_all(path).iterdir():
        if folder not in kept:
            # Mode "ab" creates the lock file if the process that made the folder was killed before it made this file.
            with contextlib.suppress(OSError), open(folder / LOCK, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def folder_of_all(path: Path) -> Path:
    """Return the folder for the shards of all checkpoints at ``path``: ``last.pt.shards`` for ``last.pt``.

    Whenever a sharded checkpoint is saved at ``path``, `new_folder` makes a folder for its shards inside this one.
    """
    return path.with_name(f"{path.name}.shards")


def sync_directory(path: Path) -> None:
    """Flush the directory ``path`` to the disk, so that new names in it survive a crash of the machine."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _reduce_frame(frame: traceback.FrameSummary) -> tuple[Any, ...]:
    """Return how a frame of a traceback is pickled: as by default, but without its code object."""
    rebuild, args, (_, slots), *_ = cast("Any", frame.__reduce_ex__(2))
    return rebuild, args, (None, {**slots, "_code": None})


# Torch sends the traceback of a rank that cannot write to the other ranks. Since Python 3.14 a frame of a traceback has
# a code object, which cannot be pickled. So torch before 2.13 raises an error about pickling instead of the real one.
if hasattr(traceback.FrameSummary, "_code"):
    copyreg.pickle(traceback.FrameSummary, _reduce_frame)
