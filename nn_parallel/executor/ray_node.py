"""One node of a Ray cluster: an actor, whose own pool has the workers there.

So workers are started, watched, cancelled and reaped as on one machine, and a call goes to all of a node at once. The
actor runs no user code itself, so it answers while its workers are busy.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import pickle
import signal
import socket
import threading
from typing import Any, NamedTuple

import torch

from .._version import __version__
from ..devices import accelerators
from ..errors import LaunchError, ParallelError, TransferError, WorkerDiedError, rank_names
from ..pickling import Packed, memory_of
from .connection import Payload
from .forkserver import PR_SET_PDEATHSIG
from .headers import Ranks
from .names import Handle
from .packing import CallOptions, PackedCall, Packer
from .pool import Pool
from .pool_store import PoolStore
from .processes import Settings
from .tasks import Answer, Item, Mapped, Run
from .worker import CANCELLED, FAILED, SUCCEEDED

LARGE_BYTES = 1 << 16  # what Ray carries beside a message
COMES_WITHIN_S = 60.0  # what another message brings, which was sent before


class Call(NamedTuple):
    """A call on one worker, or on all as the ranks of a run."""

    number: int
    is_run: bool
    name: str
    options: CallOptions
    function: int  # see `PackedCall`
    payload: Packed
    handles: dict[int, Packed | None]  # what the workers keep, by its number; None: the node has it already
    ranks: Ranks | None = None  # of a run, if some are on other nodes


class Told(NamedTuple):
    """What a node answers."""

    answers: dict[int, tuple[int, Packed | Exception]]  # by rank: how it has ended, and with what
    error: Exception | None = None  # of the call as a whole
    is_over: bool = True  # else a rank has failed, and others still run
    group: int = 1  # counts what parts the workers here from those that have met them


def to_send(message: object) -> tuple[Any, ...]:
    """``message`` as arguments of Ray, or what a method returns: a pickle, and beside it what is large."""
    file, large = io.BytesIO(), list[pickle.PickleBuffer]()

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if is_large := buffer.raw().nbytes >= LARGE_BYTES:
            large.append(buffer)
        return not is_large

    _Pickler(file, protocol=5, buffer_callback=stays).dump(message)
    return file.getvalue(), *large


def received(pickled: bytes, *large: Any) -> Any:
    """The message."""
    return pickle.loads(pickled, buffers=large)


class _Pickler(pickle.Pickler):
    """Takes the memory of `Packed` along: that of tensors in shared memory, which the workers of one node share."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, memoryview):
            return memoryview, (pickle.PickleBuffer(obj),)
        if isinstance(obj, torch.UntypedStorage):
            return _shared, (pickle.PickleBuffer(memoryview(memory_of(obj)).cast("B")),)
        return NotImplemented


def _shared(memory: Any) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.frombuffer(bytearray(memory), dtype=torch.uint8).untyped_storage()
    storage.share_memory_()
    return storage


