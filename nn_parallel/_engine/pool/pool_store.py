"""The store through which the workers of a pool exchange data during a `run`, in which they are ranks.

The store is in the process of the script, or in an actor on a Ray cluster. No worker holds the store, because the store
would end with that worker.
"""

from __future__ import annotations

import torch.distributed as dist

from ..ranks.sockets import listen_at, loopback
from ..ranks.stop_signals import ASKED, pass_on_to
from ..ranks.store import STOP_KEY

LOOPBACK = "::1"  # preferred to 127.0.0.1, because connections to ::1 can be faster, see `loopback`
# Given the number of a process group, returns the prefix that the ranks of this group put before all their keys in the
# store. For example, ``ranks_prefix(2)`` is ``"group2"``.
ranks_prefix = "group{}".format


class PoolStore:
    """The store of the ranks of a pool, in this process. It is opened for the first `run`."""

    def __init__(self, host: str | None = None) -> None:
        """Record on which host the store will be. The first call of `address` opens the store.

        ``host`` is the address at which other nodes reach this machine. If ``host`` is None, the store is opened at the
        loopback address, so that only this machine can reach it.
        """
        self._host = host or loopback(LOOPBACK)
        self._store: dist.TCPStore | None = None
        self._port = 0
        self._group_number = 0  # the number of the present group of ranks, see `Ranks`

    def address(self, group: int) -> tuple[str, int]:
        """Return host and port of the store, for the ranks that form the process group with the number ``group``.

        When the ranks of a pool cannot use their process group again, for example after a failure, they make another
        one with a higher number. If ``group`` is such a new number, delete the keys of the groups before it.
        """
        if self._group_number < group:
            if self._store is None:
                self._store = self._open()
            else:
                for key in self._store.list_keys():
                    if not key.startswith(f"{ranks_prefix(group)}/"):
                        self._store.delete_key(key)
            self._group_number = group
            pass_on_to(self)
        return self._host, self._port

    def ask_to_stop(self) -> None:
        """Ask the ranks to stop. `stop_requested` then soon returns True on all of them, see `stop_signals`."""
        if self._store is not None:
            ranks = dist.PrefixStore(ranks_prefix(self._group_number), self._store)
            # The key is set only if it has no value, because the ranks may have agreed already on the step to stop at.
            ranks.compare_set(STOP_KEY, "", ASKED)

    def close(self) -> None:
        """Delete the store, which closes its connections."""
        self._store = None

    def _open(self) -> dist.TCPStore:
        """Open the store at a free port."""
        listener = listen_at(self._host)
        self._port = listener.getsockname()[1]
        # The store gets a socket that listens already. If it opened the socket itself, it would listen on every network
        # interface. Also, the port would have to be chosen in advance, and another process could take it meanwhile.
        return dist.TCPStore(
            self._host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
