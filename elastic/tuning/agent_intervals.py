"""The fixed intervals of agents, their store and the command line, each with its reason.

What users set, and what is checked against each other, is in :mod:`elastic.tuning.timeouts`; what
workers wait for in :mod:`elastic.tuning.worker_intervals`. docs/timeouts.md is generated from the
three (scripts/timeouts_table.py): the comment above a constant is its reason there.
"""

from __future__ import annotations

# etcd ------------------------------------------------------------------------------------------

# The leader writes how far the job is at most once in this, for `elastic status`: half a write per
# second and job.
PROGRESS_S = 2.0
# The same while nothing but heartbeats is new: a job without progress.
PROGRESS_IDLE_S = 5.0
# A node's heartbeat goes to the leader over their connection this often: etcd sees nothing of it.
HEARTBEAT_S = 2.0
# A heartbeat older than this is shown as late: a node's thread may wait for one call to etcd, and
# the leader writes what it has heard every few seconds.
HEARTBEAT_LATE_S = 15.0
# `elastic status` names nodes that were lost as long ago as this.
RECENT_LOSS_S = 600.0
# A script that has not called elastic.join() after this long in a world is taken for one that never
# does: its nodes count as training, though nobody reports their steps. Imports take less.
SILENT_SCRIPT_S = 120.0
# A command that connects to etcd says so if that takes longer: it may take connect_timeout_s.
SAY_CONNECTING_S = 1.0
# Between two looks of `elastic status --watch`: each is one read of a few keys.
STATUS_WATCH_S = 2.0
# Between two looks of `elastic dashboard` at etcd, once for all of its clients: a page that shows a
# loss within two seconds asks every second.
DASHBOARD_ETCD_S = 1.0
# Between two looks of it for new lines of the journals.
DASHBOARD_JOURNALS_S = 0.5
# Between two drawings of its charts while the run just goes on: a change is drawn at once.
DASHBOARD_CHARTS_S = 15.0
# Before it connects to etcd again, which has refused or did not answer when it was to connect.
DASHBOARD_RECONNECT_S = 1.0
# A page that shows nothing new hears from the server this often: proxies close silent streams.
DASHBOARD_PING_S = 15.0
# A page that has lost the server tries again after this.
DASHBOARD_RETRY_S = 1.0
# When it ends, clients have this long to take what is on its way.
DASHBOARD_DRAIN_S = 1.0
# Between two looks of `elastic wait`, whose caller waits for its end.
WAIT_LOOK_S = 0.5
# How long `elastic wait` waits unless told, as kubectl does.
WAIT_TIMEOUT_S = 30.0
# `elastic profile` holds its request for so long: all agents that watch have heard of it by then.
PROFILE_REQUEST_S = 3.0
# The least lease of that request, which removes it if the command is killed: longer than one call.
PROFILE_LEASE_S = 10.0
# One call to etcd, retries included.
STORE_CALL_S = 5.0
# For the first contact of a store that is not told another limit: one call.
STORE_CONNECT_S = STORE_CALL_S
# For an agent's first contact (connect_timeout_s): two calls, as etcd may be starting as well.
FIRST_CONTACT_S = 2 * STORE_CALL_S
# The longest pause between two tries (docs/explanation/protocol.md, section 5).
STORE_BACKOFF_CAP_S = 1.0
# The first pause between two tries; each further one is twice as long, with jitter.
STORE_RETRY_S = 0.05
# The first pause between two connections to a member.
STORE_FIRST_BACKOFF_S = 0.1
# A connection to etcd is pinged after a silence of this: etcd closes those that are pinged more
# often than every 5 s (--grpc-keepalive-min-time). The store's own pulse is quicker; this finds
# connections that a middle box has forgotten, with calls on their way or without.
STORE_KEEPALIVE_S = 6.0
# A ping that is not answered in this time ends the connection: as TCP_USER_TIMEOUT, too, bytes that
# are not acknowledged.
STORE_KEEPALIVE_ANSWER_S = 3.0
# A call's first try; each further one has twice as long, within the limit of the call.
STORE_FIRST_ATTEMPT_S = 1.5
# The least time of a try: gRPC fails one whose deadline has passed without sending it.
STORE_LEAST_ATTEMPT_S = 0.05
# A member of the cluster that does not answer in this time is not used.
STORE_PROBE_S = 1.0
# The most time that a member gets: on an overloaded machine each failed round doubles it.
STORE_SLOWEST_PROBE_S = 4.0
# The least time that a member gets where the others need theirs: a handshake on one network.
STORE_LEAST_PROBE_S = 0.1
# A watch that is silent for longer is questioned.
STORE_SILENCE_S = 1.0
# A read that brings a watch up to date.
STORE_READ_S = 2.0
# After a watch was made anew, its first messages may be older than what was read: they settle.
STORE_SETTLING_S = 1.0
# A renewal of a lease gets a share of the length of the lease, and at least this.
STORE_SHORTEST_RENEWAL_S = 0.3
# The most time that a renewal gets, however long the lease is: then another member is asked.
STORE_LONGEST_RENEWAL_S = 1.5
# To give a lease back when an agent ends: without it the lease ends by itself.
STORE_REVOKE_S = 1.0
# To find out why TLS fails, one plain connection is made.
STORE_DIAGNOSIS_S = 0.5

