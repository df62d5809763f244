"""The backend of a `ParallelExecutor` under a launcher: no workers are started, because the ranks run already.

Every rank makes the same executor and the same calls. So a call needs no transport of functions and arguments: each
rank calls the function itself, and the ranks then exchange the results.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import torch

from ...errors import ExecutorClosedError, ParallelError
from ..by_value.packer import CallOptions
from ..devices import call_on_device, count, parse_devices
from ..failures import rank_error
from ..pickling import dumps
from ..ranks.blocks import block
from ..ranks.context import RankContext
from ..ranks.exchange import all_gather_packed
from ..ranks.records import call_name
from ..tracebacks import user_frames
from .progress import Progress
from .worker import in_this_process

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
R = TypeVar("R")


class LaunchedRanks:
    """The ranks of a world that a launcher has started; implements `Backend`. This process is one of the ranks."""

    def __init__(self, context: RankContext, timeout_s: float | None) -> None:
        """Use the ranks of ``context``. They wait for each other at the end of ``with`` for ``timeout_s`` at most."""
        self._context = context
        self._timeout_s = timeout_s
        self._closed = False
        # The block (code that all ranks enter and leave together) around the body of ``with``. `__enter__` sets it.
        self._block: contextlib.AbstractContextManager[None] | None = None

    def __str__(self) -> str:
        world = self._context.world
        return (
            "shut down"
            if self._closed
            else f"rank {world.rank} of {world.world_size} on {world.device}, by {world.launcher}"
        )

    @property
    def has_ended(self) -> bool:
        """True if this backend takes no more calls."""
        return self._closed

    def check_choice(self, num_gpus: int | None, devices: Any, num_workers: int | None, engine: str) -> None:
        """Check that the arguments match the ranks of the launcher.

        Without a launcher, these arguments choose the workers of a `ParallelExecutor`. Under a launcher they choose
        nothing, but are accepted if they match the ranks, so that the same script runs with and without a launcher.

        Raises:
            ValueError: an argument does not match.
        """
        world = self._context.world
        wrong = [
            f"{name}={value!r}"
            for name, value, is_right in (
                ("num_gpus", num_gpus, num_gpus and count("num_gpus", num_gpus) == world.world_size),
                ("num_workers", num_workers, num_workers and count("num_workers", num_workers) == world.world_size),
                ("devices", devices, devices is not None and world.device in parse_devices(devices)),
                ("engine", engine, engine == "local"),
            )
            if value is not None and not is_right
        ]
        if wrong:
            raise ValueError(
                f"{wrong[0]} does not apply here: the workers are the {world.world_size} ranks that run already, this "
                f"one on {world.device}. Leave the argument out, or let the launcher start such ranks."
            )

    def run(self, fn: Callable[..., R], args: Any, kwargs: Any, options: CallOptions) -> list[R]:
        """Implement `ParallelExecutor.run`."""
        return self._run(fn, args, kwargs, options, call_name(fn))

    def submit(self, *_: Any) -> Future[Any]:
        """Refuse `ParallelExecutor.submit`, which has no meaning for ranks."""
        raise ParallelError(
            "submit() gives a call to one free worker, but under a launcher every rank makes every call: use run() or "
            "map()."
        )

    def map(
        self,
        fn: Callable[..., R],
        iterables: Sequence[Iterable[Any]],
        options: CallOptions,
        timeout_s: float | None,
        chunksize: int | None,
        progress: Progress,
    ) -> Iterator[R]:
        """Implement `ParallelExecutor.map`: each rank computes a share of the items, and all ranks get all results."""
        items = list(zip(*iterables, strict=False))
        rank = self._context.rank
        size = self._context.world_size
        own_items = items[rank::size]
        counted = progress._replace(total=len(own_items)).counted(own_items) if rank == 0 else own_items
        device = self._device_to_pass(options)
        shares = self._run(functools.partial(_call_each, fn, counted, device), (), {}, options, progress.name)
        return iter([shares[index % size][index // size] for index in range(len(items))])

    def put(self, obj: Any) -> Any:
        """Implement `ParallelExecutor.put`: the handle is the object itself, because calls are made in this process."""
        return obj

    def resize(self, num_workers: int) -> None:
        """Refuse `ParallelExecutor.resize`."""
        raise ValueError(
            f"resize() does not apply here: the workers are the {self._context.world_size} ranks that the launcher has "
            "started. Leave the call out, or let the launcher start another number of ranks."
        )

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Implement `ParallelExecutor.shutdown`."""
        self._closed = True

    def __enter__(self) -> None:
        """Begin a block, so that an exception in the body of ``with`` on one rank is raised on all ranks."""
        self._raise_if_closed()
        self._block = block("with ParallelExecutor()", self._timeout_s, from_end=True)
        self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        if self._block is not None:
            self._block.__exit__(kind, error, traceback)  # this never suppresses an exception of the body

    def _raise_if_closed(self) -> None:
        """Raise `ExecutorClosedError` if the executor was shut down."""
        if self._closed:
            raise ExecutorClosedError

    def _device_to_pass(self, options: CallOptions) -> torch.device | None:
        """Return the device for the parameter ``device`` of the user's function; None if it gets none."""
        return self._context.world.device if options.pass_device else None

    def _run(self, fn: Callable[..., R], args: Any, kwargs: Any, options: CallOptions, name: str) -> list[R]:
        """Call ``fn`` on this rank, and return the results of all ranks. ``name`` is the name of the call in errors."""
        self._raise_if_closed()
        device = self._device_to_pass(options)
        if self._context.world_size == 1:
            try:
                return [in_this_process(call_on_device, fn, args, kwargs, device)]
            except Exception as error:
                raise rank_error(name, 1, {0: error.with_traceback(user_frames(error))}) from None
        with block(name, options.timeout_s):
            result = in_this_process(call_on_device, fn, args, kwargs, device)
            packed = dumps(result, lambda: {"the result": result})
        # This second block begins only if the first one has succeeded on all ranks, so every rank has a result to send.
        with block(name, options.timeout_s):
            return all_gather_packed(packed)


def _call_each(fn: Callable[..., R], items: Iterable[tuple[Any, ...]], device: torch.device | None) -> list[R]:
    """Return the results of ``fn`` for the items of a rank. See `call_on_device` for ``device``."""
    return [call_on_device(fn, item, {}, device) for item in items]
