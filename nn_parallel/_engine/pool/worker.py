"""A worker process: sets itself up as the parent's script would be, then answers one task after another."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

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
from ..pickling import Packed, dumps, loads
from ..process_environment import ProcessAttributes
from ..ranks.blocks import blocks_of
from ..ranks.context import RankContext, current_world, join, rank_context
from ..ranks.records import HAS_LEFT, WAITING, Progress, Waits, call_name
from ..ranks.reports import Reports
from ..ranks.sockets import loopback
from ..ranks.watchdog import cause_of
from ..stack_dump import main_stack, offer_stack
from ..tracebacks import user_frames
from .channel import Channel, Payload, Unpack
from .memory_files import Files
from .messages import TASK_FORMAT, Places, TaskHeader

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
R = TypeVar("R")
NO_TASK, STARTED = -1, 0  # less than the number of any task; the number of the answer that says the worker is set up
INTERRUPT_EVERY_S = 0.02
RECOVERS_WITHIN_S = 10.0
SUCCEEDED, FAILED, CANCELLED = range(3)  # how a task ends

# The header of an answer, whose packed object is the result, or the exception and its `Failure`: the task's number;
# how it ended; whether a block of a run failed inside, which went on, so that its group was closed, perhaps not on all
# ranks; whether the worker can do no more, as its accelerator fails whatever is asked of it.
ANSWER_FORMAT = "QB??"
# What the parent orders a worker beside its tasks: a kind and a number.
Order = struct.Struct("=BQ")
CANCEL, FORGET, TELL_STACK = range(3)
LOOPBACK = "::1"  # of the pool's store, see `loopback`
ranks_prefix = "group{}".format  # of the keys in the pool's store, by the number of the ranks' group
STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 1  # has faulthandler tell the stack of the main thread


class WorkerSetup(NamedTuple):
    """What no fork can know: the packed object of the first message."""

    rank: int
    device: str
    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    main_file: str | None
    authkey: bytes  # of `multiprocessing`: for its managers, listeners and queues
    attributes: ProcessAttributes


def work(sock: socket.socket, control: socket.socket) -> int:
    """Answer the tasks that arrive on ``sock`` until it is closed; returns the exit code.

    Meanwhile a thread follows the orders that arrive on ``control``, where also the stacks go that are asked for.
    """
    faulthandler.register(STACK_SIGNAL, control.fileno(), all_threads=False)
    connection, files = Channel(sock, sends=ANSWER_FORMAT, receives=TASK_FORMAT), Files()
    arriving = connection.messages()
    first = next(arriving, None)
    if first is None:
        return 0
    _, unpack = first
    setup = WorkerSetup(*unpack())
    _become_like_the_parent(setup)
    keep_handler()
    offer_stack(f"rank {setup.rank}")
    worker = _Worker(setup)
    connection.device = worker.device
    connection.send((STARTED, SUCCEEDED, False, False), Payload(_NOTHING, files))
    threading.Thread(target=worker.follow_orders, args=[control], name="nn_parallel orders", daemon=True).start()
    for message in arriving:
        header, unpack = message
        task = TaskHeader(*header)
        if not task.is_call:
            store_object(task.number, unpack)
            continue
        connection.spins = task.cores > 0
        outcome, failed_inside, packed = worker.perform(task, unpack)
        del message, unpack  # a tensor that the result does not need must not outlive its task
        flush_output()
        try:
            try:
                payload = Payload(packed, files)
                del packed
                connection.send((task.number, outcome, failed_inside, _is_spent), payload)
            except TransferError as error:
                told = Payload(_pack_exception(error, worker.where(task)), files)
                connection.send((task.number, FAILED, failed_inside, _is_spent), told)
        except ConnectionError:  # the parent is gone
            return 0
    return 0


class _Worker:
    def __init__(self, setup: WorkerSetup) -> None:
        self._index = setup.rank
        self.device = torch.device(setup.device)
        self._alone = RankContext(World(False, 0, 0, 1, self.device, launcher="executor"))
        self._rank: RankContext | None = None  # as a rank, with the group of this number
        self._group = 0
        self._store: dist.Store | None = None
        self._store_address = "", 0
        self._cores = -1  # not known yet
        self._environ = setup.environ
        self._switching = threading.Lock()  # between the main thread, which changes tasks, and the one that cancels
        self._task = self._cancelled = NO_TASK
        self._block = CancelScope()  # what the main thread does for the task
        self._reports: Reports | None = None  # of the last run that left a process group
        self._deadlock: Exception | None = None  # why it was interrupted, if it was not cancelled

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
                    forget(number)
                elif kind == TELL_STACK:
                    control.send(main_stack().encode(errors="backslashreplace"))
                else:
                    self._cancelled = number  # it may not have begun yet
                    interrupting = self._interrupt_cancelled()

    def _interrupt_cancelled(self) -> bool:
        """Interrupt the cancelled task; whether it runs."""
        with self._switching:
            if self._task != self._cancelled:
                return False
            context = rank_context()
            self._block.interrupt()  # before the abort, after which collectives on accelerators return wrong numbers
            if context is not None and context.open_store is not None:
                context.group.abort()
            return True

    def _end_deadlock(self, reason: Exception) -> None:
        """Interrupt the task, which waits in a collective that cannot end, or has failed."""
        with self._switching:
            if self._task != NO_TASK and self._rank is not None:
                self._deadlock = reason
                self._block.interrupt()
                self._rank.group.abort()

    def perform(self, task: TaskHeader, unpack: Unpack) -> tuple[int, bool, Packed]:
        """How it ended, whether blocks failed inside, and what comes of it."""
        if task.cores != self._cores:
            if self._cores >= 0:
                blas_libraries.cache_clear()  # tasks may have loaded some
            self._cores = task.cores
            _use_threads(max(1, task.cores), self._environ)
        generation = task.generation
        if self._reports is not None:
            self._reports.waits = None
        context = self._enter(task, generation) if task.world_size else self._alone
        join(context)
        with self._switching:
            self._task, self._block.interrupted = task.number, self._cancelled == task.number
            self._deadlock = None
        try:
            try:
                with self._block:
                    outcome, packed = SUCCEEDED, self._call(task, unpack)
            finally:
                with self._switching:  # from here on nothing interrupts it
                    self._task = NO_TASK
        except BaseException as error:
            error = cause_of(error, self._deadlock)
            if isinstance(error, Interrupted):
                outcome, packed = CANCELLED, _NOTHING
            else:
                outcome, packed = FAILED, _pack_exception(error, self.where(task))
        if task.world_size and outcome != SUCCEEDED:
            # It frees the ranks that wait for this one in a collective: only once this cannot be cancelled any more,
            # or what they then raise could outrun the cause.
            context.group.close()
        if outcome != SUCCEEDED:
            _recover(self.device)
        join(self._alone)
        return outcome, task.world_size > 0 and context.generation != generation, packed

    def where(self, task: TaskHeader) -> str:
        """Where a task runs, for the description of its failure."""
        where = f"rank {self._index} of {task.world_size}" if task.world_size else "a single task"
        return f"{where} on {self.device}"

    def _call(self, task: TaskHeader, unpack: Unpack) -> Packed:
        result = in_this_process(self._result, task, unpack)
        return AnswerReducer().pack(result, lambda: {"the result": result})

    def _result(self, task: TaskHeader, unpack: Unpack) -> Any:
        try:
            *_, fn, args, kwargs = unpack()
            if task.function:
                fn = stored_object(task.function).function()
        except Interrupted:
            raise
        except BaseException as error:
            raise TransferError(f"The call cannot be rebuilt in the worker: {error!r}") from error
        result = call_on_device(fn, args, kwargs, self.device if task.pass_device else None)
        background.finish()  # the process may end with its pool
        if not _is_spent:
            synchronize(self.device)  # what fails there is this task's failure, and not that of the next one
        if self._rank is not None and task.world_size > 1 and self._rank.has_store:
            self._say_returned(task, call_name(fn))
        return result

    def _say_returned(self, task: TaskHeader, name: str) -> None:
        """For the ranks that are still in the run: this one makes no call or collective before all have ended it."""
        here = blocks_of(self._rank)
        assert here is not None
        here.reports.post(HAS_LEFT)  # makes no more calls in this generation
        if not dist.is_initialized():
            return
        others = [rank for rank in range(task.world_size) if rank != self._index]
        next_run = Progress(task.generation + (1 << 32), 0, WAITING)
        here.watch()  # tells the others
        self._reports = here.reports
        self._reports.waits = Waits(f"has returned from {name}", tuple(others), next_run)

    def _enter(self, task: TaskHeader, generation: int) -> RankContext:
        """This worker as a rank of a run."""
        if self._rank is None or self._group != task.group:
            self._leave()
            self._group = task.group
            places: Places | None = stored_object(task.places) if task.places else None
            nodes = places.nodes if places else [0] * task.world_size
            host = places.store_host if places else loopback(LOOPBACK)
            self._rank = RankContext(
                self._world_of(nodes), lambda: self._open_store(host, task), one_node=len(set(nodes)) == 1
            )
            self._rank.on_deadlock = self._end_deadlock
        self._rank.begin_generation(generation)
        return self._rank

    def _world_of(self, nodes: Sequence[int]) -> World:
        mine = nodes[self._index]
        before, here = nodes[: self._index].count(mine), nodes.count(mine)
        return World(False, self._index, before, len(nodes), self.device, mine, here, launcher="executor")

    def _open_store(self, host: str, task: TaskHeader) -> dist.Store:
        if self._store is None or self._store_address != (host, task.store_port):
            self._store_address = host, task.store_port
            self._store = dist.TCPStore(
                *self._store_address,
                is_master=False,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
            )
        return dist.PrefixStore(ranks_prefix(task.group), self._store)

    def _leave(self) -> None:
        if self._rank is not None:
            self._rank.leave(abort=True)
            self._reports = None


def in_this_process(call: Callable[..., R], /, *args: Any) -> R:
    """What ``call(*args)`` returns in this process; a child that it forks ends as it comes out of the call.

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
    """The results of a chunk of a map, up to the first call that fails; and how that one has failed."""
    results: list[R] = []
    here = current_world().device
    for item in items:
        try:
            result = in_this_process(call_on_device, fn, item, {}, device)
            synchronize(here)
            results.append(result)
        except Interrupted:
            raise
        except BaseException as error:
            packed = _pack_exception(error, f"a single task on {here}")
            _recover(here)
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG, STACK_SIGNAL])  # by which the pool reaches it
    if dict(os.environ) != setup.environ:  # or it would take half a MiB of memory of its own
        os.environ.clear()
        os.environ.update(setup.environ)
        time.tzset()
    with contextlib.suppress(OSError):  # it was removed meanwhile
        os.chdir(setup.directory)
    sys.path[:] = setup.path
    sys.argv[:] = setup.argv
    main = types.ModuleType("__main__")
    if setup.main_file:
        main.__file__ = setup.main_file
    sys.modules["__main__"] = main
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.current_process().authkey = setup.authkey
    _reseed()
    device = torch.device(setup.device)
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
    """The exception and its description; a stand-in for one that does not survive the way to the parent and back."""
    failure = Failure.of(error, where)
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
_NOTHING = dumps(None)
