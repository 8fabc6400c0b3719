"""The demo writes a report, with or without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit.made_up_run import write_run

from elastic.cli.demo import keep_report


def test_the_report_is_kept_when_the_journals_are_removed(tmp_path: Path) -> None:
    journals = tmp_path / "demo" / "journal"
    write_run(journals)
    path = keep_report(journals, tmp_path / "demo-report")
    assert path == tmp_path / "demo-report.html"
    assert "The job succeeded after 2 min 1 s." in path.read_text()


def test_without_matplotlib_it_is_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "journal")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = keep_report(tmp_path / "journal", tmp_path / "demo-report")
    assert path == tmp_path / "demo-report.md"
    assert path.read_text().startswith("# Run demo\n")


def test_report_errors_are_not_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keep_report(tmp_path, tmp_path / "demo-report") is None, "there are no journals"
    write_run(tmp_path / "journal")
    assert keep_report(tmp_path / "journal", tmp_path / "missing" / "demo-report") is None
    assert "the demo has no report: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
