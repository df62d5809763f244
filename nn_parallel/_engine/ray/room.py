"""The resources of a Ray cluster on which the workers of a pool run, and the start of these workers.

In this module, the *room* of a pool means the resources that Ray reserves for all its workers, such as cores and GPUs.
A room is a placement group of Ray, which has a *bundle* of resources for each worker. Ray reserves all bundles at once.
If a node is lost, Ray reserves the bundles of this node again on other nodes. The workers of one node have successive
ranks.

The thread of the pool must not wait. So it makes only those calls to Ray's head node that return within milliseconds.
Actions that take longer, such as the reservation of a room, go on in Ray. The thread *looks* at intervals, which means
that it asks Ray whether they have ended.
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

REACHED_WITHIN_S = 10.0  # how long to try to connect to a cluster
WARN_AFTER_S = 5.0  # how long to wait before a warning that Ray has not reserved the resources yet
STARTED_WITHIN_S = 60.0  # workers get at least this time to start, because they must import torch
LOOKS_EACH_S = 0.5  # the interval at which to ask Ray whether it has reserved the resources, and whether it still runs
# The interval at which a resized pool first asks Ray whether the resources for its new size are reserved. The interval
# doubles with each further question, up to LOOKS_EACH_S.
FIRST_LOOK_S = 0.01
# Each worker always has one pending call of the actor `Orders`, with which the worker waits for its next order. Besides
# these calls, the actor serves up to OTHER_CALLS calls at once.
OTHER_CALLS = 100
logger = logging.getLogger("nn_parallel")


class Wanted(NamedTuple):
    """The options of the workers on a cluster."""

    resources: Mapping[str, float]  # the resources of Ray that each worker gets, such as ``{"CPU": 1, "GPU": 1}``
    placement: str  # the strategy of Ray: "pack" for as few nodes as possible, "spread" for as many as possible
    within_s: float  # how long to wait until Ray has reserved the resources
    prefix_output: bool  # if True, each line that a worker prints begins with its rank

    def describe(self, workers: int) -> str:
        """Return the number of workers and their resources, for messages."""
        each_has = " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        return f"{workers} worker{'s' * (workers > 1)} with {each_has}"


def connect() -> None:
    """Connect to the cluster at ``RAY_ADDRESS``, or otherwise to a cluster on this machine.

    If no cluster runs on this machine, Ray starts one.

    Raises:
        LaunchError: the cluster cannot be reached, or has another version of Ray.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        if parts.hostname and parts.port:  # tested first, because Ray would try for some minutes
            socket.create_connection((parts.hostname, parts.port), REACHED_WITHIN_S).close()
        with _own_handlers():
            ray.init()
    except (OSError, RuntimeError, ValueError) as error:
        at = f" at RAY_ADDRESS={address}" if address else ""
        raise LaunchError(f"There is no Ray cluster that can be used{at}: {error}") from error


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Restore the script's signal handlers at the end of the block, because Ray replaces them."""
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
    """Connect to the cluster, and return the resources of each worker and the number of workers.

    Raises:
        ValueError: ``devices`` names another device than the CPU, or a number is below one.
        TypeError: a number is not an integer.
        LaunchError: as `connect`.
    """
    if devices is not None and str(devices) != "cpu":
        raise ValueError(
            f'devices={devices!r} cannot be chosen with engine="ray", because Ray chooses the devices. '
            'Leave devices out, or set devices="cpu".'
        )
    num_gpus = None if num_gpus is None else count("num_gpus", num_gpus)
    num_workers = None if num_workers is None else count("num_workers", num_workers)
    connect()
    cluster = ray.cluster_resources()
    on_gpus = devices is None and (num_gpus is not None or cluster.get("GPU", 0) > 0)
    wanted = ({"CPU": 1, "GPU": 1} if on_gpus else {"CPU": 1}) | dict(resources_per_worker or {})
    resources = {name: amount for name, amount in wanted.items() if amount}
    return resources, num_workers or num_gpus or int(cluster.get("GPU" if on_gpus else "CPU", 1))


