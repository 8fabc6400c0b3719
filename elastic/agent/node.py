"""The state of this node that its agent's parts share, and its messages to workers."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.agent.kernel_log import KernelLog
from elastic.errors import (
    SYSTEM_CLOCK,
    BudgetSpent,
    CheckpointRequired,
    Clock,
    ConfigError,
    ElasticError,
    JobFailed,
    RecordError,
)
from elastic.hangs.page import RankStepTimes, StepDurations
from elastic.membership.records import (
    Done,
    JobFolderRecord,
    Keys,
    Node,
    NodeState,
    NodeStepTimes,
    Secret,
    Stop,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.view import StepRate
from elastic.store.keyvalue import Entry, KeyValue, Lease, WatchEvent
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.tuning.options import AgentOptions
from elastic.wire.base import CertificateError
from elastic.wire.handshake import SecretKey
from elastic.wire.tls import Tls, TlsFiles

# ----------------------------------------------------------------------------
# The secret of a run: created by its first agent, in etcd with the run's other records.
#
# Only clients that may read that key can join the run (docs/security.md). Agents keep it in
# memory, and pass only derived keys to their workers, one for each purpose.

LIVENESS, STORE, MEMORY = "liveness", "store", "memory"
INSTANCE = "instance"  # identifies the run, among those with the same run id; no key


class RunSecret:
    """This agent's copy of the secret. Thread-safe: listeners read their keys at every
    handshake."""

    def __init__(self, secret: SecretKey, root: str, revision: int = 0) -> None:
        self._secret = secret
        self._root = root
        self._revision = revision
        self._lock = threading.Lock()

    @classmethod
    def obtain(cls, store: KeyValue, keys: Keys) -> RunSecret:
        """The run's secret, created here if there is none yet. Raises CoordinationError."""
        secret, revision = _stored(store, keys, SecretKey.generate())
        return cls(secret, keys.root, revision)

    def basis(self, keys: Keys) -> tuple[str, int]:
        """Its key and revision: a record that this node writes on condition of them is of the run
        whose secret it has, also if etcd is wiped meanwhile, or the run's keys are deleted."""
        return keys.secret, self._revision

    def key(self, purpose: str) -> SecretKey:
        """The key for one purpose of this run."""
        with self._lock:
            return self._secret.derive(purpose, self._root)

    def restore(self, store: KeyValue, keys: Keys) -> None:
        """After etcd was wiped, or the run's keys were deleted, write the secret back, or adopt the
        one that a joining node has created since.

        Open connections remain; new ones use the store's secret.
        """
        stored, self._revision = _stored(store, keys, self._secret)
        with self._lock:
            has_changed, self._secret = stored != self._secret, stored
        if has_changed:
            get_logger().warning(
                "etcd was wiped and has a different secret for this run: using the new one"
            )


def _stored(store: KeyValue, keys: Keys, proposed: SecretKey) -> tuple[SecretKey, int]:
    """The one in the store, ``proposed`` if there was none, and its revision."""
    entry = store.get(keys.secret)
    if entry is None:
        record = encode(Secret(secret=proposed.text))
        revision = store.compare_and_swap(keys.secret, record, expected_revision=0)
        if revision is not None:
            return proposed, revision
        entry = store.get(keys.secret)
    if entry is None:
        raise _broken(keys.secret, "was deleted immediately")
    try:
        secret = SecretKey.parse(decode(Secret, entry.key, entry.value).secret)
        return secret, entry.mod_revision
    except ValueError as error:
        raise _broken(keys.secret, f"holds {error}") from None


