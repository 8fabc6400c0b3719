"""Status, report, events, dashboard and demo say the same of one recorded run.

``tests/data/recorded_run``: the journals and etcd's records of a run of ``elastic demo``, in which
node-1 was killed and node-3 joined.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.memory_store import MemoryServer, MemoryStore

from elastic.cli.dashboard_feed import JobSnapshot, live_page, status_document
from elastic.cli.dashboard_server import exposition
from elastic.cli.demo import pauses_of
from elastic.cli.status import document as status_of
from elastic.cli.status import lines
from elastic.cli.view import JobView, read_job
from elastic.membership.records import Keys
from elastic.report.model import RunReport, report_of
from elastic.report.render import document, html, largest, markdown
from elastic.telemetry.goodput import Activity
from elastic.telemetry.log import duration, timestamp
from elastic.telemetry.reader import merge, read_folder

RUN = Path(__file__).parents[2] / "data" / "recorded_run"


@pytest.fixture(scope="module")
def report() -> RunReport:
    return report_of(merge(*read_folder(RUN / "journals")))


@pytest.fixture(scope="module")
def view(report: RunReport) -> JobView:
    store = MemoryStore(MemoryServer())
    for key, value in json.loads((RUN / "etcd.json").read_text()).items():
        store.put(key, json.dumps(value).encode())
    return read_job(store, Keys.of("/elastic", "demo"), report.goodput.end_s)


@pytest.fixture(scope="module")
def snapshot(report: RunReport, view: JobView) -> JobSnapshot:
    return JobSnapshot(run_id="demo", at_s=view.at_s, view=view, report=report, reads_journals=True)


@pytest.fixture(scope="module")
def texts(report: RunReport, snapshot: JobSnapshot) -> dict[str, str]:
    """What a reader sees of the journals, by view."""
    return {
        "html": html(report),
        "markdown": "\n".join(markdown(report)),
        "dashboard": live_page(snapshot, "server"),
    }


def test_each_failure_is_one_incident_of_the_same_time_and_step(
    report: RunReport, view: JobView
) -> None:
    (failure,) = report.failures
    (recorded,) = status_of(view)["incidents"]
    assert recorded["generation"] == failure.generations[0] - 1
    assert recorded["time"] == pytest.approx(failure.at_s, abs=0.05)
    assert recorded["step"] == failure.step == 20
    assert recorded["lost"] == ["node-1"] and "node-1 is lost" in failure.reason
    formed = {mark.generation: mark.at_s for mark in report.marks}
    for incident in report.incidents:
        formed_s = formed[incident.generations[0]]
        assert incident.at_s == pytest.approx(formed_s, abs=0.05), "as in the timeline"
    assert any("generation 1: node-1 was lost" in line for line in lines(view))


def test_a_pause_is_the_same_everywhere_and_the_sum_of_its_phases(
    report: RunReport, texts: dict[str, str]
) -> None:
    for incident, written in zip(report.incidents, document(report)["incidents"], strict=True):
        assert sum(took_s for _, took_s in incident.phases) == pytest.approx(incident.pause_s)
        assert written["pause_s"] == pytest.approx(incident.pause_s, abs=0.001)
        assert sum(written["seconds"].values()) == pytest.approx(incident.pause_s, abs=0.001)
        assert pauses_of(report)[incident.generations[-1]] == incident.pause_s, "of the demo"
        assert incident.pause_s < incident.end_s - incident.start_s, "a step is not a pause"
        for name, text in texts.items():
            assert duration(incident.pause_s) in text, name
            assert largest(incident.phases, 6) in text, name
            stamp = timestamp(incident.at_s) if name == "markdown" else incident.cause
            assert stamp in text, name
    total_s = sum(incident.pause_s for incident in report.incidents)
    assert f"paused training for {duration(total_s)}" in report.sentence


def test_without_recomputed_steps_no_time_was_spent_on_them(
    report: RunReport, texts: dict[str, str]
) -> None:
    assert report.goodput.recomputed_steps == 0
    assert not report.goodput.breakdown.seconds.get(Activity.RECOMPUTED)
    assert "<dt>Recomputed steps</dt><dd>0</dd>" in texts["html"]
    assert ">recomputed steps<" not in texts["html"] + texts["dashboard"]


def test_the_stall_of_checkpoints_is_the_one_in_the_account_of_time(
    report: RunReport, texts: dict[str, str]
) -> None:
    stall = duration(report.goodput.breakdown.seconds[Activity.CHECKPOINT])
    for name in ("html", "dashboard"):
        assert f"training waited {stall} for them" in texts[name]
        assert f"{stall} (" in texts[name], "the bar"
    assert f"| checkpoint stall | {stall} |" in texts["markdown"]


def test_steps_and_goodput_are_the_same_in_status_report_and_metrics(
    report: RunReport, view: JobView, snapshot: JobSnapshot, texts: dict[str, str]
) -> None:
    assert view.step == report.goodput.steps == document(report)["steps"] == 300
    goodput = report.goodput.breakdown.goodput
    status = status_document(snapshot)
    assert status["source"]["journal_goodput"] == pytest.approx(goodput, abs=1e-6)
    metrics = exposition(status)[0].decode()
    sample = next(line for line in metrics.splitlines() if line.startswith("elastic_job_goodput"))
    assert float(sample.split()[-1]) == pytest.approx(goodput, abs=1e-6)
    assert f"{goodput:.1%}" in texts["html"] and f"{goodput:.1%} of" in texts["dashboard"]
