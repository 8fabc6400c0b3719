"""The intervals of the library, each with its reason.

docs/timeouts.md is generated from this file, too (scripts/timeouts_table.py).
"""

from __future__ import annotations

# Checkpoints: saving ---------------------------------------------------------------------------

# A save that could not be committed by then is abandoned: one of its writers, or the disk, is gone.
SAVE_DEADLINE_S = 600.0
# The committing rank lists the parts of the other writers this often.
PART_POLL_S = 0.1
# A written save that is not committed by then lacks a part that failed on another rank: policies
# that save when none is in flight stop waiting for it.
COMMIT_PATIENCE_S = 60.0
# The training thread waits for saves in slices: it notices when the writer thread has died.
WRITER_SLICE_S = 0.02
# Garbage collection keeps uncommitted files that are younger: a writer may still be at work.
GARBAGE_MIN_AGE_S = 3600.0

# Checkpoints: the policy Automatic -------------------------------------------------------------

# Expected time between failures before the job has had any: a few per day.
AUTOMATIC_BETWEEN_FAILURES_S = 4 * 3600.0
# Never save more often, even if failures are frequent and saves are cheap.
AUTOMATIC_MIN_INTERVAL_S = 30.0
# Never save less often, even if no failure was seen yet.
AUTOMATIC_MAX_INTERVAL_S = 3600.0

# Checkpoints: memory of other nodes ------------------------------------------------------------

# One request to another node's memory. A node that does not answer in this time counts as lost.
PEER_REQUEST_S = 5.0
# The server's limit for one message of a client: longer than a client waits for its answer.
PEER_EXCHANGE_S = 2 * PEER_REQUEST_S
# A client's connection without a request for this long is closed.
PEER_IDLE_S = 120.0
# The replication thread looks for new parts this often.
REPLICATION_POLL_S = 0.1
# The pause after a failed copy; every further failure doubles it.
REPLICATION_FIRST_BACKOFF_S = 1.0
# The longest of these pauses: a node that is back has its copies again within this.
REPLICATION_MAX_BACKOFF_S = 30.0
