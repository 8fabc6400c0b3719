"""Jobs that end prematurely, and the checkpoints that they leave on disk."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.journal import read_journal
from elastic.testing.ledger import read_ledger
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S, eventually

SCRIPT = SCRIPTS / "saving.py"
# Only the end of a job saves a checkpoint.
WORKLOAD = Workload(samples=240, epochs=400, step_s=0.05, save_every=100_000)


def newest_step(folder: Path) -> int:
    return max((i.step for i in checkpoints.list_checkpoints(folder / "checkpoints")), default=0)


def alone(folder: Path, name: str) -> LocalNode:
    """The script as plain python, without any launcher."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC", "TORCHELASTIC"))}
    env |= {
        "ELASTIC_CHECKPOINTS": str(folder / "checkpoints"),
        "ELASTIC_LEDGER": str(folder / "ledger"),
        "ELASTIC_NODE_NAME": name,
        "OMP_NUM_THREADS": "1",
    }
    (folder / "ledger").mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), *WORKLOAD.arguments(folder)]
    log, token = folder / f"{name}.log", uuid.uuid4().hex
    return LocalNode(name, command, env, token, log, fork_server=shared_fork_server())


def done(folder: Path) -> int:
    """Steps that have taken effect."""
    return read_ledger(folder / "ledger").last_step + 1


def test_a_leave_and_an_exhausted_failure_budget_leave_a_checkpoint(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPT,
        # Few steps between two deaths, or the failure budget recovers; and the notice that a node
        # leaves must reach all ranks within the two steps before the switch, even on a busy
        # machine.
        workload=replace(WORKLOAD, step_s=0.8),
        min_nodes=1,
        max_nodes=4,
        conf={"failure_budget": 1},
    ) as job:
        nodes = job.bring_to(4)
        first = job.node_of_rank(0)
        leaver, *victims = [node for node in nodes if node is not first]
        job.wait_progress(3)  # before the step rate is known, the switch does not wait
        generation = job.generation()
        leaver.terminate()
        assert leaver.wait(PATIENCE_S) == 75
        generation = job.wait_training(nodes=3, after_generation=generation)
        (noticed,) = eventually(
            lambda: checkpoints.list_checkpoints(tmp_path / "checkpoints"), "a checkpoint"
        )
        assert noticed.world_size == 4, "the policy saves when a node is asked to go"

        victims[0].kill_worker()
        # With two nodes, and with three again once its worker is back.
        job.wait_for(lambda: job.training_nodes()[0] > generation, PATIENCE_S, "the next world")
        assert newest_step(tmp_path) == noticed.step
        victims[1].kill_worker()
        codes = {node.wait(PATIENCE_S) for node in nodes if node is not leaver}
        assert codes == {70}, job.report()
        assert newest_step(tmp_path) == job.ledger().last_step + 1
        assert_failure_timeline(job, leaver, victims[:2])


@pytest.mark.slow
def test_a_notice_that_is_too_late_for_the_control_flags_leaves_a_checkpoint(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """All ranks know of it only at the boundary at which the node leaves."""
    workload = replace(WORKLOAD, step_s=0.5)
    (tmp_path / "late-notice").touch()
    with TrainingJob([etcd.endpoint], tmp_path, script=SCRIPT, workload=workload) as job:
        job.bring_to(3)
        leaver = next(node for node in job.running if node is not job.node_of_rank(0))
        job.wait_progress(3)
        generation = job.generation()
        leaver.terminate()
        assert leaver.wait(PATIENCE_S) == 75
        job.wait_training(nodes=2, after_generation=generation)
        (noticed,) = eventually(
            lambda: checkpoints.list_checkpoints(tmp_path / "checkpoints"), "a checkpoint"
        )
        starts = [s for s in job.ledger().starts if s.generation > generation]
        assert noticed.world_size == 3 and {s.step for s in starts} == {noticed.step}
        assert job.journaled("world-fault") == []


def assert_failure_timeline(job: TrainingJob, leaver: LocalNode, victims: list[LocalNode]) -> None:
    """The same timeline in the last error of each agent, in its journal and in a file."""
    written = [
        event
        for event in read_journal(job.folder / "journal")
        if event["event"] == "failure-timeline-written"
    ]
    assert {e["node"] for e in written} == {n.name for n in job.nodes if n is not leaver}
    (page,) = {event["timeline"] for event in written}
    for event in written:
        assert Path(event["report"]).read_text() == page + "\n"
        log = job.node(event["node"]).log_text()
        assert page in log and f"(this page is {event['report']})" in log
    assert "exit code 70" in page and "What to do next" in page
    # In order: the node that left, the nodes whose workers were killed, the step, and the action
    # taken.
    killed = (f"{victim.name}: local rank 0 (pid " for victim in victims)
    output = [f"{leaver.name}: left", *killed, "action: ended the job with exit code 70"]
    places = [page.index(f"    {text}") for text in output]
    assert places == sorted(places), page
    assert "step not known" not in page[page.index(f"    {victims[0].name}: local rank") :]


def test_plain_python_saves_on_sigterm_and_resumes(tmp_path: Path) -> None:
    first = alone(tmp_path, "first")
    eventually(lambda: done(tmp_path) > 5, "steps")
    first.terminate()
    assert first.wait(PATIENCE_S) == 128 + signal.SIGTERM
    at = done(tmp_path)
    assert newest_step(tmp_path) == at
    second = alone(tmp_path, "second")
    try:
        eventually(lambda: done(tmp_path) > at, "the second life")
        starts = read_ledger(tmp_path / "ledger").starts
        assert [s.step for s in starts] == [0, at]
    finally:
        second.kill()


@pytest.mark.slow
def test_a_second_job_in_the_same_checkpoint_folder_is_rejected(tmp_path: Path) -> None:
    first = alone(tmp_path, "first")
    try:
        eventually(lambda: done(tmp_path) > 2, "steps")
        second = alone(tmp_path, "second")
        assert second.wait(PATIENCE_S) == 2
        output = second.log_text()
        assert f"another job saves to {tmp_path / 'checkpoints'}" in output
        assert "on node first" in output
    finally:
        first.kill()
    # It is dead: the next job does not have to wait.
    lives = len(read_ledger(tmp_path / "ledger").starts)
    third = alone(tmp_path, "third")
    try:
        eventually(lambda: len(read_ledger(tmp_path / "ledger").starts) > lives, "the third life")
    finally:
        third.kill()


def test_a_job_that_is_started_twice_with_separate_etcds_trains_once(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """By mistake, from two places: with one run id, into one checkpoint folder."""

    def start(server: EmbeddedEtcd) -> TrainingJob:
        return TrainingJob(
            [server.endpoint],
            tmp_path,
            script=SCRIPT,
            workload=WORKLOAD,
            run_id="twin",
            max_nodes=1,
            max_restarts=0,
        )

    with start(etcd) as first, EmbeddedEtcd() as other, start(other) as second:
        first.start_node("first")
        first.wait_progress(2)
        refused = second.start_node("second")
        assert refused.wait(PATIENCE_S) != 0
        log = refused.log_text()
        assert f"another job saves to {tmp_path / 'checkpoints'}" in log
        assert "on node first" in log
        first.wait_progress(2)
        assert {start.node for start in first.ledger().starts} == {"first"}
