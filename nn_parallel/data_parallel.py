"""`parallel_on_all_devices`: a batch split over the devices of this process, in threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ._engine.data_parallel import split_run_gather
from ._engine.devices import accelerators
from ._engine.ranks.context import current_world
from ._engine.ranks.membership import join_launched_world

P = ParamSpec("P")
R = TypeVar("R")


def parallel_on_all_devices(func: Callable[P, R]) -> Callable[P, R]:
    """Split the batch over all devices of this process, run a thread on each, and gather the results on the first.

    Every tensor among the arguments (in lists, tuples and dicts too) with at least one dimension is split along
    dimension 0; 0-dim tensors and modules are copied to each device; everything else is passed on. The results must be
    tensors, or the same nest of tensors everywhere: they are concatenated along dimension 0, 0-dim ones stacked.
    Gradients flow through all of it to the original tensors and parameters. Simpler than DDP, and slower: the threads
    share one interpreter, and modules are copied at each call.

    With one device, under a launcher, or without a tensor to split: a plain call.

    Raises:
        ValueError: the tensors differ in the length of dimension 0; the message names the lengths.
        TypeError: with several devices, a result that is not a tensor.

    Example::

        @parallel_on_all_devices
        def forward(batch):
            return batch * 2

        forward(torch.ones(4, 3)).shape  # torch.Size([4, 3])
    """

    @functools.wraps(func)
    def call_in_parts(*args: P.args, **kwargs: P.kwargs) -> R:
        join_launched_world()
        devices = accelerators() if current_world().launcher == "none" else []
        if len(devices) < 2:
            return func(*args, **kwargs)
        result: R = split_run_gather(func, devices, args, kwargs)
        return result

    return call_in_parts
