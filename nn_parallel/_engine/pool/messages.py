"""The headers of the messages between a pool and its workers."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..process_environment import ProcessAttributes

STARTED = 0  # the number of the answer that says a worker takes tasks
Order = struct.Struct("=Q")  # beside the tasks: the number of the task to cancel, or one of these
TELL_STACK = 0
HAND_BACK = 1  # answer the calls of the batch that are over, and begin no more of them
FIRST_TASK = 2
BATCH_S = 0.01  # how long a worker goes on to begin the calls of a batch


class WorkerSetup(NamedTuple):
    """The payload of the first message to a worker: what no fork can know."""

    rank: int
    device: str
    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    main_file: str | None
    authkey: bytes  # of `multiprocessing`: for its managers, listeners and queues
    attributes: ProcessAttributes


class KeepObject(NamedTuple):
    """Keep the payload for later tasks."""

    number: int


class ForgetObjects(NamedTuple):
    """The objects of these numbers need not be kept any more."""

    numbers: Sequence[int]


class Ranks(NamedTuple):
    """The ranks of which a task is one, as all of them are told."""

    world_size: int = 0  # 0: it is none, and runs alone
    store_host: str = ""
    store_port: int = 0
    group: int = 0  # the number of their process group and counters: after a failure they are not used again
    nodes: Sequence[int] = ()  # by rank; empty: all are on one node


ALONE = Ranks()


class TaskHeader(NamedTuple):
    """A task. The payload is ``(fn, args, kwargs)``, or there is none and ``calls`` holds arguments."""

    number: int  # greater than that of any earlier task
    function: int = 0  # the number under which the worker keeps the function; 0: it comes with the payload
    calls: Sequence[bytes] = ()  # the pickled arguments of calls of that function, one after another
    seconds: float = 0.0  # after which no more of the calls are begun
    pass_device: bool = False
    cores: int = 0  # for this worker: the threads of torch; 0: it shares one, and leaves it to the others as it waits
    ranks: Ranks = ALONE

    @property
    def generation(self) -> int:
        """The ranks of each run count their calls anew; blocks that fail in it begin further generations."""
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
    outcome: Outcome | None = None  # of the last call; None: its result is the last of ``results``
    goes_on: bool = False  # the call after these results still runs; those after that are not begun
    failed_inside: bool = False  # a block failed and the run went on: its group is closed, perhaps not on all ranks
    is_spent: bool = False  # the worker can do no more: its accelerator fails whatever is asked of it
