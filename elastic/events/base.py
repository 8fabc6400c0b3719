"""The base class of all events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base. The class name, in kebab case, is the event's name in the journal."""
