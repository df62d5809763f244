"""The worker of a pool on a Ray cluster, which is an actor of Ray.

`WorkerActor` runs in the process of the worker. `RayWorker` represents the worker in the script, for the pool.

The problem. A task must run in the main thread, because only there it can be interrupted (see `interrupts`). Ray runs
the methods of an actor in the main thread only if the actor has a single thread and no concurrency groups. But while
such an actor runs a task, it takes no other call, so it cannot be asked to cancel the task or to report its stack.

The solution. Such orders go through another actor, `Orders`, which all workers of the pool share. A second thread of
each worker asks `Orders` for the next order for this worker, and waits until there is one.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from ..._version import __version__
from ...errors import LaunchError, ParallelError, TransferError
from ..by_value.globals import forget, store_object
from ..by_value.packer import PackedCall
from ..descendants import end_with
from ..devices import accelerators
from ..failures import summary
from ..interrupts import keep_handler
from ..pickling import Packed, memory_of
from ..pool.channel import SMALL_BYTES, Received
from ..pool.event_loop import EventLoop
from ..pool.messages import HAND_BACK, STARTED, TELL_STACK, Answer, Outcome, Ranks, TaskHeader
from ..pool.pool_store import PoolStore
from ..pool.worker import INTERRUPT_EVERY_S, TaskRunner, become_script, flush_output
from ..process_environment import adopt
from ..ranks.stop_signals import ask_to_stop
from ..stack_dump import main_stack

if TYPE_CHECKING:
    from ..pool.protocols import WorkerEvents

# How long Ray may take to report the exit of a worker. Ray took 1.5 s when all processes of a node ended at once.
EXIT_TOLD_WITHIN_S = 3.0
ASK_AGAIN_AFTER_S = 0.5  # the interval at which to call the actor `Orders` again, while Ray restarts it
ORDERS_WITHIN_S = 60.0  # how long Ray may take to restart the actor `Orders`


class Parcel(NamedTuple):
    """A packed object in a message that Ray carries between the script and a worker."""

    # The pickle, the buffers and the shared memory, in this order. None if they are large, because then they are sent
    # beside the message, as a separate argument of the call of Ray.
    parts: Sequence[bytes] | None
    shared: int  # the number of parts at the end that are shared memory in the sender; the receiver gets copies of them


class Sent:
    """A packed object as the script sends it to workers.

    A large object is put into Ray's object store once, and all workers read it there.
    """

    def __init__(self, packed: Packed) -> None:
        """Copy the memory of the object, because its owner may change it later.

        Raises:
            TransferError: Ray's object store is full.
            ParallelError: Ray has been shut down.
        """
        self.parcel, large = _parcel_of(packed)
        self.reference = None  # refers to the parts of a large object in Ray's object store; None for a small object
        if large:
            raise_if_shut_down()
            try:
                self.reference = ray.put(large)
            except RayError as error:
                raise TransferError(f"A large object cannot be put into Ray's object store: {error}") from error


def raise_if_shut_down() -> None:
    """Raise `ParallelError` if Ray has been shut down. Otherwise the next call of Ray would start Ray again."""
    if not ray.is_initialized():
        raise ParallelError("Ray has been shut down.")


def _parcel_of(packed: Packed) -> tuple[Parcel, list[pickle.PickleBuffer]]:
    """Return the parcel of an object, and the list of parts to send beside it. For a small object the list is empty."""
    views = [memoryview(part) for part in (packed.pickle, *packed.buffers, *map(memory_of, packed.shared))]
    if sum(view.nbytes for view in views) <= SMALL_BYTES:
        return Parcel([bytes(view) for view in views], len(packed.shared)), []
    # Ray crashes if a buffer consists of other items than bytes. An empty buffer cannot be cast.
    parts = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
    return Parcel(None, len(packed.shared)), [pickle.PickleBuffer(part) for part in parts]


def _received(parcel: Parcel, beside: Iterable[Any]) -> Received:
    """Return the packed object of a parcel.

    The buffers of the object are copied, because Ray delivers them in memory that is read-only and shared with other
    processes.

    Args:
        parcel: the parcel.
        beside: the large objects that were sent beside the message, each as the list of its parts. If
            ``parcel.parts`` is None, the object of the parcel is the next item of ``beside``.
    """
    parts = next(iter(beside)) if parcel.parts is None else parcel.parts
    first, *buffers = parts
    copies = list(map(bytearray, buffers))
    unshared = len(copies) - parcel.shared
    return Received(bytes(first), copies[:unshared], copies[unshared:])


# Code that runs in the processes of the cluster


class Orders:
    """The actor that passes orders on to the workers, and holds the store through which their ranks communicate.

    A pool has one such actor, on the node of rank 0. If the node is lost, the ranks lose their store and fail. Ray
    starts the actor again on another node, and the ranks of the next run use the store of the new actor.
    """

    def __init__(self) -> None:
        end_with(os.getppid())  # otherwise this process may outlive its parent, Ray's process on this node
        self._store = PoolStore(ray.util.get_node_ip_address())
        self._mailboxes: dict[int, _Mailbox] = {}  # the mailbox of each worker, by its key

    def __repr__(self) -> str:
        return "nn_parallel"  # Ray prints this before each line that the actor prints

    async def order(self, key: int, number: int) -> Any:
        """Give a worker an order, and return the worker's reply.

        Args:
            key: the key of the worker.
            number: the order: `TELL_STACK`, `HAND_BACK`, or the number of the task to cancel.
        """
        return await self._mailbox(key).order(number)

    async def next(self, key: int, reply: Any) -> int:
        """Wait for the next order for a worker, and return it. ``reply`` is the worker's reply to the last order."""
        return await self._mailbox(key).next(reply)

    async def forget(self, key: int) -> None:
        """Delete the orders for a worker that has exited."""
        self._mailboxes.pop(key, None)

    async def store_address(self, group: int) -> tuple[str, int]:
        """Return host and port of the store for the ranks with this group number."""
        return self._store.address(group)

    async def ask_to_stop(self) -> None:
        """Make `stop_requested` return true on the ranks."""
        ask_to_stop("a signal to the script")

    def _mailbox(self, key: int) -> _Mailbox:
        if key not in self._mailboxes:
            self._mailboxes[key] = _Mailbox()
        return self._mailboxes[key]