class Room:
    """The resources that Ray reserves for a number of workers: a placement group, with a bundle for each worker."""

    def __init__(self, workers: int, wanted: Wanted) -> None:
        """Ask Ray to reserve the resources, without waiting until Ray has done so.

        Args:
            workers: the number of workers.
            wanted: their resources and other options.
        """
        self.workers: set[RayWorker] = set()  # the workers that run on these resources, or that wait for them
        self.orders: Any = None  # the actor that passes orders to workers; None before `start_orders`
        self._size = workers
        self._wanted = wanted
        self._group = placement_group([dict(wanted.resources)] * workers, strategy=wanted.placement.upper())
        # The index of each rank's bundle in the placement group. Bundles on the same node follow each other. The list
        # is empty until `look` has seen that Ray has reserved all bundles.
        self._bundles: list[int] = []
        self._has_warned = False  # True once `raise_if_late` has warned of a long wait

    @property
    def is_there(self) -> bool:
        """True once `look` has seen that Ray has reserved the resources of all workers.

        It stays True if a node is lost later.
        """
        return bool(self._bundles)

    def look(self) -> bool:
        """Return whether Ray has reserved the resources of all workers.

        After the loss of a node, the answer is False until Ray has reserved resources on other nodes instead.
        """
        table = placement_group_table(self._group)
        is_whole: bool = table["state"] == "CREATED"
        if is_whole and not self._bundles:
            nodes = table["bundles_to_node_id"]
            first = {node: bundle for bundle, node in sorted(nodes.items(), reverse=True)}
            self._bundles = sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
        return is_whole

    def wait(self) -> None:
        """Wait until Ray has reserved the resources of all workers.

        Raises:
            LaunchError: Ray has not reserved the resources in time.
        """
        began = time.monotonic()
        while not (self._group.wait(LOOKS_EACH_S) and self.look()):
            self.raise_if_late(began)

    def raise_if_late(self, began: float) -> None:
        """Raise `LaunchError` if Ray has not reserved the resources in time. Warn once after `WARN_AFTER_S`.

        Args:
            began: the time at which the wait began, on the clock of `time.monotonic`.
        """
        waited_s = time.monotonic() - began
        wanted = self._wanted.describe(self._size)
        if waited_s > self._wanted.within_s:
            state = placement_group_table(self._group)["stats"]["scheduling_state"]
            raise LaunchError(
                f"Ray found no room for {wanted} within {self._wanted.within_s:g} s ({state}): {_describe_cluster()}. "
                f"Ask for less, or raise wait_for_resources."
            )
        if waited_s > WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            logger.warning("Waiting for Ray to find room for %s: %s.", wanted, _describe_cluster())

    def raise_if_silent(self, began: float) -> None:
        """Raise `ParallelError` if Ray takes too long to start workers on the reserved resources.

        Args:
            began: the time at which the pool asked for the first of these workers, on the clock of `time.monotonic`.
        """
        within_s = max(self._wanted.within_s, STARTED_WITHIN_S)
        if time.monotonic() > began + within_s:
            wanted = self._wanted.describe(self._size)
            raise ParallelError(
                f"Ray found room for {wanted}, but has not started all of them within {within_s:g} s: "
                f"{_describe_cluster()}. The logs of Ray on the nodes may say why."
            )

    def start_orders(self) -> None:
        """Start the actor `Orders`, which passes orders to workers, on the node of rank 0.

        If the actor is lost, Ray starts it again.
        """
        options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": self._size + OTHER_CALLS}
        self.orders = ray.remote(Orders).options(**options, scheduling_strategy=self._place(0)).remote()

    def actor_class(self, rank: int) -> Any:
        """Return the class with which Ray starts the actor of a rank, with its resources and in its bundle."""
        resources = dict(self._wanted.resources)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        return ray.remote(WorkerActor).options(**options, scheduling_strategy=self._place(rank))

    def give_back(self) -> None:
        """Give the resources back to Ray. Ray then kills the actors that use them, or stops trying to reserve them."""
        if ray.is_initialized():
            if self.orders is not None:
                ray.kill(self.orders)
            remove_placement_group(self._group)

    def _place(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, self._bundles[rank])


