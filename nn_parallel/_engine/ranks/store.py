"""The store through which the ranks exchange records outside of the collectives: connections to it, and its records.

Every program that can reach the port of a store can write into the store. Therefore this package never unpickles values
from the store. It reads the values as JSON, and checks that each value has the types of the expected record. If a
value does not have these types, an error shows the value.

The table lists all keys. *R* is the number of a rank, *G* the number of a generation (all calls and barriers between
two failures of blocks), and *L* a number that several prepared loaders may share. To keep the number of keys constant,
keys are overwritten or deleted as the table says::

    key           record         written by                             read by
    member/R      Member         R, when it connects to the store       all ranks, for instance to watch R's process
    status/R      RankStatus     R, when it makes a call                ranks that wait for R
    failures/R    FailedCalls    R, when one of its calls fails         ranks that wait for R
    arrived/G     counter        all ranks, at the barriers of G        all ranks at a barrier
    ended/G       GenerationEnd  the first rank that leaves a block or  all ranks and their watchdogs. Rank 0 deletes
                                 barrier of G early. Other ranks add    this key and arrived/G in a later generation.
                                 their failures.
    whereabouts/R Whereabouts    the watchdog of R, at most twice a     the watchdogs of ranks that are stuck, and ranks
                                 second, if the record has changed      that have waited for R for long
    stop          StopCall       first, a rank that has received a      all ranks, when they call `stop_requested`
                                 signal to stop, or the script that
                                 has opened the pool; later, the rank
                                 that decides at which call all ranks
                                 stop
    stops/R       StopCall       R, when it calls `stop_requested`      the rank that decides at which call all ranks
                                                                        stop
    draws/L       Draws          the first rank that begins an          the other ranks, when they begin the same
                                 iteration of a loader with number L    iteration
    lost          Lost           the watchdog of rank 0, see `links`    all ranks that wait for a rank on another node
    uncaught      Uncaught       the first rank that ends by an         the other ranks, when they lose the connection
                                 exception outside all blocks           and end because of that
    groupG.n/...  torch's own    torch, when it makes the n-th group    torch. Rank 0 deletes these keys when the next
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
SOCKET_TIMEOUT = "Socket Timeout"  # the words in torch's error message if the receive timeout of a socket has passed
NO_ANSWER = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH  # errors of a connection to an unreachable node
# The ways in which a rank can be lost, in the words of the error message.
ENDED = "ended"
OUT_OF_REACH = "went out of reach"
RESET = "ended, or its connection was reset"

# The keys that the table in the docstring of this module lists. These keys exist once in a store:
LOST_KEY = "lost"
STOP_KEY = "stop"
UNCAUGHT_KEY = "uncaught"
# These keys exist once for each rank, and contain its number:
member_key = "member/{}".format
status_key = "status/{}".format
failures_key = "failures/{}".format
whereabouts_key = "whereabouts/{}".format
stops_key = "stops/{}".format
# The first two of these keys contain the number of a generation, and the last one the number of a prepared loader:
arrived_key = "arrived/{}".format
ended_key = "ended/{}".format
draws_key = "draws/{}".format


class Member(NamedTuple):
    """The process of a rank, its node and its accelerator."""

    host: str  # identifies the machine and its pid namespace, see `host_identity`
    host_name: str
    pid: int
    local_rank: int
    local_world_size: int
    accelerator: str = ""  # identifies the host and the accelerator of the rank; an empty string if it is not known
    port: int = 0  # the port at which rank 0 accepts the connections of `Links`; 0 if there are no such connections

    @property
    def is_here(self) -> bool:
        """Return whether the rank and this process share a machine and a pid namespace. Then `pid` is valid here."""
        return self.host == host_identity()

    def open_process(self) -> int | None:
        """Return a pidfd of the process. The caller must close the pidfd.

        Returns:
            None if the process is not on this machine, or if the system has no pidfds.

        Raises:
            ProcessLookupError: the process has ended.
        """
        return os.pidfd_open(self.pid) if self.is_here and hasattr(os, "pidfd_open") else None


class Lost(NamedTuple):
    """The ranks on other nodes that rank 0 has lost."""

    how: dict[int, str]  # maps each lost rank to `ENDED`, `OUT_OF_REACH` or `RESET`


def death(rank: int, member: Member | None, how: str, lost_after_s: float, what: object = None) -> WorkerDiedError:
    """Return the error for a rank that is lost.

    Args:
        rank: the lost rank.
        member: the process of the rank; None if it is not known.
        how: `ENDED`, `OUT_OF_REACH` or `RESET`.
        lost_after_s: how long the node of the rank has not answered, if ``how`` is `OUT_OF_REACH`.
        what: the call that the other ranks wait for, and that the lost rank had to finish; None if there is no such
            call.
    """
    who = f"Rank {rank} (pid {member.pid} on {member.host_name})" if member else f"Rank {rank}"
    when = f" before it finished {what}" if what else ""
    why = f": its node has not answered for {lost_after_s:g} s" if how == OUT_OF_REACH else ""
    return WorkerDiedError(f"{who} {how}{when}{why}.", rank=rank, pid=member.pid if member else 0)


class StoreHost:
    """The process that hosts the store: how long it may take to answer, and whether this rank has given up the store.

    If the process that hosts the store is stopped by a signal, it does not answer, but the connections to it stay open.
    A request then ends only when its receive timeout has passed. After that, this rank gives up the store: it shuts
    down its connections to the store, and every later request raises `error`.
    """

    def __init__(
        self,
        rank: int | None,
        rank_0: Member | None,
        world_size: int,
        timeout_s: float,
        lost_after_s: float,
        loss_of_rank_0: Callable[[], str | None],
    ) -> None:
        """Set the time limits.

        Args:
            rank: the rank that hosts the store. If None, the launcher hosts the store, on the node of rank 0.
            rank_0: the process of rank 0.
            world_size: the number of ranks.
            timeout_s: how long a request may take. If the request belongs to a wait with an earlier deadline, this
                deadline is the limit, see `StoreClient.answer_by`.
            lost_after_s: how long the node of the store may be out of reach.
            loss_of_rank_0: returns how rank 0 was lost, see `Links.loss_of`; None if it is not known to be lost.
        """
        self.timeout_s = timeout_s
        self.error: ParallelError | None = None  # None until this rank gives up the store; later requests raise it
        self.is_out_of_reach = False  # set if the store was given up because its node cannot be reached
        self._rank = rank
        self._rank_0 = rank_0
        self._world_size = world_size
        self._lost_after_s = lost_after_s
        self._loss_of_rank_0 = loss_of_rank_0

    def note(self, error: RuntimeError, store: dist.Store, waited_s: float) -> None:
        """Give up the store if a request to it has failed because no answer came, or because rank 0 has died.

        Args:
            error: the error that the request has raised.
            store: the connection through which the request was sent.
            waited_s: how long the request has waited.
        """
        if SOCKET_TIMEOUT in str(error):
            self.error = self._silence(waited_s)
        elif any(os.strerror(number) in str(error) for number in NO_ANSWER):
            self.is_out_of_reach = True  # set before `error`, because another thread may raise the error immediately
            self.error = rank_error("The connection", self._world_size, {0: self._death_of_rank_0(OUT_OF_REACH)})
        elif (how := self._loss_of_rank_0()) is not None:
            # Rank 0 is lost, and therefore the store too. This also holds if the launcher hosts the store, because the
            # launcher on the node of rank 0 ends together with rank 0.
            self.error = rank_error("The connection", self._world_size, {0: self._death_of_rank_0(how)})
        else:
            return
        # All connections to the store are shut down, because a late answer would be taken for the answer to the next
        # request. This also frees other threads of this process that wait for an answer.
        end_connections(connected_since({}, store))

    def _death_of_rank_0(self, how: str) -> WorkerDiedError:
        return death(0, self._rank_0, how, self._lost_after_s)

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
    """A connection to the store.

    Each thread needs its own connection, because a connection serves only one request at a time.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        host: int | None,
    ) -> None:
        """Wrap a connection that is open.

        Args:
            store: the open connection.
            rank: the number of this rank.
            world_size: the number of ranks.
            host: the rank that hosts the store; None if another process hosts it, such as the launcher.
        """
        self.store = store
        # The deadline of the wait or block to which the requests belong. A request is given up shortly after this
        # deadline, because an answer would then come too late. Infinite if there is no such deadline.
        self.answer_by = math.inf
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._limits: StoreHost | None = None  # set by `limit_requests`; if None, requests have no limit
        self._socket: socket.socket | None = None  # a duplicate of the connection's socket, to set its receive timeout
        self._limit_s: float | None = None  # the limit that was last set as the receive timeout of the socket

    def limit_requests(self, limits: StoreHost, sockets: dict[int, int]) -> None:
        """Limit how long later requests may wait for their answers. A request that takes longer raises an error.

        Args:
            limits: says how long a request may take. All connections of this rank share this object. If the store
                does not answer a request in time, the rank gives up the store, and ``limits`` then holds the error that
                every later request raises.
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

        Torch's `get` is not used, because it takes two round trips and waits until the key exists. Torch's
        `compare_set` takes one round trip. If the key does not exist, it returns the expected text, here ``"?"``.
        """
        text = self.swap(key, "?", "?")
        return None if text == "?" else text

    def set(self, key: str, text: str) -> None:
        """Set ``key``, without waiting for a reply."""
        self._ask(self.store.set, key, text)

    def swap(self, key: str, expected: str, text: str) -> str:
        """Set ``key`` to ``text`` if the key holds ``expected``. Return the text that the key then holds.

        If ``expected`` is an empty string, the key is set only if it does not exist. If ``expected`` is not empty and
        the key does not exist, the key is not set, and ``expected`` is returned.
        """
        return self._ask(self.store.compare_set, key, expected, text).decode(errors="replace")

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key``, which begins at 0, and return the sum."""
        return self._ask(self.store.add, key, number)

    def delete(self, key: str) -> None:
        self._ask(self.store.delete_key, key)

    def write(self, key: str, record: tuple[Any, ...]) -> None:
        """Set ``key`` to an encoded record, which `read` can read."""
        self.set(key, encode(record))

    def read(self, key: str, kind: type[T]) -> T | None:
        """Return the record under ``key``, or None if there is no such key.

        Raises:
            ParallelError: the value under the key is not a record of this ``kind``.
        """
        text = self.get(key)
        return None if text is None else decode(kind, key, text)

    def read_all(self, keys: list[str], kind: type[T]) -> list[T]:
        """Return the records under ``keys``, which must exist, with a single request; see `read`."""
        texts = self._ask(self.store.multi_get, keys)
        return [decode(kind, key, text.decode(errors="replace")) for key, text in zip(keys, texts, strict=True)]

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
            RankError, RankTimeoutError: the process that hosts the store is lost or does not answer.
            ParallelError: the store is lost, and it was hosted by this rank or by a process that is not a rank.
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
                    # An earlier request may already have raised this error. The traceback of that request is dropped.
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
            with contextlib.suppress(OSError):  # if the connection has ended, the request itself will fail
                value = struct.pack("ll", int(seconds), int(fraction * 1_000_000))
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        return now


# Encodes a record, which is a NamedTuple of strings, numbers, other records, and tuples and dicts of these.
encode = json.dumps


def decode(kind: type[T], key: str, text: str) -> T:
    """Return the record of a ``kind`` that ``encode`` has written as ``text``.

    Raises:
        ParallelError: ``text`` is not such a record. The message names ``key``.
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

    The function must be fast, because a rank that waits decodes a status at every call. Therefore it checks all fields
    of plain types with a single expression.
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
    """Return ``value``. Raise TypeError if it is not an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(kind)
    return value


def clone_store(store: dist.Store, unanswered_s: float | None) -> tuple[dist.Store, dict[int, int]]:
    """Return a new connection to the store, and the socket of this connection as ``{descriptor: inode}``.

    Args:
        store: the existing connection to the store.
        unanswered_s: how long the new connection may remain unanswered before the kernel ends it; no limit if None.

    Raises:
        LaunchError: the store cannot be reached.
    """
    before = open_sockets()
    inner_store = bottom(store)
    # The timeout of the store is lowered during the call of `clone`. If the process that hosts the store has ended,
    # `clone` tries to connect until this timeout has passed, and Ctrl-C does not interrupt it.
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
        unanswered_s: how long a connection may remain unanswered before the kernel ends it, see `end_if_unanswered`.
            If None, all ranks are on one node, and the function does nothing.
    """
    if unanswered_s is not None:
        for connection in still_open(sockets):
            with connection:
                end_if_unanswered(connection, unanswered_s)


@functools.cache
def host_identity() -> str:
    """Return a text that is equal in two processes if they can use each other's process ids.

    They can if both run on one machine and in the same pid namespace. The text changes when the machine is restarted.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()
