"""``elastic logs``: the lines of this machine, and the nodes whose lines are elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.manual_clock import ManualClock

from elastic.cli import logs
from elastic.cli.main import main
from elastic.telemetry.events import WorldFormed
from elastic.telemetry.journal import Journal
from elastic.telemetry.output import Output, OutputRedirected
from elastic.telemetry.runs import LocalRun, RunEntry, default_journal, kept_output

RUN = "demo"


CLOCK = ManualClock(1_800_000_000.0)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELASTIC_JOURNAL", "PET_RDZV_ID", "PET_RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def entry() -> Iterator[RunEntry]:
    """A run of this machine, whose agents still run."""
    journal = str(default_journal(RUN))
    entry = RunEntry(
        LocalRun(run_id=RUN, journal=journal, endpoint="127.0.0.1:1", prefix="/p", since_s=1.0)
    )
    yield entry
    entry.close()


def journal(folder: Path, node: str) -> Journal:
    return Journal(folder=folder, identity={"node": node}, run_id=RUN, clock=CLOCK)


def output(node: str) -> Journal:
    return journal(kept_output(RUN), node)


def line(text: str, rank: int | None = None, local_rank: int | None = 0) -> Output:
    CLOCK.advance(60)
    return Output(stream="stdout", local_rank=local_rank, rank=rank, generation=1, text=text)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["logs", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_several_workers_are_in_order_of_time_with_their_origin(
    entry: RunEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    entry.close()
    a, b = output("a"), output("b")
    a.record(line("one", 0))
    b.record(line("two\nthree", 1))
    a.record(line("12:00Z INFO    [a g1] recovered", 0))
    a.record(line("12:00Z INFO    [a g1] waiting", None, None))
    b.record(line("unnamed", None))
    log = ["12:00Z INFO    [a g1] recovered", "12:00Z INFO    [a g1] waiting"]
    everything = ["[a r0] one", "[b r1] two", "[b r1] three", *log, "[b] unnamed"]
    assert printed(capsys) == printed(capsys, RUN) == everything
    assert printed(capsys, "--node=a") == ["[a r0] one", *log]
    assert printed(capsys, "--rank=1") == ["[b r1] two", "[b r1] three"]
    assert main(["logs", "--rank=9"]) == 0
    assert "no line of rank 9: ranks 0 to 1 have written" in capsys.readouterr().err
    assert printed(capsys, "--tail=2") == everything[-2:]
    assert printed(capsys, "--tail=0") == []


def test_the_only_worker_needs_no_origin_and_an_age_selects_its_last_lines(
    entry: RunEntry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry.close()
    monkeypatch.setattr(logs, "SYSTEM_CLOCK", CLOCK)
    a = output("a")
    for text in ("old", "new"):
        a.record(line(text, 0))
    assert printed(capsys) == ["old", "new"]
    assert printed(capsys, "--since=30s") == ["new"]


def test_lines_of_several_nodes_have_their_origin_before_a_second_worker_writes(
    entry: RunEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    entry.close()
    output("a").record(line("one", 0))
    output("b").record(line("unnamed", None, None))
    assert printed(capsys) == ["[a r0] one", "[b] unnamed"]


def test_streams_that_torchrun_redirects_are_read_from_its_files(
    entry: RunEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry.close()
    file = tmp_path / "stdout.log"
    file.write_text("one\ntwo\nno end")
    a = output("a")
    for path in (file, tmp_path / "removed.log"):
        a.record(OutputRedirected(stream="stdout", local_rank=0, path=str(path)))
    assert printed(capsys) == ["one", "two", "no end"]


def test_nodes_whose_logs_are_on_other_machines_are_named_with_them(
    entry: RunEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    entry.close()
    output("a").record(line("one", 0))
    world = WorldFormed(
        generation=1,
        nodes=("a", "b", "c"),
        size=3,
        state="active",
        mode="in-process",
        cause="first",
        reason="they start",
    )
    journal(default_journal(RUN), "c").record(world)
    assert main(["logs"]) == 0
    error = capsys.readouterr().err
    assert "incomplete: nodes b, c" in error and "`elastic logs demo --node b`" in error
    assert main(["logs", "--node=b"]) == 2
    assert "the logs of node b are not on this machine" in capsys.readouterr().err
    assert main(["logs", "--node=aa"]) == 2
    assert "did you mean 'a'?" in capsys.readouterr().err


def test_it_follows_until_the_agents_of_this_machine_have_ended(
    entry: RunEntry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = output("a")
    a.record(line("one", 0))

    class Ending(ManualClock):
        def sleep(self, seconds: float) -> None:
            a.record(line("two", 0))
            entry.close()

    monkeypatch.setattr(logs, "SYSTEM_CLOCK", Ending())
    monkeypatch.setattr(logs, "_in_etcd", lambda args: {})
    assert printed(capsys, "-f") == ["one", "two"]


def test_without_a_job_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs"]) == 2
    assert "no job has run on this machine" in capsys.readouterr().err
