"""A job as its records in etcd show it, for all commands that print it."""

from __future__ import annotations

import argparse
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

from elastic.cli.arguments import endpoint_of, find_job, options_of, run_id_of
from elastic.errors import ConfigError, RecordError, StoreRefused, StoreUnreachable
from elastic.membership.progress import JobProgress, decode_progress
from elastic.membership.records import (
    BreakageRecord,
    Done,
    Keys,
    Leader,
    Node,
    NodeState,
    Outcome,
    Stop,
    WorldRecord,
    decode,
)
from elastic.store.keyvalue import Entry, KeyValue, Snapshot
from elastic.telemetry.log import duration, printable
from elastic.telemetry.runs import LocalRun, is_loopback
from elastic.tuning.intervals import (
    PROGRESS_S,
    RECENT_LOSS_S,
)
from elastic.wire.messages import WorldState

# An older heartbeat is shown as late: a node's thread may wait for one call to etcd, and the leader
# writes the received heartbeats every few seconds.
HEARTBEAT_LATE_S = 15.0
# Of an incident: etcd does not know it.
UNKNOWN_CAUSE = "cause unknown"
# A script that has not called elastic.join() after this long in a world is assumed never to do so:
# its nodes count as training, although no steps are reported. Imports take less.
SILENT_SCRIPT_S = 120.0
# A command logs that it is connecting to etcd if that takes longer: it may take connect_timeout_s.
SAY_CONNECTING_S = 1.0
# For an etcd on this machine whose job has ended: it most likely ended, too.
GONE_CONNECT_S = 1.0

# ----------------------------------------------------------------------------
# Connects a read-only command to the store of the job named on the command line.


def keys_of(args: argparse.Namespace) -> Keys:
    """The keys of the job. Raises ConfigError."""
    return Keys.of(options_of(args).prefix, run_id_of(args))


@contextmanager
def job_store(args: argparse.Namespace, *, reports_delay: bool = True) -> Iterator[KeyValue]:
    """Connect for the duration of the block. Raises ConfigError and CoordinationError.

    ``reports_delay``: print a line to stderr if etcd does not answer within SAY_CONNECTING_S.
    """
    run = find_job(args)
    if run is not None and ended_with_its_etcd(run):
        name = printable(run.run_id, 80)
        raise StoreUnreachable(
            f"{name} has ended here, and its etcd does not answer: {run.endpoint} refuses "
            "connections",
            hint=f"from its journals: elastic status {name}, elastic events {name}; to continue "
            "it, start it again as before",
        )
    # Imported here: gRPC and protobuf take longer than all that a command without etcd does.
    from elastic.store.client import etcd_config
    from elastic.store.etcd import EtcdStore

    endpoint, options = endpoint_of(args), options_of(args)
    line = (
        f"elastic: etcd at {printable(endpoint, 200)} has not answered yet; waiting up to "
        f"{options.connect_timeout_s:g} s (connect_timeout_s in --rdzv-conf)"
    )
    with _print_if_slow(line) if reports_delay else nullcontext():
        store = EtcdStore(etcd_config(endpoint, options))
    try:
        yield store
    finally:
        store.close()


def ended_with_its_etcd(run: LocalRun) -> bool:
    """Whether no agent of the job is left, and no process listens where its etcd was on this
    machine. Spares the import of gRPC, and the wait for an embedded etcd that has ended."""
    if run.is_running or not is_loopback(run.endpoint):
        return False
    host, _, port = run.endpoint.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), GONE_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # unclear: the etcd client says what is wrong
        return False
    return False


@contextmanager
def _print_if_slow(line: str) -> Iterator[None]:
    """Print ``line`` to stderr if the block takes longer than ``SAY_CONNECTING_S``."""
    timer = threading.Timer(SAY_CONNECTING_S, print, (line,), {"file": sys.stderr, "flush": True})
    timer.name, timer.daemon = "elastic-slow-connection", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# ----------------------------------------------------------------------------
# The age of the nodes' heartbeats, as recorded by the leader.
#
# Lateness is judged by the leader's clock alone: this machine's may differ.


@dataclass(frozen=True, kw_only=True)
class HeartbeatView:
    """The last heartbeat of a node and its age."""

    age_s: float | None = None  # None: the leader has recorded none
    step: int | None = None  # last step reported by its workers
    is_late: bool = False
    generation: int = 0  # the newest in which its workers have begun a step; 0: none or unknown
    has_joined: bool = False  # a worker has called elastic.join()

    def __str__(self) -> str:
        if self.age_s is None:
            return "-"
        return f"{duration(self.age_s)} ago{' (late)' if self.is_late else ''}"


