"""The calls of `ParallelExecutor` on a Ray cluster, which carries them to its nodes.

A call waits for its end in a thread: a run in its caller's, a single task in one of as many as there are workers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from ..pickling import Packed, loads
from ..preemption import pass_on_to
from ..progress import Progress
from .headers import Places, Ranks
from .local import in_chunks
from .names import Handle
from .packing import CallOptions, PackedCall, Packer
from .ray_cluster import CLOSED_WITHIN_S, Node, Room, Wanted
from .ray_node import Call, Told, received, to_send
from .tasks import Answer, Run
from .worker import CANCELLED, FAILED, SUCCEEDED

STORE_WITHIN_S, CANCELLED_WITHIN_S = 60.0, 5.0  # to open one; a run


class RayWorkers:
    """Worker processes on the nodes of a cluster."""

    def __init__(
        self, workers: int, wanted: Wanted, pack: Callable[[Packer], PackedCall] | None, idle_limit_s: float | None
    ) -> None:
        """Wait until they are there.

        Raises:
            ParallelError: Ray has no room for them in time, or a node is not fit.
        """
        self._size, self._wanted, self._pid = workers, wanted, os.getpid()
        self._filling, self._changed = threading.Lock(), threading.Condition(threading.RLock())  # this guards:
        self._nodes: list[Node] = []  # by their ranks
        self._numbers = itertools.count(1)  # of runs and tasks
        self._runs, self._tasks = set[int](), set[int]()  # those that are not over
        self._group, self._has_met, self._ranks = 0, False, Ranks()  # see `Ranks`; whether all have met in this group
        self._places: list[Handle] = []
        self._is_closed, self._used_at = False, time.monotonic()
        self._packer = Packer(lambda: None)
        self._initialize = pack and pack(self._packer)  # the call of the initializer
        self._threads = ThreadPoolExecutor(workers, "nn_parallel task")
        self._room = Room(workers, wanted)
        try:
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
        return self._is_closed or self._pid != os.getpid()

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> list[Any]:
        """As `ParallelExecutor.run`."""
        with self._in_turn() as number:
            call = self._packer.pack(fn, args, kwargs, options)
            self._fill()
            return self._run(call, number)

    def submit(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions, name: str = ""
    ) -> Future[Any]:
        """As `ParallelExecutor.submit`."""
        number = self._asked(self._tasks)
        try:
            call = self._packer.pack(fn, args, kwargs, options, name)
            future: Future[Any] = self._threads.submit(self._do, call, number)
        except TransferError as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda _: self._over(number))
        return future

    def map(
        self,
        fn: Callable[..., Any],
        items: Iterator[tuple[Any, ...]],
        options: CallOptions,
        timeout_s: float | None,
        chunksize: int,
        progress: Progress,
    ) -> Iterator[Any]:
        """As `ParallelExecutor.map`; each item is the arguments of a call."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

        def each(fn: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
            return _results(deque([self.submit(fn, args, {}, options, progress.name) for args in items]), deadline)

        return progress.counted(in_chunks(each, fn, items, chunksize))

    def put(self, obj: Any) -> Any:
        """As `ParallelExecutor.put`."""
        self._over(self._asked(self._tasks))
        return self._packer.put(obj)

    def resize(self, num_workers: int) -> None:
        """As `ParallelExecutor.resize`."""
        size = count("num_workers", num_workers)
        with self._in_turn():
            self._end_workers()
            self._size, self._threads = size, ThreadPoolExecutor(size, "nn_parallel task")
            self._room = Room(size, self._wanted)
            self._fill()

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        """As `ParallelExecutor.shutdown`."""
        with self._changed:
            is_first, self._is_closed = not self.has_ended, True
        if self._pid == os.getpid():
            self._threads.shutdown(wait, cancel_futures=cancel_futures)
        if is_first:
            ending = threading.Thread(target=self._end, name="nn_parallel end", daemon=True)
            ending.start()
            if wait:
                ending.join()

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks."""
        for node in self._nodes:
            node.actor.ask_to_stop.remote()

    def __enter__(self) -> None:
        """Nothing has to begin: the workers are there."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an exception nobody waits for what still runs."""
        if error is not None and not self.has_ended:
            with self._changed:
                self._is_closed = True
                for node in self._nodes:
                    ray.kill(node.actor)
            self._threads.shutdown(cancel_futures=True)
            self._end()
        self.shutdown(True, False)

    # The order of calls: a run begins once all before it are over, and what comes after it waits for it

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[int]:
        """The turn of a run, and its number."""
        number = self._asked(self._runs)
        try:
            self._await_turn(number, self._runs, self._tasks)
            yield number
        finally:
            self._over(number)

    def _asked(self, kind: set[int]) -> int:
        """The number of a new run or task."""
        if self._pid != os.getpid():
            raise ExecutorClosedError(f"This executor belongs to process {self._pid}; a fork of it makes its own.")
        with self._changed:
            if self._is_closed:
                raise ExecutorClosedError
            kind.add(number := next(self._numbers))
            return number

    def _await_turn(self, number: int, *kinds: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(number <= each for kind in kinds for each in kind))

    def _over(self, number: int) -> None:
        with self._changed:
            self._used_at = time.monotonic()
            self._runs.discard(number)
            self._tasks.discard(number)
            self._changed.notify_all()

    # Calls

    def _run(self, call: PackedCall, number: int) -> list[Any]:
        """A run on all nodes: once a rank has failed, the others are freed."""
        ranks = self._ranks_of(call, number)
        asked = {self._ask(node, call, number, ranks): node for node in self._nodes}
        run, errors, has_failed = Run(call), list[Exception](), False
        run.begin(self._size)
        try:
            while asked:
                [answer], _ = ray.wait(list(asked), num_returns=1)
                told = self._told(node := asked.pop(answer), answer)
                for rank, (outcome, packed) in told.answers.items():
                    run.complete(rank, _answer(call, outcome, packed))
                if told.error is not None:
                    errors.append(told.error)
                    for rank in node.ranks:
                        run.complete(rank, Answer.of(call, told.error, CANCELLED))
                if not told.is_over:
                    asked[node.actor.rest.remote()] = node
                if not has_failed and any(outcome != SUCCEEDED for outcome, _ in told.answers.values()):
                    has_failed = True
                    self._cancel(number, asked.values())
        except BaseException:  # Ctrl-C
            self._cancel(number, asked.values())
            ray.wait(list(asked), num_returns=len(asked), timeout=CANCELLED_WITHIN_S)
            raise
        late = [error for error in errors if isinstance(error, RankTimeoutError)]
        if late or (errors and not has_failed):
            raise _all_of(late) if late else errors[0]
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
        self._await_turn(number, self._runs)
        while not self._nodes:
            self._fill()
        with self._changed:
            node = min(self._nodes, key=lambda node: node.singles / len(node.ranks))
            node.singles += 1
        try:
            told = self._told(node, self._ask(node, call, number))
        finally:
            with self._changed:
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

    def _ask(self, node: Node, call: PackedCall, number: int, ranks: Ranks | None = None) -> Any:
        """Ask ``node`` for a call: Ray's reference to what it will have told."""
        with self._changed:
            while self._packer.forgotten:
                gone = self._packer.forgotten.popleft()
                for each in self._nodes:
                    if gone in each.kept:
                        each.kept.remove(gone)
                        each.actor.forget.remote(gone)
            asked = _message(call, node.kept, self._places if ranks else [])
            node.kept.update(asked.handles)
        asked = asked._replace(number=number, is_run=number in self._runs, ranks=ranks)
        return node.actor.call.remote(*to_send(asked))

    def _told(self, node: Node, answer: Any) -> Told:
        """What it has answered; if it is gone, that its ranks have died."""
        try:
            told: Told = received(*ray.get(answer))
        except ray.exceptions.RayError as error:
            return Told({rank: (FAILED, self._lost(node, error, rank)) for rank in node.ranks})
        if told.group != node.group:
            node.group, self._has_met = told.group, False
        return told

    # Nodes

    def _fill(self) -> None:
        """Have a node for each rank that has none.

        Raises:
            ParallelError: Ray has no room for it in time, or a node is not fit.
        """
        if sum(len(node.ranks) for node in self._nodes) == self._size:
            return
        with self._filling:
            there = {rank for node in self._nodes for rank in node.ranks}
            first = None if self._initialize is None else _message(self._initialize, set())
            try:
                new = self._room.start([rank for rank in range(self._size) if rank not in there], first)
            except ParallelError as error:
                error.add_note(f"{len(there)} of {self._size} workers are left.")
                raise
            with self._changed:
                self._nodes, self._has_met = sorted([*self._nodes, *new], key=lambda node: node.ranks), False

    def _lost(self, node: Node, error: Exception, rank: int) -> ParallelError:
        """The error of a rank on a node that is gone, which is asked for again."""
        with self._changed:
            if self._is_closed:
                return ExecutorClosedError("The executor was shut down while the call ran.")
            if node in self._nodes:
                self._nodes.remove(node)
                self._has_met = False
                ray.kill(node.actor)  # perhaps it is only out of reach
                threading.Thread(target=self._fill_again, name="nn_parallel start", daemon=True).start()
        where, reason = f"The node {node.address} with {rank_names(node.ranks)}", " ".join(str(error).split())
        return WorkerDiedError(f"{where} is gone, says Ray: {reason}", rank=rank)

    def _fill_again(self) -> None:
        with contextlib.suppress(Exception):  # the next run tries again, and tells
            self._fill()

    def _end(self) -> None:  # once all is over
        self._await_turn(next(self._numbers), self._runs, self._tasks)
        self._end_workers()
        self._packer.close()

    def _end_workers(self) -> None:
        nodes, self._nodes = self._nodes, []
        if nodes:
            with contextlib.suppress(Exception):  # of Ray, which may be shut down
                ray.wait([node.actor.close.remote() for node in nodes], num_returns=len(nodes), timeout=CLOSED_WITHIN_S)
        self._room.give_back()


def _message(call: PackedCall, kept: set[int], more: Sequence[Handle] = ()) -> Call:
    """``call`` for a node that has what is ``kept``."""
    handles = [*call.handles, *more]
    sent = {each.number: None if each.number in kept else each.payload.packed() for each in handles}
    return Call(0, False, call.name, call.options, call.function, call.payload.packed(), sent)


def _answer(call: PackedCall, outcome: int, packed: Packed | Exception) -> Answer:
    if isinstance(packed, Exception):
        return Answer.of(call, packed, outcome)

    def unpack() -> Any:
        buffers, shared = ([bytearray(each) for each in some] for some in (packed.buffers, packed.shared))
        return loads(packed.pickle, buffers, None, shared)

    return Answer(call, outcome, unpack)


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
        if not here._runs and not here._tasks and time.monotonic() > here._used_at + limit_s:
            here.shutdown(False, False)
        del here
        time.sleep(1)
