"""The dashboard's page: content, escaping, truncation, and a size of at most 250 kB."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dashboard_kit import FakeJob
from kit.made_up_run import write_run
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world

from elastic.cli.dashboard_feed import (
    MAX_EVENTS,
    EventLog,
    JobSnapshot,
    JournalFeed,
    Outage,
    live_page,
    status_document,
    text_of,
)
from elastic.cli.dashboard_server import content_policy
from elastic.cli.view import JobView, read_job
from elastic.membership.progress import JobProgress, RecordedHeartbeat
from elastic.membership.records import BreakageRecord, FailureRecord, Keys, Leader, NodeState
from elastic.report.model import report_of
from elastic.report.render import MAX_BYTES
from elastic.telemetry.reader import JournalRecord, merge, read_folder

KEYS = Keys.of("/elastic", "llama-7")
NOW = 1_769_860_800.0
HOSTILE = "<script>alert(1)</script>\x1b[2J\"'&\udcff" + "<" * 1_000_000


def record(name: str, **data: object) -> JournalRecord:
    line = {"event": name, "node": "n1", **data}
    return JournalRecord(name, "w", 0, NOW, 0.0, line)


@pytest.fixture
def job() -> FakeJob:
    fake_job = FakeJob(ManualClock(NOW))
    fake_job.train()
    return fake_job


def view_of(job: FakeJob) -> JobView:
    return read_job(job.store, KEYS, NOW + 10)


def snapshot_of(view: JobView | None, **more: Any) -> JobSnapshot:
    return JobSnapshot(run_id="llama-7", at_s=NOW + 10, view=view, **more)


def page_of(view: JobView | None, **more: Any) -> Reader:
    return Reader(live_page(snapshot_of(view, **more), "server"))


class Reader(HTMLParser):
    """Collects unclosed tags, ids, scripts, and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.handlers: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "path"):
            self.open.append(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name.startswith("on") or name == "style":
                self.handlers.append(name)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def test_the_page_shows_the_status_without_a_script(job: FakeJob) -> None:
    job.kill("n2")
    job.put_node("n5", None, NodeState.STARTING)
    log = EventLog()
    view = view_of(job)
    log.add_changes(view)
    found = page_of(view, events=log.events)
    assert found.open == [] and len(found.ids) == len(set(found.ids))
    assert found.scripts == 1 and not found.handlers
    for fact in (
        "training in generation 8 with 3 of 4 nodes; n2 was lost 10 s ago",
        "n5 is warming up",
        "52 of 500",
        "2 steps/s",
        "about 3 min 44 s",
        "an estimate",
        "step 40, 16 s ago",
        "killed by signal 9",
        "its node is left out",
        "generation 7 ended: n2 was lost",
        "n1 leader",
    ):
        assert fact in found.text, fact


def test_the_time_left_of_a_job_without_planned_steps_is_unknown(job: FakeJob) -> None:
    view = view_of(job)
    assert view.progress is not None
    view = replace(view, progress=replace(view.progress, planned_steps=None))
    assert "<dt>Time left</dt><dd>unknown" in live_page(snapshot_of(view), "server")


def test_untrusted_texts_are_escaped_and_truncated(tmp_path: Path) -> None:
    """Names of runs and hosts, tracebacks, and reasons of a megabyte fit on a page of 250 kB."""
    names = tuple(f"n{number}" for number in range(1, 400))
    breakage = BreakageRecord(
        generation=6,
        lived_s=1.0,
        steps=None,
        failures=(FailureRecord(node=HOSTILE, text=HOSTILE, exit_code=1),),
        lost=(HOSTILE,),
        time_s=NOW,
        verdict=HOSTILE,
        response=HOSTILE,
    )
    formed = replace(world(*names, generation=7), reason=HOSTILE, breakages=(breakage,) * 20)
    view = JobView(
        run_id=HOSTILE,
        root="/",
        at_s=NOW,
        world=formed,
        nodes=tuple(
            replace(node(name), name=HOSTILE, address=HOSTILE, running=formed) for name in names
        ),
        leader=Leader(node_id=HOSTILE, address=HOSTILE, liveness_port=1),
        progress=JobProgress(
            node_id="x",
            generation=7,
            step=10**18,
            step_time_s=1e-9,
            checkpoint_step=10**18,
            time_s=NOW,
            planned_steps=10**18,
        ),
        notes=(HOSTILE,) * 100,
    )
    log = EventLog()
    log.add_records(
        [
            record("node-lost", lost=HOSTILE, reason=HOSTILE, node=HOSTILE, generation=10**18)
            for _ in range(MAX_EVENTS + 10)
        ]
    )
    write_run(tmp_path, names=(HOSTILE[:100_000], "b", "c", "d"), error=HOSTILE[:100_000])
    snapshot = JobSnapshot(
        run_id=HOSTILE,
        at_s=NOW,
        view=view,
        outage=Outage(NOW, HOSTILE),
        events=log.events,
        report=report_of(merge(*read_folder(tmp_path))),
        notes=(HOSTILE,) * 100,
    )
    page = live_page(snapshot, "server")
    found = Reader(page)
    assert (found.open, found.scripts, found.handlers) == ([], 1, [])
    assert "<script>alert" not in page and "\x1b" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in page
    assert len(page.encode()) <= MAX_BYTES, len(page)
    # 399 nodes with truncated texts.
    assert len(json.dumps(status_document(snapshot))) <= 2_500_000


def test_each_node_has_its_step_and_the_age_of_its_heartbeat(job: FakeJob) -> None:
    job.put_node("n5", None, NodeState.STARTING)
    job.progress(53, silent=("n3",))
    page = live_page(snapshot_of(view_of(job)), "server")
    rows = [row for row in page.split("<tr>") if "heartbeat-" in row]
    cells = [
        [Reader(f"<p>{cell.partition('>')[2]}</p>").text for cell in row.split("</td>")[3:5]]
        for row in rows
    ]
    assert [row.partition('"row">')[2][:2] for row in rows] == ["n1", "n2", "n3", "n4", "n5"]
    assert [(step.replace("\n", ""), heartbeat) for step, heartbeat in cells] == [
        *[("53", "11 s ago")] * 2,
        ("53", "31 s ago late"),
        ("53", "11 s ago"),
        ("–", "–"),
    ]
    assert "no heartbeat of n3 for 31.0 s" in Reader(page).text
    assert 'data-at="1769860799.000"' in page, "the page updates the age"


def test_heartbeats_of_many_nodes_are_looked_up_once() -> None:
    """A thousand nodes, each looked up in a list of a thousand, would block the server's thread."""
    names = [f"n{number}" for number in range(1000)]
    heard = tuple(
        RecordedHeartbeat(node_id=f"id-{name}", generation=7, step=1, heard_at_s=NOW)
        for name in names
    )
    progress = JobProgress(
        node_id="id-n1",
        generation=7,
        step=1,
        step_time_s=0.5,
        checkpoint_step=None,
        time_s=NOW,
        heartbeats=heard,
    )
    view = JobView(
        run_id="r", root="/", at_s=NOW + 1, nodes=tuple(map(node, names)), progress=progress
    )
    assert view.heartbeats is view.heartbeats
    assert {view.heartbeat_of(n).age_s for n in view.nodes} == {1.0}


def test_an_outage_of_etcd_is_shown_above_the_last_view(job: FakeJob) -> None:
    text = page_of(view_of(job), outage=Outage(NOW, "permission denied <x>")).text
    assert "etcd does not answer, or denies access, since 2026-01-31T12:00:00.000Z" in text
    assert "permission denied <x>" in text
    assert "training in generation 7" in text
    text = page_of(None, outage=Outage(NOW, "away"), last_known=["last known: step 52"]).text
    assert "last known: step 52" in text and "etcd has not answered yet" in text


def test_the_policy_allows_only_the_pages_own_style_and_script() -> None:
    policy = content_policy()
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy and "*" not in policy
    for never in ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
        assert never in policy


# Events ------------------------------------------------------------------------------------------


def test_the_same_event_of_all_ranks_is_listed_once() -> None:
    log = EventLog()
    assert log.add_records([record("recovered", generation=2, step=5) for _ in range(64)])
    assert not log.add_records([record("recovered", generation=2, step=5)])
    assert log.add_records([record("recovered", generation=3, step=9)])
    assert not log.add_records([record("rank-times", generation=3), record("metrics")])
    assert [event.generation for event in log.events] == [2, 3]
    assert not log.add_records([record("checkpoint-saved", generation=3, step=10)]), "too many"
    assert [(event.number, event.step) for event in log.events] == [(1, 5), (2, 9)]


@pytest.mark.parametrize(
    ("name", "data", "ending"),
    [
        ("world-formed", {"nodes": ["a"], "size": 8, "reason": "x"}, "with 1 nodes, 8 workers: x"),
        ("node-lost", {"lost": "n2", "reason": "gone"}, "n2 was lost: gone"),
        ("worker-died", {"local_rank": 1, "reason": "T:\n  boom"}, "local rank 1 died:   boom"),
        ("recovered", {"step": 7, "duration_s": 1.25}, "training resumed from step 7"),
        ("job-ended", {"outcome": "failure", "reason": "x"}, "failure: x"),
        ("leader-changed", {"leader": "n1"}, "node n1 is the leader"),
        ("leader-changed", {"leader": None}, "there is no leader"),
        ("hang-found", {"reason": "rank 1 is stopped"}, "rank 1 is stopped"),
        ("store-problem", {"error": "away", "consequence": "waits"}, "away"),
        ("world-formed", {"nodes": 7, "size": "x"}, "with ? nodes, None workers: "),
    ],
)
def test_events_are_described_in_words(name: str, data: dict[str, object], ending: str) -> None:
    assert text_of(record(name, **data)).endswith(ending)


def test_without_journals_events_come_from_etcd(job: FakeJob) -> None:
    log = EventLog()
    assert log.add_changes(view_of(job))
    assert not log.add_changes(view_of(job))
    job.kill("n2")
    assert log.add_changes(view_of(job))
    job.finish()
    assert log.add_changes(view_of(job))
    names = [event.name for event in log.events]
    assert names == [
        "world-formed",
        *["node-arrived"] * 4,
        "world-broken",
        "world-formed",
        "job-ended",
    ]


# Journals ----------------------------------------------------------------------------------------


def test_the_report_follows_the_journals_and_is_part_of_the_page(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    feed = JournalFeed(tmp_path, "llama-7", EventLog(), clock=clock)
    assert not feed.look() and not feed.report_if_due()
    write_run(tmp_path, run_id="llama-7")
    assert feed.look() and feed.report_if_due() and not feed.report_if_due()
    found = page_of(None, uses_etcd=False, reads_journals=True, report=feed.report)
    assert found.open == [] and len(found.ids) == len(set(found.ids))
    assert not found.handlers, "the page's policy forbids inline styles"
    for fact in ("from the journals only: The job succeeded", "lost: node-1 was lost", "Timeline"):
        assert fact in found.text
