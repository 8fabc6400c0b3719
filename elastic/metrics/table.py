"""Every metric: name, kind, labels and meaning. docs/metrics.md is generated from it.

Names follow Prometheus' conventions: base units, ``_total`` for counters. Every series also has the
labels of :data:`COMMON_LABELS`. No label holds a rank, a pid or a text of a user: each has few
values, listed here or bounded (:mod:`elastic.metrics.tally`). Counters whose values are listed
begin at 0: Prometheus does not see an ``increase`` of a series that did not exist before.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from elastic.failures.rules import Action
from elastic.hangs.verdict import HangAction, HangKind
from elastic.messages.world import Cause
from elastic.stragglers.facts import StepPart
from elastic.telemetry.activities import Activity


class MetricKind(str, Enum):
    """The metric types of Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    SUMMARY = "summary"  # count and sum, without quantiles
    HISTOGRAM = "histogram"


class MetricSource(str, Enum):
    """The nodes that export a metric."""

    AGENT = "every node"
    WORKERS = "every node whose workers have joined in-process"
    LEADER = "the leader"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series."""

    name: str
    kind: MetricKind
    source: MetricSource
    meaning: str
    labels: tuple[str, ...] = ()
    # The values of each label, in the same order; without them, any value.
    values: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    @property
    def initial_series(self) -> tuple[tuple[str, ...], ...]:
        """Label values of the series of a counter that exist from the beginning."""
        if self.labels and not self.values:
            return ()
        return tuple(itertools.product(*self.values))

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The metric names used in queries."""
        match self.kind:
            case MetricKind.SUMMARY:
                return f"{self.name}_count", f"{self.name}_sum"
            case MetricKind.HISTOGRAM:
                return f"{self.name}_bucket", f"{self.name}_count", f"{self.name}_sum"
        return (self.name,)


COMMON_LABELS: Final = ("run_id", "node")
# Upper bounds in seconds; on a good network etcd answers in a few milliseconds.
ETCD_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

PHASES: Final = ("leave", "wait", "paused", "build", "agree", "wrap")
ETCD_OPERATIONS: Final = (
    *("get", "list", "put", "swap", "delete", "connect", "ask", "grant", "look", "revoke"),
    "other",
)
# A counter cannot be corrected for discarded, delayed or unreported time.
_ONLY_IN_REPORTS = (
    Activity.STRAGGLING,
    Activity.RECOMPUTED,
    Activity.UNREPORTED,
    Activity.NO_NODES,
)
_CAUSES = tuple(cause.value for cause in Cause)
_GAUGE, _COUNTER = MetricKind.GAUGE, MetricKind.COUNTER
_SUMMARY, _HISTOGRAM = MetricKind.SUMMARY, MetricKind.HISTOGRAM
_AGENT, _WORKERS, _LEADER = MetricSource.AGENT, MetricSource.WORKERS, MetricSource.LEADER

# The world and this node's part in it.
BUILD_INFO = Metric(
    "elastic_build_info",
    _GAUGE,
    _AGENT,
    "Versions of torch-elastic-harness, torch and Python; always 1",
    ("version", "torch", "python"),
)
GENERATION = Metric(
    "elastic_generation", _GAUGE, _AGENT, "Generation of the newest world that this node knows"
)
WORLD_NODES = Metric("elastic_world_nodes", _GAUGE, _AGENT, "Nodes in that world")
WORLD_SIZE = Metric("elastic_world_size", _GAUGE, _AGENT, "Workers in that world")
MIN_NODES = Metric("elastic_min_nodes", _GAUGE, _AGENT, "Minimum number of nodes of the job")
MAX_NODES = Metric("elastic_max_nodes", _GAUGE, _AGENT, "Maximum number of nodes of the job")
WORLD_PAUSED = Metric(
    "elastic_world_paused", _GAUGE, _AGENT, "1 while the world has too few nodes to train, else 0"
)
IN_WORLD = Metric(
    "elastic_in_world", _GAUGE, _AGENT, "1 while this node's workers are in a world, else 0"
)
NODE_STATE = Metric(
    "elastic_node_state", _GAUGE, _AGENT, "1 for the state that this node is in, else 0", ("state",)
)
NODES = Metric("elastic_nodes", _GAUGE, _LEADER, "Nodes registered in etcd, by state", ("state",))
IS_LEADER = Metric("elastic_leader", _GAUGE, _AGENT, "1 on the node that leads the job, else 0")
JOB_ENDED = Metric(
    "elastic_job_ended",
    _GAUGE,
    _AGENT,
    "1 for the outcome of the job once it has ended, else 0",
    ("outcome",),
)

# Progress.
STEP = Metric(
    "elastic_step",
    _GAUGE,
    _WORKERS,
    "Committed steps last reported by this node's first worker; a recovery may decrease it",
)
STEPS_COMMITTED = Metric(
    "elastic_steps_committed_total",
    _COUNTER,
    _WORKERS,
    "Steps that this node's first worker has committed, repeated ones included",
)
STEP_SECONDS = Metric(
    "elastic_step_seconds",
    _SUMMARY,
    _WORKERS,
    "Time per committed step of this node's workers, including waits for data and saves",
)
WORKER_SECONDS = Metric(
    "elastic_worker_seconds_total",
    _COUNTER,
    _WORKERS,
    "Time of this node's workers by activity, as in `elastic report`",
    ("activity",),
    (tuple(activity.value for activity in Activity if activity not in _ONLY_IN_REPORTS),),
)

