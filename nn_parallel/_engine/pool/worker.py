"""The main loop of a worker.

The process first takes over the environment, the working directory and the import path of the script, and then does one
task after another.

A worker has two threads. The main thread does the tasks. While it is in user code, it reads no messages. So the orders
of the pool (cancel a task, send your stack, hand back the rest of a batch of `map` calls) arrive on a socket of their
own, which a second thread reads.

To cancel a task, the second thread sends a signal to the main thread, and the handler of the signal raises
`Interrupted` there (`CancelScope`). Three things can go wrong:

- The order can arrive before the task has begun, or after it has ended. So the order contains the number of the task.
  The second thread records this number, and interrupts only the task with this number. The second thread holds the lock
  `_task_lock` meanwhile, and the main thread holds it while it begins or ends a task. If the order arrives before its
  task, the task is interrupted as it begins.
- The signal can be without effect: a wait in C code begins just after the signal, or user code catches the exception.
  So the second thread repeats the interrupt until the task has ended.
- A signal does not end a collective, which waits in C code. So the second thread also aborts the process group. The
  interrupt comes before the abort, because an aborted collective on an accelerator returns wrong numbers, with which
  the task would go on.

When a rank of a `run` fails, it closes its process group, so that the other ranks do not wait for it in a collective.
Their collectives then fail, too, and their errors may reach the pool before the error of the rank that has failed
first. The pool would then cancel that rank, and the cause of the failure would be lost. Therefore a failing rank takes
two steps. In the first step it ends its task, which can then no longer be cancelled. In the second step it closes its
process group.
"""

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

from ...errors import RankError, RemoteError, TransferError
from ...world import World
from .. import background
from ..by_value.globals import forget, store_object, stored_object
from ..by_value.reducer import AnswerReducer
from ..descendants import end_with
from ..devices import call_on_device, synchronize, synchronize_in_thread
from ..failures import Failure, qualified_name, set_cause
from ..interrupts import CancelScope, Interrupted, RLock, keep_handler
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

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
R = TypeVar("R")
NO_TASK = -1  # stands for the number of a task if there is no task
INTERRUPT_EVERY_S = 0.02  # how often a cancelled task is interrupted until it has ended
RECOVERS_WITHIN_S = 10.0  # how long an accelerator may take, after a failed call, to finish the work queued on it
RESULTS_BYTES = SMALL_BYTES // 2  # a batch ends when its results are larger than this, so that they fit into one packet


def work(sock: socket.socket, control: socket.socket) -> int:
    """Do the tasks that arrive on ``sock``, until the pool closes it; return the exit code of the process.

    A second thread follows the orders that arrive on ``control``. If an order asks for the stack of the main thread,
    the second thread sends the stack on ``control``.
    """
    channel = Channel(sock)
    with contextlib.suppress(EOFError, ConnectionError):  # the script has ended, or the pool has closed the connection
        _, payload = channel.receive()  # type: ignore[misc]  # it is not None, because `receive` waits
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
    """Receive a message, and do what it demands.

    This is a function, not the body of a loop, so that no variable keeps the objects of the message alive until the
    next message.
    """
    header, payload = channel.receive()  # type: ignore[misc]  # it is not None, because `receive` waits
    if isinstance(header, KeepObject):
        store_object(header.number, functools.partial(payload.load, worker.device))
        return
    if isinstance(header, ForgetObjects):
        for number in header.numbers:
            forget(number)
        return
    answer, packed = worker.perform(header, payload)
    del payload  # the tensors of the arguments must not outlive the task, unless the result contains them
    flush_output()
    try:
        message = None if packed is None else Payload(packed)
        del packed
        channel.send(answer, message)
    except TransferError as error:
        answer = answer._replace(outcome=Outcome.FAILED)
        channel.send(answer, Payload(_pack_exception(error, worker.describe_place(header))))
    if header.cores:  # otherwise several workers share a core, which `wait_for_more` would keep busy
        channel.wait_for_more()