def heartbeats_by_node(progress: JobProgress | None, now_s: float) -> dict[str, HeartbeatView]:
    """Heartbeats by node id, for the nodes in the leader's record."""
    if progress is None:
        return {}
    is_old = _is_old(progress, now_s)
    return {
        heard.node_id: HeartbeatView(
            age_s=max(0.0, max(now_s, progress.time_s) - heard.heard_at_s),
            step=heard.step,
            generation=heard.generation,
            has_joined=heard.has_joined,
            is_late=is_old or progress.time_s - heard.heard_at_s > HEARTBEAT_LATE_S,
        )
        for heard in progress.heartbeats
    }


def late_heartbeats(
    progress: JobProgress | None,
    nodes: Iterable[Node],
    heartbeats: Mapping[str, HeartbeatView],
    now_s: float,
) -> list[str]:
    """Warnings about late heartbeats."""
    if progress is None or not progress.heartbeats:
        return []
    if _is_old(progress, now_s):
        ago = duration(now_s - progress.time_s)
        return [f"the leader has recorded no heartbeats for {ago}, or clocks differ"]
    pairs = ((node, heartbeats.get(node.node_id, HeartbeatView())) for node in nodes)
    return [
        f"no heartbeat of {printable(node.name, 60)} for {duration(heartbeat.age_s)}"
        for node, heartbeat in pairs
        if heartbeat.is_late and heartbeat.age_s is not None
    ]


def _is_old(progress: JobProgress, now_s: float) -> bool:
    return bool(progress.heartbeats) and now_s - progress.time_s > HEARTBEAT_LATE_S


# ----------------------------------------------------------------------------
# A job as etcd shows it.
#
# Reads single keys and ``nodes/``, never the run's secret: a role limited to these is enough
# (docs/security.md). :mod:`~elastic.cli.view` describes it in words.


class JobCondition(str, Enum):
    """The state of a job."""

    ABSENT = "absent"  # no keys: not started, or already deleted
    WAITING = "waiting"  # for its first world
    STARTING = "starting"  # a world has formed; not all of its nodes train yet
    TRAINING = "training"  # the workers of all its nodes have begun a step
    STOPPED = "stopped"  # by `elastic stop`; nodes wait for `elastic resume`
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
    stop: Stop | None = None
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
        they report one. Scripts without elastic.join() never report steps.
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
        if heartbeat.generation >= node.running.generation:
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

    @property
    def waiting(self) -> tuple[Node, ...]:
        """The joining nodes, without records that outlive a node that has left."""
        return tuple(node for node in self.nodes if self._is_waiting(node))

    def _is_waiting(self, node: Node) -> bool:
        inside = self.world.id_set if self.world is not None else ()
        ended = (NodeState.LEAVING, NodeState.FAILED, NodeState.FINISHED)
        return node.node_id not in inside and node.state not in ended

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
        if self._awaited_names and self._is_waiting(node):
            return f"there is no leader; waiting for the leases of {self._awaited_names} to expire"
        if node.nodes_per_replica == 1:
            return ""
        from elastic.membership.replicas import why_waiting  # slow to import, and rarely needed

        return why_waiting(node, self.world, self.nodes)

    @cached_property
    def _awaited_names(self) -> str:
        """While there is no leader: the nodes of the last world, except those that have left in
        order. Starting nodes let them lead first."""
        # (Both are on the leader's lease, and reading them may not be permitted.)
        has_leader = self.leader is not None or self.progress is not None
        if self.world is None or has_leader or self.is_progress_hidden:
            return ""
        ended = (NodeState.LEAVING, NodeState.FAILED)
        left = {n.node_id for n in self.nodes if n.state in ended and n.running is None}
        names = [printable(m.name, 60) for m in self.world.tracked if m.node_id not in left]
        return ", ".join(names[:_MAX_NAMES]) + ", …" * (len(names) > _MAX_NAMES)

    @property
    def breakages(self) -> tuple[BreakageRecord, ...]:
        """The worlds that broke or shrank, as recorded in etcd, oldest first."""
        known = self.world.breakages if self.world is not None else ()
        return known or (self.done.breakages if self.done is not None else ())

    @property
    def incidents(self) -> tuple[BreakageRecord, ...]:
        """Those that were not planned: without the departures that `elastic stop` asked for."""

        def is_planned(b: BreakageRecord) -> bool:
            stopped = self.stop is not None and b.time_s >= self.stop.time_s
            return stopped and bool(b.left) and not (b.lost or b.failures)

        return tuple(b for b in self.breakages if not is_planned(b))

    @property
    def state(self) -> JobCondition:
        """The job's state."""
        if self.done is not None:
            is_success = self.done.outcome is Outcome.SUCCESS
            return JobCondition.SUCCEEDED if is_success else JobCondition.FAILED
        if self.stop is not None and not any(node.running for node in self.nodes):
            return JobCondition.STOPPED
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


