"""Whether what this rank waits in can still end: told by what the ranks have entered, never by how long it takes.

A rank may be late for hours and still come. But all ranks enter their collectives and our calls in the same order. So
another rank never enters the collective that this rank is stuck in

- if it waits for this rank in one of our calls that comes after that collective;
- if it has entered another collective, or one with another root, under the same number of the same process group;
- if it is stuck in a collective of another group that this rank has not entered.

Each watchdog writes into the store where its rank stands (`Standing`), and that of a rank that is stuck compares. What
is written may be old: it serves as long as it tells of what has been entered, and of a wait that only this rank can
end. Where something is not known for certain, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .context import RankContext
from .flight_recorder import Collective, entered
from .main_thread import MainThreadPosition, Rooted
from .records import Entered, Position, Standing, Waits

LAST_COLLECTIVES = 16  # that a rank tells of, of each group


def standing(
    context: RankContext, waits: Waits | None, stands: MainThreadPosition, last: Sequence[Collective]
) -> Standing:
    """Where this rank stands, which ``waits``, or is stuck in some of the ``last`` collectives, or goes on.

    That was read before: what this rank enters meanwhile makes the counts too high, which hides a standstill until the
    next look. Too low they would make one up.
    """
    stuck_in = {} if waits else {each.group: each.number for each in reversed(_stuck_in(last))}
    where = waits.where if waits else f"is {stands}"
    return Standing(where, entered(last), context.group.begun, _names(last), waits, stuck_in)


def with_root(last: Sequence[Collective], waits_in: Rooted | None) -> list[Collective]:
    """The ``last`` collectives, with the root of the one that the main thread ``waits_in``, the last it has entered."""
    newest = next((each for each in reversed(last) if each.by_main_thread), None)
    if newest is None or waits_in is None or (newest.group, newest.name) != (waits_in.group, waits_in.name):
        return list(last)
    known = newest._replace(root=newest.members[waits_in.group_root])
    return [known if each is newest else each for each in last]


def why_never(
    me: int,
    progress: Position,
    makes_group: bool,
    last: Sequence[Collective],
    mine: Standing,
    others: Mapping[int, Standing],
) -> str:
    """Why this rank, which has got so far in our calls, waits for ever; empty if there is no telling.

    It is stuck in some of the ``last`` collectives, or in initialize_ddp if it ``makes_group``.
    """
    for other, theirs in others.items():
        waits_for_this = theirs.waits is not None and me in theirs.waits.ranks and progress < theirs.waits.until
        if waits_for_this and makes_group and theirs.groups_begun < mine.groups_begun:
            return f"rank {other} {theirs.where} without it"
        if theirs.groups_begun != mine.groups_begun:  # it tells of other groups, perhaps of the same names
            continue
        has_not_entered = any(theirs.entered.get(each.group, each.number) < each.number for each in _stuck_in(last))
        needs_this = any(mine.entered.get(group, number) < number for group, number in theirs.stuck_in.items())
        if has_not_entered and (waits_for_this or needs_this):
            return f"rank {other} {theirs.where} without it"
        for group, names in mine.names.items():
            for number in names.keys() & theirs.names.get(group, {}).keys():
                entered, own = theirs.names[group][number], names[number]
                if entered.differs_from(own):
                    what = f"As collective {number} of process group {group} it entered {entered}, and rank {me} {own}"
                    return f"rank {other} {theirs.where}. {what}"
    return ""


def _names(last: Sequence[Collective]) -> dict[str, dict[str, Entered]]:
    """The names of the last collectives of each group, by their numbers."""
    names: dict[str, dict[str, Entered]] = {}
    for each in last:
        entered = Entered(each.name + (each.tensors and f" of {each.tensors}"), each.root)
        names.setdefault(each.group, {})[str(each.number)] = entered
    return {group: dict(list(numbers.items())[-LAST_COLLECTIVES:]) for group, numbers in names.items()}


def _stuck_in(last: Sequence[Collective]) -> list[Collective]:
    return [each for each in last if not each.is_over and each.by_main_thread]
