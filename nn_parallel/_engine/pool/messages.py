"""The headers of the messages between a pool and its workers. `channel` describes the format of a message.

The pool sends one `WorkerSetup` first, then `KeepObject`, `ForgetObjects` and `TaskHeader`. The worker sends only
`Answer`. A task is one call, or a *batch* of calls of a `map`. Orders (to cancel a task, to send the stack, to hand
back the rest of a batch) go through a socket of their own, because the worker reads no message while it does
a task.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..process_environment import ProcessAttributes

STARTED = 0  # `Answer.number` in the first answer of a worker, which says that the worker is ready for tasks
Order = struct.Struct("=Q")  # an order is one number: TELL_STACK, HAND_BACK, or the number of the task to cancel
TELL_STACK = 0  # the order to send the stack of the worker's main thread
HAND_BACK = 1  # the order to send the results of the batch so far, and to begin no further call of the batch
FIRST_TASK = 2  # the lowest number of a task, because the lower numbers are orders
BATCH_S = 0.01  # a worker that has worked on a batch for this time begins no further call of the batch


class WorkerSetup(NamedTuple):
    """The payload of the first message to a worker: the state of the script's process, which a new fork lacks."""

    rank: int
    device: str
    environ: dict[str, str]
    directory: str
    path: list[str]  # `sys.path`
    argv: list[str]  # `sys.argv`
    main_file: str | None  # the file of the script, if it has one
    authkey: bytes  # the key of `multiprocessing`, so that the worker can connect to managers of the script
    attributes: ProcessAttributes


class KeepObject(NamedTuple):
    """The header of a message whose payload the worker must keep for later tasks."""

    number: int  # the number with which later tasks refer to the object


class ForgetObjects(NamedTuple):
    """The header of a message that tells the worker to delete objects that it keeps."""

    numbers: Sequence[int]  # the `KeepObject.number` of each object


class Ranks(NamedTuple):
    """The ranks of a `run`, as the header of the task describes them to each worker."""

    world_size: int = 0  # 0 if the task is not a `run`, but a task for a single worker
    store_host: str = ""
    store_port: int = 0
    # The number of the ranks' process group. Successive runs with the same number use the same group. After a failure
    # the number is raised, so that the ranks make a new group.
    group: int = 0
    nodes: Sequence[int] = ()  # the number of each rank's node, in the order of ranks; empty if there is one node only


ALONE = Ranks()  # the ranks of every task that is not a `run`


class TaskHeader(NamedTuple):
    """The header of a task: one call, or a batch of calls of a function that the worker keeps.

    For one call, the payload is ``(fn, args, kwargs)``. There is no payload if ``calls`` holds the arguments.
    """

    number: int  # the number of the task, greater than that of any earlier task
    function: int = 0  # the number under which the worker keeps the function; 0 if the function is in the payload
    calls: Sequence[bytes] = ()  # the pickled arguments of each call of that function
    seconds: float = 0.0  # 0 for a single call; in a batch, the worker begins no further call after this time
    pass_device: bool = False
    # The number of cores for this worker, which is also the number of its threads in torch. It is 0 if several workers
    # share a core. The worker then has one thread, and waits for messages by sleeping, to leave the core to the others.
    cores: int = 0
    ranks: Ranks = ALONE

    @property
    def generation(self) -> int:
        """The number of the generation in which the ranks of this task begin.

        A generation is all calls and barriers of ranks between two failures of blocks (see `blocks`). Each failure of a
        block begins the generation with the next number, so one task can use several numbers. Because of the shift,
        these numbers never reach the first number of the next task.
        """
        return self.number << 32


class Outcome(enum.Enum):
    """The outcome of a call."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


class Answer(NamedTuple):
    """The answer to a task.

    The payload is the result of the last call, or its exception and `Failure`. There is no payload if ``results`` holds
    all results, or if the task was cancelled.
    """

    number: int  # the number of the task
    results: Sequence[bytes] = ()  # the pickled results of the calls, without the last one if ``outcome`` is set
    outcome: Outcome | None = None  # the outcome of the last call; None if ``results`` holds all results
    # True in the reply to HAND_BACK. The call that runs will be answered later, and the calls after it will not begin.
    goes_on: bool = False
    # True if a block of a `run` failed, but the function caught the error and went on. The next `run` then needs a new
    # process group, because the failure has closed the group, perhaps not on all ranks.
    failed_inside: bool = False
    is_spent: bool = False  # True if the accelerator fails whenever it is used; the pool then replaces the worker
