"""Reads scalars copied from a device, without waiting for the device.

A copy is read once an event that was recorded after it has completed. So a value is available one
flush later, and no step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elastic.training.observers.history import Row


class DeviceEvent(Protocol):
    """The subset of ``torch.Event`` that is used here."""

    def query(self) -> bool:
        """Whether all work queued before the event is done."""

    def synchronize(self) -> None:
        """Wait until all work queued before the event is done."""


def record_event() -> DeviceEvent:
    """Record an event on the accelerator's current stream."""
    event = torch.Event(device=torch.accelerator.current_accelerator())
    event.record()
    return event


class DeviceReads:
    """Pending device reads. One per process, used by the main thread."""

    def __init__(self, record: Callable[[], DeviceEvent] = record_event) -> None:
        self._record = record
        self._event: DeviceEvent | None = None
        self._covered: list[Row] = []  # rows whose copies were queued before the event

    def finish(self, rows: Sequence[Row], *, wait: bool = False) -> list[Row]:
        """The leading rows whose values are available."""
        open_ = [row for row in rows if _is_open(row)]
        if not open_:
            return list(rows)
        if wait:
            self._event = None
            self._record().synchronize()
            _read(open_)
            return list(rows)
        if self._event is not None and self._event.query():
            _read(self._covered)
            self._event, self._covered = None, []
            open_ = [row for row in open_ if _is_open(row)]
        if self._event is None and open_:
            self._event, self._covered = self._record(), open_
        return _until_open(rows)


def _is_open(row: Row) -> bool:
    return any(isinstance(value, torch.Tensor) for value in row.values.values())


def _read(rows: Sequence[Row]) -> None:
    for row in rows:
        row.values = {name: float(value) for name, value in row.values.items()}


def _until_open(rows: Sequence[Row]) -> list[Row]:
    known: list[Row] = []
    for row in rows:
        if _is_open(row):
            break
        known.append(row)
    return known