class Reader(Protocol):
    """The subset of :class:`~elastic.store.keyvalue.KeyValue` that reads, or one snapshot of it."""

    def get(self, key: str) -> Entry | None: ...
    def list(self, prefix: str) -> Snapshot: ...


def read_job(store: Reader, keys: Keys, now_s: float) -> JobView:
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
    stop = read(keys.stop, lambda e: decode(Stop, e.key, e.value))
    leader = read(keys.leader, lambda e: decode(Leader, e.key, e.value))
    known_notes = len(notes)
    progress = read(keys.progress, lambda e: decode_progress(e.key, e.value))
    assert done is None or isinstance(done, Done)
    assert stop is None or isinstance(stop, Stop)
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
        stop=stop,
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


def _nodes(store: Reader, keys: Keys, notes: list[str]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for entry in store.list(keys.nodes).entries:
        try:
            nodes.append(decode(Node, entry.key, entry.value))
        except RecordError as error:
            notes.append(error.message)
    return tuple(sorted(nodes, key=lambda node: node.joined_at_s))


# ----------------------------------------------------------------------------
# Durations on a command line, ``90s``, ``10m``, and a console for tables.

_DURATION = re.compile(r"(\d{1,12}(?:\.\d+)?)(s|m|h|d)")
_PIPE_COLUMNS = 10_000  # wider than any table
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def age(text: str) -> float | None:
    """``90s``, ``10m``, ``2h`` or ``1d`` in seconds; None for anything else.

    >>> age("1.5m"), age("soon")
    (90.0, None)
    """
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def seconds_of(text: str, flag: str) -> float:
    """The value of a flag in seconds. Raises ConfigError."""
    seconds = age(text)
    if seconds is None:
        raise ConfigError(
            f"{flag}={printable(text)} is not a valid duration",
            hint=f"give a number and its unit, s, m, h or d: {flag}=90s",
        )
    return seconds


def table_console() -> Any:
    """A console for tables on stdout. In a pipe, no cell is broken into lines, for grep and awk."""
    from rich.console import Console  # not for -h

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(width=width, markup=False, highlight=False)


# ----------------------------------------------------------------------------
# A job's status in one sentence: ``training in generation 7 with 3 of 4 nodes; …``. Pure.

Ago = Callable[[float], str]
_MAX_NAMES = 3
_MAX_STOPPED = 10


def sentence(view: JobView, ago: Ago | None = None) -> str:
    """The job's status: ``training in generation 7 with 3 of 4 nodes; …``.

    ``ago`` formats a wall-clock time; the default is ``12.0 s ago``.
    """
    ago = ago or (lambda time_s: f"{duration(max(0.0, view.at_s - time_s))} ago")
    if view.state is JobCondition.STOPPED:
        return _stopped(view, ago)
    parts = [_state(view, ago), *_losses(view, ago), *_late(view), *_joining(view)]
    if view.stop is not None and view.done is None:
        parts.insert(0, _stopped(view, ago))
    return "; ".join(parts)


def _stopped(view: JobView, ago: Ago) -> str:
    stop = view.stop
    assert stop is not None
    by = f"by {printable(stop.by, 80)} {ago(stop.time_s)}"
    if view.state is not JobCondition.STOPPED:
        return f"stopping, {by}"
    names = [printable(node.name, 60) for node in view.waiting]
    who = ", ".join(names[:_MAX_STOPPED]) + ", …" * (len(names) > _MAX_STOPPED) or "no node"
    verb = "wait" if len(names) > 1 else "waits"
    return f"stopped {by}, `elastic resume` lets it go on; {who} {verb}"


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
        if len(view.nodes) < least:
            return f"waiting for nodes: {len(view.nodes)} of at least {least} have arrived"
        arrived = "1 node has" if len(view.nodes) == 1 else f"{len(view.nodes)} nodes have"
        return f"waiting for the first generation: {arrived} arrived, at least {least} needed"
    generation, members = world.generation, len(world.members)
    if view.state is JobCondition.DOWN and not members:
        return f"down: all nodes left gracefully {ago(world.time_s)}; a restart resumes the job"
    if view.state is JobCondition.DOWN:
        return (
            f"down: no node is alive; generation {generation} was formed with "
            f"{_count(members, 'node')}, {ago(world.time_s)}"
        )
    if view.state is JobCondition.PAUSED:
        return (
            f"paused in generation {generation}: {len(view.members)} of at least "
            f"{world.min_nodes} nodes, not training"
        )
    if view.state is JobCondition.STARTING:
        return _starting(view, world)
    if view.is_switching:
        former = max(node.running.generation for node in view.training if node.running)
        return (
            f"training in generation {former} with {_count(len(view.training), 'node')}; "
            f"generation {generation} begins with step {world.switch_at_step} "
            f"({printable(world.reason)})"
        )
    return f"training in generation {generation} with {members} of {world.max_nodes} nodes"


def _starting(view: JobView, world: WorldRecord) -> str:
    members = len(world.members)
    if len(view.inside) < members:
        return (
            f"starting generation {world.generation}: {len(view.inside)} of its "
            f"{_count(members, 'node')} have entered it ({printable(world.reason)})"
        )
    steps = [node for node in view.inside if node not in view.training]
    importing = [n for n in steps if not view.heartbeat_of(n).has_joined]
    what = "have not called elastic.join() yet" if importing else "have not begun a step yet"
    return (
        f"starting generation {world.generation} with {members} of {world.max_nodes} nodes: "
        f"workers of {_names(importing or steps, members)} {what}"
    )


def _names(nodes: Sequence[Node], all_nodes: int) -> str:
    """``n1 and n2``, ``all nodes``, or how many."""
    if len(nodes) == all_nodes:
        return "all nodes" if all_nodes > 1 else "its node"
    if len(nodes) > _MAX_NAMES:
        return _count(len(nodes), "node")
    return " and ".join(printable(node.name, 60) for node in nodes)


def _losses(view: JobView, ago: Ago) -> list[str]:
    """Nodes that left recently and have not returned, and nodes whose workers failed last."""
    breakages = view.world.breakages if view.world is not None else ()
    recent = [b for b in reversed(breakages) if view.at_s - b.time_s <= RECENT_LOSS_S]
    if view.done is not None or not recent or not (view.world and view.world.members):
        return []
    texts = {node.name: "" for node in view.training}
    for breakage in recent:
        for names, what in ((breakage.lost, "was lost"), (breakage.left, "left")):
            for name in names:
                texts.setdefault(name, f"{printable(name, 60)} {what} {ago(breakage.time_s)}")
    gone = [text for text in texts.values() if text]
    if len(gone) > _MAX_NAMES:
        gone[_MAX_NAMES:] = [f"and {len(gone) - _MAX_NAMES} more"]
    newest = recent[0]
    failed = dict.fromkeys(f.node for f in newest.failures if f.node not in newest.lost)
    workers = [f"a worker of {printable(n, 60)} failed {ago(newest.time_s)}" for n in failed]
    return [*gone, *workers]


def _late(view: JobView) -> list[str]:
    if view.done is not None:
        return []
    return late_heartbeats(view.progress, view.nodes, view.heartbeats, view.at_s)


def _joining(view: JobView) -> list[str]:
    if view.done is not None:
        return []
    if view.world is None:
        return _incomplete_replicas(view)
    waits = {NodeState.ARRIVED: "is waiting", NodeState.STARTING: "is warming up"}
    return [
        f"{printable(node.name, 60)} waits: {why}"
        if (why := view.why_waiting(node))
        else f"{printable(node.name, 60)} {waits.get(node.state, 'is about to join')}"
        for node in view.joining
        if node.state not in (NodeState.LEAVING, NodeState.FINISHED) and not view.is_lost(node)
    ]


def _incomplete_replicas(view: JobView) -> list[str]:
    few = [n for n in view.nodes if n.nodes_per_replica > 1 and view.why_waiting(n)]
    if not few:
        return []
    from elastic.membership.replicas import waiting_for_others  # not cheap to import

    names = [printable(node.name, 60) for node in few]
    return [waiting_for_others(names, few[0].nodes_per_replica)]


def incident(breakage: BreakageRecord) -> str:
    """A short description of the incident that ended a world."""
    parts = [f"{printable(name, 60)} was lost" for name in breakage.lost]
    parts += [f"{printable(name, 60)} left" for name in breakage.left]
    failed = dict.fromkeys(f.node for f in breakage.failures if f.node not in breakage.lost)
    parts += [f"a worker of {printable(name, 60)} failed" for name in failed]
    if breakage.attempts > 1:
        return f"{breakage.attempts} process groups could not be built"
    reported = breakage.verdict and f"reported: {printable(breakage.verdict)}"
    return ", ".join(parts) or reported or UNKNOWN_CAUSE


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
