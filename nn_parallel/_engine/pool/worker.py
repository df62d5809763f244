"""A worker process: sets itself up as the parent's script would be, then answers one task after another."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ...errors import RemoteError, TransferError
from ...world import World
from .. import background
from ..by_value.globals import forget, store_object, stored_object
from ..by_value.reducer import AnswerReducer
from ..descendants import end_with
from ..devices import call_on_device, synchronize, synchronize_in_thread
from ..failures import Failure, qualified_name
from ..interrupts import CancelScope, Interrupted, keep_handler
from ..pickling import Packed, dump_atoms, dumps, loads
from ..ranks.blocks import blocks_of
from ..ranks.context import RankContext, current_world, join, rank_context
from ..ranks.records import HAS_LEFT, WAITING, Position, Waits, call_name
from ..ranks.status_board import StatusBoard
from ..ranks.watchdog import cause_of
from ..stack_dump import main_stack, take_name
from ..tracebacks import user_frames
from .channel import SMALL_BYTES, Channel, Payload, Received
from .messages import (
    HAND_BACK,
    STARTED,
    TELL_STACK,
    Answer,
    ForgetObjects,
    KeepObject,
    Order,
    Outcome,
    Ranks,
    TaskHeader,
    WorkerSetup,
)
from .pool_store import ranks_prefix

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
R = TypeVar("R")
NO_TASK = -1  # less than the number of any task
INTERRUPT_EVERY_S = 0.02
RECOVERS_WITHIN_S = 10.0
RESULTS_BYTES = SMALL_BYTES // 2  # of the results that one answer holds, beside the last


def work(sock: socket.socket, control: socket.socket) -> int:
    """Answer the tasks that arrive on ``sock`` until it is closed; returns the exit code.

    Meanwhile a thread follows the orders that arrive on ``control``, where also the stacks go that are asked for.
    """
    channel = Channel(sock)
    with contextlib.suppress(EOFError, ConnectionError):  # the script is gone, or lets this worker go
        _, payload = channel.receive()  # type: ignore[misc]  # it waits
        setup: WorkerSetup = payload.load()
        _become_like_the_parent(setup)
        keep_handler()
        take_name(setup.rank)
        worker = TaskRunner(setup.rank, torch.device(setup.device), setup.environ, channel.send)
        channel.send(Answer(STARTED))
        threading.Thread(target=worker.follow_orders, args=[control], name="nn_parallel orders", daemon=True).start()
        while True:
            _serve(channel, worker)
    return 0


def _serve(channel: Channel, worker: TaskRunner) -> None:
    """Do what the next message says. A function of its own, so that nothing of the message lives on in a variable."""
    header, payload = channel.receive()  # type: ignore[misc]  # it waits
    if isinstance(header, KeepObject):
        store_object(header.number, functools.partial(payload.load, worker.device))
        return
    if isinstance(header, ForgetObjects):
        for number in header.numbers:
            forget(number)
        return
    answer, packed = worker.perform(header, payload)
    del payload  # a tensor that the result does not need must not outlive its task
    flush_output()
    try:
        message = packed and Payload(packed)
        del packed
        channel.send(answer, message)
    except TransferError as error:
        answer = answer._replace(outcome=Outcome.FAILED)
        channel.send(answer, Payload(_pack_exception(error, worker.where(header))))
    if header.cores:
        channel.wait_for_more()


class TaskRunner:
    """Does the tasks of one worker, in the main thread of its process; other threads cancel them."""

    def __init__(
        self, rank: int, device: torch.device, environ: Mapping[str, str], send: Callable[[Answer], object]
    ) -> None:
        """Do nothing yet.

        Args:
            rank: that of the worker.
            device: that of its tasks.
            environ: the environment of the script.
            send: called with answers that come before the last one to a task.
        """
        self._send = send
        self._calls = deque[bytes | Received]()  # of the task, that have not begun
        self._results: list[bytes] = []  # of those that are over
        self._function: Callable[..., Any] | None = None  # of the task, if this worker keeps it
        self._index = rank
        self.device = device
        self._alone = RankContext(World(False, 0, 0, 1, self.device, launcher="executor"))
        self._rank: RankContext | None = None  # as a rank, with the group of this number
        self._group = 0
        self._store: dist.Store | None = None
        self._store_address = "", 0
        self._cores = -1  # not known yet
        self._environ = environ
        self._switching = threading.Lock()  # between the main thread, which changes tasks, and the one that cancels
        self._task = NO_TASK
        self._cancelled = NO_TASK
        self._is_batch = False  # the task is one
        self._block = CancelScope()  # what the main thread does for the task
        self._board: StatusBoard | None = None  # of the last run that left a process group
        self._deadlock: Exception | None = None  # why it was interrupted, if it was not cancelled

    def follow_orders(self, control: socket.socket) -> None:
        """Cancel tasks and tell the stack as the pool says, until it is gone."""
        interrupting = False
        with contextlib.suppress(ConnectionError):
            while True:
                if interrupting and not select.select([control], [], [], INTERRUPT_EVERY_S)[0]:
                    interrupting = self.interrupt_cancelled()
                    continue
                order = control.recv(Order.size, socket.MSG_WAITALL)
                if not order:
                    return
                (number,) = Order.unpack(order)
                if number == TELL_STACK:
                    control.send(main_stack().encode(errors="backslashreplace"))
                elif number == HAND_BACK:
                    self.hand_back()
                else:
                    interrupting = self.cancel(number)

    def cancel(self, number: int) -> bool:
        """Interrupt the task of this number, also if it begins later; as `interrupt_cancelled`."""
        self._cancelled = number
        return self.interrupt_cancelled()

    def interrupt_cancelled(self) -> bool:
        """Interrupt the cancelled task; return whether it runs, so that this is to be called again."""
        with self._switching:
            if self._task != self._cancelled:
                return False
            context = rank_context()
            self._block.interrupt()  # before the abort, after which collectives on accelerators return wrong numbers
            if context is not None and context.open_store is not None:
                context.group.abort()
            return True

    def hand_back(self) -> None:
        """Answer the calls of the batch that are over, and begin none but the one that runs."""
        with self._switching:
            # An order that comes late may find a task which is no batch.
            if self._task != NO_TASK and self._is_batch and (self._results or self._calls):
                self._send(Answer(self._task, self._results, goes_on=True))
                self._results = []
                self._calls.clear()

    def _end_deadlock(self, reason: Exception) -> None:
        """Interrupt the task, which waits in a collective that cannot end, or has failed."""
        with self._switching:
            if self._task != NO_TASK and self._rank is not None:
                self._deadlock = reason
                self._block.interrupt()
                self._rank.group.abort()

    def perform(self, task: TaskHeader, payload: Received) -> tuple[Answer, Packed | None]:
        """Do a task; return the answer to it, and what goes with that."""
        if task.cores != self._cores:
            if self._cores >= 0:
                blas_libraries.cache_clear()  # tasks may have loaded some
            self._cores = task.cores
            _use_threads(max(1, task.cores), self._environ)
        generation = task.generation
        if self._board is not None:
            self._board.waits = None
        context = self._enter(task, generation) if task.ranks.world_size else self._alone
        join(context)
        with self._switching:
            self._task = task.number
            self._is_batch = task.seconds > 0
            self._block.interrupted = self._cancelled == task.number
            self._deadlock = None
            self._calls.extend(task.calls or [payload])
        outcome: Outcome | None = None
        packed: Packed | None = None
        try:
            try:
                with self._block:
                    packed = self._do_calls(task)
                outcome = packed and Outcome.SUCCEEDED
            finally:
                with self._switching:  # from here on nothing interrupts it
                    self._task = NO_TASK
                    results = self._results
                    self._results = []
                    self._calls.clear()
                    self._function = None
        except BaseException as error:
            error = cause_of(error, self._deadlock)
            if isinstance(error, Interrupted):
                outcome = Outcome.CANCELLED
            else:
                outcome = Outcome.FAILED
                packed = _pack_exception(error, self.where(task))
        has_failed = outcome in (Outcome.FAILED, Outcome.CANCELLED)
        if task.ranks.world_size and has_failed:
            # It frees the ranks that wait for this one in a collective: only once this cannot be cancelled any more,
            # or what they then raise could outrun the cause.
            context.group.close()
        if has_failed:
            _recover(self.device)
        join(self._alone)
        failed_inside = task.ranks.world_size > 0 and context.generation != generation
        return Answer(task.number, results, outcome, failed_inside=failed_inside, is_spent=_is_spent), packed

    def where(self, task: TaskHeader) -> str:
        """Return where a task runs, for the description of its failure."""
        size = task.ranks.world_size
        where = f"rank {self._index} of {size}" if size else "a single task"
        return f"{where} on {self.device}"

    def _do_calls(self, task: TaskHeader) -> Packed | None:
        """Do the calls of a task, and keep results that are numbers, texts and the like.

        Returns:
            The first result that is none of these, after which no call is begun.
        """
        begun = time.monotonic()
        size = 0
        while self._calls:
            result = in_this_process(self._call, task, self._calls.popleft())
            atoms = dump_atoms(result)
            if atoms is None:
                return AnswerReducer().pack(result, functools.partial(dict, {"the result": result}))
            with self._switching:  # not while the calls are handed back
                self._results.append(atoms)
            size += len(atoms)
            if size > RESULTS_BYTES or time.monotonic() - begun > task.seconds:
                break
        return None

    def _call(self, task: TaskHeader, arguments: bytes | Received) -> Any:
        try:
            if isinstance(arguments, Received):
                fn, args, kwargs = arguments.load(self.device)
            else:
                fn = None
                args = pickle.loads(arguments)
                kwargs = {}
            if task.function:
                if self._function is None:  # the first call of the task
                    self._function = stored_object(task.function).function()
                fn = self._function
        except Interrupted:
            raise
        except BaseException as error:
            raise TransferError(f"The call cannot be rebuilt in the worker: {error!r}") from error
        result = call_on_device(fn, args, kwargs, self.device if task.pass_device else None)
        background.finish()  # the process may end with its pool
        if not _is_spent:
            synchronize(self.device)  # what fails there is the failure of this call, and not that of the next one
        if self._rank is not None and task.ranks.world_size > 1 and self._rank.has_store:
            self._say_returned(task, call_name(fn))
        return result

    def _say_returned(self, task: TaskHeader, name: str) -> None:
        """For the ranks that are still in the run: this one makes no call or collective before all have ended it."""
        blocks = blocks_of(self._rank)
        assert blocks is not None
        blocks.board.post(HAS_LEFT)  # makes no more calls in this generation
        if not dist.is_initialized():
            return
        others = [rank for rank in range(task.ranks.world_size) if rank != self._index]
        next_run = Position(task.generation + (1 << 32), 0, WAITING)
        blocks.watch()  # tells the others
        self._board = blocks.board
        self._board.waits = Waits(f"has returned from {name}", tuple(others), next_run)

    def _enter(self, task: TaskHeader, generation: int) -> RankContext:
        """Make this worker a rank of a run."""
        ranks = task.ranks
        if self._rank is None or self._group != ranks.group:
            self._leave()
            self._group = ranks.group
            nodes = ranks.nodes or [0] * ranks.world_size
            self._rank = RankContext(
                self._world_of(nodes), lambda: self._open_store(ranks), one_node=len(set(nodes)) == 1
            )
            self._rank.on_deadlock = self._end_deadlock
        self._rank.begin_generation(generation)
        return self._rank

    def _world_of(self, nodes: Sequence[int]) -> World:
        node = nodes[self._index]
        local_rank = nodes[: self._index].count(node)
        local_world_size = nodes.count(node)
        return World(
            False, self._index, local_rank, len(nodes), self.device, node, local_world_size, launcher="executor"
        )

    def store_address(self, ranks: Ranks) -> tuple[str, int]:
        """Return host and port of the store of these ranks."""
        return ranks.store_host, ranks.store_port

    def _open_store(self, ranks: Ranks) -> dist.Store:
        address = self.store_address(ranks)
        if self._store is None or self._store_address != address:
            self._store_address = address
            self._store = dist.TCPStore(
                *address, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
            )
        return dist.PrefixStore(ranks_prefix(ranks.group), self._store)

    def _leave(self) -> None:
        if self._rank is not None:
            self._rank.leave(abort=True)
            self._board = None


def in_this_process(call: Callable[..., R], /, *args: Any) -> R:
    """Call ``call(*args)``, and return its result; a process that the call forks ends where the call returns in it.

    The child would answer in the place of this process, or wait for a lock that another thread held as it was forked.
    """
    pid = os.getpid()
    try:
        result = call(*args)
    except BaseException as error:
        if os.getpid() != pid:
            _end_as_a_script(error)
        raise
    if os.getpid() != pid:
        _end_as_a_script()
    return result


def call_each(
    fn: Callable[..., R], items: Iterable[tuple[Any, ...]], device: torch.device | None = None
) -> tuple[list[R], tuple[Exception, Failure] | None]:
    """Return the results of a chunk of a map, up to the first call that fails; and how that one has failed."""
    results: list[R] = []
    own_device = current_world().device
    for item in items:
        try:
            result = in_this_process(call_on_device, fn, item, {}, device)
            synchronize(own_device)
            results.append(result)
        except Interrupted:
            raise
        except BaseException as error:
            packed = _pack_exception(error, f"a single task on {own_device}")
            _recover(own_device)
            return results, loads(packed.pickle, [bytearray(buffer) for buffer in packed.buffers])
    return results, None


def _recover(device: torch.device) -> None:
    """Give back what failed work has left on an accelerator; find out if that can still be used.

    After an assertion or an illegal access in a kernel each call of CUDA fails, until the process ends.
    """
    global _is_spent
    if device.type == "cpu":
        return
    try:
        synchronize_in_thread(device).result(RECOVERS_WITHIN_S)
        gc.collect()  # the tensors in the frames of a traceback
        torch.accelerator.memory.empty_cache()
    except Exception:  # of many types, by driver and version; or a kernel that does not end
        _is_spent = True


def _end_as_a_script(error: BaseException | None = None) -> NoReturn:
    code = 1
    try:
        match error:
            case None | SystemExit(code=None):
                code = 0
            case SystemExit(code=int(status)):
                code = status & 0xFF
            case SystemExit():
                print(error.code, file=sys.stderr)
            case _:
                traceback.print_exception(error.with_traceback(user_frames(error)))
        flush_output()
    finally:
        os._exit(code)


def flush_output() -> None:
    """Write what this process has printed and still holds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # user code may have closed or replaced it
            continue