class TaskRunner:
    """Does the tasks of one worker, in the main thread of its process. Another thread cancels tasks."""

    def __init__(
        self, rank: int, device: torch.device, environ: Mapping[str, str], send: Callable[[Answer], object]
    ) -> None:
        """Prepare to do tasks.

        Args:
            rank: the rank of the worker.
            device: the device of its tasks.
            environ: the environment of the script.
            send: sends the answer of `hand_back`, which comes before the final answer that `perform` returns.
        """
        self._send = send
        self._calls = deque[bytes | Received]()  # the calls of the present task that have not begun
        # The results of those calls of the present task that have ended, pickled. Not among them are results that
        # `hand_back` has sent, and a result that is not simple, see `_do_calls`.
        self._results: list[bytes] = []
        # The function of the present task, if it is one that this worker keeps. The first call of the task sets it.
        self._function: Callable[..., Any] | None = None
        self._rank = rank
        self.device = device
        # The contexts of this worker as a rank: `_alone` in single tasks, `_rank_context` in a `run`. Successive runs
        # with the same `Ranks.group` use the same `_rank_context`.
        self._alone = RankContext(World(False, 0, 0, 1, self.device, launcher="executor"))
        self._rank_context: RankContext | None = None
        self._group_number = 0  # the `Ranks.group` for which `_rank_context` was made
        self._store: dist.Store | None = None  # the connection to the store of the pool at `_store_address`
        self._store_address = "", 0
        self._cores = -1  # the number of cores that the last task has set; -1 before the first task
        self._environ = environ
        self._task_lock = RLock()  # held to begin or end a task, to interrupt it, and to hand back a batch
        self._task = NO_TASK  # the number of the task that runs and can be cancelled
        self._cancelled = NO_TASK  # the number of the last task that the pool or the watchdog has cancelled
        self._is_batch = False  # True if the present task is a batch of a `map`, which `hand_back` may cut short
        self._scope = CancelScope()  # entered around the calls of a task; the thread of the orders interrupts it
        # The status board on which `_post_return` has published that the function of a `run` has returned on this rank.
        # `perform` uses it to withdraw the publication when the next task begins.
        self._board: StatusBoard | None = None
        self._deadlock: Exception | None = None  # the error with which the watchdog has ended the present task, or None

    def follow_orders(self, control: socket.socket) -> None:
        """Follow the orders of the pool that arrive on ``control``, until the pool closes the connection."""
        must_repeat = False  # True while a cancelled task still runs; it must be interrupted repeatedly
        with contextlib.suppress(ConnectionError):
            while True:
                if must_repeat and not select.select([control], [], [], INTERRUPT_EVERY_S)[0]:
                    must_repeat = self.interrupt_cancelled()
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
                    must_repeat = self.cancel(number)

    def cancel(self, number: int) -> bool:
        """Interrupt the task with this number, now or when it begins. Return whether it runs now."""
        self._cancelled = number
        return self.interrupt_cancelled()

    def interrupt_cancelled(self) -> bool:
        """Interrupt the cancelled task, if it runs. Return whether it runs.

        While this method returns True, the caller must repeat the call, because an interrupt may have no effect.
        """
        with self._task_lock:
            if self._task != self._cancelled:
                return False
            context = rank_context()
            self._scope.interrupt()  # before the abort, see the beginning of this module
            if context is not None and context.open_store is not None:
                context.group.abort()
            return True

    def hand_back(self) -> None:
        """Send the results of the batch so far, and drop its calls that have not begun. The call that runs goes on.

        The pool then gives the dropped calls to other workers.
        """
        with self._task_lock:
            # The order may arrive too late: the batch has ended, and perhaps a task that is not a batch runs now.
            if self._task != NO_TASK and self._is_batch and (self._results or self._calls):
                self._send(Answer(self._task, self._results, goes_on=True))
                self._results = []
                self._calls.clear()

    def _end_deadlock(self, reason: Exception, generation: int) -> None:
        """End the task of this generation, because its collective has failed or can never end. The watchdog calls this.

        The task may have ended since the watchdog found the reason. Then the task that runs now goes on.
        """
        with self._task_lock:
            context = rank_context()
            if self._task == NO_TASK or context is None or context.generation != generation:
                return
            self._deadlock = reason
            self._cancelled = self._task
        while self.interrupt_cancelled():
            time.sleep(INTERRUPT_EVERY_S)

    def perform(self, task: TaskHeader, payload: Received) -> tuple[Answer, Packed | None]:
        """Do a task. Return the answer and its payload.

        If a call has failed, the payload is the exception with its `Failure`. Otherwise the answer itself holds the
        simple results, and the payload is the last result if that result is not simple (see `_do_calls`). The
        payload is None if all results are simple, or if the task was cancelled.
        """
        if task.cores != self._cores:
            if self._cores >= 0:
                blas_libraries.cache_clear()  # a task may have loaded a library since the last search
            self._cores = task.cores
            _use_threads(max(1, task.cores), self._environ)
        generation = task.generation
        if self._board is not None:
            self._board.waits = None  # withdraws the record that `_post_return` has published after the last `run`
        context = self._enter(task, generation) if task.ranks.world_size else self._alone
        join(context)
        with self._task_lock:
            self._task = task.number
            self._is_batch = task.seconds > 0
            self._scope.interrupted = self._cancelled == task.number
            self._deadlock = None
            self._calls.extend(task.calls or [payload])
        outcome: Outcome | None = None
        packed: Packed | None = None
        try:
            try:
                with self._scope:
                    packed = self._do_calls(task)
                outcome = None if packed is None else Outcome.SUCCEEDED  # None: `results` holds all results
            finally:
                with self._task_lock:  # from here on, the task cannot be cancelled
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
                packed = _pack_exception(error, self.describe_place(task))
        has_failed = outcome in (Outcome.FAILED, Outcome.CANCELLED)
        if task.ranks.world_size and has_failed:
            context.group.close()  # only after the task has ended above; the beginning of this module says why
        if has_failed:
            _recover(self.device)
        join(self._alone)
        failed_inside = task.ranks.world_size > 0 and context.generation != generation
        return Answer(task.number, results, outcome, failed_inside=failed_inside, is_spent=_is_spent), packed

    def describe_place(self, task: TaskHeader) -> str:
        """Return the rank and device on which a task runs, in words, for the description of its failure."""
        size = task.ranks.world_size
        place = f"rank {self._rank} of {size}" if size else "a single task"
        return f"{place} on {self.device}"

    def _do_calls(self, task: TaskHeader) -> Packed | None:
        """Do the calls of a task until its time is over. Add simple results (numbers, short texts) to `_results`.

        Returns:
            The packed form of the first result that is not simple, or None if all results are simple. After a result
            that is not simple, no further call is begun.
        """
        begun = time.monotonic()
        size = 0
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:  # all calls are done, or `hand_back` has just dropped the calls that were left
                return None
            result = in_this_process(self._call, task, call)
            atoms = dump_atoms(result)
            if atoms is None:
                return AnswerReducer().pack(result, functools.partial(dict, {"the result": result}))
            with self._task_lock:  # `hand_back` must not send the results at the same time
                self._results.append(atoms)
            size += len(atoms)
            if size > RESULTS_BYTES or time.monotonic() - begun > task.seconds:
                return None

    def _call(self, task: TaskHeader, arguments: bytes | Received) -> Any:
        """Unpickle a call, make it, and return its result."""
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
        # Wait for work in threads, such as the writing of a checkpoint. If the pool is closed after this call, this
        # process ends, and unfinished work would be lost.
        background.finish()
        if not _is_spent:
            synchronize(self.device)  # so that a failure of queued work is raised in this call, and not in the next one
        if self._rank_context is not None and task.ranks.world_size > 1 and self._rank_context.has_store:
            self._post_return(task, call_name(fn))
        return result

    def _post_return(self, task: TaskHeader, name: str) -> None:
        """Tell the other ranks of a `run` that the function has returned on this rank.

        This rank makes no further call or collective in this `run`. So if another rank waits for this rank, the wait
        can never end. If the other rank waits in a call, the call reads `HAS_LEFT` and raises an error. If the other
        rank waits in a collective, its watchdog reads the `Waits` of this rank and raises an error.
        """
        blocks = blocks_of(self._rank_context)
        assert blocks is not None
        blocks.board.post(HAS_LEFT)
        if not dist.is_initialized():
            return  # without a process group there are no collectives
        others = [rank for rank in range(task.ranks.world_size) if rank != self._rank]
        # `Waits` says that this rank waits until the others reach a position. No rank reaches the position `next_run`
        # in this `run`, so the others know that this rank enters no collective before the `run` is over.
        next_run = Position(task.generation + (1 << 32), 0, WAITING)
        blocks.watch()  # starts the watchdog, which publishes `waits`
        self._board = blocks.board
        self._board.waits = Waits(f"has returned from {name}", tuple(others), next_run)

    def _enter(self, task: TaskHeader, generation: int) -> RankContext:
        """Return the context of this worker as a rank of a `run`, made anew if the ranks have a new group number."""
        ranks = task.ranks
        if self._rank_context is None or self._group_number != ranks.group:
            self._leave()
            self._group_number = ranks.group
            nodes = ranks.nodes or [0] * ranks.world_size
            self._rank_context = RankContext(
                self._make_world(nodes), lambda: self._open_store(ranks), one_node=len(set(nodes)) == 1
            )
            self._rank_context.on_deadlock = self._end_deadlock
        self._rank_context.begin_generation(generation)
        return self._rank_context

    def _make_world(self, nodes: Sequence[int]) -> World:
        """Return the world of the ranks of a `run`. ``nodes`` has the number of the node of each rank."""
        node = nodes[self._rank]
        local_rank = nodes[: self._rank].count(node)
        local_world_size = nodes.count(node)
        return World(
            False, self._rank, local_rank, len(nodes), self.device, node, local_world_size, launcher="executor"
        )

    def store_address(self, ranks: Ranks) -> tuple[str, int]:
        """Return host and port of the store of these ranks. On Ray a subclass asks an actor: the store can move."""
        return ranks.store_host, ranks.store_port

    def _open_store(self, ranks: Ranks) -> dist.Store:
        """Return the pool's store, limited to the keys with the prefix of these ranks.

        The connection to the store is kept, so that a later `run` uses it again, with another prefix.
        """
        address = self.store_address(ranks)
        if self._store is None or self._store_address != address:
            self._store_address = address
            self._store = dist.TCPStore(
                *address, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
            )
        return dist.PrefixStore(ranks_prefix(ranks.group), self._store)

    def _leave(self) -> None:
        """Close the group of the last `run`, if there is one."""
        if self._rank_context is not None:
            self._rank_context.leave(abort=True)
            self._board = None


