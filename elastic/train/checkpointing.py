"""Saves and restores in training: when, by whom, and with which outcome."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import checkpoints
from checkpoints import (
    CheckpointError,
    CheckpointInfo,
    CheckpointName,
    LoadError,
    LoadResult,
    ReadFailed,
    RetentionPolicy,
    Root,
    SaveContext,
    SaveHandle,
    SaveOutcome,
    SavePolicy,
    SaveStatus,
    SkippedCheckpoint,
    StateMismatch,
)
from checkpoints.engine import Engine
from checkpoints.loading import LoadGroup
from checkpoints.manifest import why_abandoned
from checkpoints.names import parse_attempt, parse_committed
from checkpoints.policies import split_by_agreement
from checkpoints.reader import THREAD_NAME as READER_THREADS
from checkpoints.storage import is_transient, patient, reason_of
from checkpoints.tensors import is_dtensor
from checkpoints.tree import Node, flatten, unflatten
from elastic.errors import SYSTEM_CLOCK, CheckpointRequired, Clock, TrainingError, WorldLost
from elastic.groups.collectives import (
    RankGroup,
    all_gather_json,
    broadcast_json,
    broadcast_tensors,
    complete,
    control_device,
    peer_group,
    without_timeout,
    world_group,
)
from elastic.groups.world import World
from elastic.hangs.page import CHECKPOINT, busy, phases
from elastic.telemetry.events import (
    CheckpointSaved,
    CheckpointSkipped,
    MemoryIntervalChanged,
    StateRestored,
)
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.train.folder import (
    CheckpointFolder,
    Checkpoints,
    KeepGiven,
    RestoreSource,
    WhenGiven,
    checkpoints_from,
    in_job_folder,
)
from elastic.train.memory import ChosenInterval, MemoryInterval, MemoryTier
from elastic.train.order import ControlFlags, StepFlags, ask
from elastic.train.sharding import local_value
from elastic.train.shards import on_all_ranks
from elastic.train.state import JobState
from elastic.tuning import intervals
from elastic.tuning.environment import staging_shortage
from elastic.tuning.intervals import (
    MEMORY_WAIT_S,
)

# A rank that has written its share waits at least this long for its peers' shares: they began at
# the same time, on similar disks.
LAST_SAVE_PEERS_S = 10.0
# A last save that fails transiently is repeated for this long: a network file system that fails
# over is back within a minute, and no later save would hold this state.
LAST_SAVE_REPEAT_S = 60.0
# Delay between the checks of the folder by consecutive ranks.
LAST_SAVE_TURN_S = 0.25
# A last save that takes longer is announced in the log.
LAST_SAVE_QUIET_S = 2.0
# How often it is checked whether a save is committed.
SAVE_SLICE_S = 0.02
# A disk that is slower than the policy slows training down to its rate. A disk that hangs does not:
# after one wait of this length, saves are skipped until it responds.
BUSY_WAIT_S = 5.0

# ----------------------------------------------------------------------------
# Evaluates a job's save policy between two steps, with the same answer on all ranks.
#
# A policy that depends only on the step is evaluated on each rank. A policy that depends on time
# or on saves in flight is evaluated by rank 0 one step ahead; its decision is sent with the
# gradients of that step (:mod:`elastic.train.order`), so that all ranks know
# it at the same boundary and no rank waits.

_SMOOTHING = 0.3  # exponential smoothing of the cost of a save


class Due:
    """Evaluates a policy and provides its context. All times are from one monotonic clock."""

    def __init__(self, when: SavePolicy, clock: Clock) -> None:
        self.when = when
        self.failures = 0  # known number of broken worlds
        self._clock = clock
        self._rank, self._size = 0, 1
        self._began_s = self._saved_s = clock.monotonic()
        self._cost_s = 0.0
        self._knows_of_leaving = False
        # In this world: the steps of the last two evaluations.
        self._steps: tuple[int | None, int | None] = (None, None)

    def enter(self, *, rank: int, size: int) -> None:
        """Reset for a new world."""
        self._rank, self._size = rank, size
        self._knows_of_leaving = False
        self._steps = (None, None)

    def observed(self, running_s: float, failures: int) -> None:
        """Add the history from earlier processes of this job."""
        self._began_s -= running_s
        self.failures += failures

    @property
    def needs_agreement(self) -> bool:
        """Whether rank 0 decides for all ranks."""
        return self._size > 1 and self.when.needs_agreement

    def saved(self) -> None:
        """Record the start of a save."""
        self._saved_s = self._clock.monotonic()

    def measured(self, stall_s: float) -> None:
        """Record the time that a save blocked training."""
        before_s = self._cost_s or stall_s
        self._cost_s = before_s + _SMOOTHING * (stall_s - before_s)

    def is_due(
        self, step: int, saved_step: int, received: StepFlags | None, in_flight: int = 0
    ) -> bool:
        """Whether all ranks save now, with ``step`` steps done."""
        if step != self._steps[0]:
            self._steps = step, self._steps[0]
        if received is not None and received.stuck:
            return False  # one rank cannot save: a checkpoint needs the shares of all
        is_leaving = received is not None and received.leaving
        preempted = is_leaving and not self._knows_of_leaving  # reported once
        self._knows_of_leaving = is_leaving
        context = self._save_context(step, saved_step, in_flight, preempted)
        local, agreed = split_by_agreement(self.when)
        if local is not None and local(context):
            return True
        if agreed is None:
            return False
        if self._size == 1:
            return agreed(context)
        return received is not None and received.save and step > saved_step

    def is_due_before_leaving(self, step: int, saved_step: int, in_flight: int) -> bool:
        """Whether all ranks save at the boundary at which nodes leave. Not if the control flags of
        an earlier step carried the notice."""
        local, _ = split_by_agreement(self.when)
        if local is None or self._knows_of_leaving:
            return False
        return local(self._save_context(step, saved_step, in_flight, True))

    def wants(self, step: int, saved_step: int, in_flight: int) -> bool:
        """Rank 0: whether all ranks save at ``step``, the next boundary."""
        _, agreed = split_by_agreement(self.when)
        if agreed is None or self._rank != 0 or self._size == 1:
            return False
        return agreed(self._save_context(step, saved_step, in_flight, False))

    def _save_context(
        self, step: int, saved_step: int, in_flight: int, preempted: bool
    ) -> SaveContext:
        return SaveContext(
            step=step,
            now_s=self._clock.monotonic(),
            began_s=self._began_s,
            saved_step=saved_step,
            saved_s=self._saved_s,
            in_flight=in_flight,
            preempted=preempted,
            save_cost_s=self._cost_s,
            failures=self.failures,
            previous_step=self._steps[step == self._steps[0]],
        )


# ----------------------------------------------------------------------------
# Checks the node's memory limit in a worker, once the size of a checkpoint is known.


def resident_bytes() -> int:
    """The resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class MemoryLimit:
    """Warns once per process if a checkpoint does not fit into memory. Reads
    ``ELASTIC_MEMORY_LIMIT_BYTES``, which the agent has checked; without it, never warns."""

    def __init__(
        self, environ: Mapping[str, str] = os.environ, used: Callable[[], int] = resident_bytes
    ) -> None:
        limit = environ.get("ELASTIC_MEMORY_LIMIT_BYTES", "")
        self._limit_bytes = int(limit) if limit.isdecimal() else None
        self._local_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        self._used = used

    def saw_share(self, share_bytes: int, world_size: int) -> None:
        """Check one rank's share of a checkpoint in a world of that size. Warns once."""
        if self._limit_bytes is None:
            return
        shortage = staging_shortage(
            self._limit_bytes, self._used(), share_bytes, world_size, self._local_size
        )
        if shortage is not None:
            get_logger().warning("%s", shortage)
            self._limit_bytes = None


