"""Two loaders in one loop, with weighted sampling and counted steps, across a death and a join."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_job import (
    FINAL,
    SCRIPTS,
    TrainingJob,
    Workload,
    assert_same_weights,
    train_undisturbed,
)

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "two_loaders.py"
WORKLOAD = Workload(samples=300, epochs=6, step_s=0.6)


def test_two_loaders_yield_the_samples_of_an_undisturbed_run(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"last_call_s": 1.0},
    ) as job:
        nodes = job.start_nodes(3)
        generation = job.wait_training(nodes=3)
        first = job.node_of_rank(0)
        others = {pid(node) for node in nodes if node is not first}

        first.kill_worker()
        job.wait_training(nodes=3, after_generation=generation)
        assert {pid(node) for node in nodes if node is not first} == others

        survivors = job.running
        job.hurry()
        job.wait_for(lambda: not job.running or None, PATIENCE_S, "the end of the job")
        assert {node.exit_code for node in survivors} == {0}, job.report()
        job.ledger().final_hash()
    alone = train_undisturbed(tmp_path / "alone", WORKLOAD, SCRIPT)
    assert_same_weights(job.folder / FINAL, alone)


def pid(node: LocalNode) -> int:
    return node.workers()[0].pid
