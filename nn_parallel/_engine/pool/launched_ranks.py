"""The calls of `ParallelExecutor` under a launcher: its workers are the ranks that are there, which all make them."""

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

UNINTERRUPTED = True  # read by interrupts: nothing is raised in lines of this module
R = TypeVar("R")


class LaunchedRanks:
    """The ranks of a launched world, this process among them."""

    def __init__(self, context: RankContext, timeout_s: float | None) -> None:
        """``timeout_s`` is how long the ranks wait for each other at the end of the ``with`` block."""
        self._context = context
        self._timeout_s = timeout_s
        self._closed = False
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
        """True once this backend takes no more calls."""
        return self._closed

    def check_choice(self, num_gpus: int | None, devices: Any, num_workers: int | None, engine: str) -> None:
        """Nothing is chosen here: what is asked for must be what is there, so that one file runs both ways.

        Raises:
            ValueError: it is not.
        """
        world = self._context.world
        wrong = [
            f"{name}={value!r}"
            for name, value, is_there in (
                ("num_gpus", num_gpus, num_gpus and count("num_gpus", num_gpus) == world.world_size),
                ("num_workers", num_workers, num_workers and count("num_workers", num_workers) == world.world_size),
                ("devices", devices, devices is not None and world.device in parse_devices(devices)),
                ("engine", engine, engine == "local"),
            )
            if value is not None and not is_there
        ]
        if wrong:
            raise ValueError(
                f"{wrong[0]} does not apply here: the workers are the {world.world_size} ranks that run already, this "
                f"one on {world.device}. Leave it out, or start as many ranks."
            )

    def run(self, fn: Callable[..., R], args: Any, kwargs: Any, options: CallOptions) -> list[R]:
        """As `ParallelExecutor.run`, which calls this."""
        return self._run(fn, args, kwargs, options, call_name(fn))

    def submit(self, *_: Any) -> Future[Any]:
        """As `ParallelExecutor.submit`."""
        raise ParallelError(
            "submit() hands a task to one free worker, but here every rank makes every call: use run() or map()."
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
        """As `ParallelExecutor.map`."""
        items = list(zip(*iterables, strict=False))
        rank = self._context.rank
        size = self._context.world_size
        mine = items[rank::size]
        counted = progress._replace(total=len(mine)).counted(mine) if rank == 0 else mine
        shares = self._run(functools.partial(_call_each, fn, counted), (), {}, options, progress.name)
        return iter([shares[index % size][index // size] for index in range(len(items))])

    def put(self, obj: Any) -> Any:
        """As `ParallelExecutor.put`."""
        return obj

    def resize(self, num_workers: int) -> None:
        """As `ParallelExecutor.resize`."""
        raise ValueError(f"resize() does not apply here: the workers are the {self._context.world_size} ranks.")

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """As `ParallelExecutor.shutdown`."""
        self._closed = True

    def __enter__(self) -> None:
        """Begin a block whose failure on one rank is raised on all; called by `ParallelExecutor.__enter__`."""
        self._raise_if_closed()
        self._block = block("with ParallelExecutor()", self._timeout_s, from_end=True)
        self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        if self._block is not None:
            self._block.__exit__(kind, error, traceback)  # an error that comes out of the body is never swallowed

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ExecutorClosedError

    def _run(self, fn: Callable[..., R], args: Any, kwargs: Any, options: CallOptions, name: str) -> list[R]:
        self._raise_if_closed()
        device = self._context.world.device if options.pass_device else None
        if self._context.world_size == 1:
            try:
                return [in_this_process(call_on_device, fn, args, kwargs, device)]
            except Exception as error:
                raise rank_error(name, 1, {0: error.with_traceback(user_frames(error))}) from None
        with block(name, options.timeout_s):
            result = in_this_process(call_on_device, fn, args, kwargs, device)
            packed = dumps(result, lambda: {"the result": result})
        with block(name, options.timeout_s):  # only now are all outcomes known to be good
            return all_gather_packed(packed)


def _call_each(fn: Callable[..., R], items: Iterable[tuple[Any, ...]], device: torch.device | None = None) -> list[R]:
    return [call_on_device(fn, item, {}, device) for item in items]
