"""The file of a checkpoint: its path has the old one or the new one, whole, whatever ends the process.

Reading it executes no code.
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

FileIdentity = tuple[int, int, int]


def replace_file(path: Path, write: Callable[[IO[bytes]], object], keep: int) -> None:
    """Put a new file, with what ``write`` writes, in the place of the one at ``path``; keep ``keep`` with those before.

    Raises:
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder to save a checkpoint in", str(path.parent))
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is there, and is no file.")
    new = path.with_name(f".{path.name}.new")
    with _locked(new) as file:
        try:
            with contextlib.suppress(OSError):  # there is none to replace, or a file system without modes
                new.chmod(path.stat().st_mode | stat.S_IWUSR)  # so that it can be taken over, if this process is killed
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
    """Write ``states`` into ``file``, and see that they can be read again.

    Raises:
        ValueError: one of them holds more than data.
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
    except RuntimeError as error:  # torch raises again as it closes its archive, and hides why
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


@contextlib.contextmanager
def _read_on_the_cpu() -> Iterator[None]:
    """Have `torch.save` note for tensors on accelerators that they are read on the CPU, as each machine has one."""
    token = _reads_on_the_cpu.set(True)
    try:
        yield
    finally:
        _reads_on_the_cpu.reset(token)


def _location(storage: Any) -> str | None:
    return "cpu" if _reads_on_the_cpu.get() and storage.device.type not in ("cpu", "meta") else None


# Torch asks in the order of these numbers, no two of which may be equal; its own begin with 10. None leaves it to them.
_reads_on_the_cpu = contextvars.ContextVar("_reads_on_the_cpu", default=False)
torch.serialization.register_package(7, _location, lambda storage, location: None)


def dumped(states: dict[str, Any]) -> IO[bytes]:
    """Return ``states`` as such a file, in memory."""
    file = io.BytesIO()
    dump(states, file)
    file.seek(0)
    return file


def read_checkpoint(path: Path) -> tuple[dict[str, Any], FileIdentity]:
    """Return what is saved at ``path``, its tensors still on the disk, and the identity of the file."""
    while True:
        with open(path, "rb") as file:
            identity = _identity(file.fileno())
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # torch, pickle, zip and seek have many words for it
            raise ValueError(_why_unreadable(path, error)) from None
        if identity == _identity(path):  # else another one has been put there meanwhile
            break
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds a {type(saved).__name__}, and a checkpoint is a dict.")
    return saved, identity


def _identity(file: Path | int) -> FileIdentity:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _why_unreadable(path: Path, error: Exception) -> str:
    with contextlib.suppress(Exception):  # no file of torch's
        if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return (
                f"{path} holds more than data, which could run code: {', '.join(kinds)}. Save what these are made of, "
                "or, if you trust the file, allow them by torch.serialization.add_safe_globals."
            )
    return f"{path} is damaged or no checkpoint ({summary(error)})."


def _rotate(path: Path, keep: int) -> None:
    """Put what is at ``path`` aside, where it stays too until it is replaced."""
    before = [path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, keep)]
    for newer, older in reversed(list(itertools.pairwise(before))):
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)
    if before and path.exists():
        new = path.with_name(f".{before[0].name}.new")
        new.unlink(missing_ok=True)
        try:
            os.link(path, new)
        except OSError:  # a file system without links
            shutil.copyfile(path, new)
        os.replace(new, before[0])


@contextlib.contextmanager
def _locked(new: Path) -> Iterator[IO[bytes]]:
    """Open the file ``new``, empty and locked in the block, once no other process writes it.

    One that a killed process has left is taken over.
    """
    while True:
        with open(new, "ab") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, new):  # else another process has just put it in place
                file.truncate(0)
                yield file
                return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unloadable(states: dict[str, Any], error: Exception) -> ValueError:
    """Return the error for ``states``, of which something cannot be loaded again, with the path to that part."""
    for name, state in states.items():
        if not _is_loadable(state):
            path, part = _unloadable_part(name, state)
            remedy = "Save what it is made of."
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
