"""A worker of a pool as an actor of Ray: what runs in its process, and the worker as its pool sees it.

Ray calls the methods of an actor with one thread in the main thread of its process. So a task is cancelled there as in
a process of the fork server. But such an actor takes no other call meanwhile, and one with more threads, or with
concurrency groups, runs no method in its main thread. Hence orders beside the tasks (cancel one, tell the stack) go
through one more actor, `Orders`: a thread of each worker waits there for the next one.
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

EXIT_TOLD_WITHIN_S = 3.0  # if all processes of a node end at once; measured: 1.5 s
ASK_AGAIN_AFTER_S = 0.5  # the actor `Orders`, while Ray starts it again
ORDERS_WITHIN_S = 60.0  # for it to start again


class Parcel(NamedTuple):
    """A packed object in a message of Ray."""

    parts: Sequence[bytes] | None  # the pickle, the buffers, the shared memory; None: they are beside the message
    shared: int  # how many of the last parts were shared memory, which arrives as a copy


class Sent:
    """A packed object as the script sends it. What is large goes into Ray's object store once, for all workers."""

    def __init__(self, packed: Packed) -> None:
        """Copy what is large, since its owner may change it.

        Raises:
            TransferError: Ray's object store is full.
            ParallelError: Ray has been shut down.
        """
        self.parcel, large = _parcel_of(packed)
        self.reference = None
        if large:
            raise_if_shut_down()
            try:
                self.reference = ray.put(large)
            except RayError as error:
                raise TransferError(f"Cannot put a large object into Ray's object store: {error}") from error


def raise_if_shut_down() -> None:
    """Raise `ParallelError` if Ray has been shut down: the next call of Ray would start it again."""
    if not ray.is_initialized():
        raise ParallelError("Ray has been shut down.")


def _parcel_of(packed: Packed) -> tuple[Parcel, list[pickle.PickleBuffer]]:
    """Return the parcel of an object; and its parts, if they are large and so go beside the message."""
    views = [memoryview(part) for part in (packed.pickle, *packed.buffers, *map(memory_of, packed.shared))]
    if sum(view.nbytes for view in views) <= SMALL_BYTES:
        return Parcel([bytes(view) for view in views], len(packed.shared)), []
    # Ray crashes at memory that is not of bytes.
    parts = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
    return Parcel(None, len(packed.shared)), [pickle.PickleBuffer(part) for part in parts]


def _received(parcel: Parcel, beside: Iterable[Any]) -> Received:
    """Return the packed object of a parcel. Its memory is its own: what Ray has brought is read-only, and shared."""
    parts = next(iter(beside)) if parcel.parts is None else parcel.parts
    first, *buffers = parts
    copies = list(map(bytearray, buffers))
    unshared = len(copies) - parcel.shared
    return Received(bytes(first), copies[:unshared], copies[unshared:])


# In the processes of the cluster


