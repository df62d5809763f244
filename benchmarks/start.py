"""Starting a pool, and what an idle one occupies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nn_parallel import ParallelExecutor
from nn_parallel._engine.pool import forkserver_client

from .harness import Figure, python, seconds_of, waiting
from .peers import STARTS, has

# A program that has imported torch, and prints the seconds from there to the first result of a pool.
FIRST_RESULT = """
import time
from nn_parallel import ParallelExecutor
start = time.perf_counter()
with ParallelExecutor(num_workers=8, devices="cpu") as ex:
    ex.run(int)
    print(time.perf_counter() - start)
"""
IMPORT_TIME = """
import time, torch
start = time.perf_counter()
import nn_parallel
print(time.perf_counter() - start)
"""
# Programs that print the ids of their processes, and then wait.
ONE_PYTHON = """
import os, torch
print(os.getpid(), flush=True)
input()
"""
EIGHT_FORKS = """
import gc, os, pickle, socket
import torch
gc.collect()
gc.freeze()
sockets, pids = [], [os.getpid()]
for _ in range(8):
    ours, theirs = socket.socketpair()
    sockets.append(ours)
    pids.append(os.fork())
    if not pids[-1]:
        for sock in sockets:
            sock.close()
        while message := theirs.recv(4096):
            theirs.sendall(pickle.dumps(pickle.loads(message)()))
        os._exit(0)
    theirs.close()
for sock in sockets:
    sock.sendall(pickle.dumps(os.getpid))
    sock.recv(4096)
print(*pids, flush=True)
input()
"""


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""

    def pool_of_8() -> None:
        with ParallelExecutor(num_workers=8, devices="cpu") as pool:
            pool.run(int)

    imported, started, again = [], [], []
    peers = {peer: list[float]() for peer in STARTS if repetitions > 2 and has(peer.partition(".")[0])}
    pool_of_8()
    for repetition in range(repetitions):
        imported.append(seconds_of(lambda: python("import torch")))
        started.append(float(python(FIRST_RESULT)))
        again.append(seconds_of(pool_of_8))
        if repetition < 3:
            for peer, theirs in peers.items():
                theirs.append(float(python(STARTS[peer])))
    name = "start 8 CPU workers, torch being imported, to a result"
    yield Figure(name, started, 1.3, "import torch", imported)
    yield Figure("a second pool of 8", again, 0.06, "import torch", imported)
    for peer, theirs in peers.items():
        yield Figure(name, started[:3], None, f"{peer}, to its end", theirs)
    to_import = [float(python(IMPORT_TIME)) for _ in range(repetitions)]
    yield Figure("import nn_parallel, torch being imported", to_import, 0.04)

    occupied, by_one, by_a_second, by_forks = [], [], [], []
    for _ in range(min(repetitions // 2, 3)):
        forkserver_client.stop_fork_server()  # each shares libraries with this process, and not with the others
        with waiting(ONE_PYTHON) as pids:
            by_one.append(_mib(pids, "Rss"))  # as long as nobody shares anything with it, that is its PSS
            by_a_second.append(_mib(pids, "Pss"))
        with waiting(EIGHT_FORKS) as pids:
            by_forks.append(_mib(pids, "Pss"))
        with ParallelExecutor(num_workers=8, devices="cpu") as pool:
            occupied.append(_mib([*pool.run(os.getpid), forkserver_client.fork_server_pid()], "Pss"))
    name = "memory of 8 idle workers and their server (PSS)"
    yield Figure(name, occupied, 1.0, "one python with torch, alone (RSS)", by_one, unit="MiB")
    yield Figure(name, occupied, None, "a second python with torch (PSS)", by_a_second, unit="MiB")
    yield Figure(name, occupied, None, "that and 8 bare forks that unpickle and call", by_forks, unit="MiB")


def _mib(pids: Iterable[Any], what: str) -> float:
    texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(text.partition(f"{what}:")[2].split()[0]) for text in texts) / 1024
