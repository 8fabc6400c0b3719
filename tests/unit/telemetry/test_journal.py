"""The journal's file: complete lines or detectably truncated ones, of bounded size."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from kit.manual_clock import ManualClock

from elastic.telemetry import events
from elastic.telemetry.events import (
    Event,
    FailureJudged,
    JournalOpened,
    Waiting,
    WorkerDied,
    WorkerStuck,
)
from elastic.telemetry.journal import SCHEMA, Journal, _RotatingFile, _Writer
from elastic.telemetry.log import LOGGER_NAME, LogOrigin, UtcFormatter, get_logger
from elastic.telemetry.reader import read_folder
from elastic.telemetry.runs import default_journal, journal_beside
from elastic.testing.waiting import eventually


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The messages logged as warnings."""
    seen: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger, handler = logging.getLogger(LOGGER_NAME), Warnings(logging.WARNING)
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


def journal_in(folder: Path, **more: Any) -> Journal:
    return Journal(folder=folder, identity={"node": "node-a"}, **more)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_has_identity_time_and_position(tmp_path: Path) -> None:
    clock = ManualClock(7.0)
    journal = journal_in(tmp_path, clock=clock, role="worker", run_id="llama")
    journal.emit(Waiting(reason="early"))
    journal.locate(lambda: {"rank": 3, "generation": 2, "step": 41})
    clock.advance(1.5)
    journal.emit(Waiting(reason="late"))
    opened, early, late = lines_of(tmp_path)
    assert opened["event"] == "journal-opened"
    assert (opened["schema"], opened["role"], opened["run_id"]) == (SCHEMA, "worker", "llama")
    assert opened["pid"] == os.getpid()
    assert [line["seq"] for line in (opened, early, late)] == [0, 1, 2]
    assert "rank" not in early
    assert {name: late[name] for name in ("node", "rank", "generation", "step", "reason")} == {
        "node": "node-a",
        "rank": 3,
        "generation": 2,
        "step": 41,
        "reason": "late",
    }
    assert (late["time"], late["monotonic"]) == (8.5, 8.5)
    assert len({line["writer"] for line in (opened, early, late)}) == 1


def test_event_fields_do_not_shadow_the_identity_of_the_writer(tmp_path: Path) -> None:
    """FailureJudged once had a field ``node``, which replaced the node of the writer."""
    journal_in(tmp_path).emit(
        FailureJudged(
            generation=1,
            failed="node-b",
            action="restart",
            rule="r",
            confidence="high",
            reason="x",
            evidence="y",
        )
    )
    assert lines_of(tmp_path)[-1]["node"] == "node-a"

    @dataclass(frozen=True, kw_only=True)
    class Named(Event):
        node: str
        seq: int

    journal_in(tmp_path).emit(Named(node="node-b", seq=-7))
    line = lines_of(tmp_path)[-1]
    assert (line["node"], line["of_node"], line["of_seq"]) == ("node-a", "node-b", -7)
    assert line["seq"] == 1


def test_a_journal_stays_below_its_limit_and_keeps_its_beginning(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, max_bytes=80_000, run_id="first")
    for number in range(2_000):
        journal.emit(Waiting(reason=f"{number} " + "x" * 100))
    size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    assert 40_000 < size < 90_000
    assert len(list(tmp_path.glob("*.jsonl"))) <= 8
    records, notes = read_folder(tmp_path)
    said = {r.text("reason").split(" ")[0] for r in records if r.name == "waiting"}
    assert {"0", "1999"} <= said
    assert len(said) < 2_000
    assert notes == []


def test_a_short_write_damages_only_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_in(tmp_path)
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
    journal.emit(Waiting(reason="cut"))
    monkeypatch.setattr(os, "write", real_write)
    journal.emit(Waiting(reason="whole"))
    records, notes = read_folder(tmp_path)
    assert [r.text("reason") for r in records if r.name == "waiting"] == ["whole"]
    assert [note for note in notes if "1 line is damaged or truncated" in note and "line 2" in note]


