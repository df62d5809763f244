"""What a rank knows of another one: what it reports of failures, whether it lives, who failed first."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from ..errors import Failure, ParallelError, WorkerDiedError, lost_connection, rank_error
from ..launch.context import RankContext, host_identity
from ..launch.liveness import GONE_KEY
from .records import FINISHED, NO_REPORT, Call, Failed, Progress, Report, foreign_value

FAILURES_KEPT = 64
SEEK_EVERY_S = 0.002
ASK_EVERY_S = 0.1  # who is gone, or where one lives who has not said so
FIRST_KEY = "first"  # which rank failed first in which section
LEFT_KEY = "left"  # which block a rank is through
ASKED_KEY = "asked"  # who has asked last where the others stand, in which call


class Peer:
    """What this rank knows of another one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failures: list[Failed] = []  # those that this rank has not raised
        self.failures_seen = 0
        self.forgotten = (0, 0)  # generation and call: what failed before is no longer known
        self._pid, self._host_name = 0, ""
        self._pidfd: int | None = None
        self.is_looked_up = self._has_ended = False
        self.look_up_at = 0.0

    def take_failures(self, text: str) -> None:
        """Add what is new in the peer's list."""
        key = f"failed/{self.rank}"
        count, *lines = text.split("\n")
        kept = [_parsed(key, line) for line in lines]
        try:
            made = int(count)
        except ValueError:
            raise foreign_value(key, text) from None
        unseen = made - self.failures_seen
        if unseen > len(kept) > 0:
            self.forgotten = (kept[0].generation, kept[0].call)
        self.failures += kept[max(0, len(kept) - unseen) :]
        self.failures_seen = made

    def is_dead(self) -> bool:
        """Whether its process is known to have ended."""
        if self._pidfd is not None and not self._has_ended:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._has_ended = bool(poll.poll(0))
        return self._has_ended

    def look_up(self, text: str) -> None:
        """Take what the peer says of where it lives."""
        try:
            facts = json.loads(text)
            host, self._host_name, self._pid = facts["host"], str(facts["host_name"]), int(facts["pid"])
        except (KeyError, TypeError, ValueError):
            raise foreign_value(f"member/{self.rank}", text) from None
        self.is_looked_up = True
        if host == host_identity() and hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(self._pid)
            except ProcessLookupError:
                self._has_ended = True
            except OSError:  # no descriptor is left
                self.is_looked_up = False

    def death(self, call: Call) -> WorkerDiedError:
        how = "ended" if self._has_ended else "ended, or its node went out of reach,"
        message = f"Rank {self.rank} (pid {self._pid} on {self._host_name}) {how} before it finished {call}."
        return WorkerDiedError(message, rank=self.rank, pid=self._pid)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd, self.is_looked_up = None, False


