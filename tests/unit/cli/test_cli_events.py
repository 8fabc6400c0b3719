"""``elastic events``: all journals merged, including damaged ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dashboard_kit import KEYS, FakeJob
from kit.manual_clock import ManualClock

from elastic.cli import events
from elastic.cli.last_known import EtcdChanges
from elastic.cli.main import main
from elastic.cli.view import JobView, read_job
from elastic.errors import StoreUnreachable
from elastic.telemetry.events import NodeLost, Waiting, WorldFault, WorldFormed
from elastic.telemetry.journal import Journal
from elastic.telemetry.reader import JournalRecord
from elastic.testing.waiting import PATIENCE_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two nodes, one event each in turn, seconds apart."""
    for number, node in enumerate(("node-a", "node-b")):
        clock = ManualClock(1769860800.0 + number)
        journal = Journal(folder=tmp_path, identity={"node": node}, clock=clock, role="agent")
        journal.locate(lambda: {"generation": 7, "step": 120})
        for turn in range(2):
            clock.advance(10.0)
            journal.emit(Waiting(reason=f"{node} turn {turn}"))
        journal.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[list[str], str]:
    assert main(["events", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def test_events_of_all_nodes_are_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, err = run(capsys, folder, "--event=waiting")
    assert lines == [
        '2026-01-31T12:00:10.000Z node-a g7 s120 waiting reason="node-a turn 0"',
        '2026-01-31T12:00:11.000Z node-b g7 s120 waiting reason="node-b turn 0"',
        '2026-01-31T12:00:20.000Z node-a g7 s120 waiting reason="node-a turn 1"',
        '2026-01-31T12:00:21.000Z node-b g7 s120 waiting reason="node-b turn 1"',
    ]
    assert err == ""


def test_json_is_one_object_per_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may come from the environment."""
    monkeypatch.setenv("ELASTIC_JOURNAL", str(folder))
    lines, _ = run(capsys, "-o", "json", "--node", "node-b")
    records = [json.loads(line) for line in lines]
    assert [r["event"] for r in records] == ["journal-opened", *["waiting"] * 2, "journal-closed"]
    assert records[1]["at"] == pytest.approx(1769860811.0)
    assert records[1]["generation"] == 7


def test_since_takes_a_time_and_an_age(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = run(capsys, folder, "--since=2026-01-31T12:00:20Z", "--event=waiting")
    assert len(lines) == 2
    assert run(capsys, folder, "--since=5m")[0] == []  # it is later than 2026-01-31


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "neither RUN nor ELASTIC_JOURNAL is given, and no job has run on this machine"),
        (("/nowhere",), "there is no folder /nowhere"),
        ((".", "--since=yesterday"), "neither an age nor a time"),
        ((".", "--event=world-formd"), "there is no such event, did you mean 'world-formed'?"),
    ],
)
def test_usage_errors_are_explained(
    argv: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ELASTIC_JOURNAL", raising=False)
    assert main(["events", *argv]) == 2
    assert message in capsys.readouterr().err


def test_hostile_texts_are_escaped_and_shortened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(folder=tmp_path, identity={"node": "\x1b[31mred\n" + "n" * 500})
    journal.emit(NodeLost(lost="\x1b]0;title\x07\u202e", reason="x" * 1_000_000))
    lines, err = run(capsys, tmp_path)
    assert len(lines) == 2, "a line break in a name starts no new line"
    assert all(line.isprintable() and len(line) < 2000 for line in lines)
    assert r"\x1b[31mred\n" in lines[1]
    assert r"\x1b]0;title\x07\u202e" in lines[1]
    assert "(1000000 characters)" in lines[1] or "characters)" in lines[1]
    assert all(c.isprintable() or c == "\n" for c in err)


def test_a_node_without_events_shows_those_that_have_some(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(folder), "--node=node-c"]) == 2
    assert "there are no events of node node-c" in (error := capsys.readouterr().err)
    assert "the nodes are node-a, node-b" in error


PAIR = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] "
ADVICE = (
    " This is typically caused by a remote worker crashing. Check the logs of the remote worker"
)


def test_ranks_that_only_noticed_a_lost_peer_share_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock(1769860800.0)
    errors = [f"{PAIR}Connection closed by peer [127.0.0.1]:{port}.{ADVICE}" for port in (1, 2, 3)]
    for rank, error in enumerate([*errors, "ValueError: boom"]):
        identity = {"node": "a", "rank": rank}
        journal = Journal(folder=tmp_path / str(rank), identity=identity, clock=clock)
        where = '  File "/home/a/train.py", line 9, in f'
        trace = f"Traceback (most recent call last):\n{where}\n{error}\n"
        journal.emit(WorldFault(generation=7, step=3, error=error, traceback=trace))
        journal.close()
        clock.advance(1.0)
        for file in (tmp_path / str(rank)).iterdir():
            file.rename(tmp_path / f"{rank}.jsonl")
    lines, _ = run(capsys, tmp_path, "--event=world-fault")
    assert lines == [
        '2026-01-31T12:00:00.000Z a r0 g7 s3 world-fault error="RuntimeError: Connection closed by '
        'peer [127.0.0.1]:1" at=train.py:9 ranks=3',
        '2026-01-31T12:00:03.000Z a r3 g7 s3 world-fault error="ValueError: boom" at=train.py:9',
    ]
    lines, _ = run(capsys, tmp_path, "--event=world-fault", "--output=json")
    assert [json.loads(text)["error"] for text in lines] == [*errors, "ValueError: boom"]


def test_long_lines_are_wrapped_on_a_terminal_only(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_pipe, _ = run(capsys, folder, "--event=waiting")
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    on_a_terminal, _ = run(capsys, folder, "--event=waiting")
    assert on_a_terminal[:2] == [
        "2026-01-31T12:00:10.000Z node-a g7 s120 waiting",
        '    reason="node-a turn 0"',
    ]
    assert " ".join(" ".join(on_a_terminal).split()) == " ".join(in_a_pipe)


def test_damage_is_reported_on_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with next(folder.glob("*.jsonl")).open("a") as stream:
        stream.write('{"event": "cut\x1b[2J\n{"event": "')
    lines, err = run(capsys, folder, "--event=waiting")
    assert len(lines) == 4
    assert "1 line is damaged" in err
    assert "the last line is truncated" in err


def test_an_empty_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, err = run(capsys, tmp_path)
    assert lines == []
    assert f"there are no events in {tmp_path}" in err


def test_a_run_is_selected_by_its_id(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs may share a folder. A misspelled run must not look like another one."""
    for number, run_id in enumerate(("llama-6", "llama-7")):
        clock = ManualClock(1769860900.0 + number)
        identity = {"node": run_id}
        journal = Journal(folder=folder, identity=identity, clock=clock, run_id=run_id)
        journal.emit(Waiting(reason=run_id))
        journal.close()
    waiting = (folder, "--event=waiting")
    assert len(run(capsys, *waiting)[0]) == 6
    selected = run(capsys, *waiting, "--rdzv-id=llama-7")[0]
    assert [line.split("reason=")[1] for line in selected[4:]] == ["llama-7"]
    for path in folder.glob("node-*"):
        path.unlink()
    assert main(["events", str(folder), "--rdzv-id=lama-7"]) == 2
    error = capsys.readouterr().err
    assert "there are no events of run lama-7 in" in error
    assert "it has those of llama-6, llama-7" in error


def elastic(*argv: object, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "elastic.cli.main", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def test_follow_prints_new_events_and_ends_when_its_pipe_is_closed(folder: Path) -> None:
    with elastic("events", folder, "--follow", "--event=waiting") as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(4)][-1].endswith('turn 1"\n')
        journal = Journal(folder=folder, identity={"node": "node-c"})
        journal.emit(Waiting(reason="later"))
        assert following.stdout.readline().endswith("node-c waiting reason=later\n")
        following.stdout.close()  # as `| head` does
        deadline_s = time.monotonic() + PATIENCE_S
        while following.poll() is None and time.monotonic() < deadline_s:
            journal.emit(Waiting(reason="nobody reads this"))
            time.sleep(0.05)
        assert following.poll() == 0
        assert following.stderr is not None and following.stderr.read() == ""


# Read from etcd ---------------------------------------------------------------------------------

JOB = ("--rdzv-endpoint=localhost:2379", "--rdzv-id=llama-7")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    """Four nodes train in generation 7; ``elastic events`` connects to its etcd."""
    fake_job = FakeJob(ManualClock(1769860900.0))
    fake_job.train()
    monkeypatch.setattr(events, "job_store", lambda args: fake_job.opened())
    monkeypatch.delenv("ELASTIC_JOURNAL", raising=False)
    return fake_job


def test_without_journals_events_are_read_from_etcd(
    job: FakeJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.kill("n2")
    job.finish()
    lines, err = run(capsys, *JOB)
    names = [json.loads(line)["event"] for line in run(capsys, *JOB, "-o", "json")[0]]
    assert names == [*["node-arrived"] * 3, "world-broken", "world-formed", "job-ended"]
    assert lines[3] == (
        "2026-01-31T12:01:40.000Z etcd g7 world-broken "
        'text="generation 7 ended: n2 was lost: killed by signal 9"'
    )
    assert err == ""
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "localhost:2379")
    monkeypatch.setenv("PET_RDZV_ID", "llama-7")
    assert run(capsys) == (lines, ""), "as in a pod of the job"
    monkeypatch.delenv("PET_RDZV_ID")
    assert main(["events"]) == 2


def test_etcd_supplements_the_events_of_journals(
    job: FakeJob, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock(1769860900.0)
    journal = Journal(folder=folder, identity={"node": "node-c"}, clock=clock, role="agent")
    formed = WorldFormed(
        generation=7,
        nodes=("n1",),
        size=1,
        state="active",
        mode="in-process",
        cause="first",
        reason="all arrived",
    )
    journal.emit(formed)
    lines, _ = run(capsys, folder, *JOB)
    assert sum(" world-formed " in line for line in lines) == 1
    assert sum(line.split()[1] == "etcd" for line in lines) == len(("n1", "n2", "n3", "n4"))
    (found,) = run(capsys, folder, *JOB, "--event=node-arrived", "-o", "json")[0][:1]
    assert (json.loads(found)["node"], json.loads(found)["at"]) == ("etcd", 1769860840.0)
    job.is_away = True
    lines, err = run(capsys, folder, *JOB, "--event=waiting")
    assert len(lines) == 4
    assert "elastic: note: etcd at 127.0.0.1:2379 does not answer" in err
    assert main(["events", *JOB]) == 69


def test_a_journal_in_a_pod_is_read_without_etcd(
    job: FakeJob,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "localhost:2379")
    monkeypatch.setenv("PET_RDZV_ID", "llama-7")
    assert not [line for line in run(capsys, folder)[0] if line.split()[1] == "etcd"]


def test_following_etcd_reports_each_change_once_and_prefers_journals(job: FakeJob) -> None:
    is_away = False

    def read() -> JobView:
        if is_away:
            raise StoreUnreachable("etcd does not answer")
        return read_job(job.store, KEYS, job.clock.wall())

    def names(*, at_once: bool = False) -> list[str]:
        return [record.name for record in changes.take(at_once=at_once)]

    changes = EtcdChanges(read)
    assert names(at_once=True) == ["world-formed", *["node-arrived"] * 4]
    assert names(at_once=True) == []
    job.kill("n2")
    assert names() == [], "the leader may still write it to its journal"
    world_formed = JournalRecord("world-formed", "w", 0, 0.0, 0.0, {"generation": 8})
    changes.exclude([world_formed])
    assert names() == ["world-broken"]
    is_away = True
    assert names() == [] and changes.problem == "etcd does not answer"
    is_away = False
    job.finish()
    assert names() == [] and changes.problem == ""
    assert names() == ["job-ended"]
