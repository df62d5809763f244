"""The choice of the backend of a `ParallelExecutor`.

A backend is one of three: the ranks that a launcher has started, worker processes on this machine, or workers on a Ray
cluster.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from ...errors import ParallelError
from ..by_value.packer import CallOptions, Packer
from ..devices import choose_devices, cpu_count
from ..interrupts import RLock
from ..ranks.context import rank_context
from ..ranks.membership import as_seconds, join_launched_world
from ..tracebacks import hide_own_frames, importing_module
from .launched_ranks import LaunchedRanks
from .pool import Pool
from .protocols import Backend
from .site import LocalSite

UNINTERRUPTED = True  # the signal handler in `interrupts` reads this, and raises no exception in lines of this module
SHARED_IDLE_LIMIT_S = 60.0  # a shared backend ends its workers after this time without a task
logger = logging.getLogger("nn_parallel")


@dataclass(frozen=True, eq=False)
class PoolOptions:
    """The parameters of `ParallelExecutor` that choose its workers; see there for their meaning."""

    num_gpus: int | None = None
    devices: str | torch.device | Sequence[str | torch.device | int] | None = None
    num_workers: int | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()
    prefix_output: bool = False
    engine: str = "local"
    resources_per_worker: Mapping[str, float] | None = None
    placement: str = "pack"
    wait_for_resources: timedelta | float = 300.0
    # The pool ends after this time without a task. If None, it never ends by itself. Only `shared_backend` sets this.
    idle_limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.initializer is not None and not callable(self.initializer):
            raise TypeError(f"initializer={self.initializer!r} must be a callable.")
        if self.engine not in ("local", "ray"):
            raise ValueError(f"engine={self.engine!r} must be 'local' or 'ray'.")
        if self.placement not in ("pack", "spread"):
            raise ValueError(f"placement={self.placement!r} must be 'pack' or 'spread'.")
        if self.engine == "local" and self.resources_per_worker is not None:
            raise ValueError('resources_per_worker applies to engine="ray" only.')


def make_backend(wanted: PoolOptions, options: CallOptions) -> Backend:
    """Return the ranks of the launcher that started this process; without a launcher, start workers and return them.

    Raises:
        TypeError, ValueError, TransferError, LaunchError, ImportError: for the reasons that
            `nn_parallel.ParallelExecutor` gives.
        ParallelError: this process is a worker, and a module makes an executor while the worker imports it; or workers
            have to be started, and this machine does not run Linux.
    """
    _refuse_in_import_of_worker()
    context = join_launched_world()
    if context is not None:
        ranks = LaunchedRanks(context, options.timeout_s)
        ranks.check_choice(wanted.num_gpus, wanted.devices, wanted.num_workers, wanted.engine)
        if wanted.initializer is not None:
            wanted.initializer(*wanted.initargs)
        return ranks
    hide_own_frames()
    if sys.platform != "linux":
        raise ParallelError("ParallelExecutor starts worker processes on Linux only: use WSL, Linux or torchrun.")
    return _start_on_ray(wanted, options) if wanted.engine == "ray" else _start_here(wanted, options)


def _refuse_in_import_of_worker() -> None:
    """Raise `ParallelError` if this process is a worker and imports a module that makes an executor at its top level.

    The workers of the new executor would import the module too, and start further workers, without end.
    """
    module = importing_module()
    context = rank_context()
    if module is not None and context is not None and context.world.launcher == "executor":
        raise ParallelError(
            f"Module {module} makes a ParallelExecutor as it is imported. Workers import the module, too, and each "
            "would start workers of its own. Make the executor in a function."
        )


def _start_here(wanted: PoolOptions, options: CallOptions) -> Pool:
    devices_for = functools.partial(choose_devices, wanted.num_gpus, wanted.devices)
    chosen = devices_for(wanted.num_workers)
    if wanted.devices is None and chosen[0].type == "cpu":
        n = len(chosen)
        logger.info("No accelerator: %d CPU workers, %d threads each.", n, max(1, cpu_count() // n))
    site = LocalSite(wanted.prefix_output)
    return Pool(site, devices_for, wanted.num_workers, _initializer_packer(wanted, options), wanted.idle_limit_s)


def _start_on_ray(wanted: PoolOptions, options: CallOptions) -> Pool:
    from ..ray.room import RaySite, Wanted, resources_for

    resources, number = resources_for(wanted.num_gpus, wanted.devices, wanted.num_workers, wanted.resources_per_worker)
    placed = Wanted(resources, wanted.placement, as_seconds(wanted.wait_for_resources) or 0.0, wanted.prefix_output)
    site = RaySite(number, placed)
    try:
        return Pool(site, site.devices_for, number, _initializer_packer(wanted, options), wanted.idle_limit_s)
    except BaseException:  # for example, the initializer cannot be pickled; without a pool, nothing closes the site
        site.close()
        raise


def _initializer_packer(wanted: PoolOptions, options: CallOptions) -> Callable[..., Any] | None:
    if wanted.initializer is None:
        return None
    return functools.partial(
        Packer.pack,
        fn=wanted.initializer,
        args=wanted.initargs,
        kwargs={},
        options=options._replace(pass_device=False),
    )


def shared_backend(wanted: PoolOptions, options: CallOptions) -> Backend:
    """Return the backend for the functions of `parallelize_on_gpus` that have the same engine and devices.

    The workers of this backend end after a minute without a task. Under a launcher no workers are started, so there is
    nothing to share, and each call of this function returns a new `LaunchedRanks`.
    """
    if join_launched_world() is not None:
        return make_backend(wanted, options)
    if wanted.engine == "local":
        choice: tuple[Any, ...] = tuple(choose_devices(wanted.num_gpus, wanted.devices))
    else:
        choice = wanted.num_gpus, str(wanted.devices)
    key = wanted.engine, *choice
    with _shared_lock:
        if key not in _shared or _shared[key].has_ended:
            _shared[key] = make_backend(replace(wanted, idle_limit_s=SHARED_IDLE_LIMIT_S), options)
        return _shared[key]


_shared: dict[tuple[Any, ...], Backend] = {}  # maps an engine and its devices to their shared backend
_shared_lock = RLock()


def _renew_lock() -> None:
    """Replace the lock in a fork of this process.

    If another thread held the lock at the time of the fork, the copy in the fork would stay locked for ever.
    """
    global _shared_lock
    _shared_lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)
