"""Network failures that neither end of a connection observes: one node's packets to its peers, to
etcd, or to both are dropped, in one direction, in part, delayed, or for established connections
only.

The others continue or wait, two worlds never make progress at once, and every node rejoins once its
network is healed. docs/explanation/partitions.md has the measured times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from kit.network.emulated import why_unavailable
from network_job import LEASE_S, NODES, SCRIPT, SILENCE_S, WORKLOAD, NetworkJob
from training_job import train_undisturbed

from elastic.errors import Preempted
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within, measure_slowness
from elastic.testing.waiting import PATIENCE_S

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

SHORT_S, LONG_S = 5.0, 60.0
# From the fault to the next step, on an idle machine, if the partition is not healed. A broken
# connection between two reachable machines is detected in SILENCE_S; after two more, one of them is
# excluded. An isolated leader waits for a lease before it hands over.
# Both allow for a machine that is busy with other tests: without the tested feature, the first
# takes half an hour, the second never ends.
FOUND_WITHIN_S = SILENCE_S + 15.0
LEFT_OUT_WITHIN_S = 6 * SILENCE_S + 45.0
TAKEOVER_S = 20.0
# Longer than the lease of a node and the time after which a spare campaigns, together.
LONG_STEP_S = 10.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("network-alone"), WORKLOAD, SCRIPT)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries, reference: Path) -> JobSeries[NetworkJob]:
    return start_series(lambda folder: NetworkJob(etcd.endpoint, folder), reference)


@pytest.fixture
def job(jobs: JobSeries[NetworkJob]) -> NetworkJob:
    return jobs.current()


@pytest.fixture
def nodes(job: NetworkJob) -> list[LocalNode]:
    job.network.heal()  # left over from a failed test
    return job.bring_to(NODES)


def pids(job: NetworkJob, but: LocalNode | None = None) -> dict[str, int]:
    return {node.name: node.workers()[0].pid for node in job.running if node is not but}


# A fault of one node's network: the packets lost.
Fault = Callable[[NetworkJob, LocalNode], object]


def peers(job: NetworkJob, node: LocalNode) -> None:
    job.network.cut(job.address(node), *job.peers(node))


def etcd_only(job: NetworkJob, node: LocalNode) -> None:
    job.network.cut(job.address(node), job.network.host)


def both(job: NetworkJob, node: LocalNode) -> None:
    job.network.cut(job.address(node), *job.everybody_else(node))


def sent(job: NetworkJob, node: LocalNode) -> None:
    for other in job.everybody_else(node):
        job.network.drop(job.address(node), other)


def received(job: NetworkJob, node: LocalNode) -> None:
    for other in job.everybody_else(node):
        job.network.drop(other, job.address(node))


def loss(job: NetworkJob, node: LocalNode) -> None:
    job.network.degrade(job.address(node), *job.everybody_else(node), loss=0.3)


def delay(job: NetworkJob, node: LocalNode) -> None:
    job.network.degrade(job.address(node), *job.everybody_else(node), delay_s=0.2)


FAULTS = (peers, etcd_only, both, sent, received, loss, delay)


@pytest.mark.slow
def test_dropped_connections_are_reestablished(job: NetworkJob, nodes: list[LocalNode]) -> None:
    """Connections of gloo, the leader and etcd: new ones work. No process exits."""
    victim, workers = job.bystanders()[0], pids(job)
    generation, began_s = job.generation(), time.time()
    assert job.network.drop_established(job.address(victim), *job.everybody_else(victim)) > 0
    job.wait_training(nodes=NODES, after_generation=generation)
    job.wait_all_train(since_s=time.time())
    assert is_within(job.longest_pause_s(since_s=began_s), FOUND_WITHIN_S)
    assert pids(job) == workers and job.running == nodes


@pytest.mark.slow
def test_a_partition_from_etcd_interrupts_no_step(job: NetworkJob, nodes: list[LocalNode]) -> None:
    victim, workers = job.bystanders()[0], pids(job)
    with job.healed_after(SHORT_S):
        etcd_only(job, victim)
    assert pids(job) == workers and job.running == nodes


@pytest.mark.slow
def test_a_partition_between_two_followers_does_not_stop_the_job(
    job: NetworkJob, nodes: list[LocalNode]
) -> None:
    """Both reach etcd and the leader, which cannot observe the fault."""
    leader = job.leader()
    one, other = (node for node in nodes if node is not leader)
    generation, began_s = job.generation(), time.time()
    job.network.cut(job.address(one), job.address(other))
    job.wait_training(nodes=NODES - 1, after_generation=generation)
    assert leader.name in job.training_nodes()[1]
    assert is_within(job.longest_pause_s(since_s=began_s), LEFT_OUT_WITHIN_S)
    job.network.heal()
    job.wait_all_train(since_s=time.time())
    assert job.running == nodes


@pytest.mark.slow
def test_a_leader_partitioned_from_its_peers_hands_over(
    job: NetworkJob, nodes: list[LocalNode]
) -> None:
    """It reaches etcd, so its lease does not expire; and it cannot form a world alone."""
    leader = job.leader()
    began_s = time.time()
    peers(job, leader)
    job.wait_trains_without(leader, since_s=began_s)
    assert is_within(job.longest_pause_s(since_s=began_s), LEFT_OUT_WITHIN_S)
    job.network.heal()
    job.wait_all_train(since_s=time.time())
    assert job.running == nodes


@pytest.mark.slow
def test_a_spare_replaces_a_member_that_only_etcd_reaches(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """It renews its lease, and the world needs all of its nodes: nobody can train without the
    spare."""
    with NetworkJob(etcd.endpoint, tmp_path, members=NODES - 1) as job:
        members = job.bring_to(NODES - 1)
        spare = job.start_node()
        job.wait_for(lambda: spare.name in job.ready(), PATIENCE_S, "the workers of the spare")
        leader = job.leader()
        (silent,) = (node for node in members if node is not leader)
        began_s = time.time()
        peers(job, silent)
        job.wait_trains_without(silent, since_s=began_s)
        assert is_within(job.longest_pause_s(since_s=began_s), LEFT_OUT_WITHIN_S)
        assert silent.running, "and its lease is renewed"
        assert silent.name in job.registered()
        job.ledger().assert_one_world_at_a_time()


@pytest.mark.slow
def test_a_spare_does_not_train_beside_a_leaving_node_that_has_lost_etcd(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """The only member is asked to leave at a step. Its lease ends long before that step does, and
    nothing but the world tells the spare that it still trains."""
    workload = replace(WORKLOAD, step_s=LONG_STEP_S)
    with NetworkJob(etcd.endpoint, tmp_path, members=1, workload=workload) as job:
        (member,) = job.bring_to(1)
        spare = job.start_node()
        job.wait_for(lambda: spare.name in job.registered(), PATIENCE_S, "the spare's key")
        job.wait_progress(1)  # of which the duration is known
        member.terminate()
        job.wait_for(lambda: not members_of(job), PATIENCE_S, "a world without members")
        both(job, member)
        why = "were leaving when the leases expired"
        job.wait_event("waiting", lambda e: e["node"] == spare.name and why in e["reason"])
        assert members_of(job) == []
        job.network.heal()
        assert member.wait(PATIENCE_S) == Preempted.exit_code
        job.wait_for(lambda: members_of(job) == [spare.name], PATIENCE_S, "the spare's world")
        job.wait_progress(1)
        job.ledger().assert_one_world_at_a_time()


def members_of(job: NetworkJob) -> list[str]:
    world = job.world()
    return [member.name for member in world.members] if world is not None else []


@pytest.mark.soak
@pytest.mark.parametrize("hold_s", [SHORT_S, LONG_S])
@pytest.mark.parametrize("who", ["bystander", "leader"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_node_rejoins_after_its_network_is_healed(
    job: NetworkJob,
    nodes: list[LocalNode],
    reference: Path,
    fault: Fault,
    who: str,
    hold_s: float,
) -> None:
    victim = job.leader() if who == "leader" else job.bystanders()[0]
    with job.healed_after(hold_s) as began_s:
        fault(job, victim)
    assert job.running == nodes
    pause_s = job.longest_pause_s(since_s=began_s)
    print(f"{fault.__name__} of the {who}, {hold_s:g} s: no step for {pause_s:.1f} s")
    if fault in (etcd_only, delay):
        assert is_within(pause_s, FOUND_WITHIN_S)
    elif fault is not loss:  # the length of a burst of losses is random
        assert is_within(pause_s, LEFT_OUT_WITHIN_S)
    job.assert_finishes_whole(reference)  # a single job for all of them would finish early


@pytest.mark.soak
def test_workers_of_an_isolated_node_stop_within_the_takeover_time(
    etcd: EmbeddedEtcd, tmp_path: Path, reference: Path
) -> None:
    slowness = measure_slowness()
    with NetworkJob(etcd.endpoint, tmp_path, takeover_s=TAKEOVER_S) as job:
        job.bring_to(NODES)
        victim = job.bystanders()[0]
        workers, began_s = [p.pid for p in victim.processes()], time.time()
        both(job, victim)
        job.wait_trains_without(victim, since_s=began_s)
        victim.wait_gone(workers, (TAKEOVER_S + LEASE_S) * slowness)
        assert victim.wait(LEASE_S * slowness) not in (0, 75)
        assert "no contact with etcd" in victim.log_text()
        job.network.heal()
        job.start_node()
        job.wait_all_train(since_s=time.time())
        job.assert_finishes_whole(reference)
