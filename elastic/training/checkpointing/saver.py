"""Saves a job's checkpoints beside its training, and says how each save ended.

One engine for the life of the process (:class:`checkpoints.Engine`): the caller's thread copies
this rank's share, a thread of the engine writes and commits. Nothing here waits for another rank,
and whatever goes wrong is an event: training goes on with the older checkpoints.

A save belongs to the world that began it. When that world breaks, a peer may be gone with its
share: what could not be committed by then is given up, and swept by the next world's rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import checkpoints
from checkpoints import CheckpointError, RetentionPolicy, SaveHandle, SaveOutcome, SaveStatus
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import CheckpointSaved, CheckpointSkipped
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.due import Due, StepFlags
from elastic.training.checkpointing.folder import CheckpointFolder, Source
from elastic.training.checkpointing.memory_limit import MemoryLimit
from elastic.training.checkpointing.memory_tier import MemoryTier
from elastic.training.checkpointing.options import Checkpoints
from elastic.training.checkpointing.writer import Writer
from elastic.training.state.job_state import JobState
from elastic.world.world import World

# A disk that is slower than the policy slows training down to its pace. One that hangs does not:
# after one wait of this length saves are skipped until it goes on.
BUSY_WAIT_S = 5.0
WARN_AFTER_FAILURES = 2  # one may be a disk that hiccups; a row of them is lost work


@dataclass(eq=False)
class _Era:
    """A world, as far as its saves are concerned."""

    world: checkpoints.WriterGroup
    is_over: bool = False  # it broke: what it could not commit by now lacks a share


class Saver:
    """Finds, loads and saves this job's checkpoints. Does nothing without a policy."""

    def __init__(
        self, policy: Checkpoints | None, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._policy = policy
        self._journal = journal
        self._clock = clock
        self._folder = None
        self._memory: MemoryTier | None = None
        if policy is not None:
            every = policy.memory_steps
            self._folder = CheckpointFolder(policy.folder, self._skipped, memory=every is not None)
            if every is not None:
                self._memory = MemoryTier(
                    every, report=self._skipped, journal=lambda: self._journal, clock=clock
                )
        self._breaks = 0  # worlds of this process
        self.is_superseded: Callable[[], bool] = lambda: False  # a newer world is known
        self.is_permitted: Callable[[], bool] = lambda: True  # by this node's agent
        self._lineage: checkpoints.Lineage = ()
        self._generation = 0
        self._saved_step = 0  # the last step that this world need not save any more
        self._committed_step = 0  # the last step that is known to stand
        self._era: _Era | None = None
        self._latest: SaveHandle | None = None  # of the present world
        self._others_are_stuck = False
        self._failures_in_a_row = 0
        self._memory_limit = MemoryLimit()
        self.due = Due(policy.saving, clock) if policy else None  # None: closed, too
        self.writer: Writer | None = None
        if self._folder is not None:
            self.writer = Writer(
                self._folder.storage,
                _Keeping(self),
                report=self._report,
                journal=lambda: self._journal,
                clock=clock,
            )

    # -- the folder ---------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether anything is saved at all."""
        return self._policy is not None

    @property
    def policy(self) -> Checkpoints | None:
        """Where, when and what is saved."""
        return self._policy

    def amend(self, policy: Checkpoints) -> None:
        """Save by another policy from now on, into the same folder."""
        self._policy = policy
        assert self.due is not None
        self.due.when = policy.saving

    def check_writable(self, world: World) -> None:
        """Raise ConfigError if this worker cannot write into the folder."""
        if self._folder is not None:
            self._folder.check_writable(world.rank)

    def resolve(self, world: World) -> Source:
        """Complete what a dead world left, and choose the checkpoint to go on from: rank 0's task.

        Raises CheckpointRequired if there is none and one was required, or none is whole, and
        ConfigError if another job saves into the folder.
        """
        if self._folder is None or self._policy is None or self.due is None:
            return Source(None, world.generation)
        if before := self._folder.ownership.claim():
            self.due.observed(before.running_s, before.failures)
        return self._folder.resolve(world, required=self._policy.required)

    def load(self, name: str) -> checkpoints.LoadResult:
        """Read and verify a checkpoint into fresh memory."""
        assert self._folder is not None
        return self._folder.load(name)

    # -- worlds -------------------------------------------------------------------------------

    def resume(self, origin: checkpoints.CheckpointInfo | None, generation: int, step: int) -> None:
        """From now on save as ``generation``, which began at ``step`` with ``origin``'s state."""
        self._lineage = checkpoints.derive_lineage(origin, generation)
        self._generation = generation
        self._saved_step = self._committed_step = step

    @property
    def origin(self) -> tuple[checkpoints.Lineage, int, int]:
        """Lineage, generation and last committed step: what the next world's saves go on from."""
        self.poll()
        return self._lineage, self._generation, self._committed_step

    def inherit(self, lineage: checkpoints.Lineage, generation: int, saved_step: int) -> None:
        """From now on save as ``generation``, which began with a live peer's state."""
        self._lineage, self._generation = lineage, generation
        self._saved_step = self._committed_step = saved_step

    def enter(self, world: World, job: JobState) -> None:
        """State is restored in ``world``: saves belong to it from now on."""
        if self._folder is None or self.due is None or self.writer is None:
            return
        before = self._era
        era = _Era(
            checkpoints.WriterGroup(
                nonce=world.nonce,
                generation=self._generation,
                rank=world.rank,
                size=world.size,
                lineage=self._lineage,
                fence=lambda: self._may_commit(era),
            )
        )
        self._era, self._latest = era, None
        self.due.enter(rank=world.rank, size=world.size)
        if world.rank == 0:
            self._folder.ownership.failures = lambda: self._breaks
            self._folder.ownership.hold()
        self.writer.reserve(job.tree(), rank=world.rank, world_size=world.size)
        if world.rank == 0 and before is not None and before.is_over:
            generation = self._generation
            self.writer.later(lambda: self._sweep(generation, world.nonce))

    def leave(self, *, broken: bool) -> None:
        """The present world is over. Broken: a peer may be gone, and never write its shares."""
        if self._era is not None and broken and not self._era.is_over:
            self._era.is_over = True
            self._breaks += 1
            if self.due is not None:
                self.due.failures += 1

    def _may_commit(self, era: _Era) -> bool:
        """Asked by the writer's thread. False: no newer world may be harmed by this one."""
        is_stale = era.is_over or (era is self._era and self.is_superseded())
        return not is_stale and self.is_permitted()

    def _sweep(self, generation: int, nonce: str) -> None:
        """On the writer's thread: complete or remove what the broken world has left."""
        assert self._folder is not None
        try:
            checkpoints.collect_garbage(self._folder.storage, generation=generation, nonce=nonce)
        except CheckpointError as error:
            self._skipped("leftovers", str(error))

    # -- steps --------------------------------------------------------------------------------

    def at_boundary(self, job: JobState, heard: StepFlags | None) -> None:
        """Between two steps: report what ended, and save if it is time, as all ranks agree.

        ``heard`` is what all ranks together said during the last step; None if there was none.
        """
        if self.due is None or self.writer is None:
            return
        self.writer.poll()
        in_flight = int(self.writer.is_busy)
        is_stuck = heard is not None and heard.stuck
        if is_stuck and not self._others_are_stuck:
            reason = "the disk of a rank hangs: nobody saves until it goes on"
            self._skipped(f"step {job.progress.step}", reason)
        self._others_are_stuck = is_stuck
        if self.due.is_due(job.progress.step, self._saved_step, heard, in_flight):
            self.save(job)
        if self._memory is not None and self._era is not None and not self._era.is_over:
            self._memory.at_boundary(job, self._era.world)

    def flags(self, step: int, *, leaving: bool) -> StepFlags:
        """What this rank says to all others during ``step``."""
        assert self.due is not None and self.writer is not None
        wants = self.due.wants(step + 1, self._saved_step, int(self.writer.is_busy))
        return StepFlags(save=wants, leaving=leaving, stuck=self.writer.is_stuck)

    def save(self, job: JobState, *, wait_s: float | None = None) -> SaveHandle | None:
        """Begin to write this rank's share, unless this step is saved. Never stops training.

        ``wait_s``: for a buffer; by default BUSY_WAIT_S, and not at all while the disk hangs.
        Raises checkpoints.StateError if the state holds what cannot be saved.
        """
        step = job.progress.step
        if self.due is None or self._era is None or step <= self._saved_step:
            return None
        if self._folder is None or self._folder.ownership.is_lost:
            return None
        self._saved_step = step
        self.due.saved()
        if wait_s is None:
            wait_s = 0.0 if self.writer is None or self.writer.is_stuck else BUSY_WAIT_S
        return self.save_again(job, wait_s=wait_s)

    def save_again(self, job: JobState, *, wait_s: float) -> SaveHandle | None:
        """Write this rank's share of the present step though a save of it came to nothing."""
        assert self._era is not None
        self._latest = self.begin(job, self._era.world, wait_s=wait_s)
        return self._latest

    def begin(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """Hand this rank's share of a checkpoint of ``world`` to the writer."""
        assert self.writer is not None
        return self.writer.save(
            job.tree(),
            step=job.progress.step,
            world=world,
            data_position=job.data_position(),
            wait_s=wait_s,
        )

    def begin_in_memory(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """The same, into the memory tier; None if there is none."""
        if self._memory is None:
            return None
        return self._memory.begin(job, world, wait_s=wait_s)

    # -- the end ------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the ranks of the present world can still save together."""
        return self._era is not None and not self._era.is_over

    @property
    def rank(self) -> int:
        """In the present world, or the last one."""
        return self._era.world.rank if self._era is not None else 0

    @property
    def world_size(self) -> int:
        """Of the present world, or the last one."""
        return self._era.world.size if self._era is not None else 1

    @property
    def nonce(self) -> str:
        """Of the present world, or the last one."""
        return self._era.world.nonce if self._era is not None else ""

    @property
    def generation(self) -> int:
        """That this rank's state belongs to."""
        return self._generation

    def has_committed(self, step: int) -> bool:
        """Whether this rank knows that the step is on disk."""
        return self._committed_step >= step

    def handle_of(self, step: int) -> SaveHandle | None:
        """The save of that step in the present world, if there was one."""
        return self._latest if self._latest is not None and self._latest.step == step else None

    def world_of_one(self, nonce: str) -> checkpoints.WriterGroup:
        """For a rank that saves everything by itself."""
        return checkpoints.WriterGroup(
            nonce=nonce, generation=self._generation, lineage=self._lineage
        )

    def list_later(self, answer: Callable[[list[str]], object]) -> None:
        """Call back with the names in the folder, on the writer's thread."""
        assert self._folder is not None and self.writer is not None
        storage = self._folder.storage

        def look() -> None:
            try:
                answer(storage.list(""))
            except OSError as error:
                self._skipped("last checkpoint", f"{storage.place} cannot be listed: {error}")

        self.writer.later(look)

    def poll(self) -> None:
        """Report what has ended, and notice what hangs."""
        if self.writer is not None:
            self.writer.poll()
        if self._memory is not None:
            self._memory.poll()

    def wait(self, budget_s: float) -> bool:
        """Until nothing is in flight; False if something still is."""
        return self.writer is None or self.writer.wait(budget_s)

    def finish_writing(self, budget_s: float) -> None:
        """Until this rank's part of every save is done: others may still commit it."""
        if self.writer is not None:
            self.writer.finish_writing(budget_s)

    def release(self) -> None:
        """The job has ended: another one may save into the folder."""
        if self._folder is not None:
            self._folder.ownership.close(release=True)

    def close(self, budget_s: float) -> None:
        """Wait so long for this rank's shares, then save no more.

        What waits for those of peers is left to them, or to whoever starts next.
        """
        self.due = None
        if self._folder is not None and self.writer is not None:
            self._folder.ownership.close(release=False)
            self.writer.finish_writing(budget_s)
            self.writer.close(0.0)
        if self._memory is not None:
            self._memory.close()

    # -- what became of it --------------------------------------------------------------------

    def _report(self, outcome: SaveOutcome) -> None:
        if outcome.status is not SaveStatus.COMMITTED:
            self._skipped(outcome.name, f"{outcome.status.value}: {outcome.reason}")
            self._failures_in_a_row += 1
            if self._failures_in_a_row == WARN_AFTER_FAILURES:
                self._warn_of_failures(outcome)
            return
        self._failures_in_a_row = 0
        self._committed_step = max(self._committed_step, outcome.step)
        if self.due is not None:
            self.due.measured(outcome.stall_s)
        for note in outcome.notes:
            self._skipped(outcome.name, note)
        self._memory_limit.saw_share(outcome.bytes_written, self.world_size)
        # All ranks know of it; one line in the logs is enough.
        is_told = self.rank > 0 and self.nonce in outcome.name
        self._journal.emit(
            CheckpointSaved(
                name=outcome.name,
                step=outcome.step,
                duration_s=round(outcome.took_s, 4),
                stall_s=round(outcome.stall_s, 4),
                bytes=outcome.bytes_written,
            ),
            level=logging.DEBUG if is_told else logging.INFO,
        )

    def _warn_of_failures(self, outcome: SaveOutcome) -> None:
        get_logger().warning(
            "the last %d checkpoints were not saved (%s: %s); training goes on, but a restart "
            "would go back to step %d",
            self._failures_in_a_row,
            outcome.name,
            outcome.reason,
            self._committed_step,
        )

    def _skipped(self, name: str, reason: str) -> None:
        self._journal.emit(CheckpointSkipped(name=name, reason=reason), level=logging.WARNING)


class _Keeping(RetentionPolicy):
    """The policy as it is at the moment: a script may change it while it trains."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def select(self, newest_first, look):  # type: ignore[no-untyped-def]
        policy = self._saver.policy
        assert policy is not None
        return policy.keeping.select(newest_first, look)