class JobFolder:
    """The checkpoint folder of the job's first worker: the others and later ones use it, too, since
    a script may choose another one at each start (as with Hydra, or by the time).

    Used by the node's thread only.
    """

    def __init__(self) -> None:
        self._folder: str | None = None  # None: no worker of this node has asked
        self.on_known: Callable[[str], object] = lambda folder: None

    def agree(self, store: KeyValue, keys: Keys, proposed: str) -> str:
        """The job's; ``proposed``, if it has none yet. Raises CoordinationError."""
        if self._folder is None:
            self._folder = self._stored(store, keys, proposed)
            self.on_known(self._folder)
        return self._folder

    @staticmethod
    def known(store: KeyValue, keys: Keys) -> str | None:
        """The job's, if a worker has named it. Raises CoordinationError."""
        key = keys.checkpoint_folder
        entry = store.get(key)
        return None if entry is None else decode(JobFolderRecord, key, entry.value).folder

    def restore(self, store: KeyValue, keys: Keys) -> None:
        """Write it back after etcd was wiped. Raises CoordinationError."""
        if self._folder is not None:
            self._folder = self._stored(store, keys, self._folder)

    @staticmethod
    def _stored(store: KeyValue, keys: Keys, proposed: str) -> str:
        known = JobFolder.known(store, keys)
        if known is None:
            record = encode(JobFolderRecord(folder=proposed))
            if store.compare_and_swap(keys.checkpoint_folder, record, expected_revision=0):
                return proposed
            known = JobFolder.known(store, keys)
        return proposed if known is None else known


def _broken(key: str, what: str) -> RecordError:
    return RecordError(
        f"{key}: the run's secret {what}",
        hint="another program may write there; end this job, delete the key, and start it again, "
        "or use another --rdzv-id",
    )


# ----------------------------------------------------------------------------
# Heartbeats of an agent's threads: each records the time of its last iteration.


