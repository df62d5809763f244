"""Packed objects go from rank to rank, by torch's own collectives of objects."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...errors import TransferError
from ..pickling import Packed, loads
from .membership import initialize


def broadcast_packed(packed: Packed | None, src: int) -> Any:
    """Return what rank ``src`` packed, rebuilt; the others pass None. Makes the process group if there is none.

    Raises:
        TransferError: it cannot be unpickled here.
    """
    initialize()
    box = [_sendable(packed) if packed is not None else None]
    dist.broadcast_object_list(box, src=src)
    return _rebuilt(box[0], src) if packed is None else None


def all_gather_packed(packed: Packed, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank packed, rebuilt, in rank order. Makes the process group if there is none.

    Raises:
        TransferError: one of them cannot be unpickled here.
    """
    initialize()
    ranks = ranks_of(group)
    boxes: list[Any] = [None] * len(ranks)
    dist.all_gather_object(boxes, _sendable(packed), group=group)
    return [_rebuilt(box, rank) for rank, box in zip(ranks, boxes, strict=True)]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def _sendable(packed: Packed) -> tuple[bytes, list[bytes]]:
    return packed.pickle, [bytes(buffer) for buffer in packed.buffers]


def _rebuilt(box: Any, src: int) -> Any:
    pickled, buffers = box
    try:
        return loads(pickled, [bytearray(buffer) for buffer in buffers])
    except (Exception, SystemExit) as error:  # a KeyboardInterrupt may be the user's
        raise TransferError(
            f"The result of rank {src} cannot be rebuilt here: {type(error).__name__}: {error}"
        ) from error