def test_a_full_disk_loses_events_and_logs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    journal = journal_in(tmp_path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            journal.emit(Waiting(reason="lost"))
    journal.emit(Waiting(reason="kept"))
    assert [line["seq"] for line in lines_of(tmp_path)] == [0, 4]
    (warned,) = [said for said in warnings if "No space left" in said]
    assert "events are lost" in warned


def test_a_file_with_a_truncated_last_line_is_continued(tmp_path: Path) -> None:
    """The first process of a container has the same process id after each restart."""
    path = tmp_path / f"node-a-{os.getpid()}.jsonl"
    path.write_bytes(b'{"event": "waiting", "time": 1.0, "mono')
    journal_in(tmp_path).emit(Waiting(reason="after"))
    records, notes = read_folder(tmp_path)
    assert [r.name for r in records] == ["journal-opened", "waiting"]
    assert len(notes) == 1 and "1 line is damaged" in notes[0]


HOSTILE = ["\x1b[2J\x1b]0;x\x07", "a\nb\r\n", "\udcff", "<script>", "x" * 1_000_000, "\u202e\x00"]


@pytest.mark.parametrize("text", HOSTILE, ids=["ansi", "lines", "bytes", "html", "1MB", "bidi"])
def test_any_text_is_written_as_one_line(tmp_path: Path, text: str) -> None:
    journal_in(tmp_path).emit(WorkerStuck(reason=text))
    line = lines_of(tmp_path)[-1]
    assert line["reason"] == text or (
        line["reason"].startswith(text[:100]) and line["reason"].endswith("(1000000 characters)")
    )
    (path,) = tmp_path.glob("*.jsonl")
    assert path.stat().st_size < 100_000
    assert path.read_bytes().isascii()


def test_values_that_json_cannot_represent_are_written(tmp_path: Path) -> None:
    journal = Journal(folder=tmp_path, identity={"node": "a", "odd": {1, 2}})
    journal.locate(lambda: {"step": float("nan")})  # type: ignore[dict-item]
    journal.emit(Waiting(reason="x"))
    records, notes = read_folder(tmp_path)
    assert [r.name for r in records] == ["journal-opened", "waiting"]
    assert notes == []
    assert records[-1].data["step"] == "NaN"


def test_the_length_of_a_line_is_bounded(tmp_path: Path) -> None:
    journal_in(tmp_path).emit(
        events.WorldFormed(
            generation=1,
            nodes=tuple(f"node-{i}" for i in range(50_000)),
            size=1,
            state="active",
            mode="restart",
            cause="first",
            reason="many",
        )
    )
    (path,) = tmp_path.glob("*.jsonl")
    assert path.stat().st_size < 10_000
    assert lines_of(tmp_path)[-1]["event"] == "world-formed"


def test_an_event_is_written_although_its_position_raises(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    journal.locate(lambda: {"step": 1 // 0})
    journal.emit(Waiting(reason="x"))
    assert [line["event"] for line in lines_of(tmp_path)] == ["journal-opened", "waiting"]


def test_threads_write_complete_lines_with_distinct_numbers(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, max_bytes=400_000)

    def write() -> None:
        for _ in range(100):
            journal.emit(Waiting(reason="x"))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records, notes = read_folder(tmp_path)
    assert notes == []
    waiting = [r.seq for r in records if r.name == "waiting"]
    assert len(set(waiting)) == len(waiting) == 800


def test_a_forked_child_does_not_write_to_the_parents_file(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    pid = os.fork()
    if pid == 0:
        journal.emit(Waiting(reason="child"))
        os._exit(0)
    os.waitpid(pid, 0)
    journal.emit(Waiting(reason="parent"))
    assert [line.get("reason") for line in lines_of(tmp_path)] == [None, "parent"]


def test_the_last_line_of_a_closed_journal_is_journal_closed(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    journal.close()
    journal.emit(Waiting(reason="late"))
    journal.close()
    assert [line["event"] for line in lines_of(tmp_path)] == ["journal-opened", "journal-closed"]


def test_the_thread_of_a_closed_journal_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that launched an agent goes on, and finds no thread of it."""
    run = _Writer._run

    def ends_late(self: _Writer) -> None:
        run(self)
        threading.Event().wait(0.2)

    monkeypatch.setattr(_Writer, "_run", ends_late)
    journal = journal_in(tmp_path)
    thread = journal._writer._thread  # type: ignore[union-attr]
    journal.close()
    assert not thread.is_alive()


def test_the_first_line_starts_with_schema_role_and_run_id() -> None:
    assert [f.name for f in fields(JournalOpened)][:3] == ["schema", "role", "run_id"]


def test_listeners_receive_every_event_even_if_one_raises(
    tmp_path: Path, warnings: list[str]
) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("a defect")

    journal = journal_in(tmp_path)
    journal.listen(broken)
    journal.listen(heard.append)
    journal.emit(Waiting(reason="a node"))
    assert heard == [Waiting(reason="a node")]
    assert [line["event"] for line in lines_of(tmp_path)] == ["journal-opened", "waiting"]
    assert warnings == ["journal: a listener failed on waiting: RuntimeError('a defect')"]


def test_a_traceback_is_one_phrase_of_a_log_line_and_complete_in_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    trace = 'Traceback (most recent call last):\n  File "/a/train.py", line 9, in f\nKeyError: 3'
    journal = journal_in(tmp_path)
    with caplog.at_level(logging.INFO, "elastic"):
        journal.emit(WorkerDied(pid=7, local_rank=0, reason=trace))
    assert "reason='KeyError: 3 (train.py:9)'" in caplog.messages[-1]
    assert lines_of(tmp_path)[-1]["reason"] == trace


@pytest.mark.parametrize("is_agent", [True, False])
def test_log_lines_escape_and_shorten_a_hostile_node_name(
    monkeypatch: pytest.MonkeyPatch, is_agent: bool
) -> None:
    name = "evil\x1b[2J\n" + "x" * 1_000_000
    record = logging.LogRecord("elastic", logging.INFO, "", 1, "said", (), None)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("ELASTIC_NODE_NAME", "node-a" if is_agent else name)
    if is_agent:
        record.origin = str(LogOrigin(name, generation=7))
    line = UtcFormatter("%(levelname)s%(where)s %(message)s").format(record)
    assert line.startswith(r"INFO [evil\x1b[2J\nxxx") and line.endswith("] said")
    assert line.isprintable() and len(line) < 200
    assert (" g7]" in line) == is_agent


# The default folder -------------------------------------------------------------------------------


def by_default(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Journal:
    """A journal in the user's state folder, with one event."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    journal = journal_in(default_journal("llama"), run_id="llama")
    journal.emit(Waiting(reason="early"))
    return journal


def test_a_default_journal_continues_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = by_default(monkeypatch, tmp_path)
    (checkpoints := tmp_path / "ckpt").mkdir()
    moved: list[str] = []
    for _ in range(2):
        journal.move(str(checkpoints), moved.append)
    assert moved == [str(journal_beside(checkpoints, "llama"))]
    journal.emit(Waiting(reason="late"))
    journal.close()
    lines = lines_of(journal_beside(checkpoints, "llama"))
    assert [line["seq"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("reason") for line in lines] == [None, "early", "late", None]
    assert list(default_journal("llama").iterdir()) == []


def test_a_journal_stays_where_it_is_if_a_user_chose_the_folder_or_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoints := tmp_path / "ckpt").mkdir()
    chosen = journal_in(tmp_path / "chosen", run_id="llama")
    chosen.move(str(checkpoints), pytest.fail)
    default = by_default(monkeypatch, tmp_path)
    default.move("s3://bucket/ckpt", pytest.fail)

    def full(self: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as broken:
        broken.setattr("elastic.telemetry.journal._RotatingFile.append", full)
        default.move(str(checkpoints), pytest.fail)
    default.emit(Waiting(reason="late"))
    reasons = [line.get("reason") for line in lines_of(default_journal("llama"))]
    assert reasons == [None, "early", "late"]


def test_a_journal_without_a_writable_home_begins_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    journal = journal_in(default_journal("llama"), run_id="llama")
    journal.emit(Waiting(reason="lost"))
    assert journal.folder == "" and warnings == []
    journal.move(str(tmp_path), lambda folder: None)
    journal.emit(Waiting(reason="kept"))
    assert [line["event"] for line in lines_of(Path(journal.folder))] == [
        "journal-opened",
        "waiting",
    ]


def test_a_hung_disk_delays_one_line_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's thread that waited for it would be taken for dead by the other nodes."""
    monkeypatch.setattr("elastic.telemetry.journal.WRITE_PATIENCE_S", 0.05)
    journal = journal_in(tmp_path)
    disk_is_back, append = threading.Event(), _RotatingFile.append

    def hang(self: _RotatingFile, line: bytes) -> None:
        disk_is_back.wait()
        append(self, line)

    monkeypatch.setattr(_RotatingFile, "append", hang)
    for number in range(100):
        journal.emit(Waiting(reason=f"line {number}"))
    assert [line["event"] for line in lines_of(tmp_path)] == ["journal-opened"]
    disk_is_back.set()
    (path,) = tmp_path.glob("*.jsonl")
    eventually(lambda: path.read_bytes().count(b"\n") == 101)
    assert [line["seq"] for line in lines_of(tmp_path)] == list(range(101))
