"""Curves of logged metrics: after a recovery, over long runs, with non-finite values."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping

from elastic.report.model import GenerationMark, curves_of, thinned
from elastic.report.render import curve_svg
from elastic.telemetry.reader import JournalRecord


def measured(*events: tuple[int, Mapping[str, object]]) -> Iterable[JournalRecord]:
    for number, (step, values) in enumerate(events):
        data = {"step": step, "values": values}
        yield JournalRecord("metrics", "w", number, float(number), float(number), data)


def test_a_repeated_step_replaces_its_value_and_later_ones() -> None:
    (curve,) = curves_of(
        measured(
            (10, {"loss": 3.0}),
            (20, {"loss": 2.0}),
            (30, {"loss": 1.5}),
            (15, {"loss": 2.5}),  # a checkpoint of step 12 was restored
            (25, {"loss": 1.9}),
            (25, {"loss": 1.8}),
        )
    )
    assert list(zip(curve.steps, curve.values, strict=True)) == [(10, 3.0), (15, 2.5), (25, 1.8)]
    assert (curve.points, curve.last, curve.lowest, curve.highest) == (3, 1.8, 1.8, 3.0)


def test_the_loss_comes_first_and_invalid_values_are_counted() -> None:
    curves = curves_of(
        measured(
            (1, {"accuracy": 0.1, "train_loss": 5, "loss": "NaN", "lr": True}),
            (2, {"accuracy": 0.2, "train_loss": 4, "loss": 1e400, "lr": None}),
            (3, {"accuracy": 0.3, "train_loss": 3, "loss": 2.0}),
        )
    )
    assert [curve.name for curve in curves] == ["loss", "train_loss", "accuracy"], "lr is none"
    assert (curves[0].points, curves[0].invalid) == (1, 2)
    assert list(curves_of(measured((1, {})))) == []


def test_malformed_records_are_skipped() -> None:
    odd = [
        JournalRecord("metrics", "w", 0, 0.0, 0.0, data)
        for data in ({}, {"step": "x", "values": {"loss": 1}}, {"step": 1, "values": [1]})
    ]
    assert curves_of(odd) == []


def test_a_spike_survives_downsampling() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    kept = thinned(points, 600)
    assert len(kept) <= 600
    assert (54_321, 99.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_a_chart_of_one_or_equal_values_is_drawn() -> None:
    mark = GenerationMark(2, 0.0, "lost", "", 2, (), step=1)
    for events in ([(1, {"loss": 1.0})], [(1, {"loss": 0.0}), (9, {"loss": 0.0})]):
        (curve,) = curves_of(measured(*events))
        root = ET.fromstring(curve_svg(curve, [mark]))
        texts = ["".join(element.itertext()) for element in root.iter()]
        assert any("Generation 2 from step 1: lost." in text for text in texts)
