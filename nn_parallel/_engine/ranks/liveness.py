"""Find out who is dead: on this node by pidfds, on other nodes by the connections to rank 0, see `links`."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
from collections.abc import Sequence

from ...errors import ParallelError, WorkerDiedError
from ..descendants import is_stopped
from ..failures import rank_names
from . import times
from .context import RankContext
from .store import ENDED, LOST_KEY, OUT_OF_REACH, Lost, Member, StoreClient, death, member_key


class Liveness:
    """The dead ranks, as one thread knows them."""

    def __init__(self, context: RankContext, connection: StoreClient) -> None:
        self._context = context
        self._connection = connection
        self._members: dict[int, Member] = {}
        self._look_up_at = dict.fromkeys(range(context.world_size), 0.0)
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}  # by the pidfd of its process
        self._how = dict[int, str]()  # those that are known to be dead died
        self._lost = Lost({})  # as rank 0 has told
        self._look_for_lost_at = 0.0

    def is_dead(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is known to have ended, or its node to be out of reach."""
        return bool(self.dead([rank]))

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that are dead: one look at all processes, however many are asked for."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._members and now > self._look_up_at[rank]:
                self._look_up_at[rank] = now + times.ASK_EVERY_S * self._context.world_size  # of all ranks alike
                self._look_up(rank)
        self._how.update((self._rank_of[pidfd], ENDED) for pidfd, _ in self._poll.poll(0))
        return [rank for rank in ranks if self._is_known_dead(rank)]

    def out_of_reach(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` whose nodes do not answer any more."""
        return [rank for rank in self.dead(ranks) if self._how[rank] == OUT_OF_REACH]

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is on this node, and stopped."""
        if rank not in self._members:
            self._look_up(rank)
        member = self._members.get(rank)
        return member is not None and member.is_here and is_stopped(member.pid)

    def death(self, rank: int, what: object = None) -> WorkerDiedError:
        """Return the error of a rank that died, before it finished ``what``."""
        if rank not in self._members:
            with contextlib.suppress(ParallelError):  # the store is gone, too
                self._look_up(rank)
        return death(rank, self._members.get(rank), self._how.get(rank, ENDED), self._context.lost_after_s, what)

    def deaths(self, ranks: Sequence[int], what: object) -> dict[int, WorkerDiedError]:
        """Return the errors of those of ``ranks`` that are dead, by rank."""
        return {rank: self.death(rank, what) for rank in self.dead(ranks)}

    def close(self) -> None:
        for pidfd in self._rank_of:
            self._poll.unregister(pidfd)
            os.close(pidfd)
        self._rank_of.clear()
        self._members.clear()

    def _look_up(self, rank: int) -> None:
        member = self._connection.read(member_key(rank), Member)
        if member is None:
            return
        try:
            pidfd = member.open_process()
        except ProcessLookupError:
            self._how[rank] = ENDED
        except OSError:  # no descriptor is left
            return
        else:
            if pidfd is not None:
                self._rank_of[pidfd] = rank
                self._poll.register(pidfd, select.POLLIN)
        self._members[rank] = member

    def _is_known_dead(self, rank: int) -> bool:
        if rank not in self._how and (links := self._context.links) is not None:
            now = time.monotonic()
            if self._context.rank != 0 and now > self._look_for_lost_at:
                self._look_for_lost_at = now + times.ASK_EVERY_S
                self._lost = self._connection.read(LOST_KEY, Lost) or self._lost
            how = links.lost.get(rank) or self._lost.how.get(rank)
            if how is not None:
                self._how[rank] = how
        return rank in self._how


@functools.lru_cache(maxsize=1)
def members(context: RankContext) -> list[Member]:
    """Wait until all ranks have told where they live; return that, in rank order."""
    keys = [member_key(rank) for rank in range(context.world_size)]
    context.connection.await_keys(keys, context.timeout)
    records = [context.connection.read(key, Member) for key in keys]
    return [member for member in records if member is not None]


def shared_accelerator(context: RankContext) -> str:
    """Return a sentence that names the ranks that have the same accelerator; empty if there are none."""
    ranks_of: dict[str, list[int]] = {}
    if context.world.device.type != "cpu":
        for rank, member in enumerate(members(context)):
            if member.accelerator:
                ranks_of.setdefault(member.accelerator, []).append(rank)
    for accelerator, ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"{rank_names(ranks).capitalize()} share the accelerator at {accelerator.rpartition('/')[2]}"
    return ""
