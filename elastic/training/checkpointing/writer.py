"""The engine of this process, and what takes its place when its thread dies.

That thread cannot die of what storages and disks do, only of a mistake in the code: it is said
once, loudly, and another engine goes on. After too many, saving stops training for as long as it
takes: slow, but a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import checkpoints
from checkpoints import RetentionPolicy, SaveError, SaveHandle, SaveOutcome, SaveStatus, Storage
from checkpoints.saving.outcome import WriterThreadDied
from elastic.clock import Clock
from elastic.events import CheckpointSkipped
from elastic.telemetry.journal import EventSink

# A save that nobody could commit by then is given up: a peer of it, or the disk, is gone.
DEADLINE_S = 600.0
PATIENCE_S = 60.0
MAX_DEATHS = 3
_SLICE_S = 0.02


class Writer:
    """Owned by the saver. ``report`` is told how each save ended."""

    def __init__(
        self,
        storage: Storage,
        keep: RetentionPolicy,
        *,
        report: Callable[[SaveOutcome], object],
        journal: Callable[[], EventSink],
        clock: Clock,
    ) -> None:
        self._storage = storage
        self._keep = keep
        self._report = report
        self._journal = journal
        self._clock = clock
        self._engine: checkpoints.Engine | None = None
        self._deaths = 0
        self._open: list[tuple[SaveHandle, float]] = []  # not reported yet, and when they began
        self._is_stuck = False
        self._is_closed = False

    @property
    def in_flight(self) -> int:
        """Saves that are neither committed nor given up."""
        return self._engine.in_flight if self._engine is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way that may still become a checkpoint.

        One that is written and waits for long lacks a share that failed elsewhere: whoever saves
        "when none is in flight" need not wait for it until its deadline.
        """
        now_s = self._clock.monotonic()
        return any(
            not handle.is_written or now_s - began_s < PATIENCE_S for handle, began_s in self._open
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the disk hangs: a save has waited in vain for a buffer, and none is free yet."""
        if self._is_stuck and (self._engine is None or self._engine.has_free_buffer):
            self._is_stuck = False
        return self._is_stuck

    def reserve(self, tree: object, *, rank: int, world_size: int) -> None:
        """Make buffers for shares of that size, in the background."""
        engine = self._running()
        if engine is not None:
            engine.reserve(tree, rank=rank, world_size=world_size, background=True)

    def save(
        self,
        tree: object,
        *,
        step: int,
        world: checkpoints.WriterGroup,
        data_position: Any,
        wait_s: float,
    ) -> SaveHandle | None:
        """Begin to save this rank's share. None if that is done already, for want of a thread.

        Raises checkpoints.StateError if the state holds what cannot be saved.
        """
        while (engine := self._running()) is not None:
            try:
                handle = engine.save_async(
                    tree,
                    step=step,
                    world=world,
                    data_position=data_position,
                    wait_s=wait_s,
                )
            except WriterThreadDied as death:
                self._bury(death)
                continue
            self._open.append((handle, self._clock.monotonic()))
            self.poll()
            return handle
        self._save_at_once(tree, step, world, data_position)
        return None

    def later(self, task: Callable[[], object]) -> None:
        """Do something on the engine's thread, behind the saves that are in flight."""
        while (engine := self._running()) is not None:
            try:
                engine.submit(task)
                return
            except WriterThreadDied as death:
                self._bury(death)
        task()

    def poll(self) -> None:
        """Report what has ended, and notice what hangs. Cheap: for every step."""
        if self._engine is not None:
            try:
                self._engine.outcomes()
            except WriterThreadDied as death:
                self._bury(death)
        ended = [handle.outcome for handle, _ in self._open if handle.outcome is not None]
        if ended:
            self._open = [item for item in self._open if item[0].outcome is None]
        for outcome in ended:
            self._is_stuck = self._is_stuck or outcome.status is SaveStatus.SKIPPED
            self._report(outcome)

    def wait(self, budget_s: float) -> bool:
        """Until nothing is in flight; False if something still is."""
        return self._wait(lambda: not self.in_flight, budget_s)

    def finish_writing(self, budget_s: float) -> bool:
        """Until this rank's part of every save is done: others may still commit it."""
        return self._wait(lambda: all(handle.is_written for handle, _ in self._open), budget_s)

    def close(self, budget_s: float) -> None:
        """End the engine's thread, and report what became of its saves."""
        engine, self._is_closed = self._engine, True
        if engine is None:
            return
        try:
            engine.close(timeout_s=budget_s)
        except WriterThreadDied as death:
            self._bury(death)
        self._engine = None
        self.poll()

    def _wait(self, done: Callable[[], bool], budget_s: float) -> bool:
        until_s = self._clock.monotonic() + budget_s
        while not done() and self._clock.monotonic() < until_s:
            self._clock.sleep(_SLICE_S)
            self.poll()
        self.poll()
        return done()

    def _running(self) -> checkpoints.Engine | None:
        """The engine, begun if there is none; None once too many have died."""
        if self._engine is None and self._deaths < MAX_DEATHS and not self._is_closed:
            self._engine = checkpoints.Engine(
                self._storage,
                keep=self._keep,
                deadline_s=DEADLINE_S,
                clock=self._clock.wall,
                monotonic=self._clock.monotonic,
            )
        return self._engine

    def _bury(self, death: WriterThreadDied) -> None:
        self._engine, self._deaths = None, self._deaths + 1
        then = "another one takes over" if self._deaths < MAX_DEATHS else "saves stop training now"
        cause = f"{type(death.__cause__).__name__}: {death.__cause__}"
        self._journal().emit(
            CheckpointSkipped(name="writer", reason=f"{death} of {cause}; {then}"),
            level=logging.ERROR,
        )

    def _save_at_once(
        self, tree: object, step: int, world: checkpoints.WriterGroup, data_position: Any
    ) -> None:
        began_s = self._clock.monotonic()
        try:
            saved = checkpoints.save(
                self._storage,
                tree,
                step=step,
                nonce=world.nonce,
                generation=world.generation,
                rank=world.rank,
                world_size=world.size,
                lineage=world.lineage,
                data_position=data_position,
                keep=self._keep,
                fence=world.fence,
            )
        except SaveError as error:
            name = checkpoints.CheckpointName(step, world.generation, world.nonce)
            failed = SaveStatus.FAILED
            self._report(SaveOutcome(step=step, name=str(name), status=failed, reason=str(error)))
            return
        if not saved.committed:
            return  # another writer will
        took_s = self._clock.monotonic() - began_s
        self._report(
            SaveOutcome(
                step=step,
                name=saved.name,
                status=SaveStatus.COMMITTED,
                bytes_written=saved.bytes_written,
                stall_s=took_s,
                took_s=took_s,
                notes=saved.notes,
            )
        )
