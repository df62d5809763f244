"""The headers of the messages between a pool and its workers. `channel` describes the format of a message.

The pool sends one `WorkerSetup` first, then `KeepObject`, `ForgetObjects` and `TaskHeader`. The worker sends only
`Answer`. Orders (cancel, tell the stack, hand back) go through a socket of their own, because the worker reads no
message while it does a task.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..process_environment import ProcessAttributes

STARTED = 0  # the number of the first answer of a worker, which says that the worker takes tasks
Order = struct.Struct("=Q")  # an order: the number of the task to cancel, or one of the next two numbers
TELL_STACK = 0  # send the stack of the main thread
HAND_BACK = 1  # send the results of the batch so far, and begin no further call of it
FIRST_TASK = 2  # the lowest number of a task
BATCH_S = 0.01  # a worker begins no further call of a batch after this time


class WorkerSetup(NamedTuple):
    """The payload of the first message to a worker: the attributes of the script that a new fork does not have."""

    rank: int
    device: str
    environ: dict[str, str]
    directory: str
    path: list[str]  # `sys.path`
    argv: list[str]  # `sys.argv`
    main_file: str | None  # the file of the script
    authkey: bytes  # of `multiprocessing`, by which its managers, listeners and queues accept connections
    attributes: ProcessAttributes


class KeepObject(NamedTuple):
    """A request to keep the payload for later tasks."""

    number: int  # of the handle


class ForgetObjects(NamedTuple):
    """A request to delete kept objects."""

    numbers: Sequence[int]  # of the handles


class Ranks(NamedTuple):
    """The ranks of a `run`, as each of them is told."""

    world_size: int = 0  # 0: the task is no `run`, and its worker is alone
    store_host: str = ""
    store_port: int = 0
    group: int = 0  # the number of their process group. After a failure the ranks get a new number, and a new group
    nodes: Sequence[int] = ()  # by rank: the number of its node; empty: all ranks are on one node


ALONE = Ranks()


class TaskHeader(NamedTuple):
    """A task: one call, or a batch of calls of a function that the worker keeps.

    For one call, the payload is ``(fn, args, kwargs)``. There is no payload if ``calls`` holds the arguments.
    """

    number: int  # greater than that of any earlier task
    function: int = 0  # the number under which the worker keeps the function; 0: the function is in the payload
    calls: Sequence[bytes] = ()  # the pickled arguments of each call of that function
    seconds: float = 0.0  # no further call is begun after this time
    pass_device: bool = False
    # The cores for this worker, and so the number of torch's threads. 0: several workers share a core, so that this one
    # has one thread, and must sleep when it waits.
    cores: int = 0
    ranks: Ranks = ALONE

    @property
    def generation(self) -> int:
        """The number of the first generation (calls and barriers until a block fails) of the ranks of this task.

        Each failure of a block in the task begins the generation with the next number.
        """
        return self.number << 32


class Outcome(enum.Enum):
    """The outcome of a call."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


class Answer(NamedTuple):
    """The answer to a task. The payload is the result of the last call, or its exception and `Failure`."""

    number: int  # of the task
    results: Sequence[bytes] = ()  # the pickled results of the calls before the last one
    outcome: Outcome | None = None  # of the last call; None: there is no payload, and ``results`` holds all results
    goes_on: bool = False  # the batch was handed back: its next call runs and is answered later, others are not begun
    # A block failed, but the function caught the error and went on. The group is closed, perhaps not on all ranks.
    failed_inside: bool = False
    is_spent: bool = False  # the worker can do no further task, because its accelerator fails at every call
