"""The state shared by the node's thread and torchrun's main thread, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.errors import (
    BudgetSpent,
    CheckpointRequired,
    ConfigError,
    ElasticError,
    JobFailed,
    RecordError,
)
from elastic.membership.records import Done, Keys, Node, NodeState, WorldRecord, decode
from elastic.membership.step_rate import StepRate
from elastic.node.watchdog import Watchdog
from elastic.store.keyvalue import Entry

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
        self.world = WorldEntry(None, 0, now)
        # The last ones, newest last: nodes name the world that they run, and this one may lead.
        self.known_worlds: tuple[WorldRecord, ...] = ()
        self.done: Done | None = None
        self.timeline = ""  # of a job that failed: what broke when, for its last error
        self.step_rate: StepRate | None = None  # last reported by this node's workers
        self.stepping_generation = 0  # the newest world in which they have begun a step; 0: none
        self.failure_step: int | None = None  # steps committed by the worker that failed
        self.stopping = False  # torchrun will restart the workers
        self.starts = 0  # of all workers, by torchrun; a death may be reported after the next one
        self.can_replace = False  # torchrun permits the replacement of a single worker
        self.to_replace: set[int] = set()  # pids of dead workers whose siblings keep theirs
        # Pids of workers that were ready, or take the place of dead ones, and of whose death, if
        # any, nothing is decided yet.
        self.undecided: set[int] = set()
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
    def running(self) -> WorldRecord | None:
        """The world that this node's workers run."""
        running = self.node.running
        assert running is None or isinstance(running, WorldRecord), "only other nodes' is a name"
        return running

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

    def change_node(self, change: Callable[[Node], Node]) -> None:
        with self.changed:
            self.node = change(self.node)
            self.changed.notify_all()

    def note_workers_left(self) -> None:
        """The workers have left the job at a step's boundary, as requested."""
        with self.changed:
            self.workers_left = True
            self.changed.notify_all()

    def set_world(self, entry: WorldEntry) -> None:
        with self.changed:
            self.world = entry
            if entry.world is not None and entry.world not in self.known_worlds[-1:]:
                self.known_worlds = (*self.known_worlds, entry.world)[-_KNOWN_WORLDS:]
            self.changed.notify_all()

    def set_world_revision(self, mod_revision: int) -> None:
        """The key changed to something older or unreadable: keep the known world."""
        self.set_world(replace(self.world, mod_revision=mod_revision))

    def learn_world(self, entry: Entry, now: float) -> None:
        """Apply the key's value in the store. Raises RecordError if it cannot be read."""
        known = self.world.world
        if entry.mod_revision < self.world.mod_revision:
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

    def learn_pushed(self, record: bytes, now: float) -> None:
        """Apply a record that the leader pushed. Only the watch sets the revision: that of a record
        in flight while the store was wiped would make every later event look old."""
        known = self.world
        world = decode(WorldRecord, self._keys.world, record)
        if known.world is None or world.generation > known.world.generation:
            self.set_world(WorldEntry(world, known.mod_revision, now))

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
        advice = (hint.strip(), self._keys.how_to_continue)
        return kind(
            f"{message}\n\n{self.timeline}\n" if self.timeline else message,
            hint="; then ".join(filter(None, advice)),
        )
