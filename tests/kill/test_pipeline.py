"""Replicas of a pipeline: ranks of different stages die, and one replica continues in process."""

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
EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
# Float64: a difference in the final weights above 1e-12 was lost, repeated or torn.
WORKLOAD = Workload(
    samples=250,
    batch=22,  # uneven shares and micro-batches
    epochs=4,
    step_s=0.8,
    save_every=5,
    extra=(f"--example={EXAMPLE}",),
)


def pids(node: LocalNode) -> list[int]:
    return [worker.pid for _, worker in sorted(node.workers().items())]


def wait_replaced(job: TrainingJob, node: LocalNode, before: list[int]) -> None:
    job.wait_for(
        lambda: len(set(pids(node)) - set(before)) == len(before),
        PATIENCE_S,
        "new ranks of the whole replica",
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model in one process."""
    alone = replace(WORKLOAD, extra=(*WORKLOAD.extra, "--stages=1"))
    return train_undisturbed(tmp_path_factory.mktemp("pipeline-alone"), alone, SCRIPT)


def test_two_pipelines_survive_deaths_on_each_stage_and_of_all(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path
) -> None:
    """Each of two nodes is a replica of two stages."""
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", script=SCRIPT, workload=WORKLOAD, nproc=2, max_nodes=2
    ) as job:
        one, other = job.start_nodes(2)
        generation = job.wait_training(nodes=2)
        for harmed, survivor, rank in ((one, other, 1), (other, one, 0)):
            before, replaced = pids(survivor), pids(harmed)
            harmed.kill_worker(rank)
            wait_replaced(job, harmed, replaced)
            generation = job.wait_training(nodes=2, after_generation=generation)
            assert pids(survivor) == before
        assert {e["source"] for e in job.journaled("state-restored")} == {"initial"}
        job.wait_event("checkpoint-saved")
        for node in (one, other):
            os.kill(pids(node)[1], signal.SIGKILL)
        job.wait_for(
            lambda: any(e["source"] != "initial" for e in job.journaled("state-restored")),
            PATIENCE_S,
            "a resume from a checkpoint",
        )
        job.wait_training(nodes=2, after_generation=generation)
        job.assert_finishes_whole(undisturbed, stages=2)
