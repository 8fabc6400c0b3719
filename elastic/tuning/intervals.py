"""The intervals of a job that can be set, or that several modules share, and their relations.

Others are constants of the module that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# The fixed intervals that several modules share, each with its reason.
#
# Intervals that are options, or checked against each other, are in :class:`Timeouts`.
# docs/timeouts.md is generated from this file (scripts/timeouts_table.py): the comment above a
# constant is its reason there.

# etcd ------------------------------------------------------------------------------------------

# The leader writes the job's progress for `elastic status` at most this often: half a write per
# second and job.
PROGRESS_S = 2.0
# `elastic status` names nodes that were lost within this time.
RECENT_LOSS_S = 600.0
# When the dashboard ends, clients have this long to receive pending data.
DASHBOARD_DRAIN_S = 1.0
# One call to etcd, retries included.
STORE_CALL_S = 5.0
# An agent's first contact (connect_timeout_s): two calls, because etcd may be starting, too.
FIRST_CONTACT_S = 2 * STORE_CALL_S
# A watch that is silent for longer is checked.
STORE_SILENCE_S = 1.0

# The agent's threads ---------------------------------------------------------------------------

# Waits of the main thread are sliced: between two slices Python runs the handlers of signals.
MAIN_THREAD_SLICE_S = 0.2
# A node that waits for a world whose other members keep their workers polls the store this often,
# and so does one that waits for the nodes of the last world to leave in order, or to lead.
ASK_MEMBERS_S = 0.5
# After this long without the store, a node whose workers have succeeded leaves without waiting for
# the other nodes.
FINISH_WITHOUT_STORE_S = 30.0
# The node's thread runs at least once per second without messages: leases are longer.
NODE_IDLE_S = 1.0


# torchrun's side -------------------------------------------------------------------------------

# How long torch's own backends wait for more nodes once there are enough (torch 2.11 to 2.15:
# rendezvous/dynamic_rendezvous.py, RendezvousTimeout), which launching programs expect.
STOCK_LAST_CALL_S = 30.0
# The value in every configuration of torch/distributed/launcher/api.py.
TORCHRUN_TIMEOUT_S = 900

# Leadership and membership ---------------------------------------------------------------------

# Failures within this time count towards the failure budget (failure_window_s): with the default
# budget, one restart per minute.
FAILURE_WINDOW_S = 600.0
# A job that makes progress for this long after a failure is healthy, and its budget is reset
# (healthy_s).
HEALTHY_S = 60.0
# A node that fails repeatedly is excluded for this long each time (quarantine_s).
QUARANTINE_S = 60.0

# The embedded etcd (laptops and tests) -----------------------------------------------------------

# The default of etcd, for members on one machine or network.
EMBEDDED_HEARTBEAT_MS = 100

# Hangs ------------------------------------------------------------------------------------------

# A killed worker that still exists after this time is blocked in the kernel (a dead NFS server, a
# GPU driver), perhaps for good: the others continue without its node. Freeing the memory of a large
# process takes less.
HANG_KILL_S = 3.0

# Stragglers -------------------------------------------------------------------------------------

# A rank's step times are reported to the leader once per window (straggler_window_s), and three
# consecutive windows make a straggler. Detection is not urgent: a slow rank costs a fraction of
# each step, and a window of this length costs etcd one small write per node.
STRAGGLER_WINDOW_S = 10.0

# The command line --------------------------------------------------------------------------------

# How often the output of agents started by `elastic run` and `elastic demo` is read.
CLI_POLL_S = 0.1
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

# The lease of the keys that the checks write: they are removed even if this process is killed.
DOCTOR_LEASE_S = 10.0

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
# How long close() waits for an agent that does not read.
LINK_CLOSE_S = 0.5
# Waits of the main thread are sliced: between two slices Python runs the handlers of signals.
WORKER_SLICE_S = 0.2

# Telemetry ---------------------------------------------------------------------------------------

# Between two records of time spent (elastic/train/current.py): a rank writes about 250 KiB
# an hour, and a killed process loses at most this.
STEP_TIMES_S = 5.0

# The records of steps are summed up, and checked for anything due, this often: doing it in each
# step would cost more, because of cold caches.
STEP_SUMS_S = 0.1


# Ranks of a replica start together, but importing torch may take minutes on a busy machine.
REPLICA_MEETS_S = 300.0

# Meeting in a world's store ----------------------------------------------------------------------

# The longest of these pauses: with it, a thousand waiting ranks send 50,000 requests per second to
# the store.
SLOWEST_LOOK_S = 0.02


# The process group -------------------------------------------------------------------------------

# Collectives of an aborted group return within about 2 ms, if at all.
DRAIN_S = 0.05
# A rank that waits this long for a collective, and again after this, asks the world's store whether
# another rank has left the loop: a request of 0.1 ms, in steps that take longer.
LONG_WAIT_S = 0.5
# The shortest limit of a part of a build: torch treats a timeout of zero as unlimited, and
# live peers respond in milliseconds.
BUILD_MIN_S = 1.0

# Recovery ----------------------------------------------------------------------------------------

# A leaving worker checks this often whether its agent has released it.
LEAVE_SLICE_S = 0.2

# Checkpoints in training -------------------------------------------------------------------------

# To write a last share before the process ends: in process, the continuing peers wait for its end.
SHARE_S = 3.0
# Shards in the nodes' memory: a step begins once this rank's share of the previous save is written,
# or after this. Memory that takes longer is swapped out, or full.
MEMORY_WAIT_S = 30.0
# The owner of a folder renews its record this often.
OWNER_HEARTBEAT_S = 5.0
