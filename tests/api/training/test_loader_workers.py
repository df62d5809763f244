"""Workers of a prepared loader outlive what SLURM sends to every process, and end when their rank wants them to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nn_parallel import prepare_dataloader
from nn_parallel._engine.descendants import children_of
from nn_parallel._engine.ranks.stop_signals import SIGNALS
from tests.support.paths import ROOT

ENDS_WITHIN_S = 20.0


class Pids(Dataset[int]):
    """The number of the worker that reads a sample; it may hang at the sixth."""

    def __init__(self, hangs: bool = False) -> None:
        self._hangs = hangs

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if self._hangs and index > 4:
            time.sleep(600)
        return os.getpid()


def loader_of(dataset: Any, **options: Any) -> Any:
    return prepare_dataloader(DataLoader(dataset, num_workers=1, multiprocessing_context="fork", **options))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_outlive_what_is_for_the_rank(persistent: bool) -> None:
    """All three signals, however often; and the loader goes on."""
    loader = loader_of(Pids(), prefetch_factor=1, persistent_workers=persistent)
    batches = iter(loader)
    pid = next(batches).item()
    for _ in range(5):
        for number in SIGNALS:
            os.kill(pid, number)
    assert {x.item() for x in batches} == {pid}
    if persistent:
        loader._iterator._shutdown_workers()


def test_a_handler_of_the_users_own_stays() -> None:
    """It is inherited by the workers, as always, but for SIGTERM, which torch takes for itself."""
    noted: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: noted.append(number))

    class Noted(Pids):
        def __getitem__(self, index: int) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return len(noted)

    try:
        assert [x.item() for x in loader_of(Noted())][:3] == [1, 2, 3]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_initializer_of_the_user_is_called_in_each_worker() -> None:
    """After the signals are set; what it raises is raised here, as by torch."""
    seen: list[Any] = []

    def initialize(worker: int) -> None:
        info: Any = get_worker_info()
        seen.append((worker, info.id, signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))

    class Seen(Pids):
        def __getitem__(self, index: int) -> Any:
            return str(seen)

    assert next(iter(loader_of(Seen(), worker_init_fn=initialize, batch_size=None))) == "[(0, 0, True)]"

    def fail(worker: int) -> None:
        raise LookupError("no such disk")

    batches = iter(loader_of(Pids(), worker_init_fn=fail))
    with pytest.raises(LookupError, match="no such disk"):
        next(batches)
    batches._batches._shutdown_workers()
    del batches
    gc.collect()  # the traceback of torch's exception holds itself, and with it the iterator


@pytest.mark.parametrize("hangs", [False, True])
def test_terminate_ends_a_worker(hangs: bool) -> None:
    """At once, and with the exit code that torch expects, though SIGTERM of others does not."""
    batches = iter(loader_of(Pids(hangs), prefetch_factor=8))
    next(batches)
    (worker,) = batches._batches._workers
    worker._popen.terminate()  # as `multiprocessing` does it when the rank ends
    worker.join(ENDS_WITHIN_S)
    assert worker.exitcode == 0


@pytest.mark.slow
def test_a_worker_that_runs_no_handler_is_killed() -> None:
    """One that is stuck in C, or stopped: torch joins it for 5 s, and terminates it, to which it cannot listen."""
    batches = iter(loader_of(Pids(), prefetch_factor=1))
    next(batches)
    (worker,) = batches._batches._workers
    os.kill(worker.pid, signal.SIGSTOP)
    batches._batches._shutdown_workers()
    worker.join(ENDS_WITHIN_S)
    assert worker.exitcode == -signal.SIGKILL


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.api.training.test_loader_workers import Pids, loader_of

loader = loader_of(Pids(bool(sys.argv[2])), prefetch_factor=8, persistent_workers=bool(sys.argv[3]))
batches = iter(loader)
print(next(batches).item(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["", "yes"])
@pytest.mark.parametrize("persistent", ["", "yes"])
def test_a_script_that_ends_leaves_no_worker(hangs: str, persistent: str) -> None:
    """Without a word, though its loader is in the middle of an epoch, or keeps its workers."""
    command = [sys.executable, "-c", SCRIPT, str(ROOT), hangs, persistent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_an_epoch_that_ends_leaves_no_worker() -> None:
    """Nor does one that is left."""
    before = children_of(os.getpid())
    list(loader_of(Pids()))
    batches = iter(loader_of(Pids()))
    next(batches)
    del batches
    assert children_of(os.getpid()) == before
