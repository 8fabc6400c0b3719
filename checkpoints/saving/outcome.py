"""The types of asynchronous saves: the group of writers, the handle and the outcome of a save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from checkpoints.format.manifest import Lineage


@dataclass(frozen=True, kw_only=True)
class WriterGroup:
    """The writers of one checkpoint, seen from one rank; nonce and generation are equal on all.

    ``section``: the ranks that save the same tensors as this one, in order; by default all. The
    states of several sections are dicts with different keys, and form one checkpoint with all keys.
    ``fence`` is called before a commit, on the writer thread: False means that this world has
    ended.
    """

    nonce: str
    generation: int = 0
    rank: int = 0
    size: int = 1
    lineage: Lineage = ()
    section: tuple[int, ...] | None = None
    fence: Callable[[], bool] | None = field(default=None, compare=False)


class WriterThreadDied(RuntimeError):
    """The engine's writer thread died of a bug, its ``__cause__``. No more saves are possible."""


class SaveStatus(Enum):
    """The final status of a save."""

    COMMITTED = "committed"  # by any writer
    FAILED = "failed"  # the storage failed; see ``reason``
    ABANDONED = "abandoned"  # not committed within the deadline
    STALE = "stale"  # fenced: a newer world exists
    SKIPPED = "skipped"  # all buffers were busy; nothing was staged


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """The outcome of an asynchronous save.

    ``stall_s`` is how long training was blocked, ``write_s`` how long the writer took until its
    share was durable or the checkpoint committed, ``took_s`` the total time, including the removal
    of older checkpoints, or until the save was abandoned.
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
    """A save in flight."""

    name: str
    step: int
    outcome: SaveOutcome | None = None
    is_written: bool = False  # this writer has written its share, or never will
    ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self, timeout_s: float | None = None) -> SaveOutcome | None:
        """Wait for the outcome; None if the save has not ended after ``timeout_s``."""
        self.ended.wait(timeout_s)
        return self.outcome
