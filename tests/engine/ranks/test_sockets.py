"""Which connections of this process are torch's, and which belong to somebody else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import ParallelExecutor, RankError, initialize_ddp
from nn_parallel._engine.ranks.sockets import connected_at, duplicate
from tests.support.ranks import launched


def test_what_is_no_socket_any_more_leaks_no_descriptor() -> None:
    """The number of a connection that was closed may be that of a pipe by now."""
    reading, writing = os.pipe()
    try:
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            assert duplicate(reading, os.fstat(reading).st_ino) is None
        assert connected_at({("127.0.0.1", 1)}) == {}
        assert os.listdir("/proc/self/fd") == before
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.slow
def test_connections_of_other_threads_are_left_alone() -> None:
    """Those that a thread of the script opens while a process group is made live on when it is aborted."""

    def scenario() -> Any:
        opened, is_over = list[socket.socket](), threading.Event()
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        accepted = list[socket.socket]()

        def connect() -> None:
            while not is_over.wait(0.001):
                opened.append(socket.create_connection(listener.getsockname()))
                accepted.append(listener.accept()[0])

        thread = threading.Thread(target=connect)
        thread.start()
        while not opened:
            pass
        rank = initialize_ddp().rank
        is_over.set()
        thread.join()
        with pytest.raises(RankError), ParallelExecutor():
            if rank == 1:
                raise ValueError
            dist.all_reduce(torch.ones(1))
        alive = 0
        with contextlib.closing(listener):
            for one, other in zip(opened, accepted, strict=True):
                with one, other, contextlib.suppress(OSError):
                    one.sendall(b"?")
                    alive += other.recv(1) == b"?"
        return alive, len(opened)

    with launched(2) as ranks:
        for alive, opened in ranks.run(scenario):
            assert alive == opened > 0
