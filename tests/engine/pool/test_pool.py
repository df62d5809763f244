"""What a pool does beside running functions: keeps objects, changes its size, ends hangs, tells why a worker died."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from nn_parallel import (
    ExecutorClosedError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    TransferError,
    WorkerDiedError,
    current_world,
)
from nn_parallel._engine import interrupts as signals
from nn_parallel._engine.by_value import globals as received
from nn_parallel._engine.pool import forkserver_client, worker
from nn_parallel._engine.pool.pool import Pool
from nn_parallel._engine.pool.started_workers import StartedWorkers
from nn_parallel._engine.pool.tasks import Answer, Run
from nn_parallel._engine.pool.worker_process import WorkerProcess
from tests.support.processes import wait_for_state


def pool_of(executor: ParallelExecutor) -> Pool:
    """What is behind an executor that no launcher has started."""
    assert isinstance(executor._backend, StartedWorkers)
    return executor._backend.pool


def test_a_handle_is_the_object_itself(executor2: ParallelExecutor) -> None:
    """However deep it lies in the arguments, in run, submit and map, and the same object at each call."""
    data = torch.arange(4.0)
    handle = executor2.put(data)
    data.fill_(0)  # what the workers get is what was put
    assert executor2.run(torch.sum, handle) == [6.0, 6.0]
    assert executor2.submit(lambda box: box["data"][0].tolist(), {"data": [handle]}).result() == [0.0, 1.0, 2.0, 3.0]
    assert list(executor2.map(lambda t, n: float(t[n]), [handle] * 4, range(4))) == [0.0, 1.0, 2.0, 3.0]
    assert len(set(executor2.run(id, handle) + executor2.run(id, handle))) <= 2
    assert repr(handle) == "<Handle of a Tensor>"


def test_a_replaced_worker_gets_the_object_again(executor2: ParallelExecutor) -> None:
    """A handle outlives the workers that held its object."""
    handle = executor2.put([1, 2])
    assert executor2.run(len, handle) == [2, 2]
    with pytest.raises(RankError):
        executor2.run(lambda: os._exit(3))
    assert executor2.run(len, handle) == [2, 2]


def test_workers_forget_with_the_last_reference(executor2: ParallelExecutor) -> None:
    """The object goes when its handle does, and not before the calls that were given it are over."""
    handle = executor2.put([1, 2])
    number = handle.number
    futures = [executor2.submit(len, handle) for _ in range(20)]
    del handle
    gc.collect()
    assert [future.result() for future in futures] == [2] * 20
    deadline = time.monotonic() + 10
    del futures
    gc.collect()
    while any(executor2.run(lambda: number in received.stored)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_nothing_is_put_into_a_closed_pool() -> None:
    """A handle that no call can take is refused at once."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pass
    with pytest.raises(ExecutorClosedError, match="shut down"):
        pool.put(1)


class _Made:
    """Unpickled by a call."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.by = fn, args

    def __reduce__(self) -> Any:
        return self.by


def test_an_object_that_could_not_be_rebuilt_can_be_later(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Each call that needs it tries, and is told."""
    handle = executor2.put(_Made(Path.read_text, tmp_path / "text"))
    for _ in range(2):
        with pytest.raises(TransferError, match="cannot be rebuilt in the worker: FileNotFoundError"):
            executor2.submit(len, handle).result()
    (tmp_path / "text").write_text("four")
    assert executor2.run(len, handle) == [4, 4]
    (tmp_path / "text").write_text("longer")
    assert executor2.run(len, handle) == [4, 4]  # once is enough


