"""The attributes and the environment that a worker takes over from the script.

A worker should behave as if the script had just forked it. But it is forked by the fork server, which has started
earlier, or started by Ray on another machine. So two kinds of state are sent to it:

- `ProcessAttributes`, such as limits and the umask. A worker on the same machine gets them when it starts.
- `ProcessEnvironment`: environment variables, working directory and import path. The script often changes them later,
  so they are sent again with the next call after a change.
"""

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
    """The attributes of a process that a child inherits.

    A worker cannot inherit them from the fork server, because the server has the attributes that the script had when
    the server started.
    """

    blocked_signals: frozenset[int]
    umask: int
    niceness: int
    affinity: frozenset[int]  # the numbers of the CPU cores on which the process may run
    limits: dict[int, tuple[int, int]]  # maps each ``RLIMIT_*`` constant to its soft and its hard limit
    groups: tuple[int, ...]  # the ids of the supplementary groups of the user
    group_ids: tuple[int, int, int]  # the real, the effective and the saved id
    user_ids: tuple[int, int, int]  # the real, the effective and the saved id

    @classmethod
    def of_this_process(cls) -> ProcessAttributes:
        """Return the attributes of this process, and of the calling thread if an attribute belongs to a thread."""
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
        """Give these attributes to this process.

        Most attributes are set only if they differ, because setting them may need privileges.

        Raises:
            OSError, ValueError: this process lacks the privileges to set one of the attributes.
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
        if self.user_ids != now.user_ids:  # last, because the other settings may need the present user's privileges
            os.setresuid(*self.user_ids)


class ProcessEnvironment:
    """The environment variables, working directory, import path and resource tracker of the script.

    When a worker unpickles this object, the worker takes over the variables that have changed since the object was
    made, and the present directory, import path and resource tracker.
    """

    def __init__(self, is_elsewhere: bool = False) -> None:
        """Record the present environment. The workers have it already, so it need not be sent.

        Args:
            is_elsewhere: whether the workers are on other machines. If so, the workers keep the folders of their own
                Python installation in the import path, and do not use the resource tracker of this machine.
        """
        self._is_elsewhere = is_elsewhere
        self._environ = _environ().copy()
        self._directory = working_directory()
        self._path = list(sys.path)
        # The descriptor of the pipe to the resource tracker of `multiprocessing`, or None if no tracker was started.
        self._tracker: int | None = None
        # Maps each variable that has changed since this object was made to its value, or to None if it was deleted.
        self._changes: dict[bytes, bytes | None] = {}

    def changed(self) -> bool:
        """Record the present environment, and return whether it has changed since it was last recorded."""
        directory = working_directory()
        tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # `getfd` would start a tracker
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
        """Reduce this object to a call of `adopt`. When a worker unpickles the object, the call changes the worker."""
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
        environ: the variables that have changed in the script; None stands for a deleted variable.
        directory: the working directory.
        path: the import path.
        tracker: the process id of the script, and the number of the descriptor through which the script writes to its
            resource tracker of `multiprocessing`. This process must use the same tracker, because a tracker of its own
            would remove the script's shared memory when this process ends. None if the script has no tracker, or is on
            another machine.
        is_elsewhere: whether the script is on another machine. If so, the folders that are already in this process's
            import path stay there, after the folders in ``path``.
    """
    for name, value in environ.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
    time.tzset()
    with contextlib.suppress(OSError):  # the directory was removed, or does not exist on this machine
        os.chdir(directory)
    if tracker is not None:
        with contextlib.suppress(OSError):  # the script has ended, or runs under another user
            fd = os.open("/proc/{}/fd/{}".format(*tracker), os.O_WRONLY | os.O_CLOEXEC)
            resource_tracker._resource_tracker._fd = fd  # type: ignore[attr-defined]  # `multiprocessing` sets this too
    sys.path[:] = [*path, *(folder for folder in sys.path if is_elsewhere and folder not in path)]


def user_sys_path() -> list[str]:
    """Return the import path without the folders of the Python installation, which other machines have elsewhere."""
    return [folder for folder in sys.path if not f"{folder}{os.sep}".startswith(INSTALLED)]


def is_installed(module: str | None) -> bool:
    """Return whether a loaded module belongs to Python or to an installed package, and not to the user."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return str(file).startswith(INSTALLED) if file else module in sys.stdlib_module_names


def _environ() -> dict[bytes, bytes]:
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # a public copy takes 20 times as long
    return data


def _umask() -> int:
    """Return the umask. It is read from ``/proc``, because `os.umask` changes it for all threads for a moment."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def working_directory() -> str:
    """Return the working directory, or an empty string if the directory was removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


def _installation() -> Iterator[str]:
    """Yield the folders with Python's own modules and those with packages that pip or the system has installed."""
    for kind in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield sysconfig.get_path(kind)
    for path in sys.path:
        if os.path.basename(path) in ("site-packages", "dist-packages"):
            yield path


_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
# A file whose path has one of these prefixes belongs to Python or to an installed package.
INSTALLED = tuple(f"{path}{os.sep}" for path in dict.fromkeys(_installation()))
