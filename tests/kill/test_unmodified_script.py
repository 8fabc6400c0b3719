"""An unmodified script, launched with ``--rdzv-backend=etcd``."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import PLAIN, TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S

WORKERS_GONE_S = 4.0  # on an idle machine; the guarantee is 2 s


@pytest.fixture(scope="module")
def jobs(
    etcd: EmbeddedEtcd, start_series: StartSeries, workload: Workload, undisturbed_plain: Path
) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=PLAIN,
            workload=workload,
            # Stock torch's name for its etcd v2 backend, which ours replaces.
            backend="etcd",
            min_nodes=1,
            max_nodes=2,
            conf={"quarantine_s": 60.0},
        ),
        undisturbed_plain,
    )


def test_a_killed_agent_leaves_no_orphans(job: TrainingJob) -> None:
    job.bring_to(2)
    generation = job.generation()
    victim = job.running[-1]
    workers = [p.pid for p in victim.workers().values()]
    assert workers
    victim.kill_agent()
    assert is_within(victim.wait_gone(workers, PATIENCE_S), WORKERS_GONE_S)
    job.wait_training(nodes=1, after_generation=generation)
    job.wait_for(lambda: not victim.processes(), PATIENCE_S, "the end of everything of the node")


def test_a_killed_node_is_excluded_and_replaced(job: TrainingJob) -> None:
    job.bring_to(2)
    generation = job.generation()
    job.node_of_rank(0).kill()
    job.wait_training(nodes=1, after_generation=generation)
    job.bring_to(2)


def test_a_node_with_a_failed_gpu_is_quarantined_and_the_others_continue(job: TrainingJob) -> None:
    """The script is not decorated with @record: its exception is still reported."""
    job.bring_to(2)
    faulty = job.running[-1]
    error = "CUDA error: uncorrectable ECC error encountered"
    generation = job.generation()
    (job.folder / f"fails-{faulty.name}").write_text(error)
    job.wait_training(nodes=1, after_generation=generation)
    (judged,) = (
        event
        for event in read_journal(job.folder / "journal")
        if event["event"] == "failure-judged" and event["generation"] >= generation
    )
    assert (judged["failed"], judged["action"]) == (faulty.name, "exclude-node")
    assert error in judged["evidence"]
    faulty.kill()


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, undisturbed_plain: Path
) -> None:
    job.bring_to(2)
    job.assert_finishes_whole(undisturbed_plain)
