"""Starting a pool, calling it, and sending tensors through it."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import torch

from nn_parallel import ParallelExecutor

from .harness import Figure, measure, seconds_of

# A program that has imported torch, and prints the seconds from there to the first result of a pool.
FIRST_RESULT = """
import time
from nn_parallel import ParallelExecutor
start = time.perf_counter()
with ParallelExecutor(num_workers=8, devices="cpu") as ex:
    ex.run(int)
    print(time.perf_counter() - start)
"""


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures of the pool, one after another."""

    def python(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout

    def import_torch() -> None:
        python("import torch")

    started, imported = [], []
    for _ in range(repetitions):
        imported.append(seconds_of(import_torch))
        started.append(float(python(FIRST_RESULT)))
    yield Figure("start 8 CPU workers, to first result", "import torch", 1.5, started, imported)

    def pool_of_8() -> None:
        with ParallelExecutor(num_workers=8, devices="cpu") as pool:
            pool.run(int)

    pool_of_8()
    yield measure("a second pool of 8", pool_of_8, "import torch", import_torch, goal=0.06, repetitions=repetitions)

    with ParallelExecutor(num_workers=2, devices="cpu") as pool, _raw_pipes(2) as round_trip:
        pool.run(int)
        yield measure(
            "warm run(fn) on 2 workers",
            lambda: pool.run(_one),
            "raw round trip to 2",
            round_trip,
            goal=2,
            repetitions=repetitions,
            calls=300,
        )
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as reference:
            list(reference.map(_one_of, range(4)))
            yield measure(
                "1 000 small tasks by map",
                lambda: list(pool.map(_one_of, range(1000))),
                "ProcessPoolExecutor.map",
                lambda: list(reference.map(_one_of, range(1000))),
                goal=0.5,
                repetitions=repetitions,
            )
        big = torch.ones(16 << 20)
        yield measure(
            "64 MiB to 2 workers", lambda: pool.run(_size, big), "clone()", big.clone, goal=0.8, repetitions=repetitions
        )
        yield measure(
            "64 MiB back from one",
            lambda: pool.submit(_ones, 16 << 20).result(),
            "clone()",
            big.clone,
            goal=1.2,
            repetitions=repetitions,
        )


def _one() -> int:
    return 1


def _one_of(_: int) -> int:
    return 1


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel()


def _ones(count: int) -> torch.Tensor:
    return torch.ones(count)


class _raw_pipes:
    """The floor: processes that send back what they are sent."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> object:
        self._pairs = [socket.socketpair() for _ in range(self._count)]
        self._pids = []
        for ours, theirs in self._pairs:
            pid = os.fork()
            if pid == 0:
                ours.close()
                while message := theirs.recv(65536):
                    theirs.sendall(message)
                os._exit(0)
            theirs.close()
            self._pids.append(pid)
        sockets = [ours for ours, _ in self._pairs]
        message = b"x" * 200

        def round_trip() -> None:
            for sock in sockets:
                sock.sendall(message)
            for sock in sockets:
                sock.recv(65536)

        return round_trip

    def __exit__(self, *_: object) -> None:
        import signal

        for (ours, _), pid in zip(self._pairs, self._pids, strict=True):
            ours.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