class Orders:
    """The actor that passes orders on to the workers, and holds the store of their ranks.

    It is one actor, beside rank 0. If its node dies, Ray starts it anew on another one. The ranks then have failed, and
    those of the next run meet in its new store.
    """

    def __init__(self) -> None:
        end_with(os.getppid())  # the node, which the process of an actor outlives otherwise
        self._store = PoolStore(ray.util.get_node_ip_address())
        self._mailboxes: dict[int, _Mailbox] = {}  # by the key of the worker

    def __repr__(self) -> str:
        return "nn_parallel"  # in Ray's prefix of what is printed here

    async def order(self, key: int, number: int) -> Any:
        """Have a worker do something, by the number of an `Order`; return what it answers."""
        return await self._mailbox(key).order(number)

    async def next(self, key: int, reply: Any) -> int:
        """Return the next order for a worker, whose answer to the one before is ``reply``."""
        return await self._mailbox(key).next(reply)

    async def forget(self, key: int) -> None:
        """Forget a worker, which has exited."""
        self._mailboxes.pop(key, None)

    async def store_address(self, group: int) -> tuple[str, int]:
        """Return host and port of the store, for the ranks of this group."""
        return self._store.address(group)

    async def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks."""
        ask_to_stop("what the script has received")

    def _mailbox(self, key: int) -> _Mailbox:
        if key not in self._mailboxes:
            self._mailboxes[key] = _Mailbox()
        return self._mailboxes[key]


class _Mailbox:
    """The orders for one worker, which it follows one after another."""

    def __init__(self) -> None:
        self._waiting = asyncio.Queue[tuple[int, asyncio.Future[Any]]]()
        self._followed: asyncio.Future[Any] | None = None  # of the order that the worker follows

    async def order(self, number: int) -> Any:
        answered = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((number, answered))
        return await answered

    async def next(self, reply: Any) -> int:
        if self._followed is not None and not self._followed.done():
            self._followed.set_result(reply)
        number, self._followed = await self._waiting.get()
        return number


class ActorSetup(NamedTuple):
    """The first message to a worker."""

    rank: int
    key: int  # at `Orders`
    has_accelerator: bool
    directory: str
    path: list[str]
    argv: list[str]
    main_file: str | None
    prefix_output: bool


class Place(NamedTuple):
    """The node and process of a worker."""

    pid: int
    host: str
    node: str  # as Ray calls it
    device: str


class WorkerActor:
    """The process of a worker. Ray calls its methods in the main thread, one after another."""

    def __repr__(self) -> str:
        return "nn_parallel"  # in Ray's prefix of what is printed here

    def start(self, version: str, setup: bytes, orders: Any) -> Place:
        """Become what a new process of the script would be, but for what belongs to this machine.

        Raises:
            LaunchError: this node has another version of the package, or not the accelerator that Ray has granted.
        """
        if version != __version__:
            versions = f"the script has {version}, {socket.gethostname()} has {__version__}"
            raise LaunchError(f"All nodes need the same version of nn_parallel: {versions}.")
        end_with(os.getppid())  # the node, which the process of an actor outlives otherwise
        keep_handler()
        mine: ActorSetup = pickle.loads(setup)
        device = _device(mine.has_accelerator)
        adopt({}, mine.directory, mine.path, is_elsewhere=True)
        become_script(mine.argv, mine.main_file, device)
        if mine.prefix_output:
            prefix = f"[rank {mine.rank}] "
            sys.stdout = _PrefixedStream(sys.stdout, prefix)
            sys.stderr = _PrefixedStream(sys.stderr, prefix)
        self._runner = _Runner(mine.rank, device, mine.key, orders)
        threading.Thread(target=self._runner.follow_orders_of_actor, name="nn_parallel orders", daemon=True).start()
        return Place(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id(), str(device))

    def perform(self, message: bytes, *beside: Any) -> Any:
        """Keep the objects that come with a task, and do the task; return the answer and its parcel."""
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
        """Let go of objects whose handles are gone."""
        for number in numbers:
            forget(number)

    def leave(self) -> None:
        """End this process."""
        flush_output()
        ray.actor.exit_actor()


class _Runner(TaskRunner):
    """Does tasks, and follows the orders that come through `Orders`."""

    def __init__(self, rank: int, device: torch.device, key: int, orders: Any) -> None:
        super().__init__(rank, device, dict(os.environ), self._reply_with)
        self._key = key
        self._orders = orders
        self._reply: Any = None  # to the last order

    def store_address(self, ranks: Ranks) -> tuple[str, int]:
        """As `TaskRunner.store_address`: the store can have moved with the actor that holds it.

        Raises:
            ParallelError: that actor has been lost, and Ray has not started it again in time.
        """
        deadline = time.monotonic() + ORDERS_WITHIN_S
        while True:
            try:
                address: tuple[str, int] = self._orders.store_address.remote(ranks.group).future().result()
            except RayError as error:
                if time.monotonic() > deadline:
                    raise ParallelError(f"The store through which the ranks talk is gone: {summary(error)}") from error
                time.sleep(ASK_AGAIN_AFTER_S)
            else:
                return address

    def follow_orders_of_actor(self) -> None:
        """Follow one order after another until this process ends."""
        interrupting = False
        while True:
            # Not by `ray.get`: it tells Ray that this process waits, and does not use its cores.
            order = self._orders.next.remote(self._key, self._reply).future()
            while interrupting and not _is_done(order, INTERRUPT_EVERY_S):
                interrupting = self.interrupt_cancelled()
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
                interrupting = self.cancel(number)

    def _reply_with(self, answer: Answer) -> None:
        self._reply = answer


def _is_done(future: Future[Any], within_s: float) -> bool:
    try:
        future.exception(within_s)
    except TimeoutError:
        return False
    return True


def _device(has_accelerator: bool) -> torch.device:
    """Return the device of this worker: of the accelerators that Ray lets it see, the first."""
    if not has_accelerator:
        return torch.device("cpu")
    available = accelerators()
    if not available:
        granted = ", ".join(map(str, ray.get_gpu_ids()))
        raise LaunchError(f"Ray grants GPU {granted} of {socket.gethostname()}, but torch finds no accelerator there.")
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
        """As `io.TextIOBase.write`."""
        if text:
            first = self._prefix if self._begins_line else ""
            self._begins_line = text.endswith("\n")
            body = text[:-1] if self._begins_line else text
            end = "\n" if self._begins_line else ""
            self._stream.write(first + body.replace("\n", "\n" + self._prefix) + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As `io.IOBase.writelines`."""
        for line in lines:
            self.write(line)


