"""The intervals of a job that can be set, or that several modules share, and their relations.

Others are constants of the module that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# The fixed intervals that several modules share, each with its reason.
#
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
# Of the options of an agent (elastic/tuning/options.py): defaults, and what follows from them.

# A silent node counts as alive for this long; etcd grants no less than about 2 s.
LEASE_S = 4.0
# How long a suspected node may take to answer a probe; below lease_s.
PROBE_S = 0.3
# After this long a world may form without proof that the last one is dead; above four leases.
TAKEOVER_S = 300.0
# How long to wait for more nodes once the minimum has arrived.
LAST_CALL_S = 3.0
# Nodes that join a running job within this window, or last_call_s if that is less, are admitted
# together.
JOIN_WINDOW_S = 1.0
# How long to wait for the minimum of nodes before the job ends.
JOIN_TIMEOUT_S = 600.0
# From SIGTERM to SIGKILL of this node: Kubernetes' default.
TERMINATION_GRACE_S = 30.0
# A rank without a sign of progress for this long inside a step, or for a multiple of its recent
# durations, hangs if others wait for it (elastic/hangs/page.py).
HANG_TIMEOUT_S = 3.5
# The same outside of a step, for evaluations and checkpoints.
HANG_SCRIPT_TIMEOUT_S = 900.0
# A collective fails after this long, whichever rank is missing: the process group's timeout. It
# is the fallback of hang detection, so by default at least twice hang_script_timeout_s, and
# long enough for an evaluation on one rank.
COLLECTIVE_TIMEOUT_S = 1800.0

# Leaving, and NCCL ------------------------------------------------------------------------------
# For the agent to end: the others continue without it (2 s), one call to a silent etcd (5 s), the
# end of the orphan reaper and of the interpreter (3 s).
EXIT_GRACE_S = 10.0
# A planned change waits at most this long for the duration of a step (agent/leader.py), and is
# then announced two steps ahead, in the middle of a third.
ANNOUNCE_S = 1.0
STEPS_TO_BOUNDARY = 3
# From SIGTERM until the workers have left their last step, if a step takes a second.
BOUNDARY_S = ANNOUNCE_S + STEPS_TO_BOUNDARY * 1.0
# The shortest useful checkpoint budget: an fsync on shared storage takes that long.
MIN_CHECKPOINT_S = 1.0
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
LEASES_TO_TAKEOVER = 4.0
# A TCP connection is given up when the other machine has acknowledged nothing for this many leases:
# later than the lease of a lost machine, which is stronger evidence, and soon enough for a single
# broken connection. Raising lease_s to tolerate gaps in the network raises both.
_LEASES_TO_SILENCE = 1.5
# Share of takeover_s after the last renewal of a node's lease for which its workers may train
# without another message from their agent. An agent without contact to etcd ends them at three
# quarters (agent/service.py); the rest is a margin for the current step, and for clocks of unequal
# speed.
_PERMISSION_SHARE = 7 / 8


# The time of a leaving node, from SIGTERM to SIGKILL::
#
#     0           BOUNDARY_S                        leave_grace_s              termination_grace_s
#     │ SIGTERM      │ step done, the others informed      │ remaining processes      │ SIGKILL
#     ├──────────────┼─────────────────────────────────────┼──────────────────────────┤
#     │ finish step  │ checkpoint_budget_s: the last save  │ EXIT_GRACE_S: agent's end  │
#
# torchrun gives a script without elastic.join() ``--shutdown-timeout`` from its SIGTERM on: the
# same time as leave_grace_s.


def leave_grace_s(termination_grace_s: float) -> float:
    """From SIGTERM until a leaving node's workers have ended, in whole seconds, as torchrun takes.

    Raises:
        ConfigError: there is no time left for a checkpoint.

    >>> leave_grace_s(60), checkpoint_budget_s(60)
    (50.0, 46.0)
    """
    require_positive("termination_grace_s", termination_grace_s)
    grace_s = float(math.floor(termination_grace_s - EXIT_GRACE_S))
    if grace_s < BOUNDARY_S + MIN_CHECKPOINT_S:
        raise ConfigError(
            f"termination_grace_s={termination_grace_s:g} leaves no time for a checkpoint: the "
            f"workers need {BOUNDARY_S:g} s to leave a step, and the agent {EXIT_GRACE_S:g} s to "
            "end",
            hint="set terminationGracePeriodSeconds to "
            f"{math.ceil(BOUNDARY_S + MIN_CHECKPOINT_S + EXIT_GRACE_S)} or more",
        )
    return grace_s


def checkpoint_budget_s(termination_grace_s: float) -> float:
    """For the last checkpoint of a leaving node, after the boundary of a step."""
    return leave_grace_s(termination_grace_s) - BOUNDARY_S


def termination_grace_of(environ: Mapping[str, str]) -> float:
    """The grace period of this process's node; the default if none is set.

    Raises:
        ConfigError: it is not a number.
    """
    return _seconds_of(environ, "ELASTIC_TERMINATION_GRACE_S", TERMINATION_GRACE_S)


def collective_for(hang_script_timeout_s: float) -> float:
    """The process group's timeout that leaves a rank this much time outside of a step.

    >>> collective_for(60), collective_for(7200.0)
    (1800.0, 14400.0)
    """
    return max(COLLECTIVE_TIMEOUT_S, 2 * hang_script_timeout_s)


def collective_of_environment(environ: Mapping[str, str]) -> float:
    """The process group's timeout that this worker's agent has set; the default without one.

    Raises:
        ConfigError: it is not a number above zero.
    """
    return _seconds_of(environ, "ELASTIC_COLLECTIVE_TIMEOUT_S", COLLECTIVE_TIMEOUT_S)


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
    return _seconds_of(environ, PEER_SILENCE, peer_silence_s(LEASE_S))


def _seconds_of(environ: Mapping[str, str], variable: str, default: float) -> float:
    """A time that the agent passes to its workers."""
    text = environ.get(variable)
    if text is None:
        return default
    try:
        value_s = float(text)
    except ValueError:
        value_s = math.nan
    if not (math.isfinite(value_s) and value_s > 0):
        raise ConfigError(
            f"{variable}={text!r} is not a number of seconds above zero",
            hint="unset it, or set a number of seconds",
        )
    return value_s


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
REPLICA_RENDEZVOUS_S = 300.0

# Rendezvous in a world's store -------------------------------------------------------------------

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
