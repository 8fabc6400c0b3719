"""The recently logged values, by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.training.observers.values import Scalar

_ALWAYS_KEPT = 8  # rows, however old: steps may take minutes


@dataclass(slots=True)
class Row:
    """Values logged for one step: all, or some of them."""

    step: int  # number of committed steps once this one commits
    logged_s: float
    values: dict[str, Scalar]
    is_sent: bool = False


class History:
    """Rows with non-decreasing steps. Every rank keeps recent rows, because a new rank 0 writes
    those that the previous one did not."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._rows: deque[Row] = deque()

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def put(self, step: int, values: dict[str, Scalar], now_s: float) -> None:
        """Add values to the row of ``step``, replacing values of the same name.

        Takes ownership of the dictionary.
        """
        rows = self._rows
        if rows and rows[-1].step >= step:
            self.rewind(step)
            if rows and rows[-1].step == step and not rows[-1].is_sent:
                rows[-1].values.update(values)
                return
        rows.append(Row(step, now_s, values))

    def rewind(self, step: int) -> None:
        """Forget values of steps after ``step``, which will be repeated."""
        rows = self._rows
        while rows and rows[-1].step > step:
            rows.pop()

    def resend_all(self) -> None:
        """Mark all rows as not written."""
        for row in self._rows:
            row.is_sent = False

    def unsent(self, step: int) -> list[Row]:
        """Unsent rows up to ``step``, oldest first."""
        found: list[Row] = []
        for row in reversed(self._rows):
            if row.is_sent:
                break
            if row.step <= step:
                found.append(row)
        return found[::-1]

    def prune(self, now_s: float, *, is_writer: bool) -> None:
        """Forget old rows. ``is_writer``: unsent rows are kept."""
        rows = self._rows
        while len(rows) > _ALWAYS_KEPT and now_s - rows[0].logged_s > self._keep_s:
            if is_writer and not rows[0].is_sent:
                return
            rows.popleft()
