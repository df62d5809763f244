"""A Ray cluster, as the place where the workers of a pool run: connected to, and asked for room.

The room is a placement group of Ray with a bundle of resources for each worker: Ray reserves all of them at once, and
finds room for a bundle elsewhere when its node is gone. The workers of a node have successive ranks.

Ray's own calls that are made here, in the thread of the pool, ask its head node for something and return within
milliseconds. What takes longer, such as to find room, is looked at now and again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...errors import LaunchError, ParallelError
from ..by_value.packer import Packer
from ..devices import count
from ..pool.event_loop import EventLoop
from ..pool.forkserver_client import close_pools
from ..pool.messages import Ranks
from ..process_environment import user_sys_path, working_directory
from ..ranks.stop_signals import SIGNALS, pass_on_to
from .worker import ActorSetup, Orders, RayWorker, Sent, WorkerActor, raise_if_shut_down

if TYPE_CHECKING:
    from ..pool.protocols import WorkerEvents

REACHED_WITHIN_S = 10.0  # the address of a cluster
WARN_AFTER_S = 5.0  # of waiting for room
STARTED_WITHIN_S = 60.0  # once there is room: torch may come from afar
LOOKS_EACH_S = 0.5
FIRST_LOOK_S = 0.01  # for the room of a resized pool; each further look comes after twice as long
OTHER_CALLS = 100  # that the actor of the orders serves beside those of the workers
logger = logging.getLogger("nn_parallel")


class Wanted(NamedTuple):
    """The resources that workers are to have."""

    resources: Mapping[str, float]  # each, of Ray's
    placement: str  # "pack" or "spread"
    within_s: float  # how long to wait for that
    prefix_output: bool

    def describe(self, workers: int) -> str:
        """Return so many workers and their resources, for a person to read."""
        each_has = " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        return f"{workers} worker{'s' * (workers > 1)} with {each_has}"


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
    """Keep the handlers of signals that the script has set: Ray puts its own in their place."""
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
    """Return what each worker is to have, and how many there are, on the cluster that this connects to.

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
    """The placement group that Ray reserves for so many workers, with a bundle for each."""

    def __init__(self, workers: int, wanted: Wanted) -> None:
        """Ask for it."""
        self.workers: set[RayWorker] = set()  # that are in the room, or wait for it
        self.orders: Any = None  # the actor, once there is room
        self._size = workers
        self._wanted = wanted
        self._group = placement_group([dict(wanted.resources)] * workers, strategy=wanted.placement.upper())
        self._bundles: list[int] = []  # by rank, those of a node together
        self._has_warned = False

    @property
    def is_there(self) -> bool:
        """True once Ray has found the room."""
        return bool(self._bundles)

    def look(self) -> bool:
        """Return whether Ray has found the room, and does not search for a part of it again."""
        table = placement_group_table(self._group)
        is_whole: bool = table["state"] == "CREATED"
        if is_whole and not self._bundles:
            nodes = table["bundles_to_node_id"]
            first = {node: bundle for bundle, node in sorted(nodes.items(), reverse=True)}
            self._bundles = sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
        return is_whole

    def wait(self) -> None:
        """Wait until Ray has found the room.

        Raises:
            LaunchError: it has not in time.
        """
        began = time.monotonic()
        while not (self._group.wait(LOOKS_EACH_S) and self.look()):
            self.raise_if_late(began)

    def raise_if_late(self, began: float) -> None:
        """Raise `LaunchError` if room has been waited for since then for too long; warn once, some time before that."""
        waited_s = time.monotonic() - began
        wanted = self._wanted.describe(self._size)
        if waited_s > self._wanted.within_s:
            state = placement_group_table(self._group)["stats"]["scheduling_state"]
            raise LaunchError(
                f"Ray found no room for {wanted} within {self._wanted.within_s:g} s ({state}): {_what_there_is()}."
            )
        if waited_s > WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            logger.warning("Waiting for Ray to find room for %s: %s.", wanted, _what_there_is())

    def raise_if_silent(self, began: float) -> None:
        """Raise `ParallelError` if workers have been starting in the room since then for too long."""
        within_s = max(self._wanted.within_s, STARTED_WITHIN_S)
        if time.monotonic() > began + within_s:
            wanted = self._wanted.describe(self._size)
            raise ParallelError(
                f"Ray has not started {wanted}: nothing was heard of them for {within_s:g} s; {_what_there_is()}."
            )

    def start_orders(self) -> None:
        """Start the actor that passes on orders, beside rank 0. Ray starts it again if it is lost."""
        options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": self._size + OTHER_CALLS}
        self.orders = ray.remote(Orders).options(**options, scheduling_strategy=self._place(0)).remote()

    def actor_class(self, rank: int) -> Any:
        """Return the class of actors that have the resources of a worker of this rank."""
        resources = dict(self._wanted.resources)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        return ray.remote(WorkerActor).options(**options, scheduling_strategy=self._place(rank))

    def give_back(self) -> None:
        """Have Ray end what runs in the room, or the search for it."""
        if ray.is_initialized():
            if self.orders is not None:
                ray.kill(self.orders)
            remove_placement_group(self._group)

    def _place(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, self._bundles[rank])


