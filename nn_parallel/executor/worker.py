"""A worker process: sets itself up as the parent's script would be, then answers one task after another."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import world
from ..ddp import abort_collectives, close_group
from ..devices import call_on_device
from ..errors import Failure, RemoteError, TransferError, qualified_name
from ..interrupt import Interrupted, Interruptible
from ..pickling import Packed, dumps, loads
from ..world import DEFAULT_TIMEOUT, Membership, World
from .transport import EMPTY, Message, messages, send

UNINTERRUPTED = True  # see interrupt
STARTED = 0  # the number of the answer that says the worker is set up
INTERRUPT_EVERY_S = 0.02
SUCCEEDED, FAILED, CANCELLED = range(3)  # how a task ends

# What the parent orders a worker beside its tasks: a kind and a number.
Order = struct.Struct("=BQ")
CANCEL, FORGET = range(2)
STACK_SIGNAL = signal.SIGRTMAX - 1  # asks for the Python stack of the main thread


class Setup(NamedTuple):
    """The header of the first message, whose packed object is the initializer's call: what no fork can know."""

    rank: int
    device: str
    threads: int
    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    main_file: str | None


class Place(NamedTuple):
    """Where a task runs as one rank of several."""

    world_size: int
    store_port: int
    epoch: int  # a new one after each failure: groups and counters of an older one are not used again
    run: int  # greater than that of any earlier one


class Task(NamedTuple):
    """The header of a task; its packed object is ``(fn, args, kwargs)``."""

    number: int
    pass_device: bool
    threads: int  # of torch
    place: Place | None  # None: it runs alone


class Stored(NamedTuple):
    """The header of an object to keep, under the number of its handle."""

    number: int


class Answer(NamedTuple):
    """The header of an answer; its packed object is the result, or the exception and its `Failure`."""

    number: int
    outcome: int
    failed_inside: bool  # a block of a run, which went on: its group was closed, perhaps not on all ranks


def work(connection: socket.socket, control: socket.socket) -> int:
    """Answer the tasks that arrive on ``connection`` until it is closed; returns the exit code.

    Meanwhile a thread follows the orders that arrive on ``control``, where also the stacks go that are asked for.
    """
    faulthandler.register(STACK_SIGNAL, control.fileno(), all_threads=False)
    arriving = messages(connection)
    first = next(arriving, None)
    if first is None:
        return 0
    setup: Setup = first.header
    _become_like_the_parent(setup)
    worker = _Worker(setup)
    threading.Thread(target=worker.follow_orders, args=[control], name="nn_parallel orders", daemon=True).start()
    initialize = first._replace(header=Task(STARTED, pass_device=False, threads=setup.threads, place=None))
    for message in itertools.chain([initialize], arriving):
        assert message is not None
        if isinstance(message.header, Stored):
            worker.store(message)
            continue
        answer, packed = worker.answer(message)
        del message  # a tensor that the result does not need must not outlive its task
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code may have closed or replaced it
                stream.flush()
        try:
            send(connection, answer, packed)
        except ConnectionError:  # the parent is gone
            return 0
    return 0


def stored_object(number: int) -> Any:
    """The object that a handle stands for; called as a task is unpickled."""
    stored = _stored[number]
    if isinstance(stored, _Broken):
        raise TransferError(f"The object of a handle cannot be rebuilt in the worker: {stored.error!r}")
    return stored


class _Broken(NamedTuple):
    """Kept in the place of an object that could not be rebuilt."""

    error: BaseException


