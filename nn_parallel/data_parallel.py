"""`parallel_on_all_devices`: split a batch over the devices of this process, with one thread per device."""

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
    """Decorate a function so that the batch in its arguments is split over all devices of this process.

    One thread per device calls the function with a part of the batch. The results are gathered on the first device.

    The arguments, also those inside lists, tuples and dicts, are passed to the devices as follows:

    - A tensor with at least one dimension is split along dimension 0.
    - A 0-dim tensor or a module is copied to each device.
    - Any other argument is passed on unchanged.

    The function must return a tensor, or tensors that are nested alike on every device. The results are concatenated
    along dimension 0; 0-dim results are stacked. Gradients flow back through the copies and the gathered results to the
    original tensors and parameters.

    This is simpler than DDP, and slower: the threads share one Python interpreter, and modules are copied at each call.

    The function is called only once, with its arguments unchanged, if there is only one device, if a launcher started
    this process, or if there is no tensor with at least two rows to split.

    Raises:
        ValueError: the tensors differ in the length of dimension 0; the message names the lengths.
        TypeError: there are several devices, and the function returned something other than tensors, or differently
            nested tensors on different devices.

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
