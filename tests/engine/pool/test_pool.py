"""What a pool does beside running functions: keeps objects, changes its size, ends hangs, tells why a worker died."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import FrameType
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
from nn_parallel._engine.by_value import globals as received
from nn_parallel._engine.pool import forkserver_client
from tests.support.processes import wait_for_state


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


def test_a_handle_does_not_keep_the_ended_pool_alive() -> None:
    others = set(threading.enumerate())
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        threads = weakref.WeakSet(set(threading.enumerate()) - others)
        assert [thread.name for thread in threads] == ["nn_parallel supervisor"]
        handle = pool.put([1])
        assert pool.run(len, handle) == [1]
    del pool
    gc.collect()
    assert not threads
    assert repr(handle) == "<Handle of a list>"


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


@pytest.mark.slow
def test_an_object_that_takes_too_long_to_rebuild_can_be_interrupted() -> None:
    """As the call can that needs it."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=2) as pool:
        (pid,) = pool.run(os.getpid)
        with pytest.raises(RankTimeoutError):
            pool.submit(str, pool.put(_Made(time.sleep, 60))).result()
        assert pool.run(os.getpid) == [pid]


def test_a_handle_is_good_for_its_own_executor_only(executor2: ParallelExecutor) -> None:
    """Passed to another executor, pickled, or holding what cannot be rebuilt: an error that says so."""
    handle = executor2.put(1)
    with ParallelExecutor(num_workers=1, devices="cpu") as other:
        with pytest.raises(TransferError, match="Argument 0 is a .*Handle.*the executor whose put.. made it"):
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


@pytest.mark.slow
def test_a_resize_that_waits_takes_no_processor_time(executor2: ParallelExecutor) -> None:
    """Until the calls before it are over, nobody looks again and again whether they are."""
    slow, resize = executor2.submit(time.sleep, 2), threading.Thread(target=executor2.resize, args=(3,))
    before = time.process_time()
    resize.start()
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


def test_a_stopped_worker_does_not_hold_up_the_others() -> None:
    """What does not fit into its socket waits for it, and what is for others goes to them."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        stopped, other = pool.run(os.getpid)
        data = [pool.put("x" * 60_000) for _ in range(10)]
        os.kill(stopped, signal.SIGSTOP)
        wait_for_state(stopped, "T")
        waiting = pool.submit(len, data)
        assert [pool.submit(os.getpid).result(20) for _ in range(10)] == [other] * 10
        os.kill(stopped, signal.SIGCONT)
        assert waiting.result(20) == 10


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


@pytest.mark.usefixtures("_no_collector_callbacks")
def test_ctrl_c_in_a_resize_leaves_the_pool_whole() -> None:
    """Even if it comes while a worker is being started for that."""
    rng = random.Random(0)
    with ParallelExecutor(num_workers=1, devices="cpu") as pool, interrupter() as interrupt_after:
        for _ in range(30):
            with pytest.raises((KeyboardInterrupt, RuntimeError)):  # see `test_ctrl_c_at_any_moment`
                interrupt_after(rng.random() * 0.05)
                while True:
                    pool.resize(3)
                    pool.resize(1)
            pool.resize(2)
            assert pool.run(int) == [0, 0]


def test_ctrl_c_in_submit_ends_the_task() -> None:
    """Nobody has its future: its worker is for others."""

    def interrupt(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_return" and called is os.eventfd_write:  # now the pool's thread has been told
            sys.setprofile(None)
            raise KeyboardInterrupt

    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.run(int)
        with pytest.raises(KeyboardInterrupt):
            sys.setprofile(interrupt)
            pool.submit(time.sleep, 3600)
        assert pool.submit(int).result(20) == 0


def test_ctrl_c_ends_a_call_that_cannot_be_sent() -> None:
    """A stopped worker does not read what does not fit into its socket, and is replaced."""
    with ParallelExecutor(num_workers=2, devices="cpu") as pool, interrupter() as interrupt_after:
        (stopped, _), data = pool.run(os.getpid), [pool.put("x" * 60_000) for _ in range(10)]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(0.3)
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


def test_what_was_given_to_a_worker_that_had_exited_has_failed() -> None:
    """The pool has not heard of the exit: the error says that the worker was idle. The next task has a new worker."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        (pid,) = pool.run(os.getpid)
        server = forkserver_client.fork_server_pid()
        assert server is not None
        os.kill(server, signal.SIGSTOP)  # it cannot tell of the exit
        try:
            os.kill(pid, signal.SIGKILL)
            wait_for_state(pid, "Z")
            future = pool.submit(pow, 3, 2)
            results = pool.map(abs, [-1])
        finally:
            os.kill(server, signal.SIGCONT)
        with pytest.raises(WorkerDiedError, match="was killed by SIGKILL while idle"):
            future.result(20)
        assert list(results) == [1]
        assert pool.run(os.getpid) != [pid]


