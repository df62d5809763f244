"""`ParallelExecutor(engine="ray")` on a real cluster of Ray: two nodes on this machine, with four workers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    ExecutorClosedError,
    LaunchError,
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    TransferError,
    WorkerDiedError,
    initialize_ddp,
    on_rank,
)
from nn_parallel._engine.ray.worker import WorkerActor, _PrefixedStream
from nn_parallel._version import __version__
from tests.support.launchers import finish, wait_for_files
from tests.support.notebook import run_cells

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray's own
GONE_WITHIN_S = 5.0


def add_up(device: torch.device) -> tuple[Any, ...]:
    here, number = initialize_ddp(), torch.ones(1)
    dist.all_reduce(number.mul_(here.rank + 1))
    return here.rank, here.local_rank, here.node_rank, here.local_world_size, str(device), number.item()


WORLD = [(0, 0, 0, 2, "cpu", 10.0), (1, 1, 0, 2, "cpu", 10.0), (2, 0, 1, 2, "cpu", 10.0), (3, 1, 1, 2, "cpu", 10.0)]


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_the_ranks_of_a_run_are_one_world(executor4: ParallelExecutor) -> None:
    """By nodes; with a process group across these, and `on_rank` inside."""
    assert executor4.run(add_up) == WORLD
    assert len(set(executor4.run(on_rank(3, broadcast=True)(os.getpid)))) == 1


def test_calls(executor4: ParallelExecutor) -> None:
    """All that a pool on one machine does."""
    assert list(executor4.map(lambda number: number**2, range(20))) == [number**2 for number in range(20)]
    assert list(executor4.map(lambda number: number**2, range(20), chunksize=3)) == [number**2 for number in range(20)]
    assert executor4.submit(pow, 2, 10).result() == 1024
    data = torch.arange(1 << 20)
    handle = executor4.put(data)
    assert executor4.run(lambda tensor: tensor.sum().item(), handle) == [data.sum().item()] * 4
    assert all(torch.equal(tensor, data) for tensor in executor4.run(lambda tensor: tensor, data))
    data.share_memory_()
    assert all(torch.equal(tensor, data) for tensor in executor4.run(lambda tensor: tensor, data))
    assert [box.value for box in executor4.run(lambda box: Box(box.value + 1), Box(1))] == [2] * 4


def raise_value_error() -> None:
    raise ValueError("a bad batch")


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fail", "kind"),
    [(raise_value_error, ValueError), (kill_oneself, WorkerDiedError), (lambda: os._exit(3), WorkerDiedError)],
)
@pytest.mark.parametrize("waits_in", ["collective", "sleep"])
def test_a_rank_fails(
    fail: Callable[[], None], kind: type[Exception], waits_in: str, executor4: ParallelExecutor
) -> None:
    """All others are freed at once, on both nodes, and the pool is whole again."""

    def work() -> None:
        here = initialize_ddp()
        if here.rank == 3:
            fail()
        if waits_in == "sleep":
            time.sleep(100)
        dist.all_reduce(torch.ones(1))

    executor4.run(add_up)
    began = time.monotonic()
    with pytest.raises(RankError) as raised:
        executor4.run(work)
    assert {rank: type(error) for rank, error in raised.value.failures.items()} == {3: kind}
    assert time.monotonic() - began < GONE_WITHIN_S
    assert executor4.run(add_up) == WORLD


def test_a_task_fails_alone(executor4: ParallelExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        executor4.submit(lambda: 1 / 0).result()
    with pytest.raises(WorkerDiedError, match=r"Worker \d \(pid \d+ on .*, cpu\) died while running _exit"):
        executor4.submit(os._exit, 3).result()
    with pytest.raises(TransferError):
        executor4.run(lambda lock: None, threading.Lock())
    with pytest.raises(RankError) as raised:
        executor4.run(threading.Lock)
    assert {type(error) for error in raised.value.failures.values()} == {TransferError}


def test_timeout_tells_where_the_ranks_of_all_nodes_stand(ray_cluster: Any, executor4: ParallelExecutor) -> None:
    def work(device: Any = None) -> None:
        time.sleep(100)

    executor4.run(add_up)  # a worker that replaces a dead one makes its process group in its first run
    began = time.monotonic()
    executor4._options = (before := executor4._options)._replace(timeout_s=1.0)
    futures = list[Any]()
    threading.Timer(0.5, lambda: futures.append(executor4.submit(abs, -1))).start()  # which waits behind it
    try:
        with pytest.raises(RankTimeoutError) as raised:
            executor4.run(work)
    finally:
        executor4._options = before
    assert futures[0].result() == 1
    assert raised.value.ranks == [0, 1, 2, 3]
    assert [rank for rank, stack in raised.value.stacks.items() if "in work" not in stack] == [], raised.value.stacks
    assert time.monotonic() - began < 1 + GONE_WITHIN_S
    assert executor4.run(add_up) == WORLD


SLEEP = """
def sleep():
    rank = current_world().rank
    open(f"{rank}.new", "w").write(str(os.getpid()))
    os.rename(f"{rank}.new", f"{rank}.ready")
    time.sleep(1000)

