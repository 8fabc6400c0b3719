"""The interface of a destination of metrics: three methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

Rows = Sequence[tuple[int, Mapping[str, float]]]
"""Steps, never decreasing, and the values of each."""


class MetricsWriter(Protocol):
    """Writes what a script logs: to TensorBoard, W&B, MLflow, or wherever you like.

    Rank 0 alone calls it, on a thread of its own. Any process of the job may become rank 0, so
    create what it needs (files, a client) in :meth:`rewind` and not before, and continue there what
    other processes have written. What a method raises is logged once and disturbs nothing else.
    """

    def rewind(self, step: int) -> None:
        """The job continues after ``step`` steps, and this process is the one that writes.

        Called before the first :meth:`log` of each world. Later steps that were logged before, by
        any process, are done again: their values must be replaced.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one step. Steps never decrease until the next :meth:`rewind`.

        After :meth:`rewind` some steps up to its own may come that an earlier process has logged
        already, since nobody knows what it got to: keep one value of each name and step.
        """

    def close(self) -> None:
        """The process ends."""


@runtime_checkable
class BatchWriter(Protocol):
    """A writer that takes the values of several steps at once, for less than one by one."""

    def log_batch(self, rows: Rows) -> None:
        """In place of :meth:`MetricsWriter.log` for each row."""
