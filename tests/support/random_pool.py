"""Random programs that use a pool: calls of every kind, deaths, stops, Ctrl-C, callbacks, resizes, shutdowns.

``python -m tests.support.random_pool SEED SECONDS`` runs one program after another, each in a process of its own, and
prints the seeds of those that end wrongly. ``python -m tests.support.random_pool SEED`` runs one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, CancelledError, Future, wait
from typing import Any

from nn_parallel import ParallelError, ParallelExecutor, RankError, WorkerDiedError, current_world
from nn_parallel._engine.descendants import children_of

STEPS = 60
STEP_WITHIN_S = 60.0  # a machine that does much else
TIMEOUT_S = 8.0  # of the pool: what is stopped for longer is killed
DISTURBED = (
    ParallelError,
    CancelledError,
)  # what a call may end with if it is disturbed; `RankError` is a ParallelError


def _identity(x: Any) -> Any:
    return x


def _sleep(x: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return x


def _fail(x: Any) -> Any:
    raise ValueError(x)


def _fail_on_rank_0() -> int:
    if current_world().rank == 0:
        raise ValueError
    time.sleep(0.2)
    return 1


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.choice([1, 2, 3, 4])
        self.executor = ParallelExecutor(num_workers=self.size, devices="cpu", timeout=TIMEOUT_S)
        self.is_disturbed = False  # something has been killed, stopped or interrupted, so that a call may fail
        self.futures: list[tuple[Future[Any], Any]] = []
        self.stopped: list[int] = []

    def run(self) -> None:
        """Do random steps; then see that the pool is whole, and shut it down in a random way."""
        with contextlib.suppress(KeyboardInterrupt):
            self.step_until_over()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for pid in self.stopped:
            _signal(pid, signal.SIGCONT)
        self.see_that_it_is_whole()
        end = self.rng.choice(["wait", "cancel", "exception", "none"])
        for _ in range(self.rng.randrange(4)):
            self.executor.submit(_sleep, 1, 0.05)
        if end == "exception":
            with contextlib.suppress(ZeroDivisionError), self.executor:
                raise ZeroDivisionError
        elif end != "none":
            self.executor.shutdown(cancel_futures=end == "cancel")

    def step_until_over(self) -> None:
        """Do each step, whatever Ctrl-C interrupts."""
        steps: list[Callable[[], None]] = [
            self.submit,
            self.submit,
            self.map,
            self.map,
            self.call_on_all,
            self.fail_on_all,
            self.resize,
            self.cancel,
            self.kill,
            self.stop,
            self.interrupt_later,
            self.add_callback,
            self.take,
            self.wait,
            self.put,
        ]
        for _ in range(STEPS):
            faulthandler.dump_traceback_later(STEP_WITHIN_S, exit=True)
            try:
                self.rng.choice(steps)()
            except KeyboardInterrupt:
                self.is_disturbed = True
            except DISTURBED:
                if not self.is_disturbed:
                    raise
            except RuntimeError as error:  # Ctrl-C in `threading.Condition.wait`
                if not isinstance(error.__context__, KeyboardInterrupt):
                    raise
                self.is_disturbed = True

    def see_that_it_is_whole(self) -> None:
        """Raise if calls do not give what they should, at most some calls after the last death."""
        deadline = time.monotonic() + STEP_WITHIN_S
        faulthandler.dump_traceback_later(2 * STEP_WITHIN_S, exit=True)
        while True:
            try:
                ranks = self.executor.run(lambda: current_world().rank)
                assert ranks == list(range(len(ranks))), ranks
                assert self.executor.submit(_identity, 5).result() == 5
                assert list(self.executor.map(_identity, range(50))) == list(range(50))
            except DISTURBED:
                assert time.monotonic() < deadline
            else:
                break
        for future, expected in self.futures:
            with contextlib.suppress(*DISTURBED):
                assert future.result(STEP_WITHIN_S) == expected

    def submit(self) -> None:
        """A call whose result is taken later, or one that fails."""
        value = self.rng.random()
        if self.rng.random() < 0.2:
            future = self.executor.submit(_fail, value)
            with contextlib.suppress(ValueError):
                future.result()
        else:
            self.futures.append((self.executor.submit(_sleep, value, self.rng.choice([0, 0, 0.01, 0.3])), value))

    def map(self) -> None:
        """Items that are small, or some of them long, or failing; all are taken, or some."""
        count = self.rng.choice([1, 10, 300, 2000])
        long = self.rng.choice([0.0, 0.0, 0.03])
        chunksize = self.rng.choice([None, None, 1, 7])
        every = self.rng.choice([3, 50, 1000])

        def item(x: int) -> int:
            if long and x % every == 0 and x < 10 * every:
                time.sleep(long)
            return -x

        results = self.executor.map(item, range(count), chunksize=chunksize)
        for expected in range(self.rng.choice([count, count, count // 2])):
            assert next(results) == -expected

    def call_on_all(self) -> None:
        """A run on all workers."""
        results = self.executor.run(lambda x: (current_world().rank, x), 3)
        assert results == [(rank, 3) for rank in range(len(results))]

    def fail_on_all(self) -> None:
        """A run that fails on one rank."""
        try:
            self.executor.run(_fail_on_rank_0)
        except RankError as error:
            assert self.is_disturbed or isinstance(error.failures[0], ValueError)

    def resize(self) -> None:
        """Another number of workers."""
        self.executor.resize(self.rng.choice([1, 2, 3, 4]))

    def cancel(self) -> None:
        """Cancel what has not begun."""
        self.futures = [each for each in self.futures if not each[0].cancel()]

    def kill(self) -> None:
        """Kill a worker, from inside or outside."""
        self.is_disturbed = True
        if self.rng.random() < 0.5:
            with contextlib.suppress(WorkerDiedError):
                self.executor.submit(os._exit, 3).result()
        else:
            _signal(self.pid(), signal.SIGKILL)

    def stop(self) -> None:
        """Stop a worker for some time."""
        self.is_disturbed = True
        pid = self.pid()
        self.stopped.append(pid)
        _signal(pid, signal.SIGSTOP)
        timer = threading.Timer(self.rng.random(), _signal, (pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()

    def interrupt_later(self) -> None:
        """Have Ctrl-C come at some moment."""
        self.is_disturbed = True
        timer = threading.Timer(self.rng.random() * 0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    def add_callback(self) -> None:
        """A callback that fails, submits, or waits where it must not."""
        future = self.executor.submit(_sleep, 1, self.rng.choice([0, 0.01]))
        kind = self.rng.choice(["fail", "submit", "wait"])

        def callback(_: Future[Any]) -> None:
            if kind == "fail":
                raise SystemExit
            with contextlib.suppress(ParallelError):
                later = self.executor.submit(_identity, 2)
                if kind == "wait":
                    later.result()

        future.add_done_callback(callback)

    def take(self) -> None:
        """Take the results of what was submitted."""
        while self.futures:
            future, expected = self.futures.pop()
            assert future.result() == expected

    def wait(self) -> None:
        """Wait for one or all of some calls, of which some have ended and some fail."""
        calls = [(_sleep, 1, 0.0), (_sleep, 1, 0.01), (_fail, 2)]
        futures = [self.executor.submit(*self.rng.choice(calls)) for _ in range(self.rng.randrange(1, 6))]
        with contextlib.suppress(ValueError):
            futures[0].result()
        when = self.rng.choice([ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION])
        done, not_done = wait(futures, STEP_WITHIN_S / 2, when)
        assert done
        assert not not_done or when != ALL_COMPLETED
        if when == FIRST_EXCEPTION and not_done:
            assert any(future.exception() for future in done)

    def put(self) -> None:
        """Objects that workers keep for a while."""
        handle = self.executor.put(list(range(self.rng.choice([10, 100_000]))))
        assert set(self.executor.run(len, handle)) <= {10, 100_000}

    def pid(self) -> int:
        """The process id of a worker."""
        pid: int = self.executor.submit(os.getpid).result()
        return pid


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    """Run one program, or many."""
    seed = int(sys.argv[1])
    if len(sys.argv) == 2:
        import logging

        logging.disable()
        Program(seed).run()
        return 0
    deadline = time.monotonic() + float(sys.argv[2])
    wrong: list[int] = []
    count = 0
    while time.monotonic() < deadline:
        command = [sys.executable, "-m", "tests.support.random_pool", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEPS * STEP_WITHIN_S)
        count += 1
        if done.returncode != 0:
            wrong.append(seed)
            print(f"seed {seed}: {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}", flush=True)
        seed += 1
    left = children_of(os.getpid())
    print(f"{count} programs, {len(wrong)} wrong: {wrong}; {len(left)} processes left")
    return bool(wrong or left)


if __name__ == "__main__":
    sys.exit(main())
