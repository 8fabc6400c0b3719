"""An engine that survives the death of its writer thread.

Storage failures do not end the thread; only a bug does. :class:`SupervisedEngine` then reports the
death once and continues with a new engine. After :data:`MAX_DEATHS` deaths it saves synchronously,
which is slow but still produces checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from checkpoints.errors import SaveError
from checkpoints.format.names import CheckpointName
from checkpoints.intervals import COMMIT_PATIENCE_S, SAVE_DEADLINE_S, WRITER_SLICE_S
from checkpoints.policies.retention import RetentionFunction
from checkpoints.saving.engine import Engine
from checkpoints.saving.outcome import (
    SaveHandle,
    SaveOutcome,
    SaveStatus,
    WriterGroup,
    WriterThreadDied,
)
from checkpoints.saving.save import save
from checkpoints.storage.protocol import Storage

MAX_DEATHS = 3


class SupervisedEngine:
    """One per storage, for the life of a process. Its one owner closes it.

    ``report`` is called with the outcome of each save, on the caller's thread; ``on_death`` with
    the reason and the consequence when a writer thread has died.
    """

    def __init__(
        self,
        storage: Storage,
        keep: RetentionFunction | None,
        *,
        report: Callable[[SaveOutcome], object],
        on_death: Callable[[str], object],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._storage = storage
        self._keep = keep
        self._report = report
        self._on_death = on_death
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self._engine: Engine | None = None
        self._deaths = 0
        self._open: list[tuple[SaveHandle, float]] = []  # not reported yet, and their start times
        self._is_stuck = False
        self._is_closed = False

    @property
    def in_flight(self) -> int:
        """The number of saves that are neither committed nor abandoned."""
        return self._engine.in_flight if self._engine is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight that can be expected to be committed.

        A written save that waits for longer than :data:`COMMIT_PATIENCE_S` lacks a share that
        failed on another rank. A policy that saves when none is in flight need not wait for its
        deadline.
        """
        now_s = self._monotonic()
        return any(
            not handle.is_written or now_s - began_s < COMMIT_PATIENCE_S
            for handle, began_s in self._open
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the disk hangs: a save was skipped because no buffer was free, and none is
        yet."""
        if self._is_stuck and (self._engine is None or self._engine.has_free_buffer):
            self._is_stuck = False
        return self._is_stuck

    def reserve(self, tree: object, world: WriterGroup) -> None:
        """Allocate buffers for this rank's share of ``tree``, in the background."""
        engine = self._running()
        if engine is not None:
            engine.reserve(
                tree,
                rank=world.rank,
                world_size=world.size,
                section=world.section,
                background=True,
            )

    def save(
        self,
        tree: object,
        *,
        step: int,
        world: WriterGroup,
        data_position: Any,
        wait_s: float,
    ) -> SaveHandle | None:
        """Start to save this rank's share. None if it was saved synchronously, without a thread.

        Raises :class:`checkpoints.StateError` if the state holds a value that cannot be saved.
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
                self._replace(death)
                continue
            self._open.append((handle, self._monotonic()))
            self.poll()
            return handle
        self._save_synchronously(tree, step, world, data_position)
        return None

    def submit(self, task: Callable[[], object]) -> None:
        """Run ``task`` on the writer thread, in order with the saves."""
        while (engine := self._running()) is not None:
            try:
                engine.submit(task)
                return
            except WriterThreadDied as death:
                self._replace(death)
        task()

    def poll(self) -> None:
        """Report the saves that ended, and detect hung ones. Cheap enough for every step."""
        if self._engine is not None:
            try:
                self._engine.outcomes()
            except WriterThreadDied as death:
                self._replace(death)
        ended = [handle.outcome for handle, _ in self._open if handle.outcome is not None]
        if ended:
            self._open = [item for item in self._open if item[0].outcome is None]
        for outcome in ended:
            self._is_stuck = self._is_stuck or outcome.status is SaveStatus.SKIPPED
            self._report(outcome)

    def wait(self, budget_s: float) -> bool:
        """Wait until no save is in flight; False after ``budget_s``."""
        return self._wait(lambda: not self.in_flight, budget_s)

    def finish_writing(self, budget_s: float) -> bool:
        """Wait until this rank's share of every save is written; other ranks may still commit."""
        return self._wait(lambda: all(handle.is_written for handle, _ in self._open), budget_s)

    def close(self, budget_s: float) -> None:
        """End the writer thread, and report the outcomes of its saves."""
        engine, self._is_closed = self._engine, True
        if engine is None:
            return
        try:
            engine.close(timeout_s=budget_s)
        except WriterThreadDied as death:
            self._replace(death)
        self._engine = None
        self.poll()

    def _wait(self, done: Callable[[], bool], budget_s: float) -> bool:
        until_s = self._monotonic() + budget_s
        while not done() and self._monotonic() < until_s:
            self._sleep(WRITER_SLICE_S)
            self.poll()
        self.poll()
        return done()

    def _running(self) -> Engine | None:
        """The engine, started if there is none; None once too many have died."""
        if self._engine is None and self._deaths < MAX_DEATHS and not self._is_closed:
            self._engine = Engine(
                self._storage,
                keep=self._keep,
                deadline_s=SAVE_DEADLINE_S,
                clock=self._clock,
                monotonic=self._monotonic,
            )
        return self._engine

    def _replace(self, death: WriterThreadDied) -> None:
        self._engine, self._deaths = None, self._deaths + 1
        replaced = self._deaths < MAX_DEATHS
        then = "a new one takes over" if replaced else "saves now block training"
        cause = f"{type(death.__cause__).__name__}: {death.__cause__}"
        self._on_death(f"{death} of {cause}; {then}")

    def _save_synchronously(
        self, tree: object, step: int, world: WriterGroup, data_position: Any
    ) -> None:
        began_s = self._monotonic()
        try:
            saved = save(
                self._storage,
                tree,
                step=step,
                nonce=world.nonce,
                generation=world.generation,
                rank=world.rank,
                world_size=world.size,
                lineage=world.lineage,
                section=world.section,
                data_position=data_position,
                keep=self._keep,
                fence=world.fence,
            )
        except SaveError as error:
            name = CheckpointName(step, world.generation, world.nonce)
            failed = SaveStatus.FAILED
            self._report(SaveOutcome(step=step, name=str(name), status=failed, reason=str(error)))
            return
        if not saved.committed:
            return  # another writer will
        took_s = self._monotonic() - began_s
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
