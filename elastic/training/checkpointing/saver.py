"""Finds, loads and saves the checkpoints of one process.

Used only by the :mod:`~elastic.training.checkpointing.manager` and within this package. One engine
serves the whole process: the caller's thread copies this rank's share, and a thread of the engine
writes and commits it. Nothing here waits for another rank, and every failure is an event: training
continues with the older checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import checkpoints
from checkpoints import CheckpointError, RetentionPolicy, SaveHandle, SaveOutcome, SaveStatus
from checkpoints.saving.supervised import SupervisedEngine
from checkpoints.storage.failures import reason_of
from checkpoints.storage.patient import patient
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.hangs.facts import CHECKPOINT
from elastic.hangs.phases import phases
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.due import Due
from elastic.training.checkpointing.folder import CheckpointFolder, RestoreSource
from elastic.training.checkpointing.memory_interval.agreed import MemoryInterval
from elastic.training.checkpointing.memory_limit import MemoryLimit
from elastic.training.checkpointing.memory_tier import MemoryTier
from elastic.training.checkpointing.options import Checkpoints
from elastic.training.checkpointing.outcomes import OutcomeLog
from elastic.training.checkpointing.writers import WriterHistory, Writers
from elastic.training.gradients.control_flags import StepFlags
from elastic.training.state.job_state import JobState
from elastic.tuning.worker_intervals import BUSY_WAIT_S
from elastic.world.world import World


class Saver:
    """Finds, loads and saves this job's checkpoints. Does nothing without a policy."""

    def __init__(
        self, policy: Checkpoints | None, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._outcomes = OutcomeLog(journal)
        self.folder = None
        self._memory: MemoryTier | None = None
        if policy is not None:
            self.folder = CheckpointFolder(policy.folder, self._outcomes.skipped)
            if policy.memory:
                self._keep_in_memory(policy)
        self.writers = WriterHistory()
        self.is_superseded: Callable[[], bool] = lambda: False  # a newer world is known
        self.is_permitted: Callable[[], bool] = lambda: True  # this node's agent permits commits
        self.is_resumed = False  # the state comes from a checkpoint
        self._saved_step = 0  # the last step that this world need not save again
        self._latest: SaveHandle | None = None  # of the current world
        self._others_are_stuck = False
        self._is_owed = False  # a save was due while the weights were ahead
        self._memory_limit = MemoryLimit()
        self.due = Due(policy.saving, clock) if policy else None  # None: closed, too
        self.engine: SupervisedEngine | None = None
        if self.folder is not None:
            self.engine = SupervisedEngine(
                self.folder.storage,
                _AmendableRetention(self),
                report=self.report,
                on_death=self._outcomes.writer_died,
                clock=clock.wall,
                monotonic=clock.monotonic,
                sleep=clock.sleep,
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
            on_death=self._outcomes.writer_died,
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

    def amend(self, policy: Checkpoints) -> None:
        """Use another policy from now on, for the same folder."""
        self._policy = policy
        assert self.due is not None
        self.due.when = policy.saving

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

    def choose_again(self, unusable: Mapping[str, str]) -> str | None:
        """On rank 0: another checkpoint to resume from, after the load of these has failed. Raises
        as :meth:`resolve` does."""
        assert self.folder is not None and self._policy is not None
        return self.folder.choose(unusable, required=self._policy.required)

    def load(self, name: str, job: JobState) -> checkpoints.LoadResult:
        """Read and verify this rank's part of a checkpoint."""
        assert self.folder is not None
        return self.folder.load(name, job)

    # -- worlds -------------------------------------------------------------------------------

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

    def enter(self, world: World, job: JobState) -> None:
        """Save for ``world`` from now on: its state is restored."""
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
            self.engine.reserve(job.saved_tree(), writes)
        if world.rank == 0 and before is not None and before.is_over:
            generation = self.writers.generation
            self.engine.submit(lambda: self._sweep(generation, world.nonce))

    def leave(self, *, broken: bool) -> None:
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

    def at_boundary(self, job: JobState, received: StepFlags | None) -> None:
        """Between two steps: report finished saves, and save on all ranks if it is due.

        ``received``: all ranks' control flags of the last step; None if there was no step.
        """
        if self.due is None or self.engine is None:
            return
        phases.enter(CHECKPOINT)
        self.engine.poll()
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
        """At the boundary at which nodes leave: save on all ranks if the policy saves on the
        notice, and no earlier boundary knew of it."""
        if self.due is None or self.engine is None or self._others_are_stuck:
            return
        in_flight = int(self.engine.is_busy)
        if self.due.is_due_before_leaving(job.progress.step, self._saved_step, in_flight):
            self.save(job)

    @property
    def needs_agreement(self) -> bool:
        """Whether the ranks must exchange control flags before :meth:`at_boundary`."""
        return self.due is not None and self.due.needs_agreement

    def flags(self, step: int, *, leaving: bool) -> StepFlags:
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

    def begin(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """Pass this rank's share of a checkpoint of ``world`` to the engine."""
        assert self.engine is not None
        return self.engine.save(
            job.saved_tree(),
            step=job.progress.step,
            world=world,
            data_position=job.data_position(),
            wait_s=wait_s,
        )

    def save_between_worlds(self, job: JobState, budget_s: float) -> bool:
        """Write this rank's share to the nodes' memory and wait for it; all ranks leave at this
        step. Returns whether the memory tier is available."""
        if self._memory is not None and (group := self._group) is not None:
            self._memory.save_now(job, group, budget_s)
        return self._memory is not None and self._memory.is_hosted

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
        if self.engine is not None:
            self.engine.poll()
        if self._memory is not None:
            self._memory.poll()

    def wait(self, budget_s: float) -> bool:
        """Wait until no save is in flight; False if one still is."""
        return self.engine is None or self.engine.wait(budget_s)

    def finish_writing(self, budget_s: float) -> None:
        """Wait until this rank's share of every save is written; others may still commit it."""
        if self.engine is not None:
            self.engine.finish_writing(budget_s)

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
        if self._memory is not None:
            self._memory.close()

    # -- outcomes -----------------------------------------------------------------------------

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

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def select(self, newest_first, look):  # type: ignore[no-untyped-def]
        policy = self._saver.policy
        assert policy is not None
        return policy.keeping.select(newest_first, look)
