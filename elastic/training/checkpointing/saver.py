"""The saves of one process: when one is due, its world, its outcome.

Used by the :mod:`~elastic.training.checkpointing.manager` and within this package only. One engine
for the life of the process: the caller's thread copies this rank's share, a thread of the engine
writes and commits. Nothing here waits for another rank, and every failure is an event: training
continues with the older checkpoints.

A save belongs to the world that began it. When that world breaks, a peer may be gone with its
share: what could not be committed by then is abandoned, and removed by the next world's rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import checkpoints
from checkpoints import CheckpointError, RetentionPolicy, SaveHandle, SaveOutcome, SaveStatus
from checkpoints.saving.supervised import SupervisedEngine
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.hangs.facts import Phase
from elastic.hangs.phases import phases
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.due import Due
from elastic.training.checkpointing.folder import CheckpointFolder, RestoreSource
from elastic.training.checkpointing.memory_limit import MemoryLimit
from elastic.training.checkpointing.memory_tier import MemoryTier
from elastic.training.checkpointing.options import Checkpoints
from elastic.training.checkpointing.outcomes import OutcomeLog
from elastic.training.gradients.control_flags import StepFlags
from elastic.training.state.job_state import JobState
from elastic.tuning.worker_intervals import BUSY_WAIT_S
from elastic.world.world import World


@dataclass(eq=False)
class _Writers:
    """The ranks of one world, as the writers of its checkpoints."""

    group: checkpoints.WriterGroup
    is_over: bool = False  # the world broke: what it could not commit by now lacks a share


class Saver:
    """Finds, loads and saves this job's checkpoints. Does nothing without a policy."""

    def __init__(
        self, policy: Checkpoints | None, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._outcomes = OutcomeLog(journal)
        self._folder = None
        self._memory: MemoryTier | None = None
        if policy is not None:
            every = policy.memory_steps
            self._folder = CheckpointFolder(
                policy.folder, self._outcomes.skipped, memory=every is not None
            )
            if every is not None:
                self._memory = MemoryTier(
                    every,
                    report=self._outcomes.skipped,
                    on_death=self._outcomes.writer_died,
                    clock=clock,
                )
        self._breaks = 0  # worlds of this process
        self.is_superseded: Callable[[], bool] = lambda: False  # a newer world is known
        self.is_permitted: Callable[[], bool] = lambda: True  # by this node's agent
        self._lineage: checkpoints.Lineage = ()
        self._generation = 0
        self._saved_step = 0  # the last step that this world need not save any more
        self._writers: _Writers | None = None
        self._latest: SaveHandle | None = None  # of the present world
        self._others_are_stuck = False
        self._memory_limit = MemoryLimit()
        self.due = Due(policy.saving, clock) if policy else None  # None: closed, too
        self.engine: SupervisedEngine | None = None
        if self._folder is not None:
            self.engine = SupervisedEngine(
                self._folder.storage,
                _AmendableRetention(self),
                report=self._report,
                on_death=self._outcomes.writer_died,
                clock=clock.wall,
                monotonic=clock.monotonic,
                sleep=clock.sleep,
            )

    # -- the folder ---------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are enabled."""
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

    def resolve(self, world: World) -> RestoreSource:
        """Complete what a broken world left, and choose the checkpoint to resume from, on rank 0.

        Raises CheckpointRequired if there is none and one was required, or none is complete, and
        ConfigError if another job saves into the folder.
        """
        if self._folder is None or self._policy is None or self.due is None:
            return RestoreSource(None, world.generation)
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
        self._saved_step = self._outcomes.committed_step = step

    @property
    def origin(self) -> tuple[checkpoints.Lineage, int, int]:
        """Lineage, generation and last committed step: for the next world's saves."""
        self.poll()
        return self._lineage, self._generation, self._outcomes.committed_step

    def inherit(self, lineage: checkpoints.Lineage, generation: int, saved_step: int) -> None:
        """From now on save as ``generation``, which began with a live peer's state."""
        self._lineage, self._generation = lineage, generation
        self._saved_step = self._outcomes.committed_step = saved_step

    def enter(self, world: World, job: JobState) -> None:
        """State is restored in ``world``: saves are for it from now on."""
        if self._folder is None or self.due is None or self.engine is None:
            return
        before = self._writers
        writers = _Writers(
            checkpoints.WriterGroup(
                nonce=world.nonce,
                generation=self._generation,
                rank=world.rank,
                size=world.size,
                lineage=self._lineage,
                fence=lambda: self._may_commit(writers),
            )
        )
        self._writers, self._latest = writers, None
        self.due.enter(rank=world.rank, size=world.size)
        if world.rank == 0:
            self._folder.ownership.failures = lambda: self._breaks
            self._folder.ownership.hold()
        self.engine.reserve(job.tree(), rank=world.rank, world_size=world.size)
        if world.rank == 0 and before is not None and before.is_over:
            generation = self._generation
            self.engine.submit(lambda: self._sweep(generation, world.nonce))

    def leave(self, *, broken: bool) -> None:
        """The present world is over. Broken: a peer may be gone, and never write its shares."""
        if self._writers is not None and broken and not self._writers.is_over:
            self._writers.is_over = True
            self._breaks += 1
            if self.due is not None:
                self.due.failures += 1

    def _may_commit(self, writers: _Writers) -> bool:
        """On the engine's thread. False: a newer world exists, or the agent does not permit it."""
        is_stale = writers.is_over or (writers is self._writers and self.is_superseded())
        return not is_stale and self.is_permitted()

    def _sweep(self, generation: int, nonce: str) -> None:
        """On the engine's thread: complete or remove what the broken world has left."""
        assert self._folder is not None
        try:
            checkpoints.collect_garbage(self._folder.storage, generation=generation, nonce=nonce)
        except CheckpointError as error:
            self._outcomes.skipped("leftovers", str(error))

    # -- steps --------------------------------------------------------------------------------

    def at_boundary(self, job: JobState, received: StepFlags | None) -> None:
        """Between two steps: report saves that ended, and save if it is due, on all ranks alike.

        ``received`` are the control flags of all ranks in the last step; None if there was none.
        """
        if self.due is None or self.engine is None:
            return
        phases.enter(Phase.CHECKPOINT)
        self.engine.poll()
        in_flight = int(self.engine.is_busy)
        is_stuck = received is not None and received.stuck
        if is_stuck and not self._others_are_stuck:
            reason = "the disk of a rank hangs: no rank saves until it responds"
            self._outcomes.skipped(f"step {job.progress.step}", reason)
        self._others_are_stuck = is_stuck
        if self.due.is_due(job.progress.step, self._saved_step, received, in_flight):
            self.save(job)
        if self._memory is not None and self._writers is not None and not self._writers.is_over:
            self._memory.at_boundary(job, self._writers.group)

    @property
    def needs_agreement(self) -> bool:
        """Whether the ranks must exchange control flags before :meth:`at_boundary`."""
        return self.due is not None and self.due.needs_agreement

    def flags(self, step: int, *, leaving: bool) -> StepFlags:
        """The control flags that this rank sends during ``step``."""
        assert self.due is not None and self.engine is not None
        wants = self.due.wants(step + 1, self._saved_step, int(self.engine.is_busy))
        return StepFlags(save=wants, leaving=leaving, stuck=self.engine.is_stuck)

    def save(self, job: JobState, *, wait_s: float | None = None) -> SaveHandle | None:
        """Begin to write this rank's share, unless this step is saved. Never stops training.

        ``wait_s``: for a buffer; by default BUSY_WAIT_S, and 0 while the disk hangs.
        Raises checkpoints.StateError if the state holds what cannot be saved.
        """
        step = job.progress.step
        if self.due is None or self._writers is None or step <= self._saved_step:
            return None
        if self._folder is None or self._folder.ownership.is_lost:
            return None
        self._saved_step = step
        self.due.saved()
        if wait_s is None:
            wait_s = 0.0 if self.engine is None or self.engine.is_stuck else BUSY_WAIT_S
        return self.save_again(job, wait_s=wait_s)

    def save_again(self, job: JobState, *, wait_s: float) -> SaveHandle | None:
        """Write this rank's share of the present step again, after a save of it was skipped."""
        assert self._writers is not None
        self._latest = self.begin(job, self._writers.group, wait_s=wait_s)
        return self._latest

    def begin(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """Hand this rank's share of a checkpoint of ``world`` to the engine."""
        assert self.engine is not None
        return self.engine.save(
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
    def is_complete(self) -> bool:
        """Whether the ranks of the present world can still save together."""
        return self._writers is not None and not self._writers.is_over

    @property
    def rank(self) -> int:
        """In the present world, or the last one."""
        return self._writers.group.rank if self._writers is not None else 0

    @property
    def world_size(self) -> int:
        """Of the present world, or the last one."""
        return self._writers.group.size if self._writers is not None else 1

    @property
    def nonce(self) -> str:
        """Of the present world, or the last one."""
        return self._writers.group.nonce if self._writers is not None else ""

    @property
    def generation(self) -> int:
        """The generation that this rank's state belongs to."""
        return self._generation

    def has_committed(self, step: int) -> bool:
        """Whether this rank knows that the step is on disk."""
        return self._outcomes.committed_step >= step

    def handle_of(self, step: int) -> SaveHandle | None:
        """The save of that step in the present world, if there was one."""
        return self._latest if self._latest is not None and self._latest.step == step else None

    def world_of_one(self, nonce: str) -> checkpoints.WriterGroup:
        """The writer group of a checkpoint that only this rank writes."""
        return checkpoints.WriterGroup(
            nonce=nonce, generation=self._generation, lineage=self._lineage
        )

    def list_later(self, answer: Callable[[list[str]], object]) -> None:
        """Call back with the names in the folder, on the engine's thread."""
        assert self._folder is not None and self.engine is not None
        storage = self._folder.storage

        def look() -> None:
            try:
                answer(storage.list(""))
            except OSError as error:
                self._outcomes.skipped(
                    "last checkpoint", f"{storage.place} cannot be listed: {error}"
                )

        self.engine.submit(look)

    def poll(self) -> None:
        """Report saves that ended, and detect hung ones."""
        if self.engine is not None:
            self.engine.poll()
        if self._memory is not None:
            self._memory.poll()

    def wait(self, budget_s: float) -> bool:
        """Until nothing is in flight; False if something still is."""
        return self.engine is None or self.engine.wait(budget_s)

    def finish_writing(self, budget_s: float) -> None:
        """Until this rank's part of every save is done: others may still commit it."""
        if self.engine is not None:
            self.engine.finish_writing(budget_s)

    def release(self) -> None:
        """The job has ended: another one may save into the folder."""
        if self._folder is not None:
            self._folder.ownership.close(release=True)

    def close(self, budget_s: float) -> None:
        """Wait so long for this rank's shares, then save no more.

        Saves that wait for parts of peers are left to them, or to the next start.
        """
        self.due = None
        if self._folder is not None and self.engine is not None:
            self._folder.ownership.close(release=False)
            self.engine.finish_writing(budget_s)
            self.engine.close(0.0)
        if self._memory is not None:
            self._memory.close()

    # -- outcomes -----------------------------------------------------------------------------

    def _report(self, outcome: SaveOutcome) -> None:
        # All ranks see a commit; one line in the logs is enough.
        is_known_elsewhere = self.rank > 0 and self.nonce in outcome.name
        self._outcomes.ended(outcome, is_known_elsewhere=is_known_elsewhere)
        if outcome.status is SaveStatus.COMMITTED:
            phases.saved(outcome.step)
            if self.due is not None:
                self.due.measured(outcome.stall_s)
            self._memory_limit.saw_share(outcome.bytes_written, self.world_size)


class _AmendableRetention(RetentionPolicy):
    """The present policy: a script may change it while it trains."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def select(self, newest_first, look):  # type: ignore[no-untyped-def]
        policy = self._saver.policy
        assert policy is not None
        return policy.keeping.select(newest_first, look)
