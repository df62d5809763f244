"""A signal to one process: all ranks stop at the same step, save, and go on there when they are started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nn_parallel import ParallelError, ParallelExecutor, current_world, initialize_ddp, on_rank, stop_requested
from nn_parallel._engine.ranks import stop_signals as preemption
from nn_parallel._engine.ranks.blocks import blocks_of
from nn_parallel._engine.ranks.context import rank_context
from nn_parallel._engine.ranks.store import STOP_KEY
from tests.support.paths import SUPPORT
from tests.support.ranks import AnyRanks, free_port, launched

SCRIPT = SUPPORT / "preempted.py"
STEPS = 60  # a signal comes in one of these
LEAD = 100  # a rank is at most this many steps ahead of another one; in a real loop a collective keeps them together
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def _as_before() -> Iterator[None]:
    """This process listens to signals no more, and has received none."""
    yield
    preemption._stop_listening()
    preemption._received = None


def steps_until_the_stop(asked: list[int], seed: int) -> int:
    """As one of several ranks, each at its own pace: how many steps it makes when ``asked`` get a signal."""
    rank = initialize_ddp().rank
    here = blocks_of(rank_context())
    assert here is not None
    preemption._received = None
    on_rank(0, barrier=True)(here.context.connection.delete)(STOP_KEY)  # of the time before
    here.stop_calls = 0
    here.context.connection.delete(f"stops/{rank}")
    on_rank(0, barrier=True)(int)()
    pace = random.Random(f"{seed} {rank}")
    signal_at = pace.randrange(STEPS)
    for step in range(STEPS + 2 * LEAD):
        if rank in asked and step == signal_at:
            os.kill(os.getpid(), pace.choice(preemption.SIGNALS))
        if stop_requested():
            assert stop_requested()  # and ever after
            return step
        if step % LEAD == LEAD - 1:
            on_rank(0, barrier=True)(int)()
        for _ in range(pace.choice([0, 0, 10, 1000])):
            pass
    raise AssertionError("it never stopped")


@pytest.mark.parametrize("ranks", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4, 8))])
def test_all_ranks_stop_at_the_same_step(ranks: int) -> None:
    """Whichever ranks get a signal, at whichever steps, however far the ranks are apart."""
    with launched(ranks, "env") as world:
        for seed in range(60):
            asked = random.Random(seed).sample(range(ranks), k=1 + seed % ranks)
            stops = world.run(steps_until_the_stop, asked, seed)
            assert len(set(stops)) == 1, (seed, asked, stops)


def test_a_rank_that_is_far_ahead_is_waited_for_by_none() -> None:
    """Rank 0 has made 50 calls, rank 1 one, when rank 1 is asked: both stop at the 51st."""

    def scenario() -> int:
        rank, made = current_world().rank, 0
        while made < (50 if rank == 0 else 1):
            assert not stop_requested()
            made += 1
        on_rank(0, barrier=True)(int)()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not stop_requested()
            made += 1
        on_rank(0, barrier=True)(int)()
        while not stop_requested():
            made += 1
        return made + 1

    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        assert ex.run(scenario) == [51, 51]


def test_a_failure_in_a_block_does_not_lose_the_request() -> None:
    """The ranks have counted differently when a block fails; afterwards they count anew, and agree."""

    def scenario() -> int:
        rank = current_world().rank
        stop_requested()
        with contextlib.suppress(ParallelError):

            @on_rank([0, 1])
            def fails() -> None:
                raise ValueError

            for _ in range(5 * rank):
                stop_requested()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            fails()
        steps = 0
        while not stop_requested():
            steps += 1
        return steps

    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        first, second = ex.run(scenario)
    assert first == second


@pytest.mark.usefixtures("_as_before")
def test_a_signal_to_the_script_stops_the_ranks_of_its_pool() -> None:
    """Also in the next run, in a group made after a failure, and in a pool that is made later."""

    script = os.getpid()

    def asks() -> int:
        count = 0
        while not stop_requested():
            count += 1
            if count == 3 and current_world().rank == 0:
                os.kill(script, signal.SIGUSR1)
            time.sleep(0.001 * (1 + current_world().rank))
        return count

    assert not stop_requested()
    with ParallelExecutor(num_workers=3, devices="cpu") as ex:
        stops = ex.run(asks)
        assert len(set(stops)) == 1
        assert stops[0] >= 3
        with contextlib.suppress(ParallelError):
            ex.run(lambda: 1 / 0)
        assert len(set(ex.run(asks))) == 1
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        assert len(set(ex.run(asks))) == 1
    assert stop_requested()


@pytest.mark.usefixtures("_as_before")
def test_alone_a_signal_stops_this_process() -> None:
    """However many signals come; a handler that the program has set is called as well."""
    noted: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: noted.append(number))
    try:
        assert not stop_requested()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested()
        assert noted == [signal.SIGUSR2]
    finally:
        preemption._stop_listening()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_before")
def test_a_fork_ends_by_a_signal() -> None:
    """Whoever ends a process that this one has forked is not waited for in vain."""
    assert not stop_requested()
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)  # perhaps before it runs a line of Python
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not stop_requested()


@pytest.mark.usefixtures("_as_before")
def test_what_is_for_the_rank_does_not_end_its_forks() -> None:
    """SLURM sends it to every process; but a program that the fork starts is not concerned."""
    assert not stop_requested()
    child = "import signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
        os.write(writing, subprocess.check_output([sys.executable, "-c", child]))
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert os.read(reading, 10) == b"True\n"
    for end in (reading, writing):
        os.close(end)


@pytest.mark.usefixtures("_as_before")
def test_a_fork_blocks_no_other_signals_than_before() -> None:
    """Signals that the program has blocked stay blocked, in the rank and in the fork."""
    assert not stop_requested()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGHUP])
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        pid = os.fork()
        if pid == 0:
            os._exit(3 if signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("_as_before")
def test_the_first_call_is_in_the_main_thread() -> None:
    """Elsewhere Python takes no signals, and the error says so."""
    raised: list[Exception] = []

    def call() -> None:
        try:
            stop_requested()
        except ParallelError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(raised)


def test_on_one_rank_only_it_is_an_error(any_ranks: AnyRanks) -> None:
    """Inside the body of a function of rank 0 the others are not there."""

    def scenario() -> str:
        try:
            on_rank(0)(stop_requested)()
        except ParallelError as error:
            return str(error)
        finally:
            preemption._stop_listening()
        return ""

    for told in any_ranks.run(scenario):
        assert "stop_requested() is a call of all ranks, inside the body of a function of rank 0" in told


def parameters(folder: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(folder / "last.pt")
    assert saved["step"] == 24
    return saved["model"] | saved["optimizer"]["state"]


@pytest.mark.slow
def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    """Rank 1 of 3 gets a signal in its 13th step; the parameters become those of the run that got none."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, options in ((whole, []), (cut, ["1:13"])):
        folder.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=1"]
        command = [*torchrun, f"--master-port={free_port()}", str(SCRIPT), str(folder), "0", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | ONE_THREAD)
        assert done.returncode == 0, done.stderr
    stopped = [(cut / f"{rank}.stopped").read_text() for rank in range(3)]
    assert len(set(stopped)) == 1
    assert int(stopped[0]) >= 13
    torch.testing.assert_close(parameters(cut), parameters(whole), rtol=0, atol=0)


@pytest.mark.slow
def test_torchrun_is_ended_itself(tmp_path: Path) -> None:
    """It hands SIGTERM on, and waits until all ranks have saved at the same step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}"]
    command = [*torchrun, str(SCRIPT), str(tmp_path), "0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD) as process:
        while len(list(tmp_path.glob("*.step"))) < 3:  # a rank that has not asked yet would end by the signal
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.terminate()
        process.communicate(timeout=60)
    stopped = [(tmp_path / f"{rank}.stopped").read_text() for rank in range(3)]
    assert len(set(stopped)) == 1
    assert str(torch.load(tmp_path / "last.pt")["step"]) == stopped[0]