# ----------------------------------------------------------------------------
# Reports how each save ended: an event in the journal, and a warning if several fail in a row.

WARN_AFTER_FAILURES = 2  # one may be a transient disk error; a series means lost work


class OutcomeLog:
    """Records outcomes, and the newest step known to be committed. One per process."""

    def __init__(self, journal: EventSink) -> None:
        self.committed_step = 0
        self._journal = journal
        self._failures_in_a_row = 0

    def ended(self, outcome: SaveOutcome, *, is_known_elsewhere: bool) -> None:
        """Record the end of a save. ``is_known_elsewhere``: another rank also logs its commit."""
        if outcome.status is not SaveStatus.COMMITTED:
            # A later step is saved, so that a restart loses nothing; or the world has ended, and
            # the next one saves this step, or has already saved it.
            is_superseded = outcome.step <= self.committed_step
            is_harmless = is_superseded or outcome.status is SaveStatus.STALE
            level = logging.DEBUG if is_harmless else logging.WARNING
            self.skipped(outcome.name, f"{outcome.status.value}: {outcome.reason}", level=level)
            if is_superseded:
                return
            self._failures_in_a_row += 1
            if self._failures_in_a_row == WARN_AFTER_FAILURES:
                self._warn_of_failures(outcome)
            return
        self._failures_in_a_row = 0
        self.committed_step = max(self.committed_step, outcome.step)
        for note in outcome.notes:
            self.skipped(outcome.name, note)
        self._journal.emit(
            CheckpointSaved(
                name=outcome.name,
                step=outcome.step,
                duration_s=round(outcome.took_s, 4),
                stall_s=round(outcome.stall_s, 4),
                bytes=outcome.bytes_written,
            ),
            level=logging.DEBUG if is_known_elsewhere else logging.INFO,
        )

    def skipped(self, name: str, reason: str, *, level: int = logging.WARNING) -> None:
        """Report a skipped save or load."""
        self._journal.emit(CheckpointSkipped(name=name, reason=reason), level=level)

    def memory_interval(
        self, chosen: ChosenInterval, before: int, *, is_known_elsewhere: bool
    ) -> None:
        """Report another interval between two saves to memory. All ranks choose the same one."""
        self._journal.emit(
            MemoryIntervalChanged(
                every_steps=chosen.every_steps, before=before, reason=chosen.reason
            ),
            level=logging.DEBUG if is_known_elsewhere else logging.INFO,
        )

    def _warn_of_failures(self, outcome: SaveOutcome) -> None:
        get_logger().warning(
            "the last %d checkpoints were not saved (%s: %s); training continues, but a restart "
            "would go back to step %d",
            self._failures_in_a_row,
            outcome.name,
            outcome.reason,
            self.committed_step,
        )


# ----------------------------------------------------------------------------
# The writers of a checkpoint: the ranks of the current world, its generation and lineage.
#
# A save belongs to the world that began it. When that world breaks, a dead peer's share may be
# missing: a save that is not committed by then is abandoned, and the next world's rank 0 removes
# it.


@dataclass(eq=False)
class Writers:
    """The ranks of one world, as the writers of its checkpoints."""

    group: checkpoints.WriterGroup
    is_over: bool = False  # the world broke: uncommitted saves lack a share


class WriterHistory:
    """The writers of the current world, and the lineage of their saves. One per process."""

    def __init__(self) -> None:
        self.lineage: checkpoints.Lineage = ()
        self.generation = 0  # of this rank's state
        self.present: Writers | None = None  # between two worlds, the writers of the last one
        self.is_writer = True  # this rank writes a share of its world's saves
        self.broken_worlds = 0  # in this process

    def descend(self, lineage: checkpoints.Lineage, generation: int) -> None:
        """Save as ``generation`` from now on, with these ancestors."""
        self.lineage, self.generation = lineage, generation

    def enter(
        self, world: World, job: JobState, may_commit: Callable[[Writers], bool]
    ) -> checkpoints.WriterGroup:
        """Save for ``world`` from now on. ``may_commit`` is called on the engine's thread."""
        # Each replica of several ranks holds one copy of the state: the first replica writes.
        self.is_writer = not job.is_sharded or world.replica == 0
        writers = Writers(
            checkpoints.WriterGroup(
                nonce=world.nonce,
                generation=self.generation,
                rank=world.rank_in_replica if job.is_sharded else world.rank,
                size=world.mesh.size if job.is_sharded else world.size,
                lineage=self.lineage,
                section=job.stage.ranks if job.stage is not None else None,
                fence=lambda: may_commit(writers),
            )
        )
        self.present = writers
        return writers.group

    def leave(self, *, broken: bool) -> bool:
        """End the current world; returns whether it has just broken."""
        if self.present is None or not broken or self.present.is_over:
            return False
        self.present.is_over = True
        self.broken_worlds += 1
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the ranks of the current world can still save together."""
        return self.present is not None and not self.present.is_over

    @property
    def rank(self) -> int:
        """This writer's rank in the current or last world."""
        return self.present.group.rank if self.present is not None else 0

    @property
    def world_size(self) -> int:
        """The number of writers in the current or last world."""
        return self.present.group.size if self.present is not None else 1

    @property
    def nonce(self) -> str:
        """The nonce of the current or last world."""
        return self.present.group.nonce if self.present is not None else ""

    def before_callbacks(self, left: int) -> checkpoints.WriterGroup:
        """The writers of this world whose last step still lacks ``left`` callbacks."""
        assert self.present is not None
        group = self.present.group
        return dataclasses.replace(group, nonce=f"{group.nonce}c{left}")

    def of_one(self) -> checkpoints.WriterGroup:
        """A new writer group, for a checkpoint that only this rank writes. Its nonce begins with
        the world's, so that others do not take it for a checkpoint of another run."""
        return checkpoints.WriterGroup(
            nonce=f"{self.nonce}x{checkpoints.new_nonce()}",
            generation=self.generation,
            lineage=self.lineage,
        )


