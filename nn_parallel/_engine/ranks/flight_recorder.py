"""The collectives that this process has entered, as torch's flight recorder lists them.

Since version 2.11 torch records the collectives of gloo by default. The environment variable ``TORCH_FR_BUFFER_SIZE``
sets the number of records that torch keeps; 0 switches the recorder off. This package does not know of a collective
that torch does not record, or whose record has been overwritten.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# The name of torch's function that returns the records, for each backend.
DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


class Collective(NamedTuple):
    """A collective that this rank has entered."""

    group: str  # torch's name of the process group, the same on all ranks of the group
    number: int  # the number of the collective within its group, the same on all ranks of the group
    members: tuple[int, ...]  # the ranks of the group
    is_over: bool  # whether the collective has ended on this rank
    by_main_thread: bool  # whether the main thread has entered the collective


def collectives(first_group_id: int) -> list[Collective]:
    """Return the last collectives of gloo that this rank has entered, the oldest first.

    Only process groups that exist and whose id in the flight recorder is at least ``first_group_id`` are included.
    """
    world = dist.distributed_c10d._world
    main = str(threading.main_thread().ident)
    members = {name: tuple(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}
    return [
        Collective(group, entry["collective_seq_id"], members[group], entry["retired"], entry.get("thread_id") == main)
        for entry in _dump(True).get("entries", [])
        if entry["pg_id"] >= first_group_id and (group := entry["process_group"][0]) in members
    ]


def running_collectives(first_group_id: int, backend: str = "gloo") -> str:
    """Return a text that changes whenever a collective of this ``backend`` begins or ends.

    If no collective is running, the text is empty. Only process groups whose id is at least ``first_group_id`` are
    included. The watchdog compares two texts to see whether the collectives make progress. This takes microseconds,
    whereas `collectives` takes up to 0.1 s.
    """
    statuses = {
        group: (status["last_enqueued_collective"], status["last_completed_collective"])
        for group, status in _dump(False, backend).get("pg_status", {}).items()
        if int(group) >= first_group_id
    }
    return str(statuses) if any(begun != ended for begun, ended in statuses.values()) else ""


def entered(last: Sequence[Collective]) -> dict[str, int]:
    """Return the number of collectives that this process has entered in each process group of gloo, by group name.

    For a group that occurs in ``last`` (a result of `collectives`), the number is exact. For another group it is an
    upper limit, namely torch's sequence number, which also counts point-to-point operations.
    """
    numbers: dict[str, int] = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # the group has no backend for the CPU
            continue
        if type(backend) is dist.ProcessGroupGloo:
            numbers[name] = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]  # missing in the stubs
    # If a group occurs several times in ``last``, its last collective determines the number.
    return numbers | {each.group: each.number for each in last if each.group in numbers}


def next_group_id(backend: str = "gloo") -> int:
    """Return an id above those of all process groups of this ``backend`` that this process has used so far.

    Groups that are made from now on have this id or a higher one.
    """
    return 1 + max(map(int, _dump(False, backend).get("pg_status", {})), default=-1)


def _dump(entries: bool, backend: str = "gloo") -> dict[str, Any]:
    """Return the records of torch's flight recorder; an empty dict if torch cannot record this ``backend``.

    If ``entries`` is true, the records include one entry for each collective.
    """
    dump = getattr(torch._C._distributed_c10d, DUMPS[backend], None)  # torch for the CPU lacks the function of NCCL
    records: dict[str, Any] = {} if dump is None else json.loads(dump(entries, False))
    return records
