"""The metrics of one node: what is counted, read and accounted, and their table."""

from __future__ import annotations

import itertools
import math
import platform
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from elastic.agent.node import NodeStatus
from elastic.errors import Clock
from elastic.hangs.page import StepPart
from elastic.hangs.verdict import HangAction, HangKind
from elastic.membership.failures import Action
from elastic.membership.records import NodeState, Outcome, WorldRecord
from elastic.telemetry.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Event,
    FailureJudged,
    HangFound,
    LeaseLost,
    NodeLost,
    NodeSuspected,
    RankTimes,
    Recovered,
    StragglerFound,
    WorkerDied,
    WorkerReplaced,
    WorkersStarting,
    WorldFormed,
)
from elastic.telemetry.goodput import LAPS, Activity
from elastic.wire.messages import Cause, WorldState

# ----------------------------------------------------------------------------
# Every metric: name, kind, labels and meaning. docs/metrics.md is generated from it.
#
# Names follow Prometheus' conventions: base units, ``_total`` for counters. Every series also has
# the labels of :data:`COMMON_LABELS`. No label holds a rank, a pid or a text of a user: each has
# few values, listed here or bounded. Counters whose values are
# listed begin at 0: Prometheus does not see an ``increase`` of a series that did not exist before.


class MetricKind(str, Enum):
    """The metric types of Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    SUMMARY = "summary"  # count and sum, without quantiles
    HISTOGRAM = "histogram"


class MetricSource(str, Enum):
    """The nodes that export a metric."""

    AGENT = "every node"
    WORKERS = "every node whose workers have called elastic.join()"
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
JOB_STOPPED = Metric(
    "elastic_job_stopped",
    _GAUGE,
    _AGENT,
    "1 from `elastic stop` to `elastic resume` or the job's end, else 0",
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


# ----------------------------------------------------------------------------
# Counts by metric and labels. Written by any thread, read without a lock.
#
# A scrape must be answered while another thread hangs (elastic/agent/health.py), so readers
# take copies, which the interpreter makes atomically; only writers take the lock. Label values can
# come from users or another version: each is sanitized and shortened, and a metric has at most
# :data:`MAX_SERIES` sets of labels on one node. Further ones are counted as ``other``.

MAX_SERIES = 64
OTHER = "other"
_LONGEST_VALUE = 100

Labels = tuple[str, ...]  # values, in the order of the metric's label names


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observations: count, sum, and count per bucket, the last one unbounded."""

    count: float = 0.0
    total: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(ETCD_BUCKETS) + 1)


class Tally:
    """The tally. One per agent."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may count, too, and interrupt its own thread here.
        self._lock = threading.RLock()
        self._counts: dict[tuple[Metric, Labels], float] = {}
        self._distributions: dict[tuple[Metric, Labels], Distribution] = {}
        self._series: Counter[Metric] = Counter()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter, which never decreases: an amount that is not positive is ignored."""
        if not (math.isfinite(amount) and amount >= 0):
            return
        with self._lock:
            key = self._key(metric, labels, self._counts)
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def observe(self, metric: Metric, value: float, *, times: int = 1, **labels: str) -> None:
        """``value`` is the sum of ``times`` observations (of one, for a histogram)."""
        if not (math.isfinite(value) and value >= 0 and times >= 0):
            return
        with self._lock:
            key = self._key(metric, labels, self._distributions)
            before = self._distributions.get(key, Distribution())
            buckets = list(before.buckets)
            buckets[bisect_left(ETCD_BUCKETS, value)] += times
            # A new object, so that readers see a complete observation or none of it.
            self._distributions[key] = Distribution(
                before.count + times, before.total + value, tuple(buckets)
            )

    def counts(self) -> Mapping[tuple[Metric, Labels], float]:
        """As of now. Takes no lock."""
        return self._counts.copy()

    def distributions(self) -> Mapping[tuple[Metric, Labels], Distribution]:
        """As of now. Takes no lock."""
        return self._distributions.copy()

    def _key(
        self,
        metric: Metric,
        labels: Mapping[str, str],
        known: Mapping[tuple[Metric, Labels], object],
    ) -> tuple[Metric, Labels]:
        key = metric, tuple(label_value(labels[name]) for name in metric.labels)
        if key not in known:
            if self._series[metric] >= MAX_SERIES:
                return metric, (OTHER,) * len(metric.labels)
            self._series[metric] += 1
        return key


