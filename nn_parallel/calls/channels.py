"""The channel of the world that this process is in, and what its end owes to the others."""

from __future__ import annotations

import atexit
import contextlib
import time

from ..world import rank_context
from .blocks import Channel

LINGER_S = 30.0


def channel() -> Channel | None:
    """The channel of the world that this process is in; None when it is the only rank."""
    global _channel
    context = rank_context()
    if context is None or context.world_size == 1:
        return None
    if _channel is None or _channel.context is not context:
        _channel = Channel(context)
        if context.store_host == context.rank:
            _hosted.append(_channel)
    if _channel.generation != context.generation:
        _channel.begin_generation(context.generation)
    return _channel


def block(function: str, place: str, *, begins_together: bool = False) -> contextlib.AbstractContextManager[None]:
    """A block that all ranks run, see `Channel.block`; plain code where this is the only rank."""
    here = channel()
    return contextlib.nullcontext() if here is None else here.block(function, place, begins_together=begins_together)


@atexit.register
def _outlive_readers() -> None:
    """The store ends with the process that holds it: stay while another rank may still have to read an outcome."""
    deadline = time.monotonic() + LINGER_S
    for hosted in _hosted:
        hosted.outlive_readers(deadline)


_channel: Channel | None = None
_hosted: list[Channel] = []  # those whose store lives in this process
