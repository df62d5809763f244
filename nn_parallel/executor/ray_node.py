"""One node of a Ray cluster: an actor, whose own pool has the workers there.

So workers are started, watched, cancelled and reaped as on one machine, and a call goes to all of a node at once. The
actor runs no user code itself, so it answers while its workers are busy.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import torch

from .._version import __version__
from ..devices import accelerators
from ..errors import LaunchError, TransferError, WorkerDiedError, rank_names
from ..pickling import Packed, memory_of
from .connection import Payload, Received
from .forkserver import PR_SET_PDEATHSIG
from .headers import Ranks
from .names import Handle
from .namespaces import set_surroundings
from .packing import CallOptions, PackedCall, Packer
from .pool import Pool
from .pool_store import PoolStore
from .processes import Settings
from .tasks import Answer, Item, Mapped, Run
from .worker import CANCELLED, FAILED

LARGE_BYTES = 1 << 16  # what Ray carries beside a message
COMES_WITHIN_S = 60.0  # what another message brings, which was sent before


class Call(NamedTuple):
    """A call on one worker, or on all as the ranks of a run. Beside it comes what is new."""

    number: int
    is_run: bool
    name: str
    options: CallOptions
    function: int  # see `PackedCall`
    payload: Packed
    handles: list[int]  # the numbers of what the workers keep for it
    new: list[int]  # of these, what the node has not got yet
    ranks: Ranks | None = None  # of a run, if some are on other nodes


class Told(NamedTuple):
    """What a node answers."""

    answers: dict[int, tuple[int, Received | Exception]]  # by rank: how it has ended, and with what
    error: Exception | None = None  # of the call as a whole
    group: int = 1  # counts what parts the workers here from those that have met them


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


def _arrived(packed: Packed) -> Packed:
    """What `portable` has made, where the workers can share what others have shared."""
    shared = [_shared(memory) for memory in packed.shared]
    return packed._replace(buffers=[memoryview(each) for each in packed.buffers], shared=shared)


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
        self._number = 0  # of the last run,
        self._run: _Share | None = None  # which is this
        self.met = 0, 0  # the last group whose ranks have met, and the number of the pool's own group then

    def __repr__(self) -> str:
        return "nn_parallel"  # in Ray's prefix of what is printed here

    def start(
        self,
        ranks: list[int],
        gpus: list[str],
        cores: int,
        prefix_output: bool,
        directory: str,
        path: list[str],
        argv: list[str],
        *initialize: Any,
    ) -> str:
        """Have workers for ``ranks``, with a device each, in surroundings like the script's; the address of this node.

        ``cores`` are for each worker. ``initialize`` is the message with the initializer, if there is one.
        """
        import ray

        set_surroundings({}, directory, path, is_elsewhere=True)
        sys.argv[:] = argv
        devices = [torch.device("cpu")] * len(ranks)
        if gpus:
            names = list(dict.fromkeys(",".join(gpus).split(",")))  # a worker may have several
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
            if len(found := accelerators()) < len(names):
                raise LaunchError(f"Ray gives GPUs {', '.join(names)} of {socket.gethostname()}; torch finds {found}.")
            devices = [found[names.index(gpu.split(",")[0])] for gpu in gpus]
        pack = (lambda packer: self._packed(initialize, packer)[1]) if initialize else None
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

    def call(self, *message: Any) -> tuple[Any, ...]:
        """Do a `Call`: what is `Told`. Once a rank of a run has failed, the others here are freed."""
        return to_send(self._call(message))

    def _call(self, message: Sequence[Any]) -> Told:
        try:
            call, packed = self._packed(message, self._pool.packer)
            if call.is_run:
                run = _Share(packed, call.ranks, self, self._pool, self._ranks)
                with self._arrived:
                    self._number, self._run = call.number, run
                    self._arrived.notify_all()
                self._pool.lead(run.is_over, task=run)
                run.wait()
                answers = {self._ranks[index]: _told(answer) for index, answer in run.answers.items()}
                return Told(answers, run.error, self._pool.group)
            item = Item(packed, mapped := Mapped())
            self._pool.lead(item.is_over, task=item)
            mapped.wait(item, math.inf)
            assert item.answer is not None
            return Told({0: _told(item.answer)}, group=self._pool.group)
        except Exception as error:  # of the pool, or that this process has no room for what has come
            return Told({}, error, self._pool.group)

    def cancel(self, number: int) -> None:
        """End this run, if it is not over."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._number >= number, COMES_WITHIN_S)
            run = self._run if self._number == number else None
        if run is not None:
            run.is_cancelled = True  # before it begins, or else it is ended where it runs
            self._pool.abandon(run)

    def forget(self, numbers: list[int]) -> None:
        """The handles of these numbers are gone."""
        with self._arrived:
            gone = [number for number in numbers if self._kept.pop(number, None) is not None]
        for number in gone:
            self._pool.packer.forget(number)

    def close(self) -> None:
        """End the workers, which do nothing, and this process."""
        import ray

        self._pool.close()
        ray.actor.exit_actor()

    def _packed(self, message: Sequence[Any], packer: Packer) -> tuple[Call, PackedCall]:
        """The `Call`, and how the pool sends it. What it needs may have been sent before it, and come after it."""
        call: Call = received(message[0], beside := iter(message[1:]))
        new = [Payload(_arrived(each), packer.files) for each in beside]
        with self._arrived:
            for number, kept in zip(call.new, new, strict=True):
                self._kept[number] = Handle(kept, call.name, packer, number)
            self._arrived.notify_all()
            if not self._arrived.wait_for(lambda: self._kept.keys() >= set(call.handles), COMES_WITHIN_S):
                raise TransferError(f"What {call.name} needs did not come to {socket.gethostname()}.")
            handles = [self._kept[number] for number in call.handles]
        payload = Payload(_arrived(call.payload), packer.files)
        return call, PackedCall(call.name, call.options, payload, handles, call.function)


class _Share(Run):
    """A run on the workers of this node; other ranks may be on other nodes."""

    def __init__(self, call: PackedCall, all_ranks: Ranks | None, node: RayNode, pool: Pool, ranks: list[int]) -> None:
        super().__init__(call, all_ranks)
        self._node, self._pool, self._rank_of, self.is_cancelled = node, pool, ranks, False

    def begin(self, world_size: int) -> bool:
        """Whether the workers are those that the ranks on other nodes have met; the pool's lock is held."""
        super().begin(world_size)
        if self.is_cancelled:
            for index in range(world_size):
                self.complete(index, Answer.of(self.call, CancelledError(), CANCELLED))
            return False
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


def _told(answer: Answer) -> tuple[int, Received | Exception]:
    """How a task has ended, and with what: as its worker has packed it, or our own error."""
    if isinstance(packed := answer.unpack, Received):
        buffers = None if packed.buffers is None else _buffers(packed.buffers)
        return answer.outcome, Received(bytes(packed.pickle), buffers, None, _buffers(packed.shared))
    _, error = answer.rebuild()
    assert error is not None
    return answer.outcome, error
