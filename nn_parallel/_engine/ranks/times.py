"""The times of a rank: how long it waits, and how often it looks for changes.

The ``timeout`` that users choose is not here: it is in `RankContext`.
"""

from __future__ import annotations

import os
from datetime import timedelta

# Limits that a user notices.

# The limit of a collective, of the wait for other ranks at the beginning of a block, and of an answer of the store.
DEFAULT_TIMEOUT = timedelta(minutes=60)
# A rank that has waited for other ranks this long logs a warning.
WARN_AFTER_S = 30.0
# A node that has answered nothing for this long counts as lost; after a third of the timeout, if that is shorter.
LOST_AFTER = timedelta(seconds=60)
# The process that holds the store waits this long at its end, so that other ranks can read what they still need.
LINGER_S = 30.0
# At the end of the program, the work that is queued on an accelerator has this long to finish.
EXIT_WITHIN_S = 60.0

# How often a waiting rank looks into the store.

# The three arguments of `polling.looks`. Before each look a rank sleeps for a share of the time that it has waited so
# far. The numbers are this share, the shortest sleep and the longest sleep, both in seconds.
POLL = 0.05, 5e-5, 0.02
POLL_MOST_S = POLL[-1]
# Until a rank has waited this long, it does not check whether the awaited rank has died or left.
LOOK_UP_PEER_AFTER_S = 0.01
# A rank asks the store at most this often which ranks rank 0 has lost. It asks as often for the processes of ranks that
# have not written their `Member` record yet.
ASK_EVERY_S = 0.1
# A rank that has waited this long publishes which ranks it waits for.
PUBLISH_WAIT_AFTER_S = 0.05
# A rank whose collective has lost a connection searches this long for the rank that has died.
CAUSE_WITHIN_S = 0.5
# How often a rank checks whether the work on its accelerator has finished. At the end of the process that holds the
# store, the same is the time between two checks whether the other ranks still need the store.
END_EVERY_S = 0.002
# A rank that has lost a connection outside all blocks searches this long for an exception or a death on another rank.
DIES_WITHIN_S = 2.0

# How often the watchdog looks.

# The watchdog looks at a new block only after this time, because most blocks are over by then.
FIRST_LOOK_AFTER_S = 0.001
# How often the watchdog checks the whereabouts of its rank, and publishes changes.
STAND_EVERY_S = 0.02 if os.environ.get("NN_PARALLEL_DEBUG") == "1" else 0.5
# If all ranks are stuck, all of them together read at most this many `Whereabouts` per second.
WHEREABOUTS_READ_PER_S = 10_000
# When a group is closed, a background thread that is in a collective of the group leaves it within this time. A thread
# that takes longer is not in a collective: it writes a file.
THREAD_LEAVES_WITHIN_S = 0.2
# How long `Watchdog.stop` waits for the thread. The thread may be waiting for a store whose host is gone.
WATCHDOG_ENDS_WITHIN_S = 1.0

# Connections.

# The arguments of `polling.looks` between attempts to connect to a store that does not listen yet. The sleeps are
# longer than in `POLL`, because each attempt may ask a name server.
ATTEMPTS = 0.1, 0.01, 1.0
# Each attempt waits for an answer for at least, and at most, this long.
ATTEMPT_MIN_S = 0.01
ATTEMPT_MAX_S = 1.0
# The limit of a further connection to a store that has answered before.
CONNECTS_WITHIN = timedelta(seconds=10)
# A request to the store is given up this long after the deadline of the wait that it belongs to.
ANSWER_MARGIN_S = 0.5
# To make a group, gloo waits up to one timeout until another rank has written its address into the store, and then up
# to five timeouts until that rank has connected. So the timeout that gloo gets for this is a fifth of the user's one,
# but at least five seconds.
GLOO_CONNECTS_WITHIN = 5
GLOO_CONNECT_AT_LEAST = timedelta(seconds=5)

# Collectives of accelerators.

# The limit of the abort of a process group.
ABORT_WITHIN_S = 30.0
# A lost connection is no failure if the queued work of this rank still finishes within this time: then the other rank
# has closed the connection only after the collective.
ENDS_WITHIN_S = 0.25
