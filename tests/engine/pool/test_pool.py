"""What a pool does beside running functions: keeps objects, changes its size, ends hangs, tells why a worker died."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import io
import itertools
import multiprocessing.util
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch

from nn_parallel import (
    ExecutorClosedError,
    ParallelError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    TransferError,
    WorkerDiedError,
    current_world,
)
from nn_parallel._engine import interrupts as signals
from nn_parallel._engine.by_value import namespaces
from nn_parallel._engine.pool import evidence, forkserver_client, worker
from nn_parallel._engine.pool.pool import Pool
from nn_parallel._engine.pool.processes import Processes
from nn_parallel._engine.pool.started_workers import StartedWorkers
from nn_parallel._engine.pool.tasks import Answer, Run, Task
from nn_parallel._engine.pool.worker_process import WorkerProcess
from tests.support.processes import wait_for_state


def pool_of(executor: ParallelExecutor) -> Pool:
    """What is behind an executor that no launcher has started."""
    assert isinstance(executor._backend, StartedWorkers)
    return executor._backend.pool


@pytest.fixture(scope="module")
def executor2() -> Iterator[ParallelExecutor]:
    with ParallelExecutor(num_workers=2, devices="cpu") as executor:
        executor.run(int)
        yield executor


# put


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
    while any(executor2.run(lambda: number in namespaces.stored)):
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


# resize


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


# timeout


def test_a_timeout_holds_the_stack_of_the_silent_worker_only() -> None:
    """Rank 1 hangs, rank 0 has answered: the error names rank 1 and where it stands, and nobody is killed."""
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=0.5) as pool:
        pids = pool.run(os.getpid)

        def hang() -> None:
            if current_world().rank == 1:
                time.sleep(3600)

        with pytest.raises(RankTimeoutError) as caught:
            pool.run(hang)
        assert caught.value.ranks == [1]
        assert re.findall(r"line \d+ in (\w+)", caught.value.stacks[1]) == ["hang"]
        assert f"Worker 1 (pid {pids[1]}, cpu):" in str(caught.value)
        assert pool.run(os.getpid) == pids
        with pytest.raises(TimeoutError, match=r"hang\(\) did not end within timeout=0.5 s"):
            pool.run(hang)


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.run(time.sleep, 60),
        lambda pool: list(pool.map(time.sleep, [60])),
    ],
    ids=["run", "map"],
)
def test_who_answers_a_cancellation_at_once_has_run_out_of_time(
    call: Callable[[ParallelExecutor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may read its answer: by the time it is cancelled it is settled what the call ends with."""
    cancel, settled = Processes.cancel, list[bool]()

    def look(self: Processes, task: Task) -> None:
        settled.append(task.is_over())
        cancel(self, task)

    monkeypatch.setattr(Processes, "cancel", look)
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=0.2) as pool:
        with pytest.raises(RankTimeoutError, match="did not end within timeout=0.2 s"):
            call(pool)
        pool.run(int)
    assert settled
    assert all(settled)


def test_a_process_id_that_is_told_late_starts_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be ready before the fork server has told its number; its time is not running then."""
    is_told, hear = threading.Event(), Pool._hear
    monkeypatch.setattr(Pool, "_hear", lambda self: is_told.wait(20) and hear(self))
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=5) as executor:
        assert executor.run(int) == [0, 0]
        workers, lock = pool_of(executor)._workers, pool_of(executor)._lock
        assert [worker.pid for worker in workers] == [0, 0]
        is_told.set()
        while not all(worker.pid for worker in workers):
            time.sleep(0.001)
        with lock:
            assert [worker.deadline for worker in workers] == [None, None]
        assert executor.run(os.getpid) == [worker.pid for worker in workers]


def test_waiting_in_the_queue_is_no_hang() -> None:
    """The time of a task begins when a worker begins it."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=1) as pool:
        assert list(pool.map(time.sleep, [0.2] * 8)) == [None] * 8


# cancelling


def test_cancelled_tasks_leave_the_workers_as_they_were(executor2: ParallelExecutor) -> None:
    """A run that fails on one rank ends the others by an interruption: sleeps, loops and locks; same processes."""

    def body(how: str) -> None:
        if current_world().rank == 1:
            raise ValueError
        if how == "sleep":
            time.sleep(3600)
        if how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        while True:
            pass

    pids = executor2.run(os.getpid)
    for how in ("sleep", "lock", "loop"):
        with pytest.raises(RankError) as caught:
            executor2.run(body, how)
        assert list(caught.value.failures) == [1]
    assert executor2.run(os.getpid) == pids