def _become_like_the_parent(setup: WorkerSetup) -> None:
    server = os.getppid()
    setup.attributes.adopt()
    end_with(server)  # again, as the user may have changed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])  # by which the pool reaches it
    if dict(os.environ) != setup.environ:  # or it would take half a MiB of memory of its own
        os.environ.clear()
        os.environ.update(setup.environ)
        time.tzset()
    with contextlib.suppress(OSError):  # it was removed meanwhile
        os.chdir(setup.directory)
    sys.path[:] = setup.path
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.current_process().authkey = setup.authkey
    become_script(setup.argv, setup.main_file, torch.device(setup.device))


def become_script(argv: Sequence[str], main_file: str | None, device: torch.device) -> None:
    """Have a ``__main__`` of this process's own, the arguments of the script, other random numbers, and a device."""
    sys.argv[:] = argv
    main = types.ModuleType("__main__")
    if main_file:
        main.__file__ = main_file
    sys.modules["__main__"] = main
    _reseed()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)  # before anything can open a context on device 0


@functools.cache
def blas_libraries() -> Any:
    """Return those that are loaded, as numpy's. To find them takes milliseconds, so the fork server does it once."""
    import threadpoolctl

    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def _use_threads(n: int, environ: Mapping[str, str]) -> None:
    """Have libraries compute with ``n`` threads: by a call where they are loaded, else by variables that they read.

    A variable that the script has set stays, ``environ`` being its environment.
    """
    torch.set_num_threads(n)
    blas_libraries().limit(limits=n)
    os.environ.update({name: str(n) for name in _THREAD_VARIABLES if name not in environ})


def _reseed() -> None:
    """Every fork of the server inherits the same random state. Accelerators' does not exist before they are used."""
    random.seed()
    torch.default_generator.seed()  # `torch.seed` takes 7 ms and 1.5 MiB
    if numpy_random := sys.modules.get("numpy.random"):  # numpy loads it when it is first used
        numpy_random.seed()


def _pack_exception(error: BaseException, where: str) -> Packed:
    """Pack an exception with its description; a stand-in for one that cannot be rebuilt in the parent process."""
    failure = Failure.from_exception(error, where)
    if isinstance(error, Exception):
        with contextlib.suppress(Exception, SystemExit):  # of its own `__reduce__`, or as it is rebuilt
            packed = AnswerReducer().pack((error, failure))
            rebuilt, _ = loads(packed.pickle, [bytearray(buffer) for buffer in packed.buffers])
            if type(rebuilt) is type(error):
                str(rebuilt)  # it may need what has not come along
                return packed
    return dumps((RemoteError(f"{qualified_name(type(error))}: {failure.message}"), failure))


_THREAD_VARIABLES = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"
_is_spent = False  # no task can succeed in this process any more