def test_an_object_that_takes_too_long_to_rebuild_can_be_interrupted() -> None:
    """As the call can that needs it."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=0.3) as pool:
        (pid,) = pool.run(os.getpid)
        with pytest.raises(RankTimeoutError):
            pool.submit(str, pool.put(_Made(time.sleep, 60))).result()
        assert pool.run(os.getpid) == [pid]


def test_a_handle_is_good_for_its_own_executor_only(executor2: ParallelExecutor) -> None:
    """Passed to another executor, pickled, or holding what cannot be rebuilt: an error that says so."""
    handle = executor2.put(1)
    with ParallelExecutor(num_workers=1, devices="cpu") as other:
        with pytest.raises(TransferError, match="Argument 0 is a .*Handle.*the executor that made it"):
            other.run(str, handle)
        assert other.run(int) == [0]
        made = other.put(1)
    with pytest.raises(ExecutorClosedError):
        other.run(str, made)
    with pytest.raises(TransferError, match="The object is a _thread.lock"):
        executor2.put(threading.Lock())


def test_resize_grows_and_shrinks(executor2: ParallelExecutor) -> None:
    """Between tasks; the workers that stay keep their processes, and the ranks are those of the new size."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        pids = pool.run(os.getpid)
        for size in (4, 1, 3):
            pool.resize(size)
            assert pool.run(lambda: (current_world().rank, current_world().world_size)) == [
                (rank, size) for rank in range(size)
            ]
            assert pool.run(os.getpid)[0] == pids[0]
        running = [pool.submit(time.sleep, 0.1) for _ in range(6)]
        pool.resize(2)
        assert all(future.done() for future in running)
        with pytest.raises(ValueError, match="num_workers=0 must be at least 1"):
            pool.resize(0)
    with pytest.raises(ExecutorClosedError):
        pool.resize(1)


