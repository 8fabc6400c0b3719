"""``elastic status``, ``describe`` and ``wait`` on a job in an in-memory store."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryServer, MemoryStore

from elastic.cli import status
from elastic.cli import view as connection
from elastic.cli.describe import describe
from elastic.cli.last_known import last_known
from elastic.cli.main import main
from elastic.cli.status import document, lines, progress
from elastic.cli.view import (
    SILENT_SCRIPT_S,
    JobCondition,
    JobView,
    incident,
    read_job,
    sentence,
)
from elastic.cli.wait import WaitCondition, wait
from elastic.errors import SYSTEM_CLOCK, StoreUnreachable
from elastic.membership.progress import (
    JobProgress,
    RecordedHeartbeat,
    encode_progress,
)
from elastic.membership.records import (
    BreakageRecord,
    Done,
    FailureRecord,
    Keys,
    Leader,
    NodeState,
    Outcome,
    Stop,
    WorldRecord,
    encode,
)
from elastic.telemetry.events import (
    CheckpointSaved,
    JobEnded,
    NodeLost,
    Waiting,
    WorkerDied,
    WorldFormed,
)
from elastic.telemetry.journal import Journal
from elastic.testing.waiting import eventually
from elastic.tuning.intervals import (
    PROGRESS_S,
)
from elastic.wire.messages import WorldState

KEYS = Keys.of("/elastic", "llama-7")
NOW = 1_769_860_800.0
DOCS = Path(__file__).parents[3] / "docs"
HOSTILE = "node\x1b[2J\n" + "x" * 10_000


class Job:
    """Writes records as agents do, and reads them as the commands do."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def put_world(self, record: WorldRecord) -> None:
        self.store.put(KEYS.world, encode(record))

    def put_node(
        self, name: str, running: WorldRecord | None, state: NodeState, /, **more: str | int
    ) -> None:
        made = replace(node(name), running=running, state=state, joined_at_s=NOW - 60, **more)  # type: ignore[arg-type]
        self.store.put(KEYS.node(made.node_id), encode(made))

    def put_progress(self, step: int, **more: object) -> None:
        progress = JobProgress(
            node_id="n1", generation=7, step=step, step_time_s=0.5, checkpoint_step=40, time_s=NOW
        )
        self.store.put(KEYS.progress, encode_progress(replace(progress, **more)))  # type: ignore[arg-type]

    def put_leader(self, name: str) -> None:
        leader = Leader(node_id=f"id-{name}", address="10.0.0.1", liveness_port=1)
        self.store.put(KEYS.leader, encode(leader))

    def finish(
        self, outcome: Outcome, exit_code: int, breakages: tuple[BreakageRecord, ...] = ()
    ) -> None:
        done = Done(
            outcome=outcome,
            reason="a, b finished",
            exit_code=exit_code,
            generation=7,
            final_step=99,
            time_s=NOW - 180,
            breakages=breakages,
        )
        self.store.put(KEYS.done, encode(done))

    def view(self) -> JobView:
        return read_job(self.store, KEYS, NOW)


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def training(job: Job) -> Job:
    """Three of at most four nodes train; a fourth was lost 12 s ago."""
    record = replace(
        world("n1", "n2", "n3", generation=7),
        max_nodes=4,
        time_s=NOW - 11,
        breakages=(
            BreakageRecord(
                generation=6,
                lived_s=300.0,
                steps=120,
                failures=(FailureRecord(node="n4", text="Traceback:\n  boom\x1b[2J", exit_code=1),),
                lost=("n4",),
                time_s=NOW - 12,
                step=52,
                verdict="a verdict",
                response="its node was left out",
            ),
        ),
    )
    job.put_world(record)
    for name in ("n1", "n2", "n3"):
        job.put_node(name, record, NodeState.READY)
    job.put_progress(52)
    return job


