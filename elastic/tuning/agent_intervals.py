"""The fixed intervals of agents, their store and the command line, each with its reason.

Options, and intervals that are checked against each other, are in :mod:`elastic.tuning.timeouts`;
those of workers in :mod:`elastic.tuning.worker_intervals`. docs/timeouts.md is generated from the
three (scripts/timeouts_table.py): the comment above a constant is its reason there.
"""

from __future__ import annotations

# etcd ------------------------------------------------------------------------------------------

# The leader writes the job's progress for `elastic status` at most this often: half a write per
# second and job.
PROGRESS_S = 2.0
# The same if only heartbeats have changed, as in a job without progress.
PROGRESS_IDLE_S = 5.0
# Each node sends a heartbeat to the leader over their connection this often, without any write to
# etcd.
HEARTBEAT_S = 2.0
# An older heartbeat is shown as late: a node's thread may wait for one call to etcd, and the leader
# writes the received heartbeats every few seconds.
HEARTBEAT_LATE_S = 15.0
# `elastic status` names nodes that were lost within this time.
RECENT_LOSS_S = 600.0
# A script that has not called elastic.join() after this long in a world is assumed never to do so:
# its nodes count as training, although no steps are reported. Imports take less.
SILENT_SCRIPT_S = 120.0
# A command logs that it is connecting to etcd if that takes longer: it may take connect_timeout_s.
SAY_CONNECTING_S = 1.0
# Refresh interval of `elastic status --watch`: each refresh is one read of a few keys.
STATUS_WATCH_S = 2.0
# `elastic dashboard` polls etcd this often, once for all of its clients, so that a page shows a
# loss within two seconds.
DASHBOARD_ETCD_S = 1.0
# `elastic dashboard` checks the journals for new lines this often.
DASHBOARD_JOURNALS_S = 0.5
# `elastic dashboard` redraws its charts this often; a change of the world is drawn at once.
DASHBOARD_CHARTS_S = 15.0
# Pause before `elastic dashboard` connects to etcd again after a failed attempt.
DASHBOARD_RECONNECT_S = 1.0
# A request to the dashboard must arrive completely within this: its few headers fit one packet.
DASHBOARD_REQUEST_S = 10.0
# The dashboard's server sends a message to an idle page this often: proxies close silent streams.
DASHBOARD_PING_S = 15.0
# A page that has lost its server reconnects after this.
DASHBOARD_RETRY_S = 1.0
# When the dashboard ends, clients have this long to receive pending data.
DASHBOARD_DRAIN_S = 1.0
# Polling interval of `elastic wait`.
WAIT_LOOK_S = 0.5
# Default timeout of `elastic wait`, the same as in kubectl.
WAIT_TIMEOUT_S = 30.0
# `elastic profile` keeps its request for this long: by then all watching agents have received it.
PROFILE_REQUEST_S = 3.0
# The shortest lease of that request, which removes it if the command is killed: longer than one
# call.
PROFILE_LEASE_S = 10.0
# One call to etcd, retries included.
STORE_CALL_S = 5.0
# First contact with a store, without another limit: one call.
STORE_CONNECT_S = STORE_CALL_S
# An agent's first contact (connect_timeout_s): two calls, because etcd may be starting, too.
FIRST_CONTACT_S = 2 * STORE_CALL_S
# The longest pause between two attempts (docs/explanation/protocol.md, section 5).
STORE_BACKOFF_CAP_S = 1.0
# The first pause between two attempts; each further one is twice as long, with jitter.
STORE_RETRY_S = 0.05
# The limit of gRPC for one attempt to connect. The store's own limits end attempts earlier, and it
# tries an unanswered connection again: TCP, TLS and HTTP/2 take up to five round trips.
STORE_CONNECTING_S = 20.0
# The first pause between two connections to a member.
STORE_FIRST_BACKOFF_S = 0.1
# A connection to etcd is pinged after this much silence: etcd closes connections that are pinged
# more often than every 5 s (--grpc-keepalive-min-time). The store's own watchdog is faster; this
# detects connections that a middlebox has dropped, with or without pending calls.
STORE_KEEPALIVE_S = 6.0
# A ping without a response in this time ends the connection; the same limit applies, as
# TCP_USER_TIMEOUT, to unacknowledged bytes.
STORE_KEEPALIVE_ANSWER_S = 3.0
# Limit of a call's first attempt; each further one gets twice as long, within the call's limit.
STORE_FIRST_ATTEMPT_S = 1.5
# The shortest attempt: gRPC fails a call whose deadline has passed without sending it.
STORE_MIN_ATTEMPT_S = 0.05
# A member of the cluster that does not respond in this time is not used.
STORE_PROBE_S = 1.0
# The longest limit for a member: each failed round doubles it, for overloaded machines.
STORE_SLOWEST_PROBE_S = 4.0
# The shortest limit for a member when the others need the remaining time: a handshake within one
# network.
STORE_MIN_PROBE_S = 0.1
# A watch that is silent for longer is checked.
STORE_SILENCE_S = 1.0
# A read that brings a watch up to date.
STORE_READ_S = 2.0
# After a watch was recreated, messages within this time may be older than the state read.
STORE_SETTLING_S = 1.0
# The renewal of a lease gets a share of the length of the lease, but at least this.
STORE_SHORTEST_RENEWAL_S = 0.3
# The longest limit of a renewal, for any length of the lease: after that, another member is tried.
STORE_LONGEST_RENEWAL_S = 1.5
# To revoke a lease when an agent ends; otherwise the lease expires.
STORE_REVOKE_S = 1.0
# Limit of a plain connection that determines why TLS fails.
STORE_DIAGNOSIS_S = 0.5