# The agent's threads ---------------------------------------------------------------------------

# Waits of the main thread are sliced: between two slices Python runs the handlers of signals.
MAIN_THREAD_SLICE_S = 0.2
# A node that waits for a world in which the others keep their workers asks the store this often.
ASK_MEMBERS_S = 0.5
# After this long without the store, a node whose workers have ended well leaves without waiting for
# the other nodes.
FINISH_WITHOUT_STORE_S = 30.0
# The node's thread tries again this long after the store did not answer.
NODE_RETRY_S = 0.5
# The node's thread turns at least once in a second without messages: leases are longer.
NODE_IDLE_S = 1.0
# A node that leaves waits this long for the world without it; otherwise the end of its lease tells
# the others.
LEAVING_WORLD_S = 2.0
# Etcd is out of reach after twice the silence in which its watch is questioned.
STORE_AWAY_S = 2 * STORE_SILENCE_S
# The node's thread turns every second (NODE_IDLE_S). After a pause of this length it may have been
# frozen, and not etcd away: it gets as long to find etcd again. The permission of its workers was
# not extended meanwhile.
FROZEN_S = 5.0

# torchrun's side -------------------------------------------------------------------------------

# The node's thread hears of a worker's death within milliseconds, and may be busy with etcd for as
# long as one call takes.
REPLACEMENT_DECIDED_S = STORE_CALL_S
# How long torch's own backends wait for more nodes once there are enough (torch 2.11 to 2.15:
# rendezvous/dynamic_rendezvous.py, RendezvousTimeout): what programs that launch are written for.
STOCK_LAST_CALL_S = 30.0
# In every configuration of torch/distributed/launcher/api.py.
TORCHRUN_TIMEOUT_S = 900
# From the start of the workers to elastic.join(): imports, on a busy machine or from a cold cache.
JOIN_EXPECTED_S = 30.0
# File systems take their times from a clock that ticks every few milliseconds.
FILE_TIMES_S = 0.1
# Between two looks for files that a script which starts over has read again.
FILE_READS_S = 1.0

# Node and liveness -----------------------------------------------------------------------------

# A pod's name is known a moment after the pod runs: between two lookups of it.
RESOLVE_AGAIN_S = 0.5
# To connect to a peer that may be suspected: longer than a handshake on a busy machine, shorter
# than a lease.
LIVENESS_CONNECT_S = 1.0
# After a connection to a peer was reset: its agent may be starting anew.
PROBE_AGAIN_S = 0.05

# Leadership and membership ---------------------------------------------------------------------

# A new leader waits this long for running worlds to be registered: longer than the cap of the
# watch's back-off (STORE_BACKOFF_CAP_S), so that after a wipe every agent has registered again.
ADOPTION_WAIT_S = 1.5
# How long a planned world waits for the first report of a step before it interrupts one, where a
# node leaves: it has little time.
STEP_RATE_LEAVING_S = 1.0
# The same, where nodes only join: nothing presses.
STEP_RATE_JOINING_S = 5.0
# The leader looks again for the report of a step this often.
STEP_RATE_AGAIN_S = 0.05
# The leader asks a silent node again this often.
RECHECK_S = 0.5
# With nothing to do the leader looks again after this: what changes wakes it through its watch.
LEADER_IDLE_S = 5.0
# The same, before its watch has listed the nodes.
LEADER_UNLISTED_S = 1.0
# A follower that could not follow the leader's key tries again after this.
FOLLOW_AGAIN_S = 0.5
# How long an announcement takes from the leader to the last worker, with room to spare: pushed over
# a connection it is milliseconds, through a watch of a busy etcd it can be tens of them.
ANNOUNCEMENT_S = 0.5
# Links report a step at least once a second. An older report means that the workers stand still (an
# evaluation, a checkpoint): counting on would put the switch minutes away.
EXTRAPOLATE_S = 1.5
# A peer's collective fails in the moment in which a worker dies, and its report is often faster
# than that of the dead worker's agent, which has this long.
FAILURE_SETTLE_S = 0.05
# In restart mode a failing script closes its connections, and so breaks its peers, before its
# interpreter has ended. Its agent has this long after the peers' reports to report its error.
ORIGIN_SETTLE_S = 1.0
# A node that the leader cannot reach for this long, with a live lease, is left out.
SUSPECT_S = 15.0
# The same, where connections of other members' workers to that node have timed out as well: a few
# probes are enough then.
CUT_OFF_S = 3.0
# Failures within this time count against the failure budget (failure_window_s): as many as a
# restart in each minute.
FAILURE_WINDOW_S = 600.0
# A job that lives this long after a failure is healthy, and its budget refunded (healthy_s).
HEALTHY_S = 60.0
# A node that keeps failing is left out for this long at a time (quarantine_s).
QUARANTINE_S = 60.0
# Losses and accusations of a node within this time count together.
FLAP_WINDOW_S = 120.0

