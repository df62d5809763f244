"""Rank 0 holds the store: what the others hear when it is stopped, is killed and has forked, or has simply ended."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nn_parallel._engine.ranks.context
import nn_parallel._engine.ranks.store
from nn_parallel import LaunchError, ParallelExecutor, RankError, RankTimeoutError, initialize_ddp, on_rank
from nn_parallel._engine.ranks.store import clone_store
from tests.support.ranks import AT_ONCE_S, Ranks, launched

TIMEOUT_S = 3.0
STOPPED_S = 14.0  # a node may be silent for 5 s there: TCP gives up after 11


@contextlib.contextmanager
def on_nodes(count: int) -> Iterator[Ranks]:
    """Ranks that take each other for ranks on other nodes: they meet at the address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("needs an address beside the loopback")
        address = any_socket.getsockname()[0]
    with launched(count, MASTER_ADDR=address) as ranks:
        yield ranks


def raised_by(call: Callable[[], object]) -> tuple[str, str, float]:
    """What ``call`` raises, and after how long."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def wait_in_on_rank() -> tuple[str, str, float]:
    initialize_ddp()

    @on_rank(0, timeout=TIMEOUT_S)
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    return raised_by(stop)


def wait_in_a_block() -> tuple[str, str, float]:
    rank = initialize_ddp().rank

    def stop() -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    def block() -> None:
        with ParallelExecutor(timeout=TIMEOUT_S) as ex:
            ex.run(stop)

    return raised_by(block)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [wait_in_on_rank, wait_in_a_block])
def test_the_store_is_in_a_stopped_process(wait: Callable[[], tuple[str, str, float]]) -> None:
    """The timeout holds, though no request to the store is answered; and it is told why."""
    with launched(2) as ranks:
        ranks.run(initialize_ddp)
        try:
            [(kind, told, seconds)] = ranks.run(wait, only=[1], also=[0])
        finally:
            os.kill(ranks.pids[0], signal.SIGCONT)
        ranks.finish(0)
    assert kind == RankTimeoutError.__name__
    assert f"Rank 0 (pid {ranks.pids[0]}" in told
    assert "it is stopped by a signal" in told
    assert TIMEOUT_S < seconds < TIMEOUT_S + AT_ONCE_S


def be_killed_after_a_fork(victim: int) -> tuple[str, str, float]:
    """``victim`` has a child that sleeps, as the workers of a `DataLoader` may, when it is killed."""
    initialize_ddp()

    @on_rank(victim)
    def die() -> None:
        if os.fork() == 0:
            time.sleep(STOPPED_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    return raised_by(die)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_has_forked(victim: int) -> None:
    """Its child holds no connection to the store: all hear of its death at once."""
    with on_nodes(3) as ranks:
        ranks.run(initialize_ddp)
        others = [rank for rank in range(3) if rank != victim]
        for kind, told, seconds in ranks.run(be_killed_after_a_fork, victim, only=others, also=[victim]):
            assert kind == RankError.__name__
            assert f"Rank {victim}" in told
            assert seconds < AT_ONCE_S


def leave_without_a_store(wait: Callable[[], object], exits: bool, waits: Path) -> tuple[str, bool]:
    """Return what this rank raises in a block as rank 0 is killed, and whether its process group is still there."""
    rank = initialize_ddp().rank
    try:
        with ParallelExecutor():
            while rank == 0:
                if waits.exists():
                    os.kill(os.getpid(), signal.SIGKILL)
            try:
                waits.touch()
                wait()
            except BaseException:
                if exits:
                    sys.exit(3)
                raise
    except BaseException as error:
        return type(error).__name__, dist.is_initialized()
    return "", dist.is_initialized()


def all_reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "exits", "raised"),
    [
        (all_reduce_for_ever, False, "RankError"),
        (functools.partial(time.sleep, 60), False, "RankError"),
        (functools.partial(time.sleep, 60), True, "SystemExit"),  # gloo's error may be followed by an interrupt
    ],
)
def test_who_leaves_a_block_without_a_store(
    wait: Callable[[], object], exits: bool, raised: str, tmp_path: Path
) -> None:
    """The process group is closed, also if gloo is the first to see the death; a SystemExit stays one."""
    with launched(2) as ranks:
        ranks.run(initialize_ddp)
        assert ranks.run(leave_without_a_store, wait, exits, tmp_path / "waits", only=[1], also=[0]) == [
            (raised, False)
        ]


@pytest.mark.slow
def test_a_fork_leaves_the_connections_of_its_rank_as_they_are() -> None:
    """What the child lets go of is its own."""

    def work() -> float:
        initialize_ddp()
        for _ in range(3):
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return on_rank(1, broadcast=True)(tensor.item)()

    with on_nodes(2) as ranks:
        assert ranks.run(work) == [2.0, 2.0]


@pytest.mark.slow
def test_rank_0_has_ended_and_the_others_go_on() -> None:
    """A transfer between two ranks has nothing to do with rank 0, which holds the store."""

    def go_on() -> float:
        here, tensor = initialize_ddp(), torch.ones(1)
        for _ in range(2):
            if here.rank == 2:
                time.sleep(1.5)  # longer than the watchdog needs to see that the store is gone
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 2)
        return tensor.item()

    with on_nodes(3) as ranks:
        ranks.run(initialize_ddp)
        ranks.run(lambda: on_rank(0)(os.getpid)())
        assert ranks.run(lambda: os._exit(0), only=[0]) == ["gone"]
        assert ranks.run(go_on, only=[1, 2]) == [1.0, 1.0]


@pytest.mark.slow
def test_a_rank_is_stopped_within_a_transfer() -> None:
    """For longer than a node may be silent: its kernel has no room, and answers; then the transfer goes on."""

    def transfer() -> float:
        nn_parallel._engine.ranks.times.LOST_AFTER = datetime.timedelta(seconds=5)
        here, tensor, began = initialize_ddp(), torch.ones(64 << 20), time.monotonic()
        if here.rank == 1 and os.fork() == 0:
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        goes_on = torch.ones(1)
        while goes_on.item():
            dist.broadcast(tensor, 0)
            goes_on.fill_(time.monotonic() < began + STOPPED_S)
            dist.broadcast(goes_on, 1)
        return time.monotonic() - began

    with on_nodes(2) as ranks:
        assert min(ranks.run(transfer)) > STOPPED_S


def test_a_store_that_is_gone_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tries for as long as the ranks may wait for each other, and is deaf to Ctrl-C meanwhile."""
    monkeypatch.setattr(nn_parallel._engine.ranks.times, "CONNECTS_WITHIN", datetime.timedelta(seconds=1))
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, timeout=datetime.timedelta(seconds=60))
    assert clone_store(store, None)[0].timeout == store.timeout  # type: ignore[attr-defined]
    del host
    kind, told, seconds = raised_by(lambda: clone_store(store, None))
    assert (kind, told[:60]) == (LaunchError.__name__, "The store through which the ranks talk cannot be reached aga")
    assert seconds < AT_ONCE_S
    assert store.timeout == datetime.timedelta(seconds=60)