# The agent's threads ---------------------------------------------------------------------------

# Waits of the main thread are sliced: between two slices Python runs the handlers of signals.
MAIN_THREAD_SLICE_S = 0.2
# A node that waits for a world whose other members keep their workers polls the store this often.
ASK_MEMBERS_S = 0.5
# After this long without the store, a node whose workers have succeeded leaves without waiting for
# the other nodes.
FINISH_WITHOUT_STORE_S = 30.0
# The same where the store answers that it is full: a few attempts, in case it was freed meanwhile.
FINISH_WHEN_FULL_S = 2.0
# The node's thread retries this long after the store did not respond.
NODE_RETRY_S = 0.5
# The node's thread runs at least once per second without messages: leases are longer.
NODE_IDLE_S = 1.0
# A leaving node waits this long for the world without it; otherwise the others detect the end of
# its lease.
LEAVING_WORLD_S = 2.0
# The workers of a leaving node are asked to leave without a world if none is announced within this:
# the share of leave_grace_s before the last save. If the store is known to fail, after ANNOUNCE_S.
UNANNOUNCED_S = 4.0
# The store counts as unreachable after twice the silence after which its watch is checked.
STORE_AWAY_S = 2 * STORE_SILENCE_S
# The node's thread runs every second (NODE_IDLE_S). After a longer pause than this, the process may
# have been frozen while etcd was reachable: it gets this long to reach etcd again. Its workers'
# permission to train was not extended meanwhile.
FROZEN_S = 5.0

# The ranks of a replica on one node meet once all of them are in elastic.join(): in milliseconds;
# the rest is a margin for busy machines. After this, they are ended and replaced.
REPLICA_FORMS_S = 30.0
# The same on GPUs, where they also create CUDA contexts and NCCL communicators: tens of seconds if
# drivers and file systems are slow.
REPLICA_FORMS_ON_DEVICE_S = 300.0
# A node logs the names of workers that keep others waiting for this long, and again after twice the
# time.
NOT_READY_S = 30.0
# The most that a pause of the node's thread counts for REPLICA_FORMS_S and NOT_READY_S: twice
# NODE_IDLE_S. During a longer one the node was frozen.
MAX_COUNTED_S = 2 * NODE_IDLE_S

# torchrun's side -------------------------------------------------------------------------------

