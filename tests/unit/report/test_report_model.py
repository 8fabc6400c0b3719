"""What a report is made of: curves of logged metrics, and the timeline of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from kit.made_up_run import MadeUpProcess, write_run

from elastic.report.model import (
    CheckpointHistory,
    Timeline,
    TimelineLimits,
    curves_of,
    generation_marks,
    incident_reports,
    thinned,
    timeline_of,
)
from elastic.report.render import svg, timeline_chart
from elastic.telemetry.goodput import Activity, Breakdown, IncidentGoodput, goodput_of_run
from elastic.telemetry.reader import JournalRecord, merge, read_folder, run_of

LIMITS = TimelineLimits()


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


def timeline_in(folder: Path, limits: TimelineLimits = LIMITS) -> Timeline:
    run = run_of(merge(*read_folder(folder)))
    return timeline_of(goodput_of_run(run), generation_marks(run.records), limits)


def long_run(folder: Path, nodes: int, worlds: int) -> None:
    """Worlds with 1,800 s of steps each, which end with a fault and a recovery of 4 s."""
    for number in range(nodes):
        worker = MadeUpProcess(f"node-{number:02}", "worker")
        at_s, step = 1.0, 0
        for generation in range(1, worlds + 1):
            place = {"rank": number, "generation": generation}
            if generation > 1:
                at_s += 4.0
                worker.write(at_s, "recovered", duration_s=3.9, wait_s=3.9, **place)
            at_s, step = at_s + 1, step + 1
            worker.window(at_s, 1.0, step, 1, ended="first-step", **place)
            at_s, step = at_s + 1800, step + 1800
            worker.window(at_s, 1800.0, step, 1800, open_s=0.5, ended="fault", **place)
        (folder / worker.path).write_text("\n".join(worker.lines) + "\n")


def test_every_interruption_is_visible_and_proportional(tmp_path: Path) -> None:
    long_run(tmp_path, nodes=16, worlds=40)
    timeline = timeline_in(tmp_path)
    assert len(timeline.lanes) == 16 and timeline.hidden_nodes == 0
    length_s = timeline.end_s - timeline.start_s
    for lane in timeline.lanes:
        spans = [(s.end_s - s.start_s, s.activity) for s in lane.segments]
        productive_s = sum(took_s for took_s, a in spans if a is Activity.PRODUCTIVE)
        assert productive_s / length_s > 0.85, "as the goodput says"
        interruptions = sum(
            1
            for a, b in pairwise(lane.segments)
            if a.activity is Activity.PRODUCTIVE and b.activity is not Activity.PRODUCTIVE
        )
        assert interruptions >= 39
    assert len(svg(timeline_chart(timeline))) < 120_000, "room for the rest of the page"


def test_lanes_are_omitted_above_the_segment_limit(tmp_path: Path) -> None:
    long_run(tmp_path, nodes=6, worlds=40)
    timeline = timeline_in(tmp_path, TimelineLimits(segments=200))
    assert 1 <= len(timeline.lanes) < 6
    assert timeline.hidden_nodes == 6 - len(timeline.lanes)
    assert sum(len(lane.segments) for lane in timeline.lanes) <= 200
    (lane, *_) = timeline.lanes
    assert len(lane.segments) > 40


def test_segments_do_not_overlap_and_omit_absent_nodes(tmp_path: Path) -> None:
    write_run(tmp_path)
    timeline = timeline_in(tmp_path)
    lanes = {lane.node: lane.segments for lane in timeline.lanes}
    assert list(lanes) == ["node-0", "node-1", "node-2", "node-3"]
    for segments in lanes.values():
        assert all(
            a.end_s <= b.start_s and (a.end_s < b.start_s or a.activity is not b.activity)
            for a, b in pairwise(segments)
        )
    second = (timeline.end_s - timeline.start_s) / 120
    assert lanes["node-1"][-1].end_s - timeline.start_s < 42 * second, "killed after 40 s"
    shown = {s.activity for s in lanes["node-0"]}
    assert {Activity.DETECTION, Activity.ABORT, Activity.RENDEZVOUS, Activity.REBUILD} <= shown
    assert [mark.label for mark in timeline.marks] == ["g1 first", "g2 lost", "g3 joined"]


def test_a_death_before_its_peers_stop_belongs_to_the_incident() -> None:
    """Restarted workers train on until torchrun ends them."""
    lines: tuple[tuple[str, float, dict[str, object]], ...] = (
        ("world-formed", 1.0, {"generation": 1}),
        ("worker-died", 2.0, {"node": "n1", "generation": 1, "reason": "ValueError: earlier"}),
        ("world-formed", 2.1, {"generation": 2}),
        ("worker-died", 5.0, {"node": "n2", "generation": 2, "reason": "ValueError: its cause"}),
        ("world-formed", 5.1, {"generation": 3}),
    )
    records = [
        JournalRecord(name, "w", number, at_s, at_s, data, at_s)
        for number, (name, at_s, data) in enumerate(lines)
    ]
    incident = IncidentGoodput(
        generations=(3,),
        cause="failure",
        reason="n2 failed",
        start_s=5.05,
        end_s=9.0,
        nodes=("n1",),
        pause=Breakdown({}),
        breakdown=Breakdown({}),
    )
    (report,) = incident_reports([incident], records, CheckpointHistory((), ()))
    assert report.errors == (("n2", "ValueError: its cause"),)
