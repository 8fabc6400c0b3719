"""Every interval of a job, derived from a few numbers and checked against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# The fixed intervals of agents, their store and the command line, each with its reason.
#
# Intervals that are options, or checked against each other, are in :class:`Timeouts`.
# docs/timeouts.md is generated from this file (scripts/timeouts_table.py): the comment above a
# constant is its reason there.

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


# ----------------------------------------------------------------------------
# The fixed intervals and thresholds of ``elastic doctor``'s checks, each with its reason.
#
# They do not affect jobs: they limit an examination, and separate good measurements from bad ones.
# docs/timeouts.md is generated from this file, too (scripts/timeouts_table.py).

# Elastic doctor: limits of one check -----------------------------------------------------------

# One collective, or one probe of the machine, may be silent this long (--deadline). The slowest
# one, the first NCCL collective of a process, takes several seconds.
DOCTOR_DEADLINE_S = 20.0
# How long the nodes wait for each other (--join-timeout): a script or a person starts them.
DOCTOR_JOIN_S = 60.0
# Rank processes start: the import of torch on a busy machine.
DOCTOR_START_S = 120.0
# After one rank has failed the others cannot succeed; they may still report their operation.
DOCTOR_OTHER_RANKS_S = 2.0
# A rank process that has closed its output ends, or is killed.
DOCTOR_END_S = 2.0
# The ranks of one node may finish at once while those of another wait for their deadline.
DOCTOR_EXCHANGE_MARGIN_S = 15.0
# A result that has arrived is used even at its deadline: the shortest wait for one.
DOCTOR_MIN_WAIT_S = 0.01
# How long a probe's process is waited for after its SIGKILL: one in a hung system call never ends.
DOCTOR_KILLED_S = 0.2
# The servers of the checks between nodes check this often whether to end.
DOCTOR_SERVER_TURN_S = 0.05
# Polling interval for the output of ranks that mpirun has started.
DOCTOR_MPI_POLL_S = 0.1
# A message size whose round trip takes longer ends the series of measurements.
DOCTOR_SLOW_ROUND_TRIP_S = 2.0
# The raw TCP stream between two ranks, for the comparison with torch: both are about to connect.
DOCTOR_RAW_CONNECT_S = 10.0
# A TCP connection to a port of another node: three SYN packets (at 0, 1 and 3 s) on a lossy
# network.
DOCTOR_PAIR_CONNECT_S = 3.0
# Data is sent to each address of another node for this long: enough for TCP to reach its speed.
DOCTOR_BANDWIDTH_S = 0.3
# First contact with etcd. One call of an agent has the same limit (STORE_CALL_S).
DOCTOR_ETCD_CONNECT_S = 5.0
# One call to etcd, and the first event of a watch.
DOCTOR_ETCD_CALL_S = 5.0
# The lease of the keys that the checks write: they are removed even if this process is killed.
DOCTOR_LEASE_S = 10.0
# The probes of the preflight, which an agent runs before it joins, while it starts.
PREFLIGHT_PROBES_S = 10.0
# A connection of the preflight to a port of the leader: one repeated SYN.
PREFLIGHT_CONNECT_S = 1.5

# Elastic doctor: thresholds --------------------------------------------------------------------

# Above this median, etcd's disk or network is slow: etcd recommends 10 ms for an fsync.
SLOW_ETCD_MS = 100.0
# Above this median, renewals of a lease of 4 s, due every third of it, are late.
TOO_SLOW_ETCD_MS = 1000.0
# A certificate that expires sooner is reported: two weeks are enough to issue another one.
CERTIFICATE_WARNING_S = 14 * 86400.0
# A slower fsync of a small file in the checkpoint folder delays every commit.
SLOW_FSYNC_MS = 500.0
# Larger clock differences make logs of several nodes hard to read, and certificates invalid.
CLOCK_SKEW_WARNING_S = 1.0


# ----------------------------------------------------------------------------
# Every interval of a job in one place, derived from a few numbers and checked against each other.
#
# Intervals that are set independently eventually contradict each other: a lease that is longer
# than the takeover, a last checkpoint that the kubelet interrupts. :class:`Timeouts` refuses such
# sets, with both values and the remedy.
#
# The time of a leaving node, from SIGTERM to SIGKILL::
#
#     0           boundary_s                        shutdown_timeout_s          termination_grace_s
#     │ SIGTERM      │ step done, the others informed      │ remaining processes      │ SIGKILL
#     ├──────────────┼─────────────────────────────────────┼──────────────────────────┤
#     │ finish step  │ checkpoint_budget_s: the last save  │ exit_grace_s: agent's end  │
#
# A job with ``elastic.join()`` uses the first two parts in order (``leave_grace_s``); torchrun
# gives any other script ``--shutdown-timeout`` from its SIGTERM on. No job does both, so both have
# the same value.

# Leaving, and NCCL ------------------------------------------------------------------------------
# For the agent to end: the others continue without it (2 s), one call to a silent etcd (5 s), the
# end of the orphan reaper and of the interpreter (3 s).
EXIT_GRACE_S = 10.0
# A planned change waits at most this long for the duration of a step (agent/leader.py), and is
# then announced two steps ahead, in the middle of a third.
ANNOUNCE_S = 1.0
STEPS_TO_BOUNDARY = 3
# The shortest useful checkpoint budget: an fsync on shared storage takes that long.
MIN_CHECKPOINT_S = 1.0
# Torch gives stopped workers 30 s, and waits as long again after SIGKILL
# (elastic/multiprocessing/api.py, 2.11 to 2.15); its main thread does nothing else in the meantime,
# but is not hung.
TORCH_STOPS_WORKERS_S = 60.0
# An abort of NCCL's communicators takes milliseconds, or hangs. Training stops while a worker waits
# for it, and a restart of the worker costs about as long as this.
ABORT_S = 10.0
# For an abandoned build of a group, whose NCCL operations cannot be aborted.
GIVEN_UP_BUILD_S = 10.0
# For an orderly destruction of communicators, which requires all peers.
DESTROY_S = 30.0
# An agent checks its workers this often, which costs it 0.1 % of a core.
HANG_TICK_S = 0.2
# A worker in state T counts as stopped after this, or half of hang_timeout_s if that is less.
STOP_GRACE_S = 1.0
# With a shorter timeout, a rank that waits for a core on a busy machine would be considered hung.
MIN_HANG_TIMEOUT_S = 0.5
# The variable that passes peer_silence_s to workers.
PEER_SILENCE = "ELASTIC_PEER_SILENCE_S"
_LEASES_TO_TAKEOVER = 4.0
# A TCP connection is given up when the other machine has acknowledged nothing for this many leases:
# later than the lease of a lost machine, which is stronger evidence, and soon enough for a single
# broken connection. Raising lease_s to tolerate gaps in the network raises both.
_LEASES_TO_SILENCE = 1.5
# Share of takeover_s after the last renewal of a node's lease for which its workers may train
# without another message from their agent. An agent without contact to etcd ends them at three
# quarters (agent/service.py); the rest is a margin for the current step, and for clocks of unequal
# speed.
_PERMISSION_SHARE = 7 / 8


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """A consistent set of intervals, in seconds.

    Raises:
        ConfigError: two of them contradict each other; the message names both, the hint a remedy.
    """

    # How long a suspected node may take to answer a probe; below lease_s.
    probe_s: float = 0.3
    # A silent node counts as alive for this long; etcd grants no less than about 2 s.
    lease_s: float = 4.0
    # After this long a world may form without proof that the last one is dead; above four leases.
    takeover_s: float = 300.0

    # How long to wait for more nodes once the minimum has arrived.
    last_call_s: float = 3.0
    # Nodes that join a running job within this window are admitted together.
    join_window_s: float = 1.0
    # How long to wait for the minimum of nodes before the job ends.
    join_timeout_s: float = 600.0

    # The slowest step to plan for when a node leaves.
    step_time_s: float = 1.0
    # For the last checkpoint: the rest of shutdown_timeout_s after the boundary of a step.
    checkpoint_budget_s: float = 16.0
    # A leaving node ends by then: termination_grace_s less the agent's own end.
    leave_grace_s: float = 20.0
    # The --shutdown-timeout of torchrun: the same as leave_grace_s.
    shutdown_timeout_s: float = 20.0
    # From SIGTERM to SIGKILL of a pod; Kubernetes' default is 30 s.
    termination_grace_s: float = 30.0

    # A rank without a sign of progress for this long inside a step, or for a multiple of its recent
    # durations, hangs if others wait for it (elastic/hangs/page.py).
    hang_timeout_s: float = 3.5
    # The same outside of a step, for evaluations and checkpoints.
    hang_script_timeout_s: float = 900.0
    # A collective fails after this long, whichever rank is missing: the process group's timeout. It
    # is the fallback of hang detection, so by default at least twice hang_script_timeout_s, and
    # long enough for an evaluation on one rank.
    collective_timeout_s: float = 1800.0

    # An agent's thread without progress for this long is hung: longer than torch may block its main
    # thread while it stops workers.
    hung_after_s: float = 1.5 * TORCH_STOPS_WORKERS_S

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            require_positive(name, getattr(self, name))
        require_below("probe_s", self.probe_s, "lease_s", self.lease_s)
        require_below(
            "lease_s", self.lease_s, "takeover_s", self.takeover_s, factor=_LEASES_TO_TAKEOVER
        )
        require_below("last_call_s", self.last_call_s, "join_timeout_s", self.join_timeout_s)
        require_below("join_window_s", self.join_window_s, "join_timeout_s", self.join_timeout_s)
        _require_order_of_leaving(self)
        if self.hang_timeout_s < MIN_HANG_TIMEOUT_S:
            raise ConfigError(
                f"hang_timeout_s={self.hang_timeout_s:g} is below {MIN_HANG_TIMEOUT_S:g}: a rank "
                "that only waits for a core would be considered hung",
                hint=where_to_set("hang_timeout_s"),
            )
        require_below(
            "hang_timeout_s",
            self.hang_timeout_s,
            "hang_script_timeout_s",
            self.hang_script_timeout_s,
        )

    def require_hangs_before_collectives(self) -> None:
        """Raise ConfigError unless a hang is detected before collectives fail because of it.

        Irrelevant unless hangs are acted upon.
        """
        require_below(
            "hang_script_timeout_s",
            self.hang_script_timeout_s,
            "collective_timeout_s",
            self.collective_timeout_s,
        )

    @property
    def boundary_s(self) -> float:
        """From SIGTERM until the workers have left their last step."""
        return boundary_s(self.step_time_s)


def for_pod(termination_grace_s: float, *, step_time_s: float = 1.0) -> Timeouts:
    """The intervals of a pod with this ``terminationGracePeriodSeconds``.

    Raises:
        ConfigError: there is no time left for a checkpoint.

    >>> times = for_pod(60)
    >>> times.checkpoint_budget_s, times.shutdown_timeout_s, times.termination_grace_s
    (46.0, 50.0, 60.0)
    """
    require_positive("termination_grace_s", termination_grace_s)
    require_positive("step_time_s", step_time_s)
    shutdown_s = float(
        math.floor(termination_grace_s - EXIT_GRACE_S)
    )  # torchrun takes whole seconds
    checkpoint_s = shutdown_s - boundary_s(step_time_s)
    if checkpoint_s < MIN_CHECKPOINT_S:
        least = grace_for(MIN_CHECKPOINT_S, step_time_s=step_time_s)
        raise ConfigError(
            f"termination_grace_s={termination_grace_s:g} leaves no time for a checkpoint: with "
            f"step_time_s={step_time_s:g} the workers need {boundary_s(step_time_s):g} s to leave "
            f"a step, and the agent {EXIT_GRACE_S:g} s to end",
            hint=f"set terminationGracePeriodSeconds to {least} or more",
        )
    return Timeouts(
        step_time_s=step_time_s,
        checkpoint_budget_s=checkpoint_s,
        leave_grace_s=shutdown_s,
        shutdown_timeout_s=shutdown_s,
        termination_grace_s=float(termination_grace_s),
    )


def grace_for(checkpoint_budget_s: float, *, step_time_s: float = 1.0) -> int:
    """The least ``terminationGracePeriodSeconds`` that leaves a checkpoint this much time.

    >>> grace_for(46)
    60
    """
    require_positive("checkpoint_budget_s", checkpoint_budget_s)
    return math.ceil(checkpoint_budget_s + boundary_s(step_time_s)) + math.ceil(EXIT_GRACE_S)


def of_environment(environ: Mapping[str, str]) -> Timeouts:
    """The intervals that this process's agent uses in its pod; the defaults without a pod.

    Raises:
        ConfigError: the grace period of the pod is invalid.
    """
    text = environ.get("ELASTIC_TERMINATION_GRACE_S")
    if text is None:
        return Timeouts()
    try:
        grace_s = float(text)
    except ValueError:
        raise ConfigError(
            f"ELASTIC_TERMINATION_GRACE_S={text!r} is not a number",
            hint="set it to the pod's terminationGracePeriodSeconds",
        ) from None
    return for_pod(grace_s)


def collective_for(hang_script_timeout_s: float) -> float:
    """The process group's timeout that leaves a rank this much time outside of a step.

    >>> collective_for(60), collective_for(7200.0)
    (1800.0, 14400.0)
    """
    return max(Timeouts.collective_timeout_s, 2 * hang_script_timeout_s)


def collective_of_environment(environ: Mapping[str, str]) -> float:
    """The process group's timeout that this worker's agent has set; the default without one.

    Raises:
        ConfigError: it is not a number above zero.
    """
    text = environ.get("ELASTIC_COLLECTIVE_TIMEOUT_S")
    if text is None:
        return Timeouts.collective_timeout_s
    try:
        timeout_s = float(text)
    except ValueError:
        raise ConfigError(
            f"ELASTIC_COLLECTIVE_TIMEOUT_S={text!r} is not a number",
            hint="set a number of seconds, or unset it",
        ) from None
    require_positive("collective_timeout_s", timeout_s)
    return timeout_s


def permission_s(takeover_s: float) -> float:
    """From the last renewal of a node's lease to the end of its workers' permission to train."""
    return takeover_s * _PERMISSION_SHARE


def peer_silence_s(lease_s: float) -> float:
    """How long a peer's machine may acknowledge nothing before a connection to it is given up.

    >>> peer_silence_s(4.0)
    6.0
    """
    return lease_s * _LEASES_TO_SILENCE


def peer_silence_of(environ: Mapping[str, str]) -> float:
    """The value that this worker's agent uses; the default without an agent.

    Raises:
        ConfigError: the variable has an invalid value.
    """
    text = environ.get(PEER_SILENCE)
    if text is None:
        return peer_silence_s(Timeouts.lease_s)
    try:
        silence_s = float(text)
    except ValueError:
        silence_s = math.nan
    if not (math.isfinite(silence_s) and silence_s > 0):
        raise ConfigError(
            f"{PEER_SILENCE}={text!r} is not a number of seconds above zero",
            hint="unset it: the agent derives it from lease_s",
        )
    return silence_s


def boundary_s(step_time_s: float) -> float:
    """From SIGTERM until the workers have left their last step."""
    return ANNOUNCE_S + STEPS_TO_BOUNDARY * step_time_s


def require_positive(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a finite number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value} must be a number above zero", hint=where_to_set(name))


def require_below(low: str, low_s: float, high: str, high_s: float, *, factor: float = 1.0) -> None:
    """Raise ConfigError unless ``factor`` times ``low`` is below ``high``."""
    if low_s * factor >= high_s:
        times = f"{factor:g} times " if factor != 1 else ""
        raise ConfigError(
            f"{low}={low_s:g} and {high}={high_s:g} are incompatible: {high} must be above "
            f"{times}{low}",
            hint=f"raise {high} or lower {low} in --rdzv-conf or the environment",
        )


def where_to_set(name: str) -> str:
    """How a user sets an option."""
    return f"set it with --rdzv-conf={name}=... or ELASTIC_{name.upper()}"


def _require_order_of_leaving(times: Timeouts) -> None:
    """The save ends before its process is killed, and the process before the pod is."""
    for limit, limit_s in (
        ("leave_grace_s", times.leave_grace_s),
        ("shutdown_timeout_s", times.shutdown_timeout_s),
    ):
        if times.checkpoint_budget_s + times.boundary_s > limit_s:
            raise ConfigError(
                f"checkpoint_budget_s={times.checkpoint_budget_s:g} and {limit}={limit_s:g} are "
                f"incompatible: after SIGTERM the workers need {times.boundary_s:g} s to leave "
                "their step before they save",
                hint=f"raise {limit} to {times.checkpoint_budget_s + times.boundary_s:g}, or save "
                "faster",
            )
        require_end_before_kill(limit, limit_s, times.termination_grace_s)


def require_end_before_kill(limit: str, limit_s: float, termination_grace_s: float) -> None:
    """Raise ConfigError unless an agent whose workers end after ``limit_s`` ends before SIGKILL."""
    if limit_s + EXIT_GRACE_S > termination_grace_s:
        raise ConfigError(
            f"{limit}={limit_s:g} and termination_grace_s={termination_grace_s:g} are "
            f"incompatible: the agent needs {EXIT_GRACE_S:g} s more after its workers have ended",
            hint="set terminationGracePeriodSeconds to "
            f"{math.ceil(limit_s + EXIT_GRACE_S)} or more, or lower {limit}",
        )


# ----------------------------------------------------------------------------
# The fixed intervals of workers, each with its reason.
#
# As above: the comment above a constant is its reason in docs/timeouts.md.

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
# A worker asks for the job's working folder again: etcd may not have answered its agent.
FOLDER_ASK_S = 1.0
# Polling interval for a newer world where the thread that receives it cannot be woken.
WORLD_LOOK_S = 0.005

# Telemetry ---------------------------------------------------------------------------------------

# Between two records of time spent (elastic/train/current.py): a rank writes about 250 KiB
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
# A read that fails transiently while a job restores its state is repeated for this long: a network
# file system that fails over is back within a minute, and an older checkpoint costs more.
RESTORE_PATIENCE_S = 60.0
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
