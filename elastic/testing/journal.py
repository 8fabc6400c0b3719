"""Reads the journals of a run: the events of all nodes in order of time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_journal(folder: str | Path) -> list[dict[str, Any]]:
    """All events of all processes that wrote into ``folder`` (``ELASTIC_JOURNAL``), oldest first.

    An incomplete last line, left by a killed process, is skipped.
    """
    return _in_order([json.loads(line) for line in _lines(folder)])


def read_events(folder: str | Path, name: str, *, since_s: float = 0.0) -> list[dict[str, Any]]:
    """Events of this name since a time on the monotonic clock, oldest first.

    Parses only matching lines: :func:`read_journal` is slow for tests that poll.
    """
    quoted = f'"{name}"'.encode()
    events = [json.loads(line) for line in _lines(folder) if quoted in line]
    return _in_order([e for e in events if e["event"] == name and e["monotonic"] >= since_s])


def _lines(folder: str | Path) -> Iterator[bytes]:
    for path in sorted(Path(folder).glob("*.jsonl")):
        data = path.read_bytes()
        yield from data[: data.rfind(b"\n") + 1].splitlines()


def _in_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda event: float(event["monotonic"]))