class _Mailbox:
    """The orders for one worker, which follows them one after another."""

    def __init__(self) -> None:
        # The orders that the worker has not asked for yet, each with the future that gets the reply to the order.
        self._waiting = asyncio.Queue[tuple[int, asyncio.Future[Any]]]()
        self._followed: asyncio.Future[Any] | None = None  # gets the reply to the order that the worker follows now

    async def order(self, number: int) -> Any:
        """Implement `Orders.order` for this worker."""
        answered = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((number, answered))
        return await answered

    async def next(self, reply: Any) -> int:
        """Implement `Orders.next` for this worker."""
        if self._followed is not None and not self._followed.done():
            self._followed.set_result(reply)
        number, self._followed = await self._waiting.get()
        return number


class ActorSetup(NamedTuple):
    """The first message to a worker: the attributes of the script that the process of the worker needs."""

    rank: int
    key: int  # the key that identifies the worker in calls of `Orders`
    has_accelerator: bool
    directory: str
    path: list[str]
    argv: list[str]
    main_file: str | None
    prefix_output: bool


class Place(NamedTuple):
    """The process, the node and the device of a worker, which the worker reports when it has started."""

    pid: int
    host: str
    node: str  # Ray's id of the node
    device: str


class WorkerActor:
    """The process of a worker. Ray calls its methods in the main thread, one after another."""

    def __repr__(self) -> str:
        return "nn_parallel"  # Ray prints this before each line that the actor prints

    def start(self, version: str, setup: bytes, orders: Any) -> Place:
        """Prepare this process to run code of the script.

        Args:
            version: the version of this package in the script.
            setup: a pickled `ActorSetup`.
            orders: the actor `Orders`.

        Raises:
            LaunchError: this node has another version of the package, or torch does not have the accelerator that Ray
                has granted.
        """
        if version != __version__:
            versions = f"the script has {version}, {socket.gethostname()} has {__version__}"
            raise LaunchError(f"All nodes need the same version of nn_parallel: {versions}.")
        end_with(os.getppid())  # otherwise this process may outlive its parent, Ray's process on this node
        keep_handler()
        own_setup: ActorSetup = pickle.loads(setup)
        device = _device(own_setup.has_accelerator)
        adopt({}, own_setup.directory, own_setup.path, is_elsewhere=True)
        become_script(own_setup.argv, own_setup.main_file, device)
        if own_setup.prefix_output:
            prefix = f"[rank {own_setup.rank}] "
            sys.stdout = _PrefixedStream(sys.stdout, prefix)
            sys.stderr = _PrefixedStream(sys.stderr, prefix)
        self._runner = _Runner(own_setup.rank, device, own_setup.key, orders)
        threading.Thread(target=self._runner.follow_orders_of_actor, name="nn_parallel orders", daemon=True).start()
        return Place(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id(), str(device))

    def perform(self, message: bytes, *beside: Any) -> Any:
        """Store the objects that come with a task, and do the task. Return the pickled answer and its parcel.

        Args:
            message: the pickled header of the task, and the parcels of the stored objects and of the call.
            beside: large objects that are not in the message, each as the list of its parts. A large answer is
                returned beside its message, too.
        """
        header, kept, parcel = pickle.loads(message)
        arrived = iter(beside)
        for number, of_object in kept:
            store_object(number, functools.partial(_received(of_object, arrived).load, self._runner.device))
        answer, packed = self._runner.perform(header, Received(b"") if parcel is None else _received(parcel, arrived))
        flush_output()
        if packed is None:
            return pickle.dumps((answer, None))
        parcel, large = _parcel_of(packed)
        message_back = pickle.dumps((answer, parcel))
        return (message_back, large) if large else message_back

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete the stored objects of handles that were deleted."""
        for number in numbers:
            forget(number)

    def leave(self) -> None:
        """End this process."""
        flush_output()
        ray.actor.exit_actor()


class _Runner(TaskRunner):
    """The part of a worker's actor that does the tasks, and follows the orders that come through `Orders`."""

    def __init__(self, rank: int, device: torch.device, key: int, orders: Any) -> None:
        super().__init__(rank, device, dict(os.environ), self._reply_with)
        self._key = key
        self._orders = orders
        # The reply to the last order. This worker sends it to `Orders` together with the request for the next order.
        self._reply: Any = None

    def store_address(self, ranks: Ranks) -> tuple[str, int]:
        """Return the address of the store of the ranks.

        `Orders` is asked each time, because the address changes when Ray restarts `Orders`.

        Raises:
            ParallelError: `Orders` was lost, and Ray has not started it again in time.
        """
        deadline = time.monotonic() + ORDERS_WITHIN_S
        while True:
            try:
                address: tuple[str, int] = self._orders.store_address.remote(ranks.group).future().result()
            except RayError as error:
                if time.monotonic() > deadline:
                    raise ParallelError(
                        f"The actor with the store through which the ranks talk was lost, and Ray has not started it "
                        f"again within {ORDERS_WITHIN_S:g} s: {summary(error)}"
                    ) from error
                time.sleep(ASK_AGAIN_AFTER_S)
            else:
                return address

    def follow_orders_of_actor(self) -> None:
        """Follow one order after another until this process ends."""
        must_repeat = False  # True while a cancelled task still runs; it must be interrupted repeatedly
        while True:
            # `ray.get` is not used, because Ray would assume that the whole process waits and does not need its cores.
            order = self._orders.next.remote(self._key, self._reply).future()
            while must_repeat and not _is_done(order, INTERRUPT_EVERY_S):
                must_repeat = self.interrupt_cancelled()
            try:
                number = order.result()
            except RayError:
                time.sleep(ASK_AGAIN_AFTER_S)
                continue
            self._reply = None
            if number == TELL_STACK:
                self._reply = main_stack()
            elif number == HAND_BACK:
                self.hand_back()
            else:
                must_repeat = self.cancel(number)

    def _reply_with(self, answer: Answer) -> None:
        self._reply = answer