def in_this_process(call: Callable[..., R], /, *args: Any) -> R:
    """Return the result of ``call(*args)``. If ``call`` forks, end the child process instead of returning in the child.

    The child process has a copy of the worker's stack. If this function returned in the child, the child would send a
    second answer on the worker's connection, or wait for ever for a lock that another thread held at the fork.
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
    fn: Callable[..., R], pass_device: bool, items: Iterable[tuple[Any, ...]]
) -> tuple[list[R], tuple[Exception, Failure] | None]:
    """Call ``fn`` for each item of a chunk of a `map`, until a call fails.

    ``pass_device`` says whether ``fn`` gets the device of this process as its parameter ``device``.

    Returns:
        The results of the calls that succeeded; and the exception and `Failure` of the call that failed, or None if no
        call failed.
    """
    results: list[R] = []
    own_device = current_world().device
    device = own_device if pass_device else None
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
    """Free the memory of failed work on an accelerator. Set `_is_spent` if the accelerator fails at every call.

    After a failed assertion or an illegal memory access in a kernel, every CUDA call of the process fails. The pool
    then replaces this worker.
    """
    global _is_spent
    if device.type == "cpu":
        return
    try:
        synchronize_in_thread(device).result(RECOVERS_WITHIN_S)
        gc.collect()  # frees the tensors in the frames of the traceback
        torch.accelerator.memory.empty_cache()
    except Exception:  # the type depends on driver and version; TimeoutError if a kernel does not end
        _is_spent = True


def _end_as_a_script(error: BaseException | None = None) -> NoReturn:
    """End this process as Python ends a script that has finished, or that has raised ``error``."""
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
    """Write the buffered output of this process."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # user code may have closed or replaced the stream
            continue


