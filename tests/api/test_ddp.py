"""`initialize_ddp` and its company: the same world however it was started, or an error that says what to set."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging.handlers
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nn_parallel import (
    LaunchError,
    ParallelError,
    ParallelExecutor,
    RankError,
    WorkerDiedError,
    World,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    on_rank,
    prepare_model,
    should_use_distributed,
)
from nn_parallel._engine.ranks import nccl
from nn_parallel._engine.ranks.environment import detect_launch
from nn_parallel._engine.ranks.group import Group
from nn_parallel._engine.ranks.rendezvous import join_launch
from tests.support.ranks import AT_ONCE_S, AnyRanks, free_port, launched

CPU = torch.device("cpu")
ONLY_LINUX = """
import os, select, signal, socket
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


def test_a_failed_block_on_a_group_of_other_code() -> None:
    """The block closes the group that other code has made: the ranks still know each other, and make a new one."""

    def scenario(port: int) -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        with pytest.raises(RankError, match="ValueError: closes"), ParallelExecutor():
            if rank == 1:
                raise ValueError("closes")
            dist.barrier()
        known = current_world()
        ran = on_rank(0)(os.getpid)()
        world, total = initialize_ddp(), torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return known, known.launcher, ran is not None, world.distributed, total.item(), current_world().launcher

    with launched(2) as ranks:
        answers = ranks.run(scenario, free_port())
    for rank, answer in enumerate(answers):
        assert answer == ((False, rank, rank, 2, CPU), "external", rank == 0, True, 2.0, "env")


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


def test_another_code_s_process_group_is_a_world_too() -> None:
    """Where other code has called init_process_group, decorators work over it, failures included."""
    port = free_port()

    def scenario() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        assert initialize_ddp() == current_world()

        @on_rank(0, broadcast=True)
        def number() -> int:
            return 7

        @on_rank(1)
        def fail() -> None:
            raise ValueError("over there")

        with pytest.raises(RankError, match="rank 1 of 2: ValueError: over there"):
            fail()
        cleanup_ddp()  # not ours: left alone
        total = torch.ones(1)
        dist.all_reduce(total)
        return tuple(current_world())[:4], current_world().launcher, number(), total.item()

    with launched(2) as ranks:
        assert ranks.run(scenario) == [((True, rank, rank, 2), "external", 7, 2.0) for rank in range(2)]


@pytest.mark.parametrize("gpus", [2, 3])
def test_ranks_that_share_a_gpu_talk_by_gloo(gpus: int) -> None:
    """NCCL would refuse it: rank 0 says so, in one line. With a GPU for each rank they talk by NCCL.

    The GPUs are made up, behind `hardware_id`: this machine may have none. The choice is made before torch is asked.
    """

    def body() -> tuple[str, str]:
        rank = int(os.environ["RANK"])
        context = join_launch(detect_launch(os.environ), None, timedelta(seconds=20))
        group = Group(context.world._replace(device=torch.device("cuda", rank)), None)
        with (
            mock.patch("nn_parallel._engine.ranks.group.hardware_id", return_value=f"0000:00:0{rank % gpus}"),
            mock.patch("torch.distributed.init_process_group", side_effect=ValueError("no GPU")) as init,
            mock.patch("nn_parallel._engine.ranks.group.logger.warning") as warn,
            contextlib.suppress(ValueError),
        ):
            group.make(context.store, None, timedelta(seconds=20))
        settings = {name: os.environ.get(name) for name in nccl.SETTINGS}
        group.release()
        context.leave()
        assert settings == nccl.SETTINGS
        assert not nccl.SETTINGS.keys() & os.environ.keys()
        return init.call_args.args[0], str(warn.call_args and warn.call_args.args[1])

    with launched(3) as ranks:
        (backend, told), *others = ranks.run(body)
        assert others == [(backend, "None")] * 2
        if gpus == 2:
            assert (backend, told) == ("gloo", "Ranks 0 and 2 share the accelerator at 0000:00:00")
        else:
            assert (backend, told) == ("cpu:gloo,cuda:nccl", "None")