def test_a_task_that_swallows_its_interruption_is_killed(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """`except BaseException` does not keep a worker."""
    swallows = tmp_path / "swallows"

    def body() -> None:
        while current_world().rank == 0:
            with contextlib.suppress(BaseException):
                swallows.touch()
                while True:  # within the other loop, in which an interruption may hit what is not guarded
                    with contextlib.suppress(BaseException):
                        time.sleep(3600)
        while not swallows.exists():
            time.sleep(0.001)
        raise ValueError

    pids = executor2.run(os.getpid)
    with pytest.raises(RankError, match="rank 1 of 2: ValueError"):
        executor2.run(body)
    after = executor2.run(os.getpid)
    assert after[1] == pids[1]
    assert after[0] != pids[0]


def test_interruptions_race_with_the_ends_of_tasks(executor2: ParallelExecutor) -> None:
    """A failure at a random moment around the end of the other rank's task: never a wrong answer, never a lost one."""

    def body(failing: int, delay: float) -> int:
        end = time.perf_counter() + (delay if current_world().rank == failing else 0.0005)
        while time.perf_counter() < end:
            pass
        if current_world().rank == failing:
            raise ValueError(failing)
        return 7

    pids, rng = executor2.run(os.getpid), random.Random(0)
    for _ in range(300):
        failing = rng.randrange(2)
        with pytest.raises(RankError) as caught:
            executor2.run(body, failing, rng.random() * 0.002)
        assert {rank: str(error) for rank, error in caught.value.failures.items()} == {failing: str(failing)}
        assert executor2.run(abs, -3) == [3, 3]
    assert executor2.run(os.getpid) == pids


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
            namespaces.forget(-7)
        else:
            namespaces.keep(-7, list)
    assert -7 not in namespaces.stored
    assert not namespaces._forgotten_before


def test_an_answer_is_rebuilt_by_whoever_asks_for_it(executor2: ParallelExecutor) -> None:
    """And by no thread that merely reads it. Ctrl-C meanwhile is raised there, and it can be asked for again."""
    rebuilt_by.clear()
    future = executor2.submit(Rebuilt)
    wait([future])
    assert executor2.run(int) == [0, 0]
    assert rebuilt_by == []
    with pytest.raises(KeyboardInterrupt):
        future.result()
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda _: future.result(), range(4))) == ["whole"] * 4
    assert len(rebuilt_by) == 2
    assert rebuilt_by[0] == "MainThread"


def test_a_result_may_be_of_a_class_that_only_its_call_knew(executor2: ParallelExecutor) -> None:
    """Until it is rebuilt, however late; and so may an exception."""

    def calls() -> tuple[Future[Any], Future[Any], Iterator[Any]]:
        class Local(Exception):
            pass

        def fail() -> None:
            raise Local

        return executor2.submit(lambda: Local()), executor2.submit(fail), executor2.map(lambda _: Local(), range(2))

    made, failed, mapped = calls()
    wait([made, failed])
    gc.collect()
    assert type(made.result()).__name__ == "Local"
    assert type(failed.exception()).__name__ == "Local"
    assert [type(each).__name__ for each in mapped] == ["Local", "Local"]


def test_a_future_that_has_raised_is_gone_with_its_last_reference(executor2: ParallelExecutor) -> None:
    """As the standard library's: its exception is in no cycle with it."""
    future = executor2.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        future.result()
    gone = weakref.ref(future)
    del future
    assert gone() is None


rebuilt_by: list[str] = []


class Rebuilt:
    """A text, as it arrives; the first time, Ctrl-C comes meanwhile."""

    def __reduce__(self) -> Any:
        return rebuild, ()


def rebuild() -> str:
    rebuilt_by.append(threading.current_thread().name)
    if len(rebuilt_by) == 1:
        signal.raise_signal(signal.SIGINT)
    return "whole"


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


# output


def test_output_can_name_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """With prefix_output each line begins with the rank, on both streams."""
    with ParallelExecutor(num_workers=2, devices="cpu", prefix_output=True) as pool:
        pool.run(lambda: print("one\ntwo"))
        pool.run(lambda: print("three", file=sys.stderr))
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]
    assert sorted(captured.err.splitlines()) == ["[rank 0] three", "[rank 1] three"]


# the rest of the standard library


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


# evidence


def test_a_death_is_told_with_its_evidence(executor2: ParallelExecutor) -> None:
    """Signal by name, pid, device, what it ran, and how much memory it had."""
    with pytest.raises(WorkerDiedError) as caught:
        executor2.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()
    error = caught.value
    assert error.exitcode == -signal.SIGKILL
    assert f"(pid {error.pid}, cpu) was killed by SIGKILL while running " in str(error)
    assert "Its memory use peaked at" in error.evidence


