"""A save, as passed from the caller's thread to the writer thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from checkpoints.saving.attempt import WriteAttempt
from checkpoints.saving.outcome import SaveHandle
from checkpoints.saving.tensor_file import Data
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Extent


@dataclass(eq=False)
class SaveJob:
    """The input of the writer thread for one save, and its progress."""

    attempt: WriteAttempt
    handle: SaveHandle
    fence: Callable[[], bool] | None
    began_s: float
    stall_s: float
    deadline_s: float  # on the monotonic clock; renewed by progress
    write_s: float = 0.0
    bytes_written: int | None = None  # None: not written yet
    written_s: float = 0.0  # on the monotonic clock
    poll_at_s: float = 0.0  # when to look for other writers' parts
    problem: str = ""  # why it could not be committed yet
    seen: tuple[int, int] = (-1, 0)  # the first missing writer, and the size of its share


class Progress:
    """When the writer thread last wrote a chunk, and how long it had to wait for one.

    It is entered while a share is written. A pause that has ended was a slow storage, not a hung
    one: later saves are given twice the longest.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.last_s = monotonic()
        self.patience_s = 0.0

    def watched(self, data: Data) -> Data:
        """``data``, which is called before each chunk is written, and counts as progress."""

        def read(spec: TensorSpec, place: Extent) -> memoryview:
            self._made()
            return data(spec, place)

        return read

    def _made(self) -> None:
        before_s, self.last_s = self.last_s, self._monotonic()
        self.patience_s = max(self.patience_s, 2 * (self.last_s - before_s))

    def __enter__(self) -> None:
        self.last_s = self._monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._made()
