"""The words of the background engine: who saves together, and how a save ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from checkpoints.format.manifest import Lineage


@dataclass(frozen=True, kw_only=True)
class WriterGroup:
    """Who saves together: the same nonce and generation on every rank.

    ``fence`` is asked before a commit, in the background: False means that this world is over.
    """

    nonce: str
    generation: int = 0
    rank: int = 0
    size: int = 1
    lineage: Lineage = ()
    fence: Callable[[], bool] | None = field(default=None, compare=False)


class WriterThreadDied(RuntimeError):
    """The engine's thread died of the cause: a bug. Nothing is saved any more."""


class SaveStatus(Enum):
    """How a save ended."""

    COMMITTED = "committed"  # by whichever writer
    FAILED = "failed"  # the storage refused; see ``reason``
    ABANDONED = "abandoned"  # not committed within the deadline
    STALE = "stale"  # the fence says that a newer world exists
    SKIPPED = "skipped"  # all buffers were busy; nothing was staged


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended.

    ``stall_s`` is what training paid, ``write_s`` what the writer took until its share, or the
    checkpoint, stood; ``took_s`` all of it, with the removal of older ones, or until it was given
    up.
    """

    step: int
    name: str
    status: SaveStatus
    reason: str = ""
    error: Exception | None = None
    bytes_written: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    took_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class SaveHandle:
    """A save under way."""

    name: str
    step: int
    outcome: SaveOutcome | None = None
    is_written: bool = False  # this writer has done its part, or will never
    ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self, timeout_s: float | None = None) -> SaveOutcome | None:
        """The outcome, or None if there is none after ``timeout_s``."""
        self.ended.wait(timeout_s)
        return self.outcome
