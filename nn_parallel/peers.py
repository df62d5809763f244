"""What a rank knows of another one: what it reports of failures, whether it lives, who failed first."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch.distributed as dist

from .errors import ParallelError, WorkerDiedError, lost_connection, rank_error
from .reports import FINISHED, NO_REPORT, Call, Failed, Progress, Report, foreign_value, parse_failed
from .world import Membership, host_identity

FAILURES_KEPT = 64
SEEK_EVERY_S = 0.002
LEFT_KEY = "left"  # which rank is through which block


class Peer:
    """What this rank knows of another one."""

    def __init__(self, rank: int, read_text: Callable[[str], str | None]) -> None:
        self.rank, self._read_text = rank, read_text
        self.failures: list[Failed] = []  # those that this rank has not raised
        self.failures_seen = 0
        self.settled = (0, 0)  # term and call: what failed up to here has been answered for on this rank
        self.forgotten = (0, 0)  # term and call: what failed before is no longer known
        self._pid = 0
        self._pidfd: int | None = None
        self._looked_up = False

    def take_failures(self, text: str) -> None:
        """Add what is new in the peer's list."""
        made, kept = _listed_failures(self.rank, text)
        unseen = made - self.failures_seen
        if unseen > len(kept) > 0:
            self.forgotten = (kept[0].term, kept[0].call)
        self.failures += kept[max(0, len(kept) - unseen) :]
        self.failures_seen = made

    def is_dead(self) -> bool:
        """Whether its process is known to have ended; only that of a process of this host can be."""
        if not self._looked_up and (text := self._read_text(f"member/{self.rank}")) is not None:
            self._looked_up = True
            facts = json.loads(text)
            if facts["host"] == host_identity() and hasattr(os, "pidfd_open"):
                self._pid = int(facts["pid"])
                with contextlib.suppress(ProcessLookupError):
                    self._pidfd = os.pidfd_open(self._pid)
        if self._pidfd is None:
            return self._pid > 0
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def death(self, call: Call) -> WorkerDiedError:
        message = f"Rank {self.rank} (pid {self._pid}) ended before it finished {call}."
        return WorkerDiedError(message, rank=self.rank, pid=self._pid)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd, self._looked_up = None, False


class Peers:
    """What this rank reads of the others: one connection to the store, so for one thread."""

    def __init__(self, member: Membership, store: dist.Store) -> None:
        self._member, self._store = member, store
        self._peers = {rank: Peer(rank, self.text) for rank in range(member.world_size)}
        self._failed_block = (-1, 0)  # its term and its number: the outermost of the last term

    def __getitem__(self, rank: int) -> Peer:
        return self._peers[rank]

    def text(self, key: str) -> str | None:
        """The value of ``key``, None if there is none: one round trip, where `get` takes two and waits."""
        with lost_store_names_its_host(self._member):
            text = self._store.compare_set(key, "?", "?").decode(errors="replace")
        return None if text == "?" else text

    def report(self, rank: int) -> Report:
        """What ``rank`` says of itself in the present term."""
        text = self.text(f"report/{rank}")
        if text is None:
            return NO_REPORT
        try:
            report = Report.parse(text)
        except ValueError:
            raise foreign_value(f"report/{rank}", text) from None
        return report if report.progress.term >= self._member.term else NO_REPORT

    def first_failed(self, number: int) -> Claim | None:
        """Who claims to have failed first in section or block ``number``, or in something beyond or around it.

        A claim of a later term tells that a rank has failed in a block of this one, perhaps in one that this rank has
        not entered yet; which one it was stands in that rank's list.
        """
        term = self._member.term
        with lost_store_names_its_host(self._member):
            claim = first_to_claim(self._store, claim_key(term, number))
        if claim is None or claim.term == term:
            return claim
        return claim if number < 0 and self._has_failed(claim.rank, term, number) else None

    def _has_failed(self, rank: int, term: int, block: int) -> bool:
        """Whether ``rank`` has failed in ``block`` or in one around it; also if that is no longer known."""
        made, kept = _listed_failures(rank, self.text(f"failed/{rank}") or "")
        forgotten = made > len(kept) and kept[0].term > term
        return forgotten or any(f.term == term and block <= f.call < 0 for f in kept)

    def outermost_failed(self, block: int) -> int:
        """The outermost block that is known to have failed: ``block``, or one around it."""
        claim, term = self.first_failed(block), self._member.term
        claimed = claim.number if claim is not None and claim.term == term else block
        return max(block, claimed, self._failed_block[1] if self._failed_block[0] == term else block)

    def failures_of(self, rank: int, report: Report, number: int) -> dict[int, Exception]:
        """What ``rank`` reports up to section ``number`` and this rank has not raised; the oldest.

        For a block, which has a negative number: of that and of those around it.
        """
        peer, term = self._peers[rank], self._member.term
        if report.failures_made > peer.failures_seen:
            peer.take_failures(self.text(f"failed/{rank}") or "")
        due = [f for f in peer.failures if f.term == term and (0 < f.call <= number or number <= f.call < 0)]
        for failed in due:
            peer.failures.remove(failed)
            if failed.call < 0:
                self._failed_block = max(self._failed_block, (term, failed.call))
        unsettled = [f for f in due if f.call < 0 or (f.term, f.call) > peer.settled]
        if not unsettled and number > 0 and (term, number) < peer.forgotten:
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {number}: whether that one failed "
                "is no longer known here."
            )
        return unsettled[0].rebuild() if unsettled else {}

    def collect(self, call: Call, calls: int, number: int, failures: dict[int, Exception], seek_s: float) -> None:
        """Add what others have reported; with nothing but lost connections, wait for the cause up to ``seek_s``."""
        deadline, me, term = time.monotonic() + seek_s, self._member.rank, self._member.term
        while True:
            for rank in call.ranks:
                if rank == me or rank in failures:
                    continue
                dead = self._peers[rank].is_dead()
                report = self.report(rank)
                for other, failure in self.failures_of(rank, report, number).items():
                    failures.setdefault(other, failure)
                if dead and (number < 0 or report.progress < Progress(term, calls, FINISHED)):
                    failures.setdefault(rank, self._peers[rank].death(call))
            found_cause = not all(lost_connection(error) for error in failures.values())
            if found_cause or time.monotonic() > deadline:
                return
            time.sleep(SEEK_EVERY_S)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _listed_failures(rank: int, text: str) -> tuple[int, list[Failed]]:
    """How many failures ``rank`` ever had, and the last of them, from its list in the store."""
    try:
        return parse_failed(text)
    except (TypeError, KeyError, ValueError, AttributeError):
        raise foreign_value(f"failed/{rank}", text) from None