def _become_like_the_parent(setup: WorkerSetup) -> None:
    """Give this process, a fork of the fork server, the attributes and the environment of the script's process."""
    server = os.getppid()
    setup.attributes.adopt()
    end_with(server)  # again, because the kernel drops PR_SET_PDEATHSIG if `adopt` changes the user of this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])  # this signal interrupts tasks
    if dict(os.environ) != setup.environ:  # to set equal values would copy 0.5 MiB of memory that all forks share
        os.environ.clear()
        os.environ.update(setup.environ)
        time.tzset()
    with contextlib.suppress(OSError):  # the directory may have been removed meanwhile
        os.chdir(setup.directory)
    sys.path[:] = setup.path
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.current_process().authkey = setup.authkey
    become_script(setup.argv, setup.main_file, torch.device(setup.device))


def become_script(argv: Sequence[str], main_file: str | None, device: torch.device) -> None:
    """Prepare this process to run code of the script.

    The process gets an empty ``__main__`` module, new random states and a current device.

    Args:
        argv: the arguments of the script.
        main_file: the file of the script, or None.
        device: the device of the worker.
    """
    sys.argv[:] = argv
    main = types.ModuleType("__main__")
    if main_file:
        main.__file__ = main_file
    sys.modules["__main__"] = main
    _reseed()
    if device.type != "cpu":
        # Set before the first use of an accelerator, because that opens a context on the current device, which would be
        # device 0 by default.
        torch.accelerator.set_device_index(device.index or 0)


