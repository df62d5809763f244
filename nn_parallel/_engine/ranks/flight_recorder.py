"""The collectives that this process has entered, as torch's flight recorder has them.

That of the gloo backend, which torch keeps unasked since 2.11. Where it is switched off, or has no room for an
entry any more (``TORCH_FR_BUFFER_SIZE``), a collective is not known here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # torch's functions


class Collective(NamedTuple):
    """A collective that this rank has entered: the ``number``-th of its process group, on every rank."""

    group: str  # torch's name of the group, the same on all of its ranks
    number: int
    members: tuple[int, ...]
    is_over: bool
    by_main_thread: bool


def collectives(first_group_id: int) -> list[Collective]:
    """Return the last that this rank has entered, the oldest first, in groups that exist and have at least this id."""
    world = dist.distributed_c10d._world
    main = str(threading.main_thread().ident)
    members = {name: tuple(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}
    return [
        Collective(group, entry["collective_seq_id"], members[group], entry["retired"], entry.get("thread_id") == main)
        for entry in _dump(True).get("entries", [])
        if entry["pg_id"] >= first_group_id and (group := entry["process_group"][0]) in members
    ]


def running_collectives(first_group_id: int, backend: str = "gloo") -> str:
    """Return what changes whenever a collective of this ``backend`` begins or ends; empty if none is under way.

    Takes microseconds, where `collectives` takes up to a tenth of a second.
    """
    statuses = {
        group: (status["last_enqueued_collective"], status["last_completed_collective"])
        for group, status in _dump(False, backend).get("pg_status", {}).items()
        if int(group) >= first_group_id
    }
    return str(statuses) if any(begun != ended for begun, ended in statuses.values()) else ""


def entered(last: Sequence[Collective]) -> dict[str, int]:
    """By the name of a process group, how many collectives this process has entered in it, at most.

    Exactly, where the group is among ``last``. The sequence number of any other counts point-to-point operations too.
    """
    numbers: dict[str, int] = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # it has none
            continue
        if type(backend) is dist.ProcessGroupGloo:
            numbers[name] = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]  # missing in the stubs
    return numbers | {each.group: each.number for each in last if each.group in numbers}


def next_group_id(backend: str = "gloo") -> int:
    """Return more than the id of any process group of this ``backend`` that has been used so far."""
    return 1 + max(map(int, _dump(False, backend).get("pg_status", {})), default=-1)


def _dump(entries: bool, backend: str = "gloo") -> dict[str, Any]:
    dump = getattr(torch._C._distributed_c10d, DUMPS[backend], None)  # that of NCCL is missing in torch for the CPU
    records: dict[str, Any] = {} if dump is None else json.loads(dump(entries, False))
    return records
