"""The files of a hang report."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.hangs.report import HangReport, ReportFolder
from elastic.hangs.verdict import Confidence, HangAction, HangKind, Judgment

REPORT = HangReport(
    verdict=Judgment(
        action=HangAction.KILL,
        kind=HangKind.STOPPED,
        confidence=Confidence.HIGH,
        culprits=(0,),
        culprit=None,
        reason="rank 0 is stopped",
    ),
    generation=3,
    size=2,
    time="2026-01-01T00:00:00+00:00",
    ranks=(),
    stacks=(),
    flights={},
    data_workers={},
    native_stacks=(),
    processes={},
    node={},
    done="nothing yet",
)


def test_a_report_is_complete_for_readers_while_it_is_rewritten(tmp_path: Path) -> None:
    folder = ReportFolder(str(tmp_path))
    path = folder.path("n1", 0)
    assert folder.write(path, REPORT) == ""
    first = path.read_text()
    with path.open() as reader:
        assert folder.write(path, replace(REPORT, done="pid 1 was ended")) == ""
        assert reader.read() == first
    assert "pid 1 was ended" in path.read_text()
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"hang-n1-rank0.txt", "hang-n1-rank0-generation3.json"}


def test_the_reports_of_a_rank_that_hangs_again_and_again_are_bounded(tmp_path: Path) -> None:
    folder = ReportFolder(str(tmp_path))
    path = folder.path("n1", 0)
    (tmp_path / "hang-n2-rank0-generation1.json").write_text("of another node")
    for generation in range(80):
        assert folder.write(path, replace(REPORT, generation=generation)) == ""
        written = path.with_name(f"{path.stem}-generation{generation}.json")
        os.utime(written, (generation, generation))
    names = {file.name for file in tmp_path.glob("hang-n1-*.json")}
    assert "hang-n1-rank0-generation79.json" in names
    assert len(names) == 50
    assert (tmp_path / "hang-n2-rank0-generation1.json").exists()


def test_agents_without_a_folder_for_reports_do_not_fill_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of an agent that fails writes its timeline into a new folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = tmp_path / "elastic-reports-link", tmp_path / "mine"
    others[1].mkdir()
    others[0].symlink_to(others[1])
    pages = [ReportFolder(None).write_page("failure-timeline", f"{i}")[0] for i in range(60)]
    assert Path(pages[-1]).read_text() == "59\n"
    assert len(list(tmp_path.glob("elastic-reports-*/*.txt"))) == 50
    assert all(path.exists() for path in others)
