"""Starting a pool, and what an idle one occupies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nn_parallel import ParallelExecutor
from nn_parallel.executor import servers

from .harness import Figure, python, seconds_of
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
PSS_OF_TORCH = "import torch; print(open('/proc/self/smaps_rollup').read().partition('Pss:')[2].split()[0])"


def figures(repetitions: int) -> Iterator[Figure]:
    """The figures, one after another."""

    def pool_of_8() -> None:
        with ParallelExecutor(num_workers=8, devices="cpu") as pool:
            pool.run(int)

    imported, started, again = [], [], []
    pool_of_8()
    for _ in range(repetitions):
        imported.append(seconds_of(lambda: python("import torch")))
        started.append(float(python(FIRST_RESULT)))
        again.append(seconds_of(pool_of_8))
    yield Figure("start 8 CPU workers, to the first result", started, 1.5, "import torch", imported)
    yield Figure("a second pool of 8", again, 0.06, "import torch", imported)
    for peer, program in STARTS.items():
        if repetitions > 2 and has(peer.partition(".")[0]):
            theirs = [float(python(program)) for _ in range(3)]
            yield Figure("start 8 CPU workers, to the first result", started[:3], None, peer, theirs)
    to_import = [float(python(IMPORT_TIME)) for _ in range(repetitions)]
    yield Figure("import nn_parallel, torch being imported", to_import, 0.05)

    occupied, torch_alone = [], []
    for _ in range(min(repetitions, 3)):
        servers.stop_fork_server()  # each shares libraries with this process, and not with the other
        torch_alone.append(int(python(PSS_OF_TORCH)) / 1024)
        with ParallelExecutor(num_workers=8, devices="cpu") as pool:
            pids = [*pool.run(os.getpid), servers.fork_server_pid()]
            occupied.append(sum(_pss_mib(pid) for pid in pids if pid))
    name = "memory of 8 idle workers and their server (PSS)"
    yield Figure(name, occupied, 1.0, "one python with torch", torch_alone, unit="MiB")


def _pss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("Pss:")[2].split()[0]) / 1024