with ParallelExecutor(engine="ray", num_workers=2, devices="cpu") as ex:
    try:
        ex.run(sleep)
    except KeyboardInterrupt:
        print("interrupted", ex.run(abs, -1), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_script_is_interrupted_or_killed(
    number: int, script: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Ctrl-C is raised in the script, and the workers go on; nothing of a killed script is left."""
    process = script(SLEEP)
    wait_for_files(tmp_path, "*.ready", 2)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.ready")]
    os.kill(process.pid, number)
    [(status, printed)] = finish([process], 30)
    if number == signal.SIGINT:
        assert "interrupted [1, 1]" in printed, printed
    assert status == (0 if number == signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.1)  # between two looks
    assert not left


def test_a_script_is_asked_to_stop(script: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    """As before the end of an allocation: the ranks on both nodes stop at the same step."""
    process = script(
        """
def train():
    here, steps = initialize_ddp(), 0
    while not stop_requested():
        steps += 1
        if steps == 2:
            open(f"{here.rank}.ready", "w").close()
        time.sleep(0.01)
    return steps

stop_requested()
for placement in ("spread", "pack"):  # the second pool begins after the signal
    with ParallelExecutor(engine="ray", num_workers=2, devices="cpu", placement=placement) as ex:
        print("steps", len(set(ex.run(train))))
"""
    )
    wait_for_files(tmp_path, "*.ready", 2)
    os.kill(process.pid, signal.SIGTERM)
    [(status, printed)] = finish([process], 30)
    assert printed.count("steps 1\n") == 2, printed
    assert status == 0


def test_in_a_notebook(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and classes of cells go by value, also new definitions; prints arrive at the cell."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    printed = run_cells(
        "from nn_parallel import *\nwanted = dict(engine='ray', num_workers=2, devices='cpu', prefix_output=True)",
        "ex = ParallelExecutor(**wanted)\nclass Box:\n    def __init__(self, x): self.x = x",
        "def f():\n    print('hello'); return Box(current_world().rank)",
        "import time\nprint([box.x for box in ex.run(f)], flush=True)\ntime.sleep(2)",
        "def f(): return 'new'\nprint(ex.run(f))",
        "ex.run(lambda: 1 / 0)",
        "print(ex.run(f)); ex.shutdown()",
    )
    assert [error for _, error in printed] == [None] * 7, printed  # IPython prints a group, and names no error
    assert "[0, 1]" in printed[3][0]
    assert {"[rank 0] hello", "[rank 1] hello"} <= set(re.findall(r"\[rank \d\] hello", printed[3][0])), printed
    assert "['new', 'new']" in printed[4][0]
    assert re.search(r"RankError: <lambda>\(\) failed on rank \d of 2.*ZeroDivisionError", printed[5][0])
    assert "['new', 'new']" in printed[6][0]


def test_functions_share_a_pool(script: Callable[[str], subprocess.Popen[str]]) -> None:
    """As on one machine; and on a cluster that the script has started, with a worker for each of its cores."""
    process = script(
        """
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False)

@parallelize_on_gpus(engine="ray")
def first(): return os.getpid()

@parallelize_on_gpus(engine="ray")
def second(): return os.getpid()

print("the same", len(first()), first() == second())
"""
    )
    [(status, printed)] = finish([process])
    assert "the same 2 True\n" in printed, printed
    assert status == 0


def test_the_initializer(ray_cluster: Any) -> None:
    """It is called in each worker, also in one that replaces a dead one."""

    def set_up(value: int) -> None:
        os.environ["VALUE_OF_TEST"] = str(value)

    def value() -> str | None:
        return os.environ.get("VALUE_OF_TEST")

    with ParallelExecutor(
        engine="ray", num_workers=2, devices="cpu", placement="spread", initializer=set_up, initargs=(7,)
    ) as ex:
        assert ex.run(value) == ["7", "7"]
        with pytest.raises(RankError):
            ex.run(kill_oneself)
        assert ex.run(value) == ["7", "7"]


def test_a_run_fails_before_it_begins_on_another_node(ray_cluster: Any, tmp_path: Path) -> None:
    """Where its worker is not ready yet."""

    def set_up() -> None:
        try:
            (tmp_path / "first").mkdir()
        except FileExistsError:
            time.sleep(3)

    with ParallelExecutor(engine="ray", num_workers=2, devices="cpu", placement="spread", initializer=set_up) as ex:
        with pytest.raises(RankError) as raised:
            ex.run(raise_value_error)
        assert {type(error) for error in raised.value.failures.values()} == {ValueError}
        assert ex.run(int) == [0, 0]


def test_in_a_fork(executor4: ParallelExecutor) -> None:
    """The executor is that of its process; a fork is told so, and does not wait."""
    results = executor4.map(abs, range(4))
    pid = os.fork()
    if not pid:
        told = 0
        for call in (
            lambda: next(results),
            lambda: executor4.run(int),
            lambda: executor4.submit(int),
            lambda: executor4.put(1),
        ):
            try:
                call()
            except ExecutorClosedError:
                told += 1
        executor4.shutdown()
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert list(results) == list(range(4))


def test_ray_is_shut_down(script: Callable[[str], subprocess.Popen[str]]) -> None:
    """Before the executor: its calls say so, none starts Ray again, and the script ends."""
    process = script(
        """
import ray
ex = ParallelExecutor(engine="ray", num_workers=2, devices="cpu")
handle = ex.put([1])
ray.shutdown()
for call in (lambda: ex.run(len, handle), lambda: ex.submit(len, handle).result(), lambda: ex.run(len, handle)):
    try:
        call()
    except ParallelError as error:
        print("told", error)
print("again", ray.is_initialized())
"""
    )
    [(status, printed)] = finish([process])
    assert printed.count("told Ray has been shut down.\n") == 3, printed
    assert "again False" in printed
    assert status == 0


def test_the_actor_of_the_orders_is_gone(ray_cluster: Any, executor4: ParallelExecutor) -> None:
    """With it the store of the ranks: those of one run can fail. Ray starts it again, and all is as before."""
    executor4.run(add_up)
    for pid in processes_called("ray::Orders"):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(RankError):
        executor4.run(on_rank(3, broadcast=True)(os.getpid))
    assert executor4.run(add_up) == WORLD
    assert len(set(executor4.run(on_rank(3, broadcast=True)(os.getpid)))) == 1
    executor4._options = (before := executor4._options)._replace(timeout_s=1.0)
    try:
        with pytest.raises(RankTimeoutError, match="in <lambda>"):
            executor4.run(lambda: time.sleep(100))
    finally:
        executor4._options = before


def processes_called(name: str) -> list[int]:
    """The processes whose title begins so."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith(name):
                found.append(int(path.parent.name))
    return found


def test_a_call_that_holds_others_up(executor4: ParallelExecutor) -> None:
    """The items of a map behind a long call in a batch are done by other workers."""
    ready = executor4.put(list(range(2000)))

    def call(number: int, numbers: Any) -> tuple[int, int]:
        if number == 300:
            time.sleep(3)
        return number, os.getpid()

    results = list(executor4.map(call, range(2000), [ready] * 2000))
    assert [number for number, _ in results] == list(range(2000))


def test_another_version_is_refused() -> None:
    """The node says which versions there are."""
    with pytest.raises(LaunchError, match=f"the script has 0.0.0, .* has {re.escape(__version__)}"):
        WorkerActor().start("0.0.0", b"", None)


def test_each_line_has_a_prefix() -> None:
    """However it is written."""
    stream = io.StringIO()
    prefixed = _PrefixedStream(stream, "[rank 1] ")
    for text in ("a\nb", "c\n", "", "d\n\ne\n"):
        prefixed.write(text)
    prefixed.writelines(["f\n", "g"])
    expected = "[rank 1] a\n[rank 1] bc\n[rank 1] d\n[rank 1] \n[rank 1] e\n[rank 1] f\n[rank 1] g"
    assert stream.getvalue() == expected


def ancestors(pid: int) -> Iterator[int]:
    """The processes that have started this one."""
    while pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]):
        yield pid


