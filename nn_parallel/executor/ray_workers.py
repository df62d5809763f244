"""The calls of `ParallelExecutor` on a Ray cluster, which carries them to its nodes.

A call waits for its end in a thread: a run in its caller's, a single task in one of as many as there are workers.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import ray

from ..devices import count
from ..errors import (
    ExecutorClosedError,
    ParallelError,
    RankTimeoutError,
    TransferError,
    WorkerDiedError,
    rank_error,
    rank_names,
)
from ..preemption import pass_on_to
from .connection import Received
from .headers import Places, Ranks
from .local import StartedWorkers, unsent
from .names import Handle
from .packing import CallOptions, PackedCall, Packer
from .ray_cluster import CLOSED_WITHIN_S, Node, Room, Wanted
from .ray_node import Call, Told, portable, received, to_send
from .tasks import Answer, Run
from .turns import Turns
from .worker import CANCELLED, FAILED

STORE_WITHIN_S, CANCELLED_WITHIN_S = 60.0, 5.0  # to open one; a run


class RayWorkers(StartedWorkers):
    """Worker processes on the nodes of a cluster."""

    def __init__(
        self, workers: int, wanted: Wanted, pack: Callable[[Packer], PackedCall] | None, idle_limit_s: float | None
    ) -> None:
        """Wait until they are there.

        Raises:
            ParallelError: Ray has no room for them in time, or a node is not fit.
        """
        self._size, self._wanted = workers, wanted
        self._turns, self._lock = Turns(), threading.RLock()  # the lock guards the next three, and what the nodes have
        self._nodes: list[Node] = []  # by their ranks
        self._filling: Future[None] | None = None  # the attempt to have more nodes
        self._room = Room(workers, wanted)
        self._stored = weakref.WeakKeyDictionary[Handle, Any]()  # Ray's references to what workers are to keep
        self._group, self._has_met, self._ranks = 0, False, Ranks()  # see `Ranks`; whether all have met in this group
        self._places: list[Handle] = []
        self._packer = Packer(lambda: None, is_elsewhere=True)
        self._initialize = pack and pack(self._packer)  # the call of the initializer
        self._threads = ThreadPoolExecutor(workers, "nn_parallel task")
        try:
            with self._turns.run():
                self._fill()
        except BaseException:
            self._room.give_back()
            raise
        if idle_limit_s is not None:
            threading.Thread(target=_end_when_idle, args=[weakref.ref(self), idle_limit_s], daemon=True).start()

    def __str__(self) -> str:
        return "shut down" if self.has_ended else f"{self._size} workers on {len(self._nodes)} nodes, by Ray"

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more calls, at least of this process."""
        return self._turns.are_over

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """As `ParallelExecutor.run`."""
        with self._turns.run() as number:
            call = self._packer.pack(fn, args, kwargs, options)
            self._fill()
            return self._run(call, number)

    def submit(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions, name: str = ""
    ) -> Future[Any]:
        """As `ParallelExecutor.submit`."""
        try:
            call = self._packer.pack(fn, args, kwargs, options, name)
        except TransferError as error:
            return unsent(error)
        with self._lock:  # the threads take tasks in the order of their numbers: none waits for one behind it
            number = self._turns.take()
            try:
                future = self._threads.submit(self._do, call, number)
            except BaseException:  # Python is at its end, or Ctrl-C
                self._turns.end(number)
                raise
        future.add_done_callback(lambda _: self._turns.end(number))
        return future

    def put(self, obj: Any) -> Any:
        """As `ParallelExecutor.put`."""
        self._turns.end(self._turns.take())  # raises if there are no more
        return self._packer.put(obj)

    def resize(self, num_workers: int) -> None:
        """As `ParallelExecutor.resize`."""
        size = count("num_workers", num_workers)
        with self._turns.run():
            self._end_workers()
            self._size, self._threads = size, ThreadPoolExecutor(size, "nn_parallel task")
            self._room = Room(size, self._wanted)
            self._fill()

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        """As `ParallelExecutor.shutdown`."""
        with self._lock:
            if self._turns.close():
                self._ending = threading.Thread(target=self._end, name="nn_parallel end", daemon=True)
                self._ending.start()
                self._threads.shutdown(False, cancel_futures=cancel_futures)
        if wait and not self._turns.is_inherited:
            self._ending.join()

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks."""
        for node in self._nodes:
            node.actor.ask_to_stop.remote()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an exception nobody waits for what still runs."""
        if error is not None and not self.has_ended:
            self.shutdown(False, True)  # first, or the nodes would be replaced
            for node in list(self._nodes):
                ray.kill(node.actor)
        self.shutdown(True, False)

    # Calls

    def _map(
        self, fn: Callable[..., Any], items: Iterable[Any], options: CallOptions, timeout_s: float | None, name: str
    ) -> Generator[Any, None, None]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return _results(deque([self.submit(fn, args, {}, options, name) for args in items]), deadline)

    def _run(self, call: PackedCall, number: int) -> list[Any]:
        """A run on all nodes: once a rank has failed, those on the others are freed."""
        run, errors, has_failed, ranks = Run(call), list[Exception](), False, self._ranks_of(call, number)
        run.begin(self._size)
        asked, is_cancelled = dict[Any, Node](), False
        try:
            for node in list(self._nodes):
                asked[self._ask(node, call, number, True, ranks)] = node
            while asked:
                [answer], _ = ray.wait(list(asked), num_returns=1) if len(asked) > 1 else (list(asked), ())
                told = self._told(asked[answer], answer)
                node = asked.pop(answer)
                errors += [] if told.error is None else [told.error]
                for rank in node.ranks:
                    outcome, packed = told.answers.get(rank, (CANCELLED, None))
                    run.complete(rank, _answer(call, outcome, packed))
                    has_failed |= outcome == FAILED
                others_end = call.options.timeout_s is not None  # by themselves, if it is over on one node
                ends = has_failed or any(not (others_end and isinstance(error, RankTimeoutError)) for error in errors)
                if ends and not is_cancelled:
                    is_cancelled = True
                    self._cancel(number, asked.values())
        except BaseException:  # Ctrl-C
            self._cancel(number, asked.values())
            if asked:
                ray.wait(list(asked), num_returns=len(asked), timeout=CANCELLED_WITHIN_S)
            raise
        if late := [error for error in errors if isinstance(error, RankTimeoutError)]:
            raise _all_of(late)
        if errors and not has_failed:
            raise errors[0]
        return run.result()

    def _cancel(self, number: int, nodes: Iterable[Node]) -> None:
        self._has_met = False
        for node in nodes:
            node.actor.cancel.remote(number)

    def _ranks_of(self, call: PackedCall, number: int) -> Ranks | None:
        """What the ranks of a run are told of each other. If all are on one node, that node knows."""
        pass_on_to(self)
        first, *others = self._nodes
        if not others:
            return None
        if not self._has_met:
            self._group += 1
            try:
                port = ray.get(first.actor.open_group.remote(self._group), timeout=STORE_WITHIN_S)
            except ray.exceptions.RayError as error:
                gone = {rank: self._lost(first, error, rank) for rank in first.ranks}
                raise rank_error(call.name, self._size, gone) from None
            node_of = {rank: index for index, node in enumerate(self._nodes) for rank in node.ranks}
            self._places = [self._packer.put(Places([node_of[rank] for rank in range(self._size)], first.address))]
            self._ranks, self._has_met = Ranks(self._size, port, self._group, 0, self._places[0].number), True
        return self._ranks._replace(round=number)

    def _do(self, call: PackedCall, number: int) -> Any:
        """A task, on the node with the most room."""
        self._turns.wait(number)
        while not self._nodes:
            self._fill()
        with self._lock:
            node = min(self._nodes, key=lambda node: node.singles / len(node.ranks))
            node.singles += 1
        try:
            told = self._told(node, self._ask(node, call, number, False))
        finally:
            with self._lock:
                node.singles -= 1
        if told.error is not None:
            raise told.error
        value, error = _answer(call, *next(iter(told.answers.values()))).rebuild()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it would live in a cycle with its traceback
        return value

    def _ask(self, node: Node, call: PackedCall, number: int, is_run: bool, ranks: Ranks | None = None) -> Any:
        """Ask ``node`` for a call: Ray's reference to what it will have told."""
        with self._lock:
            if gone := [self._packer.forgotten.popleft() for _ in range(len(self._packer.forgotten))]:
                for each in self._nodes:
                    each.kept.difference_update(gone)
                    each.actor.forget.remote(gone)
            return node.actor.call.remote(*self._message(call, node.kept, number, is_run, ranks))

    def _message(
        self, call: PackedCall, kept: set[int], number: int = 0, is_run: bool = False, ranks: Ranks | None = None
    ) -> tuple[Any, ...]:
        """The arguments of `RayNode.call`, for a node that has ``kept`` what workers keep; now it has the rest."""
        handles = [*call.handles, *self._places] if ranks else call.handles
        new = [handle for handle in handles if handle.number not in kept]
        needs, lacks = ([handle.number for handle in some] for some in (handles, new))
        payload = portable(call.payload)
        sent = Call(number, is_run, call.name, call.options, call.function, payload, needs, lacks, ranks)
        message = *to_send(sent), *map(self._reference, new)
        kept.update(lacks)
        return message

    def _reference(self, handle: Handle) -> Any:
        """Ray's, to what the workers keep: a node takes it from Ray's object store."""
        if (reference := self._stored.get(handle)) is None:
            reference = self._stored[handle] = ray.put(portable(handle.payload))
        return reference

    def _told(self, node: Node, answer: Any) -> Told:
        """What it has answered; if it is gone, that its ranks have died."""
        try:
            pickled, *beside = ray.get(answer)
        except ray.exceptions.RayError as error:
            return Told({rank: (FAILED, self._lost(node, error, rank)) for rank in node.ranks})
        told: Told = received(pickled, beside)
        if told.error is not None:
            node.kept.clear()  # perhaps it has not got what came with this
        if told.group != node.group:
            node.group, self._has_met = told.group, False
        return told

    # Nodes

    def _fill(self) -> None:
        """Wait until there is a node for each rank.

        Raises:
            ParallelError: Ray has no room for it in time, or a node is not fit.
        """
        while sum(len(node.ranks) for node in self._nodes) < self._size:
            self._start().result()  # one that was under way may know nothing of a node that has gone since

    def _start(self) -> Future[None]:
        """Begin to have a node for each rank that has none; there is one attempt at a time."""
        with self._lock:
            if self._filling is None or self._filling.done():
                self._filling = Future()
                attempt = threading.Thread(target=self._try, args=[self._room, self._filling], daemon=True)
                attempt.start()
            return self._filling

    def _try(self, room: Room, attempt: Future[None]) -> None:
        there, kept = {rank for node in self._nodes for rank in node.ranks}, set[int]()
        try:
            first = self._message(self._initialize, kept) if self._initialize else ()
            new = room.start([rank for rank in range(self._size) if rank not in there], first)
        except Exception as error:
            error.add_note(f"{len(there)} of {self._size} workers are left.")
            attempt.set_exception(error)
            return
        for node in new:
            node.kept |= kept
        with self._lock:
            if attempt is self._filling:  # else there is another size by now
                self._nodes, self._has_met = sorted([*self._nodes, *new], key=lambda node: node.ranks), False
        attempt.set_result(None)

    def _lost(self, node: Node, error: Exception, rank: int) -> ParallelError:
        """The error of a rank on a node that is gone, which is asked for again."""
        if self.has_ended:
            return ExecutorClosedError("The executor was shut down while the call ran.")
        with self._lock:
            if node in self._nodes:
                self._nodes.remove(node)
                self._has_met = False
                ray.kill(node.actor)  # perhaps it is only out of reach
                self._start()
        where, reason = f"The node {node.address} with {rank_names(node.ranks)}", " ".join(str(error).split())
        return WorkerDiedError(f"{where} is gone, says Ray: {reason}", rank=rank)

    def _end(self) -> None:
        self._turns.wait_for_all()
        self._end_workers()
        self._packer.close()

    def _end_workers(self) -> None:
        with self._lock:
            nodes, self._nodes, self._filling = self._nodes, [], None
        with contextlib.suppress(Exception):  # of Ray, which may be shut down
            ray.wait([node.actor.close.remote() for node in nodes], num_returns=len(nodes), timeout=CLOSED_WITHIN_S)
        self._room.give_back()