def label_value(text: str) -> str:
    """A label value that is printable, valid Unicode and of bounded length.

    >>> label_value("a\\x1b[31m\\ud800b")
    'a?[31m?b'
    """
    cut = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in cut)


# ----------------------------------------------------------------------------
# Time of a node's workers by activity: approximate counters; `elastic report` is exact.
#
# ``elastic report`` reads complete journals, and knows afterwards which steps were discarded and
# which world a window began in. A counter cannot be corrected: repeated steps stay productive
# here, and unreported time of a killed worker is missing.

_WHOLLY = (
    ("data_s", Activity.DATA),
    ("checkpoint_s", Activity.CHECKPOINT),
    ("evaluation_s", Activity.EVALUATION),
)


class ActivitySeconds:
    """The activity counters of one node. Called on one thread."""

    def __init__(self, tally: Tally, clock: Clock) -> None:
        self._tally = tally
        self._clock = clock
        self._started_s: float | None = None  # when workers were last started
        self._seen: set[int] = set()  # pids whose start-up was counted
        self._first_steps: dict[int, tuple[float, int]] = {}  # by pid: time in them, and how many

    def workers_start(self) -> None:
        """Record a start of workers: time until their first step is start-up."""
        self._started_s = self._clock.monotonic()

    def on_times(self, pid: int, times: RankTimes) -> None:
        """Record a window of a worker that ends now."""
        if pid not in self._seen:
            self._seen.add(pid)
            if self._started_s is not None:
                began_s = self._clock.monotonic() - times.duration_s
                self._add(Activity.STARTUP, began_s - self._started_s)
        for name, activity in _WHOLLY:
            self._add(activity, getattr(times, name))
        # A window that ends with a fault has an unfinished step, and the time until that
        # was detected.
        ended_by_fault = times.ended == "fault"
        self._add(Activity.DETECTION if ended_by_fault else Activity.SHUTDOWN, times.open_s)
        if times.ended == "first-step":
            self._first_steps[pid] = times.productive_s, times.steps
            return
        self._split_first(pid, times)
        self._add(Activity.PRODUCTIVE, times.productive_s)

    def _split_first(self, pid: int, usual: RankTimes) -> None:
        """Count the first step in a world as productive for the usual duration of a step."""
        first_s, steps = self._first_steps.pop(pid, (0.0, 0))
        step_s = usual.productive_s / usual.steps if usual.steps else 0.0
        productive_s = min(first_s, step_s * steps)
        self._add(Activity.PRODUCTIVE, productive_s)
        self._add(Activity.FIRST_STEP, first_s - productive_s)

    def on_recovered(self, event: Recovered) -> None:
        """Record that a worker continues after a change of the world."""
        for name, activity in LAPS:
            self._add(activity, getattr(event, name))

    def forget(self, pid: int) -> None:
        """Forget a worker that has ended."""
        first_s, _ = self._first_steps.pop(pid, (0.0, 0))
        self._add(Activity.FIRST_STEP, first_s)
        self._seen.discard(pid)

    def _add(self, activity: Activity, seconds: float) -> None:
        if seconds > 0:
            self._tally.add(WORKER_SECONDS, seconds, activity=activity.value)


# ----------------------------------------------------------------------------
# Counts events and messages of workers for metrics. No I/O; never blocks.
#
# Workers send their agent a few of their events (:data:`elastic.link.link.COUNTED`), one every
# few seconds and one for each checkpoint and recovery. An event seen by all workers of a node,
# such as a checkpoint, counts once per node.

_REMEMBERED_NAMES = 64  # of checkpoints: a worker may report a commit long after the others


