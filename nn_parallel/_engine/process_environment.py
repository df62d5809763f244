"""A worker has what a fork of the script would: the attributes of its process, and the environment as it changes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple


class ProcessAttributes(NamedTuple):
    """The attributes of a process that a child inherits, and that a fork server has as they were when it began."""

    blocked_signals: frozenset[int]
    umask: int
    niceness: int
    affinity: frozenset[int]
    limits: dict[int, tuple[int, int]]
    groups: tuple[int, ...]
    group_ids: tuple[int, int, int]  # real, effective, saved
    user_ids: tuple[int, int, int]

    @classmethod
    def of_this_process(cls) -> ProcessAttributes:
        """Return those of the calling thread."""
        return cls(
            frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
            _umask(),
            os.getpriority(os.PRIO_PROCESS, 0),
            frozenset(os.sched_getaffinity(0)),
            {kind: resource.getrlimit(kind) for kind in _LIMITS},
            tuple(os.getgroups()),
            os.getresgid(),
            os.getresuid(),
        )

    def adopt(self) -> None:
        """Give them to this process. What it has already is not set, as that may need privileges.

        Raises:
            OSError, ValueError: this process may not have them.
        """
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)
        now = self.of_this_process()
        os.umask(self.umask)
        if self.niceness != now.niceness:
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        if self.affinity != now.affinity:
            os.sched_setaffinity(0, self.affinity)
        for kind, limit in self.limits.items():
            if limit != now.limits[kind]:
                resource.setrlimit(kind, limit)
        if self.groups != now.groups:
            os.setgroups(self.groups)
        if self.group_ids != now.group_ids:
            os.setresgid(*self.group_ids)
        if self.user_ids != now.user_ids:  # last: it may be what allows the rest
            os.setresuid(*self.user_ids)


class ProcessEnvironment:
    """The environment, working directory, import path and resource tracker of this process."""

    def __init__(self, is_elsewhere: bool = False) -> None:
        """``is_elsewhere``: the workers are on other machines, which have import paths of their own."""
        self._is_elsewhere = is_elsewhere
        self._environ = _environ().copy()
        self._directory = working_directory()
        self._path = list(sys.path)
        self._tracker: int | None = None  # a descriptor of this process
        self._changes: dict[bytes, bytes | None] = {}  # since this was made

    def changed(self) -> bool:
        """Return whether they are other than the last time."""
        directory = working_directory()
        tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # `getfd` would start one
        is_same = _environ() == self._environ and directory == self._directory and sys.path == self._path
        if is_same and tracker == self._tracker:
            return False
        environ = _environ().copy()
        for name in environ.keys() | self._environ.keys():
            if environ.get(name) != self._environ.get(name):
                self._changes[name] = environ.get(name)
        self._environ = environ
        self._directory = directory
        self._path = list(sys.path)
        self._tracker = tracker
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        path = user_sys_path() if self._is_elsewhere else self._path
        tracker = None if self._is_elsewhere or self._tracker is None else (os.getpid(), self._tracker)
        return adopt, (self._changes, self._directory, path, tracker, self._is_elsewhere)


def adopt(
    environ: dict[bytes, bytes | None],
    directory: str,
    path: list[str],
    tracker: tuple[int, int] | None = None,
    is_elsewhere: bool = False,
) -> None:
    """Apply the environment of the script to this process.

    Args:
        environ: the variables that have changed in the script; None: one that is gone.
        directory: the working directory.
        path: the import path.
        tracker: the script's process and its descriptor of the tracker of `multiprocessing`. A tracker of the worker's
            own would remove the script's shared memory when the worker ends.
        is_elsewhere: the script is on another machine, so the rest of the import path stays that of this one.
    """
    for name, value in environ.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
    time.tzset()
    with contextlib.suppress(OSError):  # it was removed
        os.chdir(directory)
    if tracker is not None:
        with contextlib.suppress(OSError):  # not on this machine, or another user's
            fd = os.open("/proc/{}/fd/{}".format(*tracker), os.O_WRONLY | os.O_CLOEXEC)
            resource_tracker._resource_tracker._fd = fd  # type: ignore[attr-defined]  # as `multiprocessing` does
    sys.path[:] = [*path, *(each for each in sys.path if is_elsewhere and each not in path)]


def user_sys_path() -> list[str]:
    """Return the import path without what is installed with Python, which another machine may have elsewhere."""
    return [each for each in sys.path if not f"{each}{os.sep}".startswith(INSTALLED)]


def is_installed(module: str | None) -> bool:
    """Return whether a loaded module is part of Python or of an installed package, and not the user's own."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return str(file).startswith(INSTALLED) if file else module in sys.stdlib_module_names


def _environ() -> dict[bytes, bytes]:
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # a copy takes twenty times as long
    return data


def _umask() -> int:
    """Return the umask as the kernel tells it: `os.umask` would change that of all threads for a moment."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def working_directory() -> str:
    """Return the working directory; an empty text if it was removed."""
    with contextlib.suppress(OSError):  # it was removed
        return os.getcwd()
    return ""


def _installation() -> Iterator[str]:
    """Yield the folders of Python's own modules and of packages, those of the user and of the system too."""
    for kind in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield sysconfig.get_path(kind)
    for path in sys.path:
        if os.path.basename(path) in ("site-packages", "dist-packages"):
            yield path


_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
INSTALLED = tuple(f"{path}{os.sep}" for path in dict.fromkeys(_installation()))
