"""Nodes die, leave and join, one after the other, in one job of three nodes on three etcd members.

One cluster for all tests: starting one takes longer than a kill, and a job that survives ten faults
in a row proves more than ten jobs that survive one. Each test starts from three training nodes and
may run alone; one ends the job and verifies the result. The soak test repeats all of it with
processes that start as in production.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from job_series import JobSeries, StartSeries
from training_job import TrainingJob, Workload

from elastic.membership.records import Member
from elastic.store.embedded import EmbeddedCluster
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import Cause

LAST_CALL_S = 20.0
WORKERS_GONE_S = 8.0  # on an idle machine; the guarantee is 2 s. Orphans would stay for minutes.


@pytest.fixture(
    scope="module",
    params=[
        "in-process",
        "restart",
        pytest.param("in-process, cold", marks=pytest.mark.soak),
        pytest.param("restart, cold", marks=pytest.mark.soak),
    ],
)
def jobs(
    request: pytest.FixtureRequest,
    etcd_of_three: EmbeddedCluster,
    start_series: StartSeries,
    workload: Workload,
    undisturbed: Path,
) -> JobSeries[TrainingJob]:
    mode, _, starts = request.param.partition(", ")
    # Cold: every process starts as in production.
    fork_server = None if starts == "cold" else shared_fork_server()
    return start_series(
        lambda folder: TrainingJob(
            etcd_of_three.endpoints,
            folder,
            workload=workload,
            min_nodes=2,
            max_nodes=3,
            # The first world waits this long for its last node, which a busy machine may start
            # late.
            conf={"mode": mode, "last_call_s": LAST_CALL_S},
            fork_server=fork_server,
        ),
        undisturbed,
    )


# In restart mode these are proved by the other tests, too.
RESTARTED_IN_ALL = pytest.mark.parametrize(
    "jobs",
    [
        "in-process",
        pytest.param("restart", marks=pytest.mark.slow),
        pytest.param("in-process, cold", marks=pytest.mark.soak),
        pytest.param("restart, cold", marks=pytest.mark.soak),
    ],
    indirect=True,
)


def members(job: TrainingJob) -> tuple[Member, ...]:
    """The world's nodes in rank order."""
    world = job.world()
    assert world is not None
    return world.members


def is_without(node: LocalNode, cause: Cause, formed: dict[str, Any]) -> bool:
    """Whether this world was formed because of the loss of that node."""
    is_caused = formed["cause"] == cause.value and node.name in formed["reason"]
    return is_caused and node.name not in formed["nodes"]


def bystander(job: TrainingJob) -> LocalNode:
    """A node that neither leads nor runs rank 0."""
    special = {job.leader().name, job.node_of_rank(0).name}
    return next(node for node in job.running if node.name not in special)


@RESTARTED_IN_ALL
def test_a_job_starts_immediately_with_max_nodes(jobs: JobSeries[TrainingJob]) -> None:
    job = jobs.fresh()
    nodes = job.bring_to(3)
    world = job.world()
    assert world is not None
    assert world.generation == 1
    assert world.cause is Cause.FIRST
    assert {m.name for m in world.members} == {n.name for n in nodes}


def test_a_killed_worker_is_replaced_on_its_node(job: TrainingJob, nodes: list[LocalNode]) -> None:
    generation = job.generation()
    victim = bystander(job)
    victim.kill_worker()
    job.wait_training(nodes=3, after_generation=generation)
    assert job.running == nodes
    assert victim.workers()


@RESTARTED_IN_ALL
def test_workers_end_with_a_killed_agent(job: TrainingJob, nodes: list[LocalNode]) -> None:
    generation = job.generation()
    victim = bystander(job)
    workers = [p.pid for p in victim.workers().values()]
    victim.kill_agent()
    assert is_within(victim.wait_gone(workers, PATIENCE_S), WORKERS_GONE_S)
    job.wait_training(nodes=2, after_generation=generation)
    job.wait_for(lambda: not victim.processes(), PATIENCE_S, "the end of everything of the node")


@RESTARTED_IN_ALL
def test_a_dead_etcd_member_does_not_prevent_recovery_from_a_killed_node(
    job: TrainingJob, nodes: list[LocalNode], etcd_of_three: EmbeddedCluster
) -> None:
    generation = job.generation()
    etcd_of_three.members[0].kill()
    try:
        job.wait_progress(10)
        assert job.training_nodes()[0] == job.generation() == generation
        # Two of three members suffice for the next change.
        victim, began_s = bystander(job), time.monotonic()
        victim.kill()
        job.wait_training(nodes=2, after_generation=generation)
    finally:
        etcd_of_three.members[0].start()
    job.wait_event("world-formed", partial(is_without, victim, Cause.LOST), since_s=began_s)


@RESTARTED_IN_ALL
def test_a_new_node_joins_the_world(job: TrainingJob) -> None:
    job.bring_to(2)
    generation = job.generation()
    seniors = [m.name for m in members(job)]
    joining_node = job.start_node()
    job.wait_training(nodes=3, after_generation=generation)
    assert [m.name for m in members(job)] == [*seniors, joining_node.name]


@pytest.mark.parametrize(
    # In restart mode the leader is usually on the node of rank 0, whose death is tested below.
    "jobs",
    ["in-process", pytest.param("restart", marks=pytest.mark.soak)],
    indirect=True,
)
def test_the_job_survives_the_death_of_the_leader(job: TrainingJob, nodes: list[LocalNode]) -> None:
    generation = job.generation()
    victim = job.leader()
    victim.kill()
    job.wait_training(nodes=2, after_generation=generation)
    assert job.leader() is not victim


def test_the_job_survives_the_death_of_the_node_of_rank_0(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    generation = job.generation()
    order = [m.name for m in members(job)]
    job.node_of_rank(0).kill()
    job.wait_training(nodes=2, after_generation=generation)
    # Survivors keep their order: the most senior one is now rank 0.
    assert [m.name for m in members(job)] == order[1:]


def test_a_terminated_node_exits_with_75(job: TrainingJob, nodes: list[LocalNode]) -> None:
    generation, began_s = job.generation(), time.monotonic()
    victim = bystander(job)
    victim.terminate()
    assert victim.wait(PATIENCE_S) == 75
    job.wait_training(nodes=2, after_generation=generation)
    job.wait_event("world-formed", partial(is_without, victim, Cause.LEFT), since_s=began_s)
    job.wait_for(lambda: not victim.processes(), PATIENCE_S, "the end of the node's processes")


@RESTARTED_IN_ALL
def test_the_job_ends_correctly_and_a_late_node_exits_without_training(
    job: TrainingJob, nodes: list[LocalNode], undisturbed: Path
) -> None:
    job.assert_finishes_whole(undisturbed)
    steps = len(job.ledger().steps)
    late = job.start_node("late")
    assert late.wait(PATIENCE_S) == 0, late.log_tail()
    assert len(job.ledger().steps) == steps
    job.assert_nothing_left(PATIENCE_S)
