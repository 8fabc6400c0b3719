"""Commands find a run of this machine by its id, or without one, and its journals with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.made_up_run import write_run
from kit.manual_clock import ManualClock

from elastic.cli.main import main
from elastic.cli.wait import wait_for_a_job
from elastic.telemetry.runs import LocalRun, RunEntry, local_runs

# Nothing listens there: the embedded etcd of a run that has ended.
GONE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("ELASTIC_JOURNAL", "PET_RDZV_ID", "PET_RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def register(run_id: str, journal: Path) -> RunEntry:
    return RunEntry(
        LocalRun(run_id=run_id, journal=str(journal), endpoint=GONE, prefix="/p", since_s=1.0)
    )


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The journals of an ended run, which this machine knows as ``demo``."""
    folder = tmp_path / "journal"
    write_run(folder)
    register("demo", folder).close()
    return folder


@pytest.mark.parametrize("name", [["demo"], ["--rdzv-id=demo"], []], ids=["RUN", "flag", "only"])
def test_after_the_job_and_its_etcd_commands_read_the_journals(
    demo: Path, name: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *name]) == 0
    assert "demo: last known: the job has ended" in capsys.readouterr().out
    assert main(["events", *name, "--event=world-formed"]) == 0
    by_name = capsys.readouterr().out
    assert main(["events", str(demo), "--event=world-formed"]) == 0
    assert capsys.readouterr().out == by_name != ""
    assert main(["report", *name]) == 0
    assert capsys.readouterr().out.startswith("# Run demo")


def test_a_misspelled_run_shows_those_that_exist(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "events", "report"):
        assert main([command, "dmo"]) == 2
        error = capsys.readouterr().err
        assert "no job dmo is known on this machine, did you mean 'demo'?" in error
        assert "it has demo" in error


def test_without_a_name_the_running_job_is_meant_or_else_the_last(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = RunEntry(
        LocalRun(run_id="before", journal=str(tmp_path), endpoint=GONE, prefix="/p", since_s=0.5)
    )
    ended.close()
    for command in ("status", "events", "report"):
        assert main([command]) == 0
        assert "demo, the last of 2 jobs here (elastic list)" in capsys.readouterr().err
    running = register("demo", demo)
    assert main(["report", "-o", "json"]) == 0
    assert capsys.readouterr().err == ""
    running.close()


def test_a_command_that_changes_a_job_takes_no_ended_one_for_it(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register("other", tmp_path).close()
    assert main(["stop"]) == 2
    assert "no job runs on this machine; it has run " in capsys.readouterr().err


def test_wait_waits_for_a_job_that_is_about_to_start(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register("other", tmp_path).close()
    started: list[RunEntry] = []

    class Waiting(ManualClock):
        def sleep(self, seconds: float) -> None:
            started.append(register("next", tmp_path))

    assert wait_for_a_job(30, Waiting()) == 0
    assert [run.run_id for run in local_runs() if run.is_running] == ["next"]
    started[0].close()


def test_several_running_jobs_are_told_apart_by_their_names(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = [register("demo", demo), register("other", tmp_path)]
    for command in ("status", "events", "report"):
        assert main([command]) == 2
        assert "2 jobs run on this machine: " in capsys.readouterr().err
    for run in running:
        run.close()


def test_without_an_endpoint_the_jobs_of_this_machine_are_listed(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = register("other", demo)
    assert main(["list"]) == 0
    head, *rows = [line.split("   ") for line in capsys.readouterr().out.splitlines()]
    assert head[0] == "RUN ID"
    assert sorted((row[0].strip(), row[1].strip()) for row in rows) == [
        ("demo", "ended here"),
        ("other", "running"),
    ]
    running.close()


def test_a_report_names_nodes_whose_journals_are_elsewhere(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report"]) == 0
    assert "incomplete" not in capsys.readouterr().out
    for path in demo.glob("node1-*"):
        path.unlink()
    assert main(["report"]) == 0
    assert "incomplete: node node-1 missing" in capsys.readouterr().out
