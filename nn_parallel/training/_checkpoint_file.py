"""The file of a checkpoint. A process that is killed while it saves never leaves a damaged checkpoint.

A process that overwrites the old checkpoint, and is killed meanwhile, leaves half of a file. So a new checkpoint is
written into a second file, ``.last.pt.new`` beside ``last.pt``, and flushed to the disk. Then `os.replace` puts the
second file in the place of ``last.pt``, in one step. Therefore the path always holds a complete checkpoint, the old or
the new one.

Two processes may save to the same path. Each process locks the second file while writing, so that the two processes do
not write into one file at the same time. A killed process leaves its second file behind, without a lock. The next
process that saves empties this file and uses it.

A checkpoint holds only data that `torch.load` reads with ``weights_only=True``, because reading a checkpoint must not
execute code. `dump` checks this when it saves, and names the value that could not be loaded.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import fcntl
import io
import itertools
import os
import pickle
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from .._engine.failures import summary
from ._shards import sync_directory

FileIdentity = tuple[int, int, int]  # inode, size, and time of the last change


def replace_file(path: Path, write: Callable[[IO[bytes]], object], keep: int) -> None:
    """Put a new file in the place of the file at ``path``.

    Args:
        path: the checkpoint. Its folder must exist.
        write: a function that is called with the open new file, and writes the content into the file.
        keep: the number of checkpoints that are kept, including the new one.

    Raises:
        OSError: the file cannot be written; the old file is still at ``path``.
    """
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, "The folder for a checkpoint does not exist, create it", str(path.parent))
    if path.exists() and not path.is_file():
        raise OSError(f"{path} exists and is not a regular file: choose another path for the checkpoint.")
    new = path.with_name(f".{path.name}.new")
    with _locked(new) as file:
        try:
            with contextlib.suppress(OSError):  # there is no old file, or the file system has no modes
                # Until the new file is complete, its owner may write it, even if the old file is read-only. Otherwise,
                # if this process is killed, the next one could not open the new file for writing.
                new.chmod(path.stat().st_mode | stat.S_IWUSR)
            write(file)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                shutil.copymode(path, new)
            _rotate(path, keep)
            os.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
    sync_directory(path.parent)


def dump(states: dict[str, Any], file: IO[bytes]) -> None:
    """Write ``states`` into ``file``, and check that they can be loaded again.

    Raises:
        ValueError: a state holds an object that is not plain data.
        OSError: the file cannot be written.
    """
    try:
        with _read_on_the_cpu():
            torch.save(states, file)
        file.flush()
        if isinstance(file, io.BytesIO):
            file.seek(0)
            torch.load(file, map_location="cpu", weights_only=True)
        else:
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
    except (TypeError, AttributeError, pickle.PickleError) as error:
        raise _unloadable(states, error) from error
    except RuntimeError as error:  # if a write fails, torch closes its archive, and closing raises this second error
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


@contextlib.contextmanager
def _read_on_the_cpu() -> Iterator[None]:
    """Make `torch.save` record the CPU as the device of tensors that are on accelerators.

    Otherwise `torch.load` would need an accelerator, but the machine that loads the checkpoint may have none.
    """
    token = _reads_on_the_cpu.set(True)
    try:
        yield
    finally:
        _reads_on_the_cpu.reset(token)


def _location(storage: Any) -> str | None:
    """Return the device that `torch.save` records for ``storage``, or None to let torch's own functions choose."""
    return "cpu" if _reads_on_the_cpu.get() and storage.device.type not in ("cpu", "meta") else None


# While this is True, `_location` makes `torch.save` record the CPU as the device of tensors that are on accelerators.
# `_read_on_the_cpu` sets it for the time of its block.
_reads_on_the_cpu = contextvars.ContextVar("_reads_on_the_cpu", default=False)
# `torch.save` asks functions that are registered like this one for the device of a storage, in the order of their
# priorities. Torch's own functions have priorities from 10 on, so the priority 7 puts `_location` before them.
torch.serialization.register_package(7, _location, lambda storage, location: None)


def dumped(states: dict[str, Any]) -> IO[bytes]:
    """Return a file in memory with the content that `dump` writes for ``states``."""
    file = io.BytesIO()
    dump(states, file)
    file.seek(0)
    return file


def read_checkpoint(path: Path) -> tuple[dict[str, Any], FileIdentity]:
    """Return the checkpoint at ``path``, and the identity of the file.

    The tensors are mapped from the file, so their values are read from the disk when they are used.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, is not a checkpoint, or holds objects that are not plain data.
    """
    while True:
        with open(path, "rb") as file:
            identity = _identity(file.fileno())
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # for a damaged file, torch, pickle and zipfile raise many types of errors
            raise ValueError(_why_unreadable(path, error)) from None
        if identity == _identity(path):  # if not, another process has replaced the file: read it again
            break
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds a {type(saved).__name__}, but a checkpoint is a dict.")
    return saved, identity


def _identity(file: Path | int) -> FileIdentity:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _why_unreadable(path: Path, error: Exception) -> str:
    with contextlib.suppress(Exception):  # the look-up raises if torch did not write this file
        if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return (
                f"{path} holds objects that could run code when they are loaded: {', '.join(kinds)}. Save the data "
                "that they consist of, or, if you trust the file, allow them by torch.serialization.add_safe_globals."
            )
    return f"{path} is damaged or is not a checkpoint ({summary(error)})."


def _rotate(path: Path, keep: int) -> None:
    """Rename each older checkpoint, ``last.1.pt`` to ``last.2.pt`` and so on, and copy ``last.pt`` to ``last.1.pt``.

    The file at ``path`` also stays there, so that the path is never without a checkpoint.
    """
    before = [path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, keep)]
    for newer, older in reversed(list(itertools.pairwise(before))):
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)
    if before and path.exists():
        new = path.with_name(f".{before[0].name}.new")
        new.unlink(missing_ok=True)
        try:
            os.link(path, new)
        except OSError:  # the file system has no hard links
            shutil.copyfile(path, new)
        os.replace(new, before[0])


@contextlib.contextmanager
def _locked(new: Path) -> Iterator[IO[bytes]]:
    """Open the file at ``new`` for the block, and lock it, so that no other process writes it during the block.

    If another process is writing the file, this function first waits for that process. The block begins with an empty
    file, even if a killed process has left a file at ``new``.
    """
    while True:
        with open(new, "ab") as file:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, new):  # if not, another process has just renamed this file to the checkpoint
                file.truncate(0)
                yield file
                return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unloadable(states: dict[str, Any], error: Exception) -> ValueError:
    """Return an error that names the part of ``states`` that cannot be loaded again, and the path of this part."""
    for name, state in states.items():
        if not _is_loadable(state):
            path, part = _unloadable_part(name, state)
            remedy = "Save the data that it consists of."
            if hasattr(part, "state_dict"):
                remedy = f"Save it under a name of its own, or its state_dict() as {path}."
            return ValueError(
                f"{path} is a {type(part).__qualname__}: a checkpoint holds numbers, strings, tensors, and lists, "
                f"tuples and dicts of them, because loading anything else could execute code. {remedy}"
            )
    return ValueError(str(error))


def _unloadable_part(path: str, value: Any) -> tuple[str, Any]:
    """Return the innermost part of ``value`` that cannot be loaded again, and its path."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    for path_of_part, part in parts:
        if not _is_loadable(part):
            return _unloadable_part(path_of_part, part)
    return path, value


def _is_loadable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return False
    return True
