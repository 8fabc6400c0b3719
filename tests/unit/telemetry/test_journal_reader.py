"""Reading and merging journals: damaged or impossible records become notes, never a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elastic.telemetry.reader import JournalFolder, JournalRecord, MergedJournal, merge, read_folder


def line(event: str, at_s: float, *, seq: int = -1, skew_s: float = 0.0, **more: Any) -> str:
    data = {"event": event, "time": 1e9 + at_s + skew_s, "monotonic": at_s, **more}
    return json.dumps({**data, "seq": seq} if seq >= 0 else data)


def opened(at_s: float, node: str, *, role: str = "agent", **more: Any) -> str:
    more = {"boot_id": node, "run_id": "run", "pid": 1, "schema": 1, "writer": node, **more}
    return line("journal-opened", at_s, node=node, role=role, **more)


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def read(folder: Path) -> MergedJournal:
    return merge(*read_folder(folder))


def test_a_missing_folder_is_an_empty_journal(tmp_path: Path) -> None:
    found = read(tmp_path / "none")
    assert (found.records, found.notes) == ((), ())


DAMAGED = [
    b'{"event": "waiting", "time": 1, "monot',
    b"\x00" * 4096,
    b"\xff\xfe\xfd",
    b"[1, 2]",
    b'{"event": 7, "time": 1, "monotonic": 1}',
    b'{"event": "x", "time": "now", "monotonic": 1}',
    b'{"event": "x", "time": 1e400, "monotonic": 1}',
    b'{"event": "x", "time": NaN, "monotonic": 1}',
    b'{"event": "x"}{"event": "y"}',
    b"[" * 100_000,
    b'{"event": "x", "time": 1, "monotonic": 1, "reason": "' + b"y" * 2_000_000 + b'"}',
]


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_skipped_and_noted(tmp_path: Path, damage: bytes) -> None:
    path = write(tmp_path, "a", opened(0.0, "a"), line("waiting", 1.0, node="a", writer="a"))
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with path.open("a") as stream:
        stream.write(line("waiting", 2.0, node="a", writer="a") + "\n")
    found = read(tmp_path)
    assert [r.name for r in found.records] == ["journal-opened", "waiting", "waiting"]
    assert [n for n in found.notes if n.startswith("a.jsonl: 1 line is damaged")]
    assert "line 3" in found.notes[0]


def test_an_incomplete_line_is_noted_and_read_once_it_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path, "a", opened(0.0, "a"))
    text = line("waiting", 1.0, node="a", writer="a")
    with path.open("a") as stream:
        stream.write(text[:20])
    journals = JournalFolder(tmp_path)
    assert [r.name for r in journals.read_new()] == ["journal-opened"]
    assert "the last line is truncated" in journals.notes()[0]
    assert journals.notes(is_growing=True) == []
    with path.open("a") as stream:
        stream.write(text[20:] + "\n")
    assert [r.name for r in journals.read_new()] == ["waiting"]
    assert journals.notes() == []
    assert journals.read_new() == []


def test_a_rotated_file_is_not_read_twice(tmp_path: Path) -> None:
    path = write(tmp_path, "a", opened(0.0, "a"))
    journals = JournalFolder(tmp_path)
    assert len(journals.read_new()) == 1
    path.rename(tmp_path / "a.1.jsonl")
    write(tmp_path, "a", line("waiting", 1.0, node="a", writer="a"))
    assert [r.name for r in journals.read_new()] == ["waiting"]


def test_non_files_and_unreadable_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "a", opened(0.0, "a"))
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")  # opening it would block forever
    assert [r.name for r in read(tmp_path).records] == ["journal-opened"]


def test_lines_of_an_unknown_schema_are_read_and_noted(tmp_path: Path) -> None:
    write(tmp_path, "a", opened(0.0, "a", schema=99), line("new-thing", 1.0, node="a", writer="a"))
    found = read(tmp_path)
    assert [r.name for r in found.records] == ["journal-opened", "new-thing"]
    assert [n for n in found.notes if "schema 99" in n]


def test_journals_without_sequence_numbers_are_read(tmp_path: Path) -> None:
    write(tmp_path, "a-1", line("waiting", 1.0, node="a"), line("node-lost", 2.0, node="a"))
    write(tmp_path, "b-2", line("waiting", 1.5, node="b"))
    found = read(tmp_path)
    assert [(r.node, r.name) for r in found.records] == [
        ("a", "waiting"),
        ("b", "waiting"),
        ("a", "node-lost"),
    ]


def test_missing_sequence_numbers_are_noted_with_the_process(tmp_path: Path) -> None:
    numbers = (0, 1, 5)
    lines = [line("waiting", float(n), node="a", writer="a", seq=n) for n in numbers]
    write(tmp_path, "a", *lines)
    assert "a (agent): 3 events are missing" in read(tmp_path).notes[0]


def worlds(node: str, skew_s: float, *, monotonic_from_s: float = 0.0) -> list[str]:
    """A rank of three worlds, on a machine whose wall clock is wrong."""
    of_node = {"node": node, "writer": f"{node}-w"}

    def entry(event: str, at_s: float, **more: Any) -> str:
        data = {
            "event": event,
            "time": 1e9 + at_s + skew_s,
            "monotonic": at_s + monotonic_from_s,
            **of_node,
            **more,
        }
        return json.dumps(data)

    return [
        entry("journal-opened", 0.0, role="worker", boot_id=node, run_id="run", schema=1, rank=0),
        entry("world-joined", 1.0, generation=1),
        entry("recovered" if node == "a" else "world-fault", 4.0, generation=1),
        entry("world-joined", 5.0, generation=2),
        entry("world-joined", 9.0, generation=3),
    ]


def test_a_clock_skew_of_a_minute_is_corrected_and_noted(tmp_path: Path) -> None:
    write(tmp_path, "a", *worlds("a", 0.0), line("waiting", 10.0, node="a", writer="a-w"))
    write(tmp_path, "b", *worlds("b", 60.0, monotonic_from_s=5_000.0))
    found = read(tmp_path)
    assert [n for n in found.notes if "the clock of b is 60.0 s ahead" in n]
    joined = [r for r in found.records if r.name == "world-joined"]
    assert [r.whole("generation") for r in joined] == [1, 1, 2, 2, 3, 3]
    assert max(r.at_s for r in found.records) == pytest.approx(1e9 + 10.0)


def test_a_small_clock_skew_is_not_corrected(tmp_path: Path) -> None:
    write(tmp_path, "a", *worlds("a", 0.0))
    write(tmp_path, "b", *worlds("b", 0.4))
    assert not [n for n in read(tmp_path).notes if "clock" in n]


def test_setting_the_wall_clock_does_not_change_the_order(tmp_path: Path) -> None:
    lines = [opened(0.0, "a"), *(line("waiting", t, node="a", writer="a") for t in (1.0, 2.0))]
    lines.append(line("node-lost", 3.0, node="a", writer="a", skew_s=-3600.0))
    write(tmp_path, "a", *lines)
    found = read(tmp_path)
    assert [r.name for r in found.records][-1] == "node-lost"
    assert [n for n in found.notes if "wall clock of a was set by 3600.0 s" in n]


def test_a_node_that_never_returned_is_noted(tmp_path: Path) -> None:
    lost = line("node-lost", 31.0, node="a", writer="a", lost="b", reason="its process is dead")
    ended = line("job-ended", 100.0, node="a", writer="a")
    write(tmp_path, "a", opened(0.0, "a"), lost, ended)
    write(tmp_path, "b", opened(0.0, "b", boot_id="a"), line("waiting", 30.0, node="b", writer="b"))
    write(tmp_path, "c", opened(0.0, "c", boot_id="a"))
    notes = read(tmp_path).notes
    assert [n for n in notes if n.startswith("b wrote nothing in the last 70.0 s of the run")]
    assert [n for n in notes if "its process is dead" in n]
    assert [n for n in notes if n.startswith("c wrote nothing in the last 100.0 s")]
    assert not [n for n in notes if n.startswith("a ")]


def test_a_killed_node_ends_with_the_last_event_of_its_processes(tmp_path: Path) -> None:
    """A healthy agent writes little, so that the workers' events show how long the node lived."""
    lost = line("node-lost", 91.0, node="a", writer="a", lost="b", reason="its process is dead")
    write(tmp_path, "a", opened(0.0, "a"), lost, line("job-ended", 100.0, node="a", writer="a"))
    write(tmp_path, "b", opened(0.0, "b", boot_id="a"), line("waiting", 50.0, node="b", writer="b"))
    worker = [line("rank-times", t, node="b", writer="b-w", rank=1, step=9) for t in (60.0, 90.0)]
    write(tmp_path, "b-w", opened(1.0, "b", boot_id="a", role="worker", writer="b-w"), *worker)
    notes = read(tmp_path).notes
    assert [n for n in notes if n.startswith("b wrote nothing in the last 10.0 s of the run")]
    assert [n for n in notes if "its process is dead" in n]


