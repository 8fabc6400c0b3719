"""Replicas of sharded models: one dies, the others go on in process, and it receives its shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "paced_run.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
# Float64: what the final weights differ by more than 1e-12 was lost, repeated or torn.
WORKLOAD = Workload(
    samples=500,
    batch=22,  # does not divide by the ranks: their shares differ
    epochs=10,
    step_s=0.4,
    save_every=50,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1", "--precision=fp64"),
)


def pids(node: LocalNode) -> list[int]:
    return [worker.pid for _, worker in sorted(node.workers().items())]


def events(job: TrainingJob, name: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(job.folder / "journal") if event["event"] == name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alone = replace(WORKLOAD, extra=(*WORKLOAD.extra, "--shard=1"))
    return train_undisturbed(tmp_path_factory.mktemp("hsdp-alone"), alone, SCRIPT)


def test_a_rank_and_then_a_node_die_and_another_leaves_while_one_replica_stays(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path
) -> None:
    """Two nodes of two workers: each node is a replica."""
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", script=SCRIPT, workload=WORKLOAD, nproc=2
    ) as job:
        harmed, other = job.start_nodes(2)
        generation = job.wait_training(nodes=2)
        before, replaced = pids(other), pids(harmed)
        harmed.kill_worker(1)
        generation = job.wait_training(nodes=2, after_generation=generation + 1)
        assert pids(other) == before
        assert not set(replaced) & set(pids(harmed))  # both ranks of the replica are new
        assert sorted(e["source"] for e in events(job, "state-received")) == [0, 1]
        # Each position by itself: rank 2 from rank 0, rank 3 from rank 1.
        assert sorted(e["receivers"] for e in events(job, "state-sent")) == [[2], [3]]
        survivor, before = harmed, pids(harmed)
        other.kill()
        generation = job.wait_training(nodes=1, after_generation=generation)
        assert pids(survivor) == before
        leaver = job.start_node()
        generation = job.wait_training(nodes=2, after_generation=generation)
        leaver.terminate()
        assert leaver.wait(PATIENCE_S) == 75
        job.wait_training(nodes=1, after_generation=generation)
        assert pids(survivor) == before
        assert {e["source"] for e in events(job, "state-restored")} == {"initial"}
        job.assert_finishes_whole(undisturbed)


def test_replicas_of_one_node_die_alone_and_then_all_at_once(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path
) -> None:
    """Four workers of one node are two replicas. The harmed one is replaced in place; with both
    harmed, nobody has the state, and the job goes on from its newest checkpoint."""
    workload = replace(WORKLOAD, save_every=5)
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", script=SCRIPT, workload=workload, nproc=4
    ) as job:
        (node,) = job.start_nodes(1)
        generation = job.wait_training(nodes=1)
        before = pids(node)
        node.kill_worker(3)
        generation = job.wait_training(nodes=1, after_generation=generation)
        after = pids(node)
        assert after[:2] == before[:2]
        assert not set(after[2:]) & set(before)
        assert len(events(job, "worker-replaced")) == 2
        job.wait_for(lambda: events(job, "checkpoint-saved") or None, PATIENCE_S, "a checkpoint")
        node.kill_worker(0)
        node.kill_worker(2)
        job.wait_training(nodes=1, after_generation=generation)
        assert not set(after) & set(pids(node))
        restored = [e["source"] for e in events(job, "state-restored")]
        assert len([name for name in restored if name != "initial"]) == 4
        job.assert_finishes_whole(undisturbed)
