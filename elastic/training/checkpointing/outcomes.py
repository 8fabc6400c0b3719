"""Reports how each save ended: an event in the journal, and a warning if several fail in a row."""

from __future__ import annotations

import logging

from checkpoints import SaveOutcome, SaveStatus
from elastic.events import CheckpointSaved, CheckpointSkipped, MemoryIntervalChanged
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.memory_interval.choice import ChosenInterval

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

    def writer_died(self, reason: str) -> None:
        """Report that a bug ended the engine's thread."""
        self.skipped("writer", reason, level=logging.ERROR)

    def _warn_of_failures(self, outcome: SaveOutcome) -> None:
        get_logger().warning(
            "the last %d checkpoints were not saved (%s: %s); training continues, but a restart "
            "would go back to step %d",
            self._failures_in_a_row,
            outcome.name,
            outcome.reason,
            self.committed_step,
        )
