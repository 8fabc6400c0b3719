"""A job as etcd shows it: what is read, and the one sentence that says how it is.

Reads single keys and ``nodes/``, never the run's secret: a role that may read no more is enough
(docs/security.md). :func:`sentence` is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from elastic.cli.observe.heartbeats import NodeSigns, signs_by_node, silence
from elastic.cli.observe.printable import duration, printable
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
from elastic.membership.replicas import waiting_for_others, why_waiting
from elastic.store.keyvalue import Entry, KeyValue
from elastic.tuning.agent_intervals import RECENT_LOSS_S

Ago = Callable[[float], str]


class JobCondition(str, Enum):
    """In one word."""

    ABSENT = "absent"  # nothing is there: not started, or forgotten
    WAITING = "waiting"  # for its first world
    STARTING = "starting"  # a world is formed, and not all of its nodes are in it yet
    TRAINING = "training"
    PAUSED = "paused"  # below the minimum of nodes
    DOWN = "down"  # there was a world, and no node is alive
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What was read, at ``at_s`` of the wall clock."""

    run_id: str
    root: str
    at_s: float
    world: WorldRecord | None = None
    nodes: tuple[Node, ...] = ()
    leader: Leader | None = None
    progress: JobProgress | None = None
    done: Done | None = None
    notes: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[Node, ...]:
        """Live nodes of the newest world, in the order of ranks."""
        if self.world is None:
            return ()
        alive = {node.node_id: node for node in self.nodes}
        return tuple(alive[i] for i in self.world.node_ids if i in alive)

    @property
    def training(self) -> tuple[Node, ...]:
        """Those that run it."""
        return tuple(
            node
            for node in self.members
            if self.world is not None
            and node.running is not None
            and node.running.generation >= self.world.generation
        )

    @property
    def joining(self) -> tuple[Node, ...]:
        """Live nodes outside of the world."""
        inside = self.world.node_ids if self.world is not None else ()
        return tuple(node for node in self.nodes if node.node_id not in inside)

    def signs_of(self, node: Node) -> NodeSigns:
        """Its heartbeat and step, as the leader has heard them."""
        return self.signs.get(node.node_id) or NodeSigns()

    @cached_property
    def signs(self) -> Mapping[str, NodeSigns]:
        """By node id, of the nodes of which the leader has heard."""
        return signs_by_node(self.progress, self.at_s)

    def why_waiting(self, node: Node) -> str:
        """``1 of 2 nodes of a replica`` where that is why it has no place in the world."""
        return why_waiting(node, self.world, self.nodes)

    @property
    def breakages(self) -> tuple[BreakageRecord, ...]:
        """What broke worlds, as far as etcd remembers, oldest first."""
        known = self.world.breakages if self.world is not None else ()
        return known or (self.done.breakages if self.done is not None else ())

    @property
    def state(self) -> JobCondition:
        """In one word."""
        if self.done is not None:
            is_success = self.done.outcome is Outcome.SUCCESS
            return JobCondition.SUCCEEDED if is_success else JobCondition.FAILED
        if self.world is None:
            return JobCondition.WAITING if self.nodes else JobCondition.ABSENT
        if not self.nodes:
            return JobCondition.DOWN
        if self.world.state is WorldState.PAUSED:
            return JobCondition.PAUSED
        is_whole = len(self.training) == len(self.world.members)
        return JobCondition.TRAINING if is_whole else JobCondition.STARTING

    @property
    def step(self) -> int | None:
        """Committed, as far as the store knows."""
        if self.done is not None and self.done.final_step is not None:
            return self.done.final_step
        if self.progress is not None and self.progress.step is not None:
            return self.progress.step
        return self.world.committed_step if self.world is not None else None

    @property
    def steps_per_s(self) -> float | None:
        """While it trains."""
        progress = self.progress
        if self.state is not JobCondition.TRAINING or progress is None or progress.step_time_s <= 0:
            return None
        return 1.0 / progress.step_time_s

    @property
    def eta_s(self) -> float | None:
        """Until the last step at the present rate; None where the script does not plan steps."""
        rate, step, progress = self.steps_per_s, self.step, self.progress
        if rate is None or step is None or progress is None or progress.planned_steps is None:
            return None
        return max(0, progress.planned_steps - step) / rate

    @property
    def goodput(self) -> float | None:
        """By the leader's estimate, until now: it writes nothing while the job stands still."""
        progress = self.progress
        if progress is None or progress.goodput is None or progress.goodput_since_s is None:
            return None
        covered_s = progress.time_s - progress.goodput_since_s
        until_now_s = max(covered_s, self.at_s - progress.goodput_since_s)
        return progress.goodput * covered_s / until_now_s if covered_s > 0 else None

    @property
    def checkpoint_age_s(self) -> float | None:
        """Since the leader knows that the last checkpoint is committed."""
        if self.progress is None or self.progress.checkpoint_at_s is None:
            return None
        return max(0.0, self.at_s - self.progress.checkpoint_at_s)

    def behind_checkpoint(self, step: int) -> tuple[int | None, float | None]:
        """Steps since the checkpoint of ``step``, and what they take; None: not known."""
        if self.step is None:
            return None, None
        behind = max(0, self.step - step)
        rate_s = self.progress.step_time_s if self.progress is not None else 0.0
        return behind, behind * rate_s if rate_s > 0 else None