class Watchdog:
    """Times by thread. Takes no lock: a hung thread must not block the one that checks it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._stamps: dict[str, float] = {}

    def heartbeat(self) -> None:
        """The calling thread is alive. After its first heartbeat it is expected to continue."""
        self._stamps[threading.current_thread().name] = self._clock.monotonic()

    def rest(self) -> None:
        """The calling thread ends normally: it is no longer checked."""
        self._stamps.pop(threading.current_thread().name, None)

    def silences_s(self) -> dict[str, float]:
        """How long each thread has made no progress, by its name."""
        now = self._clock.monotonic()
        return {thread: now - stamp for thread, stamp in self._stamps.copy().items()}


# ----------------------------------------------------------------------------
# The state shared by the node's thread and torchrun's main thread, under one lock.

_KNOWN_WORLDS = 4


@dataclass(frozen=True)
class WorldEntry:
    """The known world, and the revision of its key that a compare-and-swap must name."""

    world: WorldRecord | None
    mod_revision: int
    since_s: float


class JobSucceeded(Exception):
    """Not an error: the job is done, and has no work for a joining node."""


class NodeStatus:
    """The node's record, the world, the job's end, and what ended the node's thread."""

    def __init__(self, node: Node, keys: Keys, now: float) -> None:
        self.changed = threading.Condition()
        self._keys = keys
        self.node = node
        self.world_entry = WorldEntry(None, 0, now)
        # The last ones, newest last: nodes name the world that they run, and this one may lead.
        self.known_worlds: tuple[WorldRecord, ...] = ()
        self.done: Done | None = None
        self.timeline = ""  # of a job that failed: what broke when, for its last error
        self.stop: Stop | None = None  # the job is to stop, until `elastic resume`
        self.step_rate: StepRate | None = None  # last reported by this node's workers
        self.stepping_generation = 0  # the newest world in which they have begun a step; 0: none
        self.steps_in_process = False  # they need no restart to change from that one
        self.failure_step: int | None = None  # steps committed by the worker that failed
        self.stopping = False  # torchrun will restart the workers
        self.starts = 0  # of all workers, by torchrun; a death may be reported after the next one
        self.can_replace = False  # torchrun permits the replacement of a single worker
        self.to_replace: set[int] = set()  # pids of dead workers whose siblings keep theirs
        # Pids of workers that were ready, or take the place of dead ones, and of whose death, if
        # any, nothing is decided yet.
        self.undecided: set[int] = set()
        self.in_training: set[int] = set()  # pids of workers whose training has not ended
        self.ended_in_training: set[int] = set()  # of them, those that have ended with exit code 0
        # Of them, those that were started in the place of dead ones and have not connected yet.
        self.unconnected: set[int] = set()
        self.workers_joined = False  # one of them has called elastic.join()
        self.workers_left = False  # they have left the job at a step's boundary, as requested
        self.fatal: BaseException | None = None
        self.store_problem: ElasticError | None = None  # the store's current failure
        self.watchdog = Watchdog()
        self.announced_world: WorldRecord | None = (
            None  # the newest world that workers have received, if any
        )
        self.before_announcing: Callable[[], object] = lambda: None  # the workers of a new world
        self.replica_is_lost = False  # a node of this one's replica is lost
        self.waits_for = ""  # why this node has no place in the world, if known
        self.parked = False  # the job has ended; this agent keeps running for its launcher

    @property
    def world(self) -> WorldRecord | None:
        """The newest known world of the job."""
        return self.world_entry.world

    @property
    def running(self) -> WorldRecord | None:
        """The world that this node's workers run."""
        running = self.node.running
        assert running is None or isinstance(running, WorldRecord), "only other nodes' is a name"
        return running

    @property
    def stopped(self) -> str:
        """Why no node is admitted to a world, for users; "" in a job that is not stopped."""
        if self.stop is None:
            return ""
        return f"the job was stopped by {self.stop.by}; `elastic resume` lets it go on"

    @property
    def has_workers_in_a_world(self) -> bool:
        """Whether this node may make progress of the job."""
        return self.node.running is not None and self.node.state is not NodeState.FINISHED

    def is_to_be_replaced(self, pid: int) -> bool | None:
        """Whether this failed worker is to be replaced while its siblings keep their processes.

        None: the node's thread has not decided it yet.
        """
        if pid in self.to_replace:
            return not self.stopping
        # The death of another one a moment ago has changed the state.
        is_undecided = (self.node.in_process and self.node.state is NodeState.READY) or (
            bool(self.to_replace) and pid in self.undecided | self.unconnected
        )
        return None if is_undecided and self.can_replace and not self.stopping else False

    def has_failed_with_0(self, pid: int) -> bool | None:
        """Whether this worker, which has ended with exit code 0, has left others that train.

        None: the node's thread does not know of its end yet.
        """
        if pid in self.ended_in_training:
            return True
        return None if pid in self.in_training and not self.stopping else False

    def set_stop(self, stop: Stop | None) -> None:
        """The job is to stop, or to go on."""
        with self.changed:
            self.stop = stop
            self.changed.notify_all()

    def change_node(self, change: Callable[[Node], Node]) -> None:
        with self.changed:
            node = change(self.node)
            if (ran := node.running or self.node.running) is not None:
                node = replace(node, ran_generation=ran.generation)
            self.node = node
            self.changed.notify_all()

    def note_workers_left(self) -> None:
        """The workers have left the job at a step's boundary, as requested."""
        with self.changed:
            self.workers_left = True
            self.changed.notify_all()

    def set_world(self, entry: WorldEntry) -> None:
        with self.changed:
            self.world_entry = entry
            if entry.world is not None and entry.world not in self.known_worlds[-1:]:
                self.known_worlds = (*self.known_worlds, entry.world)[-_KNOWN_WORLDS:]
            self.changed.notify_all()

    def set_world_revision(self, mod_revision: int) -> None:
        """The key changed to something older or unreadable: keep the known world."""
        self.set_world(replace(self.world_entry, mod_revision=mod_revision))

    def read_world(self, entry: Entry, now: float) -> None:
        """Apply the key's value in the store. Raises RecordError if it cannot be read."""
        known = self.world
        if entry.mod_revision < self.world_entry.mod_revision:
            return  # older than this node's own write
        try:
            world = decode(WorldRecord, entry.key, entry.value)
        except RecordError:
            # The key can still be swapped: the next world replaces it.
            self.set_world_revision(entry.mod_revision)
            raise
        if (known is not None and world.generation < known.generation) or world == known:
            self.set_world_revision(entry.mod_revision)
        else:
            self.set_world(WorldEntry(world, entry.mod_revision, now))

    def read_pushed_world(self, record: bytes, now: float) -> None:
        """Apply a record that the leader pushed. Only the watch sets the revision: that of a record
        in flight while the store was wiped would make every later event look old."""
        world = decode(WorldRecord, self._keys.world, record)
        if self.world is None or world.generation > self.world.generation:
            self.set_world(WorldEntry(world, self.world_entry.mod_revision, now))

    def set_done(self, done: Done) -> bool:
        """Record the job's end; True the first time."""
        with self.changed:
            first, self.done = self.done is None, done
            self.changed.notify_all()
            return first

    def fail(self, error: BaseException) -> None:
        """Record what ended the node's thread. The first error is kept: it causes the others."""
        with self.changed:
            if self.fatal is None:
                self.fatal = error
            self.changed.notify_all()

    def raise_if_over(self) -> None:
        """Raise what ended the node's thread, or the job's end."""
        if self.fatal is not None:
            raise self.fatal
        if self.done is not None:
            raise self._ended(self.done)

    def raise_if_failed(self) -> None:
        """Like :meth:`raise_if_over`, but after a success the workers continue to their end."""
        if self.done is None or self.done.exit_code != 0:
            self.raise_if_over()

    def _ended(self, done: Done) -> Exception:
        if done.exit_code == 0:
            return JobSucceeded(
                f"the job under {self._keys.root} is done: {done.reason}; "
                "to train again, use another --rdzv-id"
            )
        kinds: tuple[type[ElasticError], ...] = (BudgetSpent, CheckpointRequired, ConfigError)
        kind = next((k for k in kinds if k.exit_code == done.exit_code), JobFailed)
        # A refusal of the script by this library ends with its hint, to be followed first.
        reason, _, hint = done.reason.partition("\n")
        message = f"the job under {self._keys.root} has failed: {reason}"
        hint = hint.strip() or ("fix the script" if kind is JobFailed else "")
        # (Not behind lines of code, which would be copied with it.)
        separator = "\nthen " if "\n" in hint else "; then "
        if self.timeline:  # its last part is the advice
            return kind(f"{message}\n\n{self.timeline}\n")
        return kind(
            message,
            hint=separator.join(filter(None, (hint, self._keys.how_to_continue))),
        )