WINDOW = {
    "event": "rank-times",
    "seq": 3,
    "time": 1e9,
    "monotonic": 10.0,
    "writer": "w",
    "node": "n1",
    "rank": 2,
    "generation": 4,
    "step": 120,
    "steps": 50,
    "duration_s": 5.0,
    "productive_s": 4.5,
    "data_s": 0.25,
    "checkpoint_s": 0.125,
    "evaluation_s": 0.0,
    "open_s": 0.0,
    "collective_s": 1.5,
    "ended": "due",
}
ODD_WINDOWS: list[dict[str, Any]] = [
    {},
    {"data_s": 1},
    {"new_field": [1, {"a": None}]},
    {"steps": "x", "open_s": None},
    {"data_s": True, "step": 7.5, "ended": 3},
    {"generation": None, "node": ["a"], "seq": "x"},
    {"rank": None, "node_id": "id"},
    {"time": -1, "writer": "\u00fc"},
]


def read_line(folder: Path, text: str) -> JournalRecord:
    folder.mkdir()
    write(folder, "a", text)
    (record,), notes = read_folder(folder)
    assert notes == []
    return record


@pytest.mark.parametrize("odd", ODD_WINDOWS, ids=range(len(ODD_WINDOWS)))
@pytest.mark.parametrize("missing", [None, "collective_s", "node", "seq", "step"])
def test_windows_are_decoded_equally_on_the_fast_and_slow_paths(
    tmp_path: Path, odd: dict[str, Any], missing: str | None
) -> None:
    """Lines in the order in which the journal writes fields are decoded as a struct."""
    data = {name: value for name, value in {**WINDOW, **odd}.items() if name != missing}
    usual = read_line(tmp_path / "usual", json.dumps(data))
    reversed_ = read_line(tmp_path / "reversed", json.dumps(dict(reversed(data.items()))))
    assert usual.data == reversed_.data == data
    assert usual.node == reversed_.node == str(data.get("node", "?"))
    for name in ("name", "writer", "seq", "time_s", "monotonic_s", "window"):
        assert getattr(usual, name) == getattr(reversed_, name), name
    for name in ("seq", "rank", "generation", "step", "steps"):
        assert usual.whole(name) == reversed_.whole(name)
    for name in data:
        assert usual.number(name) == reversed_.number(name)
        assert usual.text(name) == reversed_.text(name)
