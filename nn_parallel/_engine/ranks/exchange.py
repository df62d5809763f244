"""Transfer of objects between ranks, through torch's own collectives for objects.

The objects are *packed*: a `Packed` consists of the pickle of an object and, separately, the memory of its tensors.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...errors import TransferError
from ..pickling import Packed, loads
from .membership import initialize


def broadcast_packed(packed: Packed | None, src: int) -> Any:
    """Send the packed object of rank ``src`` to all other ranks, which unpickle it.

    If there is no process group yet, the function makes one first.

    Args:
        packed: the object on rank ``src``; None on all other ranks.
        src: the sending rank.

    Returns:
        The object on the receiving ranks; None on rank ``src``, which has the object already.

    Raises:
        TransferError: the object cannot be unpickled on this rank.
    """
    initialize()
    box = [_sendable(packed) if packed is not None else None]
    dist.broadcast_object_list(box, src=src)
    return _rebuilt(box[0], src) if packed is None else None


def all_gather_packed(packed: Packed, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Exchange the packed objects of all ranks of ``group``, and return the unpickled objects in rank order.

    If there is no process group yet, the function makes one first.

    Raises:
        TransferError: one of the objects cannot be unpickled on this rank.
    """
    initialize()
    ranks = ranks_of(group)
    boxes: list[Any] = [None] * len(ranks)
    dist.all_gather_object(boxes, _sendable(packed), group=group)
    return [_rebuilt(box, rank) for rank, box in zip(ranks, boxes, strict=True)]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of ``group``, or of the default group if ``group`` is None; ``[0]`` if there is no group."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def _sendable(packed: Packed) -> tuple[bytes, list[bytes]]:
    return packed.pickle, [bytes(buffer) for buffer in packed.buffers]


def _rebuilt(box: Any, src: int) -> Any:
    pickled, buffers = box
    try:
        return loads(pickled, [bytearray(buffer) for buffer in buffers])
    except (Exception, SystemExit) as error:  # not KeyboardInterrupt, because the user may have pressed Ctrl-C
        raise TransferError(
            f"The result of rank {src} cannot be rebuilt here: {type(error).__name__}: {error}"
        ) from error
