"""The store through which the ranks of a pool talk."""

from __future__ import annotations

import torch.distributed as dist

from ..ranks.sockets import listen_at, loopback
from ..ranks.stop_signals import ASKED, pass_on_to
from ..ranks.store import STOP_KEY

LOOPBACK = "::1"  # see `loopback`
ranks_prefix = "group{}".format  # of the keys in the store, by the number of the ranks' group


class PoolStore:
    """The store through which the ranks of a pool talk, in this process; made for the first `run`."""

    def __init__(self, host: str | None = None) -> None:
        """``host``: the address where other nodes reach it; None: no other node does."""
        self._host = host or loopback(LOOPBACK)
        self._store: dist.TCPStore | None = None
        self._port = 0
        self._group = 0

    def address(self, group: int) -> tuple[str, int]:
        """Return host and port of the store; what groups before this one have left there is deleted."""
        if self._group < group:
            if self._store is None:
                self._store = self._open()
            else:
                for key in self._store.list_keys():
                    if not key.startswith(f"{ranks_prefix(group)}/"):
                        self._store.delete_key(key)
            self._group = group
            pass_on_to(self)
        return self._host, self._port

    def ask_to_stop(self) -> None:
        """Have `stop_requested` return true to the ranks."""
        if self._store is not None:
            ranks = dist.PrefixStore(ranks_prefix(self._group), self._store)
            ranks.compare_set(STOP_KEY, "", ASKED)  # they may have fixed already when they stop

    def close(self) -> None:
        self._store = None

    def _open(self) -> dist.TCPStore:
        listener = listen_at(self._host)
        self._port = listener.getsockname()[1]
        # A socket of our own: TCPStore would listen on every interface, and a port chosen first can be taken.
        return dist.TCPStore(
            self._host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
