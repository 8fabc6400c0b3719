"""The fixed intervals of workers, each with its reason.

Options, and intervals that are checked against each other, are in :mod:`elastic.tuning.timeouts`;
those of agents in :mod:`elastic.tuning.agent_intervals`. docs/timeouts.md is generated from the
three (scripts/timeouts_table.py): the comment above a constant is its reason there.
"""

from __future__ import annotations

# The link to the agent ---------------------------------------------------------------------------

# A worker reports its step to its agent this often; the agent considers reports of the last 1.5 s
# (EXTRAPOLATE_S) current.
LINK_HEARTBEAT_S = 0.2
# To connect to the agent, retries included: it may be busy starting workers.
LINK_CONNECT_S = 10.0
# Between two attempts of the first connection: the agent listens before it starts workers.
LINK_CONNECT_AGAIN_S = 0.1
# The first pause between two attempts to reconnect; each further one is twice as long.
LINK_FIRST_PAUSE_S = 0.05
# The longest pause between them: the worker finds a restarted listener within this.
LINK_LONGEST_PAUSE_S = 1.0
# How long close() waits for an agent that does not read.
LINK_CLOSE_S = 0.5
# A worker waits in slices of this length for pending data to be sent, and checks for messages.
LINK_FLUSH_S = 0.01
# A scheduler may signal the worker before the agent: the worker asks its agent again for this long.
SIGTERM_ASK_S = 0.3
# Waits of the main thread are sliced: between two slices Python runs the handlers of signals.
WORKER_SLICE_S = 0.2
# Polling interval for a newer world where the thread that receives it cannot be woken.
WORLD_LOOK_S = 0.005

# Telemetry ---------------------------------------------------------------------------------------

# Between two records of time spent (elastic/training/step_account.py): a rank writes about 250 KiB
# an hour, and a killed process loses at most this.
STEP_TIMES_S = 5.0
# A killed worker loses records of less than this. One that was silent for longer had hung before,
# and goodput counts that as time until detection.
UNREPORTED_S = 2 * STEP_TIMES_S
# Goodput merges the windows of a rank into windows of this length: a week of training is read in
# seconds.
MERGED_WINDOWS_S = 300.0
# A wall clock that deviates by this from the monotonic one of its machine has been set.
CLOCK_SET_S = 1.0
# Nodes record that they have joined a world within this of each other: the leader pushes it.
JOINED_TOGETHER_S = 1.0
# Ranks record that they have entered it within this: they build their group and load the state.
ENTERED_TOGETHER_S = 20.0
# Agents record the end of the job within this: their workers end first.
ENDED_TOGETHER_S = 20.0
# A node whose journal ends this long before the run, without a last event, is named in a note.
SILENT_NODE_S = 10.0
# Polling interval of `elastic events --follow`.
FOLLOW_S = 0.3

# The records of steps are summed up, and checked for anything due, this often: doing it in each
# step would cost more, because of cold caches.
STEP_SUMS_S = 0.1
# Rank 0 passes logged values to its writers this often: one batch costs less than a call per step.
# The files of a killed process lack at most this, STEP_SUMS_S and one step.
METRICS_FLUSH_S = 0.5
# All ranks keep their logged values for this long: the next rank 0 writes those that the previous
# one had not written. A death is detected within seconds, and a flush may wait for a slow disk.
METRICS_KEEP_S = 30.0
# Between two events `metrics` in the journal: enough for a curve, about 100 KiB an hour.
METRICS_EVENT_S = 5.0
# For the writers to write pending values before another process may: a local disk takes a
# millisecond, and the recovery does not wait for it.
METRICS_DRAIN_S = 1.0
# For the writers to finish at the end of the process.
METRICS_CLOSE_S = 30.0

# Between two lines of progress in a file: an hour is 720 lines.
PROGRESS_LINE_S = 5.0
# Between two updates of the line on a terminal.
PROGRESS_STATUS_S = 0.5

# Ranks of a replica start together, but importing torch may take minutes on a busy machine.
REPLICA_MEETS_S = 300.0

# Meeting in a world's store ----------------------------------------------------------------------

# Polling interval for a newer world while the store's port refuses connections.
STORE_HOST_PROBE_S = 0.1
# The first polling pause for a missing key; each further one is twice as long.
FIRST_LOOK_S = 0.001
# The longest of these pauses: with it, a thousand waiting ranks send 50,000 requests per second to
# the store.
SLOWEST_LOOK_S = 0.02
# Polling interval for the other ranks of a world that no agent has announced.
DISCOVERY_LOOK_S = 0.02
# A call to the store checks this often whether to give up; signal handlers run as well.
WORLD_STORE_SLICE_S = 0.1

# For join(preflight=True): three checks, and a start of Python, on a busy machine.
PREFLIGHT_S = 45.0

# The process group -------------------------------------------------------------------------------