class RaySite:
    """Workers on a Ray cluster; implements `Site`."""

    def __init__(self, workers: int, wanted: Wanted) -> None:
        """Wait until there is room for so many workers.

        Raises:
            LaunchError: there is none in time.
        """
        self._size = workers
        self._wanted = wanted
        self._workers: dict[int, RayWorker] = {}  # by rank, those that were started last
        self._looks_again_s = LOOKS_EACH_S  # for room
        self._room: Room | None = Room(workers, wanted)  # None: it was given back, as it was not found
        self._former_rooms: set[Room] = set()  # whose workers are leaving
        self._is_open = False
        try:
            self._room.wait()
        except BaseException:
            self._room.give_back()
            raise

    def devices_for(self, workers: int | None) -> list[torch.device]:
        """Return the devices of so many workers. Each worker calls the accelerator the first that Ray lets it see."""
        device = torch.device("cuda", 0) if "GPU" in self._wanted.resources else torch.device("cpu")
        return [device] * count("num_workers", self._size if workers is None else workers)

    def make_packer(self, on_forgotten: Callable[[int], None]) -> Packer:
        """As `Site.make_packer`."""
        return Packer(Sent, on_forgotten, is_elsewhere=True)

    def open(self, loop: EventLoop, events: WorkerEvents) -> None:
        """As `Site.open`."""
        self._loop = loop
        self._events = events
        self._is_open = True
        self._look_at_times()

    def start(self, rank: int, device: torch.device) -> RayWorker:
        """As `Site.start`."""
        worker = RayWorker(rank, device, self._loop, self._events, self._forget_worker)
        self._workers[rank] = worker
        if ray.is_initialized():
            if self._room is None:
                self._room = Room(self._size, self._wanted)
            self._room.workers.add(worker)
            if self._room.is_there:
                self._begin(self._room, worker)
            elif self._looks_again_s >= LOOKS_EACH_S:
                self._looks_again_s = FIRST_LOOK_S
                self._loop.call_later(self._looks_again_s, self._fill)
        return worker

    def resize(self, workers: int) -> bool:
        """As `Site.resize`: another number of workers has another room, and the workers in this one leave it."""
        if workers == self._size:
            return True
        self._size = workers
        former = self._room
        self._room = None
        if former is not None:
            self._former_rooms.add(former)
            self._give_back_unused()
        return False

    def cores_for(self, workers: int) -> int:
        """As `Site.cores_for`."""
        return max(1, int(self._wanted.resources.get("CPU", 1)))

    def ranks(self, world_size: int, group: int) -> Ranks:
        """As `Site.ranks`; the ranks ask the actor `Orders` for the address of the store."""
        names = [self._workers[rank].node for rank in range(world_size)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Ranks(world_size, group=group, nodes=[numbers[name] for name in names])

    def close(self) -> None:
        """As `Site.close`."""
        self._is_open = False
        for room in (*self._former_rooms, *([] if self._room is None else [self._room])):
            room.give_back()
        self._former_rooms.clear()
        self._room = None
        self._workers.clear()

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks. Called by the handler of a signal, too."""
        self._loop.post(self._pass_on_stop)

    def _pass_on_stop(self) -> None:
        if self._room is not None and self._room.orders is not None and ray.is_initialized():
            self._room.orders.ask_to_stop.remote()

    def _look_at_times(self) -> None:
        """See now and again whether Ray still is there, and whether workers have started in time."""
        if not self._is_open:
            return
        try:
            raise_if_shut_down()
            if self._room is not None:
                self._look_at_starts(self._room)
        except ParallelError as error:
            self._events.fail(error)
        self._loop.call_later(LOOKS_EACH_S, self._look_at_times)

    def _look_at_starts(self, room: Room) -> None:
        starting = [worker for worker in room.workers if not worker.pid]
        if not starting:
            return
        began = min(worker.asked_at for worker in starting)
        try:
            if time.monotonic() > began + min(WARN_AFTER_S, self._wanted.within_s) and not room.look():
                room.raise_if_late(began)
            room.raise_if_silent(began)
        except ParallelError as error:
            for worker in starting:
                worker.withdraw()
            if not room.workers:
                room.give_back()
                self._room = None
            self._events.no_room(starting, error)

    def _fill(self) -> None:
        """Start the workers that wait for room, if there is some now."""
        room = self._room
        self._looks_again_s = min(2 * self._looks_again_s, LOOKS_EACH_S)
        if room is None or not self._is_open or not ray.is_initialized():
            self._looks_again_s = LOOKS_EACH_S
        elif room.look():
            self._looks_again_s = LOOKS_EACH_S
            for worker in room.workers:
                if not worker.has_begun:
                    self._begin(room, worker)
        else:
            self._loop.call_later(self._looks_again_s, self._fill)

    def _begin(self, room: Room, worker: RayWorker) -> None:
        """Start the actor of a worker, in the room that there is."""
        if room.orders is None:
            room.start_orders()
            pass_on_to(self)
        setup = ActorSetup(
            rank=worker.rank,
            key=worker.key,
            has_accelerator=worker.device.type != "cpu",
            directory=working_directory(),
            path=user_sys_path(),
            argv=list(sys.argv),
            main_file=getattr(sys.modules.get("__main__"), "__file__", None),
            prefix_output=self._wanted.prefix_output,
        )
        worker.begin(room.actor_class(worker.rank), room.orders, setup)

    def _forget_worker(self, worker: RayWorker) -> None:
        """Forget a worker, which has exited."""
        for room in (self._room, *self._former_rooms):
            if room is not None:
                room.workers.discard(worker)
        self._give_back_unused()

    def _give_back_unused(self) -> None:
        for room in [room for room in self._former_rooms if not room.workers]:
            self._former_rooms.remove(room)
            room.give_back()


def _what_there_is() -> str:
    def described(resources: Mapping[str, float]) -> str:
        names = sorted(name for name in resources if ":" not in name and "_group_" not in name and "memory" not in name)
        return ", ".join(f"{resources[name]:g} {name}" for name in names) or "nothing"

    return (
        f"the cluster has {described(ray.cluster_resources())}, of which {described(ray.available_resources())} is free"
    )


atexit.register(close_pools)  # which is called before what Ray has registered as it was imported
