"""A single etcd member stops and restarts, with and without its data: training continues."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S

# Many times the lease (4 s), and the longest wait between two attempts to reach etcd.
OUTAGE_S = 20.0
LONG_OUTAGE_S = 60.0
# On an idle machine. The guarantee is 2 s (benchmarks/recovery.py measures it); a survivor that
# does not notice the return of etcd waits for half of the takeover time, which is minutes.
RECOVERED_S = 20.0


@pytest.fixture(scope="module")
def jobs(
    etcd: EmbeddedEtcd, start_series: StartSeries, workload: Workload, undisturbed: Path
) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint], folder, workload=workload, min_nodes=1, max_nodes=3
        ),
        undisturbed,
    )


def train_through_an_outage(job: TrainingJob, etcd: EmbeddedEtcd, outage_s: float) -> None:
    """Kill etcd, continue training without it for ``outage_s``, and start it with its data."""
    etcd.kill()
    try:
        until = time.monotonic() + outage_s
        job.wait_progress(3)
        train_until(job, until)
    finally:
        etcd.start()


def train_until(job: TrainingJob, until: float) -> None:
    """Training continues: a step that waited for etcd would not end, since etcd is not started."""
    while time.monotonic() < until:
        job.wait_progress(1)


def assert_no_generation_was_spent(job: TrainingJob, generation: int) -> None:
    """The agents have reconnected, and formed no new world."""
    # Longer than every lease from before the outage: the eviction of a node with a lost lease would
    # be visible now.
    train_until(job, time.monotonic() + 6.0)
    world = job.world()
    assert world is not None
    assert world.generation == generation
    assert job.training_nodes()[0] == generation
    # Every agent registers again if its lease has ended.
    members = {member.name for member in world.members}
    job.wait_for(lambda: job.registered() == members, PATIENCE_S, f"{members}, and no other key")
    assert job.generation() == generation


def test_training_continues_while_etcd_restarts_with_its_data(
    job: TrainingJob, etcd: EmbeddedEtcd
) -> None:
    job.bring_to(3)
    generation = job.generation()
    train_through_an_outage(job, etcd, outage_s=0.0)
    assert_no_generation_was_spent(job, generation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "outage_s", [OUTAGE_S, pytest.param(LONG_OUTAGE_S, marks=pytest.mark.soak)]
)
def test_a_node_death_during_a_long_etcd_outage_pauses_the_job(
    job: TrainingJob, etcd: EmbeddedEtcd, outage_s: float
) -> None:
    """No step waits for etcd. A recovery does: the survivors pause only until etcd is back."""
    nodes = job.bring_to(3)
    generation = job.generation()
    survivors = {node.name: node.workers()[0].pid for node in nodes[:-1]}
    etcd.kill()
    try:
        train_until(job, time.monotonic() + outage_s)
        assert job.training_nodes()[0] == generation
        nodes[-1].kill()
    finally:
        etcd.start()
    back_s = time.monotonic()
    job.wait_training(nodes=2, after_generation=generation)
    joined = job.wait_event("world-joined", lambda e: e["generation"] > generation)
    assert is_within(joined["monotonic"] - back_s, RECOVERED_S)
    assert {n.name: n.workers()[0].pid for n in job.running} == survivors


@pytest.mark.slow
def test_a_joining_node_registers_although_etcd_is_wiped(
    job: TrainingJob, etcd: EmbeddedEtcd
) -> None:
    job.bring_to(2)
    generation = job.generation()
    joining_node = job.start_node()
    job.wait_for(lambda: joining_node.name in job.registered(), PATIENCE_S, "its key")
    etcd.wipe()
    etcd.start()
    new = job.wait_training(nodes=3, after_generation=generation)
    assert new > generation
    assert joining_node.name in job.training_nodes()[1]


def test_the_running_world_survives_a_wipe_of_etcd(job: TrainingJob, etcd: EmbeddedEtcd) -> None:
    job.bring_to(3)
    generation = job.generation()
    etcd.wipe()
    etcd.start()
    job.wait_progress(3)
    # The leader adopts the world that its members run: generations never decrease.
    adopted = job.wait_generation(generation)
    assert adopted.generation >= generation
    assert len(adopted.members) == 3
    job.running[-1].kill()
    job.wait_training(nodes=2, after_generation=adopted.generation)


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, undisturbed: Path
) -> None:
    job.bring_to(2)
    job.assert_finishes_whole(undisturbed)
