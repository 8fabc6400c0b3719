"""One save between the caller's thread and the writer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.saving.attempt import WriteAttempt
from checkpoints.saving.outcome import SaveHandle
from checkpoints.saving.staging import StagingBuffer


@dataclass(eq=False)
class SaveJob:
    """Of one engine: what the writer thread is to do, and how far it is."""

    attempt: WriteAttempt
    handle: SaveHandle
    buffer: StagingBuffer
    fence: Callable[[], bool] | None
    began_s: float
    stall_s: float
    deadline_s: float  # on the monotonic clock
    write_s: float = 0.0
    bytes_written: int | None = None  # None: not written yet
