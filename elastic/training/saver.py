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
from checkpoints import CheckpointError, Ending, Handle, KeepPolicy, Outcome, SaveError
from checkpoints.engine import WriterDied
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import CheckpointSaved, CheckpointSkipped
from elastic.telemetry.journal import EventSink
from elastic.training.checkpoint_folder import CheckpointFolder, Source
from elastic.training.due import Due, Word
from elastic.training.saving import Checkpoints
from elastic.training.state import JobState
from elastic.worker.world import World

# A save that nobody could commit by then is given up: a peer of it, or the disk, is gone.
DEADLINE_S = 600.0
# A disk that is slower than the policy slows training down to its pace. One that hangs does not:
# after one wait of this length saves are skipped until it goes on.
BUSY_WAIT_S = 5.0
# Writer's threads that may die, which none ever should, before saving becomes synchronous.
MAX_DEATHS = 3
_SLICE_S = 0.02


@dataclass(eq=False)
class _Era:
    """A world, as far as its saves are concerned."""

    world: checkpoints.World
    is_over: bool = False  # it broke: what it could not commit by now lacks a share


class Saver:
    """Finds, loads and saves this job's checkpoints. Does nothing without a policy."""

    def __init__(
        self, policy: Checkpoints | None, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._policy = policy
        self._journal = journal
        self._clock = clock
        self._folder = CheckpointFolder(policy.folder, self._skipped) if policy else None
        self._breaks = 0  # worlds of this process
        self.is_superseded: Callable[[], bool] = lambda: False  # a newer world is known
        self._lineage: checkpoints.Lineage = ()
        self._generation = 0
        self._saved_step = 0  # the last step that this world need not save any more
        self._committed_step = 0  # the last step that is known to stand
        self._engine: checkpoints.Engine | None = None
        self._deaths = 0
        self._era: _Era | None = None
        self._open: list[Handle] = []  # not reported yet
        self._latest: Handle | None = None  # of the present world
        self._is_stuck = False
        self.due = Due(policy.saving, clock) if policy else None

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

    def load(self, name: str) -> checkpoints.Loaded:
        """Read and verify a checkpoint into fresh memory."""
        assert self._folder is not None
        return self._folder.load(name)

    # -- worlds -------------------------------------------------------------------------------

    def resume(self, origin: checkpoints.CheckpointInfo | None, generation: int, step: int) -> None:
        """From now on save as ``generation``, which began at ``step`` with ``origin``'s state."""
        self._lineage = checkpoints.descend(origin, generation)
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
        if self._folder is None or self.due is None:
            return
        before, engine = self._era, self._running()
        era = _Era(
            checkpoints.World(
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
        if engine is None:
            return
        engine.reserve(job.tree(), rank=world.rank, world_size=world.size, background=True)
        if world.rank == 0 and before is not None and before.is_over:
            generation = self._generation
            engine.later(lambda: self._sweep(generation, world.nonce))

    def leave(self, *, broken: bool) -> None:
        """The present world is over. Broken: a peer may be gone, and never write its shares."""
        if self._era is not None and broken and not self._era.is_over:
            self._era.is_over = True
            self._breaks += 1
            if self.due is not None:
                self.due.failures += 1

    def _may_commit(self, era: _Era) -> bool:
        """Asked by the engine's thread. False: no newer world may be harmed by this one."""
        return not era.is_over and not (era is self._era and self.is_superseded())

    def _sweep(self, generation: int, nonce: str) -> None:
        """On the engine's thread: complete or remove what the broken world has left."""
        assert self._folder is not None
        try:
            checkpoints.sweep(self._folder.storage, generation=generation, nonce=nonce)
        except CheckpointError as error:
            self._skipped("leftovers", str(error))

    # -- steps --------------------------------------------------------------------------------

    def at_boundary(self, job: JobState, heard: Word | None) -> None:
        """Between two steps: report what ended, and save if it is time, as all ranks agree.

        ``heard`` is what all ranks together said during the last step; None if there was none.
        """
        if self.due is None:
            return
        self.poll()
        if self.due.is_due(job.progress.step, self._saved_step, heard, self._in_flight):
            self.save(job)

    @property
    def _in_flight(self) -> int:
        return self._engine.in_flight if self._engine is not None else 0

    def word(self, step: int, *, leaving: bool) -> Word:
        """What this rank says to all others during ``step``."""
        assert self.due is not None
        wants = self.due.wants(step + 1, self._saved_step, self._in_flight)
        return Word(save=wants, leaving=leaving, stuck=self._is_stuck)

    def save(self, job: JobState, *, wait_s: float = BUSY_WAIT_S) -> Handle | None:
        """Begin to write this rank's share, unless this step is saved. Never stops training.

        Raises checkpoints.StateError if the state holds what cannot be saved.
        """
        step = job.progress.step
        if self.due is None or self._era is None or step <= self._saved_step:
            return None
        if self._folder is None or self._folder.ownership.is_lost:
            return None
        self._saved_step = step
        self.due.saved()
        self._latest = self.begin(job, self._era.world, wait_s=wait_s)
        return self._latest

    def begin(self, job: JobState, world: checkpoints.World, *, wait_s: float) -> Handle | None:
        """Hand this rank's share of a checkpoint of ``world`` to the engine."""
        engine = self._running()
        if engine is None:
            self._save_synchronously(job, world)
            return None
        self._is_stuck = self._is_stuck and not engine.has_room
        try:
            handle = engine.save_async(
                job.tree(),
                step=job.progress.step,
                world=world,
                data_position=job.data_position(),
                wait_s=0.0 if self._is_stuck else wait_s,
            )
        except WriterDied:
            self.poll()  # replaces the engine
            return None
        self._open.append(handle)
        self.poll()
        return handle

    def _save_synchronously(self, job: JobState, world: checkpoints.World) -> None:
        assert self._folder is not None and self._policy is not None
        began_s = self._clock.monotonic()
        try:
            saved = checkpoints.save(
                self._folder.storage,
                job.tree(),
                step=job.progress.step,
                nonce=world.nonce,
                generation=world.generation,
                rank=world.rank,
                world_size=world.size,
                lineage=world.lineage,
                data_position=job.data_position(),
                keep=self._policy.keeping,
                fence=world.fence,
            )
        except SaveError as error:
            self._skipped(f"step {job.progress.step}", str(error))
            return
        took_s = self._clock.monotonic() - began_s
        ending = Ending.COMMITTED if saved.committed else Ending.ABANDONED
        self._report(
            Outcome(
                step=saved.step,
                name=saved.name,
                ending=ending,
                reason="; ".join(saved.notes),
                bytes_written=saved.bytes_written,
                stall_s=took_s,
                took_s=took_s,
                notes=saved.notes if saved.committed else (),
            )
        )

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

    def handle_of(self, step: int) -> Handle | None:
        """The save of that step in the present world, if there was one."""
        return self._latest if self._latest is not None and self._latest.step == step else None

    def world_of_one(self, nonce: str) -> checkpoints.World:
        """For a rank that saves everything by itself."""
        return checkpoints.World(nonce=nonce, generation=self._generation, lineage=self._lineage)

    def list_later(self, answer: Callable[[list[str]], object]) -> None:
        """Call back with the names in the folder, on the engine's thread."""
        assert self._folder is not None
        storage = self._folder.storage

        def look() -> None:
            try:
                answer(storage.list(""))
            except OSError as error:
                self._skipped("last checkpoint", f"{storage.place} cannot be listed: {error}")

        engine = self._running()
        if engine is not None:
            engine.later(look)
        else:
            look()

    def finish_writing(self, budget_s: float) -> None:
        """Until this rank's part of every save is done: others may still commit it."""
        until_s = self._clock.monotonic() + budget_s
        while any(not handle.is_written for handle in self._open):
            if self._clock.monotonic() >= until_s:
                return
            self.poll()
            self._clock.sleep(_SLICE_S)

    def wait(self, budget_s: float) -> bool:
        """Until nothing is in flight; False if something still is."""
        until_s = self._clock.monotonic() + budget_s
        while self._in_flight and self._clock.monotonic() < until_s:
            self._clock.sleep(_SLICE_S)
            self.poll()
        self.poll()
        return not self._in_flight

    def release(self) -> None:
        """The job has ended: another one may save into the folder."""
        if self._folder is not None:
            self._folder.ownership.close(release=True)

    def close(self, budget_s: float) -> None:
        """End the engine's thread, and say what became of its saves."""
        engine, self.due = self._engine, None
        if self._folder is not None:
            self._folder.ownership.close(release=False)
        if engine is None:
            return
        try:
            engine.close(timeout_s=budget_s)
        except WriterDied as death:
            self._bury(death)
        self._engine, self._deaths = None, MAX_DEATHS
        for handle in self._open:
            if handle.outcome is not None:
                self._report(handle.outcome)
        self._open.clear()

    # -- the engine ---------------------------------------------------------------------------

    def _running(self) -> checkpoints.Engine | None:
        """The engine, begun if there is none; None once too many have died."""
        assert self._folder is not None
        if self._engine is None and self._deaths < MAX_DEATHS:
            self._engine = checkpoints.Engine(
                self._folder.storage,
                keep=_Keeping(self),
                deadline_s=DEADLINE_S,
                clock=self._clock.wall,
                monotonic=self._clock.monotonic,
            )
        return self._engine

    def poll(self) -> None:
        """Report what has ended, and notice what hangs. Cheap: for every step."""
        if self._engine is None:
            return
        try:
            self._engine.outcomes()
        except WriterDied as death:
            self._bury(death)
        ended = [handle for handle in self._open if handle.outcome is not None]
        if ended:
            self._open = [handle for handle in self._open if handle.outcome is None]
        for handle in ended:
            assert handle.outcome is not None
            self._report(handle.outcome)

    def _bury(self, death: WriterDied) -> None:
        """The engine's thread died, which is a bug: say so, and go on with another one."""
        self._engine, self._deaths = None, self._deaths + 1
        then = "another one takes over" if self._deaths < MAX_DEATHS else "saves stop training now"
        cause = f"{type(death.__cause__).__name__}: {death.__cause__}"
        self._journal.emit(
            CheckpointSkipped(name="writer", reason=f"{death} of {cause}; {then}"),
            level=logging.ERROR,
        )

    def _report(self, outcome: Outcome) -> None:
        if outcome.ending is not Ending.COMMITTED:
            self._is_stuck = self._is_stuck or outcome.ending is Ending.SKIPPED
            self._skipped(outcome.name, f"{outcome.ending.value}: {outcome.reason}")
            return
        self._committed_step = max(self._committed_step, outcome.step)
        if self.due is not None:
            self.due.measured(outcome.stall_s)
        for note in outcome.notes:
            self._skipped(outcome.name, note)
        self._journal.emit(
            CheckpointSaved(
                name=outcome.name,
                step=outcome.step,
                duration_s=round(outcome.took_s, 4),
                stall_s=round(outcome.stall_s, 4),
                bytes=outcome.bytes_written,
            )
        )

    def _skipped(self, name: str, reason: str) -> None:
        self._journal.emit(CheckpointSkipped(name=name, reason=reason), level=logging.WARNING)


class _Keeping(KeepPolicy):
    """The policy as it is at the moment: a script may change it while it trains."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def select(self, newest_first, look):  # type: ignore[no-untyped-def]
        policy = self._saver.policy
        assert policy is not None
        return policy.keeping.select(newest_first, look)
