"""All times of a rank: for waits, and between looks. The ``timeout``, which users choose, is in `RankContext`."""

from __future__ import annotations

import os
from datetime import timedelta

# What a user notices.
DEFAULT_TIMEOUT = timedelta(minutes=60)  # of collectives, of coming to a block, of answers of the store
WARN_AFTER_S = 30.0  # of waiting for other ranks
LOST_AFTER = timedelta(seconds=60)  # a node that answers nothing for so long is lost, or for a third of the timeout
LINGER_S = 30.0  # for others to read what this process holds in its store, before that ends with it
EXIT_WITHIN_S = 60.0  # for what is under way on accelerators to end, at the end of the program

# How often a rank looks for what others write. Between two looks it sleeps a share of the time waited so far, but at
# least and at most so many seconds, see `looks`.
POLL = 0.05, 5e-5, 0.02
POLL_MOST_S = POLL[-1]
LOOK_UP_PEER_AFTER_S = 0.01  # of waiting: whether it lives, whether it has left
ASK_EVERY_S = 0.1  # who is gone, or where one lives who has not said so
TELL_AFTER_S = 0.05  # of waiting: for whom
CAUSE_WITHIN_S = 0.5  # to find out who has died, where a collective has lost a connection
END_EVERY_S = 0.002  # whether collectives of accelerators have ended, and the waits of others
DIES_WITHIN_S = 2.0  # a process that ends by an exception outside all blocks, as seen by the others

# How often the watchdog looks.
FIRST_LOOK_AFTER_S = 0.001  # of a block: most are over by then
STAND_EVERY_S = 0.02 if os.environ.get("NN_PARALLEL_DEBUG") == "1" else 0.5  # where its rank stands
STANDINGS_PER_S = 10_000  # that all ranks read together, where all are stuck
THREAD_LEAVES_WITHIN_S = 0.2  # a collective of a group that is closed: after that it is not in one, but writes
WATCHDOG_ENDS_WITHIN_S = 1.0  # it may sit in a store whose host is gone

# Connections.
ATTEMPTS = 0.1, 0.01, 1.0  # to connect to a store that nobody holds yet, see `looks`: each may ask a name server
ATTEMPT_MIN_S = 0.01  # how long an attempt waits for an answer, at least
ATTEMPT_MAX_S = 1.0  # the same, at most
CONNECTS_WITHIN = timedelta(seconds=10)  # once more, to a store that has answered before
ANSWER_MARGIN_S = 0.5  # between the time that a wait may take, and giving up a request to the store in it
# Gloo waits five times the timeout of a group for another rank to connect, and once for it to write where it listens.
GLOO_CONNECTS_WITHIN = 5
GLOO_CONNECT_AT_LEAST = timedelta(seconds=5)

# Collectives of accelerators.
ABORT_WITHIN_S = 30.0  # of a process group
ENDS_WITHIN_S = 0.25  # a collective that has come to its end before another rank closed the connection
