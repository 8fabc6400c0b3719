"""The journals of a run, read back: what happened on every node, in the order of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_journal(folder: str | Path) -> list[dict[str, Any]]:
    """All events of all processes that wrote into ``folder`` (``ELASTIC_JOURNAL``), oldest first.

    A line without its end was being written when its process was killed: it is skipped.
    """
    events = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        data = path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].decode().splitlines()
        events += [json.loads(line) for line in lines]
    return sorted(events, key=lambda event: float(event["monotonic"]))
