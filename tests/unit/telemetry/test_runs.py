"""The runs of this user on this machine: found by their ids, and bounded."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.telemetry import runs
from elastic.telemetry.files import replacing
from elastic.telemetry.runs import (
    LocalRun,
    RunEntry,
    default_journal,
    forget,
    local_runs,
    remove_oldest_files,
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def a_run(run_id: str, since_s: float = 1.0) -> LocalRun:
    return LocalRun(
        run_id=run_id,
        journal=f"/journals/{run_id}",
        endpoint="127.0.0.1:2379",
        prefix="/elastic",
        since_s=since_s,
    )


def test_runs_are_listed_newest_first_and_run_until_their_agents_end(
    environ: dict[str, str],
) -> None:
    entries = [RunEntry(a_run(name, since), environ) for name, since in (("a", 1.0), ("b/c", 2.0))]
    assert [(run.run_id, run.is_running) for run in local_runs(environ)] == [
        ("b/c", True),
        ("a", True),
    ]
    entries[1].move(Path("/ckpt/journal/b"))
    entries[1].close()
    newest = local_runs(environ)[0]
    assert (newest.journal, newest.is_running) == ("/ckpt/journal/b", False)


def test_a_run_whose_agent_was_killed_no_longer_runs(environ: dict[str, str]) -> None:
    program = (
        "import signal\nfrom elastic.telemetry.runs import *\n"
        "RunEntry(LocalRun(run_id='x', journal='', endpoint='e:1', prefix='/p', since_s=1.0))\n"
        "print('registered', flush=True)\nsignal.pause()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **environ}, stdout=subprocess.PIPE
    )
    with agent:
        assert agent.stdout is not None and agent.stdout.readline() == b"registered\n"
        assert [run.is_running for run in local_runs(environ)] == [True]
        agent.send_signal(signal.SIGKILL)
    assert [run.is_running for run in local_runs(environ)] == [False]


def test_an_unwritable_home_and_a_damaged_entry_are_no_errors(
    environ: dict[str, str], tmp_path: Path
) -> None:
    for nowhere in ({"XDG_STATE_HOME": "/proc/nowhere"}, {}):
        entry = RunEntry(a_run("a"), nowhere)
        entry.move(tmp_path)
        entry.close()
        assert local_runs(nowhere) == []
    RunEntry(a_run("a"), environ)
    for text in ("", "[]", '{"run_id": 7}', '{"run_id": "a"}'):
        (runs.state_folder(environ) / "a" / "run.json").write_text(text)
        assert local_runs(environ) == []


def test_ended_runs_beyond_the_bound_are_removed_oldest_first(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_RUNS", 2)
    running = RunEntry(a_run("running", 0.0), environ)
    for number in range(3):
        RunEntry(a_run(f"ended-{number}", number), environ).close()
        folder = runs.state_folder(environ) / f"ended-{number}"
        os.utime(folder, (1e9 + number, 1e9 + number))
    os.utime(runs.state_folder(environ) / "running", (1e9 - 1, 1e9 - 1))
    last = RunEntry(a_run("last", 9.0), environ)
    assert [run.run_id for run in local_runs(environ)] == ["last", "ended-2", "running"]
    running.close()
    last.close()


def test_agents_that_start_together_may_remove_the_same_runs(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "older"):
        RunEntry(a_run(name), environ).close()
        for folder in ("journal", "logs"):
            (runs.state_folder(environ) / name / folder).mkdir()
            (runs.state_folder(environ) / name / folder / "node-1.jsonl").write_text("{}\n")

    def removed_by_another(path: Path) -> int:
        shutil.rmtree(path.parent.parent)
        return 0

    monkeypatch.setattr(runs, "_size_bytes", removed_by_another)
    RunEntry(a_run("new"), environ).close()
    assert [run.run_id for run in local_runs(environ)] == ["new"]


def test_a_forgotten_run_has_no_entry_and_no_journals(environ: dict[str, str]) -> None:
    RunEntry(a_run("a"), environ).close()
    journal = default_journal("a", environ)
    journal.mkdir()
    (journal / "node-1.jsonl").write_text("{}\n")
    assert forget("a", environ) and not journal.exists()
    assert local_runs(environ) == [] and not forget("a", environ)


def test_the_oldest_files_are_removed_beyond_the_bound(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 + number, 1e9 + number))
    remove_oldest_files(tmp_path.glob("*.jsonl"), 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.jsonl", "3.jsonl"]


def journal_of(pid: int, host: str = os.uname().nodename) -> str:
    return json.dumps({"event": "journal-opened", "host": host, "pid": pid}) + "\n"


def test_journals_of_ended_processes_follow_to_the_checkpoints(
    environ: dict[str, str], tmp_path: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    began = default_journal("a", environ)
    began.mkdir(parents=True)
    (began / "ended.jsonl").write_text(journal_of(ended.pid))
    (began / "running.jsonl").write_text(journal_of(os.getpid()))
    (began / "elsewhere.jsonl").write_text(journal_of(ended.pid, host="another"))
    (began / "damaged.jsonl").write_text("{")
    beside = tmp_path / "checkpoints" / "journal" / "a"
    beside.mkdir(parents=True)

    entry = RunEntry(a_run("a"), environ)
    assert len(list(began.iterdir())) == 4, "while the checkpoint folder is unknown"
    entry.move(beside)
    assert [path.name for path in beside.iterdir()] == ["ended.jsonl"]
    assert {path.stem for path in began.iterdir()} == {"running", "elsewhere", "damaged"}

    (began / "later.jsonl").write_text(journal_of(ended.pid))
    entry.close()
    assert {path.stem for path in beside.iterdir()} == {"ended", "later"}


def test_journals_stay_apart_from_a_folder_that_the_user_has_chosen(
    environ: dict[str, str], tmp_path: Path
) -> None:
    chosen = tmp_path / "journal" / "a"
    chosen.mkdir(parents=True)
    began = default_journal("a", environ)
    began.mkdir(parents=True)
    (began / "ended.jsonl").write_text(journal_of(-1))
    environ["ELASTIC_JOURNAL"] = str(chosen)
    RunEntry(replace(a_run("a"), journal=str(chosen)), environ).close()
    assert list(chosen.iterdir()) == []


def test_a_file_that_could_not_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("old")
    with pytest.raises(OSError), replacing(page) as new:
        new.write_text("half")
        raise OSError(errno.ENOSPC, "full")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page", "old")]