def _answer(call: PackedCall, outcome: int, told: Received | Exception | None) -> Answer:
    """What a node has told of a rank; ``told`` may be None if it was cancelled."""
    if not isinstance(told, Received):
        return Answer.of(call, told or CancelledError(), outcome)
    buffers = None if told.buffers is None else list(map(bytearray, told.buffers))  # Ray's own are read-only
    return Answer(call, outcome, Received(told.pickle, buffers, None, list(map(bytearray, told.shared))))


def _results(futures: deque[Future[Any]], deadline: float) -> Generator[Any, None, None]:
    """The results in order; what has not begun when nobody takes them any more never does."""
    try:
        while futures:
            yield futures.popleft().result(None if deadline == math.inf else deadline - time.monotonic())
    finally:
        for future in futures:
            future.cancel()


def _all_of(errors: Sequence[RankTimeoutError]) -> RankTimeoutError:
    """The error of a run that took too long on several nodes."""
    ranks, stacks = [rank for error in errors for rank in error.ranks], dict[int, str]()
    for error in errors:
        stacks |= error.stacks
    return RankTimeoutError("\n\n".join(map(str, errors)), ranks=sorted(ranks), stacks=stacks)


def _end_when_idle(workers: weakref.ref[RayWorkers], limit_s: float) -> None:
    """Shut them down once nothing has been asked of them for so long: the work of a thread."""
    while (here := workers()) is not None and not here.has_ended:
        if here._turns.idle_s > limit_s:
            here.shutdown(False, False)
        del here
        time.sleep(1)
