"""The demo's decisions, calculations, output and report, on hand-written ledgers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from kit.made_up_run import write_run
from rich.console import Console

from elastic.cli.demo import (
    ADDED,
    DEMO_PATIENCE_S,
    DEMO_STEP_S,
    NODES,
    SCRIPT,
    STEPS,
    STEPS_AFTER_JOIN,
    VICTIM,
    Act,
    DemoPlan,
    JobPosition,
    JournalEntry,
    JournalReader,
    LineView,
    NodeRow,
    Summary,
    TableView,
    keep_report,
    pauses_of,
    position_of,
    print_summary,
    rows_of,
    sentence,
    summarize,
)
from elastic.cli.main import main
from elastic.report.model import RunReport, report_of
from elastic.telemetry.reader import merge, read_folder
from elastic.testing.ledger import LedgerEnd, LedgerStep, RunLedger, Start

SAMPLES, BATCH, EPOCHS = 240, 6, 3  # 40 steps an epoch
LENGTH = SAMPLES // BATCH
SURVIVORS = tuple(node for node in NODES if node != VICTIM)
WORLDS = {1: NODES, 2: SURVIVORS, 3: (*SURVIVORS, ADDED)}


def world(generation: int, first: int, stop: int, *, began_s: float) -> RunLedger:
    """A generation that runs steps first..stop-1, one per second, from ``began_s``."""
    nodes = WORLDS[generation]
    starts = [
        Start(generation, first, rank, len(nodes), node, began_s - 1)
        for rank, node in enumerate(nodes)
    ]
    steps = []
    for step in range(first, stop):
        batch = [(step % LENGTH) * BATCH + i for i in range(BATCH)]
        for rank, node in enumerate(nodes):
            mine = tuple(batch[rank :: len(nodes)])
            time_s = began_s + step - first
            steps.append(LedgerStep(generation, step, step // LENGTH, rank, node, mine, time_s))
    return RunLedger(tuple(starts), tuple(steps))


def joined(*parts: RunLedger, ends: Iterable[LedgerEnd] = ()) -> RunLedger:
    return RunLedger(
        tuple(s for part in parts for s in part.starts),
        tuple(s for part in parts for s in part.steps),
        tuple(ends),
    )


def good_ledger() -> RunLedger:
    """Killed after step 59 (checkpoint at 58), joined after step 79, done after 119."""
    return joined(
        world(1, 0, 60, began_s=0.0),
        world(2, 58, 80, began_s=65.0),
        world(3, 80, 120, began_s=90.0),
        ends=[LedgerEnd(3, rank, "abc", 131.0) for rank in range(3)],
    )


def good_plan() -> DemoPlan:
    killed = position_of(world(1, 0, 60, began_s=0.0))
    later = position_of(joined(world(1, 0, 60, began_s=0.0), world(2, 58, 70, began_s=65.0)))
    return DemoPlan(killed, later)


JOURNAL = (
    JournalEntry(
        "world-formed", "node-0", 0.0, {"generation": 1, "cause": "first", "reason": "all came"}
    ),
    JournalEntry(
        "world-formed", "node-0", 61.0, {"generation": 2, "cause": "lost", "reason": "gone"}
    ),
    JournalEntry(
        "world-formed", "node-2", 86.0, {"generation": 3, "cause": "joined", "reason": "new"}
    ),
)


def summary_of(
    ledger: RunLedger,
    plan: DemoPlan,
    *,
    accuracy: float | None = 0.985,
    joining_node_code: int | None = 0,
) -> Summary:
    codes: dict[str, int | None] = {"node-0": 0, VICTIM: -9, "node-2": 0, ADDED: joining_node_code}
    return summarize(
        ledger,
        JOURNAL,
        {2: 5.0, 3: 3.0},
        plan,
        accuracy=accuracy,
        train_samples=SAMPLES,
        epochs=EPOCHS,
        exit_codes=codes,
        duration_s=131.0,
    )


# Decisions.


def test_the_kill_waits_for_a_full_world_and_the_middle_of_an_epoch() -> None:
    def act_after(steps: int) -> Act | None:
        return DemoPlan().next_act(position_of(world(1, 0, steps, began_s=0.0)))

    assert DemoPlan().next_act(position_of(RunLedger())) is None
    assert act_after(5) is None
    assert act_after(LENGTH + 2) is None  # an epoch has just begun
    assert act_after(LENGTH + LENGTH // 2) is Act.KILL
    smaller = position_of(world(2, 0, LENGTH + LENGTH // 2, began_s=0.0))
    assert DemoPlan().next_act(smaller) is None


def test_the_joining_node_waits_for_the_survivors_to_train() -> None:
    before = world(1, 0, 60, began_s=0.0)
    plan = DemoPlan().after(Act.KILL, _position(before))
    assert plan.next_act(_position(before)) is None
    assert plan.next_act(_position(joined(before, world(2, 58, 61, began_s=65.0)))) is None
    recovered = _position(joined(before, world(2, 58, 70, began_s=65.0)))
    assert plan.next_act(recovered) is Act.JOIN
    assert plan.after(Act.JOIN, recovered).next_act(recovered) is None


def _position(ledger: RunLedger) -> JobPosition:
    position = position_of(ledger)
    assert position is not None
    return position


def test_a_generation_without_steps_does_not_change_the_position() -> None:
    begun = world(3, 60, 60, began_s=90.0)
    thrown_away = joined(world(1, 0, 60, began_s=0.0), world(2, 58, 81, began_s=65.0), begun)
    assert _position(thrown_away).generation == 2


def test_steps_are_slowed_down_while_the_job_waits_for_a_node() -> None:
    before = world(1, 0, 60, began_s=0.0)
    without = joined(before, world(2, 58, 80, began_s=65.0))
    plan = DemoPlan().after(Act.KILL, _position(before))
    assert plan.step_delay_s(_position(without), 0.0) == DEMO_STEP_S  # no node was started
    plan = plan.after(Act.JOIN, _position(without))
    assert plan.waits_for_node(_position(without))
    waited_s, step = 0.0, _position(without).step
    while waited_s < DEMO_PATIENCE_S - 1:
        at = replace(_position(without), step=step)
        waited_s, step = waited_s + plan.step_delay_s(at, waited_s), step + 1
    assert step < STEPS - STEPS_AFTER_JOIN + 1, (
        "the joining node would find no step to take part in"
    )
    late = replace(_position(without), step=step)
    assert plan.step_delay_s(late, DEMO_PATIENCE_S) == DEMO_STEP_S  # no more waiting
    complete = _position(joined(without, world(3, 80, 81, began_s=90.0)))
    assert not plan.waits_for_node(complete)
    assert plan.step_delay_s(complete, 3.0) == DEMO_STEP_S


def test_a_first_world_without_all_nodes_waits_for_the_others() -> None:
    two = _position(world(2, 0, 30, began_s=0.0))
    assert DemoPlan().waits_for_node(None) and DemoPlan().waits_for_node(two)
    assert DemoPlan().step_delay_s(two, 0.0) > 10 * DEMO_STEP_S
    assert DemoPlan().step_delay_s(None, 0.0) == DEMO_STEP_S
    assert not DemoPlan().waits_for_node(_position(world(1, 0, 30, began_s=0.0)))


# The summary.


def test_the_summary_of_a_successful_run_has_no_failures() -> None:
    summary = summary_of(good_ledger(), good_plan())
    assert summary.failures == () and summary.ok
    assert [g.cause for g in summary.generations] == ["first", "lost", "joined"]
    assert [g.nodes for g in summary.generations] == [WORLDS[1], WORLDS[2], WORLDS[3]]
    assert [(g.first_step, g.last_step) for g in summary.generations] == [
        (0, 59),
        (58, 79),
        (80, 119),
    ]
    assert [g.recomputed_steps for g in summary.generations] == [2, 0, 0]
    assert summary.recomputed_steps == 2 and summary.steps == 120
    assert [g.pause_s for g in summary.generations] == [None, 5.0, 3.0]
    assert [(s.once, s.twice, s.never) for s in summary.samples] == [(SAMPLES, 0, 0)] * EPOCHS


def test_a_lost_sample_fails_the_demo() -> None:
    ledger = good_ledger()
    lossy = replace(
        ledger, steps=tuple(s for s in ledger.steps if not (s.step == 100 and s.rank == 1))
    )
    summary = summary_of(lossy, good_plan())
    assert not summary.ok and "epoch 2" in summary.failures[0]
    assert summary.samples[2].never == BATCH // 3
    assert summary.samples[2].once == SAMPLES - BATCH // 3


def test_a_repeated_sample_fails_the_demo() -> None:
    ledger = good_ledger()
    once_more = replace(ledger.steps[-1], samples=(*ledger.steps[-1].samples, 0))
    summary = summary_of(replace(ledger, steps=(*ledger.steps[:-1], once_more)), good_plan())
    assert not summary.ok and summary.samples[2].twice == 1


@pytest.mark.parametrize(("accuracy", "text"), [(0.9, "90.00%"), (None, "no node reported")])
def test_poor_or_missing_accuracy_fails_the_demo(accuracy: float | None, text: str) -> None:
    summary = summary_of(good_ledger(), good_plan(), accuracy=accuracy)
    assert len(summary.failures) == 1 and text in summary.failures[0]


def test_a_kill_or_join_that_did_not_happen_fails_the_demo() -> None:
    quiet = joined(
        world(1, 0, 120, began_s=0.0), ends=[LedgerEnd(1, r, "a", 121.0) for r in range(3)]
    )
    assert VICTIM in summary_of(quiet, DemoPlan()).failures[0]
    only_killed = replace(good_plan(), joined_at=None)
    assert ADDED in summary_of(good_ledger(), only_killed).failures[0]


def test_a_joining_node_that_never_trained_fails_the_demo() -> None:
    alone = joined(
        world(1, 0, 60, began_s=0.0),
        world(2, 58, 120, began_s=65.0),
        ends=[LedgerEnd(2, rank, "abc", 131.0) for rank in range(2)],
    )
    summary = summary_of(alone, good_plan(), joining_node_code=1)
    assert any(f"{ADDED} ended with 1" in f for f in summary.failures)
    assert any(f"no generation trained with {ADDED}" in f for f in summary.failures)


def test_ranks_with_different_final_weights_fail_the_demo() -> None:
    ledger = good_ledger()
    other = replace(ledger, ends=(*ledger.ends[:-1], replace(ledger.ends[-1], sha256="zzz")))
    assert "differ" in summary_of(other, good_plan()).failures[0]


def test_the_summary_serializes_to_json_with_its_outcome() -> None:
    document = json.loads(json.dumps(summary_of(good_ledger(), good_plan()).as_json()))
    assert document["ok"] is True and document["accuracy"] == 0.985
    assert document["generations"][1]["cause"] == "lost"


def test_the_printed_summary_names_failures_and_numbers() -> None:
    out = io.StringIO()
    summary = summary_of(good_ledger(), good_plan(), accuracy=0.5)
    print_summary(summary, Console(file=out, width=120))
    text = out.getvalue()
    assert "FAILED: test accuracy 50.00%" in text and "promise" not in text
    assert f"{SAMPLES * EPOCHS} seen once, 0 twice, 0 never" in text
    assert "5.00 s" in text


# Input and output during a run.


def test_each_complete_journal_line_is_read_once(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path)
    assert reader.read_new() == []
    file = tmp_path / "node-0-1.jsonl"
    line = {"event": "leader-changed", "node": "node-0", "leader": "node-0"}
    file.write_text(json.dumps({**line, "time": 2.0, "monotonic": 1.0}) + '\n{"event": "half')
    assert reader.read_new() == [
        JournalEntry("leader-changed", "node-0", 2.0, {"leader": "node-0"})
    ]
    with file.open("a") as more:
        more.write('", "time": 3.0, "monotonic": 2.0}\n')
    assert [entry.name for entry in reader.read_new()] == ["half"]
    assert reader.read_new() == []


def test_rows_show_the_state_of_the_nodes() -> None:
    ledger = joined(world(1, 0, 60, began_s=0.0), world(2, 58, 70, began_s=65.0))
    codes = {"node-0": None, VICTIM: -9, "node-2": None, ADDED: None}
    rows = {row.name: row for row in rows_of(ledger, codes, {VICTIM}, newest=2)}
    assert rows["node-0"] == NodeRow("node-0", "training", 0, 2, 69, 1)
    assert rows[VICTIM] == NodeRow(VICTIM, "killed", 1, 1, 59, 1)
    assert rows[ADDED] == NodeRow(ADDED, "forming")
    agreed = {row.name: row.state for row in rows_of(ledger, codes, {VICTIM}, newest=3)}
    assert agreed["node-0"] == "forming"


def test_the_line_view_prints_the_time_and_each_epoch_once() -> None:
    out = io.StringIO()
    view = LineView(out)
    view.say("node-0 starts", 0.0)
    for step in (1, 2):
        view.update([NodeRow("node-0", "training", 0, 1, step, 0)])
    lines = out.getvalue().splitlines()
    assert lines[0] == "00:00:00.000 node-0 starts"
    assert len(lines) == 2 and "epoch 0" in lines[1]


def test_the_table_shows_nodes_and_events() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    view = TableView(console)
    view.say("node-1 is killed [SIGKILL]", 0.0)
    view.update([NodeRow("node-0", "training", 0, 7, 123, 4)])
    view.close()
    out = console.file
    assert isinstance(out, io.StringIO)
    assert all(part in out.getvalue() for part in ("node-0", "123", "killed [SIGKILL]"))


def test_only_relevant_events_have_a_sentence() -> None:
    formed = JournalEntry(
        "world-formed", "n", 0.0, {"generation": 2, "size": 2, "reason": "node-1 died"}
    )
    assert sentence(formed) == "generation 2, 2 workers: node-1 died"
    assert sentence(JournalEntry("something-else", "n", 0.0)) is None


def test_the_demo_script_is_a_copy_of_the_example() -> None:
    """A wheel has no examples: the demo's script is a copy."""
    example = Path(__file__).parents[3] / "examples" / "digits.py"
    assert SCRIPT.read_text() == example.read_text(), f"cp {example} {SCRIPT}"


