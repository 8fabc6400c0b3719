"""``elastic report``: a breakdown of a run's time as Markdown and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.manual_clock import ManualClock

from elastic.cli.main import main
from elastic.telemetry.events import RankTimes, RunClosed, WorldJoined
from elastic.telemetry.journal import Journal

HOSTILE = "<b>|node\x1b[2J\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One worker: 10 s of start-up, a step of 5 s, ten of 1 s with 2 s for data, 3 s to end."""
    clock = ManualClock(1769860800.0)
    journal = Journal(
        folder=tmp_path, identity={"node": HOSTILE}, clock=clock, role="worker", run_id="*run*"
    )

    def window(took_s: float, **more: Any) -> None:
        clock.advance(took_s)
        parts = {"data_s": 0.0, "checkpoint_s": 0.0, "evaluation_s": 0.0, "open_s": 0.0}
        given = {**parts, "collective_s": 0.0, "duration_s": took_s, "generation": 1, **more}
        journal.emit(RankTimes(**given))

    clock.advance(10.0)
    joined = WorldJoined(generation=1, rank=0, size=1, step=0, source=None, duration_s=0.0)
    journal.emit(joined)
    window(5.0, step=1, steps=1, productive_s=5.0, ended="first-step")
    window(12.0, step=11, steps=10, productive_s=10.0, data_s=2.0, ended="close")
    clock.advance(3.0)
    journal.emit(RunClosed(clean=True, error=""))
    return tmp_path


def test_json_contains_every_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 2
    assert found["run_id"] == "*run*"
    assert found["duration_s"] == 30.0
    assert found["seconds"] == {
        "productive": 11.0,
        "start-up": 10.0,
        "data wait": 2.0,
        "first step": 4.0,
        "shutdown": 3.0,
    }
    assert found["goodput"] == pytest.approx(11 / 30, abs=1e-6)
    assert (found["steps"], found["recomputed_steps"]) == (11, 0)
    assert [node["node"] for node in found["nodes"]] == [HOSTILE]


def test_markdown_escapes_text_from_journals(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    markdown = capsys.readouterr().out
    assert "# Run \\*run\\*" in markdown
    assert "30.0 s: 36.7% of the time made progress. 11 steps" in markdown
    assert "| start-up | 10.0 s | 33.3% |" in markdown
    assert "| first step | 4.0 s | 13.3% |" in markdown
    assert all(line.isprintable() for line in markdown.splitlines())
    (node,) = (line for line in markdown.splitlines() if "node" in line and "\\<b\\>" in line)
    assert node.replace("\\|", "").count("|") == 5, "one row of four cells"


def test_output_is_a_format_and_goes_to_stdout(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    assert main(["report", str(folder), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 11
    assert set(tmp_path.rglob("*")) == before


def test_a_missing_run_is_a_usage_error(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder), "--rdzv-id=other"]) == 2
    assert "there are no events of run other" in capsys.readouterr().err
    assert main(["report", str(tmp_path_factory.mktemp("empty"))]) == 2
    assert "there are no events in" in capsys.readouterr().err
