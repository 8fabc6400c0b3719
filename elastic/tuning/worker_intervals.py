"""The fixed intervals of workers, each with its reason.

What users set, and what is checked against each other, is in :mod:`elastic.tuning.timeouts`; what
agents wait for in :mod:`elastic.tuning.agent_intervals`. docs/timeouts.md is generated from the
three (scripts/timeouts_table.py): the comment above a constant is its reason there.
"""

from __future__ import annotations

# The link to the agent ---------------------------------------------------------------------------

# A worker reports its step to its agent this often; the agent takes reports of the last 1.5 s
# (EXTRAPOLATE_S) for present ones.
LINK_HEARTBEAT_S = 0.2
# To connect to the agent, tries included: it may be busy with starting workers.
LINK_CONNECT_S = 10.0
# Between two attempts of the first connection: the agent listens before it starts workers.
LINK_CONNECT_AGAIN_S = 0.1
# The first pause between two attempts to connect again; each further one is twice as long.
LINK_FIRST_PAUSE_S = 0.05
# The longest pause between them: an agent that comes back is found within this.
LINK_LONGEST_PAUSE_S = 1.0
# What close() waits for an agent that does not read.
LINK_CLOSE_S = 0.5
# A worker waits in slices of this for the end of an attempt to send, and looks for messages.
LINK_FLUSH_S = 0.01
# A scheduler may signal the worker before the agent knows: ask again for so long.
SIGTERM_ASK_S = 0.3
# Waits of the main thread are sliced: between two slices Python runs the handlers of signals.
WORKER_SLICE_S = 0.2
# Between two looks for a world, where the thread that hears of it may not be woken.
WORLD_LOOK_S = 0.005

# Telemetry ---------------------------------------------------------------------------------------

# Between two sums of where the time has gone (elastic/training/step_account.py): a rank writes
# about 250 KiB an hour, and what a killed process had not written is at most this.
STEP_TIMES_S = 5.0
# A worker that was killed has not written down less than this. One that had said nothing for
# longer hung before, and goodput counts that as the time until it was noticed.
UNREPORTED_S = 2 * STEP_TIMES_S
# Goodput adds up the windows of a rank until they span this: a week of training is read in seconds.
MERGED_WINDOWS_S = 300.0
# A wall clock that moves by this against the monotonic one of its machine was set.
CLOCK_SET_S = 1.0
# Nodes write that they have joined a world within this of each other: a push from the leader.
JOINED_TOGETHER_S = 1.0
# Ranks write that they have entered it within this: they build their group and load the state.
ENTERED_TOGETHER_S = 20.0
# Agents write the end of the job within this: their workers end first.
ENDED_TOGETHER_S = 20.0
# A node whose journal ends this long before the run, without a word, is named in a note.
SILENT_NODE_S = 10.0
# Between two looks of `elastic events --follow` for new lines.
FOLLOW_S = 0.3

# What steps have noted is added up, and looked through for what is due, this often: in each step it
# would cost more, since it would run from cold caches.
STEP_SUMS_S = 0.1
# Rank 0 hands what was logged to its writers this often: once in a batch costs less than in every
# step. The files of a killed process lack no more than this, STEP_SUMS_S and one step.
METRICS_FLUSH_S = 0.5
# All ranks keep what they logged for so long: the next rank 0 writes what the last one
# did not get to. A death is noticed within seconds, and a flush may wait for a slow disk.
METRICS_KEEP_S = 30.0
# Between two events `metrics` in the journal: enough for a curve, about 100 KiB an hour.
METRICS_EVENT_S = 5.0
# For the writers to write what they have before another process may: a local disk takes a
# millisecond, and nobody recovers meanwhile.
METRICS_DRAIN_S = 1.0
# For the writers to finish at the end of the process.
METRICS_CLOSE_S = 30.0

# Between two lines of progress in a file: an hour is 720 lines.
PROGRESS_LINE_S = 5.0
# Between two changes of the line in a terminal.
PROGRESS_STATUS_S = 0.5

# Ranks of a replica start together, but a busy machine imports torch for minutes.
REPLICA_MEETS_S = 300.0

# Meeting in a world's store ----------------------------------------------------------------------

# Between two looks for a newer world, while nobody listens at the store's port.
STORE_HOST_PROBE_S = 0.1
# The pause after the first look at a key that is not there yet; each further one is twice as long.
FIRST_LOOK_S = 0.001
# The longest of these pauses: a thousand ranks that wait ask the store 50,000 times a second.
SLOWEST_LOOK_S = 0.02
# Between two looks for the other ranks of a world that no agent has announced.
DISCOVERY_LOOK_S = 0.02
# Between two looks whether to give up a call to the store; handlers of signals run as well.
WORLD_STORE_SLICE_S = 0.1

