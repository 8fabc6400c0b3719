"""Commands find a run of this machine by its id, or without one, and its journals with it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
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
    demo: Path,
    name: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "elastic.store.client", None)  # gRPC takes as long as all else
    monkeypatch.chdir(demo.parent)
    Path("demo").mkdir(exist_ok=True)  # such as its checkpoints
    assert main(["status", *name]) == 0
    assert "demo: last known: the job has ended" in capsys.readouterr().out
    assert main(["events", *name, "--event=world-formed"]) == 0
    by_name = capsys.readouterr().out
    assert main(["events", str(demo), "--event=world-formed"]) == 0
    assert capsys.readouterr().out == by_name != ""
    assert main(["report", *name]) == 0
    assert capsys.readouterr().out.startswith("# Run demo")


@pytest.mark.parametrize(
    "command", [["describe", "incident"], ["resume"], ["stop"], ["wait", "--for=done"], ["profile"]]
)
def test_commands_that_need_the_etcd_of_an_ended_job_name_its_journals_at_once(
    demo: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "elastic.store.client", None)  # gRPC, and ten seconds
    assert main([*command, "demo"]) == 69
    error = capsys.readouterr().err
    assert f"demo has ended here, and its etcd does not answer: {GONE} refuses" in error
    assert "from its journals: elastic status demo, elastic events demo" in error
    assert "to continue it, start it again as before" in error


def test_frequent_events_are_counted_unless_they_are_asked_for(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_rank_times(*arguments: str) -> int:
        assert main(["events", "demo", *arguments]) == 0
        return capsys.readouterr().out.count("rank-times")

    assert main(["events", "demo"]) == 0
    shown = capsys.readouterr()
    assert "rank-times" not in shown.out
    count = of_rank_times("--event=rank-times")
    assert f"{count} events rank-times are not shown" in shown.err
    assert of_rank_times("-o", "json") == count > 0


def test_a_misspelled_run_shows_those_that_exist(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "events", "report"):
        assert main([command, "dmo"]) == 2
        error = capsys.readouterr().err
        assert "no job dmo is known on this machine, did you mean 'demo'?" in error
        assert "it has demo (`elastic list`)" in error


def test_without_a_name_the_running_job_is_meant_or_else_the_last(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = RunEntry(
        LocalRun(run_id="before", journal=str(tmp_path), endpoint=GONE, prefix="/p", since_s=0.5)
    )
    ended.close()
    for command in ("status", "events", "report"):
        assert main([command]) == 0
        first = capsys.readouterr().err.splitlines()[0]
        assert first.startswith("elastic: job demo: ended here, started ")
    running = register("demo", demo)
    assert main(["report", "-o", "json"]) == 0
    assert capsys.readouterr().err.startswith("elastic: job demo: running, started ")
    assert main(["report", "demo", "-o", "json"]) == 0
    assert capsys.readouterr().err == ""
    running.close()


def test_without_a_name_a_job_of_the_present_folder_is_meant(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    run = LocalRun(run_id="mine", journal=str(demo), endpoint=GONE, prefix="/p", since_s=0.5)
    RunEntry(replace(run, script="train.py", folder=str(here))).close()
    other = register("other", demo)
    assert main(["events"]) in (0, 2)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"elastic: job mine: train.py in {here}, ended here")
    other.close()


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


def test_wait_waits_for_the_job_with_a_name(demo: Path, tmp_path: Path) -> None:
    started: list[RunEntry] = []

    class Waiting(ManualClock):
        def sleep(self, seconds: float) -> None:
            started.append(register("mine" if started else "other", tmp_path))

    assert wait_for_a_job(30, Waiting(), "mine") == 0
    assert len(started) == 2
    for run in started:
        run.close()


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
    lines = capsys.readouterr().out.splitlines()
    head, *rows = [re.split(" {3,}", line) for line in lines]
    assert head[0] == "RUN ID"
    assert sorted((row[0].strip(), row[1].strip()) for row in rows) == [
        ("demo", "succeeded"),
        ("other", "running"),
    ]
    assert head == ["RUN ID", "STATE", "NODES", "STEP", "SCRIPT", "STARTED", "FOLDER"]
    assert main(["list", "-o", "json"]) == 0
    (ended,) = (
        job for job in json.loads(capsys.readouterr().out)["local"] if job["run_id"] == "demo"
    )
    assert (ended["outcome"], ended["exit_code"]) == ("success", 0)
    assert ended["nodes"] and ended["step"]
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
