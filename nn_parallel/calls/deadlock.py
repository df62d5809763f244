"""Whether what this rank waits in can still end: told by what the ranks have entered, never by how long it takes.

A rank may be late for hours and still come. But all ranks enter their collectives and our calls in the same order. So
one that this rank waits for never enters the collective that this rank is stuck in

- if it waits for this rank in one of our calls that comes after that collective;
- if it has entered another collective under the same number of the same process group;
- if it is stuck in a collective of another group that this rank has not entered.

A rank that waits says so in the store (`Waiting`), and a rank that is stuck compares. What is said may be old: it
serves as long as it tells of what has been entered, and of a wait that only this rank can end. Where something is not
known for certain, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..launch.context import RankContext
from ..launch.flight_recorder import Collective, collectives, entered
from .records import Progress, Waiting

LAST_COLLECTIVES = 16  # that a rank tells of, of each group
NOWHERE = Progress(-1, -1, -1)


def waits_for(context: RankContext, ranks: Sequence[int], until: Progress, where: str) -> Waiting:
    """What this rank says when it waits in a call of ours for ``ranks`` to get as far as ``until``."""
    last = collectives(context.group.first_id)
    return Waiting(where, entered(last), context.group.begun, tuple(ranks), until, _names(last), {})


def waits_in(context: RankContext, last: Sequence[Collective], where: str) -> Waiting:
    """What this rank says when it is stuck in some of the ``last`` collectives."""
    stuck_in = {each.group: each.number for each in reversed(_stuck_in(last))}
    return Waiting(where, entered(last), context.group.begun, (), NOWHERE, _names(last), stuck_in)


class Standstill(NamedTuple):
    """What a rank knows that is stuck."""

    rank: int
    progress: Progress  # how far it has got in our calls
    makes_group: bool  # it is stuck in initialize_ddp,
    last: Sequence[Collective]  # or in one of these
    said: Waiting
    others: Mapping[int, Waiting]  # what the other ranks say

    def proof(self) -> str:
        """Why it never ends; empty if there is no telling."""
        for other, theirs in self.others.items():
            waits_for_this = self.rank in theirs.ranks and self.progress < theirs.until
            if waits_for_this and self.makes_group and theirs.groups_begun < self.said.groups_begun:
                return f"rank {other} {theirs.where} without it"
            if theirs.groups_begun != self.said.groups_begun:  # it tells of other groups, perhaps of the same names
                continue
            has_not_entered = any(
                theirs.entered.get(each.group, each.number) < each.number for each in _stuck_in(self.last)
            )
            needs_this = any(self.said.entered.get(group, number) < number for group, number in theirs.stuck_in.items())
            if has_not_entered and (waits_for_this or needs_this):
                return f"rank {other} {theirs.where} without it"
            for group, names in self.said.names.items():
                for number in names.keys() & theirs.names.get(group, {}).keys():
                    entered, mine = theirs.names[group][number], names[number]
                    if entered != mine:
                        what = f"As collective {number} of process group {group} it entered {entered}, not {mine}"
                        return f"rank {other} {theirs.where}. {what}"
        return ""


def _names(last: Sequence[Collective]) -> dict[str, dict[str, str]]:
    """The names of the last collectives of each group, by their numbers."""
    names: dict[str, dict[str, str]] = {}
    for each in last:
        names.setdefault(each.group, {})[str(each.number)] = each.name + (each.tensors and f" of {each.tensors}")
    return {group: dict(list(numbers.items())[-LAST_COLLECTIVES:]) for group, numbers in names.items()}


def _stuck_in(last: Sequence[Collective]) -> list[Collective]:
    return [each for each in last if not each.is_over and each.by_main_thread]
