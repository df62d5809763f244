"""The store through which the ranks talk, beside the collectives: connections to it, and the records in it.

A store can be reached by whoever reaches its port. So what comes out of it is read as data and checked against the
types of a record, never unpickled; what is not ours is named in the error.

All that ranks tell each other is here. *R* is a rank, *G* a generation. A key is overwritten in place unless it says
when it is deleted, so their number does not grow::

    key           record         written by                             read by
    member/R      Member         R, when it connects to the store       all: where R lives
    status/R      RankStatus     R, as it makes its calls               whoever waits for R
    failures/R    FailedCalls    R, when a call of it fails             whoever waits for R
    arrived/G     counter        all ranks, at the barriers of G        all at a barrier
    ended/G       GenerationEnd  the first rank that leaves a block or  all, and all their watchdogs; rank 0 deletes
                                 a barrier of G early; others add       it, as arrived/G, in a later generation
    whereabouts/R Whereabouts    the watchdog of R, twice a second if   the watchdogs of ranks that are stuck, and ranks
                                 there is anything new                  that have waited for long, or too long
    stop          StopCall       the first rank that is asked to stop,  all, when they call `stop_requested`
                                 or a pool's script; then whoever
                                 fixes at which call all stop
    stops/R       StopCall       R, when it calls `stop_requested`      whoever fixes that
    draws/L       Draws          the first rank that begins an          the others, as they begin the same one
                                 iteration of a prepared loader in
                                 slot L
    lost          Lost           the watchdog of rank 0, see `links`    all: which ranks on other nodes are lost
    uncaught      Uncaught       the first rank that ends by an         the others, when they lose the connection and
                                 exception outside all blocks           end by that
    groupG.n/...  torch's        torch, as it makes the n-th group of   torch; deleted by rank 0 as the next group
                                 G                                      is made
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import socket
import struct
import time
import typing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...errors import LaunchError, ParallelError, RankTimeoutError, WorkerDiedError
from ..descendants import is_stopped
from ..failures import rank_error, summary
from ..polling import looks
from . import times
from .sockets import bottom, connected_since, end_connections, end_if_unanswered, open_sockets, still_open

T = TypeVar("T")
SOCKET_TIMEOUT = "Socket Timeout"  # torch's words, where the receive timeout of a socket is over
NO_ANSWER = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH  # of a connection to a node that is out of reach
ENDED = "ended"
OUT_OF_REACH = "went out of reach"
RESET = "ended, or its connection was reset"

# The keys of the table above.
LOST_KEY = "lost"
STOP_KEY = "stop"
UNCAUGHT_KEY = "uncaught"
# Of a rank:
member_key = "member/{}".format
status_key = "status/{}".format
failures_key = "failures/{}".format
whereabouts_key = "whereabouts/{}".format
stops_key = "stops/{}".format
# Of a generation:
arrived_key = "arrived/{}".format
ended_key = "ended/{}".format
draws_key = "draws/{}".format  # of a slot for loaders


class Member(NamedTuple):
    """The process of a rank, and its node."""

    host: str  # see `host_identity`
    host_name: str
    pid: int
    local_rank: int
    local_world_size: int
    accelerator: str = ""  # which one of which host it has; empty if that is not known
    port: int = 0  # where rank 0 awaits the connections of `Links`

    @property
    def is_here(self) -> bool:
        """Return whether its process id means the same in this process."""
        return self.host == host_identity()

    def open_process(self) -> int | None:
        """Return a pidfd, for the caller to close; None if it is not here, or the system has none.

        Raises:
            ProcessLookupError: it has ended.
        """
        return os.pidfd_open(self.pid) if self.is_here and hasattr(os, "pidfd_open") else None


class Lost(NamedTuple):
    """The ranks on other nodes that are lost, and how: `ENDED`, `OUT_OF_REACH` or `RESET`."""

    how: dict[int, str]


def death(rank: int, member: Member | None, how: str, lost_after_s: float, what: object = None) -> WorkerDiedError:
    """Return the error of a ``rank`` that is gone, before it finished ``what``.

    Args:
        rank: which one.
        member: where it lived, if that is known.
        how: as in `Lost`.
        lost_after_s: for how long its node has not answered, if it is `OUT_OF_REACH`.
        what: the call that others wait for.
    """
    who = f"Rank {rank} (pid {member.pid} on {member.host_name})" if member else f"Rank {rank}"
    when = f" before it finished {what}" if what else ""
    why = f": its node has not answered for {lost_after_s:g} s" if how == OUT_OF_REACH else ""
    return WorkerDiedError(f"{who} {how}{when}{why}.", rank=rank, pid=member.pid if member else 0)


class StoreHost:
    """The process that holds the store, as far as this process knows; and the error once it has been given up.

    While that process is stopped, no answer comes, and the connections stay open: only a receive timeout ends the wait.
    """

    def __init__(self, rank: int | None, rank_0: Member | None, world_size: int, timeout_s: float, lost_after_s: float):
        """Hold the limits.

        Args:
            rank: whose process holds the store; None: the launcher's, on the node of rank 0.
            rank_0: where rank 0 lives.
            world_size: how many ranks there are.
            timeout_s: how long a request may take if the wait that it is for has no earlier deadline.
            lost_after_s: for how long its node may be out of reach.
        """
        self.timeout_s = timeout_s
        self.error: ParallelError | None = None
        self.is_out_of_reach = False
        self._rank = rank
        self._rank_0 = rank_0
        self._world_size = world_size
        self._lost_after_s = lost_after_s

    def note(self, error: RuntimeError, store: dist.Store, waited_s: float) -> None:
        """Give up the store, if ``error`` of a request to it is that no answer has come for ``waited_s``."""
        if SOCKET_TIMEOUT in str(error):
            self.error = self._silence(waited_s)
        elif any(os.strerror(number) in str(error) for number in NO_ANSWER):
            died = death(0, self._rank_0, OUT_OF_REACH, self._lost_after_s)
            self.is_out_of_reach = True  # first: another thread may raise the error at once
            self.error = rank_error("The connection", self._world_size, {0: died})
        else:
            return
        # A late answer would be taken for that to the next request. Other threads that wait for one are freed.
        end_connections(connected_since({}, store))

    def _silence(self, waited_s: float) -> RankTimeoutError:
        who = "The launcher"
        why = ""
        if self._rank is not None and (host := self._rank_0) is not None:
            who = f"Rank 0 (pid {host.pid} on {host.host_name})"
            why = ": it is stopped by a signal" if host.is_here and is_stopped(host.pid) else ""
        text = f"{who}, which holds the store, has not answered for {waited_s:.1f} s{why}."
        return RankTimeoutError(text, ranks=[] if self._rank is None else [0])


class StoreClient:
    """A connection to the store, for one thread: it serves one request at a time."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        host: int | None,
    ) -> None:
        """``host``: the rank whose process the store lives in, if it is one's."""
        self.store = store
        self.answer_by = math.inf  # when the answer to a request is of no use any more
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._limits: StoreHost | None = None
        self._socket: socket.socket | None = None
        self._limit_s: float | None = None  # the receive timeout of the socket

    def limit_requests(self, limits: StoreHost, sockets: dict[int, int]) -> None:
        """Have each request fail that is not answered in time; ``sockets``: its connection, by descriptor and inode."""
        self._limits = limits
        self._socket = next(still_open(sockets), None)

    def close(self) -> None:
        """Close what this object has opened; the store stays connected."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def get(self, key: str) -> str | None:
        """Return the text under ``key``, or None. One round trip; torch's `get` takes two, and waits for the key."""
        text = self.swap(key, "?", "?")
        return None if text == "?" else text

    def set(self, key: str, text: str) -> None:
        """Set ``key``; no reply is awaited."""
        self._ask(self.store.set, key, text)

    def swap(self, key: str, expected: str, text: str) -> str:
        """Set ``key`` to ``text`` if it holds ``expected``, or is not there and that is empty; what it holds then."""
        return self._ask(self.store.compare_set, key, expected, text).decode(errors="replace")

    def add(self, key: str, number: int) -> int:
        """Add to the counter ``key``, which begins at 0; what it is then."""
        return self._ask(self.store.add, key, number)

    def delete(self, key: str) -> None:
        self._ask(self.store.delete_key, key)

    def write(self, key: str, record: tuple[Any, ...]) -> None:
        """Set ``key``, for `read`."""
        self.set(key, encode(record))

    def read(self, key: str, kind: type[T]) -> T | None:
        """Return the record under ``key``, None if there is none.

        Raises:
            ParallelError: it holds something else.
        """
        text = self.get(key)
        return None if text is None else decode(kind, key, text)

    def await_keys(self, keys: list[str], timeout: timedelta) -> None:
        """Return once all of these are set; the store's own wait would be deaf to Ctrl-C.

        Raises:
            ParallelError: one is not, within ``timeout``.
        """
        for waited in looks(*times.POLL):
            if self._ask(self.store.check, keys):
                return
            if waited > timeout.total_seconds():
                missing = ", ".join(key for key in keys if not self._ask(self.store.check, [key]))
                raise ParallelError(f"Rank {self._rank} waited {timeout} for other ranks to tell {missing}.")

    def _ask(self, request: Callable[..., T], *args: Any) -> T:
        """Send a request. Raises ParallelError, or RankError of the rank with the store, if that is gone or silent."""
        began = 0.0
        limits = self._limits
        if limits is not None:
            began = self._set_receive_timeout(limits)
        try:
            return request(*args)
        except RuntimeError as error:  # a DistNetworkError or DistStoreError
            if limits is not None:
                limits.note(error, self.store, time.monotonic() - began)
                if limits.error is not None:
                    raise limits.error.with_traceback(None) from error  # it may have been raised before
            if self._host is None or self._host == self._rank:
                raise ParallelError(f"The store through which the ranks talk is gone: {error}") from error
            died = WorkerDiedError(f"Rank {self._host}, which holds the store, is gone: {error}", rank=self._host)
            raise rank_error("The connection", self._world_size, {self._host: died}) from error

    def _set_receive_timeout(self, limits: StoreHost) -> float:
        """Limit how long the next request may wait for its answer; return the time now."""
        now = time.monotonic()
        limit_s = min(limits.timeout_s, max(self.answer_by - now, 0.0))
        if self._socket is not None and limit_s != self._limit_s:
            self._limit_s = limit_s
            seconds, fraction = divmod(limit_s + times.ANSWER_MARGIN_S, 1)
            with contextlib.suppress(OSError):  # it has ended, which the request tells
                value = struct.pack("ll", int(seconds), int(fraction * 1_000_000))
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        return now