# For join(preflight=True): what three checks may take, and a start of python on a busy machine.
PREFLIGHT_S = 45.0

# The process group -------------------------------------------------------------------------------

# Collectives of an aborted group come back within about 2 ms, if at all.
DRAIN_S = 0.05
# Between two looks whether they have.
DRAIN_SLICE_S = 0.0005
# Between two collections of garbage, where parameters of the last world are still in memory: one
# of another thread, which makes ours return at once, takes milliseconds.
GARBAGE_SLICE_S = 0.01
# A wait inside gloo that ends by itself. Each that does costs as much as a few lines of Python; an
# abort is heard of at the end of one, where gloo does not say it at once.
GLOO_SLICE_MS = 20
# Between two looks at a collective that is queued on a device: 1/50 of a millisecond, in which a
# small collective ends.
STREAM_SLICE_S = 20e-6
# While a group is being built, what must be aborted appears bit by bit: shut down what is new.
ABORT_AGAIN_S = 0.005
# A group is built in milliseconds. One that is not connects to somebody who does not answer: the
# connections that it has begun since the last look get their limit (peer_silence_s).
BUILD_LOOK_S = 0.25
# The least time of a part of a build: torch takes a timeout of nothing for one without an end, and
# peers that are there answer in milliseconds.
BUILD_LEAST_S = 1.0
# After its time a build ends by itself, and says who is missing, unless it hangs.
BUILD_GRACE_S = 0.5
# Beyond the limit of an abort: then a timer that needs no Python ends the process, if the deadline
# in Python has not, because a thread holds the interpreter lock.
LAST_RESORT_S = 2.0
# A deadline that ends the process counts in ticks of this: a machine that was frozen counts one.
DEADLINE_TICK_S = 0.05

# Recovery ----------------------------------------------------------------------------------------

# A group is built in milliseconds once everybody is there; the rest is for a busy machine.
BUILD_TIMEOUT_S = 30.0
# A worker that leaves looks this often whether its agent has let it go.
LEAVE_SLICE_S = 0.2

# Checkpoints in training -------------------------------------------------------------------------

# In-process, peers that continue wait for this process's end before they can.
SHARE_S = 3.0
# A worker that torchrun has sent SIGTERM gets SIGKILL after 30 s (PContext.close, torch 2.11 to
# 2.15): six are left for the interpreter's end.
STOPPED_BY_TORCHRUN_S = 24.0
# The main thread may take so long to a step's boundary, or to notice that peers are gone; then it
# is interrupted. Without the dead rank the current step cannot be completed anyway.
BOUNDARY_S = 4.0
# Beyond the budget of a last save: the interrupted main thread may never release a lock.
PREEMPTION_LIMIT_S = 2.0
# Between two looks whether the main thread has come to a boundary.
PREEMPTION_SLICE_S = 0.02
# A worker asks its agent again whether the SIGTERM is for good.
PREEMPTION_ASK_AGAIN_S = 0.1
# A main thread that was stopped for a last save sleeps in slices of this until its process ends.
HALT_SLICE_S = 1.0
# The last save at the end of training: nothing presses; a peer that dies in its last second must
# not hold up the others for long, and a slow disk may.
LAST_SAVE_S = 600.0
# A rank that has written its share waits this long at least for its peers' shares: they began at
# the same moment, on disks like its own.
LAST_SAVE_PEERS_S = 10.0
# From one rank's look into the folder to the next one's.
LAST_SAVE_TURN_S = 0.25
# Between two looks whether a save is committed.
SAVE_SLICE_S = 0.02
# A disk that is slower than the policy slows training down to its rate. One that hangs does not:
# after one wait of this length saves are skipped until it answers.
BUSY_WAIT_S = 5.0
# Shards in the nodes' memory: a step begins once this rank's share of the save before is
# written, or after this. Memory that takes longer is swapped out, or full.
MEMORY_WAIT_S = 30.0
# The owner of a folder renews its file this often.
OWNER_HEARTBEAT_S = 5.0
# Six renewals: restarted workers are back within seconds, and their job must not lose its folder
# meanwhile.
OWNER_WATCH_S = 6 * OWNER_HEARTBEAT_S
# Between two looks whether another owner has renewed it.
OWNER_LOOK_S = 0.25
# For the thread that renews it to end: a disk may hang.
OWNER_JOIN_S = 1.0