# ----------------------------------------------------------------------------
# The objects shared by the parts of a node's thread: its store, rules, status and clock.


class Inbox:
    """Messages for a node's thread."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, message: object) -> None:
        """Add a message, from any thread or signal handler."""
        self._messages.put(message)

    def take(self, timeout_s: float) -> list[object]:
        """Take all messages; blocks until there is one or ``timeout_s`` has passed. On the node's
        thread."""
        messages: list[object] = []
        try:
            messages.append(self._messages.get(timeout=timeout_s))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """Created once per node, by :meth:`of`."""

    store: KeyValue
    keys: Keys
    secret: RunSecret
    options: AgentOptions
    status: NodeStatus
    journal: EventSink
    clock: Clock = SYSTEM_CLOCK
    tls: Tls | None = None  # between nodes
    inbox: Inbox = field(default_factory=Inbox)
    job_folder: JobFolder = field(default_factory=JobFolder)
    kernel_log: KernelLog = field(default_factory=KernelLog)  # closed by the service

    @classmethod
    def of(
        cls,
        node: Node,
        *,
        store: KeyValue,
        keys: Keys,
        secret: RunSecret,
        options: AgentOptions,
        journal: EventSink,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | None = None,
    ) -> NodeContext:
        """The context of a node that starts."""
        node = replace(node, tls=tls is not None)  # so that all nodes can check compatibility
        return cls(
            store=store,
            keys=keys,
            secret=secret,
            options=options,
            status=NodeStatus(node, keys, clock.monotonic()),
            journal=journal,
            clock=clock,
            tls=tls,
        )

    def post(self, message: object) -> None:
        """Put a message into the node's inbox, from any thread or signal handler."""
        self.inbox.put(message)


# ----------------------------------------------------------------------------
# The messages in the node's inbox, except those of a leader (leadership/).


