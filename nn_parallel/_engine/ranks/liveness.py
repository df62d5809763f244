"""The ranks that this rank knows to be dead.

This rank watches the process of each rank on its own node through a pidfd, a descriptor that becomes readable when the
process ends. For ranks on other nodes, rank 0 publishes in the store which of them it has lost, see `links`.
"""

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
    """The ranks that one thread of this rank knows to be dead.

    Each thread that must notice deaths makes a `Liveness`, because each thread has its own connection to the store.
    """

    def __init__(self, context: RankContext, connection: StoreClient) -> None:
        self._context = context
        self._connection = connection
        self._members: dict[int, Member] = {}  # maps ranks to the `Member` records that were read from the store
        # Maps each rank to the earliest time at which its `Member` record may be looked up again. The look-up is
        # repeated until the record is there.
        self._look_up_at = dict.fromkeys(range(context.world_size), 0.0)
        self._poll = select.poll()  # polls the pidfds
        self._rank_of: dict[int, int] = {}  # maps pidfds to ranks
        self._loss_reason = dict[int, str]()  # maps each dead rank to ENDED, OUT_OF_REACH or RESET
        self._lost = Lost({})  # the last `Lost` record that was read, in which rank 0 lists the ranks that it has lost
        self._read_lost_at = 0.0  # the earliest time at which the `Lost` record is read again

    def is_dead(self, rank: int) -> bool:
        """Return whether this rank knows that the process of ``rank`` has ended, or that its node is out of reach."""
        return bool(self.dead([rank]))

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` that are dead. A single system call checks all processes on this node."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._members and now > self._look_up_at[rank]:
                # The interval is proportional to the number of ranks. Otherwise the more ranks there are, the more
                # requests per second this rank would send to the store.
                self._look_up_at[rank] = now + times.ASK_EVERY_S * self._context.world_size
                self._look_up(rank)
        self._loss_reason.update((self._rank_of[pidfd], ENDED) for pidfd, _ in self._poll.poll(0))
        if self._context.links is not None:
            self._context.links.look()
        return [rank for rank in ranks if self._is_known_dead(rank)]

    def out_of_reach(self, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` whose nodes do not answer any more."""
        return [rank for rank in self.dead(ranks) if self._loss_reason[rank] == OUT_OF_REACH]

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is on this node and has been stopped by a signal."""
        if rank not in self._members:
            self._look_up(rank)
        member = self._members.get(rank)
        return member is not None and member.is_here and is_stopped(member.pid)

    def death(self, rank: int, what: object = None) -> WorkerDiedError:
        """Return the error for a rank that has died.

        Args:
            rank: the dead rank.
            what: the call that the rank had to finish, for the message; None if there is no such call.
        """
        if rank not in self._members:
            with contextlib.suppress(ParallelError):  # if the store is lost too, the error does not name the process
                self._look_up(rank)
        how = self._loss_reason.get(rank, ENDED)
        return death(rank, self._members.get(rank), how, self._context.lost_after_s, what)

    def deaths(self, ranks: Sequence[int], what: object) -> dict[int, WorkerDiedError]:
        """Return the errors for those of ``ranks`` that are dead, by rank. Each error is made by `death`."""
        return {rank: self.death(rank, what) for rank in self.dead(ranks)}

    def close(self) -> None:
        """Close the pidfds."""
        for pidfd in self._rank_of:
            self._poll.unregister(pidfd)
            os.close(pidfd)
        self._rank_of.clear()
        self._members.clear()

    def _look_up(self, rank: int) -> None:
        """Read the `Member` record of ``rank``, and begin to watch the process of the rank if it is on this node."""
        member = self._connection.read(member_key(rank), Member)
        if member is None:
            return
        try:
            pidfd = member.open_process()
        except ProcessLookupError:
            self._loss_reason[rank] = ENDED
        except OSError:  # this process has too many open files; `dead` tries again later
            return
        else:
            if pidfd is not None:
                self._rank_of[pidfd] = rank
                self._poll.register(pidfd, select.POLLIN)
        self._members[rank] = member

    def _is_known_dead(self, rank: int) -> bool:
        """Return whether the pidfd of ``rank``, `Links` or the `Lost` record has shown that ``rank`` is dead."""
        if rank not in self._loss_reason and (links := self._context.links) is not None:
            now = time.monotonic()
            if self._context.rank != 0 and now > self._read_lost_at:
                self._read_lost_at = now + times.ASK_EVERY_S
                self._lost = self._connection.read(LOST_KEY, Lost) or self._lost
            how = links.lost.get(rank) or self._lost.how.get(rank)
            if how is not None:
                self._loss_reason[rank] = how
        return rank in self._loss_reason


@functools.lru_cache(maxsize=1)
def members(context: RankContext) -> list[Member]:
    """Return the `Member` records of all ranks, in rank order. Wait until all ranks have written them."""
    keys = [member_key(rank) for rank in range(context.world_size)]
    context.connection.await_keys(keys, context.timeout)
    return context.connection.read_all(keys, Member)


def shared_accelerator(context: RankContext) -> str:
    """Return a text that says which ranks share an accelerator, for messages; an empty string if no ranks do."""
    ranks_of: dict[str, list[int]] = {}
    if context.world.device.type != "cpu":
        for rank, member in enumerate(members(context)):
            if member.accelerator:
                ranks_of.setdefault(member.accelerator, []).append(rank)
    for accelerator, ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"{rank_names(ranks).capitalize()} share the accelerator at {accelerator.rpartition('/')[2]}"
    return ""
