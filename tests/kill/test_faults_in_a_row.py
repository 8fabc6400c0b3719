"""Faults during a recovery, and faults without a death."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.faults import (
    AfterSteps,
    AtGeneration,
    Bystanders,
    Everyone,
    Injection,
    Kill,
    KillWorker,
    Named,
    OfRank,
    Stop,
)
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs(
    etcd: EmbeddedEtcd, start_series: StartSeries, workload: Workload, undisturbed: Path
) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            workload=workload,
            min_nodes=1,
            max_nodes=3,
            conf={"mode": "restart"},  # forming a world takes seconds, so faults can overlap
        ),
        undisturbed,
    )


def test_the_job_survives_simultaneous_deaths_of_all_workers(job: TrainingJob) -> None:
    nodes = job.bring_to(3)
    generation = job.generation()
    Injection(KillWorker(Everyone())).run(job)
    job.wait_training(nodes=3, after_generation=generation)
    assert job.running == nodes


def test_a_node_death_during_a_group_build_is_survived(job: TrainingJob) -> None:
    job.bring_to(3)
    generation = job.generation()
    Injection(KillWorker(OfRank(0)), AfterSteps(2)).run(job)
    Injection(Kill(Bystanders()), AtGeneration(generation + 1)).run(job)
    # In the following world; or in that one, if the killed node was late for it.
    names = {node.name for node in job.running}
    job.wait_for(
        lambda: job.training_nodes()[0] > generation and job.training_nodes()[1] == names,
        PATIENCE_S,
        f"{sorted(names)} training",
    )


def test_a_frozen_node_is_excluded_and_rejoins(job: TrainingJob) -> None:
    job.bring_to(3)
    generation = job.generation()
    (frozen,) = Bystanders().find(job)
    Injection(Stop(Named((frozen.name,))), AfterSteps(2)).run(job)
    # No connection is refused or closed: its lease decides.
    generation = job.wait_training(nodes=2, after_generation=generation)
    frozen.resume()
    job.wait_training(nodes=3, after_generation=generation)
    assert frozen.running


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, undisturbed: Path
) -> None:
    job.bring_to(3)
    job.assert_finishes_whole(undisturbed)