# The embedded etcd (laptops and tests) -----------------------------------------------------------

# Between two looks whether it is ready.
EMBEDDED_POLL_S = 0.03
# Until it is ready, on a busy machine.
EMBEDDED_READY_S = 30.0
# From SIGTERM to SIGKILL.
EMBEDDED_STOP_S = 5.0
# For an answer of its health endpoint, which is on this machine.
EMBEDDED_PROBE_S = 2.0
# For `etcd --version`, from a cold disk.
EMBEDDED_VERSION_S = 20.0
# The default of etcd, for members on one machine or network.
EMBEDDED_HEARTBEAT_MS = 100
# Ten heartbeats, as etcd's documentation advises.
EMBEDDED_ELECTION_MS = 10 * EMBEDDED_HEARTBEAT_MS

# Hangs ------------------------------------------------------------------------------------------

# The first steps of a world allocate, tune and compile: a rank may take this long for one.
HANG_FIRST_STEPS_S = 300.0
# A rank is reported to the leader after a part of its budget, and at least this: shorter silences
# are those of a busy machine.
HANG_SUSPICION_S = 0.4
# For a worker to begin to write its stacks after the signal that asks for them, and to end.
STACKS_DUMPED_S = 3.0
# Between two looks whether it has.
STACKS_POLL_S = 0.01
# For py-spy to read the stacks of a process.
STACKS_PY_SPY_S = 5.0
# To write a report, or to ask for the room on a disk. What makes a worker hang may be the file
# system that they are on: it is not waited for any longer.
HANG_REPORT_WRITTEN_S = 5.0
# The report has lines of the kernel's log that are no older: others say nothing of this hang.
KERNEL_LOG_S = 600.0
# To read what the kernel's log has said since the workers started: the node's thread waits for it.
KERNEL_LOG_READ_S = 0.2

# Stragglers -------------------------------------------------------------------------------------

# A rank's step times are told to the leader once in such a window (straggler_window_s), and three
# windows in a row make a straggler. Nothing presses: a slow rank costs a part of each step, and a
# window of this length costs etcd one small write per node and window.
STRAGGLER_WINDOW_S = 10.0

# The health endpoint -----------------------------------------------------------------------------

# A connection to a probe or to /metrics is closed after this: who asks there asks and goes.
HEALTH_CONNECTION_S = 2.0
# The server's thread turns this often, and closes connections that are over their time.
HEALTH_TURN_S = 0.2
# After no descriptor was free for a connection.
HEALTH_ACCEPT_AGAIN_S = 0.05

# OpenTelemetry -----------------------------------------------------------------------------------

# Between two exports of a node's metrics by OTLP (OTEL_METRIC_EXPORT_INTERVAL): the default of
# OpenTelemetry's specification.
OTLP_EXPORT_S = 60.0
# An agent that ends waits so long for the last export, and as long again for the thread: a
# collector that hangs keeps no node from leaving.
OTLP_CLOSE_S = 2.0

# The command line --------------------------------------------------------------------------------

# Between two looks at the output of agents that `elastic run` and `elastic demo` have started.
CLI_POLL_S = 0.1
# How long fewer local agents may run than the job needs, after others have failed: they wait for
# nodes that nobody will start.
CLI_TOO_FEW_S = 5.0
# Each step of the demo takes this long, so that people can see it.
DEMO_STEP_S = 0.06
# The demo gives up after this, unless told otherwise: ten times as long as on an idle laptop.
DEMO_TIMEOUT_S = 300.0
# For a node of the demo to start and take part.
DEMO_PATIENCE_S = 180.0
# One call to Kubernetes' API server.
CLUSTER_CALL_S = 10.0
# For the API server to do it: longer than an upgrade of a control plane is away.
CLUSTER_PATIENCE_S = 600.0
# The first pause between two calls to an API server that failed, or to etcd by `elastic finish`.
CLUSTER_FIRST_BACKOFF_S = 0.5
# The longest pause between two calls to an API server, or to etcd by `elastic finish`.
CLUSTER_BACKOFF_CAP_S = 30.0
