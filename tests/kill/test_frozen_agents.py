"""An agent freezes and its workers do not: nobody trains beside the world that takes over."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from training_job import PLAIN, SESSION, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded.etcd import EmbeddedEtcd

pytestmark = pytest.mark.cluster

WORKLOAD = Workload(samples=500, epochs=40, step_s=0.4)
LEASE_S = 2.0
TAKEOVER_S = 14.0
# What the unmodified script takes for a job of one process.
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


@pytest.mark.parametrize("script", [SESSION, PLAIN], ids=["in-process", "unmodified"])
def test_workers_of_a_frozen_agent_stop_before_another_world_takes_over(
    etcd: EmbeddedEtcd, tmp_path: Path, script: Path
) -> None:
    (tmp_path / "alone").mkdir()
    reference = train_undisturbed(
        tmp_path / "alone", WORKLOAD, script, ALONE if script is PLAIN else None
    )
    conf = {"lease_s": LEASE_S, "takeover_s": TAKEOVER_S, "last_call_s": 1.0}
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=script,
        workload=WORKLOAD,
        min_nodes=1,
        max_nodes=2,
        conf=conf,
    ) as job:
        frozen = job.start_node()
        generation = job.wait_training(nodes=1)
        job.wait_progress(12)  # past a checkpoint
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            other = job.start_node()
            taken_over = job.wait_training(nodes=1, after_generation=generation)
            assert job.training_nodes()[1] == {other.name}
            job.wait_progress(3)
            job.ledger().assert_one_world_at_a_time()
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        job.wait_training(nodes=2, after_generation=taken_over)
        assert frozen.running
        job.assert_finishes_whole(reference)
