"""The checkpoints of a run, from its journals: committed and skipped ones. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.telemetry.journal_reader import JournalRecord


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    name: str
    step: int
    at_s: float  # Unix time at which the first rank saw it committed
    duration_s: float  # of the slowest rank
    stall_s: float  # time that training waited, on the slowest rank
    size_bytes: int  # of all ranks that are known


@dataclass(frozen=True)
class FailedCheckpoint:
    """A checkpoint that could not be saved or used."""

    name: str
    at_s: float
    node: str
    reason: str


@dataclass(frozen=True)
class CheckpointHistory:
    """All checkpoints of a run, in order of time."""

    saved: tuple[SavedCheckpoint, ...]
    skipped: tuple[FailedCheckpoint, ...]

    def last_before(self, at_s: float) -> SavedCheckpoint | None:
        """The newest checkpoint committed by ``at_s``."""
        place = bisect_right(self.saved, at_s, key=lambda saved: saved.at_s)
        return self.saved[place - 1] if place else None

    @property
    def last(self) -> SavedCheckpoint | None:
        return self.saved[-1] if self.saved else None

    @property
    def stall_s(self) -> float:
        """The total time for which training waited for checkpoints."""
        return sum(saved.stall_s for saved in self.saved)


def checkpoint_history(records: Iterable[JournalRecord]) -> CheckpointHistory:
    """The history from the events of all ranks, in any order."""
    parts: dict[tuple[str, int], list[JournalRecord]] = {}
    skipped: dict[tuple[str, str, str], FailedCheckpoint] = {}
    for record in records:
        if record.name == "checkpoint-saved":
            key = (record.text("name"), record.whole("step") or 0)
            parts.setdefault(key, []).append(record)
        elif record.name == "checkpoint-skipped":
            name, reason = record.text("name"), record.text("reason")
            skipped.setdefault(
                (name, record.node, reason),
                FailedCheckpoint(name, record.at_s, record.node, reason),
            )
    saved = [_saved(name, step, of_ranks) for (name, step), of_ranks in parts.items()]
    return CheckpointHistory(
        saved=tuple(sorted(saved, key=lambda c: c.at_s)),
        skipped=tuple(sorted(skipped.values(), key=lambda c: c.at_s)),
    )


def _saved(name: str, step: int, of_ranks: Sequence[JournalRecord]) -> SavedCheckpoint:
    return SavedCheckpoint(
        name=name,
        step=step,
        at_s=min(record.at_s for record in of_ranks),
        duration_s=max(record.number("duration_s") for record in of_ranks),
        stall_s=max(record.number("stall_s") for record in of_ranks),
        size_bytes=sum(max(0, record.whole("bytes") or 0) for record in of_ranks),
    )
