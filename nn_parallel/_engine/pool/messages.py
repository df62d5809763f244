"""What workers are told of a task beside its function and arguments."""

from __future__ import annotations

from typing import NamedTuple

TASK_FORMAT = "Q?Q?IIIQQQ"  # see TaskHeader


class Places(NamedTuple):
    """Where the ranks of a run on several nodes are, and their store."""

    nodes: list[int]  # by rank
    store_host: str


class Ranks(NamedTuple):
    """The ranks of which a task is one, as all of them are told."""

    world_size: int = 0  # 0: it is none, and runs alone
    store_port: int = 0
    group: int = 0  # the number of their process group and counters: after a failure they are not used again
    round: int = 0  # greater than that of any earlier run: they count their calls anew; 0: the number of the task
    places: int = 0  # the number under which the worker keeps their `Places`; 0: all are on this node


ALONE = Ranks()


class TaskHeader(NamedTuple):
    """The header of a task, whose packed object is ``(fn, args, kwargs)``; of an object to keep for later tasks."""

    number: int  # of the task, greater than that of any earlier one; or of the object
    is_call: bool
    function: int = 0  # the number under which the worker keeps the function; 0 if it comes with the arguments
    pass_device: bool = False
    cores: int = 0  # for this worker: the threads of torch; 0: it shares one, and leaves it to the others as it waits
    # Those of `Ranks`.
    world_size: int = 0
    store_port: int = 0
    group: int = 0
    round: int = 0
    places: int = 0

    @property
    def generation(self) -> int:
        """The ranks of each run count their calls anew; blocks that fail in it begin further generations."""
        return (self.round or self.number) << 32
