"""The collectives that this process has entered, as torch's flight recorder lists them.

Since version 2.11 torch records the collectives of gloo by default. The environment variable ``TORCH_FR_BUFFER_SIZE``
sets the number of records that torch keeps; 0 switches the recorder off. This package knows a collective only while
torch keeps its record.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ..torch_private import flight_records, groups, members_of, sequence_number


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
    main = str(threading.main_thread().ident)
    members = {name: members_of(group) for group, name in groups().items()}
    return [
        Collective(group, entry["collective_seq_id"], members[group], entry["retired"], entry.get("thread_id") == main)
        for entry in flight_records(True, "gloo").get("entries", [])
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
        for group, status in flight_records(False, backend).get("pg_status", {}).items()
        if int(group) >= first_group_id
    }
    return str(statuses) if any(begun != ended for begun, ended in statuses.values()) else ""


def entered(last: Sequence[Collective]) -> dict[str, int]:
    """Return the number of collectives that this process has entered in each process group of gloo, by group name.

    For a group that occurs in ``last`` (a result of `collectives`), the number is exact. For another group it is an
    upper limit, namely torch's sequence number, which also counts point-to-point operations.
    """
    numbers = {name: number for group, name in groups().items() if (number := sequence_number(group)) is not None}
    # If a group occurs several times in ``last``, its last collective determines the number.
    return numbers | {each.group: each.number for each in last if each.group in numbers}


def next_group_id(backend: str = "gloo") -> int:
    """Return the lowest id that a process group of this ``backend`` can have in the recorder if it is made from now on.

    The callers keep this id, to ignore the records of earlier groups.
    """
    return 1 + max(map(int, flight_records(False, backend).get("pg_status", {})), default=-1)