@dataclass(frozen=True)
class BaseEvent:
    """Something changed under ``leader``, ``world`` or ``done``."""

    event: WatchEvent


@dataclass(frozen=True)
class LeaseEnded:
    """The lease no longer exists, according to the store."""


@dataclass(frozen=True)
class ConnectionOpened:
    """The node at the other end of a liveness connection has been identified."""

    node_id: str
    is_leader: bool


@dataclass(frozen=True)
class ConnectionClosed:
    """A liveness connection with a named peer closed."""

    node_id: str
    was_leader: bool
    fell_silent: bool = False  # not closed: nothing arrived from the peer's machine


@dataclass(frozen=True)
class ConnectionDropped:
    """This node closed its connection to a former leader."""

    node_id: str


@dataclass(frozen=True)
class PushedWorld:
    """The leader sent its new world, ahead of the store's watch."""

    record: bytes


@dataclass(frozen=True)
class WorkersStart:
    """torchrun is about to restart this node's workers."""


@dataclass(frozen=True)
class ReplacementEnded:
    """A process in the place of a dead worker has ended without having connected to the link."""

    pid: int
    local_rank: int
    exit_code: int  # negative: a signal


@dataclass(frozen=True)
class ChangeNode:
    """The main thread changes the node's record."""

    change: Callable[[Node], Node]


@dataclass(frozen=True)
class Close:
    """Close gracefully."""


def publish_change(context: NodeContext, change: Callable[[Node], Node]) -> None:
    """Change the node's record immediately, as seen by the calling thread, and publish it."""
    context.status.change_node(change)
    context.post(ChangeNode(lambda node: node))


# ----------------------------------------------------------------------------
# Publishes the step times of this node's workers, for the detection of stragglers.
#
# A worker reports once a window, and this node writes one small record for all of them. The leader
# compares (:mod:`elastic.agent.judges`). Everything runs on the node's
# thread.


class StepTimesReport:
    """One per agent. If the options turn it off, no worker reports."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._times: dict[int, RankStepTimes] = {}  # by pid
        self._fresh: set[int] = set()  # reported since the record was written

    def on_report(self, pid: int, local_rank: int, times: StepDurations) -> None:
        """A window of a worker has ended."""
        self._times[pid] = RankStepTimes(local_rank=local_rank, times=times)
        self._fresh.add(pid)

    def on_ended(self, pid: int) -> None:
        """A worker has ended."""
        self._times.pop(pid, None)
        self._fresh.discard(pid)

    def publish(self, lease: Lease) -> None:
        """Write the record once all workers have reported: their windows end together. Called with
        the node's live lease."""
        if not self._fresh or len(self._fresh) < self._context.status.node.nproc:
            return
        node_id = self._context.status.node.node_id
        ranks = tuple(sorted(self._times.values(), key=lambda known: known.local_rank))
        record = NodeStepTimes(node_id=node_id, ranks=ranks)
        self._context.store.put(
            self._context.keys.step_times_of(node_id), encode(record), lease=lease
        )
        self._fresh.clear()


# ----------------------------------------------------------------------------
# TLS between nodes, from an agent's options.


def node_tls(options: AgentOptions) -> Tls | None:
    """The TLS of this node's connections to others; None if it is not configured.

    Raises ConfigError for files that cannot be used.
    """
    if not (options.node_cacert and options.node_cert and options.node_key):
        return None  # none of them: AgentOptions takes all or none
    given = options.node_cacert, options.node_cert, options.node_key
    # Workers may have another working directory. (Links are kept: Kubernetes changes files by
    # replacing their targets.)
    try:
        return Tls(TlsFiles(*map(os.path.abspath, given)), report=get_logger().warning)
    except CertificateError as error:
        raise ConfigError(error.message, hint=error.remedy) from None


# ----------------------------------------------------------------------------
# The memory of this machine, or of this container.

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory_bytes() -> int:
    """The installed memory, or the limit of the container if that is less."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *filter(None, map(_limit, _CGROUP_LIMITS))])


def _limit(path: Path) -> int | None:
    """The limit in a file of a control group; None if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max"
