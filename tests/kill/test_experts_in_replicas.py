"""Replicas with expert parallelism: ranks with different experts die, and one replica continues."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "paced_run.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "experts.py"
# Float64: a difference in the final weights above 1e-12 was lost, repeated or torn.
WORKLOAD = Workload(
    samples=250,
    batch=22,  # uneven shares
    epochs=4,
    step_s=0.8,
    save_every=5,
    extra=(f"--example={EXAMPLE}",),
)


def pids(node: LocalNode) -> list[int]:
    return [worker.pid for _, worker in sorted(node.workers().items())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All experts in one process."""
    alone = replace(WORKLOAD, extra=(*WORKLOAD.extra, "--ranks=1"))
    return train_undisturbed(tmp_path_factory.mktemp("experts-alone"), alone, SCRIPT)


def test_experts_survive_deaths_of_a_rank_and_of_all_replicas(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path
) -> None:
    """Each of two nodes is a replica, whose two ranks have different experts."""
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", script=SCRIPT, workload=WORKLOAD, nproc=2, max_nodes=2
    ) as job:
        survivor, harmed = job.start_nodes(2)
        generation = job.wait_training(nodes=2)
        before, replaced = pids(survivor), pids(harmed)
        harmed.kill_worker(1)
        job.wait_for(
            lambda: len(set(pids(harmed)) - set(replaced)) == len(replaced),
            PATIENCE_S,
            "new ranks of the whole replica",
        )
        generation = job.wait_training(nodes=2, after_generation=generation)
        assert pids(survivor) == before
        assert {e["source"] for e in job.journaled("state-restored")} == {"initial"}
        job.wait_event("checkpoint-saved")
        for node in (survivor, harmed):
            os.kill(pids(node)[0], signal.SIGKILL)
        job.wait_for(
            lambda: any(e["source"] != "initial" for e in job.journaled("state-restored")),
            PATIENCE_S,
            "a resume from a checkpoint",
        )
        job.wait_training(nodes=2, after_generation=generation)
        job.assert_finishes_whole(undisturbed, stages=2)
