"""`ParallelExecutor` against CPython's own tests of executors, with our error types in the place of its own.

They come with Python's test suite (Debian: ``libpython3-testsuite``); a Python without it skips them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import sys
import sysconfig
import types
from collections import ChainMap
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from nn_parallel import ParallelExecutor, RemoteError, TransferError, WorkerDiedError

pytestmark = [
    pytest.mark.slow,
    # Python 3.12 warns when the manager forks, because other threads run. As an error, the warning would be raised in
    # the parent only, and the child would go on with the tests.
    pytest.mark.filterwarnings("ignore:.* is multi-threaded, use of fork:DeprecationWarning"),
]
NAME = "test_concurrent_futures"
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
FILES = [Path(folder, "test", f"{NAME}.py") for folder in (sysconfig.get_path("stdlib"), f"/usr/lib/{VERSION}")]
PARTS = "util", "executor", "test_wait", "test_as_completed", "test_deadlock", "test_shutdown"


def _modules() -> list[Any]:
    """CPython's modules of tests: one file up to Python 3.11, then a package; none where they are not installed."""
    if sys.version_info >= (3, 12):
        with contextlib.suppress(ImportError):
            return [importlib.import_module(f"test.{NAME}.{part}") for part in PARTS]
        return []
    found = [file for file in FILES if file.exists()]
    if not found:
        return []
    spec = importlib.util.spec_from_file_location(NAME, found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return [module]


def _load() -> Any:
    """All names of these modules, with our errors for CPython's own; None where they are not installed."""
    modules = _modules()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # the workers cannot import it
        module.BrokenProcessPool = WorkerDiedError, TransferError  # a death; a call or result that cannot be rebuilt
        module.PicklingError = TransferError
        module.SystemExit = RemoteError
    return types.SimpleNamespace(**ChainMap(*map(vars, modules))) if modules else None


class Executor(ParallelExecutor):
    """Made as CPython's tests make one."""

    def __init__(self, max_workers: int | None = None, mp_context: object = None) -> None:
        super().__init__(num_workers=max_workers, devices="cpu")


cpython = _load()
if cpython is None:
    pytest.skip("Python's own test suite is not installed", allow_module_level=True)


class Mixin(cpython.ExecutorMixin):
    executor_type = Executor
    ctx = "fork"  # the processes of a manager, which holds the events of the tests

    def get_context(self) -> Any:
        return multiprocessing.get_context(self.ctx)

    def create_event(self) -> Any:
        """Called by the tests since Python 3.14."""
        return self.manager.Event()


class TestExecutor(Mixin, cpython.ExecutorTest, cpython.BaseTestCase):
    def test_max_workers_negative(self) -> None:
        """Our message names our own argument."""
        for number in (0, -1):
            with pytest.raises(ValueError, match=f"num_workers={number} must be at least 1"):
                Executor(number)


for _name in dir(cpython.ExecutorTest):
    if "buffersize" in _name:  # an argument of `map` since Python 3.14, which ours does not have
        setattr(TestExecutor, _name, None)


class TestWait(Mixin, cpython.WaitTests, cpython.BaseTestCase):
    pass


class TestAsCompleted(Mixin, cpython.AsCompletedTests, cpython.BaseTestCase):
    pass


class TestDeadlock(Mixin, cpython.ExecutorDeadlockTest, cpython.BaseTestCase):
    def test_shutdown_deadlock_pickle(self) -> None:
        """As CPython's, without a look into its own executor."""
        self.executor.shutdown(wait=True)
        with Executor(2) as executor:
            executor.submit(id, 42).result()
            future = executor.submit(id, cpython.ErrorAtPickle())
            executor.shutdown(wait=False)
            with pytest.raises(TransferError):
                future.result()


class TestShutdown(Mixin, cpython.ExecutorShutdownTest, cpython.BaseTestCase):
    def setUp(self) -> None:
        """`shutdown` cancels what has not begun: what is to have begun needs workers that are there."""
        super().setUp()
        self.executor.submit(int).result()

    # These start programs that make the standard library's own executors.
    test_interpreter_shutdown = test_submit_after_interpreter_shutdown = test_hang_gh83386 = None