class Peers:
    """What this rank reads of the others: one connection to the store, so for one thread."""

    def __init__(self, context: RankContext, store: dist.Store) -> None:
        self._context, self._store = context, store
        self._names_host = lost_store_names_its_host(context)
        self._peers = {rank: Peer(rank) for rank in range(context.world_size)}
        # By rank, the calls of this generation for which this rank did not wait, until their outcomes are known.
        self.unwaited: dict[int, set[int]] = {}
        self._gone: set[int] = set()  # ended, or out of reach
        self._look_for_gone_at = 0.0
        self.late: list[Failed] = []  # failures of such calls that this rank has not raised

    def __getitem__(self, rank: int) -> Peer:
        return self._peers[rank]

    def text(self, key: str) -> str | None:
        """The value of ``key``, None if there is none: one round trip, where `get` takes two and waits."""
        with self._names_host:
            text = self._store.compare_set(key, "?", "?").decode(errors="replace")
        return None if text == "?" else text

    def tell(self, key: str, text: str) -> None:
        """Set ``key``, for the others to read; no reply is awaited."""
        with self._names_host:
            self._store.set(key, text)

    def report(self, rank: int) -> Report:
        """What ``rank`` says of itself in the present generation."""
        text = self.text(f"report/{rank}")
        if text is None:
            return NO_REPORT
        try:
            report = Report.parse(text)
        except ValueError:
            raise foreign_value(f"report/{rank}", text) from None
        return report if report.progress.generation >= self._context.generation else NO_REPORT

    def first_failed(self, section: int) -> int | None:
        """The rank that has failed first in a section of this generation, or in something beyond.

        Ranks leave a section only together or by a failure: who fails in a later one has failed in this one too, and
        gone on.
        """
        claim = _claim(self.text(FIRST_KEY) or "")
        return claim.rank if claim[:-1] >= (self._context.generation, section) else None

    def claim_first(self, section: int) -> None:
        """Be the first to have failed, unless another rank is. Also flushes what was set on this connection."""
        mine, seen = Claim(self._context.generation, section, self._context.rank), ""
        text = " ".join(map(str, mine))
        with self._names_host:
            while _claim(seen)[:-1] < mine[:-1]:
                seen = self._store.compare_set(FIRST_KEY, seen, text).decode(errors="replace")

    def failed_block(self, block: int) -> Failed | None:
        """The failure since this generation began that ends ``block``: of that, or of one around it.

        Every generation ends with the failure of one block, which stands in the store under the generation's own key:
        whichever rank writes there first decides it for all. A block that began later (its number is smaller) is none
        that this rank is in; the rank goes through that failure when it enters that block.
        """
        generation = self._context.generation
        while (failed := self.ended(generation)) is not None and failed.block < block:
            generation += 1
        return failed

    def fail_block(self, block: int, calls: int, function: str, failures: dict[int, Failure]) -> Failed:
        """Fail ``block`` with ``failures``, or add them to the failure that ends it already."""
        mine, instead_of = Failed(self._context.generation, calls, block, function, failures), ""
        while True:
            key = ended_key(mine.generation)
            with self._names_host:
                text = self._store.compare_set(key, instead_of, mine.format())
            failed = _parsed(key, text)._replace(generation=mine.generation)
            if failed.block < block:
                mine = mine._replace(generation=mine.generation + 1)
            elif failures.keys() <= failed.failures.keys():
                return failed
            else:
                mine = failed._replace(failures=failed.failures | failures | failed.failures)  # in this order
                instead_of = text.decode()

    def is_dead(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to have ended, or its node to be out of reach."""
        peer = self._peers[rank]
        if not peer.is_looked_up and time.monotonic() > peer.look_up_at:
            peer.look_up_at = time.monotonic() + ASK_EVERY_S
            if (text := self.text(f"member/{rank}")) is not None:
                peer.look_up(text)
        return peer.is_dead() or self._is_gone(rank)

    def _is_gone(self, rank: int) -> bool:
        """What `nodes` knows of it, where ranks may be on several nodes."""
        if (rank_0_is_gone := self._context.rank_0_is_gone) is None:
            return False
        if rank == 0:
            return rank_0_is_gone()
        if time.monotonic() > self._look_for_gone_at:
            self._look_for_gone_at = time.monotonic() + ASK_EVERY_S
            self._gone = {int(gone) for gone in (self.text(GONE_KEY) or "").split() if gone.isdecimal()}
        return rank in self._gone

    def ended(self, generation: int) -> Failed | None:
        """How ``generation`` ended; None if it has not."""
        text = self.text(ended_key(generation))
        return None if text is None else _parsed(ended_key(generation), text)._replace(generation=generation)

    def failures_of(self, rank: int, report: Report, section: int) -> dict[int, Exception]:
        """What ``rank`` reports of ``section`` of this generation and this rank has not raised.

        What it reports of unwaited calls is kept in ``late``.
        """
        own = [failed for failed in self._take_failures(rank, report, section) if failed.call == section]
        if not own and (self._context.generation, section) < self._peers[rank].forgotten:
            raise ParallelError(
                f"Rank {rank} has failed more than {FAILURES_KEPT} times since call {section}: whether that one failed "
                "is no longer known here."
            )
        return own[0].rebuild() if own else {}

    def look_for_late_failures(self, section: int) -> None:
        """Read what ranks report of unwaited calls, before ``section``."""
        for rank, calls in list(self.unwaited.items()):
            report = self.report(rank)
            self._take_failures(rank, report, section - 1)
            unknown = {call for call in calls if report.progress < Progress(self._context.generation, call, FINISHED)}
            if unknown:
                self.unwaited[rank] = unknown
            else:
                del self.unwaited[rank]

    def _take_failures(self, rank: int, report: Report, section: int) -> list[Failed]:
        """What ``rank`` reports up to ``section`` of this generation, each failure once."""
        peer, generation = self._peers[rank], self._context.generation
        if report.failures_made > peer.failures_seen:
            peer.take_failures(self.text(f"failed/{rank}") or "")
        due = [f for f in peer.failures if f.generation == generation and f.call <= section]
        peer.failures = [f for f in peer.failures if f.generation >= generation and f not in due]
        self.late += [f for f in due if f.call in self.unwaited.get(rank, ())]
        return due

    def collect(self, call: Call, section: int, failures: dict[int, Exception], seek_s: float) -> None:
        """Add what others have reported; with nothing but lost connections, wait for the cause up to ``seek_s``."""
        deadline, finished = time.monotonic() + seek_s, Progress(self._context.generation, section, FINISHED)
        while True:
            for rank in call.ranks:
                if rank == self._context.rank or rank in failures:
                    continue
                dead = self.is_dead(rank)
                report = self.report(rank)
                for other, failure in self.failures_of(rank, report, section).items():
                    failures.setdefault(other, failure)
                if dead and report.progress < finished:
                    failures.setdefault(rank, self._peers[rank].death(call))
            found_cause = not all(lost_connection(error) for error in failures.values())
            if found_cause or time.monotonic() > deadline:
                return
            time.sleep(SEEK_EVERY_S)

    def seek_cause(self, call: Call, block: int, seek_s: float) -> dict[int, Exception]:
        """The deaths for which ``block`` has to fail; none if it has failed already, or nothing is found."""
        deadline = time.monotonic() + seek_s
        others = [rank for rank in self._peers if rank != self._context.rank]
        while self.failed_block(block) is None and time.monotonic() < deadline:
            deaths: dict[int, Exception] = {r: self._peers[r].death(call) for r in others if self.is_dead(r)}
            if deaths:
                return deaths
            time.sleep(SEEK_EVERY_S)
        return {}

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def format_list(made: int, kept: Iterable[Failed]) -> str:
    """A rank's last failed sections, a line each, under how many it ever had."""
    return "\n".join([str(made), *(failed.format() for failed in kept)])


def _parsed(key: str, text: str | bytes) -> Failed:
    try:
        return Failed.parse(text)
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        raise foreign_value(key, str(text)) from None


def where_key(rank: int) -> str:
    """Under which a rank answers where it stands."""
    return f"where/{rank}"


def ended_key(generation: int) -> str:
    """Under which the failure stands that ends a generation."""
    return f"ended/{generation}"


class Claim(NamedTuple):
    """To have failed first."""

    generation: int
    section: int
    rank: int


def _claim(value: str) -> Claim:
    """A claim as it stands in the store; less than any other if it is none."""
    with contextlib.suppress(ValueError):
        generation, section, rank = map(int, value.split())
        return Claim(generation, section, rank)
    return Claim(-1, 0, -1)


class lost_store_names_its_host:  # a context manager, and no generator: it stands around each request
    """Turn the loss of the store into an error that names the rank whose process it lived in."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError):  # DistNetworkError, DistStoreError
            return
        host = self._context.store_host
        if host is None or host == self._context.rank:
            raise ParallelError(f"The store through which the ranks talk is gone: {error}") from error
        died = WorkerDiedError(f"Rank {host}, which holds the store of all, is gone: {error}", rank=host, pid=0)
        raise rank_error("The connection", self._context.world_size, {host: died}) from error


@functools.lru_cache(maxsize=1)
def local_places(context: RankContext) -> list[tuple[int, int]]:
    """The local rank and the local world size of every rank, once all of them have announced themselves."""
    keys = [f"member/{rank}" for rank in range(context.world_size)]
    context.await_keys(keys)
    facts = [json.loads(context.store.get(key)) for key in keys]
    return [(int(fact["local_rank"]), int(fact["local_world_size"])) for fact in facts]
