"""What a rank knows of another one: what it reports of failures, whether it lives, who failed first."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import threading
from collections.abc import Callable, Iterator

import torch.distributed as dist

from .ddp import abort_collectives
from .errors import WorkerDiedError
from .reports import Call, Failed, foreign_value, parse_failed
from .world import Membership, host_identity

# How long to sleep between two looks: a share of the time waited so far, within these bounds.
POLL_SHARE, POLL_MIN_S, POLL_MAX_S = 0.05, 5e-5, 0.02
STOP_WITHIN_S = 1.0


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
        try:
            made, kept = parse_failed(text)
        except (TypeError, KeyError, ValueError, AttributeError):
            raise foreign_value(f"failed/{self.rank}", text) from None
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


class Watcher:
    """A thread that looks for a failure of another rank while this one may be stuck in a collective.

    It has a connection of its own: a store connection serves one request at a time.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._store: dist.Store = member.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._keys: list[str] = []  # of the sections and blocks that this rank is in, the innermost last
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="nn_parallel watcher", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, key: str) -> Iterator[None]:
        with self._changed:
            self._keys.append(key)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:  # the thread frees only while it holds this: from here on it touches no group
                self._keys.remove(key)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(STOP_WITHIN_S)  # it may sit in a store whose host is gone; it is a daemon

    def _loop(self) -> None:
        pause = POLL_MIN_S
        while True:
            with self._changed:
                if self._stopped:
                    return
                if not self._keys:
                    pause = POLL_MIN_S
                    self._changed.wait()
                    continue
                keys = list(self._keys)
            try:
                failed = [key for key in keys if first_to_claim(self._store, key) not in (None, self._member.rank)]
            except RuntimeError:  # the store is gone: whoever asks it next says so
                return
            with self._changed:
                if any(key in self._keys for key in failed):
                    abort_collectives(self._member)
                if not self._stopped:
                    self._changed.wait(pause)
                    pause = min(pause * (1 + POLL_SHARE), POLL_MAX_S)


def first_to_claim(store: dist.Store, key: str) -> int | None:
    """The rank that has failed first in what ``key`` names, or that has failed in something later.

    A key is a name in the store, and after a space the term and the call that it must be of. Ranks leave a call, or a
    block, only together or by a failure: who claims a later one has failed in this one too, and gone on.
    """
    name, _, wanted = key.partition(" ")
    claim = _claim(store.compare_set(name, "?", "?").decode(errors="replace"))
    return claim[-1] if claim[:-1] >= tuple(map(int, wanted.split())) else None


def claim_first(store: dist.Store, key: str, rank: int) -> None:
    """Be the cause, unless another rank has claimed ``key`` before. Also flushes what was set on this connection."""
    name, _, wanted = key.partition(" ")
    mine = f"{wanted} {rank}"
    seen = store.compare_set(name, "", mine).decode(errors="replace")
    while _claim(seen)[:-1] < _claim(mine)[:-1]:
        seen = store.compare_set(name, seen, mine).decode(errors="replace")


def _claim(value: str) -> tuple[int, ...]:
    """The term, the call and the rank of a claim; less than any other if it is none."""
    parts = value.split()
    return tuple(map(int, parts)) if len(parts) == 3 and all(part.isdecimal() for part in parts) else (-1, -1, -1)


@functools.lru_cache(maxsize=1)
def local_places(member: Membership) -> list[tuple[int, int]]:
    """The local rank and the local world size of every rank, once all of them have announced themselves."""
    keys = [f"member/{rank}" for rank in range(member.world_size)]
    member.store.wait(keys, member.timeout)
    facts = [json.loads(member.store.get(key)) for key in keys]
    return [(int(fact["local_rank"]), int(fact["local_world_size"])) for fact in facts]