# ----------------------------------------------------------------------------
# Finds, loads and saves the checkpoints of one process.
#
# Used only by the :mod:`~elastic.train.checkpointing` and within this package. One
# engine serves the whole process: the caller's thread copies this rank's share, and a thread of
# the engine writes and commits it. Nothing here waits for another rank, and every failure is an
# event: training continues with the older checkpoints.


Locate = Callable[[Root], Root]  # the folder of the job, from the one that was given


def leaving_s() -> float:
    """The time, in seconds, for a last save in a process that ends with an exception or on request.

    It is derived from the pod's grace period; on SIGTERM it is the rest of that period.

    Raises:
        ConfigError: the pod's grace period is not a number of seconds.
    """
    return intervals.checkpoint_budget_s(intervals.termination_grace_of(os.environ))


class Peers(Enum):
    """The state of the other ranks while this process flushes its last state."""

    SAVE_AS_WELL = "every rank of the world flushes the same step"
    ARE_GONE = "some parts will be missing: one of the remaining ranks writes the complete state"
    CONTINUE = "all ranks hold the state: this rank writes its part"


class CheckpointManager:
    """Finds, loads and saves this job's checkpoints. One per process.

    :meth:`restore` gives all ranks of a new world the same state, :meth:`at_boundary` runs between
    two steps, and :meth:`flush` commits the state before the process ends. Without a policy nothing
    is saved, and ``restore`` shares rank 0's initial state.
    """

    def __init__(
        self, policy: Checkpoints | None, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        leaving_s()  # refuse an invalid grace period now, not at the end
        self._clock = clock
        self._outcomes = OutcomeLog(journal)
        self._journal = journal
        self.flags = ControlFlags()  # to piggyback on each step's gradients
        self._sent = StepFlags()
        self._has_stepped = False  # in this world, since the last boundary
        self.writers = WriterHistory()
        self.is_superseded: Callable[[], bool] = lambda: False  # a newer world is known
        self.is_permitted: Callable[[], bool] = lambda: True  # this node's agent permits commits
        self.is_resumed = False  # the state comes from a checkpoint
        self._saved_step = 0  # the last step that this world need not save again
        self._latest: SaveHandle | None = None  # of the current world
        self._others_are_stuck = False
        self._is_owed = False  # a save was due while the weights were ahead
        self._memory_limit = MemoryLimit()
        self._policy: Checkpoints | None = None
        self._memory: MemoryTier | None = None
        self.folder: CheckpointFolder | None = None
        self.due: Due | None = None  # None: closed, too
        self.engine: Engine | None = None
        self._locate: Locate = lambda root: root
        if policy is not None:
            self._open(policy)

    def _open(self, policy: Checkpoints) -> None:
        """Save by ``policy`` from now on."""
        self._policy = policy
        self.folder = CheckpointFolder(self._locate(policy.folder), self._outcomes.skipped)
        if policy.memory:
            self._keep_in_memory(policy)
        self.due = Due(policy.saving, self._clock)
        self.engine = Engine(
            self.folder.storage,
            keep=_AmendableRetention(self),
            clock=self._clock.wall,
            monotonic=self._clock.monotonic,
        )

    def keep_shards_in_memory(self) -> None:
        """Save to the nodes' memory, because no rank holds the complete state, unless the policy
        disables that. Steps then wait for this rank's earlier writes."""
        if self._policy is None or self._policy.memory is False:
            return
        if self._memory is None:
            self._keep_in_memory(self._policy)
        if self._memory is not None:
            self._memory.waits = True

    @property
    def memory_interval(self) -> MemoryInterval | None:
        """The interval between two saves to memory; None: disabled."""
        return self._memory.interval if self._memory is not None else None

    def _keep_in_memory(self, policy: Checkpoints) -> None:
        assert self.folder is not None
        self.folder.has_memory = True
        interval = MemoryInterval(
            policy.memory_steps,
            overhead=policy.memory_overhead,
            clock=self._clock,
            changed=lambda chosen, before: self._outcomes.memory_interval(
                chosen,
                before,
                is_known_elsewhere=self.writers.rank > 0 or not self.writers.is_writer,
            ),
        )
        self._memory = MemoryTier(
            interval,
            report=self._outcomes.skipped,
            clock=self._clock,
        )

    # -- the folder ---------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are enabled."""
        return self._policy is not None

    @property
    def policy(self) -> Checkpoints | None:
        """The configuration of checkpoints."""
        return self._policy

    def check_writable(self, world: World) -> None:
        """Raise ConfigError if this worker cannot write to the folder."""
        if self.folder is not None:
            self.folder.check_writable(world.rank)

    def resolve(self, world: World) -> RestoreSource:
        """On rank 0: commit or remove leftovers, and choose the checkpoint to resume from.

        Raises CheckpointRequired if there is none and one is required, or if none is complete;
        ConfigError if another job saves to the folder.
        """
        if self.folder is None or self._policy is None or self.due is None:
            return RestoreSource(None, world.generation)
        if before := self.folder.ownership.claim():
            self.due.observed(before.running_s, before.failures)
        return self.folder.resolve(world, required=self._policy.required)

    def choose_again(self, refused: Sequence[SkippedCheckpoint]) -> str | None:
        """On rank 0: another checkpoint to resume from, after the load of these has failed. Raises
        as :meth:`resolve` does."""
        assert self.folder is not None and self._policy is not None
        return self.folder.choose(refused, required=self._policy.required)

    def load(
        self, name: str, job: JobState, group: LoadGroup | None = None
    ) -> checkpoints.LoadResult:
        """Read and verify this rank's part of a checkpoint. ``group``: the ranks that load a state
        that is not sharded."""
        assert self.folder is not None
        # Of a world that has ended, nobody waits for the state, but the next one for this rank.
        works = world_group().works
        return self.folder.load(name, job, group, progress=lambda _: works.raise_if_aborted())

    @property
    def is_open(self) -> bool:
        """Whether saves are accepted: not without a folder, nor after :meth:`close`."""
        return self.due is not None

    def fence(self, *, is_superseded: Callable[[], bool], is_permitted: Callable[[], bool]) -> None:
        """Commit nothing once a newer world is known, or without the agent's permission.

        Both are called on the engine's thread.
        """
        self.is_superseded, self.is_permitted = is_superseded, is_permitted

    def locate(self, job_folder: Callable[[str], str]) -> None:
        """From now on, use the job's folder, which ``job_folder`` returns for that of this process.
        Called before the first world."""
        self._locate = functools.partial(in_job_folder, job_folder=job_folder)
        if self._policy is not None and self._locate(self._policy.folder) != self._policy.folder:
            self._open(self._policy)

    def amend(
        self,
        given: Checkpoints | Root | None,
        when: WhenGiven = None,
        keep: KeepGiven = None,
        *,
        is_restored: bool,
    ) -> None:
        """Change how the job saves.

        Raises TrainingError for a folder that is set too late, and ConfigError for contradictory
        options.
        """
        policy = self._policy
        if policy is not None:
            self._policy = policy.amended(given, when, keep)
            if self.due is not None:
                self.due.when = self._policy.saving
            return
        if given is not None and is_restored:
            folder = given.folder if isinstance(given, Checkpoints) else given
            raise TrainingError(
                f"checkpoints={folder} is set after the state was restored",
                hint="use elastic.join(checkpoints=…): run.retry and run.epochs restore the state",
            )
        if (policy := checkpoints_from(given, when=when, keep=keep)) is not None:
            self._open(policy)

    # -- worlds -------------------------------------------------------------------------------

    def restore(self, world: World, job: JobState, *, may_begin: bool = True) -> int:
        """Give all ranks the same state. Returns the generation with which the job continues.

        It is the world's, or a later one if the checkpoint folder already contains it. Without a
        checkpoint, all ranks get rank 0's initial state if ``may_begin``; otherwise
        CheckpointRequired is raised.
        """
        with without_timeout():
            return restore(world, job, self, self._journal, may_begin=may_begin)

    def resume(self, origin: checkpoints.CheckpointInfo | None, generation: int, step: int) -> None:
        """Save as ``generation`` from now on, which begins at ``step`` with ``origin``'s state."""
        self.writers.descend(checkpoints.derive_lineage(origin, generation), generation)
        self.is_resumed = origin is not None
        self._saved_step = self._outcomes.committed_step = step

    @property
    def origin(self) -> tuple[checkpoints.Lineage, int, int]:
        """Lineage, generation and last committed step, for the next world's saves."""
        self.poll()
        return self.writers.lineage, self.writers.generation, self._outcomes.committed_step

    def inherit(self, lineage: checkpoints.Lineage, generation: int, saved_step: int) -> None:
        """Save as ``generation`` from now on; its state comes from a live peer."""
        self.writers.descend(lineage, generation)
        self._saved_step = self._outcomes.committed_step = saved_step

    def begin_world(self, world: World, job: JobState) -> None:
        """Save for ``world`` from now on: the state is restored and the same on all ranks."""
        self._send(StepFlags())
        self._has_stepped = False
        if self.folder is None or self.due is None or self.engine is None:
            return
        before = self.writers.present
        writes = self.writers.enter(world, job, self._may_commit)
        self._latest = None
        self.due.enter(rank=world.rank, size=world.size)
        self._is_owed = False
        if self._memory is not None:
            # Other ranks write from now on if the first replica has changed, and parts of the last
            # save may be in the memory of one node only.
            self._memory.enter_world(world.size, saves_first=job.is_sharded)
        if world.rank == 0:
            self.folder.ownership.failures = lambda: self.writers.broken_worlds
            self.folder.ownership.hold()
        if self.writers.is_writer:
            self.engine.reserve(
                job.saved_tree(),
                rank=writes.rank,
                world_size=writes.size,
                section=writes.section,
                background=True,
            )
        if world.rank == 0 and before is not None and before.is_over:
            generation = self.writers.generation
            self.engine.submit(lambda: self._sweep(generation, world.nonce))

    def end_world(self, *, broken: bool) -> None:
        """End the current world. If it is broken, a dead peer may never write its shares."""
        if self.writers.leave(broken=broken) and self.due is not None:
            self.due.failures += 1

    def _may_commit(self, writers: Writers) -> bool:
        """Whether no newer world is known and the agent permits commits. Called on the engine's
        thread."""
        is_present = writers is self.writers.present
        is_stale = writers.is_over or (is_present and self.is_superseded())
        if is_stale or not self.is_permitted():
            return False
        return self.folder is None or self.folder.ownership.may_commit()

    def _sweep(self, generation: int, nonce: str) -> None:
        """Commit or remove the broken world's leftovers. Called on the engine's thread."""
        assert self.folder is not None
        try:
            collected = checkpoints.collect_garbage(
                self.folder.storage, generation=generation, nonce=nonce
            )
        except CheckpointError as error:
            self._outcomes.skipped("leftovers", str(error))
            return
        for leftover in collected.failed:
            self._outcomes.skipped(leftover.folder, leftover.reason)

    # -- steps --------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """Called after a step's control flags were exchanged with its gradients."""
        self._has_stepped = True

    def at_boundary(
        self, job: JobState, together: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> StepFlags | None:
        """Between two steps: report finished saves, and begin one if it is due on all ranks.

        Returns the control flags of all ranks, or None if no step ended since the last boundary.
        ``together``: creates the context for a collective of the world.
        """
        if not self.is_open:
            return None
        received = None
        if self._has_stepped:
            received = self.flags.received()
            if received is None and self.needs_agreement:
                with together():
                    received = ask(self._sent)
        self._has_stepped = False
        interval = self.memory_interval
        if interval is not None and interval.needs_agreement:
            with together():
                interval.agree(job.progress.step)
        self.save_if_due(job, received)
        return received

    def announce(self, job: JobState, *, is_leaving: bool) -> None:
        """Choose the control flags that this rank sends with a step's gradients."""
        if self.is_open:
            self._send(self._choose_flags(job.progress.step, leaving=is_leaving))

    def save_if_due(self, job: JobState, received: StepFlags | None) -> None:
        """Between two steps: report finished saves, and save on all ranks if it is due.

        ``received``: all ranks' control flags of the last step; None if there was no step.
        """
        if self.due is None or self.engine is None:
            return
        phases.enter(CHECKPOINT)
        self._report_ended()
        in_flight = int(self.engine.is_busy)
        is_stuck = received is not None and received.stuck
        if is_stuck and not self._others_are_stuck:
            reason = (
                "the disk of a rank hangs, or its folder belongs to another job: no rank saves "
                "until that ends"
            )
            self._outcomes.skipped(f"step {job.progress.step}", reason)
        self._others_are_stuck = is_stuck
        is_due = self.due.is_due(job.progress.step, self._saved_step, received, in_flight)
        is_due |= self._is_owed
        self._is_owed = is_due and is_stuck
        if is_due and not is_stuck:
            self.save(job)
        if self._memory is not None and (group := self._group) is not None:
            is_writer = self.writers.is_writer
            self._memory.at_boundary(job, group, is_writer=is_writer)

    def before_leaving(self, job: JobState) -> None:
        """At the boundary at which nodes leave: save if the policy saves on the notice, and the
        notice was too late for the control flags of the world's last step.

        Without a vote. If a rank learns of the change later still, its share is missing, and the
        checkpoint is never committed.
        """
        if self.due is None or self.engine is None or self._others_are_stuck:
            return
        in_flight = int(self.engine.is_busy)
        if self.due.is_due_before_leaving(job.progress.step, self._saved_step, in_flight):
            self.save(job)

    @property
    def needs_agreement(self) -> bool:
        """Whether the ranks must exchange control flags before :meth:`save_if_due`."""
        return self.due is not None and self.due.needs_agreement

    def _choose_flags(self, step: int, *, leaving: bool) -> StepFlags:
        """The control flags that this rank sends in ``step``."""
        assert self.due is not None and self.engine is not None
        wants = self.due.wants(step + 1, self._saved_step, int(self.engine.is_busy))
        is_lost = self.folder is not None and self.folder.ownership.is_lost
        return StepFlags(save=wants, leaving=leaving, stuck=self.engine.is_stuck or is_lost)

    def save(self, job: JobState, *, wait_s: float | None = None) -> SaveHandle | None:
        """Begin to write this rank's share, unless this step is already saved. Never blocks
        training.

        ``wait_s``: how long to wait for a buffer; default BUSY_WAIT_S, and 0 while the disk hangs.
        Raises checkpoints.StateError if the state has values that cannot be saved.
        """
        step = job.progress.step
        if self.due is None or self.writers.present is None or step <= self._saved_step:
            return None
        if self.folder is None or self.folder.ownership.is_lost:
            return None
        self._saved_step = step
        self.due.saved()
        if wait_s is None:
            wait_s = 0.0 if self.engine is None or self.engine.is_stuck else BUSY_WAIT_S
        return self.save_again(job, wait_s=wait_s)

    def save_again(self, job: JobState, *, wait_s: float) -> SaveHandle | None:
        """Write this rank's share of the current step again, after its save was skipped."""
        assert self.writers.present is not None
        if not self.writers.is_writer:
            return None
        self._latest = self.begin(job, self.writers.present.group, wait_s=wait_s)
        return self._latest

    def begin(self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float) -> SaveHandle:
        """Pass this rank's share of a checkpoint of ``world`` to the engine."""
        assert self.engine is not None
        handle = self.engine.save_async(
            job.saved_tree(),
            step=job.progress.step,
            world=world,
            data_position=job.data_position(),
            wait_s=wait_s,
        )
        self._report_ended()
        return handle

    def _save_to_memory(self, job: JobState, budget_s: float) -> bool:
        """Write this rank's share to the nodes' memory and wait for it; all ranks leave at this
        step. Returns whether the memory tier is available."""
        if self._memory is not None and (group := self._group) is not None:
            self._memory.save_now(job, group, budget_s)
        return self._memory is not None and self._memory.is_hosted

    def save_between_worlds(self, job: JobState, *, is_last: bool, nodes_leave: bool) -> None:
        """Save this step, at which all ranks leave the current world and none keeps its state.

        The next world restores from the nodes' memory. If nodes leave, a save to disk begins as
        well: others may leave before the next world has restored the state. ``is_last``: no world
        follows, so this returns once the save is on disk.
        """
        if not self.is_open:
            return
        is_in_memory = self._save_to_memory(job, MEMORY_WAIT_S)
        if is_last or not is_in_memory:
            self.flush(job, leaving_s())
        elif nodes_leave:
            self.save(job)

    @property
    def first_memory_step(self) -> int | None:
        """The job's first save to the nodes' memory is at this step; None: disabled."""
        interval = self.memory_interval
        return interval.first_steps if interval is not None else None

    def begin_in_memory(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """Begin to write this rank's share to the nodes' memory; None without a memory tier."""
        if self._memory is None:
            return None
        return self._memory.begin(job, world, wait_s=wait_s)

    # -- the end ------------------------------------------------------------------------------

    @property
    def _group(self) -> checkpoints.WriterGroup | None:
        """The writers of the current world; None if they can no longer save together."""
        present = self.writers.present
        return present.group if present is not None and not present.is_over else None

    def flush(
        self,
        job: JobState,
        deadline_s: float,
        peers: Peers = Peers.SAVE_AS_WELL,
        *,
        before_alone: Callable[[], object] = lambda: None,
    ) -> bool:
        """Commit the job's current step within ``deadline_s`` seconds.

        ``before_alone`` is called if peers that should save as well do not, and this rank may write
        the complete state. Returns whether the step is known to be committed; for
        ``Peers.CONTINUE``, whether this rank's share is written.
        """
        if not self.is_open:
            return False
        last = LastSave(self, job, deadline_s)
        if peers is Peers.CONTINUE:
            return last.share()
        if peers is Peers.ARE_GONE:
            return last.alone()
        return last.together(before_alone)

    def stop(self) -> None:
        """Accept no further saves, because the state must not be restored."""
        self.due = None

    def has_begun(self, step: int) -> bool:
        """Whether all ranks of the world save that step, or have."""
        return self._saved_step >= step

    @property
    def committed_step(self) -> int:
        """The newest step that is known to be on disk."""
        return self._outcomes.committed_step

    def has_committed(self, step: int) -> bool:
        """Whether the step is known to be on disk."""
        return self._outcomes.committed_step >= step

    def handle_of(self, step: int) -> SaveHandle | None:
        """The save of that step in the current world, if any."""
        return self._latest if self._latest is not None and self._latest.step == step else None

    def why_unsaved(self, job: JobState) -> str:
        """After the last save: why the job's step is not on disk. Empty: it is, or need not be,
        because checkpoints are off or another world goes on."""
        step = job.progress.step
        handle = self.handle_of(step)
        if not self.is_open or self.has_committed(step) or _is_stale(handle):
            return ""
        outcome = handle.outcome if handle is not None else None
        why = outcome.reason.partition("\n")[0] if outcome is not None else "not within the time"
        return f"the last state, of step {step}, could not be saved in {self.place}: {why}"

    @property
    def place(self) -> str:
        """The checkpoint folder, for messages."""
        return self.folder.storage.place if self.folder is not None else ""

    def list_later(self, answer: Callable[[list[str] | None], object]) -> None:
        """Call ``answer`` with the names in the folder, on the engine's thread; with None if the
        folder cannot be listed for STORAGE_PATIENCE_S, which is reported."""
        assert self.folder is not None and self.engine is not None
        storage = patient(self.folder.storage)

        def list_names() -> None:
            try:
                answer(storage.list(""))
            except OSError as error:
                self._outcomes.skipped(
                    "last checkpoint", f"{storage.place} cannot be listed: {reason_of(error)}"
                )
                answer(None)

        self.engine.submit(list_names)

    def poll(self) -> None:
        """Report finished saves and detect hung ones."""
        self._report_ended()
        if self._memory is not None:
            self._memory.poll()

    def wait(self, budget_s: float) -> bool:
        """Wait until no save is in flight; False if one still is."""
        is_done = self.engine is None or self.engine.wait(budget_s)
        self._report_ended()
        return is_done

    def finish_writing(self, budget_s: float) -> None:
        """Wait until this rank's share of every save is written; others may still commit it."""
        if self.engine is not None:
            self.engine.finish_writing(budget_s)
            self._report_ended()

    def release(self) -> None:
        """Release the folder for another job: this one has ended."""
        if self.folder is not None:
            self.folder.ownership.close(release=True)

    def close(self, budget_s: float) -> None:
        """Wait up to ``budget_s`` for this rank's shares, then accept no more saves.

        Saves that wait for peers' shares are left to them or to the next start.
        """
        self.due = None
        if self.folder is not None and self.engine is not None:
            self.folder.ownership.close(release=False)
            self.engine.finish_writing(budget_s)
            self.engine.close(0.0)
            self._report_ended()
        if self._memory is not None:
            self._memory.close()

    def _send(self, flags: StepFlags) -> None:
        self._sent = flags
        self.flags.send(flags)

    # -- outcomes -----------------------------------------------------------------------------

    def _report_ended(self) -> None:
        """Report the saves to disk that ended, and detect hung ones."""
        for outcome in self.engine.outcomes() if self.engine is not None else ():
            self.report(outcome)

    def report(self, outcome: SaveOutcome) -> None:
        """Record how a save of this process ended."""
        # All ranks see a commit; one line in the logs is enough.
        is_known_elsewhere = self.writers.rank > 0 and self.writers.nonce in outcome.name
        self._outcomes.ended(outcome, is_known_elsewhere=is_known_elsewhere)
        if outcome.status is SaveStatus.COMMITTED:
            phases.saved(outcome.step)
            if self.due is not None:
                self.due.measured(outcome.stall_s)
            self._memory_limit.saw_share(outcome.bytes_written, self.writers.world_size)


class _AmendableRetention(RetentionPolicy):
    """The current policy, which a script may change during training."""

    def __init__(self, saver: CheckpointManager) -> None:
        self._saver = saver

    def select(self, newest_first, look):  # type: ignore[no-untyped-def]
        policy = self._saver.policy
        assert policy is not None
        return policy.keeping.select(newest_first, look)


# ----------------------------------------------------------------------------
# The last checkpoint of a process: on disk before the process ends, or abandoned after a time.
#
# All ranks of a complete world save together, as usual, and wait until one of them has committed.
# If peers have died, their shares never arrive. But every rank has the complete state, so one of
# the remaining ranks writes all of it, as a world of one. The ranks need no agreement on which:
# they list the folder in the order of their ranks, and the first one that finds no other attempt
# writes.

# How much longer a rank waits for other ranks' shares than for its own.
PEERS_FACTOR = 2.0
LAST_TURN = 8  # higher ranks share this turn: lower ranks rarely all die at once


class _StepStatus(Enum):
    """The status of a step in the folder."""

    COMMITTED = "it is committed"
    BEGUN = "another rank is writing it"
    NOTHING = "no rank is writing it"
    UNKNOWN = "the folder cannot be listed, or the disk does not respond"


class LastSave:
    """One attempt to commit the job's current step. ``saver`` has a policy."""

    def __init__(
        self, saver: CheckpointManager, job: JobState, budget_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._saver = saver
        self._job = job
        self._clock = clock
        self._began_s = clock.monotonic()
        self._until_s = self._began_s + budget_s
        self._is_announced = False
        self._step = job.progress.step

    def together(self, before_alone: Callable[[], object] = lambda: None) -> bool:
        """Called by every rank of a complete world at the same step. Returns whether the step is
        committed. ``before_alone``: see :meth:`CheckpointManager.flush`."""
        if not self._saver.writers.is_writer:
            return self._wait_until_committed()
        if self._saver.writers.is_complete:
            self._saver.save(self._job, wait_s=self._left_s())
            handle = self._saver.handle_of(self._step)
            if handle is not None and _was_skipped(
                handle
            ):  # a save during training does not wait for a buffer; this one does
                handle = self._saver.save_again(self._job, wait_s=self._left_s())
            is_alone = self._saver.writers.world_size == 1
            if is_alone:
                handle = self._repeated(
                    handle, lambda: self._saver.save_again(self._job, wait_s=self._left_s())
                )
            if self._wait_for_commit(handle, is_alone=is_alone):
                return True
            # An earlier save that was still running when the end of the job was announced (a
            # world without members) is stale: it did not commit, so this rank may.
            is_overtaken = _is_stale(handle) and self._saver.is_permitted()
            if is_alone and not is_overtaken:
                return False  # no permission, or the disk has failed or does not respond
        before_alone()
        self._step = self._job.progress.step  # it may have gone back
        return self.alone()

    def alone(self) -> bool:
        """Let one of the remaining ranks write the complete state. Returns whether the step is
        committed."""
        if self._saver.has_committed(self._step):
            return True
        if (self._job.is_sharded or self._job.is_rebuilt) and self._saver.writers.world_size > 1:
            return False  # this rank has only shards
        turn_s = self._clock.monotonic() + LAST_SAVE_TURN_S * min(
            self._saver.writers.rank, LAST_TURN
        )
        while self._left_s() > 0:
            # Checked before its turn, too: a rank that sees the step committed stops waiting.
            self._wait(
                lambda: False, at_most_s=min(LAST_SAVE_TURN_S, turn_s - self._clock.monotonic())
            )
            status = self._list()
            if status is _StepStatus.NOTHING and self._clock.monotonic() >= turn_s:
                return self._write_all()
            if status in (_StepStatus.COMMITTED, _StepStatus.UNKNOWN):
                return status is _StepStatus.COMMITTED
            if status is _StepStatus.BEGUN:
                self._wait(lambda: False, at_most_s=LAST_SAVE_TURN_S)
        return False

    def _wait_until_committed(self) -> bool:
        """Wait until another replica has committed the state."""
        while self._left_s() > 0:
            status = self._list()
            if status in (_StepStatus.COMMITTED, _StepStatus.UNKNOWN):
                return status is _StepStatus.COMMITTED
            self._wait(lambda: False, at_most_s=LAST_SAVE_TURN_S)
        return False

    def share(self) -> bool:
        """Write only this rank's share. It is committed if all other ranks do the same."""
        writers, left = self._saver.writers, self._job.progress.callbacks_left
        if left and writers.is_complete and writers.is_writer:
            # Ranks that have called these callbacks may have saved this step, in another state.
            group = writers.before_callbacks(left)
            handle: SaveHandle | None = self._saver.begin(self._job, group, wait_s=self._left_s())
        else:
            if writers.is_complete:
                self._saver.save(self._job, wait_s=self._left_s())
            handle = self._saver.handle_of(self._step)
        return handle is not None and self._wait(lambda: handle.is_written)

    def _write_all(self) -> bool:
        world = self._saver.writers.of_one()
        in_memory = self._saver.begin_in_memory(self._job, world, wait_s=self._left_s())
        if in_memory is not None:  # faster, and it survives this process
            self._wait(lambda: in_memory.outcome is not None, at_most_s=self._left_s() / 2)

        def begin() -> SaveHandle:
            return self._saver.begin(self._job, world, wait_s=self._left_s())

        return self._wait_for_commit(self._repeated(begin(), begin), is_alone=True)

    def _repeated(
        self, handle: SaveHandle | None, again: Callable[[], SaveHandle | None]
    ) -> SaveHandle | None:
        """The save, repeated for LAST_SAVE_REPEAT_S while the storage fails transiently: no later
        save would hold this state."""
        until_s = self._clock.monotonic() + LAST_SAVE_REPEAT_S
        while handle is not None:
            self._wait(functools.partial(_is_written, handle))
            if not _failed_transiently(handle):
                break
            if self._clock.monotonic() >= min(until_s, self._until_s):
                break
            self._wait(lambda: False, at_most_s=LAST_SAVE_TURN_S)
            handle = again()
        return handle

    def _wait_for_commit(self, handle: SaveHandle | None, *, is_alone: bool = False) -> bool:
        """``is_alone``: no other rank writes a share, so the engine commits it or fails."""
        if handle is None:
            return self._saver.has_committed(self._step)
        began_s = self._clock.monotonic()
        self._wait(lambda: handle.is_written)
        took_s = self._clock.monotonic() - began_s
        patience_s = LAST_SAVE_REPEAT_S if is_alone else LAST_SAVE_PEERS_S
        self._wait(
            lambda: handle.outcome is not None, at_most_s=max(patience_s, PEERS_FACTOR * took_s)
        )
        self._saver.poll()
        return self._saver.has_committed(self._step)

    def _list(self) -> _StepStatus:
        """List the folder on the engine's thread, because a disk may hang.

        A failure that the storage's own repetitions do not overcome ends the wait: the folder is
        unlikely to come back while this process waits, and it holds no state that others need.
        """
        listings: list[list[str] | None] = []
        self._saver.list_later(listings.append)
        if not self._wait(lambda: bool(listings)) or (listing := listings[0]) is None:
            return _StepStatus.UNKNOWN
        target = (self._saver.writers.generation, self._step)
        committed = [name for name in map(parse_committed, listing) if name]
        if any(_place(name) >= target or self._is_inherited(name) for name in committed):
            return _StepStatus.COMMITTED
        # This world's joint attempts do not count: they wait for ranks that have died.
        attempts = [name for name in map(parse_attempt, listing) if name]
        others = [name for name in attempts if name.nonce != self._saver.writers.nonce]
        return (
            _StepStatus.BEGUN if any(_place(n) == target for n in others) else _StepStatus.NOTHING
        )

    def _is_inherited(self, name: CheckpointName) -> bool:
        """Whether an earlier generation has committed this step, with which later ones began: their
        writers do not save it again."""
        lineage = self._saver.writers.lineage
        return name.step == self._step and why_abandoned(name, lineage) is None

    def _left_s(self) -> float:
        return max(0.0, self._until_s - self._clock.monotonic())

    def _wait(self, done: Callable[[], bool], *, at_most_s: float | None = None) -> bool:
        """Wait until ``done()`` or the end of the budget. Returns whether it is done."""
        left_s = self._left_s()
        until_s = self._clock.monotonic() + (
            left_s if at_most_s is None else min(left_s, at_most_s)
        )
        while not done():
            if self._clock.monotonic() >= until_s:
                return False
            self._announce()
            self._saver.poll()  # detects a hung disk or a dead engine
            self._clock.sleep(SAVE_SLICE_S)
        return True

    def _announce(self) -> None:
        """Log once what this process waits for, if that takes long."""
        if self._is_announced or self._clock.monotonic() - self._began_s < LAST_SAVE_QUIET_S:
            return
        self._is_announced = True
        end = datetime.fromtimestamp(self._clock.wall() + self._left_s(), timezone.utc)
        get_logger().info(
            "waiting for the checkpoint of step %d in %s, for at most %.0f s, until %s UTC",
            *(self._step, self._saver.place, self._left_s(), end.strftime("%H:%M:%S")),
        )


def _was_skipped(handle: SaveHandle) -> bool:
    return handle.outcome is not None and handle.outcome.status is SaveStatus.SKIPPED


def _is_written(handle: SaveHandle) -> bool:
    return handle.is_written


def _failed_transiently(handle: SaveHandle) -> bool:
    return handle.outcome is not None and is_transient(handle.outcome.error)


def _is_stale(handle: SaveHandle | None) -> bool:
    outcome = handle.outcome if handle is not None else None
    return outcome is not None and outcome.status is SaveStatus.STALE


def _place(name: CheckpointName) -> tuple[int, int]:
    return name.generation, name.step


# ----------------------------------------------------------------------------
# Restores a new world's state: the newest checkpoint, else rank 0's initial state.
#
# Rank 0 removes leftovers and chooses the checkpoint; all ranks load it, and each verifies what it
# reads. If it is damaged, all load the next older one; for one that cannot be read, see
# :meth:`CheckpointFolder.choose`. Any other failure of one rank is raised on
# all, so that none waits in a collective.


def restore(
    world: World,
    job: JobState,
    saver: CheckpointManager,
    journal: EventSink,
    *,
    may_begin: bool = True,
) -> int:
    """Give all ranks the same state. Returns the generation with which the job continues.

    It is the world's, or a later one if the checkpoint folder already contains it. Without a
    checkpoint, all ranks get rank 0's initial state if ``may_begin``; otherwise CheckpointRequired
    is raised.
    """
    began_s = SYSTEM_CLOCK.monotonic()
    on_all_ranks(world, lambda: saver.check_writable(world))
    resolved = on_all_ranks(world, lambda: _resolve(world, saver))
    source = RestoreSource(**broadcast_json(vars(resolved) if resolved is not None else None))
    if saver.folder is not None and source.is_recorded:
        saver.folder.check_shared(world.rank, source.generation)
    name, origin, refused = source.name, None, list[SkippedCheckpoint]()
    while name is not None:
        loaded = _load(world, job, saver, name)
        if isinstance(loaded, CheckpointInfo):
            origin = loaded
            break
        refused.append(loaded)
        name = broadcast_json(on_all_ranks(world, lambda: _choose_again(world, saver, refused)))
    if name is None:
        if not may_begin:
            raise CheckpointRequired(
                "a fault interrupted an update or a transfer of the weights on every rank that had "
                "them, and there is no checkpoint to resume from",
                hint="pass elastic.join(checkpoints=…) a folder that all nodes share; with "
                'step_copies="always", an interrupted update is undone',
            )
        _share_initial(world, job)
    saver.resume(origin, source.generation, job.progress.step)
    took_s = SYSTEM_CLOCK.monotonic() - began_s
    journal.emit(
        StateRestored(
            source=name or "initial", step=job.progress.step, duration_s=round(took_s, 4)
        ),
        level=logging.INFO if world.rank == 0 else logging.DEBUG,
    )
    return source.generation


def _resolve(world: World, saver: CheckpointManager) -> RestoreSource | None:
    if world.rank > 0:
        return None
    with busy(READER_THREADS):
        return saver.resolve(world)


def _choose_again(
    world: World, saver: CheckpointManager, refused: Sequence[SkippedCheckpoint]
) -> str | None:
    if world.rank > 0:
        return None
    with busy(READER_THREADS):
        return saver.choose_again(refused)


class _LoadingRanks(LoadGroup):
    """The ranks of the world, which read and verify a state that is not sharded in parts."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size, self.device = group.rank, group.size, control_device(group)
        self._group = group

    def broadcast(self, tensor: torch.Tensor, source: int) -> Callable[[], object]:
        work = self._group.broadcast(tensor, source)
        if work is None or self._group.semantics(self.device).is_on_stream:
            return lambda: complete(work, self.device, self._group)
        self._group.works.begin(work)  # not waited for if an earlier one fails
        return lambda: self._group.works.finish_one(work)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        complete(self._group.all_gather(outputs, tensor), self.device, self._group)

    def working(self) -> AbstractContextManager[None]:
        return busy(READER_THREADS)  # signs of life: a large part takes hours

    def failure(self, error: RuntimeError, state: str) -> Exception:
        # Not a LoadError, after which the ranks would load an older checkpoint.
        return WorldLost(f"a rank was lost while the world loaded a checkpoint: {error}")


def _load(
    world: World, job: JobState, saver: CheckpointManager, name: str
) -> CheckpointInfo | SkippedCheckpoint:
    """Load a checkpoint on all ranks. If one of them cannot, returns the reason, and no state has
    changed. Raises WorldLost if a rank is lost meanwhile: the checkpoint may be intact."""
    is_shared = world.size > 1 and not job.is_sharded and not job.is_rebuilt

    def read() -> LoadResult:
        if is_shared:
            return saver.load(name, job, _LoadingRanks(world_group()))
        with busy(READER_THREADS):
            return saver.load(name, job)

    def read_and_check() -> LoadResult | LoadError:
        try:
            loaded = read()
        except StateMismatch:
            raise  # an older one would not fit either
        except LoadError as error:
            return error
        job.check(loaded.state, f"checkpoint {name}")
        return loaded

    loaded = on_all_ranks(world, read_and_check)
    failure = loaded if isinstance(loaded, LoadError) else None
    is_own = failure is not None and failure.rank is None  # the others' are reported by them
    failures = all_gather_json(
        [isinstance(failure, ReadFailed), failure.message] if failure and is_own else None
    )
    failed = [(*found, rank) for rank, found in enumerate(failures) if found is not None]
    if failed:
        # A rank that knows of damage knows more than one that cannot read.
        is_unreadable, reason, rank = min(failed)
        return SkippedCheckpoint(name, f"{reason} (found by rank {rank})", is_unreadable)
    assert isinstance(loaded, LoadResult)
    on_all_ranks(world, lambda: job.apply(loaded.state))
    return loaded.info


def _share_initial(world: World, job: JobState) -> None:
    """Send rank 0's complete state to all ranks; with pipeline stages, each position of the first
    replica sends its own."""
    has_stages = world.mesh.stages > 1
    group = peer_group() if has_stages else world_group()
    source = world.rank_in_replica if has_stages else 0
    node, every = on_all_ranks(world, lambda: flatten(job.tree()))
    plan = broadcast_json(_plan(node, every), group=group)
    on_all_ranks(world, lambda: _check_same_model(world, source, plan["specs"], every))
    # run.build creates equal objects on all ranks, and no rank has another rank's shards.
    own = {n for n, t in every.items() if is_dtensor(t)} if job.built is not None else set()
    tensors = {name: t for name, t in every.items() if name not in own}
    specs = {name: spec for name, spec in plan["specs"].items() if name not in own}
    modules = {
        name: local_value(t)
        for name, t in tensors.items()
        if name.startswith("model/") or is_dtensor(t)
    }
    broadcast_tensors(modules, group=peer_group())  # shards come from the first replica
    is_source = world.rank == source
    small = _non_parameter_tensors(specs, tensors, is_source=is_source)
    broadcast_tensors(small, group=group)
    if not is_source:
        tree = unflatten(plan["tree"], lambda path, name: small.get(name, every.get(name)))
        on_all_ranks(world, lambda: job.apply_non_parameters(tree))
    else:
        on_all_ranks(world, lambda: None)


def _plan(node: Node, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    specs = {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()}
    return {"tree": node, "specs": specs}


def _check_same_model(
    world: World, source: int, specs: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    expected = {n: s for n, s in specs.items() if n.startswith("model/")}
    actual = {n: s for n, s in _plan({}, tensors)["specs"].items() if n.startswith("model/")}
    differing = sorted(n for n in expected.keys() | actual if expected.get(n) != actual.get(n))
    if differing:
        raise TrainingError(
            f"rank {world.rank} has a different model from rank {source}: "
            f"{', '.join(differing[:10])}",
            hint="every rank must build the same model"
            if world.mesh.stages == 1
            else "ranks at the same place in their replicas (run.world.rank_in_replica) must build "
            'the same stage: choose it by run.mesh["pp"].get_local_rank()',
        )


def _non_parameter_tensors(
    specs: dict[str, Any], tensors: dict[str, torch.Tensor], *, is_source: bool
) -> dict[str, torch.Tensor]:
    """CPU copies of tracked tensors: values on the source, buffers to receive them on others."""
    names = [
        name
        for name in specs
        if not name.startswith("model/") and not (name in tensors and is_dtensor(tensors[name]))
    ]
    if is_source:
        return {name: tensors[name].cpu() for name in names}
    return {
        n: torch.empty(specs[n][1], dtype=getattr(torch, specs[n][0]), device="cpu") for n in names
    }
