"""One node of a Ray cluster: an actor, whose own pool has the workers there.

So workers are started, watched, cancelled and reaped as on one machine, and a call goes to all of a node at once. The
actor runs no user code itself, so it answers while its workers are busy.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch

from ..._version import __version__
from ...errors import LaunchError, WorkerDiedError
from ..by_value.packer import Handle, PackedCall, Packer
from ..descendants import end_with
from ..devices import accelerators
from ..failures import rank_names
from ..pool.channel import Payload, Received
from ..pool.pool import Pool
from ..pool.pool_store import PoolStore
from ..pool.processes import Settings
from ..pool.tasks import Answer, Item, Mapped, Run
from ..pool.worker import CANCELLED, FAILED
from ..process_environment import adopt
from ..ranks.stop_signals import ask_to_stop
from ..tracebacks import format_traceback
from .messages import Call, Told, arrived, ending, received, to_send


class RayNode:
    """The actor. Calls run in any order, but for those that are sent once an earlier one is answered."""

    def __init__(self, version: str) -> None:
        if version != __version__:
            told = f"nn_parallel {version} asks, {__version__} is on {socket.gethostname()}"
            raise LaunchError(f"All nodes need the same version: {told}.")
        end_with(os.getppid())  # the node, which the process of an actor outlives otherwise
        self._kept: dict[int, Handle] = {}
        self._share: _Share | None = None  # of the run
        self.cancelled = 0  # the number of the last run that was cancelled
        self.met = 0, 0  # the last group of ranks on several nodes, and the pool's own when it began

    def __repr__(self) -> str:
        return "nn_parallel"  # in Ray's prefix of what is printed here

    def start(
        self,
        ranks: list[int],
        has_store: bool,
        gpus: list[str],
        cores: int,
        prefix_output: bool,
        directory: str,
        path: list[str],
        argv: list[str],
        *initialize: Any,
    ) -> tuple[str, int]:
        """Have workers for ``ranks``, with a device each, in surroundings like the script's.

        ``cores`` are for each worker, ``initialize`` is the message with the initializer, if there is one.

        Returns:
            The address of this node, and with ``has_store`` the port of a store where the ranks of all nodes meet.
        """
        import ray

        adopt({}, directory, path, is_elsewhere=True)
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
        self.ranks, self._store = ranks, PoolStore(address)
        self._pool = Pool(Settings(devices, pack, None, prefix_output, ranks, cores))
        self._packer = self._pool.packer
        return address, self._store.port(1) if has_store else 0

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks."""
        ask_to_stop("what the script has received")

    def call(self, *message: Any) -> tuple[Any, ...]:
        """Do a `Call`: what is `Told`. Once a rank of a run has failed, the others here are freed."""
        return to_send(self._call(message))

    def _call(self, message: Sequence[Any]) -> Told:
        answers, failed = dict[int, tuple[int, Received | Exception]](), None
        try:
            call, packed = self._packed(message, self._pool.packer)
            if call.ranks is not None and 0 in self.ranks:
                self._store.port(call.ranks.group)
            if call.number:
                self._share = share = _Share(call, packed, self, self._pool)
                self._pool.lead(share.is_over, task=share)
                share.wait()
                answers, failed = {self.ranks[i]: ending(answer) for i, answer in share.answers.items()}, share.error
                self._share = None  # its answers may be large
            else:
                item = Item(packed, mapped := Mapped())
                self._pool.lead(item.is_over, task=item)
                mapped.wait(item, math.inf)
                assert item.answer is not None
                answers[0] = ending(item.answer)
        except Exception as error:  # of the pool, or that this process has no room for what has come
            failed = error
        if failed is not None and failed.__cause__ is not None and not hasattr(failed, "__notes__"):
            # No pickle takes the cause along.
            failed.add_note(format_traceback(failed.__cause__))
        return Told(answers, failed, self._pool.group, not self._pool.has_ended)

    def cancel(self, number: int) -> None:
        """End this run, which may come later, or be over."""
        self.cancelled = max(self.cancelled, number)
        if (share := self._share) is not None and share.number == number:
            self._pool.abandon(share)

    def forget(self, numbers: list[int]) -> None:
        """The handles of these numbers are gone."""
        for number in numbers:
            if self._kept.pop(number, None) is not None:
                self._packer.forget(number)

    def close(self) -> None:
        """End the workers, which do nothing, and this process."""
        import ray

        self._pool.close()
        ray.actor.exit_actor()

    def _packed(self, message: Sequence[Any], packer: Packer) -> tuple[Call, PackedCall]:
        """The `Call`, and how the pool sends it."""
        call: Call = received(message[0], beside := iter(message[1:]))
        for number, kept in zip(call.lacking, beside, strict=True):
            self._kept.setdefault(number, Handle(Payload(arrived(kept), packer.files), call.name, packer, number))
        payload = Payload(arrived(call.payload), packer.files)
        return call, PackedCall(
            call.name, call.options, payload, [self._kept[number] for number in call.handles], call.function
        )


class _Share(Run):
    """A run on the workers of this node; other ranks may be on other nodes."""

    def __init__(self, call: Call, packed: PackedCall, node: RayNode, pool: Pool) -> None:
        super().__init__(packed, call.ranks)
        self._node, self._pool, self.number = node, pool, call.number

    def discard(self) -> None:
        """It was cancelled before it began."""
        self.begin(len(self._node.ranks))

    def begin(self, world_size: int) -> bool:
        """Whether the workers are those that the ranks on other nodes have met; the pool's lock is held."""
        super().begin(world_size)
        if self.ranks is not None and self.ranks.group != self._node.met[0]:
            self._node.met = self.ranks.group, self._pool.group
        if self._node.cancelled >= self.number:
            answers = [Answer.of(self.call, CancelledError(), CANCELLED) for _ in range(world_size)]
        elif self.ranks is not None and self._node.met[1] != self._pool.group:
            gone = f"A worker of {rank_names(self._node.ranks)} ended while it was idle, and was replaced."
            died = WorkerDiedError(gone, rank=self._node.ranks[0])
            answers = [Answer.of(self.call, died, CANCELLED if index else FAILED) for index in range(world_size)]
        else:
            return True
        for index, answer in enumerate(answers):
            self.complete(index, answer)
        return False
