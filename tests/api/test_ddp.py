"""`initialize_ddp` and its company: the same world however it was started, or an error that says what to set."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    LaunchError,
    ParallelError,
    ParallelExecutor,
    RankError,
    WorkerDiedError,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_model,
    save_checkpoint,
    should_use_distributed,
)
from tests.support.ranks import AT_ONCE_S, AnyRanks, free_port, launched

CPU = torch.device("cpu")
ONLY_LINUX = """
import os, select, signal, socket, sys
def refuse(event, args):
    if event == "open" and str(args[0]).startswith("/proc/self/fd"):
        raise FileNotFoundError(args[0])
sys.addaudithook(refuse)
for module, names in (
    (os, "eventfd EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE memfd_create pidfd_open sched_getaffinity sched_setaffinity"),
    (select, "epoll EPOLLIN"),
    (signal, "SIGRTMIN SIGRTMAX pidfd_send_signal"),
    (socket, "MSG_CMSG_CLOEXEC TCP_USER_TIMEOUT TCP_KEEPIDLE"),
):
    for name in names.split():
        delattr(module, name)
"""


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables, and forget the world afterwards."""

    def set_all(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


def test_alone() -> None:
    """With no launcher there is one rank, no group, and nothing to clean up."""
    world = initialize_ddp()
    assert world == (False, 0, 0, 1, CPU)
    assert world == current_world()
    assert (world.is_main, world.node_rank, world.local_world_size, world.launcher) == (True, 0, 1, "none")
    assert not dist.is_initialized()
    distributed, rank, local_rank, world_size, device = world
    assert (distributed, rank, local_rank, world_size, device) == tuple(world)
    cleanup_ddp()
    cleanup_ddp()


def test_a_device_that_is_named_alone_is_kept() -> None:
    """For all that comes later, until another one is named, or the world is left."""
    assert initialize_ddp(device="meta").device == initialize_ddp().device == current_world().device
    assert prepare_model(torch.nn.Linear(1, 1)).weight.device.type == "meta"
    assert initialize_ddp(device="cpu").device == current_world().device == CPU
    initialize_ddp(device="meta")
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:  # not a rank among ranks
        assert pool.run(os.getpid) != [os.getpid()]
    cleanup_ddp()
    assert current_world().device == CPU


def test_in_a_world(any_ranks: AnyRanks) -> None:
    """A group connects the ranks, further calls return the same world, and collectives work."""

    def scenario() -> Any:
        first = initialize_ddp()
        total = torch.ones(1)
        dist.all_reduce(total)
        again = initialize_ddp(timeout=5)
        return first == again == current_world(), tuple(first)[:4], first.launcher, total.item(), first.node_rank

    results = any_ranks.run(scenario)
    n = len(results)
    launcher = {2: ("executor", "torchrun"), 3: ("env",)}[n]
    for rank, (same, facts, how, total, node) in enumerate(results):
        assert same
        assert facts == (
            True,
            rank,
            rank,
            n,
        )
        assert how in launcher
        assert (total, node) == (n, 0)


def test_cleanup_and_again(any_ranks: AnyRanks) -> None:
    """After cleanup_ddp the ranks can meet again in the same processes, and decorators join by themselves."""

    def scenario() -> Any:
        initialize_ddp()
        dist.barrier()
        cleanup_ddp()
        cleanup_ddp()
        closed = not dist.is_initialized()

        @on_rank(0, broadcast=True)
        def number() -> int:
            return 7

        return closed, number(), initialize_ddp().distributed

    assert set(any_ranks.run(scenario)) == {(True, 7, True)}


@pytest.mark.slow
def test_a_launched_process_is_not_alone_before_it_joins() -> None:
    """A script that never calls initialize_ddp: its ranks know who they are, and the first decorator joins for them."""

    def scenario() -> Any:
        before = current_world()

        @on_rank(0)
        def who() -> int:
            return current_world().rank

        return before.distributed, before.rank, before.world_size, should_use_distributed(), who()

    with launched(2) as ranks:
        assert ranks.run(scenario) == [(False, 0, 2, True, 0), (False, 1, 2, True, None)]


# A script that asks who it is before its guard, so that workers which import it ask too.
WITH_LOADER_WORKERS = """
import subprocess, sys
from torch.utils.data import DataLoader
from nn_parallel import cleanup_ddp, current_world, initialize_ddp, seed_everything

world = initialize_ddp(timeout=20)

class Who:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return seed_everything(10), *initialize_ddp()[:2]

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Who(), batch_size=None, num_workers=1, multiprocessing_context=method)
        assert list(loader) == [[10 + world.rank, method == "fork", world.rank]]
    child = "from nn_parallel import initialize_ddp; print(initialize_ddp()[:2])"
    told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert told == f"(False, {world.rank})\\n", told
    print("fine", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """It inherits the launcher's variables, is told the rank that it works for, and takes nobody's place."""
    script = tmp_path / "script.py"
    script.write_text(WITH_LOADER_WORKERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port())]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("fine") == 2, done.stderr


@pytest.mark.slow
def test_explicit_arguments_win_over_the_environment(env: Callable[..., None]) -> None:
    """rank=, world_size=, master_addr= and master_port= need no environment, and overrule a stale one."""
    env(RANK=3, WORLD_SIZE=8, LOCAL_RANK=3, MASTER_ADDR="stale.example", MASTER_PORT=1)
    world = initialize_ddp(timeout=20, rank=0, world_size=1, master_addr="localhost", master_port=free_port())
    assert world == (True, 0, 0, 1, CPU)
    assert dist.get_world_size() == 1
    cleanup_ddp()
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.slow
def test_spawned_processes_with_explicit_arguments() -> None:
    """The idiom of torch.multiprocessing.spawn: each process passes its rank, and they meet."""
    port = free_port()

    def scenario(rank: int) -> Any:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        world = initialize_ddp(timeout=20, rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port)
        total = torch.ones(1)
        dist.all_reduce(total)
        return world.local_rank, total.item()

    with launched(2) as ranks:
        for rank, connection in enumerate(ranks._connections):
            import cloudpickle

            connection.send_bytes(cloudpickle.dumps((scenario, (rank,))))
        assert [ranks._answer(rank) for rank in range(2)] == [(True, (0, 2.0)), (True, (1, 2.0))]


@pytest.mark.slow
def test_one_line_in_the_log_says_what_was_found() -> None:
    """Who started the ranks, and from which variables that is known."""
    code = "import logging, nn_parallel as n; logging.basicConfig(level=logging.INFO); n.initialize_ddp()"
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=60
    )
    assert (
        "INFO:nn_parallel:Rank 0 of 1 on cpu, started by env (WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT)."
        in done.stderr.splitlines()
    )


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_environments(env: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """What is set, what is missing and the command that sets it, from every door into a world."""
    env(RANK=1, WORLD_SIZE=4, MASTER_ADDR="localhost", MASTER_PORT=29500)
    monkeypatch.delenv(variable)
    for enter in (initialize_ddp, current_world, on_rank(0)(print), should_use_distributed):
        with pytest.raises(LaunchError, match=f"{variable} is not") as caught:
            enter()  # type: ignore[operator]
        assert "torchrun --nproc-per-node=4" in str(caught.value)


def test_fallback_goes_on_alone_with_a_warning(env: Callable[..., None]) -> None:
    """fallback=True: a broken environment is a warning, and the process is alone from then on."""
    env(RANK=1, WORLD_SIZE=4)
    with pytest.warns(UserWarning, match="Running alone.*MASTER_ADDR and MASTER_PORT are not"):
        world = initialize_ddp(fallback=True)
    assert world == current_world() == (False, 0, 0, 1, CPU)
    assert on_rank(0)(lambda: "ran")() == "ran"
    cleanup_ddp()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "5"}, "RANK=5 cannot be: it must be 0..3, as WORLD_SIZE=4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_ADDR": "10.9.8.7"}, "Set LOCAL_RANK"),
        ({"MASTER_ADDR": "no..name", "LOCAL_RANK": "1", "RANK": "1"}, "found no store at no..name:29500"),
    ],
)
def test_values_that_cannot_be(env: Callable[..., None], variables: dict[str, str], text: str) -> None:
    """A wrong value is named with its variable."""
    env(**{"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | variables)
    with pytest.raises(LaunchError, match=text):
        initialize_ddp(timeout=5)


def test_should_use_distributed(any_ranks: AnyRanks) -> None:
    """None: what the environment says; False: no; True: if possible, with a warning where it is not."""
    assert should_use_distributed() is False
    assert should_use_distributed(False) is False
    with pytest.warns(UserWarning, match="start it with torchrun"):
        assert should_use_distributed(True) is False
    answers = any_ranks.run(lambda: [should_use_distributed(flag) for flag in (None, False, True)])
    assert all(answer == [True, False, True] for answer in answers)


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_must_be_above_zero(timeout: float) -> None:
    """A timeout that cannot be waited is a ValueError."""
    with pytest.raises(ValueError, match="must be above zero"):
        initialize_ddp(timeout=timeout)


@pytest.mark.slow
def test_a_killed_rank_is_an_error_for_those_that_wait_for_it() -> None:
    """SIGKILL in the body: the waiting ranks raise RankError with a WorkerDiedError at once."""

    def scenario() -> Any:
        @on_rank(1)
        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        initialize_ddp()  # all have come: what is measured is the failure
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            die()
        died = caught.value.failures[1]
        assert isinstance(died, WorkerDiedError)
        return died.rank, died.pid, time.monotonic() - start

    with launched(3) as ranks:
        for rank, pid, seconds in ranks.run(scenario)[::2]:
            assert (rank, pid) == (1, ranks.pids[1])
            assert seconds < AT_ONCE_S


@pytest.mark.slow
def test_the_death_of_the_rank_that_holds_the_store() -> None:
    """When rank 0 hosts the store and is gone, the others learn that rank 0 is gone."""

    def scenario() -> Any:
        initialize_ddp()
        on_rank(1)(int)()  # it has left initialize_ddp too: from there on the store is needed by on_rank alone

        @on_rank(0)
        def die() -> None:
            os._exit(3)

        with pytest.raises(RankError) as caught:
            die()
        return caught.value.rank, type(caught.value.failures[0]).__name__

    with launched(2) as ranks:
        assert ranks.run(scenario)[1] == (0, "WorkerDiedError")


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """A rank that ends its script while another waits for it: the other gets an error that says so."""

    def leave() -> str:
        initialize_ddp()
        on_rank(0)(int)()
        dist.barrier()
        cleanup_ddp()
        return "left"

    def wait() -> str:
        @on_rank(1)
        def never() -> None: ...

        on_rank(0)(int)()
        dist.barrier()
        with pytest.raises(ParallelError, match=r"Rank 1 has left, and rank 0 waits for it in .*never\(\)"):
            never()
        return "told"

    with launched(2) as ranks:
        import cloudpickle

        for connection, fn in zip(ranks._connections, (wait, leave), strict=True):
            connection.send_bytes(cloudpickle.dumps((fn, ())))
        assert [ranks._answer(rank) for rank in range(2)] == [(True, "told"), (True, "left")]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["done", "failed"])
def test_the_store_outlives_its_last_reader(tmp_path: Path, ends: str) -> None:
    """Rank 0 runs far ahead and ends; a rank that lags by seconds still learns the outcomes of all its calls."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
from nn_parallel import initialize_ddp, on_rank
rank = initialize_ddp(timeout=30).rank
@on_rank(0)
def work(i):
    if i == 99 and sys.argv[1] == "failed": raise OSError("disk full")
if rank == 1:
    sys.stdin.read()  # until the test has seen rank 0 arrive at its end
try:
    for i in range(100): work(i)
    print("done", flush=True)
except* OSError: print("failed", flush=True)
"""
    )
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(script), ends]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(r)}, **pipes) for r in range(2)]  # type: ignore[call-overload]
    assert ranks[0].stdout.readline() == f"{ends}\n"
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[0].wait(timeout=3)  # it lingers
    assert ranks[1].communicate("", timeout=30)[0] == f"{ends}\n"
    ranks[0].communicate(timeout=30)
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_import_starts_nothing() -> None:
    """Importing the package starts no process, thread, or accelerator, and imports no NVML."""
    code = (
        "import json, os, sys, threading, torch\n"
        "sys.modules.pop('pynvml', None)  # torch itself looks whether it is there\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import nn_parallel\n"
        "print(json.dumps([len(os.listdir('/proc/self/task')) - before, threading.active_count(),"
        " open(f'/proc/self/task/{os.getpid()}/children').read(), torch.cuda.is_initialized(),"
        " 'pynvml' in sys.modules]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(printed.stdout) == [0, 1, "", False, False]
    assert printed.stderr == ""


@pytest.mark.slow
def test_launched_ranks_need_nothing_of_python_that_only_linux_has(tmp_path: Path) -> None:
    """They start, learn of results and failures, and save, where such names are missing: a stand-in for macOS."""
    (tmp_path / "sitecustomize.py").write_text(ONLY_LINUX)

    def scenario() -> Any:
        world = initialize_ddp()
        for epoch, asynchronous in enumerate((False, True)):
            save_checkpoint(tmp_path / "last.pt", asynchronous=asynchronous, epoch=epoch)
            assert load_checkpoint(tmp_path / "last.pt") == {"epoch": epoch}

        @on_rank(0, broadcast=True)
        def where() -> int:
            return current_world().rank

        @on_rank([0, 1])
        def fails() -> None:
            if current_world().rank == 1:
                raise ValueError("no")
            dist.barrier()

        try:
            fails()
        except RankError as error:
            told = repr(error.failures)
        return where(), told, world.world_size

    with launched(2, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])) as ranks:
        assert ranks.run(lambda: hasattr(os, "eventfd")) == [False, False]
        assert ranks.run(scenario) == [(0, "{1: ValueError('no')}", 2)] * 2


@pytest.mark.slow
def test_a_fork_of_a_rank_takes_nothing_from_it() -> None:
    """What a child does when it ends leaves the rank's connections, group and place alone; it is alone itself."""

    def scenario() -> tuple[float, bool]:
        rank, total = initialize_ddp().rank, torch.ones(1)
        dist.all_reduce(total)  # connects the ranks
        if (child := os.fork()) == 0:
            alone = on_rank(1 - rank)(lambda: "ran")() == "ran" and current_world().rank == rank
            atexit._run_exitfuncs()
            os._exit(0 if alone else 1)
        _, status = os.waitpid(child, 0)
        dist.all_reduce(total)
        return total.item(), on_rank(0, broadcast=True)(lambda: status == 0)()

    with launched(2) as two:
        assert two.run(scenario) == [(4.0, True)] * 2