# The node's thread is notified of a worker's death within milliseconds, but may be busy with one
# call to etcd.
REPLACEMENT_DECIDED_S = STORE_CALL_S
# How long torch's own backends wait for more nodes once there are enough (torch 2.11 to 2.15:
# rendezvous/dynamic_rendezvous.py, RendezvousTimeout), which launching programs expect.
STOCK_LAST_CALL_S = 30.0
# The value in every configuration of torch/distributed/launcher/api.py.
TORCHRUN_TIMEOUT_S = 900
# From the start of the workers to elastic.join(): imports, on a busy machine or from a cold cache.
JOIN_EXPECTED_S = 30.0
# File systems take their times from a clock with a resolution of a few milliseconds.
FILE_TIMES_S = 0.1
# How often the files read by a restarted script are checked.
FILE_READS_S = 1.0

# Node and liveness -----------------------------------------------------------------------------

# Between two lookups of a pod's name, which is registered a moment after the pod starts.
RESOLVE_AGAIN_S = 0.5
# To connect to a peer that may be suspected: longer than a handshake on a busy machine, shorter
# than a lease.
LIVENESS_CONNECT_S = 1.0
# After a connection to a peer was reset: its agent may be restarting.
PROBE_AGAIN_S = 0.05

# Leadership and membership ---------------------------------------------------------------------

# A new leader waits this long for running worlds to be registered: longer than the cap of the
# watch's back-off (STORE_BACKOFF_CAP_S), so that after a wipe every agent has registered again.
ADOPTION_WAIT_S = 1.5
# A planned world waits this long for the first report of a step before it interrupts one, if a node
# is leaving, which has little time.
STEP_RATE_LEAVING_S = 1.0
# The same if nodes only join, which is not urgent.
STEP_RATE_JOINING_S = 5.0
# The leader checks for the report of a step this often.
STEP_RATE_AGAIN_S = 0.05
# The leader probes a silent node this often.
RECHECK_S = 0.5
# An idle leader runs again after this; changes wake it through its watch.
LEADER_IDLE_S = 5.0
# The same, before its watch has listed the nodes.
LEADER_UNLISTED_S = 1.0
# A follower that could not follow the leader's key retries after this.
FOLLOW_AGAIN_S = 0.5
# Time for an announcement from the leader to the last worker, with a margin: milliseconds if pushed
# over a connection, tens of milliseconds through a watch of a busy etcd.
ANNOUNCEMENT_S = 0.5
# Links report a step at least once per second. An older report means that the workers make no steps
# (an evaluation, a checkpoint): extrapolating it would delay the switch by minutes.
EXTRAPOLATE_S = 1.5
# A peer's collective fails at the moment a worker dies, and its report often precedes that of the
# dead worker's agent, which has this long.
FAILURE_SETTLE_S = 0.05
# In restart mode, a failing script closes its connections, which breaks its peers, before its
# interpreter has ended. Its agent has this long after the peers' reports to report its error.
ORIGIN_SETTLE_S = 1.0
# A node with a live lease that the leader cannot reach for this long is excluded.
SUSPECT_S = 15.0
# The same if connections of other members' workers to that node have timed out as well: a few
# probes are then sufficient.
CUT_OFF_S = 3.0
# If the group of the same members repeatedly cannot be built, each further attempt waits twice as
# long, from a second up to this: a network that returns is used soon.
BUILD_BACKOFF_CAP_S = 30.0
# Failures within this time count towards the failure budget (failure_window_s): with the default
# budget, one restart per minute.
FAILURE_WINDOW_S = 600.0
# A job that makes progress for this long after a failure is healthy, and its budget is reset
# (healthy_s).
HEALTHY_S = 60.0
# A node that fails repeatedly is excluded for this long each time (quarantine_s).
QUARANTINE_S = 60.0
# Losses of a node, and reports against it, within this time are counted together.
FLAP_WINDOW_S = 120.0

# The embedded etcd (laptops and tests) -----------------------------------------------------------