# Failures and recovery.
WORLDS_FORMED = Metric(
    "elastic_worlds_formed_total",
    _COUNTER,
    _LEADER,
    "Worlds agreed, by cause",
    ("cause",),
    (_CAUSES,),
)
RECOVERIES = Metric(
    "elastic_recoveries_total",
    _COUNTER,
    _WORKERS,
    "Changes of the world after which this node's workers continued without a restart, by cause",
    ("cause",),
    ((*_CAUSES, "unknown"),),
)
RECOVERY_SECONDS = Metric(
    "elastic_recovery_seconds_total",
    _COUNTER,
    _WORKERS,
    "Duration of these recoveries by phase, as reported by the first worker",
    ("phase",),
    (PHASES,),
)
FAILURES = Metric(
    "elastic_failures_total",
    _COUNTER,
    _LEADER,
    "Failures that ended a world, by the action of the verdict",
    ("action",),
    (tuple(action.value for action in Action),),
)
FAILURE_RULES = Metric(
    "elastic_failure_rules_total",
    _COUNTER,
    _LEADER,
    "The same failures by the rule that matched: docs/reference/failures.md",
    ("rule",),
)
WORKER_DEATHS = Metric(
    "elastic_worker_deaths_total", _COUNTER, _AGENT, "Worker processes that ended prematurely"
)
WORKERS_REPLACED = Metric(
    "elastic_workers_replaced_total",
    _COUNTER,
    _AGENT,
    "Dead workers replaced while the others of their node kept running",
)
NODES_LOST = Metric("elastic_nodes_lost_total", _COUNTER, _LEADER, "Nodes proved dead")
NODES_SUSPECTED = Metric(
    "elastic_nodes_suspected_total", _COUNTER, _LEADER, "Times that a node stopped answering"
)
HANGS = Metric(
    "elastic_hangs_total",
    _COUNTER,
    _AGENT,
    "Hangs found, by kind and by this node's action; `report` on nodes that only report the hang",
    ("kind", "action"),
    (
        tuple(kind.value for kind in HangKind if kind is not HangKind.NONE),
        ("report", *(a.value for a in HangAction if a is not HangAction.WAIT)),
    ),
)
STRAGGLERS = Metric(
    "elastic_stragglers_total",
    _COUNTER,
    _LEADER,
    "Ranks found to be stragglers, by cause",
    ("cause",),
    (tuple(part.label for part in StepPart),),
)

# Checkpoints.
CHECKPOINTS_COMMITTED = Metric(
    "elastic_checkpoints_committed_total",
    _COUNTER,
    _WORKERS,
    "Checkpoints committed, each once per node",
)
CHECKPOINTS_FAILED = Metric(
    "elastic_checkpoints_failed_total",
    _COUNTER,
    _WORKERS,
    "Checkpoints that could not be saved, completely or in part, or loaded, each once per node",
)
CHECKPOINT_SECONDS = Metric(
    "elastic_checkpoint_seconds",
    _SUMMARY,
    _WORKERS,
    "Time from the end of a step until its checkpoint was committed",
)
CHECKPOINT_STALL = Metric(
    "elastic_checkpoint_stall_seconds_total",
    _COUNTER,
    _WORKERS,
    "Time that this node's training waited for checkpoints, as reported by the first worker",
)
CHECKPOINT_BYTES = Metric(
    "elastic_checkpoint_bytes_total",
    _COUNTER,
    _WORKERS,
    "Bytes that this node's workers have written into committed checkpoints",
)
CHECKPOINT_STEP = Metric(
    "elastic_checkpoint_last_step", _GAUGE, _WORKERS, "Step of the last committed checkpoint"
)
CHECKPOINT_TIME = Metric(
    "elastic_checkpoint_last_timestamp_seconds",
    _GAUGE,
    _WORKERS,
    "When this node learned of the last committed checkpoint, in seconds since 1970",
)

# The agent, its workers and etcd.
HEARTBEAT_AGE = Metric(
    "elastic_heartbeat_age_seconds",
    _GAUGE,
    _WORKERS,
    "Time since the last report of the worker of this node that has been silent for longest",
)
AGENT_SILENCE = Metric(
    "elastic_agent_silence_seconds",
    _GAUGE,
    _AGENT,
    "Longest time since a thread of the agent last ran; /livez fails if it is too long",
)
ETCD_CONTACT_AGE = Metric(
    "elastic_etcd_contact_age_seconds", _GAUGE, _AGENT, "Time since etcd last answered"
)
ETCD_UP = Metric(
    "elastic_etcd_up", _GAUGE, _AGENT, "0 while this node's last request to etcd failed, else 1"
)
ETCD_REQUESTS = Metric(
    "elastic_etcd_request_seconds",
    _HISTOGRAM,
    _AGENT,
    "Duration of requests to etcd, retries included",
    ("operation",),
)
ETCD_ERRORS = Metric(
    "elastic_etcd_request_errors_total",
    _COUNTER,
    _AGENT,
    "Requests to etcd that failed after all retries",
    ("operation",),
    (ETCD_OPERATIONS,),
)
LEASES_LOST = Metric(
    "elastic_etcd_leases_lost_total", _COUNTER, _AGENT, "Leases of this node that expired in etcd"
)

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