class NodeMetrics:
    """The counters of one agent."""

    def __init__(
        self,
        clock: Clock,
        *,
        collects_worker_events: bool = False,
        listener: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """``collects_worker_events``: whether workers send their counted events. ``listener``
        receives recoveries and checkpoints, once per node."""
        self.tally = Tally()
        self._listener = listener
        self.collects_worker_events = collects_worker_events
        self._clock = clock
        self._activities = ActivitySeconds(self.tally, clock)
        self._heard_s: dict[int, float] = {}  # time of the last message, by pid
        self._recovered = 0  # the newest generation whose recovery was counted
        self._committed: deque[str] = deque(maxlen=_REMEMBERED_NAMES)
        self._failed: deque[str] = deque(maxlen=_REMEMBERED_NAMES)
        self.last_checkpoint: tuple[int, float] | None = None  # its step, and when it was reported

    @property
    def heartbeat_age_s(self) -> float | None:
        """Time since the last message of the worker that has been silent for longest; None without
        workers. Lock-free."""
        heard = self._heard_s.copy()
        return self._clock.monotonic() - min(heard.values()) if heard else None

    def on_event(self, event: Event) -> None:
        """Count an event of the agent."""
        add = self.tally.add
        match event:
            case WorldFormed(cause=cause):
                add(WORLDS_FORMED, cause=cause)
            case FailureJudged(rule=rule, action=action):
                add(FAILURES, action=action)
                add(FAILURE_RULES, rule=rule)
            case WorkersStarting():
                self._activities.workers_start()
            case WorkerDied():
                add(WORKER_DEATHS)
            case WorkerReplaced():
                add(WORKERS_REPLACED)
            case NodeLost():
                add(NODES_LOST)
            case NodeSuspected():
                add(NODES_SUSPECTED)
            case HangFound(kind=kind, action=action):
                add(HANGS, kind=kind, action=action)
            case StragglerFound(cause=cause):
                add(STRAGGLERS, cause=cause)
            case LeaseLost():
                add(LEASES_LOST)

    def on_etcd_call(self, what: str, seconds: float, is_error: bool) -> None:
        """Count a finished request to etcd. ``what`` begins with its kind: ``put /elastic/…``."""
        kind = what.partition(" ")[0]
        operation = kind if kind in ETCD_OPERATIONS else "other"
        self.tally.observe(ETCD_REQUESTS, seconds, operation=operation)
        if is_error:
            self.tally.add(ETCD_ERRORS, operation=operation)

    def on_worker_message(
        self, pid: int, local_rank: int, message: object, world: WorldRecord | None
    ) -> None:
        """Count a message of a worker. ``world``: the newest known one."""
        self._heard_s[pid] = self._clock.monotonic()
        match message:
            case RankTimes():
                self._on_times(pid, local_rank, message)
            case Recovered():
                self._on_recovered(message, world)
            case CheckpointSaved():
                self._on_saved(message)
            case CheckpointSkipped(name=name):
                if name not in self._failed:
                    self._failed.append(name)
                    self.tally.add(CHECKPOINTS_FAILED)

    def on_worker_ended(self, pid: int) -> None:
        """Forget a worker that has ended."""
        self._heard_s.pop(pid, None)
        self._activities.forget(pid)

    def _on_times(self, pid: int, local_rank: int, times: RankTimes) -> None:
        if local_rank == 0:
            self.tally.add(STEPS_COMMITTED, times.steps)
        in_steps_s = times.productive_s + times.data_s + times.checkpoint_s
        self.tally.observe(STEP_SECONDS, in_steps_s, times=times.steps)
        self._activities.on_times(pid, times)

    def _on_recovered(self, event: Recovered, world: WorldRecord | None) -> None:
        self._activities.on_recovered(event)
        if event.generation <= self._recovered:
            return
        self._recovered = event.generation
        is_known = world is not None and world.generation == event.generation
        cause = world.cause.value if world is not None and is_known else "unknown"
        self.tally.add(RECOVERIES, cause=cause)
        for phase in PHASES:
            self.tally.add(RECOVERY_SECONDS, getattr(event, f"{phase}_s"), phase=phase)
        self._listener(event)

    def _on_saved(self, event: CheckpointSaved) -> None:
        self.tally.add(CHECKPOINT_BYTES, event.bytes)
        if event.name in self._committed:
            return
        self._committed.append(event.name)
        self.tally.add(CHECKPOINTS_COMMITTED)
        self.tally.observe(CHECKPOINT_SECONDS, event.duration_s)
        self.tally.add(CHECKPOINT_STALL, event.stall_s)
        if self.last_checkpoint is None or event.step >= self.last_checkpoint[0]:
            self.last_checkpoint = event.step, self._clock.wall()
        self._listener(event)


# ----------------------------------------------------------------------------
# Gauges of a node at the time of a scrape, read from its state without a lock.

Reading = tuple[Metric, Labels, float]


@dataclass(frozen=True, kw_only=True)
class NodeReadings:
    """The sources of gauges. The functions must neither block nor take a lock."""

    status: NodeStatus
    metrics: NodeMetrics
    node_states: Callable[[], Mapping[NodeState, int] | None]  # of all nodes; None: not the leader
    etcd_contact_age_s: Callable[[], float | None]

    def gauges(self) -> Iterator[Reading]:
        """One reading per series. Unknown values are omitted."""
        yield from self._world()
        yield from self._states()
        yield from self._progress()
        yield from self._ages()

    def _world(self) -> Iterator[Reading]:
        node, world = self.status.node, self.status.world
        yield BUILD_INFO, (node.library, node.torch, platform.python_version()), 1.0
        yield MIN_NODES, (), node.min_nodes
        yield MAX_NODES, (), node.max_nodes
        if world is not None:
            yield GENERATION, (), world.generation
            yield WORLD_NODES, (), len(world.members)
            yield WORLD_SIZE, (), world.size
            yield WORLD_PAUSED, (), world.state is WorldState.PAUSED

    def _states(self) -> Iterator[Reading]:
        node, done = self.status.node, self.status.done
        yield IN_WORLD, (), self.status.has_workers_in_a_world and done is None
        for state in NodeState:
            yield NODE_STATE, (state.value,), node.state is state
        for outcome in Outcome:
            yield JOB_ENDED, (outcome.value,), done is not None and done.outcome is outcome
        yield JOB_STOPPED, (), self.status.stop is not None and done is None
        nodes = self.node_states()
        yield IS_LEADER, (), nodes is not None
        for state in NodeState if nodes is not None else ():
            yield NODES, (state.value,), nodes.get(state, 0) if nodes is not None else 0

    def _progress(self) -> Iterator[Reading]:
        step_rate, checkpoint = self.status.step_rate, self.metrics.last_checkpoint
        if step_rate is not None:
            yield STEP, (), step_rate.step
        if checkpoint is not None:
            yield CHECKPOINT_STEP, (), checkpoint[0]
            yield CHECKPOINT_TIME, (), checkpoint[1]

    def _ages(self) -> Iterator[Reading]:
        ages = (
            (HEARTBEAT_AGE, self.metrics.heartbeat_age_s),
            (AGENT_SILENCE, max(self.status.watchdog.silences_s().values(), default=None)),
            (ETCD_CONTACT_AGE, self.etcd_contact_age_s()),
        )
        for metric, age_s in ages:
            if age_s is not None:
                yield metric, (), max(0.0, age_s)
        yield ETCD_UP, (), not self.status.store_problem


# ----------------------------------------------------------------------------
# The current metrics of a node, for the exporters: /metrics and OTLP.
#
# Built from copies, without a lock, so that a scrape is answered while another thread hangs.

_V = TypeVar("_V")


class MetricSeries(NamedTuple):
    """One metric and the values of its series, by label values: the first for gauges and counters,
    the second for summaries and histograms."""

    metric: Metric
    values: Mapping[Labels, float]
    distributions: Mapping[Labels, Distribution]


def series_of(readings: NodeReadings) -> Iterator[MetricSeries]:
    """Every metric of the table that has a value, in its order."""
    gauges: dict[Metric, dict[Labels, float]] = {}
    for metric, labels, value in readings.gauges():
        cleaned = tuple(label_value(text) for text in labels)
        gauges.setdefault(metric, {})[cleaned] = float(value)
    counts = _by_metric(readings.metrics.tally.counts().items())
    distributions = _by_metric(readings.metrics.tally.distributions().items())
    collects = readings.metrics.collects_worker_events
    for metric in METRICS:
        values = gauges.get(metric, {})
        if metric.kind is MetricKind.COUNTER:
            # Zeros for workers without reports would look like a job without progress.
            is_collected = collects or metric.source is not MetricSource.WORKERS
            zeros = dict.fromkeys(metric.initial_series, 0.0) if is_collected else {}
            values = {**zeros, **counts.get(metric, {})}
        series = MetricSeries(metric, values, distributions.get(metric, {}))
        if series.values or series.distributions:
            yield series


def _by_metric(
    items: Iterable[tuple[tuple[Metric, Labels], _V]],
) -> dict[Metric, dict[Labels, _V]]:
    by_metric: dict[Metric, dict[Labels, _V]] = {}
    for (metric, labels), value in items:
        by_metric.setdefault(metric, {})[labels] = value
    return by_metric