# How often its readiness is checked.
EMBEDDED_POLL_S = 0.03
# Time until it is ready on a busy machine.
EMBEDDED_READY_S = 30.0
# From SIGTERM to SIGKILL.
EMBEDDED_STOP_S = 5.0
# For a response of its health endpoint, which is on this machine.
EMBEDDED_PROBE_S = 2.0
# For `etcd --version`, from a cold disk.
EMBEDDED_VERSION_S = 20.0
# The default of etcd, for members on one machine or network.
EMBEDDED_HEARTBEAT_MS = 100
# Ten heartbeats, as etcd's documentation recommends.
EMBEDDED_ELECTION_MS = 10 * EMBEDDED_HEARTBEAT_MS

# Hangs ------------------------------------------------------------------------------------------

# The first steps of a world allocate, tune and compile: each may take this long.
HANG_FIRST_STEPS_S = 300.0
# A rank is reported to the leader after a part of its budget, but at least this: shorter silences
# occur on busy machines.
HANG_SUSPICION_S = 0.4
# For a worker to begin to write its stacks after the signal, and to finish.
STACKS_DUMPED_S = 3.0
# How often the agent checks whether the stacks are written.
STACKS_POLL_S = 0.01
# For py-spy to read the stacks of a process.
STACKS_PY_SPY_S = 5.0
# To write a report, or to query the free space of a disk. The worker may hang because of that file
# system, so the agent waits no longer.
HANG_REPORT_WRITTEN_S = 5.0
# A killed worker that still exists after this time is blocked in the kernel (a dead NFS server, a
# GPU driver), perhaps for good: the others continue without its node. Freeing the memory of a large
# process takes less.
HANG_KILL_S = 3.0
# The report contains lines of the kernel's log up to this age: older ones are unrelated to the
# hang.
KERNEL_LOG_S = 600.0
# A thread that sleeps most of the time is looked at again after this, then after twice as long,
# until it is seen asleep, or 0.13 s have passed.
WAIT_CHANNEL_LOOK_S = 0.002
# To read the kernel's log since the start of the workers, while the node's thread waits.
KERNEL_LOG_READ_S = 0.2

# Stragglers -------------------------------------------------------------------------------------

# A rank's step times are reported to the leader once per window (straggler_window_s), and three
# consecutive windows make a straggler. Detection is not urgent: a slow rank costs a fraction of
# each step, and a window of this length costs etcd one small write per node.
STRAGGLER_WINDOW_S = 10.0

# The health endpoint -----------------------------------------------------------------------------

# A connection to a probe or to /metrics is closed after this: clients send one short request.
HEALTH_CONNECTION_S = 2.0
# The server's thread runs this often, and closes expired connections.
HEALTH_TURN_S = 0.2
# Pause after no file descriptor was free for a connection.
HEALTH_ACCEPT_AGAIN_S = 0.05

# OpenTelemetry -----------------------------------------------------------------------------------

# Between two exports of a node's metrics by OTLP (OTEL_METRIC_EXPORT_INTERVAL): the default of
# OpenTelemetry's specification.
OTLP_EXPORT_S = 60.0
# A terminating agent waits this long for the last export, and as long again for the thread: a
# collector that hangs does not prevent a node from leaving.
OTLP_CLOSE_S = 2.0

# The command line --------------------------------------------------------------------------------

# How often the output of agents started by `elastic run` and `elastic demo` is read.
CLI_POLL_S = 0.1
# How often a progress bar of a local node is printed as a line. It is redrawn ten times a second.
CLI_BAR_S = 5.0
# How long local agents may run if others have failed and too few remain for the job: they wait for
# nodes that will not be started.
CLI_TOO_FEW_S = 5.0
# Duration of a step of the demo, slow enough to watch.
DEMO_STEP_S = 0.06
# Default timeout of the demo: ten times its duration on an idle laptop.
DEMO_TIMEOUT_S = 300.0
# For a node of the demo to start and join.
DEMO_PATIENCE_S = 180.0
# One call to Kubernetes' API server.
CLUSTER_CALL_S = 10.0
# How long requests to the API server are retried: longer than its unavailability during an upgrade
# of the control plane.
CLUSTER_PATIENCE_S = 600.0
# The first pause after a failed call to an API server, or to etcd by `elastic finish`.
CLUSTER_FIRST_BACKOFF_S = 0.5
# The longest pause between two such calls.
CLUSTER_BACKOFF_CAP_S = 30.0
