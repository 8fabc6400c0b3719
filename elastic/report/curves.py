"""Curves of values logged by the script, with as many points as a chart needs. Pure.

If a recovery repeats steps, their earlier values are dropped. A
curve that is too long is divided into pieces; the lowest and highest value of each remain, so that
spikes stay visible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.telemetry.journal_reader import JournalRecord

METRICS = "metrics"  # the event that holds them: fields step and values
MAX_CURVES = 4
MAX_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """One quantity over steps, ascending."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    points: int  # before thinning
    last: float
    lowest: float
    highest: float
    invalid: int = 0  # number of values that were not finite


def curves_of(
    records: Iterable[JournalRecord],
    *,
    most_curves: int = MAX_CURVES,
    most_points: int = MAX_POINTS,
) -> list[Curve]:
    """The curves from ``metrics`` events in order of time. A loss comes first."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    newest = -1
    for record in records:
        if record.name != METRICS:
            continue
        step, values = record.whole("step"), record.data.get("values")
        if step is None or not isinstance(values, dict):
            continue
        if step < newest:
            _discard_from(found.values(), step)
        newest = step
        for name, value in values.items():
            points = found[str(name)]
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, _number(value)))
    names = sorted(found, key=_rank)[:most_curves]
    curves = (_curve(name, found[name], most_points) for name in names)
    return [curve for curve in curves if curve is not None]


def _discard_from(curves: Iterable[list[tuple[int, float]]], step: int) -> None:
    for points in curves:
        while points and points[-1][0] >= step:
            points.pop()


def _number(value: object) -> float:
    """A number, or NaN, which the journal writes as a string because JSON has none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan


def _rank(name: str) -> tuple[bool, bool, str]:
    return name != "loss", "loss" not in name.lower(), name


def _curve(name: str, measured: Sequence[tuple[int, float]], most_points: int) -> Curve | None:
    points = [point for point in measured if math.isfinite(point[1])]
    if not points:
        return None
    values = [value for _, value in points]
    kept = thinned(points, most_points)
    return Curve(
        name=name,
        steps=tuple(step for step, _ in kept),
        values=tuple(value for _, value in kept),
        points=len(points),
        last=values[-1],
        lowest=min(values),
        highest=max(values),
        invalid=len(measured) - len(points),
    )


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """About ``most`` points: the first, the last, and the extremes of pieces of equal length.

    >>> thinned([(0, 1.0), (1, 9.0), (2, 1.0), (3, 1.0), (4, 0.0), (5, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (4, 0.0), (5, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    pieces = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for piece in range(pieces):
        of_piece = inner[piece * len(inner) // pieces : (piece + 1) * len(inner) // pieces]
        if of_piece:
            low, high = min(of_piece, key=lambda p: p[1]), max(of_piece, key=lambda p: p[1])
            kept += sorted({low, high})
    return [*kept, points[-1]]
