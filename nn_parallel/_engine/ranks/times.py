"""The time limits and intervals of a rank: how long it waits, and how often it looks for changes.

The ``timeout`` that users choose is not in this module, but in `RankContext`.
"""

from __future__ import annotations

import os
from datetime import timedelta

# Limits that a user notices.

# The default limit for a collective, for a rank that waits for others at the beginning of a block, and for a request to
# the store.
DEFAULT_TIMEOUT = timedelta(minutes=60)
# A rank that has waited this long for other ranks logs a warning.
WARN_AFTER_S = 30.0
# A node may be out of reach for this long before it can count as lost, see `RankContext.lost_after_s`. If a third of
# the user's timeout is shorter, this third is the limit instead.
LOST_AFTER = timedelta(seconds=60)
# The process that hosts the store waits at most this long before it ends, so that other ranks can still read the store.
LINGER_S = 30.0
# At the end of the program, the work that is queued on an accelerator is aborted if it takes longer than this.
EXIT_WITHIN_S = 60.0

# How often a waiting rank looks into the store.

# The three arguments of `polling.looks`. Before each look a rank sleeps for a fraction of the time that it has waited.
# The numbers are this fraction, and the shortest and the longest sleep in seconds.
POLL = 0.05, 5e-5, 0.02
POLL_MOST_S = POLL[-1]
# A rank that has waited this long for another rank begins to check whether the other rank has died or left.
LOOK_UP_PEER_AFTER_S = 0.01
# The shortest interval at which a rank asks the store for the list of lost ranks on other nodes. If a `Member` record
# is not in the store yet, a rank tries to read it again after this interval times the number of ranks.
ASK_EVERY_S = 0.1
# A rank that has waited this long publishes the list of ranks for which it waits.
PUBLISH_WAIT_AFTER_S = 0.05
# If a collective in a block loses a connection, the rank searches this long for a rank that has died.
CAUSE_WITHIN_S = 0.5
# How often a rank checks whether it can stop waiting, in two cases: before it closes its process group, it waits for
# the accelerator to finish; and before the rank that hosts the store ends, it waits until no rank uses the store.
END_EVERY_S = 0.002
# If a rank loses a connection outside of all blocks, it searches this long for an exception or a death of another rank.
DIES_WITHIN_S = 2.0

# How often the watchdog looks.

# The watchdog first checks a block when the block has run for this time, because most blocks have ended by then.
FIRST_LOOK_AFTER_S = 0.001
# The interval at which the watchdog checks which line of code its rank executes. If the line has changed, the watchdog
# publishes the new one.
STAND_EVERY_S = 0.02 if os.environ.get("NN_PARALLEL_DEBUG") == "1" else 0.5
# If all ranks are stuck, all of them together read at most this many `Whereabouts` per second.
WHEREABOUTS_READ_PER_S = 10_000
# When a rank closes a group, it waits this long for the thread that saves a checkpoint in the background, because this
# thread may be in a collective of the group. If the thread takes longer, it is not in a collective but writes a file,
# and the rank need not wait for it.
THREAD_LEAVES_WITHIN_S = 0.2
# How long `Watchdog.stop` waits for its thread to end. The limit is needed because the thread may be waiting for a
# store whose host is gone.
WATCHDOG_ENDS_WITHIN_S = 1.0

# Connections.

# The arguments of `polling.looks` for repeated attempts to connect to a store that does not listen yet. The sleeps are
# longer than in `POLL`, because each attempt may ask a name server.
ATTEMPTS = 0.1, 0.01, 1.0
# The shortest and the longest time that an attempt waits for an answer.
ATTEMPT_MIN_S = 0.01
ATTEMPT_MAX_S = 1.0
# The time limit for opening another connection to a store to which this rank is already connected.
CONNECTS_WITHIN = timedelta(seconds=10)
# If a request to the store belongs to a wait with a deadline, the request is given up this long after the deadline.
ANSWER_MARGIN_S = 0.5
# When gloo makes a group, it waits until another rank has written its address into the store, at most for the timeout
# that gloo was given. It then waits until that rank has connected, at most for five times this timeout. Therefore gloo
# is given only a fifth of the user's timeout, but at least five seconds.
GLOO_CONNECTS_WITHIN = 5
GLOO_CONNECT_AT_LEAST = timedelta(seconds=5)

# Collectives of accelerators.

# How long the abort of process groups may take before it counts as hanging.
ABORT_WITHIN_S = 30.0
# When NCCL reports a lost connection, the work that is queued on the accelerator has this long to finish. If the work
# finishes, the report is harmless: the other rank has closed the connection only after the last collective.
ENDS_WITHIN_S = 0.25
