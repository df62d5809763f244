"""The store by which the ranks exchange records outside of the collectives: connections to it, and its records.

Every program that can reach the port of a store can write into it. So this package never unpickles values from the
store. It reads them as JSON and checks each value against the types of the record that it expects. An error names a
value that is no such record.

The table lists all keys. *R* is a rank, and *G* is a generation (the calls and barriers between two failures of
blocks). Keys are overwritten in place, except that some are deleted as the table says, so that the number of keys does
not grow::

    key           record         written by                             read by
    member/R      Member         R, when it connects to the store       all ranks that need the process of R
    status/R      RankStatus     R, when it makes a call                ranks that wait for R
    failures/R    FailedCalls    R, when one of its calls fails         ranks that wait for R
    arrived/G     counter        all ranks, at the barriers of G        all ranks at a barrier
    ended/G       GenerationEnd  the first rank that leaves a block or  all ranks and their watchdogs. Rank 0 deletes
                                 barrier of G early. Other ranks add    this key and arrived/G in a later generation.
                                 their failures.
    whereabouts/R Whereabouts    the watchdog of R, at most twice a     the watchdogs of ranks that are stuck, and ranks
                                 second, if the record has changed      that have waited for R for long
    stop          StopCall       the first rank that receives a signal  all ranks, when they call `stop_requested`
                                 to stop, or a pool's script. Then the
                                 rank that fixes at which call all
                                 ranks stop.
    stops/R       StopCall       R, when it calls `stop_requested`      the rank that fixes the call
    draws/L       Draws          the first rank that begins an          the other ranks, when they begin the same
                                 iteration of a prepared loader in      iteration
                                 slot L
    lost          Lost           the watchdog of rank 0, see `links`    all ranks that wait for a rank on another node
    uncaught      Uncaught       the first rank that ends by an         the other ranks, when they lose the connection
                                 exception outside all blocks           and end because of that
    groupG.n/...  of torch       torch, when it makes the n-th group    torch. Rank 0 deletes these keys when the next
                                 of G                                   group is made.
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
SOCKET_TIMEOUT = "Socket Timeout"  # torch's words for an error by the receive timeout of a socket
NO_ANSWER = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH  # errors of a connection if a node is out of reach
# How a rank was lost, in the words of the error message.
ENDED = "ended"
OUT_OF_REACH = "went out of reach"
RESET = "ended, or its connection was reset"

# The keys of the table above. Some of them name the whole world:
LOST_KEY = "lost"
STOP_KEY = "stop"
UNCAUGHT_KEY = "uncaught"
# Others name a rank:
member_key = "member/{}".format
status_key = "status/{}".format
failures_key = "failures/{}".format
whereabouts_key = "whereabouts/{}".format
stops_key = "stops/{}".format
# Others name a generation, or a slot for loaders:
arrived_key = "arrived/{}".format
ended_key = "ended/{}".format
draws_key = "draws/{}".format


class Member(NamedTuple):
    """The process of a rank and its node."""

    host: str  # see `host_identity`
    host_name: str
    pid: int
    local_rank: int
    local_world_size: int
    accelerator: str = ""  # identifies the host and the accelerator of the rank; empty if they are not known
    port: int = 0  # the port of rank 0 for the connections of `Links`

    @property
    def is_here(self) -> bool:
        """Return whether this process can use the process id: both are on one machine, in one pid namespace."""
        return self.host == host_identity()

    def open_process(self) -> int | None:
        """Return a pidfd of the process, which the caller closes.

        Returns:
            None if the process is not on this machine, or the system has no pidfds.

        Raises:
            ProcessLookupError: the process has ended.
        """
        return os.pidfd_open(self.pid) if self.is_here and hasattr(os, "pidfd_open") else None


class Lost(NamedTuple):
    """The lost ranks on other nodes, each with the way it was lost: `ENDED`, `OUT_OF_REACH` or `RESET`."""

    how: dict[int, str]


def death(rank: int, member: Member | None, how: str, lost_after_s: float, what: object = None) -> WorkerDiedError:
    """Return the error for a rank that is lost.

    Args:
        rank: the rank.
        member: the process of the rank; None if it is not known.
        how: the way the rank was lost, as in `Lost`.
        lost_after_s: how long its node has not answered, if ``how`` is `OUT_OF_REACH`.
        what: the call that the rank had to finish and the others wait for; None if there is no such call.
    """
    who = f"Rank {rank} (pid {member.pid} on {member.host_name})" if member else f"Rank {rank}"
    when = f" before it finished {what}" if what else ""
    why = f": its node has not answered for {lost_after_s:g} s" if how == OUT_OF_REACH else ""
    return WorkerDiedError(f"{who} {how}{when}{why}.", rank=rank, pid=member.pid if member else 0)


class StoreHost:
    """The process that hosts the store, as seen from this rank: the limits for its answers, and how it was lost.

    If the hosting process is stopped by a signal, it does not answer, but the connections to it stay open. Only a
    receive timeout then ends a request. After a timeout this rank gives up the store: the connections are shut down,
    and every later request raises `error`.
    """

    def __init__(self, rank: int | None, rank_0: Member | None, world_size: int, timeout_s: float, lost_after_s: float):
        """Remember the limits.

        Args:
            rank: the rank that hosts the store; None: the launcher hosts the store, on the node of rank 0.
            rank_0: the process of rank 0.
            world_size: the number of ranks.
            timeout_s: how long a request may take. A wait with an earlier deadline limits its requests further, see
                `StoreClient.answer_by`.
            lost_after_s: how long the node of the store may be out of reach.
        """
        self.timeout_s = timeout_s
        self.error: ParallelError | None = None
        self.is_out_of_reach = False
        self._rank = rank
        self._rank_0 = rank_0
        self._world_size = world_size
        self._lost_after_s = lost_after_s

    def note(self, error: RuntimeError, store: dist.Store, waited_s: float) -> None:
        """Give up the store if a request to it has failed because no answer came.

        Args:
            error: of the request.
            store: the connection of the request.
            waited_s: how long the request waited.
        """
        if SOCKET_TIMEOUT in str(error):
            self.error = self._silence(waited_s)
        elif any(os.strerror(number) in str(error) for number in NO_ANSWER):
            died = death(0, self._rank_0, OUT_OF_REACH, self._lost_after_s)
            self.is_out_of_reach = True  # set before `error`, because another thread may raise the error immediately
            self.error = rank_error("The connection", self._world_size, {0: died})
        else:
            return
        # The connections cannot be used further: a late answer would be taken for the answer to the next request. To
        # shut down all of them also frees other threads of this process that wait for an answer.
        end_connections(connected_since({}, store))

    def _silence(self, waited_s: float) -> RankTimeoutError:
        """Return the error for a store that has not answered for ``waited_s``."""
        who = "The launcher"
        why = ""
        if self._rank is not None and (host := self._rank_0) is not None:
            who = f"Rank 0 (pid {host.pid} on {host.host_name})"
            why = ": it is stopped by a signal" if host.is_here and is_stopped(host.pid) else ""
        text = f"{who}, which holds the store, has not answered for {waited_s:.1f} s{why}."
        return RankTimeoutError(text, ranks=[] if self._rank is None else [0])


class StoreClient:
    """A connection to the store for one thread, because a connection serves only one request at a time."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        host: int | None,
    ) -> None:
        """Wrap a connection that is open.

        Args:
            store: the connection.
            rank: this rank.
            world_size: the number of ranks.
            host: the rank that hosts the store; None: the store is in another process, such as the launcher's.
        """
        self.store = store
        self.answer_by = math.inf  # the deadline of the wait that the requests serve; after it no answer is needed
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._limits: StoreHost | None = None
        self._socket: socket.socket | None = None
        self._limit_s: float | None = None  # the limit for which the receive timeout of the socket was set last

    def limit_requests(self, limits: StoreHost, sockets: dict[int, int]) -> None:
        """Make requests fail that are not answered in time.

        Args:
            limits: the limits, and the error once the store has been given up.
            sockets: the socket of this connection, as ``{descriptor: inode}``.
        """
        self._limits = limits
        self._socket = next(still_open(sockets), None)

    def close(self) -> None:
        """Close the duplicate of the socket that `limit_requests` has opened. The connection itself stays open."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def get(self, key: str) -> str | None:
        """Return the text under ``key``, or None if there is no such key.

        Torch's `get` would take two round trips and wait for the key. Its `compare_set` takes one round trip. For a key
        that does not exist it returns the expected text, ``"?"``.
        """
        text = self.swap(key, "?", "?")
        return None if text == "?" else text

    def set(self, key: str, text: str) -> None:
        """Set ``key``, without waiting for a reply."""
        self._ask(self.store.set, key, text)

    def swap(self, key: str, expected: str, text: str) -> str:
        """Set ``key`` to ``text`` if it holds ``expected``, and return the text that it holds afterwards.

        An empty ``expected`` means that the key must not exist. If the key does not exist but ``expected`` is not
        empty, the key is not set, and ``expected`` is returned.
        """
        return self._ask(self.store.compare_set, key, expected, text).decode(errors="replace")

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key``, which begins at 0, and return the sum."""
        return self._ask(self.store.add, key, number)

    def delete(self, key: str) -> None:
        self._ask(self.store.delete_key, key)

    def write(self, key: str, record: tuple[Any, ...]) -> None:
        """Set ``key`` to a record, which `read` returns."""
        self.set(key, encode(record))

    def read(self, key: str, kind: type[T]) -> T | None:
        """Return the record under ``key``, or None if there is no such key.

        Raises:
            ParallelError: the value under the key is no record of this ``kind``.
        """
        text = self.get(key)
        return None if text is None else decode(kind, key, text)

    def await_keys(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all ``keys`` exist. The store's own wait is not used, because Ctrl-C does not interrupt it.

        Raises:
            ParallelError: a key does not exist after ``timeout``.
        """
        for waited in looks(*times.POLL):
            if self._ask(self.store.check, keys):
                return
            if waited > timeout.total_seconds():
                missing = ", ".join(key for key in keys if not self._ask(self.store.check, [key]))
                raise ParallelError(f"Rank {self._rank} waited {timeout} for other ranks to write {missing}.")

    def _ask(self, request: Callable[..., T], *args: Any) -> T:
        """Send a request and return its answer.

        Raises:
            RankError, RankTimeoutError: the rank that hosts the store is lost or does not answer.
            ParallelError: the store is lost, and no other rank hosts it.
        """
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
                    # The error may have been raised before, by an earlier request. Its old traceback is dropped.
                    raise limits.error.with_traceback(None) from error
            if self._host is None or self._host == self._rank:
                raise ParallelError(f"The store through which the ranks talk is gone: {error}") from error
            died = WorkerDiedError(f"Rank {self._host}, which holds the store, is gone: {error}", rank=self._host)
            raise rank_error("The connection", self._world_size, {self._host: died}) from error

    def _set_receive_timeout(self, limits: StoreHost) -> float:
        """Limit how long the next request may wait for its answer, and return the present time."""
        now = time.monotonic()
        limit_s = min(limits.timeout_s, max(self.answer_by - now, 0.0))
        if self._socket is not None and limit_s != self._limit_s:
            self._limit_s = limit_s
            seconds, fraction = divmod(limit_s + times.ANSWER_MARGIN_S, 1)
            with contextlib.suppress(OSError):  # the connection has ended: the request itself will fail
                value = struct.pack("ll", int(seconds), int(fraction * 1_000_000))
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        return now


encode = json.dumps  # for records: NamedTuples of strings, numbers, other records, and tuples and dicts of these


def decode(kind: type[T], key: str, text: str) -> T:
    """Return the record of a ``kind`` that ``encode`` has written as ``text``.

    Raises:
        ParallelError: ``text`` is no such record. The message names ``key``.
    """
    try:
        record: T = _reader(kind)(json.loads(text))  # type: ignore[arg-type]  # types are hashable
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise ParallelError(
            f"The store holds a value under the key {key!r} that this package did not write: {text[:80]!r}."
        ) from None
    return record


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that rebuilds a value of the type ``kind`` from parsed JSON and checks its types.

    The function raises TypeError, ValueError or AttributeError if the JSON does not fit the type.
    """
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
    """Return a function that rebuilds a NamedTuple from parsed JSON.

    All fields of plain types are checked by one expression, because this must be fast: a rank that waits decodes a
    status at every call.
    """
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
    """Return ``value``. Raise TypeError if it is not of this type."""
    if not isinstance(value, kind):
        raise TypeError(kind)
    return value


def clone_store(store: dist.Store, unanswered_s: float | None) -> tuple[dist.Store, dict[int, int]]:
    """Return a new connection to the store, and the socket of this connection as ``{descriptor: inode}``.

    Args:
        store: the store, by the connection that exists.
        unanswered_s: how long the new connection may get no answer before it ends; None: without limit.

    Raises:
        LaunchError: the store cannot be reached.
    """
    before = open_sockets()
    inner_store = bottom(store)
    # `clone` tries to connect for as long as the timeout of the store, even if the process of the store has ended, and
    # Ctrl-C does not interrupt it. So the timeout is lowered meanwhile.
    timeout = inner_store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    inner_store.set_timeout(min(timeout, times.CONNECTS_WITHIN))
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    except RuntimeError as error:
        raise LaunchError(
            f"The store through which the ranks talk cannot be reached again: {summary(error)}"
        ) from error
    finally:
        inner_store.set_timeout(timeout)
    bottom(clone).set_timeout(timeout)
    connection = connected_since(before, store)
    end_unanswered(connection, unanswered_s)
    return clone, connection


def end_unanswered(sockets: dict[int, int], unanswered_s: float | None) -> None:
    """Make the kernel end connections to other nodes that do not answer. By default TCP takes 15 minutes for this.

    Args:
        sockets: the connections, as ``{descriptor: inode}``.
        unanswered_s: how long a node may not answer; None: all ranks are on one node, and nothing is done.
    """
    if unanswered_s is not None:
        for connection in still_open(sockets):
            with connection:
                end_if_unanswered(connection, unanswered_s)


@functools.cache
def host_identity() -> str:
    """Return a text that is equal in two processes if a process id means the same process in both.

    This is so if they run since the same boot of one machine, in the same pid namespace.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()