@pytest.fixture
def cli(job: Job, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``elastic ARGV`` on that store."""

    @contextmanager
    def opened(args: object, **_: object) -> Iterator[MemoryStore]:
        yield job.store

    for module in ("status", "describe", "wait", "jobs"):
        monkeypatch.setattr(f"elastic.cli.{module}.job_store", opened)
    monkeypatch.setattr(connection, "job_store", opened)
    where = ("--rdzv-endpoint=localhost:2379", "--rdzv-id=llama-7")
    return lambda *argv: main([argv[0], *where[: 1 if argv[0] == "list" else 2], *argv[1:]])


def heard_of(*nodes: tuple[str, int, bool]) -> tuple[RecordedHeartbeat, ...]:
    """Heartbeats of nodes: name, generation in which their workers step, whether they joined."""
    return tuple(
        RecordedHeartbeat(
            node_id=f"id-{name}",
            generation=generation,
            step=None,
            heard_at_s=NOW,
            has_joined=has_joined,
        )
        for name, generation, has_joined in nodes
    )


# The sentence ------------------------------------------------------------------------------------


def test_without_a_leader_the_status_names_the_nodes_whose_leases_must_expire(job: Job) -> None:
    """All nodes were killed, and started again; n3 had left in order."""
    job.put_world(world("n1", "n2", "n3"))
    job.put_node("n3", None, NodeState.LEAVING)
    job.put_node("n4", None, NodeState.ARRIVED)
    why = "there is no leader; waiting for the leases of n1, n2 to expire"
    assert f"n4 waits: {why}" in sentence(job.view())
    assert job.view().why_waiting(node("n4")) == why
    job.put_leader("n4")
    assert job.view().why_waiting(node("n4")) == ""


def test_a_training_job_is_summarized(training: Job) -> None:
    view = training.view()
    assert view.state is JobCondition.TRAINING
    output = sentence(view)
    assert output == "training in generation 7 with 3 of 4 nodes; n4 was lost 12.0 s ago", "once"


def test_a_node_that_warms_up_is_named(training: Job) -> None:
    training.put_node("n5", None, NodeState.STARTING)
    assert sentence(training.view()).endswith("; n5 is warming up")


def test_old_losses_and_returned_nodes_are_not_mentioned(training: Job) -> None:
    late = replace(training.view(), at_s=NOW + 3600)
    assert "lost" not in sentence(late)
    record = replace(world("n1", "n2", "n3", "n4", generation=8), breakages=late.world.breakages)  # type: ignore[union-attr]
    training.put_world(record)
    for name in ("n1", "n2", "n3", "n4"):
        training.put_node(name, record, NodeState.READY)
    assert "lost" not in sentence(training.view())


def test_missing_nodes_are_named_most_recent_first(training: Job) -> None:
    """A paused job waits for them."""
    record = training.view().world
    assert record is not None
    newer = replace(
        record.breakages[0], generation=7, lost=("n2",), left=("n3",), failures=(), time_s=NOW - 2
    )
    paused = replace(
        record,
        generation=8,
        members=record.members[:1],
        state=WorldState.PAUSED,
        min_nodes=2,
        breakages=(record.breakages[0], newer),
    )
    training.put_world(paused)
    training.put_node("n1", paused, NodeState.READY)
    training.store.delete(KEYS.node("id-n3"))
    view = training.view()
    assert sentence(view) == (
        "paused in generation 8: 1 of at least 2 nodes, not training; "
        "n2 was lost 2.0 s ago; n3 left 2.0 s ago; n4 was lost 12.0 s ago"
    ), "n2 still has a record, but does not join"
    assert [(n.name, view.state_of(n)) for n in view.nodes] == [("n1", "ready"), ("n2", "lost")]
    training.put_world(replace(paused, breakages=(*paused.breakages, replace(newer, lost=("n5",)))))
    assert "; and 1 more" in sentence(training.view())


def test_departures_that_a_stop_asked_for_are_no_incidents(training: Job) -> None:
    record = training.view().world
    assert record is not None
    departed = replace(record.breakages[0], lost=(), left=("n1",), failures=(), time_s=NOW - 1)
    training.put_world(replace(record, breakages=(*record.breakages, departed)))
    assert [b.left for b in training.view().incidents] == [(), ("n1",)]
    training.store.put(KEYS.stop, encode(Stop(by="user@host", time_s=NOW - 2)))
    assert [b.left for b in training.view().incidents] == [()]


@pytest.fixture
def started(job: Job) -> Job:
    """The workers of a first world of three nodes were started 5 s ago."""
    record = replace(world("n1", "n2", "n3", generation=1), time_s=NOW - 5)
    job.put_world(record)
    for name in ("n1", "n2", "n3"):
        job.put_node(name, record, NodeState.STARTING)
    job.put_leader("n1")
    return job


NONE_JOINED = (("n1", False), ("n2", False), ("n3", False))


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ((), "workers of all nodes have not called elastic.join() yet"),
        (NONE_JOINED, "workers of all nodes have not called elastic.join() yet"),
        (
            (("n1", True), ("n2", False), ("n3", False)),
            "workers of n2 and n3 have not called elastic.join() yet",
        ),
        (
            (("n1", True), ("n2", True), ("n3", True)),
            "workers of all nodes have not begun a step yet",
        ),
    ],
)
def test_a_world_whose_workers_have_begun_no_step_is_starting(
    started: Job, cli: Callable[..., int], heard: tuple[tuple[str, bool], ...], expected: str
) -> None:
    started.put_progress(0, heartbeats=heard_of(*((n, 0, joined) for n, joined in heard)))
    view = started.view()
    assert view.state is JobCondition.STARTING
    assert sentence(view) == f"starting generation 1 with 3 of 4 nodes: {expected}"
    assert {view.state_of(node) for node in view.nodes} == {"starting"}
    assert cli("wait", "--for=nodes=3", "--timeout=0s") == 124
    assert not document(view)["nodes"][0]["is_training"]


def test_a_world_is_training_once_all_of_its_workers_have_begun_a_step(
    started: Job, cli: Callable[..., int]
) -> None:
    started.put_progress(1, heartbeats=heard_of(("n1", 1, True), ("n2", 1, True), ("n3", 0, True)))
    assert sentence(started.view()).endswith("workers of n3 have not begun a step yet")
    assert [started.view().state_of(n) for n in started.view().nodes][-1] == "starting"
    assert cli("wait", "--for=nodes=2", "--timeout=0s") == 124, "of a world of three"
    started.put_progress(1, heartbeats=heard_of(*((n, 1, True) for n, _ in NONE_JOINED)))
    view = started.view()
    assert view.state is JobCondition.TRAINING
    assert sentence(view) == "training in generation 1 with 3 of 4 nodes"
    assert {view.state_of(node) for node in view.nodes} == {"training"}
    assert cli("wait", "--for=nodes=3", "--timeout=0s") == 0
    # After a restart, reports from the previous world do not count.
    record = replace(world("n1", "n2", "n3", generation=2), time_s=NOW)
    started.put_world(record)
    for name in ("n1", "n2", "n3"):
        started.put_node(name, record, NodeState.STARTING)
    assert sentence(started.view()).endswith("workers of all nodes have not begun a step yet")


def test_after_an_in_process_change_a_world_trains_once_entered(started: Job) -> None:
    started.put_progress(9, heartbeats=heard_of(*((n, 1, True) for n, _ in NONE_JOINED)))
    record = replace(world("n1", "n2", generation=2, mode="in-process"), time_s=NOW)
    started.put_world(record)
    for name in ("n1", "n2"):
        started.put_node(name, record, NodeState.READY)
    started.store.delete(KEYS.node("id-n3"))
    assert sentence(started.view()) == "training in generation 2 with 2 of 4 nodes"


def test_scripts_that_report_no_steps_count_as_training(
    started: Job, cli: Callable[..., int]
) -> None:
    """Without elastic.join()."""
    heard = heard_of(*((n, 0, False) for n, _ in NONE_JOINED))
    started.put_progress(0, heartbeats=heard, time_s=NOW - 4 + SILENT_SCRIPT_S)
    assert started.view().state is JobCondition.TRAINING
    assert cli("wait", "--for=nodes=3", "--timeout=0s") == 0
    started.store.put(KEYS.progress, b'{"version": 99}')
    assert started.view().state is JobCondition.TRAINING, "nor of a version that cannot be read"


def test_the_previous_world_trains_until_the_step_of_a_planned_one(training: Job) -> None:
    planned = replace(
        world("n1", "n2", "n3", "n4", generation=8, mode="in-process", switch_at_step=60),
        reason="n4 is ready",
    )
    training.put_world(planned)
    training.put_node("n4", None, NodeState.READY)
    view = training.view()
    assert view.state is JobCondition.TRAINING
    assert sentence(view) == (
        "training in generation 7 with 3 nodes; generation 8 begins with step 60 (n4 is ready)"
    )
    assert [view.state_of(n) for n in view.members] == ["training"] * 3 + ["ready"]
    training.put_progress(60)
    assert sentence(training.view()).startswith(
        "starting generation 8: 0 of its 4 nodes have entered it (n4 is ready)"
    )


def test_other_job_states_are_summarized(job: Job) -> None:
    assert job.view().state is JobCondition.ABSENT
    assert sentence(job.view()) == "no such job: there is nothing under /elastic/llama-7/"
    job.put_node("n1", None, NodeState.ARRIVED)
    assert job.view().state is JobCondition.WAITING
    assert sentence(job.view()).startswith("waiting for nodes: 1 of at least")
    job.put_node("n2", None, NodeState.ARRIVED)
    job.put_node("n3", None, NodeState.ARRIVED)
    assert sentence(job.view()) == (
        "waiting for the first generation: 3 nodes have arrived, at least 2 needed"
    )
    job.store.delete(KEYS.node("id-n2"))
    job.store.delete(KEYS.node("id-n3"))
    paused = replace(world("n1", generation=3), state=WorldState.PAUSED, min_nodes=2)
    job.put_world(paused)
    job.put_node("n1", paused, NodeState.READY)
    assert sentence(job.view()).startswith("paused in generation 3: 1 of at least 2 nodes")
    job.store.delete(KEYS.node("id-n1"))
    assert job.view().state is JobCondition.DOWN
    assert sentence(job.view()).startswith("down: no node is alive; generation 3")
    job.put_world(replace(world(generation=4), time_s=NOW - 5))
    assert sentence(job.view()) == (
        "down: all nodes left gracefully 5.0 s ago; a restart resumes the job"
    )
    job.finish(Outcome.SUCCESS, 0)
    assert sentence(job.view()) == (
        "succeeded at step 99 in generation 7, 3 min 0 s ago: a, b finished"
    )
    job.finish(Outcome.FAILURE, 1)
    assert job.view().state is JobCondition.FAILED


def test_a_record_of_an_unknown_version_becomes_a_note(training: Job) -> None:
    training.store.put(KEYS.progress, b'{"version": 99}')
    training.store.put(KEYS.leader, b"\xff\x00")
    view = training.view()
    assert view.state is JobCondition.TRAINING
    assert [note for note in view.notes if KEYS.progress in note]
    assert [note for note in view.notes if KEYS.leader in note]


def test_hostile_names_are_escaped_for_the_terminal(job: Job) -> None:
    record = replace(world("n1", generation=7), reason=HOSTILE)
    job.put_world(record)
    job.put_node("n1", record, NodeState.READY, name=HOSTILE, address=HOSTILE, torch=HOSTILE)
    job.put_node("n2", None, NodeState.STARTING, name=HOSTILE)
    for line in lines(job.view(), is_wide=True):
        assert line.isprintable()
        assert len(line) < 1000


# The commands ------------------------------------------------------------------------------------


def test_the_status_table(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("status") == 0
    head, progress, _, titles, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("llama-7: training in generation 7 with 3 of 4 nodes")
    assert progress == "step 52, 2 steps/s, time left unknown, last checkpoint of step 40"
    assert titles.split() == ["NODE", "RANKS", "STATE", "AGE"]
    assert rows[0].split()[0] == "n1" and rows[0].split()[2] == "training"
    assert "generation 6: n4 was lost" in rows[-1]
    assert cli("status", "-o", "wide") == 0
    assert "LEADER" in capsys.readouterr().out


def test_goodput_does_not_drop_between_two_records_of_the_leader(training: Job) -> None:
    training.put_progress(52, goodput=0.6, goodput_since_s=NOW - 40)
    view = training.view()
    assert replace(view, at_s=NOW + PROGRESS_S).goodput == pytest.approx(0.6)
    assert replace(view, at_s=NOW + 20).goodput == pytest.approx(0.4)  # no progress
    training.put_progress(52, goodput=0.6, goodput_since_s=NOW - 40, step_time_s=15.0)
    assert replace(training.view(), at_s=NOW + 20).goodput == pytest.approx(0.6)  # one long step


def test_a_job_that_is_down_shows_its_step_as_a_lower_bound(
    job: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job.put_world(replace(world("n1", generation=7), committed_step=44, time_s=NOW - 60))
    clock = ManualClock(NOW - 5)
    journal = Journal(folder=tmp_path, identity={"node": "n1"}, clock=clock, run_id="llama-7")
    journal.locate(lambda: {"generation": 7, "step": 1080})
    journal.emit(Waiting(reason="x"))
    found = document(job.view())
    assert (found["state"], found["step"], found["step_is_old"]) == ("down", 44, True)
    assert cli("status") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["step 44 or later"]
    assert cli("status", f"--journal={tmp_path}") == 0
    output = capsys.readouterr().out
    assert "from the journals:\nlast known: step 1080 in generation 7" in output
    assert cli("status", "--journal", str(tmp_path / "none")) == 0
    assert "has no events of this run" in capsys.readouterr().out
    job.put_node("n1", world("n1", generation=7), NodeState.READY)
    job.put_progress(1081)
    assert document(job.view())["step_is_old"] is False
    assert cli("status", f"--journal={tmp_path}") == 0
    assert "from the journals" not in capsys.readouterr().out


def test_time_left_goodput_and_checkpoint_age_are_shown(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {
        "planned_steps": 172,
        "goodput": 0.75,
        "goodput_since_s": NOW - 3600,
        "checkpoint_at_s": NOW - 90,
    }
    training.put_progress(52, **facts)
    assert list(progress(training.view())) == [
        "step 52 of 172",
        "2 steps/s",
        "about 1 min 0 s left",
        "goodput 75.0% over 1 h 0 min",
        "last checkpoint of step 40, 1 min 30 s ago",
    ]
    assert cli("status") == 0
    assert "step 52 of 172, 2 steps/s, about 1 min 0 s left, goodput" in capsys.readouterr().out
    found = document(training.view())
    assert (found["planned_steps"], found["eta_s"], found["goodput"]) == (172, 60.0, 0.75)
    assert (found["goodput_since"], found["checkpoint_age_s"]) == (NOW - 3600, 90.0)
    # The leader writes nothing while the job makes no progress: that time counts as lost.
    assert replace(training.view(), at_s=NOW + 3600).goodput == pytest.approx(0.375)
    # Paused: there is no step rate, and thus no estimate of the end.
    record = replace(world("n1", generation=8), state=WorldState.PAUSED)
    training.put_world(record)
    assert training.view().eta_s is None
    assert not [part for part in progress(training.view()) if "left" in part]


def test_long_texts_are_truncated_in_the_document(job: Job) -> None:
    record = replace(world("n1", generation=7), reason="x" * 1_000_000)
    job.put_world(record)
    job.put_node("n1", record, NodeState.READY, address="y" * 1_000_000)
    assert len(json.dumps(document(job.view()))) < 10_000


def test_watching_shows_the_last_status_while_etcd_is_unreachable(
    training: Job,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock(ManualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.monotonic() > NOW + 5:
                raise KeyboardInterrupt
            training.store.server.disconnect()

    monkeypatch.setattr(status, "SYSTEM_CLOCK", Clock(NOW))
    assert cli("status", "--watch") == 130
    found = capsys.readouterr()
    assert "etcd does not answer; status 2.0 s ago:" in found.out
    assert found.out.count("llama-7: training in generation 7 with 3 of 4 nodes") == 3
    assert "elastic: " in found.err


def test_the_status_as_json(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("status", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert (found["state"], found["generation"], found["step"]) == ("training", 7, 52)
    assert found["steps_per_s"] == 2.0
    assert [n["name"] for n in found["nodes"]] == ["n1", "n2", "n3"]
    assert found["incidents"][0]["lost"] == ["n4"]


def test_a_missing_job_exits_with_1(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("status") == 1
    assert "no such job" in capsys.readouterr().out


def test_a_misspelled_run_id_lists_the_jobs_that_exist(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("status", "--rdzv-id=lama-7") == 1
    assert "this etcd has 1 job (elastic list), did you mean 'llama-7'?" in capsys.readouterr().err


def test_the_jobs_of_an_etcd_are_listed(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that has ended, and none of other programs or below another prefix."""
    ended = Keys.of("/elastic", "a-1")
    done = Done(
        outcome=Outcome.SUCCESS,
        reason="finished",
        exit_code=0,
        generation=3,
        final_step=99,
        time_s=SYSTEM_CLOCK.wall() - 3600,
    )
    training.store.put(ended.done, encode(done))
    training.store.put("/elastic/other", b"?")
    training.store.put(Keys.of("/elastic/team", "b-2").done, encode(done))
    assert cli("list") == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["RUN", "ID", "STATE", "NODES", "STEP", "GENERATION", "AGE"]
    assert [row[:3] for row in rows] == [["a-1", "succeeded", "0"], ["llama-7", "training", "3/4"]]
    assert rows[0][3] == "99" and rows[1][3:5] == ["52", "7"]
    assert cli("list", "-o", "json") == 0
    listed = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["run_id"] for job in listed] == ["a-1", "llama-7"]
    assert 3600 <= listed[0]["age_s"] < 4000