encode = json.dumps  # of a record: a NamedTuple of strings, numbers, records, and tuples and dicts of them


def decode(kind: type[T], key: str, text: str) -> T:
    """Return the record that ``text`` under ``key`` is.

    Raises:
        ParallelError: it is no such record.
    """
    try:
        record: T = _reader(kind)(json.loads(text))  # type: ignore[arg-type]  # types are hashable
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise ParallelError(
            f"The store holds a value under our key {key!r} that this package did not write: {text[:80]!r}."
        ) from None
    return record


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that rebuilds a ``kind`` from its JSON, or raises TypeError, ValueError or AttributeError."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is dict:
        key_of = arguments[0]
        value_of = _reader(arguments[1])
        return lambda value: {key_of(key): value_of(item) for key, item in value.items()}
    if origin in (tuple, list):
        item_of = _reader(arguments[0])
        return lambda value: origin(item_of(item) for item in _checked(list, value))
    if hasattr(kind, "_fields"):
        return _reader_of_fields(kind, list(typing.get_type_hints(kind).values()))
    if origin is UnionType and arguments[-1] is NoneType and len(arguments) == 2:
        item_of = _reader(arguments[0])
        return lambda value: None if value is None else item_of(value)
    return functools.partial(_checked, kind)


def _reader_of_fields(kind: Any, hints: list[Any]) -> Callable[[Any], Any]:
    """Return a reader that checks plain fields all at once: a rank that waits decodes a status at every call."""
    plain = [hint if hint in (bool, int, float, str) else object for hint in hints]
    others = [(index, _reader(hint)) for index, hint in enumerate(hints) if plain[index] is object]

    def read(value: Any) -> Any:
        if len(_checked(list, value)) != len(hints) or not all(map(isinstance, value, plain)):
            raise TypeError(kind)
        for index, reader in others:
            value[index] = reader(value[index])
        return kind(*value)

    return read


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(kind)
    return value


