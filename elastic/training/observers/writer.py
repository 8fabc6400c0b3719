"""The interface of a destination of metrics: three methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

Rows = Sequence[tuple[int, Mapping[str, float]]]
"""Steps, which do not decrease, with their values."""


class MetricsWriter(Protocol):
    """A destination of logged values: TensorBoard, W&B, MLflow, or any other.

    Only rank 0 calls it, on a separate thread. Any process of the job may become rank 0, so
    create resources (files, a client) in :meth:`rewind` and not before, and continue there after
    the values of other processes. An exception in a method is logged once and has no other effect.
    """

    def rewind(self, step: int) -> None:
        """Begin to write from this process; the job continues after ``step`` steps.

        Called before the first :meth:`log` of each world. Later steps that any process has already
        logged will be repeated: their values must be replaced.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step. Steps do not decrease until the next :meth:`rewind`.

        After :meth:`rewind`, steps up to its ``step`` may come again, because an earlier process's
        last write is unknown: keep one value per name and step.
        """

    def close(self) -> None:
        """Close: the process is ending."""


@runtime_checkable
class BatchWriter(Protocol):
    """A writer that accepts several steps at once, to save calls."""

    def log_batch(self, rows: Rows) -> None:
        """Write the rows. Called instead of :meth:`MetricsWriter.log`."""