def test_a_node_is_gone(ray_cluster: Any, executor4: ParallelExecutor) -> None:
    """In a collective: its ranks have died, soon; on another node the pool is whole again. Then it is closed."""

    def work() -> None:
        initialize_ddp()
        while True:
            dist.all_reduce(torch.ones(1))

    [node], killed_at = ray_cluster.worker_nodes, list[float]()
    raylet = node.all_processes["raylet"][0].process.pid
    there = {rank for rank, pid in enumerate(executor4.run(os.getpid)) if raylet in ancestors(pid)}
    assert len(there) == 2

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(raylet, signal.SIGKILL)

    timer = threading.Timer(1, kill)
    timer.start()
    with pytest.raises(RankError) as raised:
        executor4.run(work)
    assert time.monotonic() - killed_at[0] < GONE_WITHIN_S
    assert {rank: type(error) for rank, error in raised.value.failures.items()} == dict.fromkeys(there, WorkerDiedError)
    ray_cluster.remove_node(node)
    ray_cluster.add_node(num_cpus=4)
    assert [(rank, total) for rank, *_, total in executor4.run(add_up)] == [(rank, 10.0) for rank in range(4)]
    executor4.resize(2)
    assert len(executor4.run(add_up)) == 2
    executor4.shutdown()
    with pytest.raises(ExecutorClosedError):
        executor4.run(int)