class _Worker:
    def __init__(self, setup: Setup) -> None:
        self._index = setup.rank
        self._device = torch.device(setup.device)
        self._alone = Membership(World(False, 0, 0, 1, self._device, launcher="executor"))
        self._rank: Membership | None = None  # as a rank of the present epoch
        self._epoch = 0
        self._store: dist.Store | None = None
        self._threads = 0
        self._switching = threading.Lock()  # between the main thread, which changes tasks, and the one that cancels
        self._task = self._cancelled = STARTED - 1
        self._block = Interruptible()

    def follow_orders(self, control: socket.socket) -> None:
        """Cancel and forget as the parent says, until it is gone."""
        interrupting = False
        with contextlib.suppress(ConnectionError):
            while True:
                if interrupting and not select.select([control], [], [], INTERRUPT_EVERY_S)[0]:
                    interrupting = self._interrupt_cancelled()
                    continue
                order = control.recv(Order.size, socket.MSG_WAITALL)
                if not order:
                    return
                kind, number = Order.unpack(order)
                if kind == FORGET:
                    _stored.pop(number, None)
                else:
                    self._cancelled = number  # it may not have begun yet
                    interrupting = self._interrupt_cancelled()

    def _interrupt_cancelled(self) -> bool:
        """Interrupt the cancelled task; whether it runs."""
        with self._switching:
            if self._task != self._cancelled:
                return False
            member = world.membership()
            if member is not None and member.open_store is not None:
                abort_collectives(member)
            self._block.interrupt()
            return True

    def store(self, message: Message) -> None:
        """Keep an object for the tasks that come."""
        try:
            _stored[message.header.number] = loads(message.pickle, message.buffers, self._device)
        except BaseException as error:
            _stored[message.header.number] = _Broken(error)

    def answer(self, message: Message) -> tuple[Answer, Packed]:
        task: Task = message.header
        where = "a single task" if task.place is None else f"rank {self._index} of {task.place.world_size}"
        if task.threads != self._threads:
            self._threads = task.threads
            torch.set_num_threads(task.threads)  # OMP_NUM_THREADS is read when torch is loaded: too late for it here
        try:
            # The group is closed after a failure, and only once that cannot be cancelled any more: what other ranks
            # then raise must not outrun the cause.
            with self._in_world(task.place), self._cancellable(task.number):
                outcome, packed = SUCCEEDED, self._perform(task, message)
        except Interrupted:
            outcome, packed = CANCELLED, EMPTY
        except BaseException as error:
            outcome, packed = FAILED, _pack_exception(error, f"{where} on {self._device}")
        failed_inside = task.place is not None and self._rank is not None and self._rank.term != _first_term(task.place)
        return Answer(task.number, outcome, failed_inside), packed

    def _perform(self, task: Task, message: Message) -> Packed:
        try:
            fn, args, kwargs = loads(message.pickle, message.buffers, self._device)
        except Interrupted:
            raise
        except BaseException as error:
            raise TransferError(f"The call cannot be rebuilt in the worker: {error!r}") from error
        result = call_on_device(fn, args, kwargs, self._device if task.pass_device else None)
        return dumps(result, {"the result": result})

    @contextlib.contextmanager
    def _cancellable(self, number: int) -> Iterator[None]:
        """While task ``number`` runs, an order to cancel it interrupts it."""
        with self._switching:
            self._task, self._block = number, Interruptible()
            self._block.interrupted = self._cancelled == number
        try:
            with self._block.running():
                yield
        finally:
            with self._switching:
                self._task = STARTED - 1

    @contextlib.contextmanager
    def _in_world(self, place: Place | None) -> Iterator[None]:
        if place is None:
            world.join(self._alone)
            yield
            return
        if self._rank is None or self._epoch != place.epoch:
            self._leave()
            self._epoch = place.epoch
            self._rank = Membership(self._world_of(place), lambda: self._open_store(place), DEFAULT_TIMEOUT)
        self._rank.begin_term(_first_term(place))
        world.join(self._rank)
        try:
            yield
        except BaseException:
            close_group(self._rank)  # frees the ranks that wait for this one in a collective
            raise
        finally:
            world.join(self._alone)

    def _world_of(self, place: Place) -> World:
        n = place.world_size
        return World(False, self._index, self._index, n, self._device, local_world_size=n, launcher="executor")

    def _open_store(self, place: Place) -> dist.Store:
        if self._store is None:
            self._store = dist.TCPStore(
                "127.0.0.1", place.store_port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
            )
        return dist.PrefixStore(f"epoch{place.epoch}", self._store)

    def _leave(self) -> None:
        if self._rank is not None:
            close_group(self._rank)
            self._rank.on_leave.close()


def _first_term(place: Place) -> int:
    """All ranks count their calls anew in each run; blocks that fail in it begin further terms."""
    return place.run << 32


def _become_like_the_parent(setup: Setup) -> None:
    os.environ.clear()
    os.environ.update(setup.environ)
    with contextlib.suppress(OSError):  # it was removed meanwhile
        os.chdir(setup.directory)
    sys.path[:] = setup.path
    sys.argv[:] = setup.argv
    main = types.ModuleType("__main__")
    if setup.main_file:
        main.__file__ = setup.main_file
    sys.modules["__main__"] = main
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _reseed()
    device = torch.device(setup.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)  # before anything can open a context on device 0


def _reseed() -> None:
    """Every fork of the server inherits the same random state."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _pack_exception(error: BaseException, where: str) -> Packed:
    """The exception and its description; a stand-in for one that does not survive the way to the parent and back."""
    failure = Failure.of(error, where)
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            packed = dumps((error, failure))
            rebuilt, _ = loads(packed.pickle, [bytearray(buffer) for buffer in packed.buffers])
            if type(rebuilt) is type(error):
                return packed
    return dumps((RemoteError(f"{qualified_name(type(error))}: {failure.message}"), failure))


_stored: dict[int, Any] = {}
