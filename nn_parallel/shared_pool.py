"""`parallelize_on_gpus`: a function on every device, in processes that all such functions share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ._engine.by_value.packer import CallOptions
from ._engine.devices import choose_devices
from ._engine.ranks.membership import as_seconds, join_launched_world
from .errors import ExecutorClosedError
from .executor import ParallelExecutor

R = TypeVar("R")
IDLE_LIMIT_S = 60.0


def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: bool = True,
    *,
    devices: str | torch.device | Sequence[str | torch.device | int] | None = None,
    timeout: timedelta | float | None = None,
    engine: str = "local",
) -> Callable[[Callable[..., R]], Callable[..., list[R]]]:
    """Make a function run on every device at once and return the list of its results, one per device.

    The processes are started at the first call, shared by all functions with the same devices, and let go after an idle
    minute. Under a launcher it is a collective call on the ranks already there, and the devices are theirs. See
    `ParallelExecutor.run` for how the function is called and what it raises.

    Args:
        num_gpus: the first so many accelerators; on a machine without any, so many CPU workers. If None: all.
        pass_device: bind each worker's device to the parameter called ``device``.
        devices: instead of ``num_gpus``; see `ParallelExecutor`.
        timeout: seconds (or a timedelta) that a call may take.
        engine: ``"ray"`` for the devices of a Ray cluster; see `ParallelExecutor`.

    Raises:
        TypeError, ValueError, LaunchError: at the call, as `ParallelExecutor`.
        RankError, RankTimeoutError, TransferError: at the call, as `ParallelExecutor.run`.

    Example::

        @parallelize_on_gpus(num_gpus=2)
        def double(device, data):
            return data.to(device) * 2

        double(torch.tensor([1, 2]))  # [tensor([2, 4]), tensor([2, 4])]
    """

    if callable(num_gpus):
        raise TypeError("write @parallelize_on_gpus(), with parentheses.")

    def decorate(fn: Callable[..., R]) -> Callable[..., list[R]]:
        @functools.wraps(fn)
        def call_on_all(*args: Any, **kwargs: Any) -> list[R]:
            while True:
                pool = _shared_pool(num_gpus, pass_device, devices, timeout, engine)
                try:
                    return pool.run(fn, *args, **kwargs)
                except ExecutorClosedError:  # its idle minute ended just now
                    continue

        return call_on_all

    return decorate


class _SharedPool(ParallelExecutor):
    _idle_limit_s = IDLE_LIMIT_S

    @property
    def has_ended(self) -> bool:
        """Whether it was idle for so long, could not go on, or is that of a process of which this is a fork."""
        return self._backend.has_ended

    def for_calls(self, pass_device: bool, timeout: timedelta | float | None) -> _SharedPool:
        """The same workers, called in another way."""
        view = _SharedPool.__new__(_SharedPool)
        vars(view).update(vars(self))
        view._options = CallOptions(pass_device, as_seconds(timeout))
        return view


def _shared_pool(num_gpus: int | None, pass_device: bool, devices: Any, timeout: Any, engine: str) -> ParallelExecutor:
    """The pool of these devices; under a launcher the ranks, where there is nothing to start or to keep."""
    if join_launched_world() is not None:
        return ParallelExecutor(num_gpus, pass_device, devices=devices, timeout=timeout, engine=engine)
    which = choose_devices(num_gpus, devices) if engine == "local" else (num_gpus, str(devices))
    with _pools_lock:
        key = engine, *which
        if key not in _pools or _pools[key].has_ended:
            _pools[key] = _SharedPool(num_gpus, devices=devices, timeout=timeout, engine=engine)
        return _pools[key].for_calls(pass_device, timeout)


_pools: dict[tuple[Any, ...], _SharedPool] = {}  # by their engine and devices
_pools_lock = threading.Lock()
