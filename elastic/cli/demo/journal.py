"""Follows the journals of the demo's nodes while they grow."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class JournalEntry:
    """One event of one process."""

    name: str  # in kebab case: "world-formed"
    node: str
    time_s: float  # wall clock
    fields: dict[str, Any] = field(default_factory=dict)


class JournalReader:
    """Reads each line once; a line without its end is left for the next time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read_new(self) -> list[JournalEntry]:
        """What was written since the last call, in order of time."""
        entries = [entry for path in self._folder.glob("*.jsonl") for entry in self._new_of(path)]
        return sorted(entries, key=lambda entry: entry.time_s)

    def _new_of(self, path: Path) -> list[JournalEntry]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return [_entry(json.loads(line)) for line in whole.splitlines()]


def _entry(data: dict[str, Any]) -> JournalEntry:
    return JournalEntry(
        name=str(data.pop("event")),
        node=str(data.pop("node", "?")),
        time_s=float(data.pop("time")),
        fields=data,
    )
