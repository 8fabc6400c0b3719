"""A job as etcd shows it.

Reads single keys and ``nodes/``, never the run's secret: a role limited to these is enough
(docs/security.md). :mod:`~elastic.cli.observe.sentence` describes it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from elastic.cli.observe.heartbeats import HeartbeatView, heartbeats_by_node
from elastic.errors import RecordError, StoreRefused
from elastic.leadership.job_progress import JobProgress, decode_progress
from elastic.membership.keys import Keys
from elastic.membership.records import (
    BreakageRecord,
    Done,
    Leader,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    WorldState,
    decode,
)
from elastic.store.keyvalue import Entry, KeyValue
from elastic.tuning.agent_intervals import PROGRESS_S, SILENT_SCRIPT_S


class JobCondition(str, Enum):
    """The state of a job."""

    ABSENT = "absent"  # no keys: not started, or already deleted
    WAITING = "waiting"  # for its first world
    STARTING = "starting"  # a world has formed; not all of its nodes train yet
    TRAINING = "training"  # the workers of all its nodes have begun a step
    PAUSED = "paused"  # fewer than the minimum number of nodes
    DOWN = "down"  # a world existed; no node is alive
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The records of a job, read at ``at_s`` of the wall clock."""

    run_id: str
    root: str
    at_s: float
    world: WorldRecord | None = None
    nodes: tuple[Node, ...] = ()
    leader: Leader | None = None
    progress: JobProgress | None = None
    done: Done | None = None
    notes: tuple[str, ...] = ()
    is_progress_hidden: bool = False  # reading it is not permitted, or it is of another version

    @property
    def members(self) -> tuple[Node, ...]:
        """Live nodes of the newest world, in the order of ranks."""
        if self.world is None:
            return ()
        alive = {node.node_id: node for node in self.nodes}
        return tuple(alive[i] for i in self.world.node_ids if i in alive)

    @cached_property
    def inside(self) -> tuple[Node, ...]:
        """Members whose agents have passed the newest world to their workers."""
        newest = self.world.generation if self.world is not None else 0
        return tuple(n for n in self.members if n.running and n.running.generation >= newest)

    @cached_property
    def training(self) -> tuple[Node, ...]:
        """Members whose workers have begun a step in the newest world, or, as long as that is only
        planned, in the one before."""
        running = self.members if self.is_switching else self.inside
        return tuple(node for node in running if self.is_stepping(node))

    @cached_property
    def _training_ids(self) -> frozenset[str]:
        return frozenset(node.node_id for node in self.training)

    @property
    def is_switching(self) -> bool:
        """Whether the newest world is planned: until its first step the previous one trains."""
        world, step = self.world, self.step
        if world is None or world.switch_at_step is None or self.inside:
            return False
        return step is not None and step < world.switch_at_step

    def is_stepping(self, node: Node) -> bool:
        """Whether a member's workers have begun a step in their world.

        Workers that change worlds without a restart continue with a step; others count once
        they report one. Scripts without elastic.join() never report steps, nor do any with
        ``mode=restart``.
        """
        if node.running is None:
            return False
        world = self._running_world(node)
        # (Only the name of the world before a planned one is known: its workers make steps.)
        is_restart = world is not None and world.mode != "in-process"
        is_restarted = is_restart or node.state is not NodeState.READY
        if not is_restarted or self.is_progress_hidden or self.leader is None:
            return True
        heartbeat = self.heartbeat_of(node)
        if heartbeat.has_joined is None or heartbeat.generation >= node.running.generation:
            return True
        return not heartbeat.has_joined and self._ran_s(world) > SILENT_SCRIPT_S

    def is_lost(self, node: Node) -> bool:
        """Whether the leader has declared the node dead: its record outlives it by its lease."""
        running = node.running.generation if node.running is not None else None
        return running is not None and any(
            node.name in breakage.lost and running <= breakage.generation
            for breakage in self.breakages
        )

    def state_of(self, node: Node) -> str:
        """The node's state: ``training``, ``lost``, or as reported by its agent."""
        if self.is_lost(node):
            return "lost"
        is_active = self.world is not None and self.world.state is WorldState.ACTIVE
        may_train = node.state in (NodeState.STARTING, NodeState.READY) and self.done is None
        is_training = is_active and may_train and node.node_id in self._training_ids
        return JobCondition.TRAINING.value if is_training else node.state.value

    def _running_world(self, node: Node) -> WorldRecord | None:
        """The world that the node's workers run, if it is the newest one."""
        is_newest = (
            self.world is not None
            and node.running is not None
            and node.running.generation == self.world.generation
        )
        return self.world if is_newest else None

    def _ran_s(self, world: WorldRecord | None) -> float:
        """How long a world has run, by the leader's clock."""
        if world is None or self.progress is None:
            return 0.0
        return self.progress.time_s - world.time_s

    @property
    def joining(self) -> tuple[Node, ...]:
        """Live nodes outside of the world."""
        inside = self.world.node_ids if self.world is not None else ()
        return tuple(node for node in self.nodes if node.node_id not in inside)

    def heartbeat_of(self, node: Node) -> HeartbeatView:
        """The node's heartbeat and step, as recorded by the leader."""
        return self.heartbeats.get(node.node_id) or HeartbeatView()

    @cached_property
    def heartbeats(self) -> Mapping[str, HeartbeatView]:
        """Heartbeats by node id, as recorded by the leader."""
        return heartbeats_by_node(self.progress, self.at_s)

    def why_waiting(self, node: Node) -> str:
        """Why the node is not in the world, such as ``1 of 2 nodes of a replica``; empty if it is,
        or if it is about to join."""
        for waiting in self.progress.waiting if self.progress is not None else ():
            if waiting.node_id == node.node_id:
                return waiting.reason
        if node.nodes_per_replica == 1:
            return ""
        from elastic.membership.replicas import why_waiting  # slow to import, and rarely needed

        return why_waiting(node, self.world, self.nodes)

    @property
    def breakages(self) -> tuple[BreakageRecord, ...]:
        """The incidents recorded in etcd, oldest first."""
        known = self.world.breakages if self.world is not None else ()
        return known or (self.done.breakages if self.done is not None else ())

    @property
    def state(self) -> JobCondition:
        """The job's state."""
        if self.done is not None:
            is_success = self.done.outcome is Outcome.SUCCESS
            return JobCondition.SUCCEEDED if is_success else JobCondition.FAILED
        if self.world is None:
            return JobCondition.WAITING if self.nodes else JobCondition.ABSENT
        if not self.nodes:
            return JobCondition.DOWN
        if self.world.state is WorldState.PAUSED:
            return JobCondition.PAUSED
        if self.is_switching:
            return JobCondition.TRAINING if self.training else JobCondition.STARTING
        is_complete = len(self.training) == len(self.world.members)
        return JobCondition.TRAINING if is_complete else JobCondition.STARTING

    @property
    def step(self) -> int | None:
        """The last step known to be committed."""
        if self.done is not None and self.done.final_step is not None:
            return self.done.final_step
        if self.progress is not None and self.progress.step is not None:
            return self.progress.step
        return self.world.committed_step if self.world is not None else None

    @property
    def is_step_old(self) -> bool:
        """Whether the step is from the newest world's record: more may have been committed since.

        The leader's record expires with its lease, so a job that is down has none.
        """
        is_recorded = self.progress is not None and self.progress.step is not None
        return self.step is not None and self.done is None and not is_recorded

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second, while it trains."""
        progress = self.progress
        if self.state is not JobCondition.TRAINING or progress is None or progress.step_time_s <= 0:
            return None
        return 1.0 / progress.step_time_s

    @property
    def eta_s(self) -> float | None:
        """Time to the last step at the current rate; None if the script plans no steps."""
        rate, step, progress = self.steps_per_s, self.step, self.progress
        if rate is None or step is None or progress is None or progress.planned_steps is None:
            return None
        return max(0, progress.planned_steps - step) / rate

    @property
    def goodput(self) -> float | None:
        """The leader's estimate, 0 to 1. The leader records nothing without progress, so the time
        since an overdue record counts as lost."""
        progress = self.progress
        if progress is None or progress.goodput is None or progress.goodput_since_s is None:
            return None
        covered_s = progress.time_s - progress.goodput_since_s
        if covered_s <= 0:
            return None
        passed_s = self.at_s - progress.time_s
        is_due = passed_s > 2 * max(PROGRESS_S, progress.step_time_s)
        return progress.goodput * covered_s / (covered_s + (passed_s if is_due else 0.0))

    @property
    def checkpoint_age_s(self) -> float | None:
        """Time since the leader learned that the last checkpoint is committed."""
        if self.progress is None or self.progress.checkpoint_at_s is None:
            return None
        return max(0.0, self.at_s - self.progress.checkpoint_at_s)

    def behind_checkpoint(self, step: int) -> tuple[int | None, float | None]:
        """Steps since the checkpoint of ``step``, and their duration; None if unknown."""
        if self.step is None:
            return None, None
        behind = max(0, self.step - step)
        rate_s = self.progress.step_time_s if self.progress is not None else 0.0
        return behind, behind * rate_s if rate_s > 0 else None


def read_job(store: KeyValue, keys: Keys, now_s: float) -> JobView:
    """Read a job. A record that is unreadable, or not permitted, becomes a note.

    Raises CoordinationError if nothing can be read.
    """
    notes: list[str] = []

    def read(key: str, parse: Callable[[Entry], object]) -> object:
        try:
            entry = store.get(key)
            return parse(entry) if entry is not None else None
        except (RecordError, StoreRefused) as error:
            notes.append(error.message)
            return None

    # Without permission to read these two, nothing is known.
    world = _world(store.get(keys.world), notes)
    nodes = _nodes(store, keys, notes)
    done = read(keys.done, lambda e: decode(Done, e.key, e.value))
    leader = read(keys.leader, lambda e: decode(Leader, e.key, e.value))
    known_notes = len(notes)
    progress = read(keys.progress, lambda e: decode_progress(e.key, e.value))
    assert done is None or isinstance(done, Done)
    assert leader is None or isinstance(leader, Leader)
    assert progress is None or isinstance(progress, JobProgress)
    return JobView(
        run_id=keys.run_id,
        root=keys.root,
        at_s=now_s,
        world=world,
        nodes=nodes,
        leader=leader,
        progress=progress,
        done=done,
        notes=tuple(notes),
        is_progress_hidden=len(notes) > known_notes,
    )


def _world(entry: Entry | None, notes: list[str]) -> WorldRecord | None:
    """The record, or a note on it."""
    try:
        return decode(WorldRecord, entry.key, entry.value) if entry is not None else None
    except RecordError as error:
        notes.append(error.message)
        return None


def _nodes(store: KeyValue, keys: Keys, notes: list[str]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for entry in store.list(keys.nodes).entries:
        try:
            nodes.append(decode(Node, entry.key, entry.value))
        except RecordError as error:
            notes.append(error.message)
    return tuple(sorted(nodes, key=lambda node: node.joined_at_s))
