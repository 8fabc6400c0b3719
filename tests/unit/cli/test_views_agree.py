"""Status, report, events, dashboard and demo say the same of a recorded run.

``tests/data``: the journals and etcd's records of ``recorded_run``, a run of ``elastic demo`` in
which node-1 was killed and node-3 joined, and of ``recorded_exception``, with
checkpoints, in which a worker of local-1 raised an exception.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.memory_store import MemoryServer, MemoryStore

from elastic.cli.dashboard_feed import JobSnapshot, live_page, status_document
from elastic.cli.dashboard_server import exposition
from elastic.cli.demo import pauses_of
from elastic.cli.last_known import last_known
from elastic.cli.main import main
from elastic.cli.status import document as status_of
from elastic.cli.status import lines
from elastic.cli.view import JobView, read_job
from elastic.membership.records import Keys
from elastic.report.model import RunReport, report_of
from elastic.report.render import document, html, largest, markdown
from elastic.telemetry.goodput import Activity
from elastic.telemetry.log import duration, timestamp
from elastic.telemetry.reader import merge, read_folder

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True)
class Recorded:
    """A recorded run, and the failure in it."""

    folder: Path
    step: int  # committed before the failure
    recorded_step: int  # in etcd
    steps: int  # of the run
    lost: list[str]
    reason: str
    incident: str  # in status
    in_journals: str  # in status without etcd


KILL = Recorded(
    folder=DATA / "recorded_run",
    step=20,
    recorded_step=20,
    steps=300,
    lost=["node-1"],
    reason="node-1 is lost",
    incident="generation 1: node-1 was lost",
    in_journals="node-1 was lost",
)
EXCEPTION = Recorded(
    folder=DATA / "recorded_exception",
    step=149,
    recorded_step=148,
    steps=256,
    lost=[],
    reason="local-1 failed: ValueError: boom",
    incident="generation 1: a worker of local-1 failed",
    in_journals="a worker of local-1 died: ValueError: boom",
)


@pytest.fixture(scope="module", params=[KILL, EXCEPTION], ids=["kill", "exception"])
def run(request: pytest.FixtureRequest) -> Recorded:
    assert isinstance(request.param, Recorded)
    return request.param


@pytest.fixture(scope="module")
def report(run: Recorded) -> RunReport:
    return report_of(merge(*read_folder(run.folder / "journals")))


@pytest.fixture(scope="module")
def view(run: Recorded, report: RunReport) -> JobView:
    store = MemoryStore(MemoryServer())
    for key, value in json.loads((run.folder / "etcd.json").read_text()).items():
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
    run: Recorded, report: RunReport, view: JobView
) -> None:
    (failure,) = report.failures
    (recorded,) = status_of(view)["incidents"]
    assert recorded["generation"] == failure.generations[0] - 1
    assert recorded["time"] == pytest.approx(failure.at_s, abs=0.05)
    assert failure.step == run.step
    # As last reported to the leader: `elastic describe incident` says "or later".
    assert recorded["step"] == run.recorded_step
    assert recorded["lost"] == run.lost and run.reason in failure.reason
    formed = {mark.generation: mark.at_s for mark in report.marks}
    for incident in report.incidents:
        formed_s = formed[incident.generations[0]]
        assert incident.at_s == pytest.approx(formed_s, abs=0.05), "as in the timeline"
    assert any(run.incident in line for line in lines(view))


def test_the_events_around_a_failure_have_its_time_and_its_reason_is_told_once(
    run: Recorded, report: RunReport, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (failure,) = report.failures
    noticed = ["--event=node-lost", "--event=failure-judged", "-o", "json"]
    assert main(["events", str(run.folder / "journals"), *noticed]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["at"] == pytest.approx(failure.at_s, abs=0.001)
    assert first["event"] == ("node-lost" if run.lost else "failure-judged")
    cause = run.reason.rpartition(": ")[2]
    (row,) = [line for line in texts["markdown"].splitlines() if f"| 2 | {run.reason}" in line]
    assert row.count(cause) == 1
    known = last_known(str(run.folder / "journals"), "demo", report.goodput.end_s)
    assert any(run.in_journals in line for line in known), known


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
    run: Recorded, report: RunReport, view: JobView, snapshot: JobSnapshot, texts: dict[str, str]
) -> None:
    assert view.step == report.goodput.steps == document(report)["steps"] == run.steps
    goodput = report.goodput.breakdown.goodput
    status = status_document(snapshot)
    assert status["source"]["journal_goodput"] == pytest.approx(goodput, abs=1e-6)
    metrics = exposition(status)[0].decode()
    sample = next(line for line in metrics.splitlines() if line.startswith("elastic_job_goodput"))
    assert float(sample.split()[-1]) == pytest.approx(goodput, abs=1e-6)
    assert f"{goodput:.1%}" in texts["html"] and f"{goodput:.1%} of" in texts["dashboard"]
