"""A pool on a Ray cluster: the tasks that wait, and the nodes whose workers do them.

Whoever submits a task sends it, if workers are free; whoever waits for a run takes its answers, and a thread takes all
others. One lock guards it all. Nothing is waited for while it is held: the search for room is a thread of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import ray

from ...errors import ParallelError, TransferError
from ..by_value.packer import Handle, PackedCall, Packer
from ..interrupts import Condition, DeferredSignals
from ..pool.forkserver_client import close_at_exit, close_pools
from ..pool.messages import Places, Ranks
from ..pool.tasks import CallFuture, Item, Resize, Run, TakesTasks, Task
from ..pool.worker import CANCELLED, FAILED
from ..ranks.stop_signals import pass_on_to
from .messages import Sender, Sent
from .room import LOOKS_EACH_S, Node, Room, Wanted

LEAVE_WITHIN_S = 60.0  # nodes whose workers do nothing


class RayPool(TakesTasks):
    """What `Pool` is on one machine."""

    def __init__(
        self,
        workers: int,
        wanted: Wanted,
        pack_initializer: Callable[[Packer], PackedCall] | None,
        idle_limit_s: float | None,
    ) -> None:
        """Wait until the nodes are there.

        Raises:
            ParallelError: Ray has no room for them in time, or one is not fit.
        """
        super().__init__(Packer(lambda: self._post(self._forget), is_elsewhere=True))
        self._wanted, self._idle_limit_s = wanted, math.inf if idle_limit_s is None else idle_limit_s
        self._changed = Condition()  # its lock guards all that follows
        self._events = SimpleQueue[Callable[[], object]]()  # for the thread
        self._queue, self._used_at = deque[Task | Resize](), time.monotonic()
        self._running = dict[Task, Sent]()
        self._is_killed = self._is_filling = False
        self._leaving, self._leave_by = set[Node](), 0.0
        self._number = 0  # of the last run
        self._ranks, self._places = Ranks(), list[Handle]()  # of the last group on several nodes,
        self._met: list[tuple[Node, int]] = []  # which are these, with their `Told.group`
        self._sender = Sender(ray.put)
        self._initialize = pack_initializer and pack_initializer(self._packer)
        self._room = Room(workers, wanted)
        try:
            self._nodes = self._room.start(range(workers), self._first_message())  # by their ranks
        except BaseException:
            self._room.give_back()
            raise
        self.thread = threading.Thread(target=self._loop, name="nn_parallel supervisor", daemon=True)
        self.callbacks.thread.start()
        self.thread.start()
        close_at_exit.add(self)
        pass_on_to(self)

    def __str__(self) -> str:
        return "shut down" if self.has_ended else f"{self._room.workers} workers on {len(self._nodes)} nodes, by Ray"

    # What is asked of it, in any thread

    def submit(self, task: Task | Resize, reads: bool = False) -> None:
        """Queue ``task``. Tasks begin in this order."""
        self._raise_if_forked()
        try:
            with self._locked():
                self._raise_if_closed()
                self._queue.append(task)
                self._hand_out()
        except BaseException:  # Ctrl-C, if not that the pool is closed
            self.abandon(task)
            raise

    def lead(self, is_over: Callable[[], bool], deadline: float = math.inf, task: Task | None = None) -> None:
        """Submit ``task`` if it is given; if it is a run, take its answers in this thread, where they come sooner."""
        self._raise_if_forked()
        if task is not None:
            self.submit(task)
        if isinstance(task, Run):
            try:
                self._follow(task)
            except BaseException:  # Ctrl-C: the thread does
                with self._locked():
                    self._have_heard(task)
                raise

    def abandon(self, task: Task | Resize) -> None:
        """Nobody waits for ``task`` any more: take it out of the queue, or end it where it runs."""
        with self._locked():
            if task in self._queue:
                self._queue.remove(task)
                task.discard()
                self._hand_out()  # what waited behind it
            elif isinstance(task, Run):
                self._cancel(task)

    def close(self, *, wait: bool = True, cancel_pending: bool = False, kill: bool = False) -> None:
        """Take no more tasks, finish those there are (or cancel the waiting, or kill the running), end the workers."""
        if self._is_inherited:
            return
        with self._locked():
            self._closing = True
            while self._queue and (cancel_pending or kill):
                self._queue.popleft().discard()
            self._post(self._kill if kill else self._look)
        if wait and threading.current_thread() not in (self.thread, self.callbacks.thread):
            self.thread.join()

    def orphan(self) -> None:
        """Nobody can submit any more. Called by the collector, so perhaps in a thread that holds our lock."""
        self._closing = True
        self._post(self._look)

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks. Called by the handler of a signal, too."""
        self._post(self._tell_all, "ask_to_stop")

    def _follow(self, run: Run) -> None:
        with self._changed:
            self._changed.wait_for(lambda: run not in self._queue)
        while (sent := self._running.get(run)) and ray.is_initialized():
            ready, _ = ray.wait(list(sent.nodes), num_returns=1, timeout=LOOKS_EACH_S)
            for reference in ready:
                answer = Future[Any]()
                try:
                    answer.set_result(ray.get(reference))
                except Exception as error:
                    answer.set_exception(error)
                with self._locked():
                    self._answered(run, reference, answer)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with DeferredSignals(), self._changed:
            yield
            self._changed.notify_all()

    # What the thread does

    def _post(self, event: Callable[..., object], *args: Any) -> None:
        self._events.put(functools.partial(event, *args))

    def _loop(self) -> None:
        event: Callable[[], object] = self._look
        try:
            while not self._is_over(event):
                del event  # it holds an answer
                try:
                    event = self._events.get(timeout=LOOKS_EACH_S)
                except Empty:
                    event = self._look
        except BaseException as error:
            with self._locked():
                self._break(error)
        finally:
            self._room.give_back()
            self._packer.close()
            self.callbacks.end()

    def _is_over(self, event: Callable[[], object]) -> bool:
        """Whether all is done and everybody gone after this event; ends the nodes when nothing is left to do."""
        _raise_if_shut_down()
        with self._locked():
            event()
            return self._closing and not self._queue and not self._running and self._vacate()

    def _break(self, error: BaseException) -> None:
        """It cannot go on: whoever waits hears why."""
        told = error if isinstance(error, ParallelError) else ParallelError(f"The pool cannot go on: {error!r}")
        self._broken, self._closing = self._broken or told, True
        for task in (*self._running, *self._queue):
            task.fail(self._broken)
        self._running.clear()
        self._queue.clear()
        self._nodes.clear()  # they end with their room

    def _look(self) -> None:
        """See to what time alone decides, and to what can begin."""
        if self._queue or self._running:
            self._used_at = time.monotonic()
        self._closing |= time.monotonic() > self._used_at + self._idle_limit_s
        self._hand_out()

    def _kill(self) -> None:
        self._is_killed = True
        for node in self._nodes:
            ray.kill(node.actor)

    def _cancel(self, run: Task) -> None:
        if run in self._running:
            for node in self._running[run].nodes.values():
                node.actor.cancel.remote(self._number)

    def _forget(self) -> None:
        forgotten = self._packer.forgotten
        gone = [forgotten.popleft() for _ in range(len(forgotten))]
        for node in self._nodes:
            node.kept.difference_update(gone)
        self._tell_all("forget", gone)

    def _tell_all(self, method: str, *args: Any) -> None:
        for node in self._nodes:
            getattr(node.actor, method).remote(*args)

    # Which task goes to which nodes

    def _hand_out(self) -> None:
        try:
            _raise_if_shut_down()
            while self._queue and self._begin(self._queue[0]):
                self._queue.popleft()
        except Exception as error:
            self._break(error)

    def _begin(self, task: Task | Resize) -> bool:
        """Whether it has begun or is over; else an event is to come first."""
        if isinstance(task, CallFuture | Item) and self._nodes:
            node = min(self._nodes, key=lambda node: node.load / len(node.ranks))
            if node.load >= len(node.ranks):
                return False
            if task.begin():
                self._send(task, [node])
            return True
        if any(node.load for node in self._nodes):
            return False
        if isinstance(task, Resize) and len(task.devices) != self._room.workers:
            if not self._vacate():
                return False
            self._room = Room(len(task.devices), self._wanted)
        self._fill()
        if self._is_filling:
            return False
        if isinstance(task, Resize):
            task.set_result(None)
        elif task.begin(self._room.workers):
            self._number += 1
            self._send(task, self._nodes, self._number, self._ranks_of_run())
        return True

    def _ranks_of_run(self) -> Ranks | None:
        """What the ranks are told of each other. If all are on one node, that knows."""
        first, *others = self._nodes
        if not others:
            return None
        if self._met != (met := [(node, node.group) for node in self._nodes]):
            node_of = {rank: index for index, node in enumerate(self._nodes) for rank in node.ranks}
            self._places = [self._packer.put(Places([node_of[rank] for rank in range(len(node_of))], first.address))]
            group = self._ranks.group + 1
            self._met, self._ranks = met, Ranks(len(node_of), first.store_port, group, 0, self._places[0].number)
        return self._ranks._replace(round=self._number)

    def _send(self, task: Task, nodes: Sequence[Node], number: int = 0, ranks: Ranks | None = None) -> None:
        handles = [*task.call.handles, *self._places * (ranks is not None)]
        lacking = [handle for handle in handles if any(handle.number not in node.kept for node in nodes)]
        try:
            message = self._sender.message(task.call, handles, lacking, number, ranks)
        except Exception as error:
            failed = TransferError(f"Ray cannot carry what {task.call.name} is called with: {error}")
            failed.__cause__ = error
            task.fail(failed)
            return
        sent = self._running[task] = Sent({handle.number for handle in handles})
        self._used_at = time.monotonic()
        for node in nodes:
            node.load += len(node.ranks) if number else 1
            sent.nodes[node.actor.call.remote(*message)] = node
        if not number:
            self._have_heard(task)

    def _have_heard(self, task: Task) -> None:
        """Have the answers to ``task`` taken by the thread."""
        for reference in self._running[task].nodes if task in self._running else ():
            reference.future().add_done_callback(functools.partial(self._post, self._answered, task, reference))

    # What nodes answer

    def _answered(self, task: Task, reference: Any, answer: Future[Any]) -> None:
        if (sent := self._running.get(task)) is None:  # the pool is broken
            return
        node = sent.nodes[reference]
        told = node.told(answer, CANCELLED if self._is_killed else FAILED)
        del sent.nodes[reference]
        node.load -= len(node.ranks) if isinstance(task, Run) else 1
        node.group = max(node.group, told.group)  # answers to several tasks come in any order
        if told.error is None:
            node.kept |= sent.handles
        if sent.complete(task, told):
            self._cancel(task)
        if not sent.nodes:
            del self._running[task]
        if not told.can_go_on:
            self._lose(node)
        self._hand_out()

    # Nodes come and go

    def _fill(self) -> None:
        """Have a node for each rank that has none, by a thread, as it may wait for room; one at a time."""
        there = {rank for node in self._nodes for rank in node.ranks}
        missing = [rank for rank in range(self._room.workers) if rank not in there]
        if self._is_filling or not missing:
            return
        self._is_filling = True
        if not self._room.is_wanted:  # there was no room in time
            self._room = Room(self._room.workers, self._wanted)
        args = self._room, missing, self._first_message()
        threading.Thread(target=self._search, args=args, name="nn_parallel search", daemon=True).start()

    def _search(self, room: Room, ranks: Sequence[int], first_message: tuple[Any, ...]) -> None:
        try:
            self._post(self._filled, room.start(ranks, first_message), None)
        except BaseException as error:
            self._post(self._filled, [], error)

    def _filled(self, found: list[Node], error: Exception | None) -> None:
        self._is_filling = False
        self._nodes = sorted([*self._nodes, *found], key=lambda node: node.ranks)
        if error is None:
            pass_on_to(self)  # to the new ones
            self._fill()  # in the place of those that were lost meanwhile
        elif self._room.is_wanted and not self._leaving:
            left = sum(len(node.ranks) for node in self._nodes)
            if not left:
                self._room.give_back()
            if self._queue and not any(node.load for node in self._nodes):  # the first task waits for them
                error.add_note(f"{left} of {self._room.workers} workers are left.")
                self._queue.popleft().fail(error)
        self._hand_out()

    def _first_message(self) -> tuple[Any, ...]:
        """What a new node is to do first, if there is an initializer."""
        call = self._initialize
        return self._sender.message(call, call.handles, call.handles) if call else ()

    def _lose(self, node: Node) -> None:
        """It is gone, or is of no use any more: another one takes its place."""
        if node in self._nodes:
            self._nodes.remove(node)
            ray.kill(node.actor)  # perhaps it is only out of reach
            if not self._closing:
                self._fill()

    def _vacate(self) -> bool:
        """Have all nodes leave, and give the room back; whether that is done, and nobody searches for other nodes."""
        if self._nodes:
            self._leave_by = time.monotonic() + LEAVE_WITHIN_S
        for node in self._nodes:
            self._leaving.add(node)
            node.actor.close.remote().future().add_done_callback(functools.partial(self._post, self._left, node))
        self._nodes.clear()
        if self._leaving and time.monotonic() < self._leave_by:
            return False
        self._leaving.clear()
        self._room.give_back()  # which ends what has not left, and the search
        return not self._is_filling

    def _left(self, node: Node, _: Future[Any]) -> None:
        self._leaving.discard(node)
        self._hand_out()


def _raise_if_shut_down() -> None:
    if not ray.is_initialized():  # its next call would start it again
        raise ParallelError("Ray has been shut down.")


atexit.register(close_pools)  # which is called before what Ray has registered as it was imported
