"""What the script and the nodes of a Ray cluster send each other: calls, and how they have ended."""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ...errors import RankTimeoutError
from ..by_value.packer import CallOptions, Handle, PackedCall
from ..pickling import Packed, memory_of
from ..pool.channel import Payload, Received
from ..pool.messages import Ranks
from ..pool.tasks import Answer, Run, Task
from ..pool.worker import CANCELLED, FAILED

LARGE_BYTES = 1 << 16  # what Ray carries beside a message


class Call(NamedTuple):
    """A call on one worker, or on all of a node as ranks of a run. Beside it come the handles that the node lacks."""

    number: int  # of a run; 0: it is none
    name: str
    options: CallOptions
    function: int  # see `PackedCall`
    payload: Packed
    handles: list[int]  # the numbers of what the workers keep for it
    lacking: list[int]  # of these, what comes along
    ranks: Ranks | None = None  # of a run, if some are on other nodes


class Told(NamedTuple):
    """What a node answers."""

    answers: Mapping[int, tuple[int, Received | Exception]]  # by rank: how it has ended, and with what
    error: Exception | None = None  # of the call as a whole
    group: int = 0  # the number of the pool's own: if it is another one, ranks on several nodes need a new group
    can_go_on: bool = True


@dataclass
class Sent:
    """A task that nodes have got."""

    handles: set[int]  # the numbers of what they then have
    nodes: dict[Any, Any] = field(default_factory=dict)  # who have not answered, by Ray's reference to the answer
    late: list[RankTimeoutError] = field(default_factory=list)

    def complete(self, task: Task, told: Told) -> bool:
        """Add what a node has told; whether ``task`` must end on the others."""
        if not isinstance(task, Run):
            task.complete(0, answer_of(task.call, *next(iter(told.answers.values()), (FAILED, told.error))))
            return False
        for rank, (outcome, packed) in told.answers.items():
            task.complete(rank, answer_of(task.call, outcome, packed))
        if isinstance(told.error, RankTimeoutError):
            self.late.append(told.error)  # the time is up on all nodes: the others say so, too
        elif told.error is not None:  # the cause of what fails on other nodes
            task.fail(told.error)
        if not self.nodes and self.late:
            task.fail(_all_of(self.late))
        return task.error is not None or any(answer.outcome == FAILED for answer in task.answers.values())


def to_send(message: object) -> tuple[Any, ...]:
    """``message`` as Ray carries it soonest: a pickle, and what is large beside it."""
    large = list[pickle.PickleBuffer]()

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if is_large := buffer.raw().nbytes >= LARGE_BYTES:
            large.append(buffer)
        return not is_large

    return pickle.dumps(message, protocol=5, buffer_callback=stays), *large


def received(pickled: bytes, beside: Iterable[Any]) -> Any:
    """The message; what was beside it is taken from ``beside``."""
    return pickle.loads(pickled, buffers=beside)


def portable(payload: Payload) -> Packed:
    """What ``payload`` was made of, for another machine."""
    packed = payload.packed()
    return packed._replace(buffers=_buffers(packed.buffers), shared=_buffers(map(memory_of, packed.shared)))


def _buffers(memory: Iterable[Any]) -> list[Any]:
    return [pickle.PickleBuffer(memoryview(each).cast("B")) for each in memory]  # Ray crashes at other formats


def arrived(packed: Packed) -> Packed:
    """What `portable` has made, where the workers can share what others have shared."""
    shared = [_shared(memory) for memory in packed.shared]
    return packed._replace(buffers=[memoryview(each) for each in packed.buffers], shared=shared)


def _shared(memory: Any) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.frombuffer(bytearray(memory), dtype=torch.uint8).untyped_storage()
    storage.share_memory_()
    return storage


class Sender:
    """Makes the messages of the script."""

    def __init__(self, put: Callable[[Any], Any]) -> None:
        """``put`` puts something into Ray's object store, and returns Ray's reference to it."""
        self._put = put
        self._stored = weakref.WeakKeyDictionary[Handle, Any]()  # what workers are to keep

    def message(
        self,
        call: PackedCall,
        handles: Sequence[Handle],
        lacking: Sequence[Handle],
        number: int = 0,
        ranks: Ranks | None = None,
    ) -> tuple[Any, ...]:
        """A `Call` that needs these handles, some of them ``lacking`` on its nodes, as arguments of their method."""
        numbers, come = ([handle.number for handle in some] for some in (handles, lacking))
        payload = portable(call.payload)
        pickled, *large = to_send(Call(number, call.name, call.options, call.function, payload, numbers, come, ranks))
        return pickled, *map(self._put, large), *map(self._reference, lacking)

    def _reference(self, handle: Handle) -> Any:
        if (reference := self._stored.get(handle)) is None:
            reference = self._stored[handle] = self._put(portable(handle.payload))
        return reference


def ending(answer: Answer) -> tuple[int, Received | Exception]:
    """How a task has ended, and with what: as its worker has packed it, or our own error."""
    if isinstance(packed := answer.unpack, Received):
        buffers = None if packed.buffers is None else _buffers(packed.buffers)
        return answer.outcome, Received(bytes(packed.pickle), buffers, None, _buffers(packed.shared))
    _, error = answer.rebuild()
    assert error is not None
    return CANCELLED if answer.outcome == CANCELLED else FAILED, error  # a result may be of no use here


def answer_of(call: PackedCall, outcome: int, told: Received | Exception) -> Answer:
    """What a node has told of a rank."""
    if isinstance(told, Exception):
        return Answer.of(call, told, outcome)
    return Answer(call, outcome, functools.partial(_unpacked, told))


def _unpacked(told: Received) -> Any:
    """The object: its memory is its own, while Ray's is read-only."""
    buffers = None if told.buffers is None else list(map(bytearray, told.buffers))
    return replace(told, buffers=buffers, shared=list(map(bytearray, told.shared)))()


def _all_of(errors: Sequence[RankTimeoutError]) -> RankTimeoutError:
    """The error of a run that took too long on several nodes."""
    ranks, stacks = [rank for error in errors for rank in error.ranks], dict[int, str]()
    for error in errors:
        stacks |= error.stacks
    return RankTimeoutError("\n\n".join(map(str, errors)), ranks=sorted(ranks), stacks=stacks)