def read_job(store: KeyValue, keys: Keys, now_s: float) -> JobView:
    """Read a job. A record that cannot be read, or that this user may not, becomes a note.

    Raises CoordinationError where nothing can be read at all.
    """
    notes: list[str] = []

    def read(key: str, parse: Callable[[Entry], object]) -> object:
        try:
            entry = store.get(key)
            return parse(entry) if entry is not None else None
        except (RecordError, StoreRefused) as error:
            notes.append(error.message)
            return None

    # Without the right to these two nothing can be said.
    world = _world(store.get(keys.world), notes)
    nodes = _nodes(store, keys, notes)
    done = read(keys.done, lambda e: decode(Done, e.key, e.value))
    leader = read(keys.leader, lambda e: decode(Leader, e.key, e.value))
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


# In words ----------------------------------------------------------------------------------------


def sentence(view: JobView, ago: Ago | None = None) -> str:
    """How the job is, for people: ``training in generation 7 with 3 of 4 nodes; …``.

    ``ago`` writes a time of the wall clock; else it is ``12.0 s ago``.
    """
    ago = ago or (lambda time_s: f"{duration(max(0.0, view.at_s - time_s))} ago")
    parts = [_state(view, ago), *_losses(view, ago), *_silent(view), *_joining(view)]
    return "; ".join(parts)


def _state(view: JobView, ago: Ago) -> str:
    world, done = view.world, view.done
    if done is not None:
        how = "succeeded" if done.outcome is Outcome.SUCCESS else "failed"
        step = f" at step {done.final_step}" if done.final_step is not None else ""
        return (
            f"{how}{step} in generation {done.generation}, {ago(done.time_s)}: "
            f"{printable(done.reason)}"
        )
    if world is None:
        if not view.nodes:
            return f"no such job: there is nothing under {printable(view.root)}"
        least = max(node.min_nodes for node in view.nodes)
        return f"waiting for nodes: {len(view.nodes)} of at least {least} arrived"
    generation, members = world.generation, len(world.members)
    if view.state is JobCondition.DOWN:
        return (
            f"down: no node is alive; generation {generation} was formed with "
            f"{_count(members, 'node')}, {ago(world.time_s)}"
        )
    if view.state is JobCondition.PAUSED:
        return (
            f"paused in generation {generation}: {len(view.members)} of at least "
            f"{world.min_nodes} nodes, nothing is trained"
        )
    if view.state is JobCondition.STARTING:
        return (
            f"starting generation {generation}: {len(view.training)} of its "
            f"{_count(members, 'node')} are in it ({printable(world.reason)})"
        )
    return f"training in generation {generation} with {members} of {world.max_nodes} nodes"


def _losses(view: JobView, ago: Ago) -> list[str]:
    """Who went lately, but for the nodes that are back."""
    breakages = view.world.breakages if view.world is not None else ()
    here = {node.name for node in view.training}
    if view.done is not None or not breakages:
        return []
    newest = breakages[-1]
    if view.at_s - newest.time_s > RECENT_LOSS_S:
        return []
    said = [
        f"{printable(name, 60)} {what} {ago(newest.time_s)}"
        for names, what in ((newest.lost, "was lost"), (newest.left, "left"))
        for name in names
        if name not in here
    ]
    failed = dict.fromkeys(f.node for f in newest.failures if f.node not in newest.lost)
    said += [f"a worker of {printable(n, 60)} failed {ago(newest.time_s)}" for n in failed]
    return said


def _silent(view: JobView) -> list[str]:
    if view.done is not None:
        return []
    return silence(view.progress, view.nodes, view.signs, view.at_s)


def _joining(view: JobView) -> list[str]:
    if view.done is not None:
        return []
    if view.world is None:
        few = [node for node in view.nodes if view.why_waiting(node)]
        names = [printable(node.name, 60) for node in few]
        return [waiting_for_others(names, few[0].nodes_per_replica)] if few else []
    waits = {NodeState.ARRIVED: "is waiting", NodeState.STARTING: "is warming up"}
    return [
        f"{printable(node.name, 60)} waits: {why}"
        if (why := view.why_waiting(node))
        else f"{printable(node.name, 60)} {waits.get(node.state, 'is about to join')}"
        for node in view.joining
        if node.state not in (NodeState.LEAVING, NodeState.FINISHED)
    ]


def incident(breakage: BreakageRecord) -> str:
    """What broke a world, in a few words."""
    parts = [f"{printable(name, 60)} was lost" for name in breakage.lost]
    parts += [f"{printable(name, 60)} left" for name in breakage.left]
    failed = dict.fromkeys(f.node for f in breakage.failures if f.node not in breakage.lost)
    parts += [f"a worker of {printable(name, 60)} failed" for name in failed]
    return ", ".join(parts) or "it broke"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