def test_ctrl_c_in_a_resize_leaves_the_pool_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it comes while a worker is being started for that."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert pool.run(int) == [0]
        start, assign = Pool._start, Pool._assign
        is_starting, may_start = threading.Event(), threading.Event()

        def start_late(pool: Pool, index: int) -> WorkerProcess:
            is_starting.set()
            may_start.wait(20)
            return start(pool, index)

        def assign_and_be_interrupted(pool: Pool) -> Any:
            assigned = assign(pool)  # which has set the lock free again
            if threading.current_thread() is threading.main_thread() and not is_starting.is_set():
                assert is_starting.wait(20)
                raise KeyboardInterrupt
            return assigned

        monkeypatch.setattr(Pool, "_start", start_late)
        monkeypatch.setattr(Pool, "_assign", assign_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.resize(2)
        may_start.set()
        assert pool.run(int) == [0, 0]


def test_waiting_in_the_queue_is_no_hang() -> None:
    """The time of a task begins when a worker begins it."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=1) as pool:
        assert list(pool.map(time.sleep, [0.2] * 8)) == [None] * 8


def test_ctrl_c_keeps_the_workers(executor2: ParallelExecutor) -> None:
    """A run that the caller stops is interrupted in the workers, which stay."""
    pids = executor2.run(os.getpid)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        executor2.run(time.sleep, 3600)
    timer.join()
    assert executor2.run(os.getpid) == pids


@pytest.mark.parametrize("forgets", [(False, True), (True, False)])
def test_an_object_that_is_forgotten_on_its_way_is_not_kept(forgets: tuple[bool, bool]) -> None:
    """The object and the order to forget it come over two connections, so one may overtake the other."""
    for forget in forgets:
        if forget:
            received.forget(-7)
        else:
            received.store_object(-7, list)
    assert -7 not in received.stored
    assert not received._forgotten_before


def test_a_resize_that_waits_takes_no_processor_time(executor2: ParallelExecutor) -> None:
    """Until the calls before it are over, nobody looks again and again whether they are."""
    slow, resize = executor2.submit(time.sleep, 2), threading.Thread(target=executor2.resize, args=(3,))
    resize.start()
    while not pool_of(executor2)._queue:
        time.sleep(0.001)
    before = time.process_time()
    slow.result()
    assert time.process_time() - before < 1
    resize.join()
    assert executor2.run(int) == [0, 0, 0]
    executor2.resize(2)


@pytest.mark.slow
def test_ctrl_c_lets_those_behind_a_waiting_run_go_on(executor2: ParallelExecutor) -> None:
    """A run that waits for all workers holds up what comes later, but not when nobody waits for it any more."""

    def interrupt() -> None:
        later.append(executor2.submit(abs, -1))
        os.kill(os.getpid(), signal.SIGINT)

    slow, later = executor2.submit(time.sleep, 5), list[Future[int]]()
    timer = threading.Timer(0.2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        executor2.run(int)
    timer.join()
    assert later[0].result(20) == 1
    assert not slow.done()


@contextlib.contextmanager
def interrupter() -> Iterator[Callable[[float], None]]:
    """Has another process send this one Ctrl-C, as a terminal does: after so many seconds, each time it is called."""
    code = "import os, sys, time\nfor line in sys.stdin: time.sleep(float(line)); os.kill(os.getppid(), 2)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        stdin = process.stdin
        yield lambda seconds: print(seconds, file=stdin)


@pytest.fixture
def _no_collector_callbacks() -> Iterator[None]:
    """An exception in one is lost, Ctrl-C too, and hypothesis has one."""
    gc.collect()  # nor is there garbage of earlier tests, whose weak references have callbacks
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.mark.usefixtures("_no_collector_callbacks")
def test_ctrl_c_at_any_moment_leaves_the_pool_whole() -> None:
    """Wherever it finds a call, what is called next comes to its end, and what runs meanwhile too."""

    def meanwhile() -> None:
        while not is_over.is_set():
            results.append((pool.run(len, "abc"), pool.submit(len, "ab").result(), list(pool.map(abs, range(5)))))

    rng, is_over, results = random.Random(0), threading.Event(), list[Any]()
    with ParallelExecutor(num_workers=2, devices="cpu") as pool, interrupter() as interrupt_after:
        other = threading.Thread(target=meanwhile, daemon=True)
        for index in range(600):
            if index == 300:
                other.start()
            with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
                interrupt_after(rng.random() * 0.004)
                while True:
                    pool.run(int)
                    list(pool.map(abs, range(40)))
                    pool.submit(int).result()
            # `Condition.wait`, in `Future.result`, lets go of its lock a step before it is prepared for an exception
            assert caught.type is KeyboardInterrupt or isinstance(caught.value.__context__, KeyboardInterrupt)
            assert pool.submit(int).result(20) == 0
            assert pool.run(int) == [0, 0]
        is_over.set()
        other.join(20)
        assert not other.is_alive()
        assert results == [([3, 3], 2, [0, 1, 2, 3, 4])] * len(results)


def test_ctrl_c_in_submit_ends_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has its future: its worker is for others."""

    def interrupted(pool: Pool, task: Any = None) -> None:
        hand_out(pool, task)
        if task is not None:
            signal.raise_signal(signal.SIGINT)

    hand_out = Pool._hand_out
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.run(int)
        with monkeypatch.context() as patch:
            patch.setattr(Pool, "_hand_out", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.submit(time.sleep, 3600)
        assert pool.submit(int).result(20) == 0


def test_ctrl_c_ends_a_call_that_cannot_be_sent() -> None:
    """A stopped worker does not read: what does not fit into its socket waits until Ctrl-C is pressed once more."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool, interrupter() as interrupt_after:
        (stopped, _), data = pool.run(os.getpid), [pool.put("x" * 60_000) for _ in range(10)]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(0.3)
            interrupt_after(signals.PATIENCE_S + 0.1)
            pool.run(len, data)
        assert pool.run(len, data) == [10] * 2
        assert stopped not in pool.run(os.getpid)


def test_asyncio_runs_in_it(executor2: ParallelExecutor) -> None:
    """`run_in_executor` takes it as any executor."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(executor2, abs, -n) for n in range(5)))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_an_interpreter_that_exits_while_tasks_run(tmp_path: Path) -> None:
    """Without a with block and without a shutdown, the tasks that were submitted still end, and nothing hangs."""
    (tmp_path / "script.py").write_text(
        "import time\n"
        "from nn_parallel import ParallelExecutor\n"
        "ex = ParallelExecutor(num_workers=2, devices='cpu')\n"
        "for n in range(4): ex.submit(lambda n=n: (time.sleep(0.1), print('done', n)))\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    assert sorted(done.stdout.splitlines()) == [f"done {n}" for n in range(4)]
    assert done.stderr == ""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mapped", [False, True])
def test_what_was_given_to_a_worker_that_had_exited_begins_elsewhere(workers: int, mapped: bool) -> None:
    """The pool notices as it sends: the task has not begun, so it has not failed."""
    with ParallelExecutor(num_workers=workers, devices="cpu") as pool:
        first = pool.run(os.getpid)[0]
        server = forkserver_client.fork_server_pid()
        assert server is not None
        os.kill(server, signal.SIGSTOP)  # it cannot tell of the exit
        try:
            os.kill(first, signal.SIGKILL)
            wait_for_state(first, "Z")
            if mapped:
                results = pool.map(pow, [3, 4, 5], [2, 2, 2])
            else:
                futures = [pool.submit(pow, base, 2) for base in (3, 4, 5)]
        finally:
            os.kill(server, signal.SIGCONT)
        assert (list(results) if mapped else [future.result() for future in futures]) == [9, 16, 25]
        assert len(set(pool.run(os.getpid)) - {first}) == workers


def test_what_a_worker_has_not_read_begins_elsewhere() -> None:
    """The kernel tells that it was not read. A future that the user has completed meanwhile is left as it is."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        for by_user in (False, True):
            (pid,) = pool.run(os.getpid)
            os.kill(pid, signal.SIGSTOP)
            wait_for_state(pid, "T")
            future = pool.submit(pow, 3, 2)
            if by_user:
                future.set_result("mine")
            os.kill(pid, signal.SIGKILL)
            assert future.result() == ("mine" if by_user else 9)
            assert pool.run(os.getpid) != [pid]


def wait_while_there(path: Path) -> None:
    while path.exists():
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["shutdown", "exception"])
def test_what_was_about_to_begin_elsewhere_ends_with_the_pool(how: str, tmp_path: Path) -> None:
    """While the worker that takes the place of another one still starts."""
    is_slow = tmp_path / "slow"

    with (
        contextlib.suppress(ZeroDivisionError),
        ParallelExecutor(1, "cpu", initializer=wait_while_there, initargs=(is_slow,)) as pool,
    ):
        (pid,) = pool.run(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        wait_for_state(pid, "T")
        future = pool.submit(pow, 3, 2)
        is_slow.touch()
        os.kill(pid, signal.SIGKILL)
        while not pool_of(pool)._queue:
            time.sleep(0.001)
        if how == "exception":
            raise ZeroDivisionError
        pool.shutdown(wait=False, cancel_futures=True)
        is_slow.unlink()
    with pytest.raises(ExecutorClosedError):
        future.result(10)


def test_any_thread_may_wait(executor2: ParallelExecutor) -> None:
    """A run from a thread that is not the main one fails and goes on like any other."""
    outcomes: list[Any] = []

    def call() -> None:
        try:
            executor2.run(lambda: 1 // current_world().rank)
        except RankError as error:
            outcomes.append(error.rank)
        outcomes.append(executor2.run(int))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)
    assert outcomes == [0, [0, 0]]


def test_no_item_waits_behind_a_long_one(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Short tasks are sent ahead. What was sent behind one that is long after all goes to another worker."""

    def task(index: int) -> int:
        if index == 100:  # over when all others have run
            while len(list(tmp_path.iterdir())) < 149:
                time.sleep(0.001)
        else:
            (tmp_path / str(index)).touch()
        return index

    assert list(executor2.map(task, range(150), timeout=30)) == list(range(150))


def test_a_death_takes_only_the_task_that_ran(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Those that were sent ahead to the worker that dies run once, elsewhere."""
    ran = tmp_path / "ran"

    def task(index: int) -> None:
        if index % 50 == 49:
            os._exit(3)
        with open(ran, "a") as file:
            file.write(f"{index} ")

    results = executor2.map(task, range(300))
    indices = {index for index in range(300) if index % 50 != 49}
    while not ran.exists() or len(ran.read_text().split()) < len(indices):
        assert executor2.submit(abs, -1).result() == 1
    assert sorted(map(int, ran.read_text().split())) == sorted(indices)
    with pytest.raises(WorkerDiedError):
        list(results)


def test_results_are_those_of_their_items_where_short_and_long_tasks_mix() -> None:
    """What has been taken back from a worker is still on its way to it as the next task is sent."""

    def task(item: int) -> int:
        time.sleep(0.05 if item == 20 else 0.0004 * (item > 20))
        return item

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        for _ in range(25):
            assert list(pool.map(task, range(200))) == list(range(200))


def test_who_waits_hears_of_a_death_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not only when the worker that replaces the dead one is ready."""
    _learn_slowly_of_deaths(monkeypatch)
    slow = tmp_path / "slow"

    def set_up() -> None:
        while slow.exists():
            time.sleep(0.01)

    def die(after_s: float) -> None:
        time.sleep(after_s)
        os._exit(1)

    with ParallelExecutor(num_workers=1, devices="cpu", initializer=set_up) as pool:
        pool.run(int)
        slow.touch()
        results = pool.map(die, [0.2], timeout=30)
        time.sleep(0.22)  # now the parent is learning of it, as a rule
        try:
            with pytest.raises(WorkerDiedError):
                next(results)
        finally:
            slow.unlink()  # before, the one that replaces it is not ready


def _learn_slowly_of_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    exited = WorkerProcess.exited

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return exited(*arguments)

    monkeypatch.setattr(WorkerProcess, "exited", slowly)


_to_shut_down: list[ParallelExecutor] = []


def _shut_down() -> None:
    _to_shut_down.pop().shutdown()


def test_a_pool_can_be_shut_down_by_what_it_answers() -> None:
    """An object does so as it is rebuilt."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        _to_shut_down.append(pool)
        assert pool.run(lambda: _Made(_shut_down)) == [None]
        with pytest.raises(ExecutorClosedError):
            pool.run(int)


def test_the_last_answer_and_the_last_death_may_come_together(executor2: ParallelExecutor) -> None:
    """Told by two threads, in any order of their steps."""
    run = Run(pool_of(executor2).packer.pack(int, (), {}, executor2._options))
    run.begin(2)

    class Missing(set[int]):
        def discard(self, rank: int) -> None:
            super().discard(rank)
            if rank == 0:
                run.complete(1, Answer(run.call, worker.SUCCEEDED, lambda: "b"))

    run._missing = Missing({0, 1})
    run.complete(0, Answer(run.call, worker.SUCCEEDED, lambda: "a"))
    assert run.result() == ["a", "b"]


def test_a_run_that_a_shutdown_cuts_off_is_no_result() -> None:
    """Where another thread leaves the `with` block by an exception."""
    outcome: list[Any] = []
    is_running = threading.Event()

    def call(pool: ParallelExecutor) -> None:
        try:
            is_running.set()
            outcome.append(pool.run(time.sleep, 3600))
        except Exception as error:
            outcome.append(error)

    with pytest.raises(ZeroDivisionError), ParallelExecutor(num_workers=2, devices="cpu") as pool:
        pool.run(int)
        thread = threading.Thread(target=call, args=[pool])
        thread.start()
        is_running.wait()
        while all(worker.task is None for worker in pool_of(pool)._workers):
            time.sleep(0.001)
        raise ZeroDivisionError
    thread.join(20)
    (error,) = outcome
    assert isinstance(error, ExecutorClosedError)


def test_a_map_whose_items_fail_begins_no_more() -> None:
    """An exception of the iterable: nobody can take the results."""

    def items() -> Iterator[float]:
        yield from [1.0] * 20
        raise ZeroDivisionError

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        pool.run(int)
        with pytest.raises(ZeroDivisionError):
            pool.map(time.sleep, items())
        begun = time.monotonic()
        pool.run(int)
        assert time.monotonic() - begun < 5  # and not 10


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, TimeoutError])
def test_a_signal_in_the_middle_of_sending(interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or what a handler of the user raises, which is perhaps an OSError.

    Whether a worker has got its task is not known then: it is replaced.
    """
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        assert list(pool.map(abs, range(50))) == list(range(50))
        (worker,) = pool_of(pool)._workers
        send, sent = worker.connection.send, itertools.count(1)

        def interrupted(header: bytes, payload: Any) -> None:
            send(header, payload)
            if next(sent) >= 20 and threading.current_thread() is threading.main_thread():  # no other gets signals
                raise interruption

        monkeypatch.setattr(worker.connection, "send", interrupted)
        with pytest.raises(interruption):
            list(pool.map(abs, range(1000)))
        assert list(pool.map(abs, range(10))) == list(range(10))