def test_a_rank_without_a_device_is_told_to_all() -> None:
    """On one node there are too few GPUs: the ranks on the others do not wait for that rank until their timeout."""

    def body() -> str:
        found = [torch.device("cuda", 0), torch.device("cuda", 1)] if os.environ["RANK"] == "1" else []
        with (
            mock.patch("nn_parallel._engine.devices.accelerators", return_value=found),
            pytest.raises(LaunchError) as caught,
        ):
            initialize_ddp()
        return str(caught.value)

    with launched(3) as ranks:
        told = ranks.run(body)
        assert told == [told[0]] * 3
        assert told[0].startswith(
            "Rank 1 has no device: 3 ranks run on this node and the accelerators are cuda:0 to cuda:1: start at most 2 "
            "ranks per node, or pass device= to share one on purpose."
        )


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


@pytest.mark.slow
def test_a_port_in_use_is_named() -> None:
    """Rank 0 cannot listen where somebody else does: the error names the address, at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: Address already in use. Set MASTER_PORT"):
            initialize_ddp(timeout=5, rank=0, world_size=2, master_addr="localhost", master_port=port)


@pytest.mark.slow
def test_rank_0_never_comes() -> None:
    """A rank that finds nobody at the master address says so within its timeout."""
    port, start = free_port(), time.monotonic()
    with pytest.raises(LaunchError, match=f"Rank 1 of 2 found no store at 127.0.0.1:{port} within 1 s. Rank 0"):
        initialize_ddp(timeout=1, rank=1, world_size=2, master_addr="localhost", master_port=port)
    assert time.monotonic() - start < 10


def test_a_program_that_is_no_store_is_not_waited_for() -> None:
    """It has the port, accepts every connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(LaunchError, match=f"found no store at 127.0.0.1:{port} within 1 s"):
            initialize_ddp(1, rank=1, world_size=2, master_addr="127.0.0.1", master_port=port)
        assert time.monotonic() - began < 1 + AT_ONCE_S


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "not answered"])
def test_ctrl_c_ends_the_wait_for_rank_0(refuses: bool) -> None:
    """A rank that waits until rank 0 listens soon raises KeyboardInterrupt, and leaves no socket to the collector."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        port = free_port() if refuses else full.getsockname()[1]  # whose queue is full: no other one is answered
        timer, start = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)), time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            initialize_ddp(timeout=20, rank=1, world_size=2, master_addr="localhost", master_port=port)
        timer.join()
        assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    """The ranks that did come name those that did not."""
    with pytest.raises(LaunchError, match="Ranks 1, 2 of 3 did not come to 127.0.0.1:"):
        initialize_ddp(timeout=0.5, rank=0, world_size=3, master_addr="localhost", master_port=free_port())


@pytest.mark.slow
def test_a_rank_of_a_job_of_another_size_is_nobody_of_this_one() -> None:
    """It waits in vain, and the ranks that are there go on."""
    port = free_port()
    with launched(2, MASTER_PORT=str(port)) as ranks:
        assert ranks.run(lambda: initialize_ddp().rank) == [0, 1]
        with pytest.raises(LaunchError, match="Ranks 0, 2 of 3 did not come"):
            initialize_ddp(timeout=0.5, rank=1, world_size=3, master_addr="localhost", master_port=port)
        assert ranks.run(lambda: on_rank(1, broadcast=True)(lambda: initialize_ddp().rank)()) == [1, 1]


@pytest.mark.slow
def test_a_second_job_at_the_same_address_is_refused() -> None:
    """The ranks that come to one that is complete are refused; who is there is told that they came."""
    port = str(free_port())
    with launched(2, MASTER_PORT=port) as first, launched(2, MASTER_PORT=port) as second:
        assert first.run(lambda: initialize_ddp(timeout=20).rank) == [0, 1]

        def listen() -> None:
            logging.getLogger("nn_parallel").addHandler(logging.handlers.BufferingHandler(1000))

        first.run(listen, only=[0])

        def join() -> str:
            with pytest.raises(LaunchError) as raised:
                initialize_ddp(timeout=20)
            return str(raised.value)

        assert "Rank 0 cannot listen" in second.run(join, only=[0])[0]
        assert "There are two ranks 1 at 127.0.0.1" in second.run(join, only=[1])[0]

        def heard() -> list[str]:
            [handler], deadline = logging.getLogger("nn_parallel").handlers, time.monotonic() + 5
            assert isinstance(handler, logging.handlers.BufferingHandler)
            while not handler.buffer and time.monotonic() < deadline:
                time.sleep(0.05)  # between two looks
            return [record.getMessage() for record in handler.buffer]

        [told] = first.run(heard, only=[0])[0]
        assert "came as a second rank 1: another job uses the same MASTER_PORT" in told


def test_should_use_distributed(any_ranks: AnyRanks) -> None:
    """None: what the environment says; False: no; True: if possible, with a warning where it is not."""
    assert should_use_distributed() is False
    assert should_use_distributed(False) is False
    with pytest.warns(UserWarning, match="start it with torchrun"):
        assert should_use_distributed(True) is False
    answers = any_ranks.run(lambda: [should_use_distributed(flag) for flag in (None, False, True)])
    assert all(answer == [True, False, True] for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_gave_up_meets_the_late_one_when_it_tries_again(tmp_path: Path, joined: bool) -> None:
    """Both when it joins the others and when it makes a group with them."""

    def scenario() -> int:
        has_given_up = tmp_path / "has given up"
        if joined:
            initialize_ddp()
            with pytest.raises(RankError), ParallelExecutor():
                raise ValueError
        if os.environ["RANK"] == "0":
            with pytest.raises(LaunchError, match="Rank 1 of 2 did not come to .* within 1 s"):
                initialize_ddp(timeout=1)
            has_given_up.touch()
        while not has_given_up.exists():
            time.sleep(0.001)
        initialize_ddp(timeout=20)
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total)

    with launched(2) as ranks:
        assert ranks.run(scenario) == [2, 2]


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
        with pytest.raises(ParallelError, match=r"Rank 1 has left after 1 calls.*never\(\)"):
            never()
        return "told"

    with launched(2) as ranks:
        import cloudpickle

        for connection, fn in zip(ranks._connections, (wait, leave), strict=True):
            connection.send_bytes(cloudpickle.dumps((fn, ())))
        assert [ranks._answer(rank) for rank in range(2)] == [(True, "told"), (True, "left")]


@pytest.mark.slow
def test_the_store_outlives_its_last_reader(tmp_path: Path) -> None:
    """Rank 0 runs far ahead and ends; a rank that lags still learns the outcomes of all its calls."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys, time