def test_what_a_worker_has_not_read_has_failed() -> None:
    """The kernel tells that it was not read. A future that the user has completed meanwhile is left as it is."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        for by_user in (False, True):
            (pid,) = pool.run(os.getpid)
            os.kill(pid, signal.SIGSTOP)
            wait_for_state(pid, "T")
            future = pool.submit(pow, 3, 2)
            while not future.running():  # it is on its way to the worker
                time.sleep(0.001)
            if by_user:
                future.set_result("mine")
            os.kill(pid, signal.SIGKILL)
            if by_user:
                assert future.result() == "mine"
            else:
                with pytest.raises(WorkerDiedError, match="while idle"):
                    future.result(20)
            assert pool.run(os.getpid) != [pid]


def wait_while_there(path: Path) -> None:
    while path.exists():
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["shutdown", "exception"])
def test_what_waits_for_a_worker_in_the_place_of_another_ends_with_the_pool(how: str, tmp_path: Path) -> None:
    """While that worker still starts."""
    is_slow = tmp_path / "slow"
    with (
        contextlib.suppress(ZeroDivisionError),
        ParallelExecutor(1, "cpu", initializer=wait_while_there, initargs=(is_slow,)) as pool,
    ):
        pool.run(int)
        is_slow.touch()
        with pytest.raises(WorkerDiedError):
            pool.submit(os._exit, 1).result(20)
        future = pool.submit(pow, 3, 2)
        if how == "exception":
            raise ZeroDivisionError
        pool.shutdown(wait=False, cancel_futures=True)
        is_slow.unlink()
    with pytest.raises(CancelledError):
        future.result(20)


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


def test_a_death_takes_what_its_worker_had_not_answered(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """The items of its batch; all others run once."""
    ran = tmp_path / "ran"

    def task(index: int) -> None:
        with open(ran, "a") as file:
            file.write(f"{index} ")
        if index == 150:
            os._exit(3)

    results = executor2.map(task, range(300))
    assert executor2.submit(abs, -1).result() == 1
    outcomes = [_outcome(results) for _ in range(150)]
    died = [index for index, outcome in enumerate(outcomes) if outcome is not None]
    begun = [int(index) for index in ran.read_text().split()]
    assert len(begun) == len(set(begun))
    assert set(range(150)) - set(begun) == set()
    assert died == list(range(150 - len(died), 150))  # what was answered no more
    with pytest.raises(WorkerDiedError, match=r"exited with code 3 while running .*task\(\)"):
        next(results)


def _outcome(results: Iterator[Any]) -> Any:
    try:
        return next(results)
    except WorkerDiedError as error:
        return error


def test_small_items_go_in_batches_and_long_ones_by_themselves(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """However many wait: a worker that is given more than it does in some milliseconds gives the rest back."""

    def task(index: int) -> int:
        if index < 1000:
            return index
        (tmp_path / str(index)).touch()
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 2:  # until the other worker has begun one, too
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.02)
        return index

    assert list(executor2.map(task, range(1004))) == list(range(1004))


@pytest.mark.slow
def test_results_are_those_of_their_items_where_short_and_long_tasks_mix() -> None:
    """What has been taken back from a worker is still on its way to it as the next task is sent."""

    def task(item: int) -> int:
        time.sleep(0.05 if item == 20 else 0.0004 * (item > 20))
        return item

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        for _ in range(25):
            assert list(pool.map(task, range(200))) == list(range(200))


def test_who_waits_hears_of_a_death_at_once(tmp_path: Path) -> None:
    """And not only when the worker that replaces the dead one is ready."""
    slow = tmp_path / "slow"

    def die() -> None:
        slow.touch()
        os._exit(1)

    with ParallelExecutor(1, "cpu", initializer=wait_while_there, initargs=(slow,)) as pool:
        try:
            with pytest.raises(WorkerDiedError):
                pool.submit(die).result(20)
        finally:
            slow.unlink()  # before, the one that replaces it is not ready


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


def test_a_run_that_a_shutdown_cuts_off_is_no_result(tmp_path: Path) -> None:
    """Where another thread leaves the `with` block by an exception."""
    outcome: list[Any] = []

    def body() -> None:
        (tmp_path / str(current_world().rank)).touch()
        time.sleep(3600)

    def call(pool: ParallelExecutor) -> None:
        try:
            outcome.append(pool.run(body))
        except Exception as error:
            outcome.append(error)

    with pytest.raises(ZeroDivisionError), ParallelExecutor(num_workers=2, devices="cpu") as pool:
        pool.run(int)
        thread = threading.Thread(target=call, args=[pool])
        thread.start()
        while len(list(tmp_path.iterdir())) < 2:
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


NO_DESCRIPTORS = """
import os, resource, signal, sys
import torch
from nn_parallel import ParallelError, ParallelExecutor
from nn_parallel._engine.pool import forkserver_client

with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    ex.run(int)
server = forkserver_client.fork_server_pid()
shared = torch.ones(4).share_memory_()
initializer = {"initializer": torch.sum, "initargs": (shared,)} if sys.argv[1] == "initializer" else {}
os.kill(server, signal.SIGSTOP)
with ParallelExecutor(num_workers=1, devices="cpu", **initializer) as ex:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    os.kill(server, signal.SIGCONT)
    try:
        print(ex.run(os.getpid))
    except ParallelError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lacks_them", ["initializer", "run"])
def test_a_script_that_can_open_no_more_files_is_told(lacks_them: str, tmp_path: Path) -> None:
    """Once its worker has started. No task begins on a worker that has not got the initializer."""
    script = tmp_path / "script.py"
    script.write_text(NO_DESCRIPTORS)
    done = subprocess.run([sys.executable, script, lacks_them], capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    assert "Too many open files" in done.stdout
