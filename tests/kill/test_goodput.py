"""Goodput of a real run, from its journals alone: every second is accounted for, kills too."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_job import TrainingJob, Workload

from elastic.cli.observe.job_view import JobState, JobView, read_job, sentence
from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.telemetry.activities import Activity
from elastic.telemetry.goodput import goodput_of
from elastic.telemetry.journal_reader import read_folder
from elastic.telemetry.merging import merge
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster

WORKLOAD = Workload(epochs=8, step_s=0.1)
# What may be unaccounted for: a worker that is killed has not written down its last window.
UNREPORTED_S = 12.0


def elastic(job: TrainingJob, command: str, *argv: str) -> subprocess.Popen[str]:
    where = (f"--rdzv-endpoint={job.endpoints[0]}", f"--rdzv-id={job.run_id}")
    return subprocess.Popen(
        [sys.executable, "-m", "elastic.cli.main", command, *where, *argv],
        stdout=subprocess.PIPE,
        text=True,
    )


def status(job: TrainingJob) -> JobView:
    return read_job(job.store, job.keys, time.time())


def trains(job: TrainingJob, nodes: int) -> JobView | None:
    """The job as `elastic status` sees it, once it says that so many nodes train."""
    view = status(job)
    is_whole = view.state is JobState.TRAINING and len(view.training) == nodes
    return view if is_whole else None


@pytest.mark.parametrize("mode", ["in-process", "restart"])
def test_the_time_of_a_run_with_kills_is_accounted_for(
    etcd: EmbeddedEtcd, tmp_path: Path, mode: str
) -> None:
    began_s = time.time()
    job = TrainingJob(
        [etcd.endpoint],
        tmp_path,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"mode": mode},
    )
    with job:
        nodes = job.bring_to(3)
        job.wait_progress(10)
        generation = job.generation()
        waiting = elastic(job, "wait", "--for=done", f"--timeout={PATIENCE_S:g}s")
        view = job.wait_for(lambda: trains(job, 3), PATIENCE_S, "status of three nodes")
        assert sentence(view).startswith(f"training in generation {generation} with 3 of 3 nodes")
        nodes[2].kill()
        job.wait_training(nodes=2, after_generation=generation)
        view = job.wait_for(lambda: trains(job, 2), PATIENCE_S, "status of two nodes")
        assert "; node2 was lost " in sentence(view)
        if mode == "in-process":  # agents in restart mode have no link to their workers
            job.wait_for(lambda: (status(job).step or 0) > 10 or None, PATIENCE_S, "the step")
        job.wait_progress(5)
        survivors = job.running
        job.hurry()
        job.wait_for(lambda: not job.running or None, PATIENCE_S, "the end of the job")
        assert [node.exit_code for node in survivors] == [0, 0]
        ledger = job.ledger()
        said, _ = waiting.communicate(timeout=PATIENCE_S)
        assert waiting.returncode == 0
        assert said.startswith("succeeded")
        assert status(job).state is JobState.SUCCEEDED
    ended_s = time.time()

    journal = merge(*read_folder(tmp_path / "journal"))
    found = goodput_of(journal)
    assert found.run_id == job.run_id
    # The whole is the wall time of the job, and the parts are the whole: of the run and each node.
    assert began_s <= found.start_s < found.end_s <= ended_s + 0.1
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=0.01)
    assert {node.node for node in found.nodes} == {"node0", "node1", "node2"}
    for node in found.nodes:
        assert node.breakdown.total_s == pytest.approx(node.end_s - node.start_s, rel=0.01)
    assert found.steps == WORKLOAD.steps
    if mode == "restart":  # it goes on from a checkpoint; in process a step that has begun is lost
        assert found.recomputed_steps == ledger.recomputed_steps
    assert found.breakdown.seconds[Activity.PRODUCTIVE] > WORKLOAD.step_s * 10
    assert found.breakdown.seconds.get(Activity.UNREPORTED, 0.0) < UNREPORTED_S
    assert found.breakdown.seconds[Activity.STARTUP] > 0

    (kill,) = [i for i in found.incidents if i.cause not in ("first", "joined")]
    assert kill.nodes == ("node0", "node1")
    assert generation + 1 in kill.generations
    assert "node2" in kill.reason
    assert 0 < kill.breakdown.total_s <= kill.duration_s * 1.01
    assert any("node2" in note for note in found.notes)