@functools.cache
def blas_libraries() -> Any:
    """Return the loaded libraries for linear algebra, such as numpy's.

    The search takes milliseconds. The fork server calls this once, so that its workers inherit the result.
    """
    import threadpoolctl

    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def _use_threads(n: int, environ: Mapping[str, str]) -> None:
    """Set the number of threads with which torch and libraries for linear algebra compute.

    For a library that is loaded already, a function sets the number. A library that is loaded later reads the number
    from an environment variable. Variables that the script has set itself (``environ``) are not changed.
    """
    torch.set_num_threads(n)
    blas_libraries().limit(limits=n)
    os.environ.update({name: str(n) for name in _THREAD_VARIABLES if name not in environ})


def _reseed() -> None:
    """Set new random seeds, because all forks of the fork server inherit the same random state.

    An accelerator needs no new seed, because its random state is made when the accelerator is first used.
    """
    random.seed()
    torch.default_generator.seed()  # `torch.seed` would take 7 ms and 1.5 MiB
    if numpy_random := sys.modules.get("numpy.random"):  # numpy imports this module when it is first used
        numpy_random.seed()


def _pack_exception(error: BaseException, where: str) -> Packed:
    """Pack an exception with its `Failure`. If the parent process could not rebuild it, pack a `RemoteError` instead.

    ``where`` describes the rank and device of the task.
    """
    failure = Failure.from_exception(error, where)
    if isinstance(error, RankError):
        # A block in the task has failed. Pickle drops the traceback of an exception, so a leaf that was raised in this
        # process gets its traceback as text.
        for leaf in error.exceptions:
            if leaf.__traceback__ is not None:
                set_cause(leaf, Failure.from_exception(leaf, where).as_cause())
    if isinstance(error, Exception):
        # Pickling and rebuilding ``error`` call methods of its class, which may raise any exception. Then the
        # `RemoteError` below is packed.
        with contextlib.suppress(Exception, SystemExit):
            packed = AnswerReducer().pack((error, failure))
            rebuilt, _ = loads(packed.pickle, [bytearray(buffer) for buffer in packed.buffers])
            if type(rebuilt) is type(error):
                str(rebuilt)  # raises if `__str__` needs an attribute that was not pickled
                return packed
    return dumps((RemoteError(f"{qualified_name(type(error))}: {failure.message}"), failure))


_THREAD_VARIABLES = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"
_is_spent = False  # True once every call on the accelerator fails, see `_recover`; the pool then replaces this worker