def claim_key(term: int, number: int) -> str:
    """Under which ranks claim to have failed first in section ``number``, or, if that is negative, in a block."""
    return f"first/{'section' if number > 0 else 'block'} {term} {number}"


class Claim(NamedTuple):
    """To have failed first."""

    term: int
    number: int
    rank: int


def first_to_claim(store: dist.Store, key: str) -> Claim | None:
    """The first claim to have failed in what ``key`` names, or in something beyond.

    A key is a name in the store, and after a space the term and the number that it must be of. Ranks leave a section or
    a block only together or by a failure: who claims a later one has failed in this one too, and gone on. A block that
    began earlier (its negative number is larger) is around this one, which fails with it.
    """
    name, _, wanted = key.partition(" ")
    claim = _claim(store.compare_set(name, "?", "?").decode(errors="replace"))
    return claim if claim[:-1] >= tuple(map(int, wanted.split())) else None


def claim_first(store: dist.Store, key: str, rank: int) -> None:
    """Be the cause, unless another rank has claimed ``key`` before. Also flushes what was set on this connection."""
    name, _, wanted = key.partition(" ")
    mine = f"{wanted} {rank}"
    seen = store.compare_set(name, "", mine).decode(errors="replace")
    while _claim(seen)[:-1] < _claim(mine)[:-1]:
        seen = store.compare_set(name, seen, mine).decode(errors="replace")


def _claim(value: str) -> Claim:
    """A claim as it stands in the store; less than any other if it is none."""
    with contextlib.suppress(ValueError):
        term, number, rank = map(int, value.split())
        return Claim(term, number, rank)
    return Claim(-1, 0, -1)


@contextlib.contextmanager
def lost_store_names_its_host(member: Membership) -> Iterator[None]:
    """Turn the loss of the store into an error that names the rank whose process it lived in."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        host = member.store_host
        if host is None or host == member.rank:
            raise ParallelError(f"The store through which the ranks talk is gone: {error}") from error
        died = WorkerDiedError(f"Rank {host}, which holds the store of all, is gone: {error}", rank=host, pid=0)
        raise rank_error("The connection", member.world_size, {host: died}) from error


@functools.lru_cache(maxsize=1)
def local_places(member: Membership) -> list[tuple[int, int]]:
    """The local rank and the local world size of every rank, once all of them have announced themselves."""
    keys = [f"member/{rank}" for rank in range(member.world_size)]
    member.store.wait(keys, member.timeout)
    facts = [json.loads(member.store.get(key)) for key in keys]
    return [(int(fact["local_rank"]), int(fact["local_world_size"])) for fact in facts]