OOM_SCRIPT = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from nn_parallel import ParallelExecutor, WorkerDiedError
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    try:
        ex.submit(lambda: len(bytearray(os.urandom(1 << 20)) * 4096)).result()
    except WorkerDiedError as error:
        print(error)
"""


def _new_memory_cgroup() -> Path | None:
    """A memory cgroup (version 1) below our own; None where we may not make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = Path("/sys/fs/cgroup/memory", path.lstrip("/"), f"oom-{os.getpid()}")
            with contextlib.suppress(OSError):
                group.mkdir()
                return group
    return None


@pytest.mark.slow
def test_the_kernel_s_out_of_memory_killer_is_named(
    tmp_path: Path, executor2: ParallelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that outgrows its cgroup: the error says that the kernel killed for memory meanwhile.

    By the real killer where this process may make a cgroup, else by a file that counts in its place.
    """
    if group := _new_memory_cgroup():
        try:
            (group / "memory.limit_in_bytes").write_text(str(1 << 30))
            command = [sys.executable, "-c", OOM_SCRIPT, str(group)]
            told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        finally:
            deadline = time.monotonic() + 10
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            group.rmdir()
    else:
        counter = tmp_path / "memory.events"
        counter.write_text("oom 4\noom_kill 3\n")
        monkeypatch.setattr(evidence, "_events_file", lambda: counter)
        with ParallelExecutor(num_workers=1, devices="cpu") as pool:
            pool.run(int)
            counter.write_text("oom 5\noom_kill 4\n")
            with pytest.raises(WorkerDiedError) as caught:
                pool.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()
        told = str(caught.value)
    assert "was killed by SIGKILL while running " in told
    assert "The kernel's out-of-memory killer counted 1 kill in this cgroup." in told


def test_a_killed_process_leaves_no_shared_memory(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """A DataLoader process that is killed with its worker, just as it hands over a tensor: its file goes with it."""

    def leave_behind() -> None:
        child = os.fork()
        Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()  # the worker, and its child
        if child == 0:
            time.sleep(3600)
        while not Path(f"/dev/shm/torch_{child}_1_0").exists():
            time.sleep(0.001)
        (tmp_path / "pids").write_text(f"{os.getpid()} {child}")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDiedError):
        executor2.submit(leave_behind).result()
    worker, child = (Path(f"/dev/shm/torch_{pid}_1_0") for pid in (tmp_path / "pids").read_text().split())
    deadline = time.monotonic() + 10
    while worker.exists() or child.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_shared_memory_that_a_process_has_open_is_not_removed() -> None:
    """A process of another pid namespace may have the number of the one that has ended; this one stands in for it."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pid = pool.submit(os.getpid).result()
        left, used = Path(f"/dev/shm/torch_{pid}_1_0"), Path(f"/dev/shm/torch_{pid}_0_0")
        try:
            left.touch()
            with used.open("w"):
                with pytest.raises(WorkerDiedError):
                    pool.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()
                assert not left.exists()
                assert used.exists()
        finally:
            used.unlink(missing_ok=True)
            left.unlink(missing_ok=True)


def test_what_a_worker_has_registered_runs_as_it_leaves(tmp_path: Path) -> None:
    """As at the end of a script: temporary folders go, also that of `multiprocessing`, and `atexit` is heard."""

    def register() -> int:
        setattr(sys, "kept", tempfile.TemporaryDirectory(dir=tmp_path))  # noqa: B010
        tempfile.tempdir = str(tmp_path)
        multiprocessing.util.get_temp_dir()
        atexit.register(print, os.getpid(), end=" ")
        return os.getpid()

    with ParallelExecutor(num_workers=3, devices="cpu") as pool:
        first = pool.run(register)
        assert len(list(tmp_path.iterdir())) == 6
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            pool.resize(1)
            pool.shutdown()
    assert list(tmp_path.iterdir()) == []
    assert sorted(printed.getvalue().split()) == sorted(map(str, first))


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


def test_a_worker_that_just_takes_the_place_of_another_one_ends_with_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the block kills this one too, whatever its initializer waits for."""
    start, replaces, is_slow = Processes.start, threading.Event(), tmp_path / "slow"

    def start_late(processes: Processes, index: int, device: torch.device) -> WorkerProcess:
        replaces.set()
        while not pool_of(pool)._closing:
            time.sleep(0.001)
        return start(processes, index, device)

    with (
        contextlib.suppress(ZeroDivisionError),
        ParallelExecutor(1, "cpu", initializer=wait_while_there, initargs=(is_slow,)) as pool,
    ):
        (pid,) = pool.run(os.getpid)
        monkeypatch.setattr(Processes, "start", start_late)
        is_slow.touch()
        os.kill(pid, signal.SIGKILL)
        replaces.wait(10)
        raise ZeroDivisionError


def test_shared_memory_that_a_task_has_left_goes_with_the_worker() -> None:
    """As at the end of a script: Python's resource tracker removes it, and has the time to."""

    def leave() -> str:
        return SharedMemory(create=True, size=1).name

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        names = pool.run(leave)
        assert all(os.path.exists(f"/dev/shm/{name}") for name in names)
    assert not any(os.path.exists(f"/dev/shm/{name}") for name in names)


def test_a_timeout_of_years_is_no_error() -> None:
    """The kernel waits for some days at most; the pool, for as long as it is told."""
    with ParallelExecutor(num_workers=1, devices="cpu", timeout=1e9) as pool:
        assert pool.run(lambda: time.sleep(0.1)) == [None]
        assert list(pool.map(abs, [-1], timeout=1e9)) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_worker_has_started_ends_with_it(own_session: bool) -> None:
    """With one that is killed because it does not end, and with one that leaves; and with no other worker."""

    def start() -> list[int]:
        command = ["sh", "-c", "sleep 3600 & echo $!; wait"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session)
        assert child.stdout is not None
        return [child.pid, int(child.stdout.readline())]

    def hang_on_rank_0() -> None:
        while current_world().rank == 0:
            with contextlib.suppress(BaseException):
                time.sleep(60)

    with ParallelExecutor(num_workers=2, devices="cpu", timeout=5) as pool:
        killed, left = pool.run(start)
        with pytest.raises(RankTimeoutError):
            pool.run(hang_on_rank_0)
        _wait_for_ends(killed)
        assert all(map(_is_alive, left))
    _wait_for_ends(left)


def _wait_for_ends(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.001)


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_too_many_descriptors_is_an_error_and_no_leak() -> None:
    """A pool for which there are no descriptors left says so, and what it had opened is closed."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, before[1]))
    try:
        with pytest.raises((OSError, ParallelError)):
            ParallelExecutor(num_workers=8, devices="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        assert pool.run(int) == [0, 0]


NO_MORE_PROCESSES = """
import os

fork = os.fork

def refuse():
    if os.path.exists("full"):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = refuse
"""
NO_MORE_WORKERS = """
import os
from pathlib import Path
from nn_parallel import ParallelError, ParallelExecutor

with ParallelExecutor(num_workers=1, devices="cpu") as pool:
    pid = pool.run(os.getpid)
    Path("full").touch()
    with ParallelExecutor(num_workers=2, devices="cpu") as another:
        try:
            another.run(int)
        except ParallelError as error:
            print(error)
    assert pool.run(os.getpid) == pid
    os.remove("full")
    with ParallelExecutor(num_workers=2, devices="cpu") as another:
        assert another.run(int) == [0, 0]
"""


def _wait_to_be_killed_once(folder: str) -> None:
    """The first five processes that call this wait; those after them go on."""
    for index in range(5):
        with contextlib.suppress(FileExistsError):
            Path(folder, f"{index}.new").touch(exist_ok=False)
            Path(folder, f"{index}.new").with_suffix(".pid").write_text(str(os.getpid()))
            time.sleep(3600)


def test_all_workers_may_die_once_as_they_start(tmp_path: Path) -> None:
    """That is no row of failures: each place has had one."""
    with ParallelExecutor(
        num_workers=5, devices="cpu", initializer=_wait_to_be_killed_once, initargs=(str(tmp_path),)
    ) as pool:
        while len(list(tmp_path.glob("*.pid"))) < 5:
            time.sleep(0.01)
        for path in tmp_path.glob("*.pid"):
            while not (pid := path.read_text()):
                time.sleep(0.01)
            os.kill(int(pid), signal.SIGKILL)
        assert pool.run(abs, -1) == [1] * 5


@pytest.mark.slow
def test_no_more_processes_is_an_error_of_the_pool_that_needs_them(tmp_path: Path) -> None:
    """The others go on. Nothing limits the number of root's processes, so the fork that is refused is a fake."""
    (tmp_path / "sitecustomize.py").write_text(NO_MORE_PROCESSES)
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "error", "-c", NO_MORE_WORKERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert "It could not be forked: Resource temporarily unavailable." in done.stdout


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


def test_nothing_is_given_to_a_worker_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that come as the parent learns of its end, and what it had not begun, go to the next one."""
    _learn_slowly_of_deaths(monkeypatch)

    def items(pause_s: float) -> Iterator[str]:
        yield from ["pass"] * 20
        time.sleep(0.01)
        yield "os._exit(1)"
        time.sleep(pause_s)
        yield from ["pass"] * 2

    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.run(int)
        for step in range(10):
            with pytest.raises(WorkerDiedError):
                list(pool.map(lambda code: exec(code, {"os": os}), items(0.006 * step)))


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


def test_a_callback_may_wait_for_its_pool(executor2: ParallelExecutor) -> None:
    """It is called in no thread that has to read answers, or to look after workers, as here after a death."""

    def callback(future: Future[int]) -> None:
        called.append(future.result())
        called.append(executor2.run(abs, -2))
        called.append(list(executor2.map(abs, range(-3, 0))))
        with contextlib.suppress(WorkerDiedError):
            executor2.submit(os._exit, 1).result()
        executor2.resize(1)
        called.append(executor2.submit(len, "abc").result())
        executor2.resize(2)
        is_over.set()

    called, is_over = list[Any](), threading.Event()
    future = executor2.submit(lambda: time.sleep(0.1) or 1)
    future.add_done_callback(lambda _: called.append("first"))
    future.add_done_callback(callback)
    assert list(executor2.map(time.sleep, [0.3, 0.3])) == [None, None]  # which reads the answer of the other task, too
    assert is_over.wait(20)
    assert called == ["first", 1, [2, 2], [3, 2, 1], 3]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("reader", ["nobody", "map"])
def test_what_a_callback_raises_is_logged(
    executor2: ParallelExecutor, caplog: pytest.LogCaptureFixture, kind: type[BaseException], reader: str
) -> None:
    """As the standard library does, also what would end the thread; it is not the error of whoever reads answers."""

    def callback(_: Future[None]) -> None:
        raise kind("of a callback")

    future, is_over = executor2.submit(time.sleep, 0.1), threading.Event()
    future.add_done_callback(callback)
    future.add_done_callback(lambda _: is_over.set())
    if reader == "map":
        assert list(executor2.map(time.sleep, [0.3, 0.3])) == [None, None]
    assert is_over.wait(20)
    assert future.result() is None
    [record] = caplog.records
    assert (record.name, record.getMessage()) == ("concurrent.futures", f"exception calling callback for {future!r}")
    assert record.exc_info
    assert isinstance(record.exc_info[1], kind)
    assert executor2.run(int) == [0, 0]


def test_ctrl_c_is_raised_while_a_callback_runs(executor2: ParallelExecutor, caplog: pytest.LogCaptureFixture) -> None:
    """It is the main thread's, however long a callback takes, and no callback's."""
    begun, go_on, is_over = threading.Event(), threading.Event(), threading.Event()
    future = executor2.submit(time.sleep, 0.1)
    future.add_done_callback(lambda _: (begun.set(), go_on.wait(20), is_over.set()))

    def interrupt() -> None:
        begun.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupting.start()
        executor2.run(time.sleep, 3600)
    interrupting.join()
    assert not is_over.is_set()
    assert executor2.run(int) == [0, 0]  # while it still runs
    go_on.set()
    assert is_over.wait(20)
    assert not caplog.records


def test_the_end_of_a_pool_waits_for_its_callbacks() -> None:
    """However long after the last task they end; what they submit is refused."""
    refused = list[bool]()

    def callback(_: Future[None]) -> None:
        pool.shutdown(wait=False)
        time.sleep(0.1)
        with pytest.raises(ExecutorClosedError):
            pool.submit(int)
        refused.append(True)

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        for _ in range(3):
            pool.submit(time.sleep, 0.1).add_done_callback(callback)
    assert refused == [True] * 3


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


def test_a_callback_that_takes_longer_than_the_timeout_harms_nobody() -> None:
    """The task itself was in time, and so was the one beside it."""
    with ParallelExecutor(num_workers=2, devices="cpu", timeout=0.5) as pool:
        pool.run(int)
        pids = pool.run(os.getpid)
        quick = pool.submit(time.sleep, 0.1)
        quick.add_done_callback(lambda _: time.sleep(1.5))
        assert list(pool.map(time.sleep, [0.3])) == [None]
        assert quick.result() is None
        assert pool.run(os.getpid) == pids


def test_a_pool_can_be_shut_down_in_a_callback() -> None:
    """While another thread reads its answers; in the callback it does not wait for the end, which waits for that."""
    pool = ParallelExecutor(num_workers=2, devices="cpu")
    pool.run(int)
    quick = pool.submit(time.sleep, 0.1)
    quick.add_done_callback(lambda _: pool.shutdown())
    assert list(pool.map(time.sleep, [0.3])) == [None]
    pool.shutdown()
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