# Collectives of an aborted group return within about 2 ms, if at all.
DRAIN_S = 0.05
# How often a drain is checked.
DRAIN_SLICE_S = 0.0005
# Between two garbage collections while parameters of the last world are still in memory: during a
# collection by another thread, which takes milliseconds, ours returns at once.
GARBAGE_SLICE_S = 0.01
# Length of one wait inside gloo. Each costs as much as a few lines of Python; an abort is noticed
# at its end, unless gloo reports it earlier.
GLOO_SLICE_MS = 20
# Polling interval for a collective that is queued on a device: within 1/50 of a millisecond a
# small collective ends.
STREAM_SLICE_S = 20e-6
# A rank that waits this long for a collective, and again after this, asks the world's store whether
# another rank has left the loop: a request of 0.1 ms, in steps that take longer.
LONG_WAIT_S = 0.5
# A rank that has left a loop waits this long for the others to leave it, before it continues: some
# may still evaluate in the same step.
LEFT_ALONE_S = 30.0
# It checks this often whether the world has ended.
LEFT_SLICE_S = 0.2
# Ranks that end because one has left the loop wait this long for each other: all learn it within
# LONG_WAIT_S.
VERDICT_KNOWN_S = 2.0
# While a group is being built, its sockets appear one after the other: the new ones are shut down
# this often.
ABORT_AGAIN_S = 0.005
# An abandoned build may wait for a dead peer to connect. Its own process connects instead, and
# again after this, because it shuts sockets down meanwhile.
BUILD_CONNECT_AGAIN_S = 0.05
# For a process to connect to its own abandoned build, within one machine.
OWN_CONNECT_S = 1.0
# A group is built in milliseconds. If one is not connected after this, a peer does not respond: the
# connections begun since the last check get their limit (peer_silence_s).
BUILD_LOOK_S = 0.25
# The shortest limit of a part of a build: torch treats a timeout of zero as unlimited, and
# live peers respond in milliseconds.
BUILD_MIN_S = 1.0
# After its limit a build ends and reports which rank is missing, unless it hangs.
BUILD_GRACE_S = 0.5
# This long after the limit of an abort, a timer without Python ends the process if the deadline in
# Python has not, because a thread holds the interpreter lock.
LAST_RESORT_S = 2.0
# A deadline that ends the process counts ticks of this length: a machine that was frozen counts
# one.
DEADLINE_TICK_S = 0.05

# Recovery ----------------------------------------------------------------------------------------

# A group is built in milliseconds once all ranks have arrived; the rest is a margin for busy
# machines.
BUILD_TIMEOUT_S = 30.0
# A leaving worker checks this often whether its agent has released it.
LEAVE_SLICE_S = 0.2

# Checkpoints in training -------------------------------------------------------------------------

# While a checkpoint is read, the CPU time of its threads is read this often, for the hang detector.
BUSY_POLL_S = 1.0
# To write a last share before the process ends: in process, the continuing peers wait for its end.
SHARE_S = 3.0
# A worker that torchrun has sent SIGTERM gets SIGKILL after 30 s (PContext.close, torch 2.11 to
# 2.15): this leaves 6 s for the interpreter to exit.
STOPPED_BY_TORCHRUN_S = 24.0
# The main thread has this long to reach a step boundary, or to detect that peers are gone; then it
# is interrupted. Without the dead rank the current step cannot be completed in any case.
BOUNDARY_S = 4.0
# A main thread that has not executed the handler of an interrupt for this long runs native code. If
# it only waits for a core, nothing is lost: the handler is the next Python that it executes.
NATIVE_CODE_S = 1.0
# Beyond the budget of a last save: the interrupted main thread may never release a lock.
PREEMPTION_LIMIT_S = 2.0
# How often it is checked whether the main thread has reached a boundary.
PREEMPTION_SLICE_S = 0.02
# A worker asks its agent this often whether the SIGTERM is final.
PREEMPTION_ASK_AGAIN_S = 0.1
# A main thread that was stopped for a last save sleeps in slices of this until its process ends.
HALT_SLICE_S = 1.0
# The last save at the end of training is not urgent; a slow disk may take long, but a peer that
# dies in its last second must not delay the others for long.
LAST_SAVE_S = 600.0
# A rank that has written its share waits at least this long for its peers' shares: they began at
# the same time, on similar disks.
LAST_SAVE_PEERS_S = 10.0
# A last save that fails transiently is repeated for this long: a network file system that fails
# over is back within a minute, and no later save would hold this state.
LAST_SAVE_REPEAT_S = 60.0
# Delay between the checks of the folder by consecutive ranks.
LAST_SAVE_TURN_S = 0.25
# A last save that takes longer is announced in the log.
LAST_SAVE_QUIET_S = 2.0
# How often it is checked whether a save is committed.
SAVE_SLICE_S = 0.02
# A disk that is slower than the policy slows training down to its rate. A disk that hangs does not:
# after one wait of this length, saves are skipped until it responds.
BUSY_WAIT_S = 5.0
# Shards in the nodes' memory: a step begins once this rank's share of the previous save is written,
# or after this. Memory that takes longer is swapped out, or full.
MEMORY_WAIT_S = 30.0
# The longest chosen interval between two saves to memory, even if they cost more than they should:
# a death loses up to two intervals, and a checkpoint on disk is hardly older.
MEMORY_LONGEST_S = 300.0
# The owner of a folder renews its record this often.
OWNER_HEARTBEAT_S = 5.0
# Six renewals: restarted workers are back within seconds, and their job must not lose its folder in
# the meantime.
OWNER_WATCH_S = 6 * OWNER_HEARTBEAT_S
# A job with the same run id waits less: without agents that share an etcd it is usually the same
# job, whose rank 0 has ended. Three renewals, of which one may be late.
OWNER_SILENCE_S = 3 * OWNER_HEARTBEAT_S
# How often renewals by another owner are checked.
OWNER_LOOK_S = 0.25
# For the renewing thread to end: a disk may hang.
OWNER_JOIN_S = 1.0
# A copy of the weights at each step that takes less is not worth a decision: a thousandth of a step
# of a quarter of a second, and less than a gradient reduction over any network.
COPY_IS_CHEAP_S = 250e-6
