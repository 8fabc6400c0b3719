"""Replicas of sharded models: one dies, the others continue in-process and send it its shards."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from state_moves import wait_moved
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "paced_run.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
# Float64: a difference in the final weights above 1e-12 was lost, repeated or torn.
WORKLOAD = Workload(
    samples=250,
    batch=22,  # not divisible by the number of ranks: uneven shares
    epochs=7,
    step_s=0.8,
    save_every=50,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1", "--precision=fp64"),
)


def pids(node: LocalNode) -> list[int]:
    return [worker.pid for _, worker in sorted(node.workers().items())]


def kill_at_once(workers: list[int], node: LocalNode) -> None:
    """Kill them while their agent is stopped, so that it replaces none before all are dead."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.kill(node.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alone = replace(WORKLOAD, extra=(*WORKLOAD.extra, "--shard=1"))
    return train_undisturbed(tmp_path_factory.mktemp("hsdp-alone"), alone, SCRIPT)


def test_single_node_replicas_survive_deaths_and_leaves(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path
) -> None:
    """Two nodes of two workers: each node is a replica."""
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", script=SCRIPT, workload=WORKLOAD, nproc=2, max_nodes=2
    ) as job:
        harmed, other = job.start_nodes(2)
        generation = job.wait_training(nodes=2)
        before, replaced, since_s = pids(other), pids(harmed), time.monotonic()
        harmed.kill_worker(1)
        job.wait_for(
            lambda: len(set(pids(harmed)) - set(replaced)) == 2,
            PATIENCE_S,
            "two new ranks of the replica",
        )
        generation = job.wait_training(nodes=2, after_generation=generation)
        assert pids(other) == before
        # Each position separately: rank 2 from rank 0, rank 3 from rank 1.
        wait_moved(job, [(0, [2]), (1, [3])], since_s)
        survivor, before = harmed, pids(harmed)
        other.kill()
        generation = job.wait_training(nodes=1, after_generation=generation)
        assert pids(survivor) == before
        leaver = job.start_node()
        generation = job.wait_training(nodes=2, after_generation=generation)
        leaver.terminate()
        assert leaver.wait(PATIENCE_S) == 75
        generation = job.wait_training(nodes=1, after_generation=generation)
        assert pids(survivor) == before
        assert {e["source"] for e in job.journaled("state-restored")} == {"initial"}
        # The only replica: no other rank has the state, so it is saved when the replica leaves.
        survivor.terminate()
        assert survivor.wait(PATIENCE_S) == 75
        saved = checkpoints.list_checkpoints(job.folder / "checkpoints")[0].step
        assert saved == job.ledger().last_step + 1
        job.start_node()
        job.wait_training(nodes=1, after_generation=generation)
        assert {e["step"] for e in job.journaled("state-restored")[-2:]} == {saved}
        job.assert_finishes_whole(undisturbed)


def test_two_replicas_of_one_node_survive_single_and_joint_deaths(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path
) -> None:
    """Four workers of one node form two replicas. A broken one is replaced in place; if both are
    broken, no rank has the state, and the job resumes from its newest checkpoint.
    """
    workload = replace(WORKLOAD, save_every=5)
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", script=SCRIPT, workload=workload, nproc=4, max_nodes=1
    ) as job:
        (node,) = job.start_nodes(1)
        generation = job.wait_training(nodes=1)
        before = pids(node)
        node.kill_worker(3)
        generation = job.wait_training(nodes=1, after_generation=generation)
        after = pids(node)
        assert len(after) == 4
        assert after[:2] == before[:2]
        assert not set(after[2:]) & set(before)
        job.wait_for(
            lambda: len(job.journaled("worker-replaced")) == 2, PATIENCE_S, "an account of both"
        )
        job.wait_event("checkpoint-saved")
        kill_at_once([after[0], after[2]], node)
        job.wait_training(nodes=1, after_generation=generation)
        assert not set(after) & set(pids(node))
        restored = [e["source"] for e in job.journaled("state-restored")]
        assert len([name for name in restored if name != "initial"]) == 4
        job.assert_finishes_whole(undisturbed)