# In the script


class RayWorker:
    """An actor as its pool sees it; implements `Worker`. It lives in the thread of the pool."""

    is_stopped = False  # not known from here
    exit_told_within_s = EXIT_TOLD_WITHIN_S

    def __init__(
        self,
        rank: int,
        device: torch.device,
        loop: EventLoop,
        events: WorkerEvents,
        on_exit: Callable[[RayWorker], None],
    ) -> None:
        """Begin to wait for room; `begin` then starts the actor."""
        self.rank = rank
        self.device = device
        self.pid = 0  # until it has started
        self.node = ""
        self.key = next(_keys)  # at `Orders`
        self.asked_at = time.monotonic()
        self._host = ""
        self._loop = loop
        self._events = events
        self._on_exit = on_exit
        self._actor: Any = None
        self._orders: Any = None
        self._is_over = False
        self._kept: set[int] = set()  # the numbers of the handles whose objects the worker keeps
        self._hands_back = False  # it has been told to, and has not replied
        self._held: Future[Any] | None = None  # the answer to its task, which must not outrun that reply

    @property
    def description(self) -> str:
        """As errors name the worker."""
        where = f"pid {self.pid} on {self._host}, " if self.pid else ""
        return f"Worker {self.rank} ({where}{self.device})"

    @property
    def has_begun(self) -> bool:
        """True once there was room for the actor."""
        return self._actor is not None

    def begin(self, actor_class: Any, orders: Any, setup: ActorSetup) -> None:
        """Start the actor."""
        self._orders = orders
        self._actor = actor_class.remote()
        self._then(self._hear_start, self._actor.start.remote(__version__, pickle.dumps(setup), orders))

    def send(self, task: TaskHeader, call: PackedCall) -> None:
        """As `Worker.send`."""
        new = {handle.number: handle.payload for handle in call.handles if handle.number not in self._kept}
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
        self._kept.update(new)

    def forget(self, numbers: Iterable[int]) -> None:
        """As `Worker.forget`."""
        gone = self._kept.intersection(numbers)
        self._kept -= gone
        if gone and ray.is_initialized():
            self._actor.forget.remote(list(gone))

    def cancel(self, number: int) -> None:
        """As `Worker.cancel`."""
        if ray.is_initialized():
            self._orders.order.remote(self.key, number)

    def ask_for_stack(self) -> None:
        """As `Worker.ask_for_stack`."""
        if ray.is_initialized():
            self._then(self._hear_stack, self._orders.order.remote(self.key, TELL_STACK))

    def hand_back(self) -> None:
        """As `Worker.hand_back`."""
        if ray.is_initialized():
            self._hands_back = True
            self._then(self._hear_handed_back, self._orders.order.remote(self.key, HAND_BACK))

    def leave(self) -> None:
        """As `Worker.leave`."""
        if self._actor is None or not ray.is_initialized():
            self.kill()
        else:
            self._then(self._hear_exit, self._actor.leave.remote())

    def kill(self) -> None:
        """As `Worker.kill`."""
        self.end_actor()
        self._loop.post(self._exit, -signal.SIGKILL, "")  # not here: the pool is in the middle of something

    def end_actor(self) -> None:
        """Kill the actor, if there is one."""
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)

    def withdraw(self) -> None:
        """Have nothing come of this worker any more: it has not started in time."""
        self._is_over = True
        self.end_actor()
        self._on_exit(self)

    def _then(self, hear: Callable[[Future[Any]], object], reference: Any) -> None:
        """Have ``hear`` called with what comes of a call, unless the worker has exited."""
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
        if isinstance(error, RayTaskError):  # there is no room for the answer in Ray's object store
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
        """Note that the actor is gone. If Ray cannot reach it, it is killed, since another one takes its place."""
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