class RaySite:
    """The Ray cluster on which the workers of a pool run; implements `Site`."""

    def __init__(self, workers: int, wanted: Wanted) -> None:
        """Ask Ray to reserve the resources for the workers, and wait until Ray has done so.

        Args:
            workers: the number of workers.
            wanted: their resources and other options.

        Raises:
            LaunchError: Ray has not reserved the resources in time.
        """
        self._size = workers
        self._wanted = wanted
        self._workers: dict[int, RayWorker] = {}  # maps each rank to the worker that was started last for it
        self._looks_again_s = LOOKS_EACH_S  # the interval at which to ask whether Ray has reserved the resources
        # The resources that Ray reserves for the present workers. After a `resize`, or if Ray has not reserved them in
        # time, this is None until the next `start`.
        self._room: Room | None = Room(workers, wanted)
        # The resources reserved before a `resize`. Each `Room` is given back to Ray when all its workers have exited.
        self._former_rooms: set[Room] = set()
        # True between `open` and `close`. Only during this time, `_look_at_times` and `_fill` ask Ray at intervals
        # whether it still runs, and whether it has reserved the resources and started the workers.
        self._is_open = False
        try:
            self._room.wait()
        except BaseException:
            self._room.give_back()
            raise

    def devices_for(self, workers: int | None) -> list[torch.device]:
        """Return the devices of this number of workers. Ray shows each worker only its own accelerator, as number 0."""
        device = torch.device("cuda", 0) if "GPU" in self._wanted.resources else torch.device("cpu")
        return [device] * count("num_workers", self._size if workers is None else workers)

    def make_packer(self, on_forgotten: Callable[[int], None]) -> Packer:
        """Implement `Site.make_packer`."""
        return Packer(Sent, on_forgotten, is_elsewhere=True)

    def open(self, loop: EventLoop, events: WorkerEvents) -> None:
        """Implement `Site.open`."""
        self._loop = loop
        self._events = events
        self._is_open = True
        self._look_at_times()

    def start(self, rank: int, device: torch.device) -> RayWorker:
        """Implement `Site.start`."""
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
        """Implement `Site.resize`.

        Ray cannot change the size of a reservation (a `Room`). So if the number of workers changes, the next `start`
        asks for a new room, and the present workers must leave.
        """
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
        """Implement `Site.cores_for`."""
        return max(1, int(self._wanted.resources.get("CPU", 1)))

    def ranks(self, world_size: int, group: int) -> Ranks:
        """Implement `Site.ranks`. The ranks ask the actor `Orders` for the address of the store."""
        names = [self._workers[rank].node for rank in range(world_size)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Ranks(world_size, group=group, nodes=[numbers[name] for name in names])

    def close(self) -> None:
        """Implement `Site.close`."""
        self._is_open = False
        for room in (*self._former_rooms, *([] if self._room is None else [self._room])):
            room.give_back()
        self._former_rooms.clear()
        self._room = None
        self._workers.clear()

    def ask_to_stop(self) -> None:
        """Make `stop_requested` return True on the ranks. A signal handler may call this."""
        self._loop.post(self._pass_on_stop)

    def _pass_on_stop(self) -> None:
        if self._room is not None and self._room.orders is not None and ray.is_initialized():
            self._room.orders.ask_to_stop.remote()

    def _look_at_times(self) -> None:
        """Check at intervals that Ray still runs, and that workers have started in time."""
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
        """Give up the workers that have not started in time."""
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
        """Start the waiting workers if Ray has reserved their resources. If not, call this method again later."""
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
        """Start the actor of a worker on the resources (the `Room`) that Ray has reserved."""
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
        """Forget a worker that has exited."""
        for room in (self._room, *self._former_rooms):
            if room is not None:
                room.workers.discard(worker)
        self._give_back_unused()

    def _give_back_unused(self) -> None:
        """Give resources that were reserved before a `resize` back to Ray, if no worker is left on them."""
        for room in [room for room in self._former_rooms if not room.workers]:
            self._former_rooms.remove(room)
            room.give_back()


def _describe_cluster() -> str:
    """Return a clause for messages that says which resources the cluster has, and which of them are free."""

    def describe(resources: Mapping[str, float]) -> str:
        names = sorted(name for name in resources if ":" not in name and "_group_" not in name and "memory" not in name)
        return ", ".join(f"{resources[name]:g} {name}" for name in names) or "nothing"

    return (
        f"the cluster has {describe(ray.cluster_resources())}, of which {describe(ray.available_resources())} is free"
    )


# Ray shuts itself down in a function that it has registered with `atexit` when it was imported. A function that is
# registered later is called earlier. So pools are closed while Ray still runs.
atexit.register(close_pools)
