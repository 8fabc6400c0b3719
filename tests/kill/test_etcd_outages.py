"""A single etcd member goes away and comes back, with its data and without: training goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import TrainingJob, Workload

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster

# Many times the lease (4 s), and the longest wait between two attempts to reach etcd.
OUTAGE_S = 20.0
LONG_OUTAGE_S = 60.0
# On an idle machine. Promised are 2 s (benchmarks/recovery.py measures it); a survivor that does
# not notice that etcd is back waits for half of the takeover time, minutes.
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
    """Kill etcd, train on without it for ``outage_s``, start it with its data."""
    etcd.kill()
    try:
        until = time.monotonic() + outage_s
        job.wait_progress(3)
        train_until(job, until)
    finally:
        etcd.start()


def train_until(job: TrainingJob, until: float) -> None:
    """Training does not stop: a step that waited for etcd would not end, since nobody starts it."""
    while time.monotonic() < until:
        job.wait_progress(1)


def assert_no_generation_was_spent(job: TrainingJob, generation: int) -> None:
    """The agents are back in touch, and found nothing to change."""
    # Longer than every lease that began before the outage: a node that had lost its own, and
    # was thrown out for it, would show now.
    train_until(job, time.monotonic() + 6.0)
    world = job.world()
    assert world is not None
    assert world.generation == generation
    assert job.training_nodes()[0] == generation
    # Every agent registers again if its lease has ended.
    members = {member.name for member in world.members}
    job.wait_for(lambda: job.registered() == members, PATIENCE_S, f"{members}, and no other key")
    assert job.generation() == generation


def test_etcd_restarts_with_its_data(job: TrainingJob, etcd: EmbeddedEtcd) -> None:
    job.bring_to(3)
    generation = job.generation()
    train_through_an_outage(job, etcd, outage_s=0.0)
    assert_no_generation_was_spent(job, generation)


@pytest.mark.parametrize(
    "outage_s", [OUTAGE_S, pytest.param(LONG_OUTAGE_S, marks=pytest.mark.soak)]
)
def test_etcd_is_down_for_many_leases_and_a_node_dies_meanwhile(
    job: TrainingJob, etcd: EmbeddedEtcd, outage_s: float
) -> None:
    """No step waits for etcd. A death does: the survivors pause until etcd is back, no longer."""
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


def test_etcd_is_wiped_while_a_joining_node_registers(job: TrainingJob, etcd: EmbeddedEtcd) -> None:
    job.bring_to(2)
    generation = job.generation()
    joining_node = job.start_node()
    job.wait_for(lambda: joining_node.name in job.registered(), PATIENCE_S, "its key")
    etcd.wipe()
    etcd.start()
    new = job.wait_training(nodes=3, after_generation=generation)
    assert new > generation
    assert joining_node.name in job.training_nodes()[1]


def test_etcd_is_wiped(job: TrainingJob, etcd: EmbeddedEtcd) -> None:
    job.bring_to(3)
    generation = job.generation()
    etcd.wipe()
    etcd.start()
    job.wait_progress(3)
    # The leader adopts the world that its members run: generations never go back.
    adopted = job.wait_generation(generation)
    assert adopted.generation >= generation
    assert len(adopted.members) == 3
    job.running[-1].kill()
    job.wait_training(nodes=2, after_generation=adopted.generation)


def test_the_job_ends_as_if_nothing_had_happened(job: TrainingJob, undisturbed: Path) -> None:
    job.bring_to(2)
    job.assert_finishes_whole(undisturbed)