from nn_parallel import initialize_ddp, on_rank
rank = initialize_ddp(timeout=30).rank
@on_rank(0)
def work(): pass
if rank == 1:
    sys.stdin.read()  # until the test has seen rank 0 arrive at its end
for _ in range(100):
    work()
print("done", flush=True)
"""
    )
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(r)}, **pipes) for r in range(2)]  # type: ignore[call-overload]
    assert ranks[0].stdout.readline() == "done\n"
    assert ranks[0].poll() is None  # it lingers
    assert ranks[1].communicate("", timeout=30)[0] == "done\n"
    ranks[0].communicate(timeout=30)
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": socket.gethostname(), "GROUP_WORLD_SIZE": "1"}])
def test_groups_of_one_node_listen_on_the_loopback_only(environ: dict[str, str]) -> None:
    """The store and gloo of ranks on one node, whatever its name: no socket of ours listens outside the loopback."""

    def scenario() -> list[str]:
        initialize_ddp()
        return _listening_addresses()

    with launched(2, **environ) as ranks:
        for addresses in ranks.run(scenario):
            assert addresses
            assert all(address in ("0100007F", "0000000000000000FFFF00000100007F") for address in addresses)


def _listening_addresses() -> list[str]:
    """The local addresses, as the kernel writes them, on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


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


def test_the_world_reads_as_one() -> None:
    """World is a tuple of five with properties, and survives copy and pickle."""
    import copy
    import pickle

    world = World(True, 3, 1, 4, CPU, node_rank=1, local_world_size=2, launcher="torchrun")
    for other in (copy.copy(world), pickle.loads(pickle.dumps(world))):
        assert other == world
        assert (other.node_rank, other.local_world_size, other.launcher) == (1, 2, "torchrun")
    assert not world.is_main


def test_launched_ranks_need_nothing_of_python_that_only_linux_has(tmp_path: Path) -> None:
    """They start, and learn of results and failures, where such names are missing: a stand-in for macOS."""
    (tmp_path / "sitecustomize.py").write_text(ONLY_LINUX)

    def scenario() -> Any:
        world = initialize_ddp()

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