def _is_done(future: Future[Any], within_s: float) -> bool:
    try:
        future.exception(within_s)
    except TimeoutError:
        return False
    return True


def _device(has_accelerator: bool) -> torch.device:
    """Return the device of this worker: the first accelerator that Ray shows it, or the CPU."""
    if not has_accelerator:
        return torch.device("cpu")
    available = accelerators()
    if not available:
        granted = ", ".join(map(str, ray.get_gpu_ids()))
        raise LaunchError(
            f"Ray grants GPU {granted} of {socket.gethostname()}, but torch finds no accelerator there. "
            "Check the driver and the installation of torch on that node."
        )
    return available[0]


class _PrefixedStream:
    """A text stream whose lines begin with a prefix."""

    def __init__(self, stream: IO[str], prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._begins_line = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text as `io.TextIOBase.write`, with the prefix at the beginning of each line."""
        if text:
            first = self._prefix if self._begins_line else ""
            self._begins_line = text.endswith("\n")
            body = text[:-1] if self._begins_line else text
            end = "\n" if self._begins_line else ""
            self._stream.write(first + body.replace("\n", "\n" + self._prefix) + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines as `io.IOBase.writelines`, with the prefix."""
        for line in lines:
            self.write(line)


# Code that runs in the script


class RayWorker:
    """The object through which a pool uses an actor; implements `Worker`. The thread of the pool calls all methods."""

    is_stopped = False  # not known to the pool, because the process may be on another machine
    exit_told_within_s = EXIT_TOLD_WITHIN_S

    def __init__(
        self,
        rank: int,
        device: torch.device,
        loop: EventLoop,
        events: WorkerEvents,
        on_exit: Callable[[RayWorker], None],
    ) -> None:
        """Make a worker that waits for resources on the cluster. `begin` starts its actor.

        Args:
            rank: the rank of the worker.
            device: the device that the worker will probably have. Its actor reports the actual one.
            loop: the event loop of the pool.
            events: receives the answers and the exit of the worker.
            on_exit: called with this object when the worker has exited or was given up.
        """
        self.rank = rank
        self.device = device
        self.pid = 0  # it stays 0 until the actor has started
        self.node = ""  # Ray's id of the node, empty until the actor has started
        self.key = next(_keys)  # identifies the worker in calls of `Orders`
        self.asked_at = time.monotonic()  # when the worker was requested; the time limits for its start begin now
        self._host = ""
        self._loop = loop
        self._events = events
        self._on_exit = on_exit
        self._actor: Any = None
        self._orders: Any = None
        self._is_over = False
        self._kept_handles: set[int] = set()  # the numbers of the objects that the worker keeps for later tasks
        # True from the sending of the order HAND_BACK (send the results of the batch so far) until the worker's reply.
        self._hands_back = False
        # The finished future of the worker's task, if the task ends before the reply to HAND_BACK arrives. The future
        # waits here, because the reply has the earlier results and must be handled first.
        self._held: Future[Any] | None = None

    @property
    def description(self) -> str:
        """The name of the worker in error messages."""
        where = f"pid {self.pid} on {self._host}, " if self.pid else ""
        return f"Worker {self.rank} ({where}{self.device})"

    @property
    def has_begun(self) -> bool:
        """True once `begin` has started the actor. Until then, the worker waits for resources on the cluster."""
        return self._actor is not None

    def begin(self, actor_class: Any, orders: Any, setup: ActorSetup) -> None:
        """Start the actor.

        Args:
            actor_class: the class of the actor, with its resources.
            orders: the actor `Orders`.
            setup: the first message to the worker.
        """
        self._orders = orders
        self._actor = actor_class.remote()
        self._then(self._hear_start, self._actor.start.remote(__version__, pickle.dumps(setup), orders))

    def send(self, task: TaskHeader, call: PackedCall) -> None:
        """Implement `Worker.send`."""
        new = {handle.number: handle.payload for handle in call.handles if handle.number not in self._kept_handles}
        payloads = [*new.values(), *([] if call.payload is None else [call.payload])]
        kept = [(number, payload.parcel) for number, payload in new.items()]
        message = pickle.dumps((task, kept, call.payload and call.payload.parcel))
        beside = [payload.reference for payload in payloads if payload.reference is not None]
        try:
            raise_if_shut_down()
        except ParallelError as error:
            self._events.fail(error)
            return
        self._then(functools.partial(self._hear_answer, task.number), self._actor.perform.remote(message, *beside))
        self._kept_handles.update(new)

    def forget(self, numbers: Iterable[int]) -> None:
        """Implement `Worker.forget`."""
        gone = self._kept_handles.intersection(numbers)
        self._kept_handles -= gone
        if gone and ray.is_initialized():
            self._actor.forget.remote(list(gone))

    def cancel(self, number: int) -> None:
        """Implement `Worker.cancel`."""
        if ray.is_initialized():
            self._orders.order.remote(self.key, number)

    def ask_for_stack(self) -> None:
        """Implement `Worker.ask_for_stack`."""
        if ray.is_initialized():
            self._then(self._hear_stack, self._orders.order.remote(self.key, TELL_STACK))

    def hand_back(self) -> None:
        """Implement `Worker.hand_back`."""
        if ray.is_initialized():
            self._hands_back = True
            self._then(self._hear_handed_back, self._orders.order.remote(self.key, HAND_BACK))

    def leave(self) -> None:
        """Implement `Worker.leave`."""
        if self._actor is None or not ray.is_initialized():
            self.kill()
        else:
            self._then(self._hear_exit, self._actor.leave.remote())

    def kill(self) -> None:
        """Implement `Worker.kill`."""
        self.end_actor()
        # The event loop handles the exit later, because the pool may be unable to handle an exit during this call.
        self._loop.post(self._exit, -signal.SIGKILL, "")

    def end_actor(self) -> None:
        """Kill the actor, if there is one."""
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)

    def withdraw(self) -> None:
        """Give the worker up, because it has not started in time. The worker then causes no more events."""
        self._is_over = True
        self.end_actor()
        self._on_exit(self)

    def _then(self, hear: Callable[[Future[Any]], object], reference: Any) -> None:
        """Call ``hear`` when a call of Ray has ended, unless the worker has exited by then.

        Args:
            hear: called in the thread of the pool, with the future that has the result of the call of Ray.
            reference: Ray's reference to the result of the call.
        """
        reference.future().add_done_callback(functools.partial(self._loop.post, self._hear, hear))

    def _hear(self, hear: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        if not self._is_over:
            hear(future)

    def _hear_start(self, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, RayTaskError):
            cause = getattr(error, "cause", error)
            if not isinstance(cause, ParallelError):
                cause = ParallelError(f"{self.description} cannot start: {summary(cause)}")
            self._events.fail(cause)
        elif error is not None:
            self._hear_exit(future)
        else:
            place: Place = future.result()
            self.pid = place.pid
            self.node = place.node
            self._host = place.host
            self.device = torch.device(place.device)
            self._events.answered(self, Answer(STARTED), Received(b""))

    def _hear_answer(self, number: int, future: Future[Any]) -> None:
        if self._hands_back:
            self._held = future
            self._held_number = number
            return
        error = future.exception()
        if isinstance(error, RayTaskError):  # Ray's object store is full, so the answer is lost
            reason = OSError(" ".join(str(error).split()))
            self._events.answered(self, Answer(number, outcome=Outcome.SUCCEEDED), Received(b"", error=reason))
        elif error is not None:
            self._hear_exit(future)
        else:
            message, *beside = future.result() if isinstance(future.result(), tuple) else (future.result(),)
            answer, parcel = pickle.loads(message)
            self._events.answered(self, answer, Received(b"") if parcel is None else _received(parcel, beside))

    def _hear_stack(self, future: Future[Any]) -> None:
        if future.exception() is None:
            self._events.told_stack(self, future.result())

    def _hear_handed_back(self, future: Future[Any]) -> None:
        self._hands_back = False
        answer = future.result() if future.exception() is None else None
        if answer is not None:
            self._events.answered(self, answer, Received(b""))
        held = self._held
        self._held = None
        if held is not None:
            self._hear_answer(self._held_number, held)

    def _hear_exit(self, future: Future[Any]) -> None:
        """Kill the actor, because Ray reports its exit, and record the exit.

        Ray also reports an exit if it merely cannot reach the actor. So the actor may still run, although the pool will
        start another worker in its place.
        """
        error = future.exception()
        self.end_actor()
        self._exit(None, f"Ray reports: {' '.join(str(error).split())}")

    def _exit(self, exitcode: int | None, evidence: str) -> None:
        if not self._is_over:
            self._is_over = True
            if self._orders is not None and ray.is_initialized():
                self._orders.forget.remote(self.key)
            self._on_exit(self)
            self._events.exited(self, exitcode, evidence)


_keys = itertools.count()