def clone_store(store: dist.Store, unanswered_s: float | None) -> tuple[dist.Store, dict[int, int]]:
    """Return the store by another connection, which ends after ``unanswered_s`` without an answer, and that."""
    before = open_sockets()
    whole = bottom(store)
    timeout = whole.timeout  # type: ignore[attr-defined]  # torch tries for so long to connect, deaf to Ctrl-C, also where nobody is left
    whole.set_timeout(min(timeout, times.CONNECTS_WITHIN))
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs, as the above
    except RuntimeError as error:
        raise LaunchError(
            f"The store through which the ranks talk cannot be reached again: {summary(error)}"
        ) from error
    finally:
        whole.set_timeout(timeout)
    bottom(clone).set_timeout(timeout)
    connection = connected_since(before, store)
    end_unanswered(connection, unanswered_s)
    return clone, connection


def end_unanswered(sockets: dict[int, int], unanswered_s: float | None) -> None:
    """Have connections to other nodes end when those are out of reach; TCP gives up a quarter of an hour later."""
    if unanswered_s is not None:
        for connection in still_open(sockets):
            with connection:
                end_if_unanswered(connection, unanswered_s)


@functools.cache
def host_identity() -> str:
    """Return a text that is the same in processes for which process ids mean the same: one boot, one pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()
