"""The intervals of the library, each with its reason.

docs/timeouts.md is generated from this file, too (scripts/timeouts_table.py).
"""

from __future__ import annotations

# Checkpoints: reading --------------------------------------------------------------------------

# A read that fails transiently is repeated for this long: a network file system that fails over, or
# a stale handle, recovers within seconds.
STORAGE_PATIENCE_S = 3.0
# The pause before the first repetition; every further one doubles it.
STORAGE_FIRST_BACKOFF_S = 0.05

# Checkpoints: saving ---------------------------------------------------------------------------

# A save without progress for this long is abandoned: one of its writers or the disk has failed.
SAVE_DEADLINE_S = 600.0
# The committing rank lists the parts of the other writers this often at first, then less often the
# longer it waits.
PART_POLL_S = 0.1
# The longest of these pauses.
MAX_PART_POLL_S = 2.0
# If a written save is not committed by then, another rank failed to write its part. Policies that
# save when none is in flight stop waiting for it.
COMMIT_PATIENCE_S = 60.0
# A thread that waits for saves checks this often whether one is written, overdue, or never ends.
WRITER_SLICE_S = 0.02
# Garbage collection keeps younger uncommitted files: their writer may still be active.
GARBAGE_MIN_AGE_S = 3600.0

# Checkpoints: the policy Automatic -------------------------------------------------------------

# Expected time between failures until the job has had one: a few failures per day.
AUTOMATIC_BETWEEN_FAILURES_S = 4 * 3600.0
# Never save more often, even if failures are frequent and saves are cheap.
AUTOMATIC_MIN_INTERVAL_S = 30.0
# Never save less often, even if no failure has occurred yet.
AUTOMATIC_MAX_INTERVAL_S = 3600.0

# Checkpoints: memory of other nodes ------------------------------------------------------------

# One request to another node's memory. A node that does not answer in this time counts as lost.
PEER_REQUEST_S = 5.0
# The server's limit for one message from a client: longer than a client waits for the response.
PEER_EXCHANGE_S = 2 * PEER_REQUEST_S
# A client connection without a request for this long is closed.
PEER_IDLE_S = 120.0
# The replication thread checks for new parts this often.
REPLICATION_POLL_S = 0.1
# The same while there is none: most jobs never save to memory.
UNUSED_MEMORY_POLL_S = 1.0
# The pause after a failed copy; every further failure doubles it.
REPLICATION_FIRST_BACKOFF_S = 1.0
# The longest of these pauses: a node that has returned receives its replicas within this time.
REPLICATION_MAX_BACKOFF_S = 30.0