class RayNode:
    """The actor."""

    def __init__(self, version: str) -> None:
        if version != __version__:
            told = f"nn_parallel {version} asks, {__version__} is on {socket.gethostname()}"
            raise LaunchError(f"All nodes need the same version: {told}.")
        # With the node, which the process of an actor outlives otherwise.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._arrived = threading.Condition()  # guards the next three
        self._kept: dict[int, Handle] = {}
        self.met = 0, 0  # the last group whose ranks have met, and the number of the pool's own group then
        self._number = 0  # of the last run,
        self._run: _Share | None = None  # which is this

    def __repr__(self) -> str:
        return "nn_parallel"  # in Ray's prefix of what is printed here

    def start(self, ranks: list[int], gpus: list[str], cores: int, prefix_output: bool, *initialize: Any) -> str:
        """Have workers for ``ranks``, with a device each; the address of this node."""
        import ray

        devices = [torch.device("cpu")] * len(ranks)
        if gpus:
            names = sorted(set(gpus), key=gpus.index)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
            if len(found := accelerators()) < len(names):
                raise LaunchError(f"Ray gives GPUs {', '.join(names)} of {socket.gethostname()}; torch finds {found}.")
            devices = [found[names.index(gpu)] for gpu in gpus]
        call: Call | None = received(*initialize)
        pack = None if call is None else lambda packer: self._packed(call, packer)
        address: str = ray.util.get_node_ip_address()
        self._ranks, self._store = ranks, PoolStore(address)
        self._pool = Pool(Settings(devices, pack, None, prefix_output, ranks, cores))
        return address

    def open_group(self, number: int) -> int:
        """The port of the store where the ranks of all nodes make a new group."""
        return self._store.port(number)

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks."""
        for store in (self._store, self._pool.store):  # of all nodes, if there are several; of this one
            store.ask_to_stop()

    def call(self, *message: Any) -> Any:
        """Do a `Call`: what is `Told` once it is over, or has failed on one rank."""
        call: Call = received(*message)
        try:
            packed = self._packed(call, self._pool.packer)
            if call.is_run:
                run = _Share(packed, call.ranks, self, self._pool, self._ranks)
                with self._arrived:
                    self._number, self._run = call.number, run
                    self._arrived.notify_all()
                self._pool.lead(run.news.is_set, task=run)
                run.news.wait()
                return run.told()
            item = Item(packed, mapped := Mapped())
            self._pool.lead(item.is_over, task=item)
            mapped.wait(item, math.inf)
            assert item.answer is not None
            return to_send(Told({0: _carried(item.answer)}, group=self._pool.group))
        except ParallelError as error:
            return to_send(Told({}, error, group=self._pool.group))

    def rest(self) -> Any:
        """What is told of the run that has failed on one rank, when it is over."""
        assert self._run is not None
        self._run.over.wait()
        return self._run.told()

    def cancel(self, number: int) -> None:
        """End this run, if it is not over."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._number >= number, COMES_WITHIN_S)
            run = self._run if self._number == number else None
        if run is not None:
            self._pool.abandon(run)

    def forget(self, number: int) -> None:
        """The handle of this number is gone."""
        with self._arrived:
            self._kept.pop(number, None)
        self._pool.packer.forget(number)

    def close(self) -> None:
        """End the workers, which do nothing, and this process."""
        import ray

        self._pool.close()
        ray.actor.exit_actor()

    def _packed(self, call: Call, packer: Packer) -> PackedCall:
        """The call as a pool sends it. What workers are to keep for it may have been sent before, and come later."""
        new = {number: parcel for number, parcel in call.handles.items() if parcel is not None}
        kept = {number: Handle(Payload(new[number], packer.files), call.name, packer) for number in new}
        for number, handle in kept.items():
            handle.number = number
        with self._arrived:
            self._kept.update(kept)
            self._arrived.notify_all()
            if not self._arrived.wait_for(lambda: call.handles.keys() <= self._kept.keys(), COMES_WITHIN_S):
                raise TransferError(f"What {call.name} needs did not come to {socket.gethostname()}.")
            handles = [self._kept[number] for number in call.handles]
        return PackedCall(call.name, call.options, Payload(call.payload, packer.files), handles, call.function)


class _Share(Run):
    """A run on the workers of this node; other ranks may be on other nodes."""

    def __init__(self, call: PackedCall, all_ranks: Ranks | None, node: RayNode, pool: Pool, ranks: list[int]) -> None:
        super().__init__(call, all_ranks)
        self.news, self.over = threading.Event(), threading.Event()  # one has failed, or all is over; all is over
        self._node, self._pool, self._rank_of, self._taken = node, pool, ranks, 0

    def begin(self, world_size: int) -> bool:
        """Whether the workers are those that the ranks on other nodes have met; the pool's lock is held."""
        super().begin(world_size)
        if self.ranks is None:
            return True
        if self._node.met[0] != self.ranks.group:
            self._node.met = self.ranks.group, self._pool.group
        if self._node.met[1] == self._pool.group:
            return True
        gone = f"A worker of {rank_names(self._rank_of)} ended while it was idle, and was replaced."
        for index, rank in enumerate(self._rank_of):
            self.complete(index, Answer.of(self.call, WorkerDiedError(gone, rank=rank), CANCELLED if index else FAILED))
        return False

    def complete(self, rank: int, answer: Answer) -> None:
        super().complete(rank, answer)
        if answer.outcome != SUCCEEDED:
            self.news.set()

    def told(self) -> Any:
        """What has not been told yet."""
        is_over, error = self.over.is_set(), self._error
        new = list(self._answers.items())[self._taken :]
        self._taken += len(new)
        answers = {self._rank_of[index]: _carried(answer) for index, answer in new}
        return to_send(Told(answers, error, is_over, self._pool.group))

    def _release(self) -> None:
        super()._release()
        self.over.set()
        self.news.set()


def _carried(answer: Answer) -> tuple[int, Packed | Exception]:
    """How a task has ended, and with what: as its worker has packed it, or our own error."""
    match getattr(answer.unpack, "args", ()):
        case (pickled,):
            return answer.outcome, Packed(pickled, is_plain=True)
        case (pickled, buffers, _, shared):  # whose memory is copied as it is sent: the caller shares none with workers
            return answer.outcome, Packed(bytes(pickled), buffers, shared)
    _, error = answer.rebuild()
    assert error is not None
    return answer.outcome, error
