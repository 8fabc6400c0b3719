"""A save, as passed from the caller's thread to the writer thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.saving.attempt import WriteAttempt
from checkpoints.saving.outcome import SaveHandle
from checkpoints.saving.staging import StagingBuffer


@dataclass(eq=False)
class SaveJob:
    """The input of the writer thread for one save, and its progress."""

    attempt: WriteAttempt
    handle: SaveHandle
    buffer: StagingBuffer
    fence: Callable[[], bool] | None
    began_s: float
    stall_s: float
    deadline_s: float  # on the monotonic clock
    write_s: float = 0.0
    bytes_written: int | None = None  # None: not written yet
    written_s: float = 0.0  # on the monotonic clock
    poll_at_s: float = 0.0  # when to look for other writers' parts
    problem: str = ""  # why it could not be committed yet