def test_a_node_is_described(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("describe", "node", "n2") == 0
    output = capsys.readouterr().out
    assert "name:          n2\n" in output and "state:         training\n" in output
    assert cli("describe", "node", "n9") == 2
    assert "live nodes: n1, n2, n3" in capsys.readouterr().err
    assert cli("describe", "checkpoint") == 2
    assert "elastic checkpoints show FOLDER" in capsys.readouterr().err
    assert cli("describe", "node") == 2
    capsys.readouterr()
    assert cli("describe", "node", "n4") == 2
    output = capsys.readouterr().err
    assert re.search(r"node n4 is not alive: .+ ago, in generation 6, n4 was lost\n", output)
    assert "elastic describe incident 6" in output


def test_an_incident_is_described_with_its_traceback(
    training: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    orders = (("6",), ("llama-7",), ("llama-7", "6"), ("6", "llama-7"))
    for argv in (("incident",), *(("incident", *words) for words in orders)):
        assert cli("describe", *argv) == 0
        output = capsys.readouterr().out
        assert "what:          n4 was lost\n" in output
        assert "verdict:       a verdict\n" in output
        assert "step:          52 or later, as last reported to the leader\n" in output
        assert r"      boom\x1b[2J" in output
    assert cli("describe", "incident", "3") == 2
    assert "incidents are recorded for generation 6" in capsys.readouterr().err


def test_a_cause_that_etcd_does_not_know_is_that_of_the_journals(
    training: Job, tmp_path: Path
) -> None:
    journal = Journal(folder=tmp_path, identity={"node": "n2"}, run_id="llama-7")
    for generation, error in ((5, "TypeError: before"), (6, "ValueError: boom"), (7, "later")):
        formed = WorldFormed(
            generation=generation,
            nodes=("n2",),
            size=1,
            state="active",
            mode="restart",
            cause="failure",
            reason="",
        )
        journal.emit(formed)
        journal.emit(WorkerDied(pid=1, local_rank=0, reason=error))
    view = training.view()
    unknown = replace(view.breakages[-1], lost=(), left=(), failures=(), verdict="")
    assert view.world is not None
    view = replace(view, world=replace(view.world, breakages=(unknown,)))
    assert "what:          cause unknown" in describe(view, "incident", None)
    known = describe(view, "incident", None, str(tmp_path))
    assert "what:          a worker of n2 died: ValueError: boom" in known
    reported = replace(unknown, verdict="n1 cannot reach n2")
    assert "reported: n1 cannot reach n2" in incident(reported)


def heartbeats(*heard: tuple[str, int | None, float]) -> tuple[RecordedHeartbeat, ...]:
    """Heartbeats of nodes: name, step, and age when read at NOW."""
    return tuple(
        RecordedHeartbeat(node_id=f"id-{name}", generation=7, step=step, heard_at_s=NOW - age_s)
        for name, step, age_s in heard
    )


def test_heartbeats_and_steps_of_nodes_are_shown(
    training: Job,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("status", "describe"):
        monkeypatch.setattr(f"elastic.cli.{module}.SYSTEM_CLOCK", ManualClock(NOW))
    training.put_progress(52, heartbeats=heartbeats(("n1", 52, 1.0), ("n2", 51, 21.0)))
    assert cli("status", "-o", "wide") == 0
    head, _, _, titles, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("; no heartbeat of n2 for 21.0 s")
    assert re.split("  +", titles)[4:6] == ["STEP", "HEARTBEAT"]
    assert [re.split("  +", row)[4:6] for row in rows[:3]] == [
        ["52", "1.0 s ago"],
        ["51", "21.0 s ago (late)"],
        ["-", "-"],  # the leader has heard none yet
    ]
    found = document(training.view())["nodes"]
    assert [(n["step"], n["heartbeat_age_s"], n["heartbeat_is_late"]) for n in found] == [
        (52, 1.0, False),
        (51, 21.0, True),
        (None, None, None),
    ]
    for name, age in (("n2", "21.0 s ago (late)"), ("n3", "none recorded by the leader")):
        assert cli("describe", "node", name) == 0
        assert f"heartbeat:     {age}\n" in capsys.readouterr().out


def test_if_all_heartbeats_are_old_the_leader_is_reported(training: Job) -> None:
    """Or clocks differ. No single node is reported as late."""
    training.put_progress(52, heartbeats=heartbeats(("n1", 52, 1.0), ("n2", 52, 1.0)))
    view = replace(training.view(), at_s=NOW + 60)
    assert sentence(view).endswith(
        "; the leader has recorded no heartbeats for 1 min 0 s, or clocks differ"
    )
    assert str(view.heartbeat_of(view.nodes[0])) == "1 min 1 s ago (late)"
    behind = replace(training.view(), at_s=NOW - 60)  # no age is negative
    assert str(behind.heartbeat_of(behind.nodes[0])) == "1.0 s ago"
    training.finish(Outcome.SUCCESS, 0)
    assert "heartbeat" not in sentence(replace(training.view(), at_s=NOW + 60))


def test_describe_as_json_has_the_documented_fields(
    training: Job,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.cli.describe.SYSTEM_CLOCK", ManualClock(NOW))
    heard = heartbeats(("n1", 52, 1.0))
    training.put_progress(52, heartbeats=heard, checkpoint_at_s=NOW - 6)
    running = training.view().world
    training.put_node("n4", running, NodeState.FAILED, failure="T" * 100_000, failure_exit_code=7)
    found: dict[str, dict[str, Any]] = {}
    for argv in (("node", "n4"), ("incident", "6")):
        assert cli("describe", *argv, "-o", "json") == 0
        document_of = json.loads(capsys.readouterr().out)
        assert (document_of["schema"], document_of["run_id"]) == (1, "llama-7")
        assert document_of["time"] == NOW
        found[argv[0]] = document_of[argv[0]]
    described = found["node"]
    assert (described["failure_exit_code"], described["state"]) == (7, "failed")
    assert 16_384 <= len(described["failure"]) < 17_000
    assert [i["what"] for i in described["incidents"]] == ["n4 was lost"]
    assert found["incident"]["failures"] == [
        {"node": "n4", "exit_code": 1, "text": "Traceback:\n  boom\x1b[2J"}
    ]
    assert found["incident"]["now"].startswith("training in generation 7")
    page = (DOCS / "reference" / "status.md").read_text()
    documented = re.findall(r"^\| `(\w+\.[\w.\[\]]+)`", page.partition("## Describe")[2], re.M)
    of_status = {f"node.{name}" for name in document(training.view())["nodes"][0]}
    of_incidents = {f"incident.{name}" for name in document(training.view())["incidents"][0]}
    own = {f"{kind}.{name}" for kind, fields in found.items() for name in fields}
    of_failures = {f"incident.failures[].{name}" for name in found["incident"]["failures"][0]}
    expected = own - of_status - of_incidents - {"incident.failures"} | of_failures
    assert set(documented) == expected
    assert cli("describe", "node", "n9", "-o", "json") == 2
    assert capsys.readouterr().out == ""


def test_the_incidents_of_a_failed_job_are_described(
    job: Job, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of its world no longer exists."""
    failure = FailureRecord(node="n1", text="Traceback:\n  boom", exit_code=1)
    breakage = BreakageRecord(
        generation=6, lived_s=3.0, steps=1, failures=(failure,), lost=(), time_s=NOW - 12
    )
    job.finish(Outcome.FAILURE, 1, breakages=(breakage,))
    assert cli("describe", "incident") == 0
    assert "what:          a worker of n1 failed\n" in capsys.readouterr().out
    assert cli("status") == 0
    assert "generation 6: a worker of n1 failed" in capsys.readouterr().out
    assert document(job.view())["incidents"][0]["failed"] == ["n1"]


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("step=52", 0),
        ("nodes=3", 0),
        ("step=53", 124),
        ("nodes=4", 124),
        ("nodes=5", 2),
        ("done", 124),
    ],
)
def test_wait_on_a_training_job(
    training: Job, cli: Callable[..., int], condition: str, code: int
) -> None:
    assert cli("wait", f"--for={condition}", "--timeout=0s") == code


@pytest.mark.parametrize(
    ("outcome", "exit_code", "condition", "code"),
    [
        (Outcome.SUCCESS, 0, "done", 0),
        (Outcome.SUCCESS, 0, "step=99", 0),
        (Outcome.SUCCESS, 0, "step=100", 1),
        (Outcome.SUCCESS, 0, "nodes=1", 1),
        (Outcome.FAILURE, 70, "done", 70),
        (Outcome.FAILURE, 0, "step=1", 1),
    ],
)
def test_wait_on_an_ended_job(
    job: Job,
    cli: Callable[..., int],
    outcome: Outcome,
    exit_code: int,
    condition: str,
    code: int,
) -> None:
    job.finish(outcome, exit_code)
    assert cli("wait", f"--for={condition}", "--timeout=1d") == code


@pytest.mark.parametrize("argv", [("--for=tea",), ("--for=step=x",), ("--for=done", "--timeout=9")])
def test_an_invalid_wait_is_a_usage_error(cli: Callable[..., int], argv: tuple[str, ...]) -> None:
    assert cli("wait", *argv) == 2


def test_wait_continues_while_etcd_is_unreachable(training: Job) -> None:
    reads = 0

    def read() -> JobView:
        nonlocal reads
        reads += 1
        if reads < 4:
            raise StoreUnreachable("etcd does not answer")
        return training.view()

    clock = ManualClock()
    assert wait(read, WaitCondition.parse("step=52"), 60.0, clock) == 0
    assert reads == 4
    reads = -1000
    assert wait(read, WaitCondition.parse("step=52"), 60.0, clock) == 124


# etcd outages ------------------------------------------------------------------------------------


def test_without_etcd_the_journal_shows_the_last_known_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock(NOW)
    journal = Journal(folder=tmp_path, identity={"node": "n1"}, clock=clock)
    journal.locate(lambda: {"generation": 7, "step": 52})
    journal.emit(Waiting(reason="x"))
    output = last_known(str(tmp_path), "llama-7", NOW + 9)
    assert output == ["last known: step 52 in generation 7, 9.0 s ago, from the journal of n1"]
    conf = "--rdzv-conf=connect_timeout_s=0.5"
    argv = ["status", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=llama-7", conf]
    assert main([*argv, f"--journal={tmp_path}"]) == 69
    found = capsys.readouterr()
    assert "llama-7: last known: step 52 in generation 7" in found.out
    assert "127.0.0.1:1" in found.err
    assert "--journal" not in found.err
    assert main(argv) == 69
    assert "--journal FOLDER would show the last known state" in capsys.readouterr().err
    assert main([*argv, f"--journal={tmp_path / 'none'}"]) == 69
    assert "state unknown" in capsys.readouterr().out


def test_a_slow_connection_is_reported_on_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.StringIO()

    def connect(_: object) -> MemoryStore:
        eventually(lambda: "127.0.0.1:1 has not answered yet" in output.getvalue())
        return MemoryStore(MemoryServer())

    monkeypatch.setattr("elastic.store.etcd.EtcdStore", connect)
    monkeypatch.setattr("sys.stderr", output)
    argv = ["status", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x"]
    assert main([*argv, "--rdzv-conf=connect_timeout_s=7.5"]) == 1
    assert "waiting up to 7.5 s" in output.getvalue()


def test_a_fast_connection_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elastic.cli.view.SAY_CONNECTING_S", 600.0)
    monkeypatch.setattr("elastic.store.etcd.EtcdStore", lambda _: MemoryStore(MemoryServer()))
    assert main(["status", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x"]) == 1
    assert "has not answered yet" not in capsys.readouterr().err


def test_journals_show_checkpoints_incidents_and_the_end(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    folder = str(tmp_path)
    assert last_known(folder, "llama-7", NOW) == [
        f"last state unknown: {folder} has no events of this run"
    ]
    other = Journal(folder=folder, identity={"node": "z"}, clock=clock, run_id="another")
    other.locate(lambda: {"generation": 99, "step": 9999})
    journal = Journal(folder=tmp_path / "n1", identity={"node": "n1"}, clock=clock, run_id="none")
    del journal  # a subfolder: not read
    journal = Journal(folder=folder, identity={"node": "n1"}, clock=clock, run_id="llama-7")
    journal.locate(lambda: {"generation": 7, "step": 52})
    for _ in range(4000):  # more than what is read of a file
        journal.emit(Waiting(reason="x" * 100), level=logging.DEBUG)
    journal.emit(
        WorldFormed(
            generation=7,
            nodes=("n1", "n2"),
            size=2,
            state="active",
            mode="in-process",
            cause="lost",
            reason="n3 is lost",
        )
    )
    journal.emit(CheckpointSaved(name="step-40", step=40, duration_s=1.0, stall_s=0.1, bytes=9))
    second = Journal(folder=folder, identity={"node": "n2"}, clock=clock, run_id="llama-7")
    second.emit(Waiting(reason="for a world"))
    clock.advance(30)
    journal.emit(NodeLost(lost="n3\x1b[2J", reason="its lease has ended"))
    other.emit(NodeLost(lost="of another run", reason=""))
    assert last_known(folder, "llama-7", NOW + 40) == [
        "last known: step 52 in generation 7 with 2 nodes, 10.0 s ago, from the journal of n1",
        "last checkpoint of step 40, 40.0 s ago",
        "nodes, from their journals:",
        "  n1: step 52, last event 10.0 s ago",
        "  n2: last event 40.0 s ago",
        "recent incidents:",
        "  10.0 s ago: n3\\x1b[2J was lost: its lease has ended",
    ]
    journal.emit(JobEnded(outcome="success", reason="all done", exit_code=0))
    with next(tmp_path.glob("n1-*.jsonl")).open("a") as stream:
        stream.write('{"event": "node-lo')
    clock.advance(1)
    worker = Journal(folder=folder, identity={"node": "n2"}, clock=clock, run_id="llama-7")
    worker.locate(lambda: {"generation": 7, "step": 53})
    worker.emit(Waiting(reason="written while it ends"))
    assert last_known(folder, "llama-7", NOW + 41)[0] == (
        "last known: the job has ended, success, 11.0 s ago: all done"
    )
    worker.locate(lambda: {"generation": 8, "step": 54})
    worker.emit(Waiting(reason="started again"))
    assert "step 54 in generation 8" in last_known(folder, "llama-7", NOW + 41)[0]


def test_nodes_that_wait_for_a_complete_replica_are_named(job: Job) -> None:
    for name in ("n1", "n2", "n3"):
        job.put_node(name, None, NodeState.ARRIVED, replica_size=4, min_nodes=4, max_nodes=8)
    assert sentence(job.view()) == (
        "waiting for nodes: 3 of at least 4 have arrived; "
        "n1, n2, n3 wait: 3 of 4 nodes of a replica"
    )
    record = world("n1", "n2", limits=(2, 6), replica_size=2)
    job.put_world(record)
    job.put_progress(3)
    for name in ("n1", "n2"):
        job.put_node(name, record, NodeState.STARTING, replica_size=2)
    job.put_node("n3", None, NodeState.ARRIVED, replica_size=2)
    assert sentence(job.view()).endswith("with 2 of 6 nodes; n3 waits: 1 of 2 nodes of a replica")
    assert "waits:         1 of 2 nodes of a replica" in describe(job.view(), "node", "n3")
    assert "1 of 2 nodes" not in "\n".join(describe(job.view(), "node", "n1"))
    job.put_node("n4", None, NodeState.READY, replica_size=2)
    assert sentence(job.view()).endswith("; n3 is waiting; n4 is about to join")
