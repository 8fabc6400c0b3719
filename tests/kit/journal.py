"""A journal in memory."""

from __future__ import annotations

import logging

from elastic.telemetry.events import Event


class MemoryJournal:
    """Keeps every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        self.events.append(event)