def test_the_tutorial_writes_copies_of_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[3] / "examples" / "migrate" / "ddp_tutorial"
    for _ in range(2):  # safe to repeat
        assert main(["tutorial", str(tmp_path / "own")]) == 0
        for name in ("before.py", "after.py"):
            assert (tmp_path / "own" / name).read_text() == (example / name).read_text()
    printed = capsys.readouterr().out
    assert f"cd {tmp_path / 'own'}" in printed and printed.count("wrote") == 1
    assert "after.py and before.py are there already, unchanged" in printed
    (tmp_path / "own" / "after.py").write_text("mine")
    (tmp_path / "own" / "before.py").unlink()
    assert main(["tutorial", str(tmp_path / "own")]) == 2
    assert "after.py exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["after.py"]


# The report.


def report_in(journals: Path) -> RunReport:
    write_run(journals)
    return report_of(merge(*read_folder(journals)))


def test_the_report_is_kept_when_the_journals_are_removed(tmp_path: Path) -> None:
    report = report_in(tmp_path / "demo" / "journal")
    assert [i.generations for i in report.incidents] == [(2,), (3,)]
    assert pauses_of(report) == {i.generations[0]: i.pause_s for i in report.incidents}
    path = keep_report(report, tmp_path / "demo-report")
    assert path == tmp_path / "demo-report.html"
    assert "The job succeeded after 2 min 1 s." in path.read_text()


def test_report_errors_are_not_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = report_of(merge(*read_folder(tmp_path)))
    assert keep_report(nothing, tmp_path / "demo-report") is None
    report = report_in(tmp_path / "journal")
    assert keep_report(report, tmp_path / "missing" / "demo-report") is None
    assert "the demo has no report: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
