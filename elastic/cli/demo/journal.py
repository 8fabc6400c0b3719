"""Follows the journals of the demo's nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.telemetry.journal import ENVELOPE
from elastic.telemetry.journal_reader import JournalFolder, JournalRecord


@dataclass(frozen=True)
class JournalEntry:
    """One event of one process."""

    name: str  # in kebab case: "world-formed"
    node: str
    time_s: float  # wall clock
    fields: dict[str, Any] = field(default_factory=dict)


class JournalReader:
    """Reads each line once; an incomplete line is left for the next call."""

    def __init__(self, folder: Path) -> None:
        self._journals = JournalFolder(folder)

    def read_new(self) -> list[JournalEntry]:
        """Entries written since the last call, in order of time."""
        entries = [_entry(record) for record in self._journals.read_new()]
        return sorted(entries, key=lambda entry: entry.time_s)


def _entry(record: JournalRecord) -> JournalEntry:
    fields = {name: value for name, value in record.data.items() if name not in ENVELOPE}
    return JournalEntry(record.name, record.node, record.time_s, fields)
