"""The others, each as a warm pool of workers on which a function can be called once, or mapped over items."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

MESSAGE = b"x" * 200


def has(module: str) -> bool:
    """Whether a peer is installed: ``pip install -e ".[peers]"``."""
    return importlib.util.find_spec(module) is not None


@contextlib.contextmanager
def raw_pipes(count: int) -> Iterator[Callable[[], None]]:
    """The floor: one message to each of some processes that send it back."""
    pairs = [socket.socketpair() for _ in range(count)]
    pids = []
    for ours, theirs in pairs:
        pid = os.fork()
        if pid == 0:
            ours.close()
            while message := theirs.recv(65536):
                theirs.sendall(message)
            os._exit(0)
        theirs.close()
        pids.append(pid)
    sockets = [ours for ours, _ in pairs]

    def round_trip() -> None:
        for sock in sockets:
            sock.sendall(MESSAGE)
        for sock in sockets:
            sock.recv(65536)

    try:
        yield round_trip
    finally:
        for sock, pid in zip(sockets, pids, strict=True):
            sock.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


Call = Callable[..., list[Any]]  # call(fn, *args) on every worker: its results


@contextlib.contextmanager
def process_pool(count: int) -> Iterator[tuple[Call, Any]]:
    """The standard library's; spawned, as programs that have run torch need it."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool:
        yield _once_for_each(pool, count), pool.map


@contextlib.contextmanager
def loky_pool(count: int) -> Iterator[tuple[Call, Any]]:
    import loky

    pool = loky.get_reusable_executor(max_workers=count)
    try:
        yield _once_for_each(pool, count), pool.map
    finally:
        pool.shutdown(wait=True, kill_workers=True)


def _once_for_each(pool: concurrent.futures.Executor, count: int) -> Call:
    def call(fn: Callable[..., Any], *args: Any) -> list[Any]:
        futures = [pool.submit(fn, *args) for _ in range(count)]
        return [future.result() for future in futures]

    return call


@contextlib.contextmanager
def joblib_pool(count: int) -> Iterator[tuple[Call, Any]]:
    import joblib

    with joblib.Parallel(n_jobs=count) as parallel:
        yield (
            lambda fn, *args: parallel(joblib.delayed(fn)(*args) for _ in range(count)),
            lambda fn, items: parallel(joblib.delayed(fn)(item) for item in items),
        )


@contextlib.contextmanager
def ray_actors(count: int) -> Iterator[tuple[Call, Any]]:
    import ray

    ray.init(num_cpus=count, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        actors, call = bare_actors(count)
        pool = ray.util.ActorPool(actors)
        yield call, lambda fn, items: pool.map(lambda actor, item: actor.call.remote(fn, item), items)
    finally:
        ray.shutdown()


def bare_actors(count: int, **options: Any) -> tuple[list[Any], Call]:
    """Actors on the cluster that this process is connected to, with ``options`` of Ray's, and a call on all of them."""
    import ray

    class Worker:
        def call(self, fn: Callable[..., Any], *args: Any) -> Any:
            return fn(*args)

    actors = [ray.remote(Worker).options(**options).remote() for _ in range(count)]
    return actors, lambda fn, *args: ray.get([actor.call.remote(fn, *args) for actor in actors])


POOLS = {
    "ProcessPoolExecutor": ("concurrent", process_pool),
    "loky": ("loky", loky_pool),
    "joblib": ("joblib", joblib_pool),
    "Ray actors": ("ray", ray_actors),
}


# How others start 8 processes that have nothing to do: programs that print the seconds it took them.
STARTS = {
    "torch.multiprocessing.spawn": """
import time, torch.multiprocessing as mp
start = time.perf_counter()
mp.spawn(int, nprocs=8)
print(time.perf_counter() - start)
""",
    "torchrunx": """
import contextlib, tempfile, time, torch, torchrunx
with tempfile.TemporaryDirectory() as logs, contextlib.chdir(logs):
    start = time.perf_counter()
    torchrunx.Launcher(hostnames=["localhost"], workers_per_host=8, backend="gloo").run(int)
    print(time.perf_counter() - start)
""",
}


def chosen(repetitions: int) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """The peers that can be measured here; of a quick run the standard library's alone."""
    peers = POOLS.items() if repetitions > 2 else list(POOLS.items())[:1]
    return ((name, pool) for name, (module, pool) in peers if has(module))
