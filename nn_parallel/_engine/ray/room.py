"""A Ray cluster: connected to, and asked for room, where an actor for the workers of each node is started."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..._version import __version__
from ...errors import LaunchError, ParallelError, WorkerDiedError
from ..devices import count
from ..failures import rank_names, summary
from ..process_environment import user_sys_path
from ..ranks.stop_signals import SIGNALS
from .messages import Told, received
from .node import RayNode

REACHED_WITHIN_S = 10.0  # the address of a cluster
WARN_AFTER_S = 5.0  # of waiting for room
STARTED_WITHIN_S = 60.0  # once there is room: torch may come from afar
LOOKS_EACH_S = 0.5
CALLS_BESIDE = 8  # that a node serves beside one for each worker
logger = logging.getLogger("nn_parallel")


class Wanted(NamedTuple):
    """What workers are to have."""

    resources: Mapping[str, float]  # each, of Ray's
    placement: str  # "pack" or "spread"
    within_s: float  # how long to wait for that
    prefix_output: bool

    def of(self, workers: int) -> str:
        """For a person to read."""
        each = " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        return f"{workers} worker{'s' * (workers > 1)} with {each}"


@dataclass(eq=False)
class Node:
    """The actor on a node, and its workers."""

    actor: Any
    ranks: list[int]
    address: str
    store_port: int  # where the ranks of all nodes meet; 0: not here
    kept: set[int] = field(default_factory=set)  # the numbers of the handles that it has got
    group: int = 1  # as it has told last
    load: int = 0  # how many of its workers have something to do: in a run, all

    def told(self, answer: Future[Any], outcome_if_gone: int) -> Told:
        """What it has answered to a call; if it is gone, that its ranks have died."""
        error = answer.exception()
        if error is None:
            pickled, *beside = answer.result()
            told: Told = received(pickled, beside)
            return told
        if isinstance(error, ray.exceptions.RayTaskError):  # there is no room for the answer
            return Told({}, ParallelError(f"The node {self.address} cannot answer: {error}"))
        where, reason = f"The node {self.address} with {rank_names(self.ranks)}", " ".join(str(error).split())
        gone = f"{where} is gone, says Ray: {reason}"
        died = {rank: (outcome_if_gone, WorkerDiedError(gone, rank=rank)) for rank in self.ranks}
        return Told(died, can_go_on=False)


def connect() -> None:
    """Connect to the cluster at ``RAY_ADDRESS``, to one that runs on this machine, or else to one that starts here.

    Raises:
        LaunchError: it cannot be reached, or is of another version.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        where = urlsplit(address if "//" in address else f"//{address}")
        if where.hostname and where.port:  # Ray itself tries for some minutes
            socket.create_connection((where.hostname, where.port), REACHED_WITHIN_S).close()
        with _own_handlers():
            ray.init()
    except (OSError, RuntimeError, ValueError) as error:
        at = f" at RAY_ADDRESS={address}" if address else ""
        raise LaunchError(f"There is no Ray cluster to be used{at}: {error}") from error


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """The handlers of signals that the script has set stay: Ray puts its own in their place."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler) and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def resources_for(
    num_gpus: int | None, devices: Any, num_workers: int | None, resources_per_worker: Mapping[str, float] | None
) -> tuple[dict[str, float], int]:
    """What each worker is to have, and how many there are, on the cluster that this connects to.

    Raises:
        ValueError: ``devices`` names others than the CPU. TypeError: a count is no integer. LaunchError: as `connect`.
    """
    if devices is not None and str(devices) != "cpu":
        raise ValueError(f'devices={devices!r}: with engine="ray" Ray chooses them. Leave it out, or say "cpu".')
    num_gpus = None if num_gpus is None else count("num_gpus", num_gpus)
    num_workers = None if num_workers is None else count("num_workers", num_workers)
    connect()
    there = ray.cluster_resources()
    on_gpus = devices is None and (num_gpus is not None or there.get("GPU", 0) > 0)
    wanted = ({"CPU": 1, "GPU": 1} if on_gpus else {"CPU": 1}) | dict(resources_per_worker or {})
    resources = {name: amount for name, amount in wanted.items() if amount}
    return resources, num_workers or num_gpus or int(there.get("GPU" if on_gpus else "CPU", 1))


class Room:
    """What Ray sets aside for so many workers: a placement group, with a bundle for each."""

    def __init__(self, workers: int, wanted: Wanted) -> None:
        """Ask for it."""
        self.workers, self._wanted = workers, wanted
        self._group = placement_group([dict(wanted.resources)] * workers, strategy=wanted.placement.upper())
        self._bundles: list[int] = []  # by rank, those of a node together
        self.is_wanted = True

    def start(self, ranks: Sequence[int], initialize: tuple[Any, ...]) -> list[Node]:
        """Wait for it; a node for some of ``ranks`` wherever Ray has room for them now.

        ``initialize``: the message with the initializer, if there is one.

        Raises:
            ParallelError: there is no room in time, or this was given back, or a node is not fit.
        """
        self._wait()
        within_s = max(self._wanted.within_s, STARTED_WITHIN_S)
        try:
            return self._start(ranks, initialize, time.monotonic() + within_s)
        except ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), ParallelError):
                raise cause from None
            is_late = isinstance(error, ray.exceptions.GetTimeoutError)
            why = f"nothing was heard of them for {within_s:g} s" if is_late else summary(error)
            told = f"Ray has not started {self._wanted.of(len(ranks))}: {why}; {_what_there_is()}."
            raise ParallelError(told) from error

    def give_back(self) -> None:
        """It is not wanted any more: this ends what runs in it, and any `start`."""
        if self.is_wanted and ray.is_initialized():
            remove_placement_group(self._group)
        self.is_wanted = False

    def _wait(self) -> None:
        began, wanted = time.monotonic(), self._wanted
        warn_at = began + WARN_AFTER_S
        while not self._group.wait(LOOKS_EACH_S):
            self._raise_if_unwanted()
            if time.monotonic() > began + wanted.within_s:
                state = placement_group_table(self._group)["stats"]["scheduling_state"]
                raise LaunchError(
                    f"Ray found no room for {wanted.of(self.workers)} within {wanted.within_s:g} s ({state}): "
                    f"{_what_there_is()}."
                )
            if time.monotonic() > warn_at:
                warn_at = math.inf
                logger.warning("Waiting for Ray to find room for %s: %s.", wanted.of(self.workers), _what_there_is())
        if not self._bundles:
            nodes = placement_group_table(self._group)["bundles_to_node_id"]
            first = {node: bundle for bundle, node in sorted(nodes.items(), reverse=True)}
            self._bundles = sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))

    def _start(self, ranks: Sequence[int], initialize: tuple[Any, ...], deadline: float) -> list[Node]:
        def where() -> tuple[str, str]:  # travels by value: what runs it need not import this package
            import ray

            return ray.get_runtime_context().get_node_id(), ",".join(map(str, ray.get_gpu_ids()))

        wanted, places = self._wanted, dict[str, dict[int, str]]()
        asked = [ray.remote(where).options(**self._options(rank)).remote() for rank in ranks]
        for rank, (node, gpu) in zip(ranks, self._told(asked, deadline), strict=True):
            places.setdefault(node, {})[rank] = gpu
        cores, actors, started = max(1, int(wanted.resources.get("CPU", 1))), list[Any](), []
        for place in places.values():
            here, gpus = list(place), [gpu for gpu in place.values() if gpu]
            options = self._options(here[0]) | {"max_concurrency": len(here) + CALLS_BESIDE}
            actors.append(ray.remote(RayNode).options(**options).remote(__version__))
            like_this = wanted.prefix_output, os.getcwd(), user_sys_path(), sys.argv
            has_store = here[0] == 0 and len(here) < self.workers
            started.append(actors[-1].start.remote(here, has_store, gpus, cores, *like_this, *initialize))
        try:
            told = self._told(started, deadline)
        except BaseException:
            for actor in actors:  # it has the room that the next attempt needs
                ray.kill(actor)
            raise
        return [
            Node(actor, list(place), *where) for actor, place, where in zip(actors, places.values(), told, strict=True)
        ]

    def _told(self, asked: list[Any], deadline: float) -> list[Any]:
        """What is told, in time, and before this room is given back."""
        missing = asked
        while missing and time.monotonic() < deadline:
            self._raise_if_unwanted()
            _, missing = ray.wait(asked, num_returns=len(asked), timeout=LOOKS_EACH_S)
        told: list[Any] = ray.get(asked, timeout=0)
        return told

    def _raise_if_unwanted(self) -> None:
        if not (self.is_wanted and ray.is_initialized()):  # what is asked next would start Ray again
            raise LaunchError("Nobody waits for the workers any more.")

    def _options(self, rank: int) -> dict[str, Any]:
        """Ray's, for what is to have the room of a rank."""
        resources = dict(self._wanted.resources)
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, self._bundles[rank]),
        }


def _what_there_is() -> str:
    def told(resources: Mapping[str, float]) -> str:
        names = sorted(name for name in resources if ":" not in name and "_group_" not in name and "memory" not in name)
        return ", ".join(f"{resources[name]:g} {name}" for name in names) or "nothing"

    return f"the cluster has {told(ray.cluster_resources())}, of which {told(ray.available_resources())} is free"
