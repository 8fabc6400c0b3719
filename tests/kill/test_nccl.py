"""A peer dies on NCCL while the host has queued this step and the next: no parameter may change.

Also for a sharded model: its replicas continue while the communicators across them are aborted.

See docs/explanation/protocol.md, section 6. Work queued behind a collective runs when the group is
aborted: an update on half-reduced gradients would show in the final weights.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import shared_gpu
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd

GPUS = torch.cuda.device_count()
# With one GPU, all ranks share it.
ENV = {shared_gpu.SWITCH: "1"} if GPUS == 1 else {}
KILLS = 10
# Long enough for all kills; the learning rate is stable for that width.
WORKLOAD = Workload(
    samples=2000, batch=100, epochs=100, step_s=0.02, extra=("--width=4096", "--lr=0.0002")
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS == 0, reason="torch.cuda.is_available() is false here"),
]


def test_deaths_in_queued_steps_change_no_parameter(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    rng = random.Random(0)
    with TrainingJob(
        [etcd.endpoint], tmp_path / "job", workload=WORKLOAD, min_nodes=1, max_nodes=2
    ) as job:

        def start(gpu: int) -> None:
            job.start_node(f"gpu{gpu}", env={"CUDA_VISIBLE_DEVICES": str(gpu % GPUS), **ENV})

        start(0)
        start(1)
        for _ in range(KILLS):
            generation = job.wait_training(nodes=2)
            job.wait_progress(rng.randrange(1, 20))
            gpu = rng.randrange(2)
            job.node(f"gpu{gpu}").kill()
            job.wait_training(nodes=1, after_generation=generation)
            start(gpu)
            job.wait_training(nodes=2, after_generation=generation)
        alone = train_undisturbed(tmp_path / "alone", WORKLOAD)
        job.assert_finishes_whole(alone, timeout_s=300.0)


# As many ranks as there are GPUs, in two replicas, one on each node.
RANKS = max(2, GPUS // 2)
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
SHARDED = Workload(
    samples=480,
    batch=24,
    epochs=40,
    step_s=0.02,
    extra=(f"--example={EXAMPLE}", "--width=256", "--layers=4", "--precision=fp64"),
)


def test_deaths_in_replicas_change_no_parameter(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    rng, script = random.Random(0), SCRIPTS / "paced_run.py"
    sharded = replace(SHARDED, extra=(*SHARDED.extra, f"--shard={RANKS}"))
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=script,
        workload=sharded,
        nproc=RANKS,
        min_nodes=1,
        max_nodes=2,
    ) as job:
        for node in range(2):
            gpus = {gpu % GPUS for gpu in range(node * RANKS, (node + 1) * RANKS)}
            visible = ",".join(map(str, sorted(gpus)))
            job.start_node(f"node{node}", env={"CUDA_VISIBLE_DEVICES": visible, **ENV})
        for _ in range(KILLS):
            generation = job.wait_training(nodes=2)
            job.wait_progress(rng.randrange(1, 20))
            rng.choice(job.running).kill_worker(rng.randrange(RANKS))
            job.wait_training(nodes=2, after_generation=generation)
        undisturbed = replace(SHARDED, extra=(*SHARDED.extra, "--shard=1"))
        alone = train_undisturbed(tmp_path / "alone", undisturbed, script)
        job.assert_finishes_whole(alone, timeout_s=300.0)
